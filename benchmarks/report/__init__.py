"""RESULTS.md, its plots, and the figures of README and docs, from the recorded JSON."""
