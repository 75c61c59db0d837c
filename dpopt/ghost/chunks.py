"""A batch processed a chunk of examples at a time, in an order that suits both one device and several."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax import lax

from dpopt.common.types import Batch, PyTree
from dpopt.engines import blocks
from dpopt.engines.sums import zeros_after


def together(batch_size: int, chunk: int) -> int:
    """The chunk size with which each device processes up to ``chunk`` examples of its own.

    A chunk of which devices have unequal shares would be sent from some devices to all others."""
    devices = jax.device_count()
    least = math.gcd(batch_size, devices)
    sizes = range(least, batch_size + 1, least)
    return max(n for n in sizes if batch_size % n == 0 and n <= max(1, chunk) * devices)


def split_rows(x: jax.Array, rows: int) -> jax.Array:
    """``[B, ...]`` to ``[B / rows, rows, ...]``: as blocks that are interleaved if there are several devices."""
    return blocks.split_rows(x, rows, interleaved=jax.device_count() > 1)


def join_rows(x: jax.Array) -> jax.Array:
    """The inverse of `split_rows`."""
    return blocks.join_rows(x, interleaved=jax.device_count() > 1)


def in_chunks(function: Callable[[PyTree], PyTree], inputs: Batch, batch_size: int, chunk: int) -> PyTree:
    """``function(inputs)`` for ``chunk`` examples at a time on each device, so that its buffers stay small."""
    chunk = together(batch_size, chunk)
    if chunk >= batch_size:
        return function(inputs)
    split = jax.tree.map(lambda x: split_rows(x, chunk), inputs)
    one = jax.eval_shape(function, jax.tree.map(lambda x: x[0], split))
    all_rows = jax.tree.map(lambda s: jax.ShapeDtypeStruct((batch_size // chunk, *s.shape), s.dtype), one)
    out = zeros_after(inputs, all_rows)

    def step(i: jax.Array, out: PyTree) -> PyTree:
        rows = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), split)
        return jax.tree.map(lambda o, r: lax.dynamic_update_index_in_dim(o, r, i, 0), out, function(rows))

    return jax.tree.map(join_rows, lax.fori_loop(0, batch_size // chunk, step, out))
