"""Epsilon, and the noise or the number of steps for a given epsilon, computed with ``dp_accounting``.

Every epsilon is an upper bound, under add-or-remove-one unless samples have a fixed size. The noise that is drawn and
the noise that is accounted for cannot differ: both come from the same `dpopt.privacy.Privacy`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeAlias

from dpopt import events
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.composition import bounds, step_events
from dpopt.events import poisson_event

Accountant: TypeAlias = Literal["pld", "rdp"]

_HOPELESS = 1e6  # no meaningful privacy, and too large an epsilon for a grid of privacy losses


def epsilon(
    *, noise_multiplier: float, sampling_prob: float, steps: int, delta: float, accountant: Accountant = "pld"
) -> float:
    """Epsilon of ``steps`` Gaussian queries, each on a Poisson sample of the data.

    Args:
        noise_multiplier: standard deviation of the noise over the L2 sensitivity; 0 gives infinity.
        sampling_prob: probability that an example is in a batch, in (0, 1].
        steps: number of steps, including those with an empty batch.
        delta: target delta, in (0, 1).
        accountant: ``"pld"``: the smallest of three bounds, from privacy loss distributions (usually the smallest),
            Renyi divergences, and the probability of being in any batch. ``"rdp"``: Renyi divergences alone, the
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
    """The smallest noise multiplier whose epsilon does not exceed the target, rounded up by at most 1e-3.

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


def calibrate_event(
    make_event: Callable[[float], dp_accounting.DpEvent],
    *,
    epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
) -> float:
    """`calibrate` for any family of events ``make_event(noise_multiplier)`` whose epsilon falls as the noise grows.

    Args:
        make_event: returns the ``dp_accounting`` event for a positive noise multiplier.
        epsilon, delta, accountant: see `calibrate`.

    Raises:
        ValueError, TypeError: see `calibrate`.

    *Privacy*: arithmetic on public constants.

    >>> round(calibrate_event(dp_accounting.GaussianDpEvent, epsilon=1.0, delta=1e-5), 1)
    3.7
    """
    validate.positive(epsilon=epsilon)
    epsilon = float(epsilon)  # of 16 bits it would be compared in 16

    def gap(noise_multiplier: float) -> float:
        found = epsilon_of_event(make_event(noise_multiplier), delta=delta, accountant=accountant)
        return math.log(found / epsilon) if found > 0 else -math.inf

    def stride(gap: float) -> float:
        return math.exp(min(math.log(2), max(0.1, abs(gap) / 2)))  # epsilon falls faster than the noise grows

    # Grow the bracket from 1 by factors of at most 2, so that no accountant has to handle near-zero noise.
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
            return high  # the target is so loose that a smaller multiplier is not worth searching for
        over = gap(low)
    # Secant steps, each replaced by bisection if the one before helped little. `high` always meets the target. The
    # secant point moves by a quarter of the tolerance towards the far end, so that the bracket closes from both sides.
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
    """Epsilon, as an upper bound, of any event that dpopt makes.

    Time and memory do not depend on the size of epsilon or the number of steps: at most seconds (up to half a minute
    for a schedule of truncated samples) and less than a gigabyte. If there are more than 32 different steps (a
    schedule), noise is first rounded down and sampling probabilities up: by at most 0.1%, or by more until at most 400
    different steps are left (64 of truncated samples). For truncated samples (`dpopt.samplers.truncated`) epsilon is
    the larger of two: against data sets with one example fewer, and with one more.

    Args:
        event: a ``dp_accounting`` event, made of Gaussian queries, Poisson samples, samples without replacement, and
            selections of the best of several runs (`dpopt.tuning`).
        delta: target delta, in (0, 1).
        accountant: see `epsilon`. Sampling without replacement and selection have only an RDP bound: pass ``"rdp"``.

    Raises:
        ValueError: if delta is out of range, or there is no bound for this kind of event.

    *Privacy*: arithmetic on public constants.

    >>> epsilon_of_event(dp_accounting.GaussianDpEvent(0.0), delta=1e-5)
    inf
    """
    validate.delta(delta)
    validate.one_of(("pld", "rdp"), accountant=accountant)
    events.check(event)
    return max(_smallest_bound(steps, float(delta), accountant) for steps in events.flattened_both_ways(event))


def accountant_for(event: dp_accounting.DpEvent) -> Accountant:
    """``"pld"``, or for samples of fixed size and selections, which have a Renyi bound alone, ``"rdp"``.

    *Privacy*: arithmetic on public constants.

    >>> accountant_for(events.poisson_event(noise_multiplier=1.0, sampling_prob=0.1, steps=2))
    'pld'
    """
    return "pld" if events.renyi_alone(events.flattened(event)) is None else "rdp"


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
    bound = bounds.renyi(steps, events.relation_of(steps))(delta)
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
    """The largest number of steps, up to ``most``, whose epsilon does not exceed the limit; 0 if that of one step does.

    Args:
        make_event: returns the event of a number of steps; its epsilon grows with the number.
        epsilon, delta: the limit.
        accountant: see `epsilon`.
        most: upper end of the search.

    *Privacy*: arithmetic on public constants.

    >>> def full_batches(steps):
    ...     return dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(10.0), steps)
    >>> steps_affordable(full_batches, epsilon=2.0, delta=1e-5, most=1_000)
    25
    """

    epsilon = float(epsilon)

    def excess(steps: int, accountant: Accountant) -> float:
        return epsilon_of_event(make_event(steps), delta=delta, accountant=accountant) - epsilon

    def largest(accountant: Accountant, low: int, tolerance: float) -> int:
        """Searches upwards in growing strides, then alternates secant steps with bisection, so that it ends."""
        high, over, over_low, stride = most, math.inf, -math.inf, max(1, low // 4)
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
        return largest("rdp", 0, tolerance=0.0)
    few = largest("rdp", 0, tolerance=0.1)  # the Renyi bound is quick, and never allows more steps
    return largest(accountant, few, tolerance=0.0)
