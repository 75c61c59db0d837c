"""Convolutions with few channels a group, such as depthwise ones, added up entry by entry of the filter.

XLA's CPU backend takes 3 to 40 times as long for them: its library multiplies matrices, here of a few columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpopt.ghost.rows import wide

_MOST_CHANNELS = 4  # of the image, in a group: with sixteen, XLA's library is as fast
_MOST_TERMS = 64  # of an entry of the result, such as 7 x 7: each takes time to compile


def can_add_up(rhs: jax.Array, *, feature_group_count: int, batch_group_count: int, **_: Any) -> bool:
    """Whether `add_up` is the fastest way, channels last."""
    *window, channels, _outputs = rhs.shape
    is_small = channels <= _MOST_CHANNELS and math.prod(window) * channels <= _MOST_TERMS
    is_grouped = feature_group_count > 1 and batch_group_count == 1
    return is_grouped and is_small and jax.default_backend() == "cpu" and jnp.issubdtype(rhs.dtype, jnp.floating)


def add_up(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    feature_group_count: int,
    preferred_element_type: Any,
    **_: Any,
) -> jax.Array:
    """A convolution, channels last: the sum over a filter's entries of the shifted image times the entry."""
    dtype = preferred_element_type or jnp.result_type(lhs, rhs)
    lhs, rhs = wide(lhs), wide(rhs)
    *window, channels, _outputs = rhs.shape
    within = [(low, high, step - 1) for (low, high), step in zip(padding, lhs_dilation, strict=True)]
    lhs = lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), *within, (0, 0, 0)])
    sizes = [
        max(0, (n - (k - 1) * apart - 1) // step + 1)
        for n, k, apart, step in zip(lhs.shape[1:-1], window, rhs_dilation, window_strides, strict=True)
    ]
    if 0 in sizes:
        return jnp.zeros((len(lhs), *sizes, rhs.shape[-1]), dtype)
    lhs = lhs.reshape(*lhs.shape[:-1], feature_group_count, channels, 1)
    rhs = rhs.reshape(*window, channels, feature_group_count, -1)

    def product(offset: tuple[int, ...], channel: int) -> jax.Array:
        starts = [i * apart for i, apart in zip(offset, rhs_dilation, strict=True)]
        ends = [i + (n - 1) * step + 1 for i, n, step in zip(starts, sizes, window_strides, strict=True)]
        begin, end = (0, *starts, 0, channel, 0), (len(lhs), *ends, feature_group_count, channel + 1, 1)
        shifted = lax.slice(lhs, begin, end, (1, *window_strides, 1, 1, 1))
        entry = rhs[(*offset, channel)]
        return jnp.squeeze(shifted, -2) * lax.expand_dims(entry, range(lhs.ndim - 3))

    terms = (product(o, c) for o in itertools.product(*map(range, window)) for c in range(channels))
    total = next(terms)
    for term in terms:
        total += term
    # In memory: XLA would add up anew for each value that is computed from the result.
    return lax.optimization_barrier(total.reshape(len(lhs), *sizes, -1).astype(dtype))
