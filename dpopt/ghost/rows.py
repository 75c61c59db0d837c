"""The rows of one factor: vectors, or one-hot vectors that are kept as indices.

An index of the table's size or more stands for a row of zeros: what a look-up out of range leaves behind
(rules/). Norms (norms.py) use one-hot rows through the functions here alone, so none can forget them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Norms bound the sensitivity: they are taken at full float32 precision on accelerators, too.
_PRECISION = lax.Precision.HIGHEST


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def bounded(x: jax.Array, size: int) -> jax.Array:
    """An index of any integer type, where all below 0 are -1 and all beyond the table are ``size``."""
    bounds = jnp.iinfo(x.dtype)
    low, high = (jnp.asarray(i, x.dtype) for i in (max(-1, int(bounds.min)), min(size, int(bounds.max))))
    return jnp.clip(x, low, high).astype(jnp.int32)


def einsum(spec: str, *operands: jax.Array) -> jax.Array:
    """At full precision, in at least float32."""
    dtype = jnp.promote_types(jnp.result_type(*operands), jnp.float32)
    return jnp.einsum(spec, *operands, precision=_PRECISION, preferred_element_type=dtype)


class Dense(NamedTuple):
    """Rows as they are."""

    x: jax.Array  # [T, n]

    def squares(self) -> jax.Array:
        """``[T]``: each row's squared norm."""
        return jnp.sum(jnp.square(wide(self.x)), axis=1)

    def inner(self, other: Rows) -> jax.Array:
        """``[T, S]``: inner products of all rows with all rows of ``other``."""
        return other.inner(self).T if isinstance(other, OneHot) else einsum("ta,sa->ts", self.x, other.x)


class OneHot(NamedTuple):
    """Unit vectors of length ``size``, or zeros."""

    ids: jax.Array  # [T]
    size: int

    def _valid(self) -> jax.Array:
        return (self.ids >= 0) & (self.ids < self.size)

    def squares(self) -> jax.Array:
        """``[T]``: each row's squared norm."""
        return self._valid().astype(jnp.float32)

    def inner(self, other: Rows) -> jax.Array:
        """``[T, S]``: inner products of all rows with all rows of ``other``."""
        if isinstance(other, Dense):
            return self.times(wide(other.x).T)
        return ((self.ids[:, None] == other.ids[None, :]) & self._valid()[:, None]).astype(jnp.float32)

    def times(self, table: jax.Array) -> jax.Array:
        """``[T, ...]``: the rows of ``table`` ``[size, ...]`` that are looked up, zeros out of range."""
        found = table.at[self.ids].get(mode="clip")
        return jnp.where(self._valid().reshape(-1, *[1] * (found.ndim - 1)), found, 0)

    def added(self, rows: jax.Array) -> jax.Array:
        """``[size, p]``: rows ``[T, p]`` added up where they were looked up."""
        kept = jnp.where(self._valid()[:, None], wide(rows), 0)
        return jnp.zeros((self.size, rows.shape[1]), kept.dtype).at[self.ids].add(kept, mode="drop")

    def merged(self, rows: jax.Array) -> jax.Array:
        """``[T, p]``: rows of equal index added up at the first of them, zeros elsewhere."""
        kept = jnp.where(self._valid()[:, None], wide(rows), 0)
        positions = jnp.arange(self.ids.shape[0])
        equal = self.ids[:, None] == self.ids[None, :]
        first = jnp.min(jnp.where(equal, positions[None], self.ids.shape[0]), axis=1)
        return jnp.zeros_like(kept).at[first].add(kept)


Rows = Dense | OneHot


def join(several: Sequence[Rows]) -> Rows:
    """Rows of one kind, one after the other."""
    first, all_rows = several[0], jnp.concatenate([rows[0] for rows in several])
    return OneHot(all_rows, first.size) if isinstance(first, OneHot) else Dense(all_rows)
