"""Parameters, layers and losses that several models share."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Arrays:
    """Random parameters for models in plain JAX, drawn one after another from one seed."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __call__(self, *shape: int, scale: float | None = None) -> jax.Array:
        """Normal numbers. By default the variance is 1 over the fan-in, the second-to-last axis."""
        fan_in = shape[-2] if len(shape) > 1 else shape[0]
        return jnp.asarray(self._rng.normal(size=shape) * (fan_in**-0.5 if scale is None else scale), jnp.float32)

    def conv(self, *shape: int) -> jax.Array:
        """Convolution filters, spatial axes first, with He initialisation."""
        return self(*shape, scale=(2 / np.prod(shape[:-1])) ** 0.5)

    def dense(self, inputs: int, outputs: int) -> dict[str, jax.Array]:
        """The weights and biases of a dense layer."""
        return {"w": self(inputs, outputs), "b": jnp.zeros(outputs)}

    def mlp(self, widths: Sequence[int]) -> list[dict[str, jax.Array]]:
        """Dense layers from each width to the next."""
        return [self.dense(i, o) for i, o in itertools.pairwise(widths)]


def mlp(layers: Sequence[Any], x: jax.Array, activation: Callable) -> jax.Array:
    """Dense layers ``{"w": ..., "b": ...}``, with the activation between them."""
    *hidden, last = layers
    for p in hidden:
        x = activation(x @ p["w"] + p["b"])
    return x @ last["w"] + last["b"]


def conv2d(x: jax.Array, filters: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    """Convolution of ``[B, H, W, C]`` with zero padding."""
    return jax.lax.conv_general_dilated(
        x, filters, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def layer_norm(x: jax.Array) -> jax.Array:
    """Layer normalisation without parameters."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def rms_norm(x: jax.Array, gain: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Root mean square normalisation with a learned gain."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * gain


def haiku_layer_norm(x: jax.Array) -> jax.Array:
    """Layer normalisation with a learned scale and offset."""
    return hk.LayerNorm(-1, True, True)(x)


def causal_mask(length: int) -> jax.Array:
    """True where a query (row) may attend to a key (column)."""
    return jnp.tril(jnp.ones((length, length), bool))


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Softmax attention of queries, keys and values ``[T, heads, d]``."""
    scores = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean softmax cross entropy over all axes of the targets."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets))


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean squared error over all axes."""
    return jnp.mean((outputs - targets) ** 2)


def binary_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean sigmoid cross entropy over all axes."""
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, targets))
