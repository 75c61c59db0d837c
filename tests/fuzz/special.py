"""Uses of weights that are drawn apart from the others (losses.py): next to complex numbers, and as experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .losses import LAYERS, SQUARE, L, T
from .weights import MULTIPLES, PROLOGUES


def _of_complex(way):
    """A layer that meets a complex activation, of at least float32, and returns a real one."""

    def layer(h, w, e):
        dtype = jnp.promote_types(h.dtype, jnp.float32)
        z = way(lax.complex(h.astype(dtype), e["u"].astype(dtype)), w[0].astype(dtype))
        return (z.real + z.imag).astype(h.dtype)

    return layer


# Ways in which a square matrix of real numbers meets complex ones.
_IN_COMPLEX: list[Callable[[Any, Any], Any]] = [
    lambda z, w: z @ w,
    lambda z, w: jnp.fft.fft(z, axis=0) @ w,
    lambda z, w: jnp.einsum("oi,ti->ot", w, z).T,
    lambda z, w: z @ (w * w[0, 0]),
    lambda z, w: z.real @ (w + 1j * w.T),
    lambda z, w: z @ lax.complex(w, jnp.sin(w)),
    lambda z, w: jnp.einsum("ti,io->tio", z, jnp.conj(w - 0.5j * w)).sum(1),
    lambda z, w: lax.scan(lambda c, x: (0.5 * c + x @ w, c), jnp.zeros_like(z[0]), z)[1],
    lambda z, w: jax.checkpoint(lambda z: z @ (1j * w))(z),
    lambda z, w: z * w,
    lambda z, w: z * w[0, 0],
]
_COMPLEX = [_of_complex(way) for way in _IN_COMPLEX]


def of_complex(seed, share, uses, params, features):
    """Uses of a matrix of the program, or of one of its own, next to complex numbers: after the others, or alone."""
    return _more(seed, 8, share, "complex", SQUARE, _COMPLEX, uses, params, features)


def of_experts(seed, share, uses, params, features):
    """Uses of a stack of matrices of the program, or of one of its own, as experts: after the others, or alone."""
    return _more(seed, 10, share, "experts", LAYERS, _EXPERTS, uses, params, features)


def _more(seed, stream, share, feature, shape, ways, uses, params, features):
    rng = np.random.default_rng([seed, stream])  # draws of its own, as in `program._uneven`
    if rng.random() >= share:
        return uses
    features.append(feature)
    name = str(rng.choice([*(k for k, w in params.items() if w.shape == shape), feature]))
    if name == feature:
        params[name] = (rng.normal(size=shape) * 0.5).astype(np.float32)
    prologue = str(rng.choice([*PROLOGUES, *MULTIPLES])) if rng.random() < 0.4 else "plain"
    chosen = rng.choice(len(ways), size=rng.integers(1, 3), replace=False)
    more = [(ways[i], [(name, prologue)]) for i in chosen]
    return more if rng.random() < 0.5 else uses + more


_TURNED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])


def _sorted(product, most=T):
    """Rows sorted by the expert that an example's numbers name, of whom each takes up to ``most``; the rest are 0."""

    def layer(h, w, e):
        expert = e["ids"] % L
        order, sizes = jnp.argsort(expert), jnp.minimum(jnp.bincount(expert, length=L), most)
        return product(h[order], w[0], sizes)[jnp.argsort(order)] + h * e["u"]

    return layer


def _over_time(x, w, sizes):  # the same experts in every step
    return lax.scan(lambda c, _: (jnp.tanh(lax.ragged_dot(c, w, sizes)), None), x, None, length=2)[0]


def _routed(h, w, e):  # sorted by what the hidden rows say, and weighted by how much they say it
    scores = jax.nn.softmax(h[:, :L] + e["u"][:, :L])
    expert = jnp.argmax(scores, axis=1)
    order = jnp.argsort(expert)
    out = lax.ragged_dot(h[order], w[0], jnp.bincount(expert, length=L))
    return out[jnp.argsort(order)] * jnp.max(scores, axis=1, keepdims=True)


_EXPERTS: list[Callable[[Any, Any, Any], Any]] = [
    _sorted(lax.ragged_dot),
    _sorted(lax.ragged_dot, most=1),
    _sorted(lambda x, w, sizes: lax.ragged_dot_general(x, w, sizes, _TURNED)),
    _sorted(lambda x, w, sizes: lax.ragged_dot(lax.ragged_dot(x, w, sizes), w.mT, sizes)),
    _sorted(_over_time),
    _sorted(lambda x, w, sizes: jax.checkpoint(lax.ragged_dot)(x, w, sizes)),
    _sorted(lambda x, w, sizes: lax.ragged_dot(x, w + jnp.sin(w[:1]), sizes)),
    _routed,
]
