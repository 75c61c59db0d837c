"""A batch split into blocks with the same number of rows, processed one after another."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from dpopt.common.types import Batch, PyTree


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A batch of ``size`` rows in blocks of ``rows``. The last block is padded with copies of the last row.

    With ``interleaved``, the i-th of n blocks holds rows i, i + n, i + 2n...: if the batch is split over devices, each
    device already holds its share of every block. Consecutive rows would lie on one device and have to be sent to the
    others.
    """

    size: int
    rows: int
    interleaved: bool = False

    @property
    def count(self) -> int:
        return -(-self.size // self.rows)

    def split(self, batch: Batch, mask: Bool[Array, " size"]) -> tuple[Batch, Bool[Array, "count rows"]]:
        """Arrays ``[size, ...]`` as ``[count, rows, ...]``, and a mask that excludes the padding."""
        whole = self.count * self.rows
        if whole > self.size:
            rows = np.minimum(np.arange(whole), self.size - 1)
            batch, mask = jax.tree.map(lambda x: x[rows], (batch, mask))
            mask = jnp.where(np.arange(whole) < self.size, mask, False)

        return jax.tree.map(lambda x: split_rows(x, self.rows, self.interleaved), (batch, mask))

    def join(self, tree: PyTree) -> PyTree:
        """The inverse of `split`, for a pytree."""

        return jax.tree.map(lambda x: join_rows(x, self.interleaved)[: self.size], tree)


def split_rows(x: jax.Array, rows: int, interleaved: bool) -> jax.Array:
    """``[B, ...]`` to ``[B / rows, rows, ...]``. For ``interleaved``, which on one device copies, see `Blocks`."""
    count = x.shape[0] // rows
    if interleaved:
        return jnp.swapaxes(x.reshape(rows, count, *x.shape[1:]), 0, 1)
    return x.reshape(count, rows, *x.shape[1:])


def join_rows(x: jax.Array, interleaved: bool) -> jax.Array:
    """The inverse of `split_rows`."""
    x = jnp.swapaxes(x, 0, 1) if interleaved else x
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # not -1, which no entries do not determine
