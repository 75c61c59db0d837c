"""Convolutions and their gradients, channels last, the order in which XLA's CPU backend is fast everywhere.

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

from dpopt.ghost.few_channels import add_up, can_add_up
from dpopt.ghost.primitives import CONVOLUTION

_MOST_PRODUCTS = 128  # entries of a filter, such as 11 x 11


def channels_last(
    function: Callable[[jax.Array], jax.Array], of_image: bool = False
) -> Callable[[jax.Array], jax.Array]:
    """``function`` of one array with its convolutions rewritten: the transpose of a single primitive.

    Args:
        of_image: whether it is the transpose of a convolution with respect to its image, not its filter.
    """
    convolved = _convolve if of_image else _filter_gradient

    def run(x: jax.Array) -> jax.Array:
        closed = jax.make_jaxpr(function)(x)
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env[closed.jaxpr.invars[0]] = x

        def read(var: core.Var | core.Literal) -> jax.Array:
            return var.val if isinstance(var, core.Literal) else env[var]

        for eqn in closed.jaxpr.eqns:
            args = [read(v) for v in eqn.invars]
            bind = convolved if eqn.primitive is CONVOLUTION else eqn.primitive.bind
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
            return channels_last(lambda y: transposed(y)[0], of_image=i == 0)(cotangent)

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


def convolved(eqn: core.JaxprEqn) -> Callable[..., list[jax.Array]]:
    """The equation as a function, channels last, for where nothing differentiates it."""
    return lambda *operands: [_convolve(*operands, **eqn.params)]


def _filter_gradient(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """A convolution that is the gradient of a filter, as products where XLA's own is slow.

    That is on CPUs where the filter is grouped or transposed: XLA takes 2 to 300 times as long. Besides, where a
    batch's shares on several devices are mapped: under ``vmap`` their gradients are one grouped convolution, for which
    XLA would send all images to all devices, and compute all of it on each."""
    by_products = functools.partial(_convolve, bind=_by_products, **params)
    is_slow = params["batch_group_count"] > 1 or max(params["lhs_dilation"]) > 1
    if is_slow and jax.default_backend() == "cpu" and _has_few_products(lhs, rhs, **params):
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
    """A convolution, channels last, as one product for each position of its result.

    Each takes a window of one operand: of the images, or of the filters where that saves dilating the images."""
    groups, size = batch_group_count, [*zip(lhs.shape[1:], rhs.shape, strict=False)][:-1]
    is_of_filters = max(lhs_dilation) > 1 and max(rhs_dilation) == 1
    reach = [((n - 1) * d + 1, (k - 1) * r + 1) for (n, k), d, r in zip(size, lhs_dilation, rhs_dilation, strict=True)]
    spans = zip(reach, padding, window_strides, strict=True)
    starts = [range(0, low + n + high - k + 1, step) for (n, k), (low, high), step in spans]
    before = [max(0, at[-1] - low) for at, (low, _) in zip(starts, padding, strict=True)]
    if is_of_filters:  # image i meets entry i d + low - start
        after = [max(0, low + n - k) for (n, k), (low, _) in zip(reach, padding, strict=True)]
        rhs = jnp.pad(rhs, [*zip(before, after, strict=True), (0, 0), (0, 0)])
    else:
        within = [(low, high, step - 1) for (low, high), step in zip(padding, lhs_dilation, strict=True)]
        lhs = lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), *within, (0, 0, 0)])
    lhs, rhs = lhs.reshape(groups, -1, *lhs.shape[1:]), rhs.reshape(*rhs.shape[:-1], groups, -1)
    contracted = tuple(range(2, lhs.ndim)), tuple(range(rhs.ndim - 2))
    dimensions = contracted, ((0,), (rhs.ndim - 2,))

    def window(x: jax.Array, first: int, begin: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> jax.Array:
        index = (slice(i, i + n, step) for i, n, step in zip(begin, sizes, steps, strict=True))
        return x[(*[slice(None)] * first, *index)]

    def product(at: tuple[int, ...]) -> jax.Array:
        if is_of_filters:
            begin = [i + low - start for i, (low, _), start in zip(before, padding, at, strict=True)]
            operands = lhs, window(rhs, 0, begin, [n for n, _ in reach], lhs_dilation)
        else:
            operands = window(lhs, 2, at, [k for _, k in reach], rhs_dilation), rhs
        return lax.dot_general(
            *operands, dimensions, precision=precision, preferred_element_type=preferred_element_type
        )

    products = jnp.stack([product(at) for at in itertools.product(*starts)])  # [positions, groups, images, channels]
    return jnp.moveaxis(products, 2, 0).reshape(lhs.shape[1], *map(len, starts), -1)


def _convolve(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    bind: Callable[..., jax.Array] = CONVOLUTION.bind,
    **params: Any,
) -> jax.Array:
    lhs_spec, rhs_spec, out_spec = dimension_numbers
    n = lhs.ndim
    inner = tuple(range(1, n - 1))
    lhs = jnp.transpose(lhs, (lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))
    rhs = jnp.transpose(rhs, (*rhs_spec[2:], rhs_spec[1], rhs_spec[0]))
    images, filters = (0, n - 1, *inner), (n - 1, n - 2, *range(n - 2))
    numbers = lax.ConvDimensionNumbers(images, filters, images)
    adds_up = bind == CONVOLUTION.bind and can_add_up(rhs, **params)
    out = add_up(lhs, rhs, **params) if adds_up else bind(lhs, rhs, dimension_numbers=numbers, **params)
    sources = [0] * n  # the axis of `out` that becomes each axis of the result
    for axis, place in zip((0, n - 1, *inner), out_spec, strict=True):
        sources[place] = axis
    return jnp.transpose(out, sources)
