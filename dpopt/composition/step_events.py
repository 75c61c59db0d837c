"""Steps of a composition as bounds on epsilon take them: made few by rounding, and taken apart into sampled queries."""

from __future__ import annotations

import math
from collections import Counter
from typing import TypeAlias, cast

from dpopt.common.lazy import dp_accounting as dp

Steps: TypeAlias = "Counter[dp.DpEvent]"

# More than FEW different steps are rounded towards less privacy, onto a grid of ratio 1.001, or coarser until at most
# MOST are different. The grid is the same for every run, so that neighbouring questions find their answers kept.
FEW, MOST, _RATIO = 32, 400, 1 + 2.0**-10
_MOST_CUT = 64  # of truncated samples, which take two curves and grids each, and again with one example more
NEVER = 1e-100  # a probability that even what is charged for rounding a step pays for many times over


def rounded(steps: Steps) -> Steps:
    """Few different steps that together cost no less: noise is rounded down, sampling probabilities are rounded up.

    Less noise is the same query before some post-processing, and a smaller sample is a mixture of a larger one and of
    none at all, so each rounded step dominates the step it stands for.
    """
    selections: Steps = Counter({e: n for e, n in steps.items() if isinstance(e, dp.dp_event.RepeatAndSelectDpEvent)})
    return selections + _rounded(steps - selections)  # the runs that are selected from are rounded by themselves


def _rounded(steps: Steps) -> Steps:
    schemes = {with_noise(event, 1.0) for event in steps}
    result, spacing = steps, math.log(_RATIO)
    most = _MOST_CUT if any(isinstance(e, dp.TruncatedSubsampledGaussianDpEvent) for e in steps) else MOST
    while len(result) > (FEW if result is steps else most):
        result = Counter()
        for event, count in steps.items():
            sigma = _down(noise(event), spacing)
            if len(schemes) > FEW and isinstance(event, dp.PoissonSampledDpEvent):
                event = dp.PoissonSampledDpEvent(1 / _down(1 / event.sampling_probability, spacing), event.event)
            result[with_noise(event, sigma)] += count
        if not any(isinstance(event, dp.PoissonSampledDpEvent) for event in result) and len(result) <= len(schemes):
            break  # samples of as many sizes: these are not rounded
        spacing *= math.sqrt(2)
    return result


def _down(value: float, spacing: float) -> float:
    return min(value, math.exp(spacing * math.floor(math.log(value) / spacing)))


def noise(event: dp.DpEvent) -> float:
    """The noise multiplier of a step."""
    return cast(dp.GaussianDpEvent, getattr(event, "event", event)).noise_multiplier


def with_noise(event: dp.DpEvent, sigma: float) -> dp.DpEvent:
    """The same step with another noise multiplier."""
    inner = dp.GaussianDpEvent(sigma)
    match event:
        case dp.TruncatedSubsampledGaussianDpEvent(dataset_size=n, sampling_probability=q, truncated_batch_size=b):
            return dp.TruncatedSubsampledGaussianDpEvent(n, q, b, sigma)
        case dp.PoissonSampledDpEvent(sampling_probability=q):
            return dp.PoissonSampledDpEvent(q, inner)
        case dp.SampledWithoutReplacementDpEvent(source_dataset_size=n, sample_size=b):
            return dp.SampledWithoutReplacementDpEvent(n, b, inner)
    return inner


def alternatives(event: dp.DpEvent) -> list[tuple[float, float, float]]:
    r"""Sampled Gaussian queries that a step is at worst a known choice of: weight, sampling probability, noise.

    A truncated Poisson sample is two. Where fewer than B others are drawn, nothing is cut. Otherwise, with probability
    :math:`\tau`, the sample is a random B of them, and with probability q' the example is in it in place of one of
    those: at distance 2, which is half of the noise. Neither the B nor which one it replaces depend on q', so the pair
    is no easier to tell apart than :math:`(1 - q') N(0, \sigma^2) + q' N(2, \sigma^2)` and :math:`N(0, \sigma^2)`.
    """
    if not isinstance(event, dp.TruncatedSubsampledGaussianDpEvent):
        return [(1.0, *sampled_gaussian(event))]
    q, sigma, full = event.sampling_probability, event.noise_multiplier, cut_beside(event)
    n, most = event.dataset_size, event.truncated_batch_size
    own = q  # which it is below; what floats can hold of the quotient is not enough where samples are never cut
    if full > NEVER:  # of the samples that the example is in and that are cut, over those that are full
        own = float(_binomial().sf(most, n, q)) * most / n / full
        # Rounded up, so that data of one example more mostly ask for the same curve.
        own = min(q, 1 / _down(1 / own, math.log(_RATIO)))
    parts = [(1 - full, q, sigma), (full, own, sigma / 2)]
    return [part for part in parts if part[0] > 0]


def cut_beside(event: dp.TruncatedSubsampledGaussianDpEvent) -> float:
    """The probability that a sample is full without a given example, so that it would be cut with it."""
    return float(_binomial().sf(event.truncated_batch_size - 1, event.dataset_size - 1, event.sampling_probability))


def _binomial():
    from scipy import stats  # takes a while, and few need it

    return stats.binom


def sampled_gaussian(event: dp.DpEvent) -> tuple[float, float]:
    """Probability of being sampled and noise multiplier of a step: a Gaussian query, Poisson sampled or not."""
    return getattr(event, "sampling_probability", 1.0), noise(event)
