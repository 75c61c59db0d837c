"""Diagonals before the clip: fixed ones, those from public or the last private gradients, and that of DP2."""
