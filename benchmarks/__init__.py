"""Benchmarks of dpopt: ``python -m benchmarks --help``."""
