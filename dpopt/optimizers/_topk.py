"""The k coordinates of a vector that are largest in absolute value, over the whole of it or block by block."""

import math

import jax
import jax.numpy as jnp


def num_kept(size: int, density: float, block_size: int | None = None) -> int:
    """How many of ``size`` coordinates are kept: ``ceil(density * size)``, or that of every block added up."""
    full, rest = _blocks(size, block_size)
    return sum(count * math.ceil(density * length) for count, length in (full, (1, rest)))


def top_k(x: jax.Array, density: float, block_size: int | None = None) -> jax.Array:
    """Indices ``(k,)``, int32, of the largest ``|x|``; of equal ones the first come first.

    Args:
        x: ``(d,)``.
        density: the share to keep.
        block_size: choose within blocks of this many neighbours (and a shorter last one), or None for all of x.
    """
    (count, length), rest = _blocks(x.size, block_size)
    size = count * length
    found = []
    if count:
        _, indices = jax.lax.top_k(jnp.abs(x[:size]).reshape(count, length), math.ceil(density * length))
        found.append((indices + length * jnp.arange(count, dtype=indices.dtype)[:, None]).reshape(-1))
    if rest:
        _, indices = jax.lax.top_k(jnp.abs(x[size:]), math.ceil(density * rest))
        found.append(indices + size)
    return jnp.concatenate(found)


def index_dtype(size: int) -> jnp.dtype:
    """The smallest unsigned type that can point at every coordinate; int32 beyond 65,536."""
    if size <= 2**8:
        return jnp.dtype(jnp.uint8)
    return jnp.dtype(jnp.uint16 if size <= 2**16 else jnp.int32)


def _blocks(size: int, block_size: int | None) -> tuple[tuple[int, int], int]:
    """``((number of whole blocks, their length), length of the rest)``."""
    if block_size is None or block_size >= size:
        return (0, 0), size
    return (size // block_size, block_size), size % block_size
