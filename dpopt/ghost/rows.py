"""The rows of one factor: vectors, or one-hot vectors stored as indices.

An index outside the table stands for a row of zeros, which is the gradient of a look-up out of range
(rules/). Norms (methods/) use one-hot rows only through the functions here, so none can overlook such an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpopt.common.trees import accumulator_dtype

# Norms bound the sensitivity, so they are computed in full float32 precision on accelerators too.
_PRECISION = lax.Precision.HIGHEST
_LONG = 256


def wide(x: jax.Array) -> jax.Array:
    """The array in at least float32."""
    return x.astype(accumulator_dtype(x.dtype))


def bounded(x: jax.Array, size: int) -> jax.Array:
    """An index as int32: everything below 0 becomes -1, and everything beyond the table becomes ``size``."""
    bounds = jnp.iinfo(x.dtype)
    low, high = (jnp.asarray(i, x.dtype) for i in (max(-1, int(bounds.min)), min(size, int(bounds.max))))
    return jnp.clip(x, low, high).astype(jnp.int32)


def einsum(spec: str, *operands: jax.Array, is_quick: bool = False) -> jax.Array:
    """``jnp.einsum`` in at least float32 and full precision, or for ``is_quick`` in the device's default one."""
    dtype = accumulator_dtype(jnp.result_type(*operands))
    precision = lax.Precision.DEFAULT if is_quick else _PRECISION
    return jnp.einsum(spec, *operands, precision=precision, preferred_element_type=dtype)


def summed_products(left: jax.Array, right: jax.Array, *, is_quick: bool = False) -> jax.Array:
    """``[a, p]``: ``sum_t left_t (x) right_t`` from ``[T, a]`` and ``[T, p]``, like `einsum`.

    A CPU computes a product with fewer rows than columns up to ten times as fast as its transpose, which XLA would put
    back in its place without the barrier. If the sum is long, transposing costs little beside it."""
    is_one_cpu, columns = jax.default_backend() == "cpu" and jax.device_count() == 1, right.shape[1]
    if is_one_cpu and len(left) >= min(_LONG, 2 * columns) and left.shape[1] >= 2 * columns:
        return lax.optimization_barrier(einsum("ta,tp->pa", left, right)).T
    return einsum("ta,tp->ap", left, right, is_quick=is_quick)


def tf32(x: jax.Array) -> jax.Array:
    """Rounds float32 numbers to the 11 bits of TF32, the format in which GPUs multiply them by default."""
    if x.dtype == jnp.bfloat16:  # which TF32 holds
        return x
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)


def quick_products(left: jax.Array, right: jax.Array) -> jax.Array:
    """`summed_products` in TF32, also of factors in bfloat16, which it holds."""
    return summed_products(wide(left), wide(right), is_quick=True)


class Dense(NamedTuple):
    """Rows that are stored as vectors."""

    x: jax.Array  # [T, n]

    def squares(self) -> jax.Array:
        """``[T]``: each row's squared norm."""
        return jnp.sum(jnp.square(wide(self.x)), axis=1)

    def inner(self, other: Rows, *, is_quick: bool = False) -> jax.Array:
        """``[T, S]``: inner products of all rows with all rows of ``other``; for ``is_quick`` see `einsum`."""
        if isinstance(other, OneHot):
            return other.inner(self).T
        return einsum("ta,sa->ts", self.x, other.x, is_quick=is_quick)


class OneHot(NamedTuple):
    """Unit vectors of length ``size``, or zeros."""

    ids: jax.Array  # [T]
    size: int

    def _valid(self) -> jax.Array:
        return (self.ids >= 0) & (self.ids < self.size)

    def squares(self) -> jax.Array:
        """``[T]``: each row's squared norm."""
        return self._valid().astype(jnp.float32)

    def inner(self, other: Rows, *, is_quick: bool = False) -> jax.Array:
        """``[T, S]``: inner products of all rows with all rows of ``other``, which are look-ups: never rounded."""
        del is_quick
        if isinstance(other, Dense):
            return self.times(wide(other.x).T)
        return ((self.ids[:, None] == other.ids[None, :]) & self._valid()[:, None]).astype(jnp.float32)

    def times(self, table: jax.Array) -> jax.Array:
        """``[T, ...]``: the rows of ``table`` ``[size, ...]`` at the indices, zeros out of range."""
        found = table.at[self.ids].get(mode="clip")
        return jnp.where(self._valid().reshape(-1, *[1] * (found.ndim - 1)), found, 0)

    def added(self, rows: jax.Array) -> jax.Array:
        """``[size, p]``: the sum of the rows ``[T, p]`` at each index."""
        kept = jnp.where(self._valid()[:, None], wide(rows), 0)
        return jnp.zeros((self.size, rows.shape[1]), kept.dtype).at[self.ids].add(kept, mode="drop")

    def merged(self, rows: jax.Array) -> jax.Array:
        """``[T, p]``: rows with equal indices summed in place of the first of them, zeros elsewhere."""
        kept = jnp.where(self._valid()[:, None], wide(rows), 0)
        positions = jnp.arange(self.ids.shape[0])
        ids, order = self._in_order()
        is_first = (positions == 0) | (ids != jnp.roll(ids, 1))
        first = jnp.zeros_like(order).at[order].set(order[lax.cummax(jnp.where(is_first, positions, 0))])
        return jnp.zeros_like(kept).at[first].add(kept)

    def ranked(self) -> tuple[jax.Array, jax.Array]:
        """``[T]`` and ``[T]``: for each row the rank of its index among the distinct ones, and the index of each rank.

        Indices out of range share a rank; what belongs to no rank is out of range."""
        ids, order = self._in_order()
        steps = jnp.concatenate([jnp.zeros(1, jnp.int32), (ids[1:] != ids[:-1]).astype(jnp.int32)])
        ranks = jnp.cumsum(steps)
        places = jnp.full_like(ids, self.size).at[ranks].set(ids)
        return jnp.zeros_like(ranks).at[order].set(ranks), places

    def _in_order(self) -> tuple[jax.Array, jax.Array]:
        """The indices in order, equal ones as they were, and their positions; indices out of range come as one."""
        ids, count = jnp.where(self._valid(), self.ids, self.size), self.ids.shape[0]
        if (self.size + 1) * count > jnp.iinfo(jnp.int32).max:
            ids, order = lax.sort((ids, jnp.arange(count)), num_keys=1)
            return ids, order
        both = jnp.sort(ids * count + jnp.arange(count))  # a CPU takes less than half the time for one array
        return both // count, both % count


Rows = Dense | OneHot


def join(several: Sequence[Rows]) -> Rows:
    """Rows of one kind, concatenated."""
    first, all_rows = several[0], jnp.concatenate([rows[0] for rows in several])
    return OneHot(all_rows, first.size) if isinstance(first, OneHot) else Dense(all_rows)
