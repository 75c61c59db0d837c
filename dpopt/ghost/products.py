"""Weights that are products of parameters, such as adapters that are merged into a weight, or tensor trains.

They meet an activation one factor after the other: ``x (W + A B) = x W + (x A) B``. So each factor is a weight of its
own. As a whole, every example's gradient would be formed, as large as the product, and pulled back to the factors.

Where ``x A`` overflows although ``x (A B)`` does not, the example is left out, like any whose loss is not finite.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpopt.common.trees import is_narrow
from dpopt.ghost.primitives import ADD, BROADCAST, DIV, DOT, MUL, NEG, RESHAPE, SUB, TRANSPOSE
from dpopt.ghost.values import Made, Value, aval

# How many times the operations of a product with the whole weight the products with its factors may take.
_MOST_OPERATIONS = 1.25
Axes: TypeAlias = Sequence[int]


def remember(eqn: core.JaxprEqn, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
    """Notes how a prologue value was computed, if a product with it can be taken apart."""
    if len(outputs) != 1:
        return
    (out,) = outputs
    if not out.shape or is_narrow(out.dtype):  # half precision would round elsewhere
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
    weight, x, (contracted, batched) = inputs[position], inputs[1 - position], _dimensions(eqn)
    if not weight.made or not weight.made.has_product or any(batched) or x.dtype != weight.dtype:
        return None

    def run(x: jax.Array, read: Callable[[Value], jax.Array]) -> jax.Array:
        product = _Product(read, eqn.params["precision"], eqn.params["preferred_element_type"])
        out = product(x, weight, contracted[position], contracted[1 - position])
        free = x.ndim - len(contracted[0])  # axes of x; they come last where the weight is on the left
        return out if position else lax.transpose(out, (*range(free, out.ndim), *range(free)))

    parts: dict[Value, None] = {}  # in the order in which they are read

    def noted(value: Value) -> jax.Array:
        parts[value] = None
        return jnp.zeros(value.shape, value.dtype)

    jax.eval_shape(lambda x: run(x, noted), _shaped(x))
    if [*parts] == [weight]:
        return None
    closed = jax.make_jaxpr(lambda x, *given: run(x, dict(zip(parts, given, strict=True)).__getitem__))(
        *map(_shaped, (x, *parts))
    )
    saves = _operations(closed.jaxpr.eqns) <= _MOST_OPERATIONS * _operations([eqn])
    return (closed.jaxpr, closed.consts, [x, *parts]) if saves else None


@dataclass(frozen=True)
class _Product:
    """Products of x with a weight, in which free axes of x come before those of the weight."""

    read: Callable[[Value], jax.Array]
    precision: Any
    preferred_element_type: Any

    def __call__(self, x: jax.Array, weight: Value, ours: Axes, theirs: Axes) -> jax.Array:
        """The product over the axes ``ours`` of the weight and ``theirs`` of x."""
        if weight.made and weight.made.has_product:
            found = _RULES[weight.made.eqn.primitive](self, x, weight.made, weight.shape, [*ours], [*theirs])
            if found is not None:
                return found
        return lax.dot_general(
            x, self.read(weight), ((theirs, ours), ((), ())),
            precision=self.precision, preferred_element_type=self.preferred_element_type,
        )  # fmt: skip


_Shape: TypeAlias = tuple[int, ...]


def _of_product(product: _Product, x: Any, made: Made, shape: _Shape, ours: Axes, theirs: Axes) -> jax.Array | None:
    """First with a factor that has axes in common with x, then with the other: in the order that takes less."""
    if made.eqn.params["precision"] not in (None, product.precision):
        return None
    inner, _ = _dimensions(made.eqn)
    free = [[i for i in range(len(v.shape)) if i not in c] for v, c in zip(made.inputs, inner, strict=True)]
    places = [(side, i) for side in (0, 1) for i in free[side]]  # of the weight's axes
    common = [[(places[o][1], t) for o, t in zip(ours, theirs, strict=True) if places[o][0] == side] for side in (0, 1)]

    def beginning_with(one: int, x: jax.Array) -> jax.Array:
        (own, given), (later, behind) = [[*zip(*common[side], strict=True)] or [(), ()] for side in (one, 1 - one)]
        y = product(x, made.inputs[one], own, given)
        axes = [("x", t) for t in range(x.ndim) if t not in given]
        axes += [("w", i) for i in range(len(made.inputs[one].shape)) if i not in own]
        of_y = [axes.index(axis) for axis in [*(("w", i) for i in inner[one]), *(("x", t) for t in behind)]]
        out = product(y, made.inputs[1 - one], [*inner[1 - one], *later], of_y)
        left, right = (len(free[side]) - len(common[side]) for side in (0, 1))
        start = out.ndim - left - right
        swapped = (*range(start), *range(start + right, out.ndim), *range(start, start + right))
        return lax.transpose(out, swapped) if one else out

    orders = [functools.partial(beginning_with, one) for one in (0, 1) if common[one] or not ours]
    return min(orders, key=lambda run: _operations(jax.make_jaxpr(run)(x).jaxpr.eqns))(x)


def _of_sum(product: _Product, x: Any, made: Made, shape: _Shape, ours: Axes, theirs: Axes) -> jax.Array | None:
    if any(v.shape != shape for v in made.inputs):
        return None
    one, other = (product(x, v, ours, theirs) for v in made.inputs)
    return one - other if made.eqn.primitive is SUB else one + other


def _of_multiple(product: _Product, x: Any, made: Made, shape: _Shape, ours: Axes, theirs: Axes) -> jax.Array | None:
    """A weight times a number, or times an array along axes that are all contracted, or all not."""
    apply = lax.mul if made.eqn.primitive is MUL else lax.div
    weight, factor = made.inputs
    if apply is lax.mul and _broadcast(weight):
        weight, factor = factor, weight
    source = _broadcast(factor)
    if source is None or weight.shape != shape:
        return None
    array, axes = source
    along = {axis: n for n, axis in zip(array.shape, axes, strict=True) if n == shape[axis] != 1}
    free = [i for i in range(len(shape)) if i not in ours]

    def spread(over: _Shape, places: Axes) -> jax.Array:
        order = sorted(range(len(places)), key=places.__getitem__)  # a broadcast need not transpose
        turned = lax.transpose(lax.reshape(product.read(array), [*along.values()]), order)
        return lax.broadcast_in_dim(turned, over, sorted(places))

    if along.keys() <= {*free}:
        out = product(x, weight, ours, theirs)
        return apply(out, spread(out.shape, [out.ndim - len(free) + free.index(axis) for axis in along]))
    if along.keys() <= {*ours}:
        places = [theirs[ours.index(axis)] for axis in along]
        if places == sorted(places):
            return product(apply(x, spread(x.shape, places)), weight, ours, theirs)
    return None


def _broadcast(value: Value) -> tuple[Value, Axes] | None:
    """What a value was broadcast from, and along which of its axes that lies."""
    if value.shape == ():
        return value, ()
    if value.made and value.made.eqn.primitive is BROADCAST:
        return value.made.inputs[0], value.made.eqn.params["broadcast_dimensions"]
    return None


def _of_negative(product: _Product, x: Any, made: Made, shape: _Shape, ours: Axes, theirs: Axes) -> jax.Array | None:
    return -product(x, made.inputs[0], ours, theirs)


def _of_transposed(product: _Product, x: Any, made: Made, shape: _Shape, ours: Axes, theirs: Axes) -> jax.Array | None:
    order = made.eqn.params["permutation"]
    out = product(x, made.inputs[0], [order[i] for i in ours], theirs)
    wanted = [axis for i, axis in enumerate(order) if i not in ours]  # axes of the input, in their order in the result
    start, given = out.ndim - len(wanted), sorted(wanted)
    return lax.transpose(out, (*range(start), *(start + given.index(axis) for axis in wanted)))


def _of_merged(product: _Product, x: Any, made: Made, shape: _Shape, ours: Axes, theirs: Axes) -> jax.Array | None:
    """A weight whose axes are runs of axes of what it was reshaped from."""
    (inner,) = made.inputs
    groups = _groups(inner.shape, shape)
    if groups is None or made.eqn.params["dimensions"] is not None:
        return None
    split = {t: [inner.shape[i] for i in groups[o]] for o, t in zip(ours, theirs, strict=True)}
    starts: list[int] = []
    sizes: list[int] = []  # of x, with its contracted axes split
    for t, size in enumerate(x.shape):
        starts.append(len(sizes))
        sizes += split.get(t, [size])
    at = [starts[t] + i for o, t in zip(ours, theirs, strict=True) for i in range(len(groups[o]))]
    out = product(lax.reshape(x, sizes), inner, [i for o in ours for i in groups[o]], at)
    free = [n for i, n in enumerate(shape) if i not in ours]
    return lax.reshape(out, [*(n for t, n in enumerate(x.shape) if t not in theirs), *free])


def _groups(inner: _Shape, outer: _Shape) -> list[list[int]] | None:
    """For each axis of an array the axes that were merged into it by reshaping, or None if any were split."""
    found: list[list[int]] = []
    axes = (i for i, n in enumerate(inner) if n != 1)
    for size in outer:
        found.append([])
        while math.prod(inner[i] for i in found[-1]) < size:
            found[-1].append(next(axes))
        if math.prod(inner[i] for i in found[-1]) != size:
            return None
    return [[*found[0], *(i for i, n in enumerate(inner) if n == 1)], *found[1:]]


_RULES: dict[core.Primitive, Callable[..., jax.Array | None]] = {
    DOT: _of_product,
    ADD: _of_sum,
    SUB: _of_sum,
    MUL: _of_multiple,
    DIV: _of_multiple,
    NEG: _of_negative,
    TRANSPOSE: _of_transposed,
    RESHAPE: _of_merged,
}


def _dimensions(eqn: core.JaxprEqn) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
    """The contracted axes of both factors of a product, and their batch axes."""
    return eqn.params["dimension_numbers"]


def _shaped(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _operations(eqns: Sequence[core.JaxprEqn]) -> int:
    """Multiplications in products."""
    count = 0
    for eqn in eqns:
        if eqn.primitive is DOT:
            (left, right), contracted = (aval(v).shape for v in eqn.invars), _dimensions(eqn)[0][1]
            count += math.prod(left) * math.prod(n for i, n in enumerate(right) if i not in contracted)
    return count
