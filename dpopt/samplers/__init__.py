"""Sampling schemes besides those of `dpopt.sampling`: the data in parts, and Poisson samples that are cut."""
