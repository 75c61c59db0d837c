"""How much memory the ways to a clipped gradient take beside an ordinary one's, and which are allowed.

Figures are estimates in bytes for a batch on all its devices together, of what is alive at the turn from the forward to
the backward pass: what differentiation keeps (JAX says so itself, the user's own rematerialisation included), the
parameters and their gradients.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
from jax.extend import core

from dpopt.engines import sums
from dpopt.ghost.costs import activation_bytes, leaf_bytes, nbytes
from dpopt.ghost.failures import CannotFollow
from dpopt.ghost.plan import Plan
from dpopt.ghost.values import Entry

_SMALL_BYTES = 1 << 26  # this much may be taken whatever the ordinary gradient takes
_LEAST_PART = 4  # examples
_FASTEST = "it should be the fastest, and the memory allows it"
_SMALL = f"it should be the fastest, and takes less than {_SMALL_BYTES >> 20} MB, which is always allowed"


class Memory(NamedTuple):
    """Bytes at the peak, of a batch."""

    ordinary: float
    streamed: float
    vmap: float
    weights: float
    examples: float  # what is recorded of all examples, with what differentiation keeps beside it

    def recorded(self, parts: int) -> float:
        """Of the batch in so many parts, whose sums are added up."""
        return self.examples / parts + (2 + (parts > 1)) * self.weights


def estimate(plan: Plan, loss_fn: Callable, params: Any, example: Any, has_aux: bool) -> Memory:
    """For a plan's batch size; only shapes matter."""
    size, contacts = plan.batch_size, plan.trace.contacts
    weights = sum(leaf_bytes(plan.trace, leaf.leaf) for leaf in plan.leaves)
    kept = _kept_by_differentiation(loss_fn, params, example, has_aux)
    taps = {c: nbytes(c.tap_shape, c.tap_dtype) for c in contacts}
    inputs = sum(activation_bytes(c) - taps[c] for c in contacts)
    cotangents = sum(taps[c] for c in contacts if not c.shares)
    streamed = plan.streaming().streamed
    left = sum(activation_bytes(c) for c in contacts if c not in streamed)
    return Memory(
        ordinary=size * kept + 2 * weights,
        streamed=size * (kept + left) + 2 * weights,
        vmap=size * (kept + weights) + 2 * weights,
        weights=weights,
        examples=size * (max(kept, inputs) + cotangents),
    )


def allowed(memory: float | int, ordinary: float) -> float:
    """The bytes that ``memory`` stands for: an integer is bytes, a float a multiple of the ordinary gradient's."""
    return memory if isinstance(memory, numbers.Integral) else memory * ordinary


class Way(NamedTuple):
    """How a batch is taken."""

    plan: Plan | None  # of one part; None: vmap
    parts: int
    reason: str = ""


def choose(
    plan: Plan, loss_fn: Callable, params: Any, example: Any, has_aux: bool, memory: float | int, *, may_split: bool,
    may_vmap: bool, limits: Sequence[Any] = (), layer_axes: Sequence[int] = (),
) -> Way:  # fmt: skip
    """The fastest way that fits into ``memory``, or else the smallest.

    Args:
        plan: of the whole batch.
        memory: see `allowed`.
        may_split: whether the batch may be taken in parts.
        may_vmap: whether plain per-example gradients may be taken where they are faster.
        limits: of each parameter, its clip norm if it is clipped by its own norm alone, else None.
        layer_axes: how many axes of each parameter number layers, which are clipped one by one.

    Raises:
      CannotFollow: layers are to be clipped one by one which no scan takes one by one.
    """
    single = single_parameters(plan, limits, layer_axes)
    if any(layer_axes):
        missing = [plan.paths[i] for i, axes in enumerate(layer_axes) if axes and i not in single]
        if missing:
            raise CannotFollow("layers", f"{missing[0]} is no weight that a scan reads layer by layer, once a layer")
        return Way(plan.streaming(single), 1, "layers that are clipped one by one are clipped as their gradients come")
    size, parts = plan.batch_size, plan.parts if may_split else 1
    wants_vmap = may_vmap and plan.prefers_vmap
    formed = size * sum(leaf_bytes(plan.trace, leaf.leaf) for leaf in plan.leaves)
    recorded = size / parts * sum(activation_bytes(c) for c in plan.trace.contacts)
    if (formed if wants_vmap else recorded) <= _SMALL_BYTES:  # no more need be asked
        return Way(None, 1, _SMALL) if wants_vmap else Way(plan.of(size // parts), parts, _SMALL)
    used = {leaf.leaf for leaf in plan.leaves if leaf.contacts}
    if used <= single:  # one pass: nothing is recorded, nothing computed twice
        return Way(plan.streaming(single), 1, "every parameter is clipped by its own norm, as its gradient comes")
    found = estimate(plan, loss_fn, params, example, has_aux)
    limit = allowed(memory, found.ordinary)
    if wants_vmap and found.vmap <= limit:
        return Way(None, 1, _FASTEST)
    # A part of a sharded batch would lie on some devices and leave the others idle.
    more = [k for k in range(parts, size + 1) if size % k == 0] if may_split and jax.device_count() == 1 else [parts]
    # Parts cost less time than a second pass, as long as each has a few examples.
    fitting = [k for k in more if found.recorded(k) <= limit and (k == parts or size // k >= _LEAST_PART)]
    if fitting:
        fewest = "vmap, which should be faster, would take more memory than is allowed" if wants_vmap else _FASTEST
        reason = fewest if fitting[0] == parts else "in fewer parts it would take more memory than is allowed"
        return Way(plan.of(size // fitting[0]), fitting[0], reason)
    if found.streamed < found.recorded(more[-1]):
        return Way(plan.streaming(single), 1, "what it records in one pass would take more memory than is allowed")
    return Way(plan.of(size // more[-1]), more[-1], "nothing fits the memory allowed; this takes least")


def single_parameters(plan: Plan, limits: Sequence[Any], layer_axes: Sequence[int]) -> frozenset[int]:
    """The parameters that can be clipped as their gradients come."""
    found = set()
    for contact in plan.streaming().streamed if limits else ():
        (leaf,), entry = contact.weight.leaves, cast(Entry, contact.weight.entry)
        axes = layer_axes[leaf] if layer_axes else 0
        taken = len(contact.loops) or int(contact.apply is None and axes)  # a weight itself comes with all its layers
        by_layer = axes == taken and (not axes or entry.by_layer)
        # What a float sum has lost is not multiplied: that would round it as a whole.
        exact = not sums.needs_remainder(plan.batch_size) or (entry.copy and not plan.scaled[leaf])
        if limits[leaf] is not None and by_layer and exact:
            found.add(leaf)
    return frozenset(found)


def _kept_by_differentiation(loss_fn: Callable, params: Any, example: Any, has_aux: bool) -> float:
    """Bytes that an ordinary gradient of one example keeps from its forward pass, beside what all examples share."""

    def pulled(params, example):
        return jax.tree.leaves(jax.vjp(lambda p: loss_fn(p, example), params, has_aux=has_aux)[1])

    jaxpr = jax.make_jaxpr(pulled)(params, example).jaxpr
    own = set(jaxpr.invars[len(jax.tree.leaves(params)) :])  # depend on the example
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, core.Literal) and v in own for v in eqn.invars):
            own.update(eqn.outvars)
    kept = {v for v in jaxpr.outvars if not isinstance(v, core.Literal) and v in own}
    return float(sum(v.aval.size * v.aval.dtype.itemsize for v in kept))
