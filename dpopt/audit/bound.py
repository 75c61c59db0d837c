"""What an attack has shown."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from scipy import stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """A lower bound on epsilon, and what was counted for it; made by `one_run_bound` and `many_runs_bound`.

    Attributes:
        epsilon: the bound; 0 where the attack shows nothing.
        delta: the delta that it holds at.
        significance: the probability that a sound run's bound exceeds its epsilon, at most.
        method: ``"one run"`` or ``"many runs"``.
        trials: canaries of the one run, or runs.
        guesses, right: how many guesses were made and counted, and how many were right.
        false_positive_rate, true_positive_rate: of many runs, the largest and the smallest that the counts leave
            possible, both at once. None for one run, whose canaries are not independent of each other.
        ceiling: of one run, the bound that scores would have given which tell its coins without error; None of many.
        roc: empirical false and true positive rates at all thresholds, ``(n,)`` each, for a plot.

    >>> Bound(epsilon=1.0, delta=0.0, significance=0.05, method="one run", trials=9, guesses=9, right=9).confidence
    0.95
    """

    epsilon: float
    delta: float
    significance: float
    method: str
    trials: int
    guesses: int
    right: int
    false_positive_rate: float | None = None
    true_positive_rate: float | None = None
    ceiling: float | None = None
    roc: tuple[np.ndarray, np.ndarray] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def confidence(self) -> float:
        """One less `significance`."""
        return 1 - self.significance


def clopper_pearson(right: Any, present: int, wrong: Any, absent: int, significance: float) -> tuple[Any, Any]:
    """The least rate of right and the largest of wrong guesses, each with half of the significance.

    Args:
        right, present: how many of the runs with a canary were guessed to have it, of how many.
        wrong, absent: how many of those without. Counts of right and wrong guesses may be arrays of several tests.
        significance: the probability that the two rates of a test are not both within their bounds, at most.

    >>> least, most = clopper_pearson(90, 100, 10, 100, 0.05)
    >>> round(float(least), 2), round(float(most), 2)
    (0.82, 0.18)
    """
    right, wrong = np.asarray(right), np.asarray(wrong)
    least = stats.beta.ppf(significance / 2, np.maximum(right, 1), present - np.maximum(right, 1) + 1)
    most = stats.beta.ppf(1 - significance / 2, wrong + 1, np.maximum(absent - wrong, 1))
    return np.where(right > 0, least, 0.0), np.where(wrong < absent, most, 1.0)


def epsilon_of_rates(least: float, most: float, delta: float) -> float:
    """The epsilon at ``delta`` that a test with these rates of right and wrong guesses refutes; 0 for none.

    >>> round(epsilon_of_rates(0.9, 0.1, 0.0), 2)
    2.2
    """
    return max(0.0, math.log((least - delta) / most)) if least > delta else 0.0


def roc(scores: np.ndarray, included: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Empirical false and true positive rates of the guess "in" above every threshold, from the highest down.

    >>> [rates.tolist() for rates in roc(np.array([3.0, 2.0, 1.0]), np.array([True, False, True]))]
    [[0.0, 0.0, 1.0, 1.0], [0.0, 0.5, 0.5, 1.0]]
    """
    order = np.argsort(-scores, kind="stable")
    last_of_equals = np.append(scores[order][1:] != scores[order][:-1], True)
    counts = [np.cumsum(kind[order])[last_of_equals] for kind in (~included, included)]
    false, true = (np.concatenate([[0], count]) / max(1, count[-1]) for count in counts)
    return false, true
