"""Diagonals that every gradient is multiplied by before the clip: given, from public gradients, or DP2's."""
