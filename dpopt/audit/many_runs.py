"""A lower bound on epsilon from many runs with one canary, which a coin put into the data of each or left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from scipy import special

from dpopt import trade_off
from dpopt.audit import _checks
from dpopt.audit.bound import Bound, clopper_pearson, epsilon_of_rates, roc
from dpopt.common.lazy import dp_accounting

Worth: TypeAlias = Callable[[float, float], float]  # of a test, from the bounds on its rates (`counted`)

THRESHOLDS = (*np.linspace(0.01, 0.99, 50), 0.995)


def counted(scores: np.ndarray, included: np.ndarray, thresholds: Any, significance: float) -> tuple[Any, Any]:
    """Bounds on the rates of the guess "in" above each threshold: right at least, wrong at most (`clopper_pearson`).

    >>> bool(counted(np.array([1.0, 2.0]), np.array([False, True]), 1.5, 0.05)[0] < 0.05)
    True
    """
    present, absent = np.sort(scores[included]), np.sort(scores[~included])
    right = len(present) - np.searchsorted(present, thresholds, side="right")
    wrong = len(absent) - np.searchsorted(absent, thresholds, side="right")
    return clopper_pearson(right, len(present), wrong, len(absent), significance)


def chosen_threshold(
    scores: np.ndarray, included: np.ndarray, worth: Worth, significance: float, quantiles: Any = THRESHOLDS
) -> float:
    """The threshold, of some quantiles of the scores, whose bounds on the rates are worth most.

    >>> scores, included = np.arange(8.0), np.arange(8) > 3
    >>> 3 < chosen_threshold(scores, included, lambda least, most: least - most, 0.05) < 4
    True
    """
    thresholds = np.quantile(scores, quantiles)
    rates = zip(*counted(scores, included, thresholds, significance), strict=True)
    return float(thresholds[np.argmax([worth(float(least), float(most)) for least, most in rates])])


def halves(scores: np.ndarray, included: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The runs that choose a threshold, and those that are counted.

    Raises:
        ValueError: if one of them has runs of one kind only.

    >>> [len(part[0]) for part in halves(np.arange(5.0), np.array([True, False, True, True, False]))]
    [2, 3]
    """
    half = len(scores) // 2
    parts = [(scores[:half], included[:half]), (scores[half:], included[half:])]
    if not all(0 < coins.sum() < len(coins) for _, coins in parts):
        raise ValueError(
            f"of {len(scores)} runs the first half chooses a threshold and the second half is counted, and each needs "
            "runs with the canary and runs without: keep them in the order in which coins were tossed, and make more."
        )
    return parts


def many_runs_bound(
    scores: Any,
    included: Any,
    *,
    delta: float,
    significance: float = 0.05,
    claim: dp_accounting.DpEvent | None = None,
) -> Bound:
    r"""A lower bound on the epsilon of a run at delta, from the scores of many independent runs.

    The first half of the runs chooses a threshold. On the second half the rates of right and wrong guesses above it get
    exact bounds (Clopper and Pearson), which hold together; from them follow, at every delta and all at once,
    :math:`\epsilon \ge \log((\mathrm{TPR} - \delta) / \mathrm{FPR})` and the same for the guess "out".

    Args:
        scores: ``(n,)``, one a run, high where the canary seems to be in its data.
        included: ``(n,)`` bool: as independent coins fell, in that order.
        delta, significance: see `one_run_bound`.
        claim: the event of a run, where the threshold is to be chosen that says most against it (at any delta, and not
            at this one).

    Raises:
        ValueError, TypeError: see `one_run_bound`; or for a half of the runs that are all of one kind.

    Reference: Nasr et al. (2023), Tight Auditing of Differentially Private Machine Learning, for the attack;
    Clopper and Pearson (1934) for the intervals.

    >>> rng = np.random.default_rng(0)
    >>> included = rng.random(2_000) < 0.5
    >>> bound = many_runs_bound(3.0 * included + rng.normal(size=2_000), included, delta=0.05)
    >>> 2 < bound.epsilon < 6
    True
    """
    scores, included = _checks.scores_and_coins(scores, included)
    _checks.significance(significance)
    delta = _checks.delta(delta)
    first, second = halves(scores, included)

    def epsilon(least: float, most: float) -> float:
        return max(epsilon_of_rates(least, most, delta), epsilon_of_rates(1 - most, 1 - least, delta))

    threshold = chosen_threshold(*first, epsilon if claim is None else _excess_over(claim), significance)
    least, most = map(float, counted(*second, threshold, significance))
    scores, included = second
    return Bound(
        epsilon=epsilon(least, most),
        delta=delta,
        significance=significance,
        method="many runs",
        trials=len(first[0]) + len(scores),
        guesses=len(scores),
        right=int(np.sum((scores > threshold) == included)),
        false_positive_rate=most,
        true_positive_rate=least,
        roc=roc(scores, included),
    )


def _excess_over(claim: dp_accounting.DpEvent) -> Worth:
    """By how much a test detects more than an event allows, in standard deviations of a Gaussian test."""
    grid = np.concatenate([[0], np.geomspace(1e-6, 1, 400)])
    curve = trade_off.true_positive_rates(claim, grid)
    return lambda least, most: float(special.ndtri(least) - special.ndtri(np.interp(most, grid, curve)))
