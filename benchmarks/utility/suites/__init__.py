"""The suites: which settings each table consists of, and the figures that were published."""
