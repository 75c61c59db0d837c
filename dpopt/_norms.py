"""The norm that both engines bound sensitivities with, where gradients exist."""

import jax
import jax.numpy as jnp


def safe_norm(x: jax.Array, axis: int) -> jax.Array:
    """L2 norm along ``axis`` whose squares neither overflow nor underflow; NaN and Inf stay visible in the result."""
    if x.shape[axis] == 0:
        return jnp.zeros(x.shape[:axis] + x.shape[axis + 1 :], x.dtype)
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    # Bounded on both sides: XLA may divide by a reciprocal, and that of a number near the largest is flushed to zero.
    bound = 2.0 ** (jnp.finfo(x.dtype).maxexp - 28)
    unit = jnp.where(jnp.isfinite(largest), jnp.clip(largest, 1 / bound, bound), 1)
    return jnp.squeeze(unit, axis) * jnp.sqrt(jnp.sum(jnp.square(x / unit), axis=axis))
