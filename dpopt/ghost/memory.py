"""Estimates the memory of each way to a clipped gradient, and chooses the fastest one that is allowed.

All figures are bytes for a batch, summed over its devices. They cover what is alive between the forward and the
backward pass: what differentiation keeps (as JAX reports it, so with the user's own rematerialisation), the parameters
and their gradients.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
from jax.typing import ArrayLike

from dpopt.common.trees import is_narrow
from dpopt.engines import rounding
from dpopt.ghost.costs import OPERATIONS_PER_BYTE, activation_bytes, formed_bytes, nbytes
from dpopt.ghost.failures import CannotFollow
from dpopt.ghost.forward import forward_work, largest_value
from dpopt.ghost.keeping import keeping_more
from dpopt.ghost.layers import single_parameters, why_not_by_layer
from dpopt.ghost.plan import MARGIN, TINY_BYTES, Plan
from dpopt.ghost.residuals import formed_in_conditionals, recomputed_bytes, residual_bytes
from dpopt.ghost.splitting import start_bytes
from dpopt.ghost.values import Contact

_SMALL_BYTES = 1 << 20  # always allowed, on each device that has a share of the batch
# Bytes moved in memory in the time that one is sent between devices.
_SENT = 10
# Bytes moved in the time that a GPU takes to start the operations that follow from one equation of the loss.
_STARTED = 1 << 25
_IS_SMALL = f"and takes less than {_SMALL_BYTES >> 20} MB a device, which is always allowed"
_IS_TINY = (
    f"all gradients of the batch together take at most {TINY_BYTES >> 10} kB, where both engines run in microseconds, "
    "whatever the table says, and vmap compiles faster"
)
_HARDLY_MORE = 1.1
_IN_FEWER = "in fewer parts it would take more memory than is allowed"


class Memory(NamedTuple):
    """Peak memory of a batch, in bytes, for each way to its clipped gradient."""

    ordinary: float
    streamed: float
    vmap: float
    weights: float
    examples: float  # records of all examples, and what differentiation keeps besides
    passing: float  # what is alive of all examples if contacts are streamed

    def recorded(self, parts: int) -> float:
        """The peak of the ghost engine in one pass, with the batch in so many parts whose sums are added up."""
        return self.examples / parts + (2 + (parts > 1)) * self.weights

    def one_pass(self, parts: int) -> float:
        """The same if every parameter is clipped in that pass (streamed.py)."""
        return self.passing / parts + (2 + (parts > 1)) * self.weights


def estimate(plan: Plan) -> Memory:
    """The memory for a plan's batch size."""
    size, contacts = plan.batch_size, plan.trace.contacts
    weights = plan.weight_bytes
    kept = residual_bytes(plan.trace)
    taps = {c: _stored_bytes(c.tap_shape, c.tap_dtype) for c in contacts}
    records = {c: _recorded_bytes(c) for c in contacts}
    inputs = sum(records[c] - taps[c] for c in contacts)
    own = [c for c in contacts if not c.shares]
    cotangents, looped = (sum(taps[c] for c in some) for some in (own, [c for c in own if c.loops]))
    # A loop's backward pass holds the cotangents of a step. (On GPUs, the estimate is too large as it is.)
    if jax.default_backend() == "cpu" and not looped:
        kept += largest_value(plan.trace.body)
    again = {block: recomputed_bytes(block, by_weights=True) for block in plan.trace.body.rematerialised()}
    without_weights = [recomputed_bytes(block, by_weights=False) for block in again]
    # What differentiation keeps of such a block is not what it records, unless its policy keeps everything.
    apart = sum(records[c] - taps[c] for block, computed in again.items() if computed for c in block.scope.contacts())
    # The backward pass frees what differentiation kept as it goes, but a loop keeps the stacks of all its steps.
    recorded = max(kept + apart + looped, inputs + cotangents) + max(without_weights, default=0)
    kept += max(again.values(), default=0)
    streamed = plan.streaming().streamed
    left = sum(records[c] for c in contacts if c not in streamed)
    left += _formed_anyway(plan)
    formed = sum(_stored_bytes(v.shape, v.dtype) for v in plan.trace.products)
    chosen = sum(taps[c] for c in formed_in_conditionals(plan.trace))
    rows, blocks = _of_two_passes(size)
    more = (blocks > 1) + (not rounding.floats_suffice(rows, blocks)) if jax.device_count() == 1 else 0
    return Memory(
        # Look-ups come last in the backward pass, which has all other gradients by then.
        ordinary=size * max([kept, *_looked_up(contacts, taps), chosen]) + 2 * weights + formed,
        streamed=rows * (kept + left) + (2 + more) * weights,
        vmap=size * (kept + weights) + 2 * weights,
        weights=weights,
        examples=size * recorded + _more_bytes(plan),
        passing=size * (kept + left),
    )


