"""The norm that both engines bound sensitivities with, where gradients exist, and what scales it down."""

from typing import Any

import jax
import jax.numpy as jnp


def safe_norm(x: jax.Array, axis: int) -> jax.Array:
    """L2 norm along ``axis`` whose squares neither overflow nor underflow; NaN and Inf stay visible in the result."""
    if x.shape[axis] == 0:
        return jnp.zeros(x.shape[:axis] + x.shape[axis + 1 :], x.dtype)
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    # Bounded on both sides: XLA may divide by a reciprocal, and that of a number near the largest is flushed to zero.
    bound = 2.0 ** (jnp.finfo(x.dtype).maxexp - 28)
    # And 1 for zeros: XLA may multiply a number that x was multiplied by with the reciprocal first; 0 * inf is NaN.
    unit = jnp.where(jnp.isfinite(largest) & (largest > 0), jnp.clip(largest, 1 / bound, bound), 1)
    # The bounds, which change no finite number, keep XLA from squaring x and its unit apart where both are constants:
    # 0 * inf. Of a single number XLA takes the root of the square for the number itself: they would hide an infinity.
    most = jnp.finfo(x.dtype).max
    scaled = jnp.clip(x / unit, -most, most)
    norm = jnp.squeeze(unit, axis) * jnp.sqrt(jnp.sum(jnp.square(scaled), axis=axis))
    return jnp.where(jnp.isinf(jnp.squeeze(largest, axis)), jnp.inf, norm)


def shrink_to(l2_clip_norm: Any, norms: jax.Array) -> jax.Array:
    """``min(1, C / norm)``; 0 for an infinite norm."""
    # Not min(1, C / norm): 0 / 0 would spoil an example without gradient, inf / inf one under an infinite clip.
    shrunk = jnp.where(jnp.isinf(norms), 0, without_denormals(l2_clip_norm / norms, norms.dtype))
    return jnp.where((norms > l2_clip_norm) | jnp.isinf(norms), shrunk, jnp.ones_like(norms))


def without_denormals(coefficients: jax.Array, dtype: Any) -> jax.Array:
    """Zero for a denormal factor, which has lost digits and may be too large for the bound by a per mille."""
    coefficients = coefficients.astype(dtype)
    return jnp.where(coefficients < jnp.finfo(dtype).tiny, 0, coefficients)
