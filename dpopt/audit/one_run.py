"""A lower bound on epsilon from one run with many canaries, each of which a coin put into the data or left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from scipy import special, stats

from dpopt.audit import _checks
from dpopt.audit.bound import Bound, roc

Guesses: TypeAlias = Sequence[tuple[int, int]]  # how many guesses "in" and how many "out": pairs to choose from

# Shares of the canaries that are guessed "in" and "out" if the caller fixes none. Few guesses show most where scores
# are well told apart only in the tails, many where a build is broken; and where a canary that is in may never have
# been sampled, only the guess "in" can be sure.
SHARES = ((0.03, 0.0), (0.1, 0.0), (0.4, 0.0), (0.05, 0.05), (0.15, 0.15), (0.5, 0.5))


def right_guesses(scores: Any, included: Any, guesses_in: int, guesses_out: int) -> int:
    """Guesses "in" for the highest and "out" for the lowest scores, and counts what is right.

    Args:
        scores, included: see `one_run_bound`.
        guesses_in, guesses_out: how many canaries to guess on, at most m together.

    Raises:
        ValueError, TypeError: for scores that are NaN, shapes that differ, or more guesses than canaries.

    >>> right_guesses([0.1, 3.0, 2.0, -1.0], np.array([True, True, False, False]), 1, 1)
    2
    """
    scores, included = _checks.scores_and_coins(scores, included)
    if min(guesses_in, guesses_out) < 0 or guesses_in + guesses_out > len(scores):
        raise ValueError(f"{guesses_in} and {guesses_out} guesses do not fit {len(scores)} canaries.")
    # Equal scores are ordered at random: in the order given, canaries that are in may come first.
    lots = np.random.default_rng(0).permutation(len(scores))
    order = np.lexsort((lots, scores))
    lowest, highest = order[:guesses_out], order[len(scores) - guesses_in :]
    return int(np.sum(~included[lowest]) + np.sum(included[highest]))


def one_run_p_value(*, right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    r"""The probability, at most, of so many right guesses if the run is (epsilon, delta)-differentially private.

    With :math:`W` binomial of r guesses at :math:`q = e^\epsilon / (1 + e^\epsilon)` and v right guesses it is
    :math:`\Pr[W \ge v] + 2 m \delta \max_i \Pr[v - i \le W < v] / i`.

    Args:
        right: v, of `guesses`.
        guesses: r, a number fixed before the run.
        canaries: m, all of those on which a coin decided.
        epsilon, delta: the claim, under add-or-remove-one.

    Raises:
        ValueError: for numbers that do not fit each other.

    Reference: Steinke, Nasr and Jagielski (2023), Privacy Auditing with One (1) Training Run, Theorem 5.2,
    https://arxiv.org/abs/2305.08846.

    >>> round(one_run_p_value(right=75, guesses=100, canaries=1_000, epsilon=0.5, delta=1e-5), 4)
    0.0058
    """
    if not 0 <= right <= guesses <= canaries or canaries < 1:
        raise ValueError(f"{right} right of {guesses} guesses on {canaries} canaries cannot be.")
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be non-negative; got {epsilon!r}.")
    delta = _checks.delta(delta)
    # Counted are the wrong guesses, whose probability keeps its digits where that of right ones is rounded to 1.
    wrong, probability = guesses - right, special.expit(-epsilon)
    tail = float(stats.binom.cdf(wrong, guesses, probability))
    if delta == 0 or right == 0:
        return tail
    below = np.logaddexp.accumulate(stats.binom.logpmf(np.arange(wrong + 1, guesses + 1), guesses, probability))
    steepest = np.max(below - np.log(np.arange(1, right + 1)))
    return min(1.0, tail + float(np.exp(np.log(2 * canaries) + np.log(delta) + steepest)))


def one_run_epsilon(*, right: int, guesses: int, canaries: int, delta: float, significance: float) -> float:
    """The largest epsilon that so many right guesses refute, by `one_run_p_value`; 0 for none.

    Args:
        right, guesses, canaries, delta: see `one_run_p_value`.
        significance: the probability of a wrong bound, in (0, 0.5).

    Raises:
        ValueError: for an argument out of range.

    >>> round(one_run_epsilon(right=100, guesses=100, canaries=100, delta=0.0, significance=0.05), 3)
    3.493
    """
    _checks.significance(significance)

    def is_refuted(epsilon: float) -> bool:
        counts = {"right": right, "guesses": guesses, "canaries": canaries}
        return one_run_p_value(**counts, epsilon=epsilon, delta=delta) <= significance

    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while is_refuted(high):  # ends: at an infinite epsilon every guess is right
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


def one_run_bound(
    scores: Any, included: Any, *, delta: float, significance: float = 0.05, guesses: Guesses | None = None
) -> Bound:
    """A lower bound on the epsilon of a run at delta, from its canaries' scores.

    The attacker guesses that the canaries with the highest scores were in the data, and that those with the lowest
    were not. On how many he guesses must be fixed before the run; where several numbers are given, the best counts, and
    each pays its share of the significance.

    Args:
        scores: ``(m,)``, one a canary, high where it seems to be in the data; `Planted.scores`, or your own. A score
            may depend on all that was released and on all canaries, but on no coin.
        included: ``(m,)`` bool: where the coins, each fair and independent, put a canary into the data.
        delta: fixed before the run.
        significance: the probability that a sound run's bound exceeds its epsilon, at most.
        guesses: pairs of how many guesses "in" and how many "out" to make; None for `SHARES` of the canaries.

    Raises:
        ValueError, TypeError: for scores that are NaN, shapes that differ, coins that are not boolean, or a number out
            of range.

    Reference: Steinke, Nasr and Jagielski (2023), Privacy Auditing with One (1) Training Run.

    >>> rng = np.random.default_rng(0)
    >>> included = rng.random(1_000) < 0.5
    >>> bound = one_run_bound(3.0 * included + rng.normal(size=1_000), included, delta=1e-5)
    >>> 2 < bound.epsilon < 5
    True
    """
    scores, included = _checks.scores_and_coins(scores, included)
    _checks.significance(significance)
    canaries = len(scores)
    pairs = default_guesses(canaries) if guesses is None else _checks.guesses(guesses)
    counts = [(right_guesses(scores, included, k_in, k_out), k_in + k_out) for k_in, k_out in pairs]
    delta, share = _checks.delta(delta), significance / len(pairs)

    def shown(right: int, number: int) -> float:
        return one_run_epsilon(right=right, guesses=number, canaries=canaries, delta=delta, significance=share)

    epsilons = [shown(right, number) for right, number in counts]
    best = int(np.argmax(epsilons))
    right, number = counts[best]
    return Bound(
        epsilon=epsilons[best],
        delta=delta,
        significance=significance,
        method="one run",
        trials=canaries,
        guesses=number,
        right=right,
        ceiling=max(shown(right_guesses(included, included, *pair), sum(pair)) for pair in pairs),
        roc=roc(scores, included),
    )


def default_guesses(canaries: int) -> list[tuple[int, int]]:
    """Pairs of guesses "in" and "out" for `SHARES` of so many canaries.

    >>> default_guesses(100)
    [(3, 0), (5, 5), (10, 0), (15, 15), (40, 0), (50, 50)]
    """
    pairs = {(max(1, round(k_in * canaries)), round(k_out * canaries)) for k_in, k_out in SHARES}
    return sorted((k_in, min(k_out, canaries - k_in)) for k_in, k_out in pairs)