def _formed_anyway(plan: Plan) -> int:
    """Bytes of the largest gradient of one example that the backward pass forms, of a weight that no rule covers."""
    alone = (cast(Contact, c.of_step) for c in plan.streaming().streamed if c.apply is None)
    return max((_stored_bytes(c.tap_shape, c.tap_dtype) for c in alone), default=0)


def _of_two_passes(size: int) -> rounding.Split:
    """The blocks that two passes process one after another."""
    return rounding.blocks(size) if jax.device_count() == 1 else rounding.Split(size, 1)


def _looked_up(contacts: Sequence[Contact], taps: Mapping[Contact, int]) -> list[int]:
    """For each table, the bytes of the cotangents of all rows that an example looks up."""
    found: dict[frozenset[int], int] = {}
    for c in contacts:
        if c.factors is not None and c.factors.one_hot and not c.loops:
            found[c.weight.leaves] = found.get(c.weight.leaves, 0) + taps[c]
    return [*found.values()]


def _more_bytes(plan: Plan) -> float:
    """How much more the kept gradients of a batch take than the inputs and cotangents in whose place they are."""
    more = [(formed_bytes(c), _recorded_bytes(c)) for c in plan.kept if c in plan.trace.contacts]
    more += [(sum(map(formed_bytes, own.at)), sum(map(_recorded_bytes, own.contacts))) for own in plan.joined]
    return plan.batch_size * sum(max(0, formed - recorded) for formed, recorded in more)


def _recorded_bytes(contact: Contact) -> int:
    """The input and the cotangent of one example."""
    own = 0 if contact.apply is None else _stored_bytes(contact.input_shape, contact.input_dtype)
    return own + _stored_bytes(contact.tap_shape, contact.tap_dtype)


def _stored_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Of an array as it is stored: on a CPU, XLA computes in float32 and keeps that where it is used again."""
    is_widened = jax.default_backend() == "cpu" and is_narrow(dtype)
    return nbytes(shape, dtype) if is_widened else math.prod(shape) * dtype.itemsize


def allowed(memory: float | int, ordinary: float) -> float:
    """The limit in bytes: an integer ``memory`` is bytes, a float is a multiple of the ordinary gradient's memory."""
    return memory if isinstance(memory, numbers.Integral) else memory * ordinary


class Way(NamedTuple):
    """How the clipped gradient of a batch is computed."""

    plan: Plan | None  # for one part; None: vmap
    parts: int
    reason: str = ""


