"""Directions in the space of parameters along which canaries' gradients point."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Directions:
    """As many fixed vectors like the parameters, of one length; made by `dpopt.audit.gradient_canaries`."""

    count: int
    length: float

    def __len__(self) -> int:
        return self.count

    def along(self, tree: Any, number: Any) -> jax.Array:
        """The inner product of a tree like the parameters with direction ``number``, a scalar of float32 or more."""
        raise NotImplementedError

    def along_all(self, tree: Any) -> jax.Array:
        """`along` for all directions, ``(count,)``."""
        numbers = jnp.arange(self.count)
        return jax.jit(lambda t: jax.lax.map(lambda i: self.along(t, i), numbers, batch_size=64))(tree)


@dataclasses.dataclass(frozen=True, eq=False)
class OneHot(Directions):
    """Each along one coordinate."""

    leaf: np.ndarray  # (count,) int32: which leaf, and which of its entries
    entry: np.ndarray

    @classmethod
    def of(cls, params: Any, count: int, length: float, seed: int, usage: Any = None) -> OneHot:
        sizes = np.array([np.prod(jnp.shape(p), dtype=np.int64) for p in jax.tree.leaves(params)])
        total, rng = int(sizes.sum()), np.random.default_rng(seed)
        if count > total:
            raise ValueError(f"{count} one-hot canaries need as many coordinates; the parameters have {total}.")
        if usage is None:
            chosen = rng.choice(total, count, replace=False)
        else:
            if jax.tree.map(jnp.shape, usage) != jax.tree.map(jnp.shape, params):
                raise ValueError("usage must be like params: one number for every coordinate.")
            flat = np.concatenate([np.asarray(u, np.float32).ravel() for u in jax.tree.leaves(usage)])
            chosen = np.lexsort((rng.random(total), flat))[:count]
        ends = np.cumsum(sizes)
        leaf = np.searchsorted(ends, chosen, side="right")
        return cls(count, length, leaf.astype(np.int32), (chosen - (ends - sizes)[leaf]).astype(np.int32))

    def along(self, tree: Any, number: Any) -> jax.Array:
        leaf, entry = jnp.asarray(self.leaf)[number], jnp.asarray(self.entry)[number]
        total = jnp.zeros(())
        for i, x in enumerate(jax.tree.leaves(tree)):
            if np.any(self.leaf == i):
                x = jnp.asarray(x).reshape(-1)
                value = x[jnp.clip(entry, 0, x.size - 1)].astype(jnp.promote_types(x.dtype, jnp.float32))
                total = total + jnp.where(leaf == i, value, 0)
        return self.length * total


@dataclasses.dataclass(frozen=True, eq=False)
class RandomDirections(Directions):
    """Each drawn from the sphere."""

    seed: int

    def along(self, tree: Any, number: Any) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(self.seed), number)
        leaves = jax.tree.leaves(tree)
        keys = jax.random.split(key, len(leaves))
        draws = [
            jax.random.normal(k, jnp.shape(x), jnp.promote_types(jnp.result_type(x), jnp.float32))
            for k, x in zip(keys, leaves, strict=True)
        ]
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(z)) for z in draws))
        products = [jnp.sum(z / norm * x) for z, x in zip(draws, leaves, strict=True)]
        return self.length * jnp.sum(jnp.stack(products))
