"""Time and memory of a clipped gradient, beside the ordinary one and other libraries."""
