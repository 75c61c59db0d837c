"""Three ways to draw ``y = C^-1 z`` step by step, for a lower-triangular Toeplitz matrix C.

Each gets ``draw(lag)``, which returns the standard normals z of ``lag`` steps ago (they are computed from the key and a
counter, so they can be drawn again); ``step``, counted from 0 at the start of the strategy; and its buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpopt.common.types import PyTree

Numbers: TypeAlias = Sequence[float] | np.ndarray
Draw: TypeAlias = Callable[[int | jax.Array], PyTree]  # from a lag to standard normals
Buffers: TypeAlias = tuple[PyTree, ...]  # each like the sum


class Stream(Protocol):
    """A way to draw ``C^-1 z``."""

    @property
    def num_buffers(self) -> int:
        """The number of buffers, each of the size of the parameters, that are stored between steps."""
        ...

    @property
    def draws(self) -> int:
        """The largest number of standard normals that a step draws per parameter."""
        ...

    def inverse(self, steps: int) -> np.ndarray:
        """The first column of ``C^-1``, ``[steps]`` float64."""
        ...

    def next(self, draw: Draw, step: jax.Array, buffers: Buffers, like: PyTree) -> tuple[PyTree, Buffers]:
        """``y`` of this step and the new buffers, all shaped ``like`` the sum."""
        ...


@dataclasses.dataclass(frozen=True)
class Redrawn:
    """``y_t = sum_k d_k z_{t-k}``: the last z are drawn again, and nothing is stored."""

    coefficients: tuple[float, ...]  # d

    num_buffers = 0

    @property
    def draws(self) -> int:
        return len(self.coefficients)

    def inverse(self, steps: int) -> np.ndarray:
        return padded(self.coefficients, steps)

    def next(self, draw: Draw, step: jax.Array, buffers: Buffers, like: PyTree) -> tuple[PyTree, Buffers]:
        if len(self.coefficients) == 1:
            return _scaled(self.coefficients[0], draw(0)), buffers
        d = np.append(self.coefficients, 0.0)

        def add_two(pair: jax.Array, total: PyTree) -> PyTree:  # in one pass over the arrays
            for lag in (2 * pair, 2 * pair + 1):
                weight = jnp.where(lag <= step, jnp.asarray(d)[lag], 0)
                total = jax.tree.map(lambda t, z, w=weight: t + w.astype(z.dtype) * z, total, draw(lag))
            return total

        zeros = jax.tree.map(jnp.zeros_like, like)
        return lax.fori_loop(0, (jnp.minimum(len(self.coefficients), step + 1) + 1) // 2, add_two, zeros), buffers


@dataclasses.dataclass(frozen=True)
class Substituted:
    """``y_t = (z_t - sum_{0<k<b} c_k y_{t-k}) / c_0``: the last b - 1 results are stored in a ring buffer."""

    coefficients: tuple[float, ...]  # c

    draws = 1

    @property
    def num_buffers(self) -> int:
        return len(self.coefficients) - 1

    def inverse(self, steps: int) -> np.ndarray:
        return inverse_series(self.coefficients, steps)

    def next(self, draw: Draw, step: jax.Array, buffers: Buffers, like: PyTree) -> tuple[PyTree, Buffers]:
        del like
        first, *rest = self.coefficients
        if not rest:
            return _scaled(1 / first, draw(0)), buffers
        # Each slot of the ring holds the y of 1 to b - 1 steps ago.
        weights = jnp.asarray(np.asarray(rest) / first)[(step - 1 - np.arange(len(rest))) % len(rest)]
        y = _weighted_sum(1 / first, draw(0), -weights, buffers)

        def written(slot: int) -> PyTree:
            # A loop of one step or none leaves the other slots in place; ``jnp.where`` would copy them.
            is_oldest = (step % len(rest) == slot).astype(jnp.int32)
            return lax.fori_loop(0, is_oldest, lambda _, old: y, buffers[slot])

        return y, tuple(written(slot) for slot in range(len(rest)))


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """``c_k = sum_j w_j a_j^(k-1)`` for k > 0: buffer j holds ``sum_{k>0} a_j^(k-1) y_{t-k}``."""

    first: float  # c_0
    weights: tuple[float, ...]  # w
    decays: tuple[float, ...]  # a

    draws = 1

    @property
    def num_buffers(self) -> int:
        return len(self.weights)

    def column(self, steps: int) -> np.ndarray:
        """The first column of C, ``[steps]``."""
        powers = np.asarray(self.decays) ** np.arange(max(0, steps - 1))[:, None]
        return np.concatenate([[self.first], powers @ np.asarray(self.weights)])[:steps]

    def inverse(self, steps: int) -> np.ndarray:
        w, a = np.asarray(self.weights), np.asarray(self.decays)
        kept, found = np.zeros(len(a)), np.zeros(steps)
        for t in range(steps):
            found[t] = ((t == 0) - w @ kept) / self.first
            kept = a * kept + found[t]
        return found

    def next(self, draw: Draw, step: jax.Array, buffers: Buffers, like: PyTree) -> tuple[PyTree, Buffers]:
        del step, like
        y = _weighted_sum(1 / self.first, draw(0), -np.asarray(self.weights) / self.first, buffers)
        pairs = zip(self.decays, buffers, strict=True)
        return y, tuple(jax.tree.map(lambda s, y, a=a: a * s + y, buffer, y) for a, buffer in pairs)


def padded(coefficients: Numbers, steps: int) -> np.ndarray:
    """The first ``steps`` coefficients, zeros after the last."""
    return np.pad(np.asarray(coefficients), (0, max(0, steps - len(coefficients))))[:steps]


def inverse_series(coefficients: Numbers, steps: int) -> np.ndarray:
    """The first column of the inverse of a lower-triangular Toeplitz matrix, ``[steps]``, from that of the matrix.

    >>> inverse_series([1.0, 0.5], 3).tolist()
    [1.0, -0.5, 0.25]
    """
    c = np.asarray(coefficients, np.float64)
    inverse = np.zeros(steps)
    inverse[0] = 1 / c[0]
    for t in range(1, steps):
        k = min(t, len(c) - 1)
        inverse[t] = -(c[1 : k + 1] @ inverse[t - 1 :: -1][:k]) / c[0]
    return inverse


def _scaled(number: float, tree: PyTree) -> PyTree:
    return tree if number == 1 else jax.tree.map(lambda z: number * z, tree)


def _weighted_sum(number: float, tree: PyTree, weights: jax.Array | np.ndarray, others: Buffers) -> PyTree:
    """``number * tree + sum_k weights[k] others[k]``, in one pass over the arrays."""

    def of_leaf(z: jax.Array, *others: jax.Array) -> jax.Array:
        total = number * z
        for k, other in enumerate(others):
            total = total + jnp.asarray(weights[k], z.dtype) * other
        return total

    return jax.tree.map(of_leaf, tree, *others)
