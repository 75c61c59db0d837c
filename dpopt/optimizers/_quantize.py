"""Vectors with a few bits per number: uniform codes between the smallest and the largest value, packed into bytes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Quantized(NamedTuple):
    """A vector of d numbers in b bits each, with one range for the whole vector or one per bucket."""

    codes: jax.Array  # (ceil(d / 2),) uint8 for b = 4, two codes to a byte; (d,) uint8 for b = 8
    low: jax.Array  # (buckets,), at least float32: delta, the value of code 0
    high: jax.Array  # (buckets,), at least float32: Delta, the value of the largest code


def zeros(size: int, dtype: jax.typing.DTypeLike, *, bits: int, bucket_size: int | None) -> Quantized:
    """A vector of zeros, which decodes to exactly zero."""
    buckets = -(-size // _bucket(size, bucket_size))
    codes = jnp.zeros((-(-size * bits // 8),), jnp.uint8)
    return Quantized(codes, jnp.zeros((buckets,), dtype), jnp.zeros((buckets,), dtype))


def quantize(x: jax.Array, *, bits: int, bucket_size: int | None, key: jax.Array | None = None) -> Quantized:
    r"""Codes :math:`q = \lfloor (x - \delta) / u + r \rfloor`, with :math:`u = (\Delta - \delta) / (2^b - 1)`.

    x is ``(d,)``, not empty. With a key, r ~ U[0, 1) per coordinate, and the decoded value is unbiased. Without one,
    r = 1/2, which is the nearest code.
    """
    rows = _in_buckets(x, bucket_size)
    low, high = jnp.min(rows, axis=1), jnp.max(rows, axis=1)
    unit = _unit(low, high, bits)[:, None]
    # A bucket of equal values has unit 0, and code 0 decodes to them exactly.
    steps = jnp.where(unit > 0, (rows - low[:, None]) / jnp.where(unit > 0, unit, 1), 0)
    r = 0.5 if key is None else jax.random.uniform(key, steps.shape, steps.dtype)
    # The code of the largest value may exceed the largest code by a rounding error.
    codes = jnp.clip(jnp.floor(steps + r), 0, 2**bits - 1).astype(jnp.uint8).reshape(-1)[: x.size]
    return Quantized(_pack(codes) if bits == 4 else codes, low, high)


def dequantize(quantized: Quantized, size: int, *, bits: int, bucket_size: int | None) -> jax.Array:
    r"""The decoded vector, ``(size,)``: :math:`q u + \delta`."""
    codes = _unpack(quantized.codes)[:size] if bits == 4 else quantized.codes
    low = quantized.low
    rows = _in_buckets(codes.astype(low.dtype), bucket_size)
    values = rows * _unit(low, quantized.high, bits)[:, None] + low[:, None]
    return values.reshape(-1)[:size]


def _bucket(size: int, bucket_size: int | None) -> int:
    return max(1, size if bucket_size is None else min(bucket_size, size))


def _in_buckets(x: jax.Array, bucket_size: int | None) -> jax.Array:
    """``(buckets, coordinates)``; the last bucket is padded with its last value, which does not change its range."""
    bucket = _bucket(x.size, bucket_size)
    return jnp.pad(x, (0, -x.size % bucket), mode="edge").reshape(-1, bucket)


def _unit(low: jax.Array, high: jax.Array, bits: int) -> jax.Array:
    return (high - low) / (2**bits - 1)


def _pack(codes: jax.Array) -> jax.Array:
    """Byte i holds code i in its low half and code i + ceil(d / 2) in its high half: two contiguous reads."""
    half = -(-codes.size // 2)
    return codes[:half] | (jnp.pad(codes[half:], (0, 2 * half - codes.size)) << 4)


def _unpack(packed: jax.Array) -> jax.Array:
    return jnp.concatenate([packed & 15, packed >> 4])