def choose(
    plan: Plan, memory: float | int, *, may_split: bool, may_vmap: bool, limits: Sequence[ArrayLike | None] = (),
    layer_axes: Sequence[int] = (),
) -> Way:  # fmt: skip
    """The fastest way that fits into ``memory``, or the smallest one if none fits.

    Args:
        plan: for the whole batch.
        memory: see `allowed`.
        may_split: whether the batch may be split into parts.
        may_vmap: whether plain per-example gradients may be used where they are faster.
        limits: per parameter, its clip norm if it is clipped by its own norm alone, else None.
        layer_axes: per parameter, how many of its axes number layers that are clipped one by one.

    Raises:
      CannotFollow: layers should be clipped one by one, but no scan reads them one by one.
    """
    size, parts = plan.batch_size, plan.parts if may_split else 1
    single = single_parameters(plan, limits, layer_axes)
    if any(layer_axes):
        # A stack that no example meets has no gradient: nothing to clip, unless an offset is added.
        nothing = {leaf.leaf for leaf in plan.leaves if not leaf.contacts and not plan.shifted}
        missing = [i for i, axes in enumerate(layer_axes) if axes and i not in single | nothing]
        if missing:
            raise CannotFollow("scan", why_not_by_layer(plan, missing[0]))
        reason = "layers that are clipped one by one are clipped as their gradients come"
        by_layer = _streamed(plan, parts, single, reason)
        return _within(by_layer, plan, memory) if may_split else by_layer
    wants_vmap = may_vmap and plan.prefers_vmap
    is_fastest = wants_vmap or plan.ghost_cost <= plan.vmap_cost
    fastest = "it should be the fastest" if is_fastest else f"it should be within {MARGIN - 1:.0%} of the fastest"
    recorded = size / parts * sum(activation_bytes(c) for c in plan.trace.contacts)
    devices = math.gcd(size, jax.device_count())
    if (plan.all_formed_bytes if wants_vmap else recorded) <= devices * _SMALL_BYTES:  # no estimate is needed
        reason = _IS_TINY if wants_vmap and plan.is_tiny else f"{fastest}, {_IS_SMALL}"
        return Way(None, 1, reason) if wants_vmap else Way(plan.of(size // parts), parts, reason)
    one_pass = None
    if plan.streaming(single).records_nothing:  # and nothing is computed twice
        one_pass = _streamed(plan, parts, single, "every parameter is clipped by its own norm, as its gradient comes")
        if wants_vmap or not _records_are_faster(plan):
            return _within(one_pass, plan, memory) if may_split else one_pass
    found = estimate(plan)
    limit = max(allowed(memory, found.ordinary), devices * _SMALL_BYTES)
    reason = f"{fastest}, and the memory allows it"
    if wants_vmap and found.vmap <= limit:
        return Way(None, 1, reason)
    if wants_vmap:
        reason = "vmap, which should be faster, would take more memory than is allowed"
    # Every part has an equal share of each device's examples.
    own = 0 if size % jax.device_count() else size // jax.device_count()
    more = [k for k in range(parts, own + 1) if own % k == 0] if may_split and own else [parts]
    way = _recorded(limit, found, plan, more, reason)
    if way is not None and way.plan is not None:
        way = _keeping_more(limit, found, plan, more[more.index(way.parts) :], way.reason) or way
    return way or one_pass or _slower(limit, found, plan, more, single)


def _streamed(plan: Plan, parts: int, single: frozenset[int], reason: str) -> Way:
    """One pass, or two over the whole batch, which they process in blocks of their own.

    One pass records nothing, so half as many ``parts`` touch as much memory: a RealNVP in two took 1.6 ordinary
    gradients, whole 1.3."""
    whole = plan.streaming(single)
    if not whole.is_one_pass or jax.device_count() > 1:
        return Way(whole, 1, reason)
    parts = next((n for n in range(parts // 2, 0, -1) if parts % n == 0), 1)
    return Way(whole.of(plan.batch_size // parts), parts, reason)


def _within(one_pass: Way, plan: Plan, memory: float | int) -> Way:
    """One pass in as many parts as its memory takes, if it forms gradients or records some parameters."""
    size, way = plan.batch_size, cast(Plan, one_pass.plan)
    if jax.device_count() > 1 or not way.is_one_pass:
        return one_pass
    if way.records_nothing and size // one_pass.parts * _formed_anyway(plan) <= _SMALL_BYTES:
        return one_pass
    found = estimate(plan)
    parts = [k for k in range(one_pass.parts, size + 1) if size % k == 0]
    enough = max(allowed(memory, found.ordinary), _HARDLY_MORE * min(map(found.one_pass, parts)))
    k = next(k for k in parts if found.one_pass(k) <= enough)
    return one_pass if k == one_pass.parts else Way(way.of(size // k), k, _IN_FEWER)


def _records_are_faster(plan: Plan) -> bool:
    """Whether recording takes less time than one pass, which reads factors several times to scale them first.

    On a GPU, which multiplies fast, this takes longer than recording, unless an example has a single row."""
    factors = [cast(Contact, c.of_step).factors for c in plan.streaming().streamed]
    return jax.default_backend() == "gpu" and any(f is not None and f.positions > 1 for f in factors)


def _recorded(limit: float, found: Memory, plan: Plan, parts: list[int], reason: str) -> Way | None:
    """The ghost engine in the fewest ``parts`` that fit and cost less than a second pass.

    ``reason`` is given for the first."""
    size = plan.batch_size
    devices = jax.device_count()
    # Each part reads the parameters, adds its sum to another, and sends it to other devices.
    moved = 3 + (2 * _SENT if devices > 1 else 0)
    again = devices * moved * OPERATIONS_PER_BYTE * found.weights
    # So does each block of two passes.
    second_pass = size * plan.ordinary_cost + (_of_two_passes(size).number - 1) * again
    for k in parts:
        if found.recorded(k) <= limit and (k == parts[0] or (k - parts[0]) * again <= second_pass):
            return Way(plan.of(size // k), k, reason if k == parts[0] else _IN_FEWER)
    return None


def _keeping_more(limit: float, found: Memory, plan: Plan, parts: list[int], reason: str) -> Way | None:
    """The ghost engine with more gradients kept, in more parts if need be, if that saves time.

    ``reason`` is given for the first of ``parts``."""
    is_gpu, ways = jax.default_backend() == "gpu", []
    started = _STARTED * forward_work(plan.trace.body)[1] if is_gpu else start_bytes(plan.trace.body)
    again = OPERATIONS_PER_BYTE * (3 * plan.weight_bytes + started)
    for keeping in keeping_more(plan):
        # They take all of this memory, where the estimate of an ordinary gradient is up to a third too large, and the
        # slices that they are formed from (measured). A CPU slices a few examples at a time.
        kept = plan.batch_size * sum(formed_bytes(c) for c in keeping.kept - plan.kept)
        more = 2.5 * (_more_bytes(keeping) - _more_bytes(plan)) if is_gpu else kept
        fit = next((k for k in parts if found.recorded(k) + more / k <= limit), None)
        if fit is not None:
            saved = plan.batch_size * (plan.ghost_cost - keeping.ghost_cost) - (fit - parts[0]) * again
            ways.append((saved, Way(keeping.of(plan.batch_size // fit), fit, reason if fit == parts[0] else _IN_FEWER)))
    saved, way = max(ways, key=lambda found: found[0], default=(0, None))
    return way if saved > 0 else None


def _slower(limit: float, found: Memory, plan: Plan, parts: list[int], single: frozenset[int]) -> Way:
    """Two passes if they fit, else one in the fewest ``parts`` that do; if neither does, what takes hardly any more."""
    least = min(found.streamed, *map(found.recorded, parts))
    enough, reason = limit, _IN_FEWER
    if least > limit:  # more parts than needed would take many times as long
        enough, reason = _HARDLY_MORE * least, "nothing fits the memory allowed; this takes hardly more than the least"
    size, once = plan.batch_size, plan.streaming(single)
    if once.streamed and once.is_one_pass:  # which records the other parameters
        fit = next((k for k in parts if found.one_pass(k) <= limit), None)
        if fit is not None:
            return Way(once.of(size // fit), fit, "clipping as gradients come records less, and computes nothing twice")
        once = plan.streaming()
    fit = next((k for k in parts if found.recorded(k) <= enough), None)
    if found.streamed <= limit or fit is None:
        return Way(once, 1, "what it records in one pass would take more memory than is allowed")
    return Way(plan.of(size // fit), fit, reason)
