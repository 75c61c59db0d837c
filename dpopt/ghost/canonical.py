"""Rewrites equations into forms that run fast or that a rule covers.

Convolutions are written channels last, the order in which XLA's CPU backend is fast everywhere.
The transpose of a convolution with respect to its filter has its batch in the channels' place, and the transpose with
respect to its image has the filter's channels swapped. XLA reorders such operands by itself, but not inside loops: in
a `lax.scan` over training steps the gradient of a filter then takes about 70 times as long (53.8 ms against 0.71 ms
for 320x8x8x16 to 32 channels on two cores; JAX issue 12868), and that of an image five times as long.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpopt.ghost.primitives import CONVOLUTION
from dpopt.ghost.rows import bounded
from dpopt.ghost.values import aval, is_narrow

_MOST_PRODUCTS = 128  # entries of a filter, such as 11 x 11


def channels_last(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """``function`` of one array with its convolutions rewritten; meant for the transpose of a single primitive."""

    def run(x: jax.Array) -> jax.Array:
        closed = jax.make_jaxpr(function)(x)
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env[closed.jaxpr.invars[0]] = x

        def read(var: core.Var | core.Literal) -> jax.Array:
            return var.val if isinstance(var, core.Literal) else env[var]

        for eqn in closed.jaxpr.eqns:
            args = [read(v) for v in eqn.invars]
            bind = _convolved if eqn.primitive is CONVOLUTION else eqn.primitive.bind
            out = bind(*args, **eqn.params)
            env.update(zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True))
        (out,) = closed.jaxpr.outvars
        return read(out)

    return run


def convolution(eqn: core.JaxprEqn, moving: Sequence[int]) -> Callable[..., list[jax.Array]]:
    """The equation as a function, channels last in both directions; only the inputs in ``moving`` get gradients.

    If both do, every example has its own filter. As one grouped convolution over the batch that would be slow, and XLA
    may compute it as one dense convolution with zeros between examples, where ``0 * nan`` spreads. So the examples are
    processed one after the other.
    """
    in_turn = jax.custom_batching.sequential_vmap if len(moving) > 1 else lambda function: function
    forward = in_turn(lambda *operands: _convolve(*operands, **eqn.params))

    def gradient(i: int) -> Callable[..., jax.Array]:
        """The gradient of operand i, from the other operand and the output's cotangent."""

        def pulled(other: jax.Array, cotangent: jax.Array) -> jax.Array:
            def of_one(x: jax.Array) -> jax.Array:
                return eqn.primitive.bind(*((x, other) if i == 0 else (other, x)), **eqn.params)

            transposed = jax.linear_transpose(of_one, eqn.invars[i].aval)
            return channels_last(lambda y: transposed(y)[0])(cotangent)

        return in_turn(pulled)

    gradients = {i: gradient(i) for i in moving}

    @jax.custom_vjp
    def run(*operands: jax.Array) -> list[jax.Array]:
        return [forward(*operands)]

    def keep(*operands: jax.Array):  # an operand is kept for the other one's gradient
        return run(*operands), [x if 1 - i in moving else None for i, x in enumerate(operands)]

    def pull(kept: list[jax.Array | None], cotangents: list[jax.Array]):
        return tuple(gradients[i](kept[1 - i], *cotangents) if i in moving else None for i in (0, 1))

    run.defvjp(keep, pull)
    return run


