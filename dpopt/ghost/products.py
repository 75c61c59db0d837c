"""Weights that are products of parameters, such as adapters that are merged into a weight, or tensor trains.

They meet an activation one factor after the other: ``x (W + A B) = x W + (x A) B``. So each factor is a weight of its
own. As a whole, every example's gradient would be formed, as large as the product, and pulled back to the factors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from dpopt.ghost.primitives import ADD, BROADCAST, DIV, DOT, MUL, NEG, RESHAPE, SUB, TRANSPOSE
from dpopt.ghost.values import Made, Value, aval, is_narrow

# How many times the operations of a product with the whole weight the products with its factors may take.
_MOST_OPERATIONS = 1.25
Axes = Sequence[int]
# (x, weight, contracted axes of the weight, those of x) -> their product, with the axes of x before those of the weight
Contract = Callable[[jax.Array, Value, Axes, Axes], jax.Array]


def remember(eqn: core.JaxprEqn, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
    """Notes how a prologue value was computed, if a product with it can be taken apart."""
    out, *others = outputs
    if others or not out.shape or is_narrow(out.dtype):  # half precision would round elsewhere
        return
    if eqn.primitive is BROADCAST:
        out.made = Made(eqn, inputs, False)
    elif eqn.primitive in _RULES and out.leaves and not (eqn.primitive is DOT and any(_dimensions(eqn)[1])):
        has_product = eqn.primitive is DOT or any(v.made is not None and v.made.has_product for v in inputs)
        out.made = Made(eqn, inputs, has_product)


def taken_apart(
    eqn: core.JaxprEqn, inputs: Sequence[Value], position: int
) -> tuple[core.Jaxpr, Sequence[jax.Array], list[Value]] | None:
    """A product with a weight as products with what it is made of, where that takes few operations; or None.

    Returns a jaxpr, its constants and its inputs. Input ``position`` of the equation is the weight."""
    if eqn.primitive is not DOT or eqn.params.get("out_sharding") is not None:
        return None
    weight, x, params = inputs[position], inputs[1 - position], eqn.params
    contracted, batched = _dimensions(eqn)
    if not weight.made or not weight.made.has_product or any(batched) or x.dtype != weight.dtype:
        return None
    shared = {name: params[name] for name in ("precision", "preferred_element_type")}

    def product(x: jax.Array, read: Callable[[Value], jax.Array]) -> jax.Array:
        def contract(x: jax.Array, weight: Value, ours: Axes, theirs: Axes) -> jax.Array:
            if weight.made and weight.made.has_product and _precision(weight.made.eqn) in (None, shared["precision"]):
                found = _RULES[weight.made.eqn.primitive](contract, read, x, weight.made, weight, ours, theirs)
                if found is not None:
                    return found
            return lax.dot_general(x, read(weight), ((theirs, ours), ((), ())), **shared)

        out = contract(x, weight, contracted[position], contracted[1 - position])
        free = len(x.shape) - len(contracted[0])  # axes of x; they come last where the weight is on the left
        return out if position else lax.transpose(out, (*range(free, out.ndim), *range(free)))

    parts: list[Value] = []

    def noted(value: Value) -> jax.Array:
        parts.append(value)
        return jax.numpy.zeros(value.shape, value.dtype)

    jax.eval_shape(lambda x: product(x, noted), _shaped(x))
    parts = list(dict.fromkeys(parts))
    if parts == [weight]:
        return None
    closed = jax.make_jaxpr(lambda x, *given: product(x, dict(zip(parts, given, strict=True)).__getitem__))(
        *map(_shaped, (x, *parts))
    )
    saves = _all_operations(closed.jaxpr) <= _MOST_OPERATIONS * _operations(eqn)
    return (closed.jaxpr, closed.consts, [x, *parts]) if saves else None


def _dimensions(eqn: core.JaxprEqn) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
    """The contracted axes of both factors of a product, and their batch axes."""
    return eqn.params["dimension_numbers"]


def _precision(eqn: core.JaxprEqn) -> Any:
    return eqn.params.get("precision")


def _shaped(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _all_operations(jaxpr: core.Jaxpr) -> int:
    return sum(_operations(e) for e in jaxpr.eqns if e.primitive is DOT)


def _operations(eqn: core.JaxprEqn) -> int:
    left, right = (aval(v).shape for v in eqn.invars)
    return math.prod(left) * math.prod(n for i, n in enumerate(right) if i not in _dimensions(eqn)[0][1])


def _of_product(contract: Contract, read: Any, x: Any, made: Made, weight: Value, ours: Axes, theirs: Axes) -> Any:
    """First with a factor that has axes in common with x, then with the other: in the order that takes less."""
    inner, _ = _dimensions(made.eqn)
    free = [[i for i in range(len(v.shape)) if i not in c] for v, c in zip(made.inputs, inner, strict=True)]
    places = [(side, i) for side in (0, 1) for i in free[side]]  # of the weight's axes
    common = [[(places[o][1], t) for o, t in zip(ours, theirs, strict=True) if places[o][0] == side] for side in (0, 1)]

    def beginning_with(one: int, x: jax.Array) -> jax.Array:
        (own, given), (later, behind) = [[*zip(*common[side], strict=True)] or [(), ()] for side in (one, 1 - one)]
        y = contract(x, made.inputs[one], own, given)
        axes = [("x", t) for t in range(x.ndim) if t not in given]
        axes += [("w", i) for i in range(len(made.inputs[one].shape)) if i not in own]
        of_y = [axes.index(axis) for axis in [*(("w", i) for i in inner[one]), *(("x", t) for t in behind)]]
        out = contract(y, made.inputs[1 - one], [*inner[1 - one], *later], of_y)
        left, right = (len(free[side]) - len(common[side]) for side in (0, 1))
        start = out.ndim - left - right
        swapped = (*range(start), *range(start + right, out.ndim), *range(start, start + right))
        return lax.transpose(out, swapped) if one else out

    orders = [functools.partial(beginning_with, one) for one in (0, 1) if common[one] or not ours]
    return min(orders, key=lambda run: _all_operations(jax.make_jaxpr(run)(x).jaxpr))(x)


def _of_sum(contract: Contract, read: Any, x: Any, made: Made, weight: Value, ours: Axes, theirs: Axes) -> Any:
    if any(v.shape != weight.shape for v in made.inputs):
        return None
    one, other = (contract(x, v, ours, theirs) for v in made.inputs)
    return one - other if made.eqn.primitive is SUB else one + other


def _of_multiple(contract: Contract, read: Any, x: Any, made: Made, weight: Value, ours: Axes, theirs: Axes) -> Any:
    """A weight times a number, or times a vector along axes that are all contracted, or all not."""
    apply = lax.mul if made.eqn.primitive is MUL else lax.div
    inner, factor = made.inputs
    if apply is lax.mul and _broadcast(inner):
        inner, factor = factor, inner
    source = _broadcast(factor)
    if source is None or inner.shape != weight.shape:
        return None
    vector, axes = source
    kept = [(i, axis) for i, axis in enumerate(axes) if vector.shape[i] == weight.shape[axis] != 1]
    free = [i for i in range(len(weight.shape)) if i not in ours]
    ours, theirs = list(ours), list(theirs)

    def along(shape: tuple[int, ...], places: list[int]) -> jax.Array:
        sizes = [vector.shape[i] for i, _ in kept]
        return lax.broadcast_in_dim(lax.reshape(read(vector), sizes), shape, places)

    if all(axis in free for _, axis in kept):
        out = contract(x, inner, ours, theirs)
        start = out.ndim - len(free)
        return apply(out, along(out.shape, [start + free.index(axis) for _, axis in kept]))
    if all(axis in ours for _, axis in kept):
        places = [theirs[ours.index(axis)] for _, axis in kept]
        if places == sorted(places):
            return contract(apply(x, along(x.shape, places)), inner, ours, theirs)
    return None


def _broadcast(value: Value) -> tuple[Value, Axes] | None:
    """What a value was broadcast from, and along which of its axes that lies."""
    if value.shape == ():
        return value, ()
    if value.made and value.made.eqn.primitive is BROADCAST:
        return value.made.inputs[0], value.made.eqn.params["broadcast_dimensions"]
    return None


def _of_negative(contract: Contract, read: Any, x: Any, made: Made, weight: Value, ours: Axes, theirs: Axes) -> Any:
    return -contract(x, made.inputs[0], ours, theirs)


def _of_transposed(contract: Contract, read: Any, x: Any, made: Made, weight: Value, ours: Axes, theirs: Axes) -> Any:
    order = made.eqn.params["permutation"]
    out = contract(x, made.inputs[0], [order[i] for i in ours], theirs)
    wanted = [axis for i, axis in enumerate(order) if i not in ours]  # axes of the input, in their order in the result
    start, given = out.ndim - len(wanted), sorted(wanted)
    return lax.transpose(out, (*range(start), *(start + given.index(axis) for axis in wanted)))


def _of_merged(contract: Contract, read: Any, x: Any, made: Made, weight: Value, ours: Axes, theirs: Axes) -> Any:
    """A weight whose axes are runs of axes of what it was reshaped from."""
    (inner,) = made.inputs[:1]
    groups = _groups(inner.shape, weight.shape)
    if groups is None or made.eqn.params["dimensions"] is not None:
        return None
    split = {t: [inner.shape[i] for i in groups[o]] for o, t in zip(ours, theirs, strict=True)}
    starts, sizes = [], []  # of x, with its contracted axes split
    for t, size in enumerate(x.shape):
        starts.append(len(sizes))
        sizes += split.get(t, [size])
    at = [starts[t] + i for o, t in zip(ours, theirs, strict=True) for i in range(len(groups[o]))]
    out = contract(lax.reshape(x, sizes), inner, [i for o in ours for i in groups[o]], at)
    free = [i for i in range(len(weight.shape)) if i not in ours]
    return lax.reshape(out, [n for t, n in enumerate(x.shape) if t not in theirs] + [weight.shape[i] for i in free])


def _groups(inner: tuple[int, ...], outer: tuple[int, ...]) -> list[list[int]] | None:
    """For each axis of an array the axes that were merged into it by reshaping, or None if any were split."""
    found, axes = [], (i for i, n in enumerate(inner) if n != 1)
    for size in outer:
        found.append([])
        while math.prod(inner[i] for i in found[-1]) < size:
            found[-1].append(next(axes))
        if math.prod(inner[i] for i in found[-1]) != size:
            return None
    return [[*found[0], *(i for i, n in enumerate(inner) if n == 1)], *found[1:]]


_RULES: dict[core.Primitive, Callable[..., Any]] = {
    DOT: _of_product,
    ADD: _of_sum,
    SUB: _of_sum,
    MUL: _of_multiple,
    DIV: _of_multiple,
    NEG: _of_negative,
    TRANSPOSE: _of_transposed,
    RESHAPE: _of_merged,
}
