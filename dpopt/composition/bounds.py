"""Upper bounds on the epsilon of composed Gaussian steps, each from ``dp_accounting`` and each valid by itself.

`dpopt.accounting` reports the smallest of them. What a bound takes is a composition flattened by
`dpopt.events.flattened`: how often each step event occurs.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from dpopt.common.lazy import dp_accounting as dp
from dpopt.composition.step_events import (
    FEW,
    MOST,
    NEVER,
    Steps,
    alternatives,
    cut_beside,
    noise,
    rounded,
    sampled_gaussian,
)
from dpopt.events import flattened
from dpopt.privacy import Relation

# Grid of the privacy loss at an epsilon between 1 and 100. Rounding is pessimistic, so a coarser grid gives a larger
# epsilon, never a smaller one. At 1e-3 IMDB's 39,000 steps cost 2.81 (2.79 on a grid ten times finer, for eight times
# the work). Below 1 the grid shrinks with epsilon, above 100 it grows.
_INTERVAL = 1e-3
# What a grid may have: points of one step (a dictionary in dp_accounting), of a composition (arrays), and of each
# composition of equal steps where there are many, since those are kept.
_STEP_POINTS, _POINTS, _KEPT_POINTS = 2**17, 2**21, 2**15
# And where the grid is finer than it must be, since it would be coarse beside the loss of one step.
_FINE_POINTS = 2**18
_TAIL = 1e-15  # probability that dp_accounting moves to an infinite loss when it cuts a composition

# Where a schedule asks for many curves, fewer orders must do, which costs up to about 1% of a Renyi bound.
_FEW_ORDERS = (1.25, 1.5, 1.75, *(n / 5 for n in range(10, 55)), *range(11, 65), 128, 256)


@functools.lru_cache(maxsize=4096)
def _renyi_curve(event: dp.DpEvent, relation: Relation, orders: tuple | None) -> tuple[np.ndarray, np.ndarray]:
    """Orders, and the divergence of one step at each."""
    if isinstance(event, dp.TruncatedSubsampledGaussianDpEvent):
        powers = []
        for weight, q, sigma in alternatives(event):
            used, curve = _renyi_curve(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), relation, orders)
            powers.append(math.log(weight) + (used - 1) * curve)
        return used, np.maximum(np.logaddexp.reduce(powers) / (used - 1), 0) + _renyi_rounding(used)
    if isinstance(event, dp.dp_event.RepeatAndSelectDpEvent):
        return _selected_curve(event, relation, orders)
    absl = logging.getLogger("absl")
    level = absl.level
    try:
        absl.setLevel(logging.ERROR)  # it reports every order that it leaves out, which is sound and of no interest
        accountant = dp.rdp.RdpAccountant(orders, dp.NeighboringRelation[relation.name]).compose(event)
    except dp.UnsupportedEventError as error:
        raise ValueError(
            f"no accountant takes this event under {relation.name}: {error}. Poisson samples are accounted for under "
            "add-or-remove-one, samples of fixed size under replace-one; a run cannot mix them."
        ) from error
    finally:
        absl.setLevel(level)
    used, curve = np.asarray(accountant.orders), np.asarray(accountant.rdp)
    # The divergence is the logarithm of a sum near 1, so a tiny one is lost in rounding, or comes out negative. Its
    # rounding error is charged; where cancellation took more than that, the order says nothing.
    error = _renyi_rounding(used)
    return used, np.where(curve < -error, np.inf, np.maximum(curve, 0) + error)


def _renyi_rounding(orders: np.ndarray) -> np.ndarray:
    return 64 * np.finfo(float).eps * orders / (orders - 1)


def _selected_curve(
    event: dp.dp_event.RepeatAndSelectDpEvent, relation: Relation, orders: tuple | None
) -> tuple[np.ndarray, np.ndarray]:
    """The curve of the best of several runs, by theorems 2 and 6 of Papernot and Steinke (2022).

    dp_accounting's accountant would apply them to its own curve of a run. This one's rounding is paid for, and orders
    that say nothing are infinite in it: one divergence that came out too small would make all orders too small.
    """
    used, curve = _curve_of_all(rounded(flattened(event.event)), relation, orders)
    theorems: Any = dp.rdp.rdp_privacy_accountant._compute_rdp_repeat_and_select
    return used, theorems(used, curve, event.mean, event.shape)


def _orders(steps: Steps) -> tuple | None:
    return _FEW_ORDERS if _kinds(steps) > FEW else None  # None: all that dp_accounting has


def _kinds(steps: Steps) -> int:
    """How many different steps there are, with those of the runs that are selected from."""
    inner = [_kinds(flattened(e.event)) for e in steps if isinstance(e, dp.dp_event.RepeatAndSelectDpEvent)]
    return len(steps) + sum(inner)


def renyi(steps: Steps, relation: Relation) -> Callable[[float], float]:
    """Renyi divergences added up: a function of delta."""
    orders, total = _renyi_total(steps, relation)
    if not orders.size:
        return lambda delta: math.inf
    # dp_accounting annotates sequences, and passes arrays itself.
    return lambda delta: float(dp.rdp.compute_epsilon(orders, total, delta)[0])  # pyright: ignore[reportArgumentType]


def covers(steps: Steps, others: Steps, relation: Relation) -> bool:
    """Whether steps cost at every order at least what others do, but for rounding."""
    wanted = _orders(steps + others)
    (_, curve), (_, other) = (_curve_of_all(rounded(s), relation, wanted) for s in (steps, others))
    return bool(np.all(other <= curve * (1 + 1e-9)))


def _renyi_total(steps: Steps, relation: Relation) -> tuple[np.ndarray, np.ndarray]:
    """Orders, and the divergence of all steps together at each, where it is finite."""
    orders, total = _curve_of_all(steps, relation, _orders(steps))
    kept = np.isfinite(total)
    return orders[kept], total[kept]


def _curve_of_all(steps: Steps, relation: Relation, wanted: tuple | None) -> tuple[np.ndarray, np.ndarray]:
    curves = [(_renyi_curve(event, relation, wanted), count) for event, count in steps.items()]
    return curves[0][0][0], np.sum([count * curve for (_, curve), count in curves], axis=0)


def ever_sampled(steps: Steps, delta: float) -> float:
    """From the probability p that an example is in any batch at all; tight for one step, and where p is tiny.

    A whole run is a mixture: with probability 1 - p the example is never read, and otherwise at most what full batches
    would show. Amplification by sampling (Balle, Barthe and Gaboardi 2018) takes (epsilon, delta / p) of full batches,
    one Gaussian query, to log(1 + p (e^epsilon - 1)) at delta, in both directions. Of truncated samples it may be known
    which were full, so p is the largest that it can be, whichever were.
    """
    from dp_accounting import gaussian_mechanism  # which the package does not import itself

    never, precision, alike = 0.0, 0.0, 0.0  # logarithms of probabilities: never sampled, and drawn the same either way
    for event, count in steps.items():
        parts = alternatives(event)
        q, _ = sampled_gaussian(event)  # the largest of the parts': which of them it was may be seen
        never += count * (math.log1p(-q) if q < 1 else -math.inf)
        # Total variation distance of one step.
        shift = sum(weight * q * math.erf(1 / (math.sqrt(8) * sigma)) for weight, q, sigma in parts)
        alike += count * (math.log1p(-shift) if shift < 1 else -math.inf)
        precision += count * max(sigma**-2 for _, _, sigma in parts)
    if delta >= -math.expm1(alike):
        return 0.0  # two coupled runs differ with at most this probability
    if precision > 1e7:
        return math.inf  # an epsilon of millions, beyond what the formula resolves in floating point
    p = -math.expm1(never)
    with np.errstate(divide="ignore"):  # a delta too small for floats is 0
        full = float(gaussian_mechanism.get_epsilon_gaussian(precision**-0.5, delta / p))
    full += 1e-11 * (1 + full)  # the root finder's tolerance
    return math.log1p(p * math.expm1(full)) if full < 700 else full + min(0.0, math.log(p) + 1e-11)


def privacy_loss(steps: Steps, delta: float, bound: float) -> float:
    """From privacy loss distributions, on a grid that an upper bound on epsilon sets and memory limits."""
    slack = _rounding(steps)
    if delta <= 2 * slack:
        return math.inf
    with np.errstate(over="ignore", divide="ignore"):  # an epsilon above 700 may come out infinite
        return float(_whole(steps, bound).get_epsilon_for_delta(delta - slack))


def privacy_loss_deltas(steps: Steps, epsilons: np.ndarray, bound: float) -> np.ndarray:
    """The same distribution's deltas at many epsilons."""
    deltas = _whole(steps, bound).get_delta_for_epsilon(list(map(float, epsilons)))
    return np.minimum(1.0, np.asarray(deltas) + _rounding(steps))


