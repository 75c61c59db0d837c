"""Helpers for the whole package: argument checks, pytrees, names, averages, lazy imports, shared types."""