def _convolved(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """A convolution, as products where XLA's own is slow.

    Those are the gradients of grouped filters on CPUs, for which XLA takes 2 to 300 times as long. Besides, where a
    batch's shares on several devices are mapped, all gradients of filters: under ``vmap`` they are one grouped
    convolution, for which XLA would send all images to all devices, and compute all of it on each."""
    by_products = functools.partial(_convolve, bind=_by_products, **params)
    is_grouped = params["batch_group_count"] > 1  # the gradient of a grouped filter
    if is_grouped and jax.default_backend() == "cpu" and _has_few_products(lhs, rhs, **params):
        return by_products(lhs, rhs)
    plain = functools.partial(_convolve, **params)
    run = jax.custom_batching.custom_vmap(plain)

    @run.def_vmap
    def _(size: int, are_mapped: Sequence[bool], lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, bool]:
        is_partitioned = all(are_mapped) and jax.device_count() > 1 and _has_few_products(lhs[0], rhs[0], **params)
        one = by_products if is_partitioned else plain
        return jax.vmap(one, in_axes=[0 if m else None for m in are_mapped])(lhs, rhs), True

    return run(lhs, rhs)


def _has_few_products(lhs: jax.Array, rhs: jax.Array, **params: Any) -> bool:
    """Whether `_by_products` can take a convolution: the gradient of a filter, if its result is as small as one."""
    out = jax.eval_shape(functools.partial(_convolve, **params), lhs, rhs)
    positions = math.prod(out.shape[i] for i in params["dimension_numbers"].out_spec[2:])
    return params["feature_group_count"] == 1 and positions <= _MOST_PRODUCTS


def _by_products(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    batch_group_count: int,
    precision: Any,
    preferred_element_type: Any,
    **_: Any,
) -> jax.Array:
    """A convolution, channels last, as one product for each position of its result."""
    groups, inner = batch_group_count, range(1, lhs.ndim - 1)
    within = [(low, high, step - 1) for (low, high), step in zip(padding, lhs_dilation, strict=True)]
    lhs = lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), *within, (0, 0, 0)])
    sizes = [(n - 1) * step + 1 for n, step in zip(rhs.shape, rhs_dilation, strict=False)]  # of a window
    rhs = rhs.reshape(*rhs.shape[:-1], groups, -1)
    contracted = tuple(range(2, lhs.ndim + 1)), tuple(range(rhs.ndim - 2))
    dimensions = contracted, ((0,), (rhs.ndim - 2,))

    def product(starts: tuple[int, ...]) -> jax.Array:
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        window = lax.slice(lhs, (0, *starts, 0), (len(lhs), *ends, lhs.shape[-1]), (1, *rhs_dilation, 1))
        window = window.reshape(groups, -1, *window.shape[1:])
        return lax.dot_general(
            window, rhs, dimensions, precision=precision, preferred_element_type=preferred_element_type
        )

    spans = zip((lhs.shape[i] for i in inner), sizes, window_strides, strict=True)
    starts = [range(0, n - size + 1, step) for n, size, step in spans]
    products = jnp.stack([product(at) for at in itertools.product(*starts)])  # [positions, groups, images, channels]
    return jnp.moveaxis(products, 2, 0).reshape(len(lhs) // groups, *map(len, starts), -1)


def _convolve(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    bind: Callable[..., jax.Array] = CONVOLUTION.bind,
    **params: object,
) -> jax.Array:
    lhs_spec, rhs_spec, out_spec = dimension_numbers
    n = lhs.ndim
    inner = tuple(range(1, n - 1))
    lhs = jnp.transpose(lhs, (lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))
    rhs = jnp.transpose(rhs, (*rhs_spec[2:], rhs_spec[1], rhs_spec[0]))
    images, filters = (0, n - 1, *inner), (n - 1, n - 2, *range(n - 2))
    numbers = lax.ConvDimensionNumbers(images, filters, images)
    out = bind(lhs, rhs, dimension_numbers=numbers, **params)
    sources = [0] * n  # the axis of `out` that becomes each axis of the result
    for axis, place in zip((0, n - 1, *inner), out_spec, strict=True):
        sources[place] = axis
    return jnp.transpose(out, sources)


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

    closed = jax.make_jaxpr(look_up)(*(jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in eqn.invars))
    return closed.jaxpr, closed.consts


def differentiated(eqn: core.JaxprEqn, moving: Sequence[int]) -> Callable[..., list[jax.Array]]:
    """The equation as a function that is differentiated by its inputs in ``moving``."""
    return convolution(eqn, moving) if eqn.primitive is CONVOLUTION else binder(eqn)


def binder(eqn: core.JaxprEqn) -> Callable[..., list[jax.Array]]:
    """The equation as a function of its inputs that returns a list of its outputs."""

    def run(*args: jax.Array) -> list[jax.Array]:
        params = eqn.primitive.get_bind_params(eqn.params)
        functions, params = params if isinstance(params, tuple) else ((), params)
        wanted = params.get("preferred_element_type")
        if wanted is not None and is_narrow(wanted) and not is_narrow(args[0].dtype):  # run wide: see `Op.wide`
            params = {**params, "preferred_element_type": args[0].dtype}
        out = eqn.primitive.bind(*functions, *args, **params)
        return list(out) if eqn.primitive.multiple_results else [out]

    return run