def renyi_deltas(steps: Steps, epsilons: np.ndarray, relation: Relation) -> np.ndarray:
    """Deltas at many epsilons, by Renyi divergences."""
    orders, total = _renyi_total(steps, relation)
    if not orders.size:
        return np.ones(len(epsilons))
    compute = dp.rdp.rdp_privacy_accountant.compute_delta
    return np.array([compute(orders, total, float(e))[0] for e in epsilons])  # pyright: ignore[reportArgumentType]


def _rounding(steps: Steps) -> float:
    # A composition is a Fourier transform to the power of the number of steps. The rounding error of that was measured
    # to stay below 1e-16 a step; delta pays twice as much.
    return np.finfo(float).eps * (sum(steps.values()) + 64 * len(steps))


def _whole(steps: Steps, bound: float) -> dp.pld.privacy_loss_distribution.PrivacyLossDistribution:
    interval = _interval(steps, bound)
    compose = _composed_and_kept if len(steps) > 4 else _composed
    parts = [compose(event, count, interval) for event, count in steps.items()]
    return functools.reduce(lambda a, b: a.compose(b, tail_mass_truncation=_TAIL), parts)


def _interval(steps: Steps, bound: float) -> float:
    coarse = _INTERVAL * (min(bound, 1.0) if bound < 100 else bound / 100)
    interval = 0.0
    points = _KEPT_POINTS if len(steps) > 4 else _POINTS
    windows = 0.0
    for event, count in steps.items():
        width = _width(event)
        # dp_accounting cuts a composition by Chernoff's bound, at exponents of up to 20 over the width of a step.
        orders, curve = _renyi_curve(event, Relation.ADD_OR_REMOVE_ONE, _orders(steps))
        exponents = orders - 1
        tails = count * curve + math.log(2 / _TAIL) / exponents
        window = min(count * width, 4 * width + 2 * np.min(tails, initial=math.inf, where=exponents * width <= 20))
        spread = math.sqrt(curve[np.argmin(np.abs(orders - 2))])  # of the loss of one step; a grid of half that is fine
        fine = min(coarse, max(spread / 2, window / _FINE_POINTS))
        interval = max(interval, fine, width / _STEP_POINTS, window / points)
        windows += window
    # Upwards to one of eight values an octave: kept compositions are met again when epsilon has moved a little.
    return 2.0 ** (math.ceil(8 * math.log2(max(interval, windows / _POINTS / 4))) / 8)


