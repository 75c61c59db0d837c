"""How the values that are computed from parameters alone depend on them: entry by entry, or otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from dpopt.ghost import primitives
from dpopt.ghost.binding import binder
from dpopt.ghost.values import Entry, Value, aval

# Here values matter alone: what is looked at is a derivative already.
_CALLS = primitives.CALLS | {primitives.CUSTOM_JVP: "call_jaxpr"}


def describe(eqn: core.JaxprEqn, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
    """Sets how the outputs of a prologue equation depend on parameters."""
    sources = [v for v in inputs if v.leaves]
    if eqn.primitive is primitives.STOP_GRADIENT or not sources:
        return
    for out in outputs:
        if jnp.issubdtype(out.dtype, jnp.floating):
            out.leaves = frozenset().union(*(v.leaves for v in sources))
            out.entry = _entry(eqn, inputs, sources, out)
            if out.entry and (part := _part(eqn, inputs, outputs.index(out))):
                out.entry = out.entry._replace(part=part)


def _entry(eqn: core.JaxprEqn, inputs: Sequence[Value], sources: Sequence[Value], out: Value) -> Entry | None:
    entry = sources[0].entry
    if entry is None:
        return None
    if eqn.primitive in primitives.LAYOUT and math.prod(out.shape) <= math.prod(sources[0].shape):
        if len(sources) > 1:
            return None
        order, layers = entry.order, entry.layers
        if eqn.primitive is primitives.TRANSPOSE:
            permutation = eqn.params["permutation"]
            order = order and tuple(order[i] for i in permutation)
            layers = layers if permutation[:layers] == tuple(range(layers)) else 0
        elif eqn.primitive not in primitives.CASTS:
            order, layers = None, _layer_axes(eqn, sources[0], out)
        return entry._replace(order=order, layers=layers)
    if out.shape != sources[0].shape or not _are_aligned(sources):
        return None
    # What does not depend on parameters is added: a quantised weight whose derivative is that of the weight, say.
    if len(sources) == 1 and (
        eqn.primitive is primitives.ADD or (eqn.primitive is primitives.SUB and sources[0] is inputs[0])
    ):
        return entry
    if eqn.primitive in primitives.ENTRYWISE or (eqn.primitive is primitives.CUSTOM_JVP and _is_entrywise(eqn, inputs)):
        return entry._replace(copy=False)
    return None


def _part(eqn: core.JaxprEqn, inputs: Sequence[Value], at: int) -> tuple[range, ...] | None:
    """`Entry.part` of an equation's output number ``at`` that takes a part of a whole parameter, else None."""
    source, *indices = inputs
    order = source.entry.order if source.entry else None
    if order is None:
        return None
    taken = [range(n) for n in source.shape]
    match eqn.primitive:
        case primitives.SLICE:
            taken = [*map(range, eqn.params["start_indices"], eqn.params["limit_indices"])]
        case primitives.DYNAMIC_SLICE if all(i.constant is not None for i in indices):
            sizes = eqn.params["slice_sizes"]
            starts = [min(max(int(i.constant), 0), n - k) for i, n, k in zip(indices, source.shape, sizes, strict=True)]
            taken = [range(start, start + k) for start, k in zip(starts, sizes, strict=True)]
        case primitives.SPLIT:
            axis, sizes = eqn.params["axis"], eqn.params["sizes"]
            taken[axis] = range(sum(sizes[:at]), sum(sizes[: at + 1]))
        case primitives.UNSTACK:
            taken[eqn.params["axis"]] = range(at, at + 1)
        case _:
            return None
    return tuple(taken[order.index(axis)] for axis in range(len(order)))


def _layer_axes(eqn: core.JaxprEqn, source: Value, out: Value) -> int:
    """`Entry.layers` of a value in another shape: nested scans read a stack as a stack of stacks, say."""
    layers = source.entry.layers if source.entry else 0
    if not layers or eqn.primitive not in primitives.RESHAPING:
        return 0
    count = math.prod(source.shape[:layers])
    return next((n for n in range(1, len(out.shape) + 1) if math.prod(out.shape[:n]) == count), 0)


def _are_aligned(sources: Sequence[Value]) -> bool:
    """Whether entries in the same place depend on the same entry of one parameter."""
    if len(sources) == 1:
        return True
    return len({(v.leaves, v.shape, v.entry and v.entry.order) for v in sources}) == 1 and bool(
        len(sources[0].leaves) == 1 and sources[0].entry and sources[0].entry.order
    )


def _is_entrywise(eqn: core.JaxprEqn, inputs: Sequence[Value]) -> bool:
    """Whether a function with a derivative of its own, and that derivative, map entries one by one."""
    at = [i for i, v in enumerate(inputs) if v.leaves]
    args = [jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in eqn.invars]

    def derivative(tangents: list[jax.Array], *args: jax.Array) -> Any:
        def function(*sources: jax.Array) -> list[jax.Array]:
            given = dict(zip(at, sources, strict=True))
            return binder(eqn)(*(given.get(i, x) for i, x in enumerate(args)))

        return jax.jvp(function, [args[i] for i in at], tangents)

    jaxpr = jax.make_jaxpr(derivative)([args[i] for i in at], *args).jaxpr
    moving = [*range(len(at)), *(len(at) + i for i in at)]
    return _maps_entries(jaxpr, {jaxpr.invars[i] for i in moving}, args[at[0]].shape) is not None


def _maps_entries(jaxpr: core.Jaxpr, moving: Iterable[core.Var], shape: tuple[int, ...]) -> set[core.Var] | None:
    """The variables that depend on the ``moving`` ones, if they all do so entry by entry; else None."""
    found = set(moving)
    for eqn in jaxpr.eqns:
        own = [i for i, v in enumerate(eqn.invars) if not isinstance(v, core.Literal) and v in found]
        if not own:
            continue
        if eqn.primitive in _CALLS:
            inner = eqn.params[_CALLS[eqn.primitive]].jaxpr
            inside = _maps_entries(inner, [inner.invars[i] for i in own], shape)
            if inside is None:
                return None
            found |= {v for v, out in zip(eqn.outvars, inner.outvars, strict=True) if out in inside}
            continue
        if eqn.primitive not in primitives.BY_ENTRY or any(aval(v).shape != shape for v in eqn.outvars):
            return None
        found |= set(eqn.outvars)
    return found
