"""Epsilon and delta: thin, careful calls of ``dp_accounting``.

Every epsilon here is for the add-or-remove-one relation unless the sampler says otherwise, and is an upper bound. What
was drawn and what is accounted cannot differ: both come from the same `dpopt.privacy.Privacy`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from dpopt import events
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.composition import bounds, step_events
from dpopt.events import poisson_event
from dpopt.privacy import Relation

Accountant = Literal["pld", "rdp"]

# No privacy to speak of, in numbers that a grid of privacy losses cannot hold.
_HOPELESS = 1e6


def epsilon(
    *, noise_multiplier: float, sampling_prob: float, steps: int, delta: float, accountant: Accountant = "pld"
) -> float:
    """Epsilon of ``steps`` Gaussian queries, each on a Poisson sample of the data.

    Args:
        noise_multiplier: standard deviation of the noise over the L2 sensitivity; 0 gives infinity.
        sampling_prob: probability with which each example is in a batch, in (0, 1].
        steps: number of steps; empty batches count.
        delta: target delta, in (0, 1).
        accountant: ``"pld"``: the smallest of three valid bounds, by privacy loss distributions (mostly the smallest),
            by Renyi divergences, and by the probability of being in any batch. ``"rdp"``: Renyi divergences alone, the
            classic moments accountant.

    Returns:
        An upper bound on epsilon for adding or removing one example.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: arithmetic on public constants.

    >>> settings = dict(noise_multiplier=1.0, sampling_prob=64 / 25_000, steps=39_000, delta=1e-5)
    >>> round(epsilon(**settings), 2), round(epsilon(**settings, accountant="rdp"), 2)
    (2.81, 3.03)
    """
    event = poisson_event(noise_multiplier=noise_multiplier, sampling_prob=sampling_prob, steps=steps)
    return epsilon_of_event(event, delta=delta, accountant=accountant)


def calibrate(
    *, epsilon: float, delta: float, sampling_prob: float, steps: int, accountant: Accountant = "pld"
) -> float:
    """The smallest noise multiplier whose epsilon does not exceed the target, to within 1e-3 (and never below it).

    Args:
        epsilon: the target, positive and finite.
        delta, sampling_prob, steps, accountant: see `epsilon`.

    Raises:
        ValueError, TypeError: for an argument out of range, or a target that no multiplier below 2^40 meets.

    *Privacy*: arithmetic on public constants.

    >>> sigma = calibrate(epsilon=3.0, delta=1e-5, sampling_prob=0.01, steps=1_000)
    >>> settings = dict(sampling_prob=0.01, steps=1_000, delta=1e-5)
    >>> 2.99 < globals()["epsilon"](noise_multiplier=sigma, **settings) <= 3.0
    True
    """
    validate.positive(epsilon=epsilon)
    validate.probability(sampling_prob=sampling_prob)
    validate.positive_int(steps=steps)

    def make_event(noise_multiplier: float) -> dp_accounting.DpEvent:
        return poisson_event(noise_multiplier=noise_multiplier, sampling_prob=sampling_prob, steps=steps)

    return calibrate_event(make_event, epsilon=epsilon, delta=delta, accountant=accountant)


def calibrate_event(make_event: Any, *, epsilon: float, delta: float, accountant: Accountant = "pld") -> float:
    """`calibrate` for any family of events: ``make_event(noise_multiplier)``, whose epsilon falls as noise grows.

    Args:
        make_event: from a positive multiplier to a ``dp_accounting`` event.
        epsilon, delta, accountant: see `calibrate`.

    Raises:
        ValueError, TypeError: see `calibrate`.

    *Privacy*: arithmetic on public constants.

    >>> round(calibrate_event(dp_accounting.GaussianDpEvent, epsilon=1.0, delta=1e-5), 1)
    3.7
    """
    validate.positive(epsilon=epsilon)

    def gap(noise_multiplier: float) -> float:
        found = epsilon_of_event(make_event(noise_multiplier), delta=delta, accountant=accountant)
        return math.log(found / epsilon) if found > 0 else -math.inf

    def stride(gap: float) -> float:
        return math.exp(min(math.log(2), max(0.1, abs(gap) / 2)))  # epsilon falls faster than noise grows

    # A bracket grown from 1, at most by doubling or halving: accountants do not meet near-zero noise.
    low = high = 1.0
    over = under = gap(1.0)
    while under > 0:
        low, over, high = high, under, stride(under) * high
        if high > 2.0**40:
            raise ValueError(f"no noise multiplier below 2^40 reaches epsilon {epsilon} at delta {delta}.")
        under = gap(high)
    while over <= 0:
        low, high, under = low / stride(over), low, over
        if low < 1e-3:
            return high  # a target this loose is met by hardly any noise; do not search for less
        over = gap(low)
    # Secants, or bisection after one that helped little. The target stays met at `high`, which is safe to return. A
    # secant's point is moved by a quarter of what is asked for, towards the far end, so that the bracket closes.
    by_secant = True
    while (width := high - low) > (tolerance := min(1e-3, 1e-3 * high) / 2):
        share = over / (over - under) if by_secant and math.isfinite(over - under) else 0.5
        middle = low + share * width + math.copysign(tolerance / 4, 0.5 - share)
        middle = min(high - tolerance / 8, max(low + tolerance / 8, middle))
        found = gap(middle)
        low, over, high, under = (middle, found, high, under) if found > 0 else (low, over, middle, found)
        by_secant = high - low < width / 2
    return high


def epsilon_of_event(event: dp_accounting.DpEvent, *, delta: float, accountant: Accountant = "pld") -> float:
    """Epsilon of any event that dpopt makes; an upper bound.

    Time and memory do not depend on how small epsilon is or how many steps there are: at most seconds (a schedule of
    truncated samples: up to half a minute), and below a gigabyte. More than 32 different steps (a schedule) are rounded
    first, noise down and sampling probabilities up, by at most 0.1%, or by as much as it takes to be left with 400, or
    with 64 of truncated samples. The epsilon of truncated samples (`dpopt.samplers.truncated`) is the larger of those
    against data of one example less and of one more.

    Args:
        event: a ``dp_accounting`` event, made of Gaussian queries, Poisson samples, samples without replacement, and
            selections of the best of several runs (`dpopt.tuning`).
        delta: target delta, in (0, 1).
        accountant: see `epsilon`. Sampling without replacement and selection have an RDP bound only: ask for it by
            name.

    Raises:
        ValueError: if delta is out of range or the event is of a kind that no accountant here takes.

    *Privacy*: arithmetic on public constants.

    >>> epsilon_of_event(dp_accounting.GaussianDpEvent(0.0), delta=1e-5)
    inf
    """
    validate.positive(delta=delta)
    if delta >= 1:
        raise ValueError(f"delta must be below 1; got {delta}.")
    validate.one_of(("pld", "rdp"), accountant=accountant)
    events.check(event)
    return max(_smallest_bound(steps, float(delta), accountant) for steps in events.flattened_both_ways(event))


def _smallest_bound(steps: Counter[dp_accounting.DpEvent], delta: float, accountant: Accountant) -> float:
    if not steps:
        return 0.0
    if any(isinstance(e, dp_accounting.NonPrivateDpEvent) for e in steps):
        return math.inf
    replaces = events.is_replace_one(steps)
    if replaces:
        fixed = dp_accounting.SampledWithoutReplacementDpEvent
        parts = [e for step in steps for e in events.everything_in(step)]
        sizes = [e.source_dataset_size for e in parts if isinstance(e, fixed)]
        validate.small_delta(delta, max(sizes), stacklevel=5)
    alone = events.renyi_alone(steps)
    if alone is not None and accountant == "pld":
        instead = ", or sample with PoissonSampler" if alone.startswith("sampling") else ""
        raise ValueError(
            f"{alone} has no privacy-loss-distribution bound in dp_accounting; pass accountant='rdp'{instead}."
        )
    steps = step_events.rounded(steps)
    bound = bounds.renyi(steps, Relation.REPLACE_ONE if replaces else Relation.ADD_OR_REMOVE_ONE)(delta)
    if accountant == "rdp" or bound == math.inf:
        return bound
    bound = min(bound, bounds.ever_sampled(steps, delta))
    return min(bound, bounds.privacy_loss(steps, delta, bound)) if 0 < bound < _HOPELESS else bound


def steps_affordable(
    make_event: Callable[[int], dp_accounting.DpEvent],
    *,
    epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
    most: int,
) -> int:
    """The largest number of steps, up to ``most``, whose epsilon does not exceed the limit; 0 where none does.

    Args:
        make_event: from a number of steps to an event, whose epsilon grows with it.
        epsilon, delta: the limit.
        accountant: see `epsilon`.
        most: do not count further than this.

    *Privacy*: arithmetic on public constants.

    >>> def full_batches(steps):
    ...     return dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(10.0), steps)
    >>> steps_affordable(full_batches, epsilon=2.0, delta=1e-5, most=1_000)
    25
    """

    def excess(steps: int, accountant: Accountant) -> float:
        return epsilon_of_event(make_event(steps), delta=delta, accountant=accountant) - epsilon

    def last(accountant: Accountant, low: int, tolerance: float) -> int:
        """By steps that grow, then by secants, with a bisection between them so that it ends."""
        over_low, stride = -math.inf, max(1, low // 4)
        while low < most and (over := excess(high := min(most, low + stride), accountant)) <= 0:
            low, over_low, stride = high, over, 4 * stride
        if low == most:
            return most
        over_high, by_secant = over, True
        while high - low > 1 + tolerance * low:
            share = over_low / (over_low - over_high) if by_secant and math.isfinite(over_high - over_low) else 0.5
            middle = min(high - 1, max(low + 1, round(low + share * (high - low))))
            over = excess(middle, accountant)
            low, over_low, high, over_high = (
                (low, over_low, middle, over) if over > 0 else (middle, over, high, over_high)
            )
            by_secant = not by_secant
        return low

    if accountant == "rdp":
        return last("rdp", 0, tolerance=0.0)
    return last(accountant, last("rdp", 0, tolerance=0.1), tolerance=0.0)  # Renyi is quick, and allows no more
