"""The rule of convolutions."""

from __future__ import annotations

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
    if max(p["lhs_dilation"], default=1) > 1 and set(p["window_strides"]) == {1}:
        return _of_dilated_input(use)
    dims, groups = p["dimension_numbers"], p["feature_group_count"]
    (out_axis, in_axis, *window_axes) = dims.rhs_spec
    window = tuple(use.weight[i] for i in window_axes)
    a, b = use.weight[in_axis], use.weight[out_axis] // groups
    images = use.input[dims.lhs_spec[0]]
    outputs = tuple(use.output[i] for i in dims.out_spec[2:])
    positions = images * math.prod(outputs)

    offsets = _all_indices(window)
    spatial = [(lo, hi, d - 1) for (lo, hi), d in zip(p["padding"], p["lhs_dilation"], strict=True)]

    def padded(x: jax.Array) -> jax.Array:
        """``[images, *sides, channels]``"""
        x = _channels_last(x, dims.lhs_spec)
        return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *spatial, (0, 0, 0)])

    def windows(x: jax.Array) -> jax.Array:
        """``[images, positions of one image, offsets, channels]``"""
        if jax.default_backend() == "gpu":
            return _sliced(x, outputs, p["window_strides"], offsets * p["rhs_dilation"])
        if any(map(any, spatial)):
            x = lax.optimization_barrier(x)  # stored: looking up pixels or padding takes up to three times as long
        starts = _all_indices(outputs) * p["window_strides"]
        return _look_up(x, starts, offsets * p["rhs_dilation"])

    def split(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        left = windows(padded(x)).reshape(positions, len(offsets), groups, a)
        y = _channels_last(y, dims.out_spec)
        left = jnp.moveaxis(left, 2, 0).reshape(groups, positions, -1)
        return left, jnp.swapaxes(y.reshape(positions, groups, b), 0, 1)

    fold, unfold = _by_offset(use)

    def joint(x: jax.Array, y: jax.Array, product: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        # All pixels of a row of windows lie in one row of the input: instead of every pixel's window, columns of the
        # input are shifted along the last axis and rows of the cotangent along the first, so fewer copies are stored.
        x, y = padded(x), _channels_last(y, dims.out_spec)
        (rows, columns), apart = window, p["rhs_dilation"]
        shifted = [lax.slice_in_dim(x, j * apart[1], j * apart[1] + outputs[1], axis=2) for j in range(columns)]
        left = jnp.concatenate(shifted, axis=-1).reshape(-1, columns * a)
        around = [(i * apart[0], (rows - 1 - i) * apart[0], 0) for i in range(rows)]
        zero, same = jnp.zeros((), y.dtype), (0, 0, 0)
        right = jnp.concatenate([lax.pad(y, zero, [same, pad, same, same]) for pad in around], axis=-1)
        found = product(left, right.reshape(-1, rows * b)).reshape(columns, a, rows, b)
        return jnp.transpose(found, (2, 0, 1, 3)).reshape(-1, 1, a, b)

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
        starts = offsets * p["rhs_dilation"] % strides  # [K, axes]
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
    is_joint = len(window) == 2 and groups == 1 and set(p["window_strides"]) == {1}
    # Bytes of windows in half precision that are not stored, against those of the result, which is transposed.
    is_joint = is_joint and positions * a * (K - sum(window)) * 2 > 2 * K * a * b * 4
    return Factors(
        (K, groups, a, b), positions, split, fold, unfold,
        filters=(out_axis,), inner=inner if offered else None, rows=rows, overlap=overlap,
        columns=columns if window else None, joint=joint if is_joint else None,
    )  # fmt: skip


def _of_dilated_input(use: Use) -> Factors:
    """A transposed convolution: outer products of each pixel of the input and a window of the output cotangent.

    Windows of the input would mostly hold the zeros between its pixels."""
    p = use.params
    dims, groups = p["dimension_numbers"], p["feature_group_count"]
    (out_axis, in_axis, *window_axes) = dims.rhs_spec
    window = tuple(use.weight[i] for i in window_axes)
    a, b = use.weight[in_axis], use.weight[out_axis] // groups
    images, inputs = use.input[dims.lhs_spec[0]], tuple(use.input[i] for i in dims.lhs_spec[2:])
    positions = images * math.prod(inputs)

    # Pixel u is at low + u * dilation among the padded ones, which output t meets at offset k if that is t + k * rhs.
    offsets = _all_indices(window) * p["rhs_dilation"]
    pixels = _all_indices(inputs) * p["lhs_dilation"] + [low for low, _ in p["padding"]]
    outputs = [use.output[i] for i in dims.out_spec[2:]]
    before = np.maximum(np.max(offsets, axis=0, initial=0) - np.min(pixels, axis=0, initial=0), 0)
    after = np.maximum(np.max(pixels, axis=0, initial=0) + 1 - outputs, 0)

    def split(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        left = _channels_last(x, dims.lhs_spec)
        y = _channels_last(y, dims.out_spec)
        around = [(int(low), int(high), 0) for low, high in zip(before, after, strict=True)]
        y = lax.optimization_barrier(lax.pad(y, jnp.zeros((), y.dtype), [(0, 0, 0), *around, (0, 0, 0)]))
        right = _look_up(y, pixels + before, -offsets).reshape(positions, len(offsets), groups, b)
        right = jnp.moveaxis(right, 2, 0).reshape(groups, positions, -1)
        return jnp.swapaxes(left.reshape(positions, groups, a), 0, 1), right

    by_offset, back = _by_offset(use)

    def fold(w: jax.Array) -> jax.Array:
        return jnp.transpose(by_offset(w), (1, 2, 0, 3)).reshape(1, groups, a, -1)

    def unfold(g: jax.Array) -> jax.Array:
        return back(jnp.transpose(g.reshape(groups, a, len(offsets), b), (2, 0, 1, 3)))

    return Factors((1, groups, a, len(offsets) * b), positions, split, fold, unfold, views=len(offsets))


def _by_offset(use: Use) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """``fold`` to ``[K, N, a, b]`` for the filter's K offsets, and ``unfold``."""
    out_axis, in_axis, *window_axes = use.params["dimension_numbers"].rhs_spec
    groups, window = use.params["feature_group_count"], [use.weight[i] for i in window_axes]
    a, b = use.weight[in_axis], use.weight[out_axis] // groups
    order = (*window_axes, out_axis, in_axis)  # output channels by group
    inverse = sorted(range(len(order)), key=order.__getitem__)

    def fold(w: jax.Array) -> jax.Array:
        w = jnp.transpose(w, order).reshape(math.prod(window), groups, b, a)
        return jnp.swapaxes(w, 2, 3)

    def unfold(g: jax.Array) -> jax.Array:
        g = jnp.swapaxes(g, 2, 3).reshape(*window, groups * b, a)
        return jnp.transpose(g, inverse)

    return fold, unfold


def _channels_last(x: jax.Array, spec: tuple[int, ...]) -> jax.Array:
    """``[images, *sides, channels]``"""
    return jnp.transpose(x, (spec[0], *spec[2:], spec[1]))


def _all_indices(shape: tuple[int, ...]) -> np.ndarray:
    """The indices of an array's entries, in order, ``[entries, axes]``."""
    return np.indices(shape).reshape(len(shape), math.prod(shape)).T


def _sliced(x: jax.Array, outputs: tuple[int, ...], strides: tuple[int, ...], within: np.ndarray) -> jax.Array:
    """`_look_up` of one pixel in every ``strides``, by slices, which a GPU copies faster than it looks up."""

    def of(offset: np.ndarray) -> jax.Array:
        limits = [first + (n - 1) * s + 1 for first, n, s in zip(offset, outputs, strides, strict=True)]
        start, limit = [0, *offset, 0], [x.shape[0], *limits, x.shape[-1]]
        return lax.slice(x, start, limit, [1, *strides, 1]).reshape(x.shape[0], -1, x.shape[-1])

    return jnp.stack([of(offset) for offset in within], axis=2)


def _look_up(x: jax.Array, starts: np.ndarray, within: np.ndarray) -> jax.Array:
    """The pixels of ``x``, ``[images, *sides, channels]``, at all sums of two arrays of positions, ``[n, sides]``.

    ``[images, starts, within, channels]``. At once: a CPU compiles slices one by one, and adds a copy."""
    apart = [math.prod(x.shape[axis + 1 : -1]) for axis in range(1, x.ndim - 1)]  # pixels along each axis
    at = jnp.asarray(starts @ apart, jnp.int32)[:, None] + jnp.asarray(within @ apart, jnp.int32)[None]
    return x.reshape(x.shape[0], -1, x.shape[-1]).at[:, at].get(mode="promise_in_bounds")
