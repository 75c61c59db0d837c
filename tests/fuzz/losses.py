"""Where weights meet the example: each kind maps a hidden ``[T, D]`` to one of its shape, with weights of its own.

A kind is ``(shapes of its weights, function(h, weights, example))``. Weights of one shape may be shared with another
use of the program: that ties them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

T, D, V, L = 4, 4, 6, 3  # positions, width, rows of a table, layers
TABLE, SQUARE, LAYERS, TABLES = (V, D), (D, D), (L, D, D), (L, V, D)


def finite(x):
    """What a look-up out of range reads may be NaN; a model masks it."""
    return jnp.where(jnp.isfinite(x), x, 0)


def _gather(mode):
    return lambda h, w, e: h + finite(w[0].at[e["ids"]].get(mode=mode)) * e["u"]


def _raw_gather(mode):
    dims = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lambda h, w, e: h + finite(lax.gather(w[0], e["ids"][:, None], dims, (1, D), mode=mode)) * e["u"]


def _columns(h, w, e):
    return h + finite(jnp.take(w[0].T, e["ids"], axis=1)).T


def _one_row(h, w, e):
    return h * (1 + finite(w[0][e["ids"][0]]))


def _sliced_rows(h, w, e):
    rows = [lax.dynamic_slice(w[0], (e["ids"][i], jnp.int32(0)), (1, D)) for i in range(T)]
    return h + jnp.concatenate(rows) * e["u"]


def _vmapped_slices(h, w, e):
    return h + jax.vmap(lambda i: lax.dynamic_index_in_dim(w[0], i, keepdims=False))(e["ids"])


def _vmapped_tables(h, w, e):  # a table a position
    tables = jnp.stack([w[0] * (i + 1) for i in range(T)])
    return h + finite(jax.vmap(lambda t, i: t[i])(tables, e["ids"])) * e["u"]


def _read_out(h, w, e):
    return h + (h @ w[0].T * e["v"]) @ jnp.ones((V, D)) / V


def _tied(mode):
    """Looked up and read out with one table."""

    def function(h, w, e):
        found = finite(w[0].at[e["ids"]].get(mode=mode)) * e["u"]
        return h + found + (e["x"] @ w[0].T * e["v"]) @ jnp.ones((V, D))

    return function


def _tables_in_scan(h, w, e):
    return lax.scan(lambda h, t: (h + finite(t[e["ids"]]) * e["u"], None), h, w[0])[0]


def _slices_in_scan(h, w, e):
    def step(h, t):
        return h + lax.dynamic_index_in_dim(t, e["ids"][0], keepdims=False), None

    return lax.scan(step, h, w[0])[0]


def _tables_in_vmap(h, w, e):
    return h + jnp.sum(jax.vmap(lambda t: finite(t[e["ids"]]) * e["u"])(w[0]), axis=0)


def _layers(h, w, e):
    return lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), h, w[0])[0]


def _shared_layer(h, w, e):  # one layer for all steps, each of which changes it in its own way
    return lax.scan(lambda h, s: (jnp.tanh(h @ (w[0] * s)), None), h, jnp.arange(1.0, L + 1))[0]


def _shared_parts(h, w, e):  # steps read the same part of a stack more than once
    return lax.scan(lambda h, i: (jnp.tanh(h @ w[0][i]), None), h, jnp.arange(L) // 2)[0]


def _recurrent(h, w, e):
    def step(state, x):
        state = jnp.tanh(x @ w[0] + state @ w[1] + w[2])
        return state, state

    return lax.scan(step, jnp.zeros(D), h)[1]


def _table_over_time(h, w, e):  # one table for all steps
    def step(state, x):
        i, u = x
        state = state + finite(w[0][i]) * u
        return state, state

    return h + lax.scan(step, jnp.zeros(D), (e["ids"], e["u"]))[1]


def _counted(h, w, e):
    return lax.fori_loop(0, L, lambda i, h: jnp.tanh(h @ w[0][i]), h)


def _heads(h, w, e):  # a batch axis of the weight
    return jnp.einsum("tgi,gij->tgj", h.reshape(T, 2, D // 2), w[0]).reshape(T, D)


def _several_axes(h, w, e):
    return h * jnp.einsum("td,tdk->k", h, w[0])


def _conv1d(stride=1, dilation=1, groups=1, order="WIO"):
    def function(h, w, e):
        out = lax.conv_general_dilated(
            h[None], w[0], (stride,), "SAME", rhs_dilation=(dilation,), feature_group_count=groups,
            dimension_numbers=("NWC", order, "NWC"),
        )[0]  # fmt: skip
        return h + jnp.repeat(out, T // out.shape[0], axis=0)

    return function


def _conv2d(stride):
    def function(h, w, e):
        out = lax.conv_general_dilated(
            h[None, :, :, None], w[0], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return h + jnp.sum(out) / 4 + jnp.mean(out, axis=(1, 2, 3))

    return function


def _transposed_conv(h, w, e):
    out = lax.conv_general_dilated(
        h[None], w[0], (1,), ((2, 2),), lhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC")
    )
    return h + out[0, :T]


def _cond(h, w, e):
    return lax.cond(e["x"][0, 0] > 0, lambda w: h @ w, lambda w: h + jnp.sum(w), w[0])


def _branches(h, w, e):
    return lax.switch(e["ids"][1] % 3, [lambda w: h @ w, lambda w: h * w[0], lambda w: h], w[0])


def _remat(h, w, e):
    return jax.checkpoint(lambda h, w: jnp.tanh(h @ w + finite(w[e["ids"] % D])))(h, w[0])


@jax.custom_vjp
def _own_rule(h, w):
    return h @ w


_own_rule.defvjp(lambda h, w: (h @ w, (h, w)), lambda r, g: (g @ r[1].T, jnp.clip(r[0].T @ g, -1, 1)))


def _complex_product(h, w, e):
    z = (h + 1j * e["x"]) @ lax.complex(w[0], w[1])
    return jnp.abs(z) + jnp.imag(z)


def _long_convolution(h, w, e):
    return jnp.fft.irfft(jnp.fft.rfft(h, axis=0) * jnp.fft.rfft(w[0], axis=0), n=T, axis=0)


def _half(dtype):
    return lambda h, w, e: (h.astype(dtype) @ w[0].astype(dtype)).astype(jnp.float32)


def _layer_norm(h, w, e):
    centered = h - jnp.mean(h, 1, keepdims=True)
    return centered * lax.rsqrt(jnp.mean(centered**2, 1, keepdims=True) + 1e-3) * w[0] + w[1]


def _attention(h, w, e):
    q, k, v = h @ w[0], h @ w[1], h @ w[2]
    return jax.nn.softmax(q @ k.T) @ v


KINDS: dict[str, tuple[list[tuple[int, ...]], Callable[[Any, Any, Any], Any]]] = {
    "dense": ([SQUARE], lambda h, w, e: h @ w[0]),
    "dense_first": ([SQUARE], lambda h, w, e: jnp.einsum("ij,tj->ti", w[0], h)),
    "dense_once": ([SQUARE], lambda h, w, e: h * (e["x"][0] @ w[0])),
    "outer": ([(D,)], lambda h, w, e: h * jnp.outer(e["x"][:, 0], w[0])),
    "heads": ([(2, D // 2, D // 2)], _heads),
    "several_axes": ([(T, D, D)], _several_axes),
    "bias": ([(D,)], lambda h, w, e: h + w[0]),
    "gain": ([(D,)], lambda h, w, e: h * w[0]),
    "added_to_sequence": ([SQUARE], lambda h, w, e: h + w[0][:T]),
    "layer_norm": ([(D,), (D,)], _layer_norm),
    "attention": ([SQUARE, SQUARE, SQUARE], _attention),
    "gather_default": ([TABLE], lambda h, w, e: h + finite(w[0][e["ids"]]) * e["u"]),
    "gather_fill": ([TABLE], _gather("fill")),
    "gather_clip": ([TABLE], _gather("clip")),
    "gather_promise": ([TABLE], _gather("promise_in_bounds")),
    "gather_wrap": ([TABLE], lambda h, w, e: h + jnp.take(w[0], e["ids"], axis=0, mode="wrap")),
    "raw_gather_fill": ([TABLE], _raw_gather("fill")),
    "raw_gather_promise": ([TABLE], _raw_gather("promise_in_bounds")),
    "raw_gather_clip": ([TABLE], _raw_gather("clip")),
    "columns": ([TABLE], _columns),
    "one_row": ([TABLE], _one_row),
    "sliced_rows": ([TABLE], _sliced_rows),
    "vmapped_slices": ([TABLE], _vmapped_slices),
    "vmapped_tables": ([TABLE], _vmapped_tables),
    "read_out": ([TABLE], _read_out),
    "tied_default": ([TABLE], _tied(None)),
    "tied_fill": ([TABLE], _tied("fill")),
    "tied_clip": ([TABLE], _tied("clip")),
    "tied_promise": ([TABLE], _tied("promise_in_bounds")),
    "tables_in_scan": ([TABLES], _tables_in_scan),
    "slices_in_scan": ([TABLES], _slices_in_scan),
    "tables_in_vmap": ([TABLES], _tables_in_vmap),
    "table_over_time": ([TABLE], _table_over_time),
    "layers": ([LAYERS], _layers),
    "counted": ([LAYERS], _counted),
    "shared_layer": ([SQUARE], _shared_layer),
    "shared_parts": ([LAYERS], _shared_parts),
    "recurrent": ([SQUARE, SQUARE, (D,)], _recurrent),
    "conv1d": ([(3, D, D)], _conv1d()),
    "conv1d_stride": ([(2, D, D)], _conv1d(stride=2)),
    "conv1d_dilated": ([(2, D, D)], _conv1d(dilation=2)),
    "conv1d_groups": ([(3, D // 2, D)], _conv1d(groups=2)),
    "conv1d_depthwise": ([(3, 1, D)], _conv1d(groups=D)),
    "conv2d": ([(3, 3, 1, 2)], _conv2d(1)),
    "conv2d_stride": ([(2, 2, 1, 2)], _conv2d(2)),
    "conv_transposed": ([(3, D, D)], _transposed_conv),
    "cond": ([SQUARE], _cond),
    "switch": ([SQUARE], _branches),
    "remat": ([SQUARE], _remat),
    "custom_vjp": ([SQUARE], lambda h, w, e: _own_rule(h, w[0])),
    "jit": ([SQUARE], lambda h, w, e: jax.jit(lambda h, w: jnp.sin(h @ w))(h, w[0])),
    "complex_product": ([SQUARE, SQUARE], _complex_product),
    "long_convolution": ([SQUARE], _long_convolution),
    "half_bfloat16": ([SQUARE], _half(jnp.bfloat16)),
    "half_float16": ([SQUARE], _half(jnp.float16)),
}
PRECISE = set(KINDS) - {"half_bfloat16", "half_float16"}

# Ways to use a square matrix or filter side by side: their factors have one shape but arrange the weight differently.
CROSSINGS: dict[tuple[int, ...], list[Callable[[Any, Any, Any], Any]]] = {
    SQUARE: [
        lambda h, w, e: h @ w[0],
        lambda h, w, e: h + jnp.einsum("ti,oi->to", e["x"], w[0]),
        lambda h, w, e: h + jnp.einsum("oi,ti->ot", w[0], jnp.tanh(h)).T,
        lambda h, w, e: h + finite(w[0][e["ids"]]) * e["u"],
        lambda h, w, e: h + finite(w[0].T[e["ids"]]) * e["u"],
        _columns,
        lambda h, w, e: h + finite(w[0][e["ids"], e["ids"][::-1]])[:, None] * e["u"],
        lambda h, w, e: h * w[0],
    ],
    (3, D, D): [_conv1d(), _conv1d(order="WOI"), _conv1d(dilation=2, order="WOI"), _conv1d(stride=2)],
}
