"""Exponential moving averages and schedules, as the adaptive rules share them."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dpopt.common.types import PyTree


def update_average(average: jax.Array, value: jax.Array, decay: float | jax.Array) -> jax.Array:
    """``decay * average + (1 - decay) * value`` in the average's dtype."""
    return (decay * average + (1 - decay) * value).astype(average.dtype)


def one_minus_power(decay: float | jax.Array, exponent: jax.Array, dtype: DTypeLike) -> jax.Array:
    """``1 - decay ** exponent``: the total weight in a moving average that started at 0.

    Computed by ``expm1``: in float32, 0.999 has a rounding error of 3e-8, a relative error of 3e-5 in ``1 - 0.999``.
    That is too much for a correction that subtracts the noise variance from the second moment.
    """
    if isinstance(decay, numbers.Real):
        log_decay = math.log(decay) if float(decay) > 0 else -math.inf
    else:
        log_decay = jnp.log(jnp.asarray(decay, dtype))
    return -jnp.expm1(jnp.asarray(exponent, dtype) * log_decay)


def at_step(value: PyTree | Callable[[Any], PyTree], step: int | jax.Array) -> PyTree:
    """The value of a hyperparameter, a constant or a schedule, at a step counted from 0 as in Optax."""
    return value(step) if callable(value) else value
