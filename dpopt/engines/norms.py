"""The norm that both engines bound sensitivities with, where gradients exist, and what scales it down."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Norm = Callable[[jax.Array], jax.Array]  # of a whole array
_Result = TypeVar("_Result")
_ROW = 1024
_COPIED = 2**22  # entries: 16 MB


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


def all_at_once(wanted: Callable[[Norm], _Result]) -> _Result:
    """``wanted(norm)``, where the arrays that it asks the norms of go as rows of one array: few kernels to compile.

    ``wanted`` is called twice and must ask for the same; what it makes of the zeros that it is given first is dropped.
    """
    arrays: list[jax.Array] = []

    def noted(x: jax.Array) -> jax.Array:
        arrays.append(x.reshape(-1))
        return jnp.zeros((), x.dtype)

    wanted(noted)
    norms = [jnp.zeros(())] * len(arrays)
    small = _small(arrays)
    for i in set(range(len(arrays))) - set(small):
        norms[i] = safe_norm(arrays[i], axis=0)
    if small:
        for i, norm in zip(small, _norms_of_rows([arrays[i] for i in small]), strict=True):
            norms[i] = norm.astype(arrays[i].dtype)
    found = iter(norms)
    return wanted(lambda x: next(found))


def _small(arrays: list[jax.Array]) -> list[int]:
    """Those that may be copied into one: not too many, and not from several devices to each."""
    if jax.device_count() > 1:
        return []
    order = sorted(range(len(arrays)), key=lambda i: arrays[i].size)
    total = np.cumsum([arrays[i].size for i in order])
    return [i for i, so_far in zip(order, total, strict=True) if so_far <= _COPIED]


def _norms_of_rows(arrays: list[jax.Array]) -> jax.Array:
    """Norms of vectors, each of which is padded to whole rows."""
    counts = [-(-x.size // _ROW) for x in arrays]
    padded = [jnp.pad(x, (0, n * _ROW - x.size)) for x, n in zip(arrays, counts, strict=True)]
    rows = safe_norm(jnp.concatenate(padded).reshape(-1, _ROW), axis=1)
    ends = np.cumsum(counts)
    index = ends[:, None] - 1 - np.arange(max(counts))  # an array's rows, and zeros for those it has fewer than another
    return safe_norm(jnp.append(rows, 0)[np.where(index >= (ends - counts)[:, None], index, len(rows))], axis=1)


def shrink_to(l2_clip_norm: Any, norms: jax.Array) -> jax.Array:
    """``min(1, C / norm)``; 0 for an infinite norm."""
    # Not min(1, C / norm): 0 / 0 would spoil an example without gradient, inf / inf one under an infinite clip.
    shrunk = jnp.where(jnp.isinf(norms), 0, without_denormals(l2_clip_norm / norms, norms.dtype))
    return jnp.where((norms > l2_clip_norm) | jnp.isinf(norms), shrunk, jnp.ones_like(norms))


def without_denormals(coefficients: jax.Array, dtype: Any) -> jax.Array:
    """Zero for a denormal factor, which has lost digits and may be too large for the bound by a per mille."""
    coefficients = coefficients.astype(dtype)
    return jnp.where(coefficients < jnp.finfo(dtype).tiny, 0, coefficients)
