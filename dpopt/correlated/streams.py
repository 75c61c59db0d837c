"""Three ways to draw ``y = C^-1 z`` step by step, for a lower-triangular Toeplitz matrix C.

Each is given ``draw(lag)``, the standard normals z of ``lag`` steps ago, which come from the key and a counter and so
can be drawn again; ``step``, counted from 0 where the strategy began; and its buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Draw = Callable[[Any], Any]  # from a lag to a pytree of standard normals


class Stream(Protocol):
    """How ``C^-1 z`` is drawn."""

    @property
    def num_buffers(self) -> int:
        """Arrays of the parameters' size that are kept between steps."""
        ...

    @property
    def draws(self) -> int:
        """Standard normals drawn a step for each parameter, at most."""
        ...

    def inverse(self, steps: int) -> np.ndarray:
        """The first column of ``C^-1``, ``[steps]`` float64."""
        ...

    def next(self, draw: Draw, step: jax.Array, buffers: Any, like: Any) -> tuple[Any, Any]:
        """``y`` of this step, shaped ``like`` the sum, and the buffers after it: `num_buffers` trees of such shapes."""
        ...


@dataclasses.dataclass(frozen=True)
class Redrawn:
    """``y_t = sum_k d_k z_{t-k}``: the last z are drawn again, and nothing is kept."""

    coefficients: tuple[float, ...]  # d

    num_buffers = 0

    @property
    def draws(self) -> int:
        return len(self.coefficients)

    def inverse(self, steps: int) -> np.ndarray:
        return _padded(self.coefficients, steps)

    def next(self, draw: Draw, step: jax.Array, buffers: Any, like: Any) -> tuple[Any, Any]:
        if len(self.coefficients) == 1:
            return _scaled(self.coefficients[0], draw(0)), buffers
        d = np.append(self.coefficients, 0.0)

        def add_two(pair, total):  # in one pass over the arrays
            for lag in (2 * pair, 2 * pair + 1):
                weight = jnp.where(lag <= step, jnp.asarray(d)[lag], 0)
                total = jax.tree.map(lambda t, z, w=weight: t + w.astype(z.dtype) * z, total, draw(lag))
            return total

        zeros = jax.tree.map(jnp.zeros_like, like)
        return lax.fori_loop(0, (jnp.minimum(len(self.coefficients), step + 1) + 1) // 2, add_two, zeros), buffers


@dataclasses.dataclass(frozen=True)
class Substituted:
    """``y_t = (z_t - sum_{0<k<b} c_k y_{t-k}) / c_0``: the last b - 1 results are kept, in a ring."""

    coefficients: tuple[float, ...]  # c

    draws = 1

    @property
    def num_buffers(self) -> int:
        return len(self.coefficients) - 1

    def inverse(self, steps: int) -> np.ndarray:
        return inverse_series(self.coefficients, steps)

    def next(self, draw: Draw, step: jax.Array, buffers: Any, like: Any) -> tuple[Any, Any]:
        del like
        first, *rest = self.coefficients
        if not rest:
            return _scaled(1 / first, draw(0)), buffers
        # Each place of the ring holds the y of some step from 1 to b - 1 steps ago.
        weights = jnp.asarray(np.asarray(rest) / first)[(step - 1 - np.arange(len(rest))) % len(rest)]
        y = _weighted_sum(1 / first, draw(0), -weights, buffers)

        def put(place: int) -> Any:
            # A loop of one step or none: what it does not replace stays where it is, while a choice would be copied.
            is_its_turn = (step % len(rest) == place).astype(jnp.int32)
            return lax.fori_loop(0, is_its_turn, lambda _, kept: y, buffers[place])

        return y, tuple(put(place) for place in range(len(rest)))


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """``c_k = sum_j w_j a_j^(k-1)`` for k > 0: a buffer for each j holds ``sum_{k>0} a_j^(k-1) y_{t-k}``."""

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
        return inverse_series(self.column(steps), steps)

    def next(self, draw: Draw, step: jax.Array, buffers: Any, like: Any) -> tuple[Any, Any]:
        del step, like
        y = _weighted_sum(1 / self.first, draw(0), -np.asarray(self.weights) / self.first, buffers)
        following = [
            jax.tree.map(lambda s, y, a=a: a * s + y, kept, y) for a, kept in zip(self.decays, buffers, strict=True)
        ]
        return y, tuple(following)


def inverse_series(coefficients: Any, steps: int) -> np.ndarray:
    """The first column of the inverse of a lower-triangular Toeplitz matrix, ``[steps]``, from its own first column.

    *Privacy*: public constants.

    >>> inverse_series([1.0, 0.5], 3).tolist()
    [1.0, -0.5, 0.25]
    """
    c = np.asarray(coefficients, np.float64)
    found = np.zeros(steps)
    found[0] = 1 / c[0]
    for t in range(1, steps):
        k = min(t, len(c) - 1)
        found[t] = -(c[1 : k + 1] @ found[t - 1 :: -1][:k]) / c[0]
    return found


def _padded(coefficients: Any, steps: int) -> np.ndarray:
    found = np.zeros(steps)
    found[: len(coefficients)] = coefficients[:steps]
    return found


def _scaled(number: float, tree: Any) -> Any:
    return tree if number == 1 else jax.tree.map(lambda z: number * z, tree)


def _weighted_sum(number: float, tree: Any, weights: Any, others: Any) -> Any:
    """``number * tree + sum_k weights[k] others[k]``, in one pass over the arrays."""

    def of_leaf(z: jax.Array, *others: jax.Array) -> jax.Array:
        total = number * z
        for k, other in enumerate(others):
            total = total + jnp.asarray(weights[k], z.dtype) * other
        return total

    return jax.tree.map(of_leaf, tree, *others)
