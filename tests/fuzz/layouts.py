"""Arrays in another order: each function maps an array of at least one axis to one of its shape, with the same entries.

Examples are read in such orders, weights are used in them, and so are the statistics of weights.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# Transposed while they are reshaped: drawn half of the time, since no other equation does two things at once.
_AT_ONCE: list[Callable] = [
    lambda x: x.ravel(order="F").reshape(x.shape),
    lambda x: x.reshape(x.shape[::-1], order="F"),
    lambda x: lax.reshape(x, x.shape, dimensions=(*range(1, x.ndim), 0)),
]
# JAX's own derivative by the operand of a broadcast that transposes is wrong: for examples alone.
_BROADCAST: list[Callable] = [lambda x: lax.broadcast_in_dim(x, (1, *x.shape[::-1]), range(x.ndim, 0, -1))]
_OTHERS: list[Callable] = [
    lambda x: jnp.swapaxes(x, 0, -1).reshape(x.shape),
    lambda x: x.reshape(1, -1)[0].reshape(x.shape),
    lambda x: x[::-1],
    lambda x: jnp.roll(x, 1, -1),
    lambda x: jnp.concatenate([x[1:], x[:1]]),
    lambda x: jnp.stack([*x][::-1]),
    lambda x: jnp.moveaxis(x[None], 0, -1)[..., 0],
    lambda x: jax.vmap(lambda row: jnp.flip(row))(x),
]


def _of_shape(order: Callable) -> Callable:
    return lambda x: order(x).reshape(x.shape)


def of_example(rng) -> Callable:
    """One or two of the orders, one after the other."""
    return reordered(rng, _AT_ONCE + _BROADCAST)


def reordered(rng, at_once=_AT_ONCE) -> Callable:
    """One or two of the orders, one after the other."""
    kinds = [at_once if rng.random() < 0.5 else _OTHERS for _ in range(rng.integers(1, 3))]
    orders = [_of_shape(kind[rng.integers(len(kind))]) for kind in kinds]

    def function(x):
        for order in orders if x.ndim else ():
            x = order(x)
        return x

    return function


_STATISTICS: list[Callable] = [
    lambda w, axis: jnp.mean(w, axis),
    lambda w, axis: jnp.sum(w**2, axis),
    lambda w, axis: jnp.sum((w**2).astype(w.dtype), axis) / jnp.sum((w > 0).astype(w.dtype) + 1, axis),
    lambda w, axis: jnp.sum(w**2, axis) / (1 + jnp.sum(w.astype(bool), axis)),
    lambda w, axis: jnp.sum(w.astype(jnp.int32), axis).astype(w.dtype),
]


def _by_statistic(rng) -> Callable:
    """A weight times numbers that are computed from it along one axis, in another order or as they are."""
    order = reordered(rng) if rng.random() < 0.7 else lambda x: x
    statistic, place, divides = _STATISTICS[rng.integers(len(_STATISTICS))], rng.integers(4), rng.random() < 0.5

    def function(w):
        axis = int(place) % w.ndim
        numbers = jnp.expand_dims(order(statistic(w, axis)), axis)
        return w / (1.5 + jnp.tanh(numbers)) if divides else w * (1 + 0.3 * numbers)

    return function


def of_weight(rng) -> Callable:
    """A weight in another order, or times its statistics in one, or both."""
    order, by_statistic, how = reordered(rng), _by_statistic(rng), rng.integers(3)
    return [order, by_statistic, lambda w: order(by_statistic(w))][how]