def _width(event: dp.DpEvent) -> float:
    """Between the largest and the smallest privacy loss of one step that dp_accounting puts on the grid."""
    kinds = dp.pld.privacy_loss_mechanism.AdjacencyType
    ends = []
    for _, q, sigma in alternatives(event):
        kind = kinds.REMOVE if sigma == noise(event) else kinds.REPLACE  # as dp_accounting takes what is cut
        loss = dp.pld.privacy_loss_mechanism.GaussianPrivacyLoss(sigma, sampling_prob=q, adjacency_type=kind)
        bounds = loss.connect_dots_bounds()
        ends += [cast(float, bounds.epsilon_upper), cast(float, bounds.epsilon_lower)]
    return max(ends) - min(ends)


def _composed(
    event: dp.DpEvent, count: int, interval: float
) -> dp.pld.privacy_loss_distribution.PrivacyLossDistribution:
    q, sigma = sampled_gaussian(event)
    if isinstance(event, dp.TruncatedSubsampledGaussianDpEvent) and cut_beside(event) > NEVER:
        step = dp.pld.privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
            event.dataset_size, q, event.truncated_batch_size, sigma, value_discretization_interval=interval
        )
    else:
        if q == 1:  # one Gaussian query, exactly
            sigma, count = sigma / math.sqrt(count), 1
        step = dp.pld.privacy_loss_distribution.from_gaussian_mechanism(
            sigma, value_discretization_interval=interval, sampling_prob=q
        )
    return step if count == 1 else step.self_compose(count)


_composed_and_kept = functools.lru_cache(maxsize=2 * MOST)(_composed)
