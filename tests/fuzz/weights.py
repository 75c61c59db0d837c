"""Prologues: what may lie between a parameter and its use. Each maps a weight to one of its own shape."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.custom_vjp
def _clipped(w):
    return w


_clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@jax.custom_vjp
def _normalized(w):
    return w


_normalized.defvjp(lambda w: (w, None), lambda _, g: (g / (jnp.linalg.norm(g) + 1e-6),))


@jax.custom_vjp
def _cubed(w):
    return w


_cubed.defvjp(lambda w: (w, None), lambda _, g: (g**3,))


@jax.custom_jvp
def _straight_through(w):
    return jnp.round(4 * w) / 4


_straight_through.defjvp(lambda primals, tangents: (_straight_through(primals[0]), 2 * tangents[0]))


def _standardized(w):
    mean = jnp.mean(w, 0, keepdims=True)
    return (w - mean) / jnp.sqrt(jnp.var(w, 0, keepdims=True) + 1e-2)


def _low_rank(w):
    return w + w @ (w.T @ w) if w.ndim == 2 else w * jnp.sum(w)


def _phase(w):
    return jnp.real(jnp.exp(1j * w) * (1 - 0.5j))


def _spectrum(w):
    return jnp.fft.irfft(jnp.fft.rfft(w) * 0.7, n=w.shape[-1])


def _complex(w):
    return jnp.abs(lax.complex(w, 0.3 * w + 1))


def _quantized(w):
    rounded = jnp.round(w * 8).astype(jnp.int8).astype(w.dtype) / 8
    return w + lax.stop_gradient(rounded - w)


def _through_integers(w):
    return w + jnp.floor(w).astype(jnp.int32).astype(w.dtype)


def _triangle(w):
    return jnp.where(np.arange(w.size).reshape(w.shape) % 3 == 0, 0, w)


def _rematerialized(w):
    return jax.checkpoint(lambda w: jnp.sin(w) * w)(w)


def _chosen(w):
    return lax.cond(jnp.sum(w) > 0, lambda w: 2 * w, lambda w: w - 1, w)


def _scanned(w):
    return lax.scan(lambda c, _: (jnp.tanh(c) + w, None), w, None, length=2)[0]


PROLOGUES: dict[str, Callable] = {
    "plain": lambda w: w,
    "number": lambda w: 2.5 * w,
    "reversed": lambda w: w[..., ::-1],
    "transposed": lambda w: w.T if w.ndim == 2 and w.shape[0] == w.shape[1] else w,
    "elementwise": lambda w: jnp.tanh(w) * 0.7,
    "masked": _triangle,
    "centered": lambda w: w - jnp.mean(w),
    "standardized": _standardized,
    "low_rank": _low_rank,
    "bfloat16": lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
    "float16": lambda w: w.astype(jnp.float16).astype(jnp.float32),
    "clipped_gradient": _clipped,
    "normalized_gradient": _normalized,
    "cubed_gradient": _cubed,
    "custom_jvp": _straight_through,
    "phase": _phase,
    "spectrum": _spectrum,
    "complex": _complex,
    "quantized": _quantized,
    "through_integers": _through_integers,
    "remat_weight": _rematerialized,
    "cond_weight": _chosen,
    "scan_weight": _scanned,
    "twice": lambda w: w + jnp.sin(w),
}
PRECISE = set(PROLOGUES) - {"bfloat16", "float16"}


def _by_direction(w):
    """Divided by ``u w v`` for vectors that count as constant, as in spectral normalisation."""
    flat = w.reshape(-1, w.shape[-1])
    v = lax.stop_gradient(jnp.tanh(flat.sum(0)) + 0.1)
    u = lax.stop_gradient(jnp.tanh(flat @ v) + 0.1)
    return w / (1 + u @ flat @ v)


# A weight times a number that is computed from it.
MULTIPLES: dict[str, Callable] = {
    "multiple_norm": lambda w: w * lax.rsqrt(1 + jnp.sum(w**2)),
    "multiple_largest": lambda w: w * jnp.max(jnp.abs(w)),
    "multiple_direction": _by_direction,
    "multiple_twice": lambda w: _by_direction(w) * jnp.sum(jnp.abs(w)),
}

# Entries that are sums or differences of two, whose terms may cancel, and the signs of whose coefficients differ.
PAIRS: dict[str, Callable] = {
    "paired_mirror": lambda w: w + w[..., ::-1],
    "paired_difference": lambda w: w - jnp.roll(w, 1, axis=-1),
    "paired_turned": lambda w: w - w.T if w.ndim == 2 and w.shape[0] == w.shape[1] else w + w[::-1],
    "paired_halves": lambda w: jnp.concatenate([w[:1] + w[-1:], w[1:] - w[:-1]]),
}


def _flat(function):
    """As a map of matrices, for weights with more axes."""

    def run(w):
        return w if w.ndim < 2 else function(w.reshape(-1, w.shape[-1])).reshape(w.shape)

    return run


# Products of matrices, which may be taken apart.
PRODUCTS: dict[str, Callable] = {
    "product": _flat(lambda w: w @ (w.T @ w)),
    "product_added": _flat(lambda w: w + 0.5 * (w @ (w.T @ w))),
    "product_gain": _flat(lambda w: (w - w @ (w.T @ w)) * lax.stop_gradient(jnp.linalg.norm(w, axis=0)) * w[0]),
    "product_turned": _flat(lambda w: -(w.T @ (w @ w.T) / jnp.sum(w**2)).T),
    "product_rows": _flat(lambda w: w[:, :1] * (w @ w.T @ w)),
}
