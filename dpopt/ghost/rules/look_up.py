"""The rule of look-ups in tables."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from dpopt.ghost.primitives import GATHER
from dpopt.ghost.rows import bounded
from dpopt.ghost.rules.base import Factors, Use, arranger, axes_size, rule


@rule(GATHER)
def gather(use: Use) -> Factors | None:
    """Look-ups like ``table[i]`` or ``table[i, j]`` that take one entry or all along each axis; indices may repeat.

    (A dynamic slice, which looks up once, becomes a gather when it is traced.)"""
    dims, sizes = use.params["dimension_numbers"], tuple(use.params["slice_sizes"])
    if use.position != 0:
        return None
    batched = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True))
    rest = tuple(axis for axis, n in enumerate(use.weight) if sizes[axis] == n and axis not in batched)  # taken whole
    axes = tuple(axis for axis in range(len(use.weight)) if axis not in rest)
    if not axes or any(sizes[axis] != 1 for axis in axes) or not {*axes} <= {*dims.start_index_map, *batched}:
        return None
    clips = use.params["mode"] == lax.GatherScatterMode.CLIP
    size, positions = axes_size(use.weight, axes), math.prod(use.input[:-1])
    p = math.prod(use.weight) // max(size, 1)
    looked_up = tuple(i for i in range(len(use.output)) if i not in dims.offset_dims)

    def index(x: jax.Array) -> jax.Array:
        """The index along all looked-up axes together, as one number."""
        flat, inside = jnp.zeros(x.shape[:-1], jnp.int32), jnp.ones(x.shape[:-1], bool)
        for axis in (*rest, *axes):  # an axis that is taken whole has to start at 0
            n, last = use.weight[axis], use.weight[axis] - sizes[axis]
            if axis in batched:
                at = lax.broadcasted_iota(jnp.int32, flat.shape, batched[axis])
            elif axis in dims.start_index_map:
                at = bounded(x[..., dims.start_index_map.index(axis)], last + 1)
            else:
                continue
            inside &= (at >= 0) & (at <= last)
            if axis in axes:
                flat = flat * n + jnp.clip(at, 0, last)
        return flat if clips else jnp.where(inside, flat, size)

    def split(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        # An index out of range reads a fill value or an undefined one, and neither has a gradient. The index stays out
        # of range, which stands for a row of zeros (rows.py).
        ids = index(x).reshape(1, positions)
        right = jnp.transpose(y, (*looked_up, *dims.offset_dims)).reshape(1, positions, p)
        return ids, jnp.where(((ids >= 0) & (ids < size))[..., None], right, 0)

    fold, unfold = arranger(use.weight, (), axes, rest)
    return Factors((1, 1, size, p), positions, split, fold, unfold, one_hot=True, axes=(axes, rest))
