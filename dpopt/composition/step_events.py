"""Step events of a composition: rounding to fewer different ones, and splitting into sampled Gaussian queries."""

from __future__ import annotations

import math
from collections import Counter
from typing import TypeAlias, cast

from dpopt.common.lazy import dp_accounting as dp

Steps: TypeAlias = "Counter[dp.DpEvent]"

# More than FEW different steps are rounded towards less privacy, on a geometric grid of ratio 1.001, or coarser until
# at most MOST are different. The grid is the same for every run, so that similar runs share cached curves.
FEW, MOST, _RATIO = 32, 400, 1 + 2.0**-10
_MOST_CUT = 64  # for truncated samples, which need two curves and grids each, and as many again with one more example
NEVER = 1e-100  # far below what is charged for the rounding error of one step


def rounded(steps: Steps) -> Steps:
    """Fewer different steps that together cost no less: noise rounded down, sampling probabilities rounded up.

    A query with more noise is a post-processing of one with less, and a smaller sample is a mixture of a larger one and
    an empty one, so each rounded step dominates the original.
    """
    selections: Steps = Counter({e: n for e, n in steps.items() if isinstance(e, dp.dp_event.RepeatAndSelectDpEvent)})
    return selections + _rounded(steps - selections)  # the runs inside a selection are rounded separately


def _rounded(steps: Steps) -> Steps:
    schemes = {with_noise(event, 1.0) for event in steps}
    result, spacing = steps, math.log(_RATIO)
    most = _MOST_CUT if any(isinstance(e, dp.TruncatedSubsampledGaussianDpEvent) for e in steps) else MOST
    while len(result) > (FEW if result is steps else most):
        result = Counter()
        for event, count in steps.items():
            sigma = _rounded_down(noise(event), spacing)
            if len(schemes) > FEW and isinstance(event, dp.PoissonSampledDpEvent):
                q = 1 / _rounded_down(1 / event.sampling_probability, spacing)
                event = dp.PoissonSampledDpEvent(q, event.event)
            result[with_noise(event, sigma)] += count
        if not any(isinstance(event, dp.PoissonSampledDpEvent) for event in result) and len(result) <= len(schemes):
            break  # one step for each sampling scheme is left, and these schemes are not rounded
        spacing *= math.sqrt(2)
    return result


def _rounded_down(value: float, spacing: float) -> float:
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
        case _:
            return inner


def alternatives(event: dp.DpEvent) -> list[tuple[float, float, float]]:
    r"""Sampled Gaussian queries, as (weight, sampling probability, noise): a step is at worst a known choice of one.

    A truncated Poisson sample has two. If fewer than B others are drawn, nothing is cut. Otherwise, with probability
    :math:`\tau`, the sample is a random B of them, and with probability q' the example replaces one of those: a
    distance of 2, which is the same as half the noise. Neither the B nor the one replaced depends on q', so the pair is
    no easier to tell apart than :math:`(1 - q') N(0, \sigma^2) + q' N(2, \sigma^2)` and :math:`N(0, \sigma^2)`.
    """
    if not isinstance(event, dp.TruncatedSubsampledGaussianDpEvent):
        return [(1.0, *sampled_gaussian(event))]
    q, sigma, full = event.sampling_probability, event.noise_multiplier, prob_full(event)
    n, most = event.dataset_size, event.truncated_batch_size
    own = q  # an upper bound on q'; the quotient below is inaccurate if samples are practically never cut
    if full > NEVER:  # P(drawn and kept, and the sample is cut) / P(full)
        own = float(_binomial().sf(most, n, q)) * most / n / full
        # Rounded up, so that data with one more example mostly use the same curve.
        own = min(q, 1 / _rounded_down(1 / own, math.log(_RATIO)))
    parts = [(1 - full, q, sigma), (full, own, sigma / 2)]
    return [part for part in parts if part[0] > 0]


def prob_full(event: dp.TruncatedSubsampledGaussianDpEvent) -> float:
    """Probability that the other examples alone fill a batch, so that a sample with a given example would be cut."""
    return float(_binomial().sf(event.truncated_batch_size - 1, event.dataset_size - 1, event.sampling_probability))


def _binomial():
    from scipy import stats  # slow to import, and rarely needed

    return stats.binom


def sampled_gaussian(event: dp.DpEvent) -> tuple[float, float]:
    """Sampling probability and noise multiplier of a step: a Gaussian query, Poisson sampled or not."""
    return getattr(event, "sampling_probability", 1.0), noise(event)
