"""What is asked of scores and of coins, by every estimate."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def scores_and_coins(scores: Any, included: Any) -> tuple[np.ndarray, np.ndarray]:
    """Scores as float64 and coins as bool, both ``(n,)``."""
    scores, included = np.asarray(scores, np.float64), np.asarray(included)
    if scores.ndim != 1 or scores.shape != included.shape or not len(scores):
        raise ValueError(
            f"scores and included must be rows of the same length, one entry a canary or a run; got shapes "
            f"{scores.shape} and {included.shape}."
        )
    if included.dtype != bool:
        raise TypeError(f"included must be boolean, as the coins fell; got dtype {included.dtype}. Write included > 0.")
    if np.isnan(scores).any():
        raise ValueError(
            f"{np.isnan(scores).sum()} of {len(scores)} scores are NaN and cannot be ordered. Where a run diverged, "
            "lower its learning rate or the length of the canaries; a score that you made up for such a run before "
            "looking at the coins (say, -inf) is allowed, too."
        )
    if np.isinf(scores).any():  # between which no threshold can be taken
        # Only the order matters, and each score keeps it by itself: ranks would depend on scores that are yet to count.
        finite = np.copysign(np.log1p(np.abs(scores)), scores)
        scores = np.where(np.isinf(scores), np.copysign(1_000.0, scores), finite)  # log of the largest float64: 710
    return scores, included


def guesses(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Numbers of guesses to try, at least one pair."""
    pairs = list(pairs)
    if not pairs:
        raise ValueError("guesses is empty: give at least one pair (guesses in, guesses out).")
    return pairs


def significance(value: float) -> None:
    """A probability of error, in (0, 0.5)."""
    if not isinstance(value, float) or not 0 < value < 0.5:
        raise ValueError(f"significance, the probability of a wrong bound, must lie in (0, 0.5); got {value!r}.")


def delta(value: float) -> float:
    """Delta, in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"delta must lie in [0, 1); got {value!r}.")
    return float(value)
