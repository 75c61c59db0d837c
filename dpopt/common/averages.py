"""Arithmetic of exponential moving averages that the adaptive rules share."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp


def update_average(average: jax.Array, value: jax.Array, decay: Any) -> jax.Array:
    """``decay * average + (1 - decay) * value`` in the average's dtype."""
    return (decay * average + (1 - decay) * value).astype(average.dtype)


def one_minus_power(decay: Any, exponent: jax.Array, dtype: Any) -> jax.Array:
    """``1 - decay ** exponent``, the weight that a moving average started at 0 has gathered.

    Not computed as written: 0.999 rounds by 3e-8 in float32, which is 3e-5 of ``1 - 0.999``, and a correction that
    subtracts the noise's variance from the second moment would feel it.
    """
    if isinstance(decay, numbers.Real):
        log_decay = math.log(decay) if float(decay) > 0 else -math.inf
    else:
        log_decay = jnp.log(jnp.asarray(decay, dtype))
    return -jnp.expm1(jnp.asarray(exponent, dtype) * log_decay)


def at_step(value: Any, step: jax.Array) -> Any:
    """A hyperparameter at a step (counted from 0, as Optax counts): a schedule's value, or the number itself."""
    return value(step) if callable(value) else value
