"""Upper bounds on the epsilon of composed Gaussian steps, from ``dp_accounting``; each is valid by itself.

`dpopt.accounting` returns the smallest of them. A composition is given as the counts of its step events
(`dpopt.composition.flattened`).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np

from dpopt.common.lazy import dp_accounting as dp
from dpopt.composition.flattened import flattened
from dpopt.composition.relation import Relation
from dpopt.composition.step_events import FEW, MOST, NEVER, Steps, alternatives, prob_full, rounded, sampled_gaussian

# Grid interval of the privacy loss for epsilon between 1 and 100. Rounding is pessimistic, so a coarser grid gives a
# larger epsilon, never a smaller one. At 1e-3 the 39,000 steps on IMDB cost 2.81 (2.79 on a grid ten times finer, for
# eight times the work). The interval shrinks with epsilon below 1, and grows with it above 100.
_INTERVAL = 1e-3
# Largest numbers of grid points: for one step (a dictionary in dp_accounting), for a composition (arrays), and for each
# of many compositions of equal steps, which are cached.
_STEP_POINTS, _POINTS, _KEPT_POINTS = 2**17, 2**21, 2**15
# For a grid refined because it would be coarse relative to the loss of one step.
_FINE_POINTS = 2**18
_TAIL = 1e-15  # probability that dp_accounting moves to an infinite loss when it truncates a composition

# Fewer orders for a schedule, which needs many curves; this increases a Renyi bound by up to about 1%.
_FEW_ORDERS = (1.25, 1.5, 1.75, *(n / 5 for n in range(10, 55)), *range(11, 65), 128, 256)
_Orders: TypeAlias = tuple[float, ...] | None  # None: all orders of dp_accounting
_Curve: TypeAlias = tuple[np.ndarray, np.ndarray]  # orders, and the divergence at each
_Distribution: TypeAlias = "dp.pld.privacy_loss_distribution.PrivacyLossDistribution"


@functools.lru_cache(maxsize=4096)
def _renyi_curve(event: dp.DpEvent, relation: Relation, orders: _Orders) -> _Curve:
    if isinstance(event, dp.TruncatedSubsampledGaussianDpEvent):
        parts = [(math.log(w), dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(s))) for w, q, s in alternatives(event)]
        curves = [_renyi_curve(query, relation, orders) for _, query in parts]
        used = curves[0][0]
        powers = [log_weight + (used - 1) * curve for (log_weight, _), (_, curve) in zip(parts, curves, strict=True)]
        return used, np.maximum(np.logaddexp.reduce(powers) / (used - 1), 0) + _renyi_rounding(used)
    if isinstance(event, dp.dp_event.RepeatAndSelectDpEvent):
        return _selected_curve(event, relation, orders)
    absl = logging.getLogger("absl")
    absl.addFilter(_is_error)  # dp_accounting warns about every order it skips, which is sound
    try:
        accountant = dp.rdp.RdpAccountant(orders, dp.NeighboringRelation[relation.name]).compose(event)
    except dp.UnsupportedEventError as error:
        raise ValueError(
            f"dp_accounting does not support this event under {relation.name}: {error}. Poisson samples are accounted "
            "for under add-or-remove-one, samples of fixed size under replace-one; a run cannot mix them."
        ) from error
    finally:
        absl.removeFilter(_is_error)
    used, curve = np.asarray(accountant.orders), np.asarray(accountant.rdp)
    # The divergence is the logarithm of a sum near 1, so a tiny one is lost in rounding, or even negative. Its rounding
    # error is added; an order at which cancellation was worse than that is unusable.
    error = _renyi_rounding(used)
    return used, np.where(curve < -error, np.inf, np.maximum(curve, 0) + error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _renyi_rounding(orders: np.ndarray) -> np.ndarray:
    return 64 * np.finfo(float).eps * orders / (orders - 1)


def _selected_curve(event: dp.dp_event.RepeatAndSelectDpEvent, relation: Relation, orders: _Orders) -> _Curve:
    """The curve of the best of several runs, by theorems 2 and 6 of Papernot and Steinke (2022).

    The accountant of dp_accounting would apply them to its own curve of a run; hence its private function. Here the
    curve includes rounding errors and is infinite at unusable orders: one that is too small would make all too small.
    The steps of a run have been flattened with those of the whole: what counts for replacing an example counts already.
    """
    run = flattened(event.event, for_replacing=False)
    used, curve = _curve_of_all(rounded(run), relation, orders)
    theorems: Any = dp.rdp.rdp_privacy_accountant._compute_rdp_repeat_and_select  # pyright: ignore[reportPrivateUsage]
    return used, theorems(used, curve, event.mean, event.shape)


def _orders(steps: Steps) -> _Orders:
    return _FEW_ORDERS if _num_different(steps) > FEW else None


def _num_different(steps: Steps) -> int:
    """The number of different steps, including those of runs inside a selection."""
    selections = [e for e in steps if isinstance(e, dp.dp_event.RepeatAndSelectDpEvent)]
    return len(steps) + sum(_num_different(flattened(e.event, for_replacing=False)) for e in selections)


def renyi(steps: Steps, relation: Relation) -> Callable[[float], float]:
    """Epsilon as a function of delta, from the sum of the Renyi divergences."""
    orders, total = _renyi_total(steps, relation)
    if not orders.size:
        return lambda delta: math.inf
    # dp_accounting annotates sequences, but itself passes arrays.
    return lambda delta: float(dp.rdp.compute_epsilon(orders, total, delta)[0])  # pyright: ignore[reportArgumentType]


def covers(steps: Steps, others: Steps, relation: Relation) -> bool:
    """Whether ``steps`` have at least the Renyi divergence of ``others`` at every order, up to rounding."""
    wanted = _orders(steps + others)
    (_, curve), (_, other) = (_curve_of_all(rounded(s), relation, wanted) for s in (steps, others))
    # A divergence grows with its order: where one could not be computed, that of the next higher order bounds it.
    other = np.minimum.accumulate(other[::-1])[::-1]
    return bool(np.all(other <= curve * (1 + 1e-9)))


def _renyi_total(steps: Steps, relation: Relation) -> _Curve:
    """The total divergence, at the orders at which it is finite."""
    orders, total = _curve_of_all(steps, relation, _orders(steps))
    kept = np.isfinite(total)
    return orders[kept], total[kept]


def _curve_of_all(steps: Steps, relation: Relation, wanted: _Orders) -> _Curve:
    curves = [(_renyi_curve(event, relation, wanted), count) for event, count in steps.items()]
    return curves[0][0][0], np.sum([count * curve for (_, curve), count in curves], axis=0)


def ever_sampled(steps: Steps, delta: float) -> float:
    """Epsilon from the probability p that an example is in any batch at all; tight for one step, and for tiny p.

    A whole run is a mixture: with probability 1 - p the example is never read, and otherwise the run shows at most what
    full batches would. Amplification by sampling (Balle, Barthe and Gaboardi 2018) maps (epsilon, delta / p) of full
    batches, one Gaussian query, to log(1 + p (e^epsilon - 1)) at delta, in both directions. It may be known which
    truncated samples were full, so p is the largest possible over all such outcomes.
    """
    from dp_accounting import gaussian_mechanism  # not imported by the package itself

    never, precision, alike = 0.0, 0.0, 0.0  # log probabilities: never sampled; the same output with and without it
    for event, count in steps.items():
        parts = alternatives(event)
        q, _ = sampled_gaussian(event)  # the largest over the parts, as it may be known which one applies
        never += count * (math.log1p(-q) if q < 1 else -math.inf)
        # Total variation distance of one step.
        shift = sum(weight * q * math.erf(1 / (math.sqrt(8) * sigma)) for weight, q, sigma in parts)
        alike += count * (math.log1p(-shift) if shift < 1 else -math.inf)
        precision += count * max(sigma**-2 for _, _, sigma in parts)
    if delta >= -math.expm1(alike):
        return 0.0  # two coupled runs differ with at most this probability
    if precision > 1e7:
        return math.inf  # an epsilon of millions, too large for the formula in floating point
    p = -math.expm1(never)
    with np.errstate(divide="ignore"):  # a delta too small for floats is 0
        full = float(gaussian_mechanism.get_epsilon_gaussian(precision**-0.5, delta / p))
    full += 1e-11 * (1 + full)  # the root finder's tolerance
    return math.log1p(p * math.expm1(full)) if full < 700 else full + min(0.0, math.log(p) + 1e-11)


def privacy_loss(steps: Steps, delta: float, bound: float) -> float:
    """Epsilon from privacy loss distributions, on a grid chosen by an upper ``bound`` on epsilon and by memory."""
    slack = _rounding(steps)
    if delta <= 2 * slack:
        return math.inf
    with np.errstate(over="ignore", divide="ignore"):  # an epsilon above 700 may become infinite
        return float(_composition(steps, bound).get_epsilon_for_delta(delta - slack))


def privacy_loss_deltas(steps: Steps, epsilons: np.ndarray, bound: float) -> np.ndarray:
    """Deltas at many epsilons, from the same distribution."""
    deltas = _composition(steps, bound).get_delta_for_epsilon(list(map(float, epsilons)))
    return np.minimum(1.0, np.asarray(deltas) + _rounding(steps))


def renyi_deltas(steps: Steps, epsilons: np.ndarray, relation: Relation) -> np.ndarray:
    """Deltas at many epsilons, from Renyi divergences."""
    orders, total = _renyi_total(steps, relation)
    if not orders.size:
        return np.ones(len(epsilons))
    compute = dp.rdp.rdp_privacy_accountant.compute_delta
    return np.array([compute(orders, total, float(e))[0] for e in epsilons])  # pyright: ignore[reportArgumentType]


def _rounding(steps: Steps) -> float:
    # A composition is a Fourier transform raised to the number of steps. Its rounding error was measured to be below
    # 1e-16 a step; twice that is added to delta.
    return np.finfo(float).eps * (sum(steps.values()) + 64 * len(steps))


def _composition(steps: Steps, bound: float) -> _Distribution:
    interval = _interval(steps, bound)
    compose = _cached_composed if len(steps) > 4 else _composed
    parts = [compose(event, count, interval) for event, count in steps.items()]
    return functools.reduce(lambda a, b: a.compose(b, tail_mass_truncation=_TAIL), parts)


def _interval(steps: Steps, bound: float) -> float:
    coarse = _INTERVAL * (min(bound, 1.0) if bound < 100 else bound / 100)
    interval = 0.0
    points = _KEPT_POINTS if len(steps) > 4 else _POINTS
    windows = 0.0
    for event, count in steps.items():
        width = _width(event)
        # dp_accounting truncates a composition by a Chernoff bound, with exponents of up to 20 / width of a step.
        orders, curve = _renyi_curve(event, Relation.ADD_OR_REMOVE_ONE, _orders(steps))
        exponents = orders - 1
        tails = count * curve + math.log(2 / _TAIL) / exponents
        window = min(count * width, 4 * width + 2 * np.min(tails, initial=math.inf, where=exponents * width <= 20))
        spread = math.sqrt(curve[np.argmin(np.abs(orders - 2))])  # of the loss of one step; half of it is fine enough
        fine = min(coarse, max(spread / 2, window / _FINE_POINTS))
        interval = max(interval, fine, width / _STEP_POINTS, window / points)
        windows += window
    # Rounded up to one of eight values per octave, so that cached compositions are used again at a similar epsilon.
    return 2.0 ** (math.ceil(8 * math.log2(max(interval, windows / _POINTS / 4))) / 8)


def _width(event: dp.DpEvent) -> float:
    """Distance of the largest and the smallest privacy loss of one step on the grid of dp_accounting."""
    kinds = dp.pld.privacy_loss_mechanism.AdjacencyType
    _, noise = sampled_gaussian(event)
    ends = []
    for _, q, sigma in alternatives(event):
        kind = kinds.REMOVE if sigma == noise else kinds.REPLACE  # as dp_accounting treats truncated samples
        loss = dp.pld.privacy_loss_mechanism.GaussianPrivacyLoss(sigma, sampling_prob=q, adjacency_type=kind)
        bounds = loss.connect_dots_bounds()
        ends += [cast(float, bounds.epsilon_upper), cast(float, bounds.epsilon_lower)]
    return max(ends) - min(ends)


def _composed(event: dp.DpEvent, count: int, interval: float) -> _Distribution:
    q, sigma = sampled_gaussian(event)
    if isinstance(event, dp.TruncatedSubsampledGaussianDpEvent) and prob_full(event) > NEVER:
        step = dp.pld.privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
            event.dataset_size, q, event.truncated_batch_size, sigma, value_discretization_interval=interval
        )
    else:
        if q == 1:  # one Gaussian query, exactly
            sigma, count = sigma / math.sqrt(count), 1
        step = dp.pld.privacy_loss_distribution.from_gaussian_mechanism(
            sigma, value_discretization_interval=interval, sampling_prob=q
        )
    return _repeated(step, count, is_coarse=_width(event) < 2 * interval)


def _repeated(step: _Distribution, count: int, *, is_coarse: bool) -> _Distribution:
    """``step.self_compose(count)``, also for millions of steps; ``is_coarse``: whether it has a point or a few.

    To choose an algorithm dp_accounting raises the number of points to the number of steps, a number of megabytes.
    After ten steps it has made its choice, unless there is a single point, which it would add up step by step."""
    if count <= 10**5:
        return step if count == 1 else step.self_compose(count)
    ten = step.self_compose(10, tail_mass_truncation=0)  # what is lost here would be multiplied
    tens = _repeated(ten, count // 10, is_coarse=True) if is_coarse else ten.self_compose(count // 10)
    return tens.compose(_repeated(step, count % 10, is_coarse=is_coarse)) if count % 10 else tens


_cached_composed = functools.lru_cache(maxsize=2 * MOST)(_composed)
