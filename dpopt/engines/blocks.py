"""A batch in blocks of as many rows each, which are taken one after the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A batch of ``size`` rows, ``rows`` at a time. The last block is filled up with copies of the last row.

    Of n blocks that are ``apart`` one holds rows i, i + n, i + 2n...: of a batch that is split over devices each finds
    its share of every block on itself, while rows in a row would all lie on one device, and be sent to the others.
    """

    size: int
    rows: int
    apart: bool = False

    @property
    def count(self) -> int:
        return -(-self.size // self.rows)

    def split(self, batch: Any, mask: jax.Array) -> tuple[Any, jax.Array]:
        """Arrays ``[size, ...]`` as ``[count, rows, ...]``, and a mask that leaves the copies out."""
        whole = self.count * self.rows
        if whole > self.size:
            rows = np.minimum(np.arange(whole), self.size - 1)
            batch, mask = jax.tree.map(lambda x: x[rows], (batch, mask))
            mask = jnp.where(np.arange(whole) < self.size, mask, False)

        def block(x):
            if self.apart:
                return jnp.swapaxes(x.reshape(self.rows, self.count, *x.shape[1:]), 0, 1)
            return x.reshape(self.count, self.rows, *x.shape[1:])

        return jax.tree.map(block, (batch, mask))

    def join(self, tree: Any) -> Any:
        """The inverse, of a pytree."""

        def row(x):
            x = jnp.swapaxes(x, 0, 1) if self.apart else x
            return x.reshape(-1, *x.shape[2:])[: self.size]

        return jax.tree.map(row, tree)
