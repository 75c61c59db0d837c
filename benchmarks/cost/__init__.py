"""Time and memory of a clipped gradient, compared with the ordinary gradient and with other libraries."""
