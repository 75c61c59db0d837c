"""More sampling schemes than in `dpopt.sampling`: data divided into parts, and truncated Poisson samples."""
