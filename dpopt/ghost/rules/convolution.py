"""The rule of convolutions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpopt.ghost.primitives import CONVOLUTION
from dpopt.ghost.rows import wide
from dpopt.ghost.rules.base import SHIFTED_SUM, Factors, Use, rule


@rule(CONVOLUTION)
def conv_general_dilated(use: Use) -> Factors | None:
    """For each offset of the filter, outer products of the shifted, strided input and the output cotangent."""
    p = use.params
    if use.position != 1 or p["batch_group_count"] != 1:
        return None
    dims, groups = p["dimension_numbers"], p["feature_group_count"]
    (out_axis, in_axis, *window_axes) = dims.rhs_spec
    window = tuple(use.weight[i] for i in window_axes)
    a, b = use.weight[in_axis], use.weight[out_axis] // groups
    images = use.input[dims.lhs_spec[0]]
    outputs = tuple(use.output[i] for i in dims.out_spec[2:])
    positions = images * math.prod(outputs)

    offsets = list(itertools.product(*map(range, window)))
    spatial = [(lo, hi, d - 1) for (lo, hi), d in zip(p["padding"], p["lhs_dilation"], strict=True)]

    def padded(x: jax.Array) -> jax.Array:
        """``[images, *sides, channels]``"""
        x = jnp.transpose(x, (dims.lhs_spec[0], *dims.lhs_spec[2:], dims.lhs_spec[1]))
        return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *spatial, (0, 0, 0)])

    def windows(x: jax.Array) -> jax.Array:
        """``[images, positions, K, channels]``, looked up: a CPU compiles slices one by one, and adds a copy."""
        apart = [math.prod(x.shape[axis + 2 : -1]) for axis in range(len(window))]  # pixels along each axis
        starts = np.indices(outputs).reshape(len(window), math.prod(outputs)).T * p["window_strides"] @ apart
        within = np.array(offsets) * p["rhs_dilation"] @ apart
        if any(
            map(any, spatial)
        ):  # stored: a look-up that has to tell pixels from padding takes up to three times as long
            x = lax.optimization_barrier(x)
        pixels = x.reshape(x.shape[0], -1, x.shape[-1])
        at = jnp.asarray(starts, jnp.int32)[:, None] + jnp.asarray(within, jnp.int32)[None]
        return pixels.at[:, at].get(mode="promise_in_bounds")

    def split(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        left = windows(padded(x)).reshape(positions, len(offsets), groups, a)
        y = jnp.transpose(y, (dims.out_spec[0], *dims.out_spec[2:], dims.out_spec[1]))
        left = jnp.moveaxis(left, 2, 0).reshape(groups, positions, -1)
        return left, jnp.swapaxes(y.reshape(positions, groups, b), 0, 1)

    # Weight axes in the order window, output channel (by group), input channel.
    order = (*window_axes, out_axis, in_axis)
    inverse = sorted(range(len(order)), key=order.__getitem__)

    def fold(w: jax.Array) -> jax.Array:
        w = jnp.transpose(w, order).reshape(math.prod(window), groups, b, a)
        return jnp.swapaxes(w, 2, 3)

    def unfold(g: jax.Array) -> jax.Array:
        g = jnp.swapaxes(g, 2, 3).reshape(*window, groups * b, a)
        return jnp.transpose(g, inverse)

    def inner(x: jax.Array, product: Callable[[jax.Array], jax.Array]) -> jax.Array:
        # Products of all pixels, computed once: a product of two windows sums them, both shifted by the same offset.
        x = padded(x)
        sides = x.shape[1:-1]
        pixels = product(jnp.swapaxes(x.reshape(-1, groups, a), 0, 1)).reshape(groups, *sides, *sides)
        total = 0
        for offset in offsets:
            first = [at * d for at, d in zip(offset, p["rhs_dilation"], strict=True)]
            start, limit = (0, *first, *first), [f + n for f, n in zip(first, outputs, strict=True)]
            total += lax.slice(pixels, start, (groups, *limit, *limit))
        return cast(jax.Array, total).reshape(groups, positions, positions)

    def columns(x: jax.Array) -> jax.Array:
        # Along each axis, the pixels of one offset are a stride apart: they are among all pixels of that phase.
        x, strides = jnp.square(wide(padded(x))), p["window_strides"]
        fill = [(0, -n % s, 0) for n, s in zip(x.shape[1:-1], strides, strict=True)]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *fill, (0, 0, 0)])
        apart = [n for side, s in zip(x.shape[1:-1], strides, strict=True) for n in (side // s, s)]
        x = x.reshape(images, *apart, groups * a)
        sums = jnp.sum(x, axis=(0, *range(1, x.ndim - 1, 2)))  # [phase within the stride along each axis, channels]
        starts = np.array(offsets) * p["rhs_dilation"] % strides  # [K, axes]
        return sums[*starts.T].reshape(-1, groups, a)

    K, sides = len(offsets), (use.input[i] for i in dims.lhs_spec[2:])
    rows = math.prod(
        max(n - 1, 0) * (d + 1) + min(n, 1) + lo + hi for n, (lo, hi, d) in zip(sides, spatial, strict=True)
    )
    shifts = SHIFTED_SUM * K * positions**2
    # Along an axis, the stride skips all but every stride-th window that could contain a pixel.
    steps = [s // math.gcd(s, d) for s, d in zip(p["window_strides"], p["rhs_dilation"], strict=True)]
    overlap = math.prod(-(-size // step) for size, step in zip(window, steps, strict=True))
    is_cheaper = 2 * a * rows**2 + shifts < 2 * a * K * positions**2
    offered = images == 1 and set(p["window_strides"]) == {1} and is_cheaper
    return Factors(
        (K, groups, a, b), positions, split, fold, unfold,
        filters=(out_axis,), inner=inner if offered else None, rows=rows, overlap=overlap,
        columns=columns if window else None,
    )  # fmt: skip
