"""A batch in blocks of as many rows each, which are taken one after the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A batch of ``size`` rows, ``rows`` at a time. The last block is filled up with copies of the last row."""

    size: int
    rows: int

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
        return jax.tree.map(lambda x: x.reshape(self.count, self.rows, *x.shape[1:]), (batch, mask))

    def join(self, tree: Any) -> Any:
        """The inverse, of a pytree."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: self.size], tree)
