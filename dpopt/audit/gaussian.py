"""What an attack says of mu, where the run is taken for a Gaussian mechanism: bounds, and an estimate.

A run is mu-Gaussian-DP if telling two neighbouring data sets apart is no easier than telling N(0, 1) from N(mu, 1)
(Dong, Roth and Su 2022). Full batches are exactly that, many small Poisson samples nearly. A bound on mu refutes a
claim of that kind at all deltas at once. As an epsilon at one small delta it is far stronger than what counts alone
show, and holds only as far as the run is Gaussian.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
from scipy import optimize, special, stats

from dpopt import accounting
from dpopt.audit import _checks
from dpopt.audit.many_runs import chosen_threshold, counted, halves
from dpopt.audit.one_run import Guesses, default_guesses, right_guesses
from dpopt.common.lazy import dp_accounting


def epsilon_of_mu(mu: float, *, delta: float) -> float:
    """Epsilon at delta of mu-Gaussian-DP.

    >>> round(epsilon_of_mu(1.0, delta=1e-5), 2)
    4.38
    """
    return accounting.epsilon_of_event(dp_accounting.GaussianDpEvent(1 / mu), delta=delta) if mu > 0 else 0.0


def refutes_mu(mu: float, *, right: int, guesses: int, canaries: int, significance: float) -> bool:
    """Whether so many right guesses in one run refute mu-Gaussian-DP.

    Args:
        mu: the claim.
        right, guesses, canaries: see `one_run_p_value`.
        significance: the probability of a refutation that is wrong, at most.

    Reference: Mahloujifar, Melis and Chaudhuri (2024), Auditing f-Differential Privacy in One Run, Algorithm 3,
    https://arxiv.org/abs/2410.22235.

    >>> refutes_mu(1.0, right=100, guesses=100, canaries=1_000, significance=0.05)
    True
    """
    r, h = significance * right / canaries, significance * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        h_next = max(h, special.ndtr(special.ndtri(r) - mu))
        if h_next == h:
            break
        r, h = min(r + i / (guesses - i) * (h_next - h), 1.0), h_next
    return bool(r + h > guesses / canaries)


def one_run_mu(scores: Any, included: Any, *, significance: float = 0.05, guesses: Guesses | None = None) -> float:
    """The largest mu that one run with many canaries refutes; 0 for none.

    Arguments and errors are those of `one_run_bound`.

    >>> rng = np.random.default_rng(0)
    >>> included = rng.random(1_000) < 0.5
    >>> 0.5 < one_run_mu(2.0 * included + rng.normal(size=1_000), included) < 2
    True
    """
    scores, included = _checks.scores_and_coins(scores, included)
    _checks.significance(significance)
    pairs = default_guesses(len(scores)) if guesses is None else _checks.guesses(guesses)
    best = 0.0
    for guesses_in, guesses_out in pairs:
        counts: dict[str, Any] = dict(
            right=right_guesses(scores, included, guesses_in, guesses_out),
            guesses=guesses_in + guesses_out,
            canaries=len(scores),
            significance=significance / len(pairs),
        )
        if not refutes_mu(0.0, **counts):
            continue
        low, high = 0.0, 1.0
        while refutes_mu(high, **counts) and high < 1e3:
            low, high = high, 2 * high
        crossing = optimize.bisect(lambda mu, c=counts: refutes_mu(mu, **c) - 0.5, low, high, xtol=1e-3)
        best = max(best, cast(float, crossing) - 1e-3)
    return best


def many_runs_mu(scores: Any, included: Any, *, significance: float = 0.05) -> float:
    r"""The largest mu that independent runs with a canary each refute; 0 for none.

    Half of the runs choose a threshold, the others are counted. Under mu-Gaussian-DP every test has
    :math:`\mu \ge \Phi^{-1}(\mathrm{TPR}) - \Phi^{-1}(\mathrm{FPR})`; both rates get a Clopper-Pearson bound.
    Arguments and errors are those of `many_runs_bound`.

    Reference: Nasr et al. (2023), Tight Auditing of Differentially Private Machine Learning,
    https://arxiv.org/abs/2302.07956.

    >>> rng = np.random.default_rng(0)
    >>> included = rng.random(2_000) < 0.5
    >>> 1.5 < many_runs_mu(2.0 * included + rng.normal(size=2_000), included) < 2.5
    True
    """
    scores, included = _checks.scores_and_coins(scores, included)
    _checks.significance(significance)
    first, second = halves(scores, included)
    threshold = chosen_threshold(*first, _mu_of_rates, significance, np.linspace(0.05, 0.95, 37))
    return _mu_of_rates(*counted(*second, threshold, significance))


def _mu_of_rates(least: float, most: float) -> float:
    return max(0.0, float(special.ndtri(least) - special.ndtri(most)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GaussianEstimate:
    """A guess at how private a run is, if it is a Gaussian mechanism; made by `gaussian_estimate`. Not a bound.

    Attributes:
        mu, epsilon: the estimate, epsilon at `delta`.
        interval: of epsilon, by the bootstrap: how far the estimate would vary over other runs.
        delta: the delta of `epsilon`.
        confidence: of the interval, nominal.

    >>> GaussianEstimate(mu=1.0, epsilon=4.4, interval=(4.0, 4.8), delta=1e-5, confidence=0.95).epsilon
    4.4
    """

    mu: float
    epsilon: float
    interval: tuple[float, float]
    delta: float
    confidence: float


def gaussian_estimate(
    scores: Any, included: Any, *, delta: float, significance: float = 0.05, resamples: int = 1_000, seed: int = 0
) -> GaussianEstimate:
    r"""Estimates epsilon from many runs, under the assumption that the run is a Gaussian mechanism.

    With A the probability that a run with the canary scores higher than one without, a Gaussian mechanism has
    :math:`\mu = \sqrt 2\, \Phi^{-1}(A)`, whatever increasing function of it the score is. The interval is that of the
    percentile bootstrap over runs. Neither is a lower bound: the estimate is above the truth about half of the time,
    and means little where the mechanism is not Gaussian.

    Args:
        scores, included: see `many_runs_bound`.
        delta: where epsilon is stated.
        significance: one less the nominal confidence of the interval.
        resamples, seed: of the bootstrap.

    Raises:
        ValueError, TypeError: see `many_runs_bound`; or if all runs are of one kind.

    Reference: Nasr et al. (2023), Tight Auditing of Differentially Private Machine Learning, who fit mu, too.

    >>> rng = np.random.default_rng(0)
    >>> included = rng.random(2_000) < 0.5
    >>> estimate = gaussian_estimate(rng.normal(size=2_000) + included, included, delta=1e-5)
    >>> 0.8 < estimate.mu < 1.2 and estimate.interval[0] < estimate.epsilon < estimate.interval[1]
    True
    """
    scores, included = _checks.scores_and_coins(scores, included)
    _checks.significance(significance)
    present, absent = scores[included], scores[~included]
    if min(len(present), len(absent)) < 2:
        raise ValueError("an estimate takes at least two runs with the canary and two without.")
    found = stats.bootstrap(
        (present, absent),
        _mu_of_order,
        n_resamples=resamples,
        vectorized=False,
        confidence_level=1 - significance,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    mu = _mu_of_order(present, absent)
    low, high = (epsilon_of_mu(float(end), delta=delta) for end in found)
    return GaussianEstimate(
        mu=mu,
        epsilon=epsilon_of_mu(mu, delta=delta),
        interval=(low, high),
        delta=delta,
        confidence=1 - significance,
    )


def _mu_of_order(present: np.ndarray, absent: np.ndarray) -> float:
    pairs = len(present) * len(absent)
    ranks = stats.rankdata(np.concatenate([present, absent]))
    area = (ranks[: len(present)].sum() - len(present) * (len(present) + 1) / 2) / pairs
    area = min(area, 1 - 0.5 / pairs)  # runs that are told apart without fail leave mu open; this much they show
    return max(0.0, float(np.sqrt(2) * special.ndtri(area))) if area > 0 else 0.0
