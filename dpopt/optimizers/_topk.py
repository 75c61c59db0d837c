"""The k coordinates of a vector that are largest in absolute value, of the whole vector or of each block."""

import math

import jax
import jax.numpy as jnp


def num_kept(size: int, density: float, block_size: int | None = None) -> int:
    """The number of coordinates kept out of ``size``: ``ceil(density * size)``, or the sum of that over all blocks."""
    full, rest = _blocks(size, block_size)
    return sum(count * math.ceil(density * length) for count, length in (full, (1, rest)))


def top_k(x: jax.Array, density: float, block_size: int | None = None) -> jax.Array:
    """Indices ``(k,)``, int32, of the largest ``|x|`` in each block; of equal ones the first are chosen."""
    (count, length), rest = _blocks(x.size, block_size)
    size = count * length
    parts = []
    if count:
        _, indices = jax.lax.top_k(jnp.abs(x[:size]).reshape(count, length), math.ceil(density * length))
        parts.append((indices + length * jnp.arange(count, dtype=indices.dtype)[:, None]).reshape(-1))
    if rest:
        _, indices = jax.lax.top_k(jnp.abs(x[size:]), math.ceil(density * rest))
        parts.append(indices + size)
    return jnp.concatenate(parts)


def index_dtype(size: int) -> jnp.dtype:
    """The smallest unsigned type that can index every coordinate; int32 beyond 65,536."""
    if size <= 2**8:
        return jnp.dtype(jnp.uint8)
    return jnp.dtype(jnp.uint16 if size <= 2**16 else jnp.int32)


def _blocks(size: int, block_size: int | None) -> tuple[tuple[int, int], int]:
    """``((number of whole blocks, their length), length of the rest)``."""
    if block_size is None or block_size >= size:
        return (0, 0), size
    return (size // block_size, block_size), size % block_size
