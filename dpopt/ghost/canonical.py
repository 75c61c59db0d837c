"""Equations rewritten into a form that a rule covers, or whose cotangent lies in memory as it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpopt.common.trees import accumulator_dtype, is_narrow
from dpopt.ghost.primitives import BROADCAST, RESHAPE
from dpopt.ghost.rows import bounded
from dpopt.ghost.values import aval


def as_gather(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[jax.Array]] | None:
    """A dynamic slice as the jaxpr of a gather and its constants, if it takes one entry or all along each axis.

    The starts become one array."""
    table, sizes = aval(eqn.invars[0]), eqn.params["slice_sizes"]
    if any(size not in (1, n) for n, size in zip(table.shape, sizes, strict=True)):
        return None

    def look_up(table: jax.Array, *starts: jax.Array) -> jax.Array:
        last = [n - size for n, size in zip(table.shape, sizes, strict=True)]
        at = jnp.stack([bounded(start, n + 1) for start, n in zip(starts, last, strict=True)])
        axes = tuple(range(table.ndim))
        numbers = lax.GatherDimensionNumbers(offset_dims=axes, collapsed_slice_dims=(), start_index_map=axes)
        return lax.gather(table, at, numbers, sizes, mode=lax.GatherScatterMode.CLIP)

    return traced(look_up, eqn)


def in_steps(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[jax.Array]] | None:
    """An equation that does two things, as the jaxpr of one after the other, and its constants; None for any other.

    A reshape may transpose first (``x.ravel(order="F")``), and so may a broadcast: no property of either allows for
    that. And a product of wide factors may be rounded to 16 bits, in which its cotangents would be added up."""
    params, primitive = eqn.params, eqn.primitive
    if primitive is RESHAPE and (axes := params["dimensions"]) is not None:
        return traced(lambda x: primitive.bind(lax.transpose(x, axes), **{**params, "dimensions": None}), eqn)
    if primitive is BROADCAST and [*params["broadcast_dimensions"]] != (
        places := sorted(params["broadcast_dimensions"])
    ):
        order = [params["broadcast_dimensions"].index(place) for place in places]
        sorted_params = {**params, "broadcast_dimensions": tuple(places)}
        return traced(lambda x: primitive.bind(lax.transpose(x, order), **sorted_params), eqn)
    narrow = params.get("preferred_element_type")
    if narrow is None or not is_narrow(narrow) or any(is_narrow(aval(v).dtype) for v in eqn.invars):
        return None
    wanted = max((accumulator_dtype(aval(v).dtype) for v in eqn.invars), key=lambda dtype: dtype.itemsize)
    return traced(lambda *x: primitive.bind(*x, **{**params, "preferred_element_type": wanted}).astype(narrow), eqn)


def weight_last(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[jax.Array]] | None:
    """A matrix product as the jaxpr of one with its operands swapped, and its constants.

    Where a weight is on the left, as in ``weight @ x``, an output has its positions last, and so has its cotangent.
    Mapped over positions or examples, every operation that follows would read what it needs across memory, until
    somebody moves the axis back; and norms, which need it back, would copy every cotangent. None if the operands are
    not treated alike, or something says how the result is laid out."""
    (contracted, batched), out = eqn.params["dimension_numbers"], len(aval(eqn.outvars[0]).shape)
    precision = eqn.params["precision"]
    if isinstance(precision, lax.DotAlgorithm) or eqn.params.get("out_sharding") is not None:
        return None
    params = {
        **eqn.params,
        "dimension_numbers": (contracted[::-1], batched[::-1]),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    shared = len(batched[0])
    free = out - shared - (len(aval(eqn.invars[0]).shape) - shared - len(contracted[0]))  # axes of x
    order = (*range(shared), *range(shared + free, out), *range(shared, shared + free))

    def swapped(weight: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.transpose(eqn.primitive.bind(x, weight, **params), order)

    return traced(swapped, eqn)


def traced(function: Callable[..., jax.Array], eqn: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[jax.Array]]:
    """The jaxpr of a function of an equation's inputs, and its constants."""
    closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in eqn.invars))
    return closed.jaxpr, closed.consts
