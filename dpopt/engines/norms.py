"""Norms of arrays, safe in float32, and the factors that scale a norm down to a clip norm."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

_ROW = 1024
# How much `norms_together` copies: up to a share of all entries, since most of them are those of the largest gradients,
# whose copies would take much memory and save few kernels.
_COPIED_SHARE = 1 / 8
_COPIED = 2**22  # entries, 16 MB


@functools.partial(jax.jit, static_argnames="axis")  # traced once for equal shapes
def safe_norm(x: Float[Array, " ..."], axis: int) -> Float[Array, " ..."]:
    """L2 norm along ``axis`` whose squares neither overflow nor underflow; NaN and Inf propagate to the result."""
    if x.shape[axis] == 0:
        return jnp.zeros(x.shape[:axis] + x.shape[axis + 1 :], x.dtype)
    # Not from |x|, which JAX 0.10 would store.
    largest = jnp.maximum(jnp.max(x, axis=axis, keepdims=True), -jnp.min(x, axis=axis, keepdims=True))
    unit = _unit(largest)
    # Changes no finite number, but keeps XLA from squaring x, if it is constant, and its unit separately (0 * inf).
    scaled = jnp.maximum(x * (1 / unit), -jnp.finfo(x.dtype).max)
    norm = jnp.squeeze(unit, axis) * jnp.sqrt(jnp.sum(jnp.square(scaled), axis=axis))
    return jnp.where(jnp.isinf(jnp.squeeze(largest, axis)), jnp.inf, norm)


def _unit(largest: Float[Array, " ..."]) -> Float[Array, " ..."]:
    """The power of two next to an array's largest entry: dividing by it rounds nothing.

    Bounded on both sides, since the reciprocals of the largest numbers are flushed to zero. 1 for zeros and for what is
    not finite."""
    info = jnp.finfo(largest.dtype)
    bound = 2.0 ** (info.maxexp - 28)
    power = jax.lax.reduce_precision(largest, exponent_bits=info.nexp, mantissa_bits=0)
    return jnp.where(jnp.isfinite(largest) & (largest > 0), jnp.clip(power, 1 / bound, bound), 1)


def norms_together(arrays: Sequence[jax.Array]) -> Float[Array, " arrays"]:
    """The norms of whole arrays, most of them as rows of one: few kernels to compile."""
    flat = [x.reshape(-1) for x in arrays]
    small = _small(flat)
    large = [i for i in range(len(flat)) if i not in {*small}]
    dtype = functools.reduce(jnp.promote_types, (x.dtype for x in flat))
    found = [safe_norm(flat[i], axis=0).astype(dtype)[None] for i in large]
    if small:
        found.append(_norms_of_rows([flat[i] for i in small]).astype(dtype))
    return jnp.concatenate(found)[np.argsort([*large, *small])]


def _small(arrays: list[jax.Array]) -> list[int]:
    """Indices of the arrays that are copied into one: the smallest ones, and none if there are several devices."""
    if jax.device_count() > 1:
        return []
    order = sorted(range(len(arrays)), key=lambda i: arrays[i].size)
    total = np.cumsum([arrays[i].size for i in order])
    most = min(_COPIED, _COPIED_SHARE * sum(x.size for x in arrays))
    return sorted(i for i, so_far in zip(order, total, strict=True) if so_far <= most)


def _norms_of_rows(arrays: list[Float[Array, " _"]]) -> Float[Array, " arrays"]:
    """Norms of vectors, each padded to whole rows."""
    counts = [-(-x.size // _ROW) for x in arrays]
    padded = [y for x, n in zip(arrays, counts, strict=True) for y in (x, _zeros(n * _ROW - x.size, x.dtype))]
    rows = safe_norm(jnp.concatenate(padded).reshape(-1, _ROW), axis=1)
    ends = np.cumsum(counts)
    index = ends[:, None] - 1 - np.arange(max(counts))  # an array's rows, padded to the largest count
    return safe_norm(jnp.append(rows, 0)[np.where(index >= (ends - counts)[:, None], index, len(rows))], axis=1)


def _zeros(size: int, dtype: DTypeLike) -> np.ndarray:
    """Zeros, the first of them negative, since a CPU compiles a kernel for each array of equal numbers."""
    return np.where(np.arange(size) == 0, -0.0, 0.0).astype(dtype)


def shrink_to(l2_clip_norm: float | jax.Array, norms: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """``min(1, C / norm)``; 0 for an infinite norm."""
    # Not computed as min(1, C / norm), which is NaN for a zero gradient at C = 0 (0 / 0) and for inf / inf.
    shrunk = jnp.where(jnp.isinf(norms), 0, without_denormals(l2_clip_norm / norms, norms.dtype))
    return jnp.where((norms > l2_clip_norm) | jnp.isinf(norms), shrunk, jnp.ones_like(norms))


def without_denormals(coefficients: Float[Array, "*rows"], dtype: DTypeLike) -> Float[Array, "*rows"]:
    """Zero for denormal factors, which have lost digits and could exceed the bound by 0.1%."""
    coefficients = coefficients.astype(dtype)
    return jnp.where(coefficients < jnp.finfo(dtype).tiny, 0, coefficients)
