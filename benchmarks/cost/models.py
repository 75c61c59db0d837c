"""Flax models for the benchmarks."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx


class SmallCNN(nnx.Module):
    """Two convolutions and a dense layer for 8 x 8 images, with tanh, which trains better than relu under clipping."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.dense = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.tanh(self.conv1(x))
        x = nnx.tanh(self.conv2(x))
        return self.dense(x.reshape(x.shape[0], -1))


class MLP(nn.Module):
    """Dense layers with relu; without hidden layers it is a logistic regression."""

    widths: Sequence[int]
    outputs: int
    dtype: Any = None  # of the computation; None: float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.widths:
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(self.outputs, dtype=self.dtype)(x)


class CNN(nn.Module):
    """Four 3 x 3 convolutions, mean pooling, a dense layer."""

    outputs: int = 10
    dtype: Any = None  # of the computation; None: float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features, stride in ((32, 1), (64, 2), (64, 2), (128, 2)):
            x = nn.relu(nn.Conv(features, (3, 3), strides=stride, dtype=self.dtype)(x))
        return nn.Dense(self.outputs, dtype=self.dtype)(x.mean((-3, -2)))


class StandardizedConv(nn.Module):
    """Convolution with weight standardisation: filters are scaled to mean 0 and variance 1 over the fan-in."""

    features: int
    size: int = 3
    stride: int = 1
    dtype: Any = None  # of the computation; None: float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.he_normal(), shape)
        mean = kernel.mean((0, 1, 2), keepdims=True)
        kernel = (kernel - mean) / jnp.sqrt(
            kernel.var((0, 1, 2), keepdims=True) * (shape[0] * shape[1] * shape[2]) + 1e-6
        )
        strides = (self.stride, self.stride)
        x, kernel = (z if self.dtype is None else z.astype(self.dtype) for z in (x, kernel))
        return jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


class WideResNet(nn.Module):
    """Wide-ResNet with GroupNorm(16) and weight standardisation, as is usual for private image models."""

    depth: int = 16
    width: int = 4
    outputs: int = 10
    dtype: Any = None  # of the computation; None: float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        blocks = (self.depth - 4) // 6
        conv, norm = (functools.partial(module, dtype=self.dtype) for module in (StandardizedConv, nn.GroupNorm))
        x = conv(16)(x)
        for group, base in enumerate((16, 32, 64)):
            features = base * self.width
            for block in range(blocks):
                stride = 2 if group > 0 and block == 0 else 1
                h = nn.relu(norm(16)(x))
                same = x.shape[-1] == features and stride == 1
                skip = x if same else conv(features, size=1, stride=stride)(h)
                h = conv(features, stride=stride)(h)
                h = nn.relu(norm(16)(h))
                x = skip + conv(features)(h)
        x = nn.relu(norm(16)(x))
        return nn.Dense(self.outputs, dtype=self.dtype)(x.mean((-3, -2)))


class Transformer(nn.Module):
    """A small encoder over tokens, with mean pooling."""

    vocabulary: int = 5_000
    width: int = 128
    layers: int = 2
    heads: int = 4
    outputs: int = 2
    dtype: Any = None  # of the computation; None: float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        dense, norm = (functools.partial(module, dtype=self.dtype) for module in (nn.Dense, nn.LayerNorm))
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[-1], self.width))
        x = x + positions.astype(x.dtype)
        for _ in range(self.layers):
            h = norm()(x)
            x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(h, h)
            h = norm()(x)
            x = x + dense(self.width)(nn.gelu(dense(4 * self.width)(h)))
        return dense(self.outputs)(x.mean(-2))


class LSTMClassifier(nn.Module):
    """Classifies the last state of an LSTM over embedded tokens. 673,154 parameters at the default sizes."""

    vocabulary: int = 10_000
    embedding: int = 64
    hidden: int = 64
    outputs: int = 2
    dtype: Any = None  # of the computation; None: float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.embedding, dtype=self.dtype)(tokens)
        x = nn.RNN(nn.OptimizedLSTMCell(self.hidden, dtype=self.dtype))(x)
        return nn.Dense(self.outputs, dtype=self.dtype)(x[..., -1, :])


class MatrixFactorization(nn.Module):
    """Rating = dot product of a user's and an item's factors."""

    users: int = 943
    items: int = 1_682
    dimension: int = 100
    dtype: Any = None  # of the computation; None: float32

    @nn.compact
    def __call__(self, pair: jax.Array) -> jax.Array:
        user = nn.Embed(self.users, self.dimension, dtype=self.dtype, name="users")(pair[..., 0])
        item = nn.Embed(self.items, self.dimension, dtype=self.dtype, name="items")(pair[..., 1])
        return jnp.sum(user * item, axis=-1)


def within(bound: float) -> nn.initializers.Initializer:
    """Uniform between ``-bound`` and ``bound``."""
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -bound, bound)


class TwoLayerLSTM(nn.Module):
    """Classifies the last state of two LSTM layers over embedded tokens. 706,690 parameters at the default sizes.

    As in PyTorch, and in the paper's parameter count, every layer has two bias vectors, one for the input and one for
    the state. The initialisation is PyTorch's (embeddings of variance 1, kernels uniform within 1 / sqrt(hidden)),
    except that biases start at 0.
    """

    vocabulary: int = 10_000
    embedding: int = 64
    hidden: int = 64
    layers: int = 2
    outputs: int = 2

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.embedding, embedding_init=nn.initializers.normal(1.0))(tokens)
        size, init = self.hidden, within(self.hidden**-0.5)
        for layer in range(self.layers):
            kernels = [
                self.param(f"{name}_kernel_{layer}", init, (fan_in, 4 * size))
                for name, fan_in in (("input", x.shape[-1]), ("state", size))
            ]
            biases = [
                self.param(f"{name}_bias_{layer}", nn.initializers.zeros, (4 * size,)) for name in ("input", "state")
            ]
            bias = sum(biases).reshape((1,) * (x.ndim - 1) + (-1,))
            gates = x @ kernels[0] + bias  # the inputs of all time steps at once

            def step(state, inputs, kernel=kernels[1]):
                h, c = state
                i, f, g, o = jnp.split(inputs + h @ kernel, 4, axis=-1)
                c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
                h = nn.sigmoid(o) * jnp.tanh(c)
                return (h, c), h

            zeros = jnp.zeros((*x.shape[:-2], size), x.dtype)
            _, x = jax.lax.scan(step, (zeros, zeros), jnp.moveaxis(gates, -2, 0))
            x = jnp.moveaxis(x, 0, -2)
        return nn.Dense(self.outputs)(x[..., -1, :])


class Autoencoder(nn.Module):
    """Dense layers down to a code and back up, for images in [0, 1]; returns the logits of the pixels."""

    widths: Sequence[int] = (256, 64)
    code: int = 32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size = x.shape[-1]
        for width in self.widths:
            x = nn.tanh(nn.Dense(width)(x))
        x = nn.Dense(self.code)(x)
        for width in reversed(self.widths):
            x = nn.tanh(nn.Dense(width)(x))
        return nn.Dense(size)(x)


class FiveLayerCNN(nn.Module):
    """Three convolutions and two dense layers with tanh, the size of network in DP-AdamBC's image experiments."""

    channels: Sequence[int] = (16, 32, 32)
    width: int = 64
    outputs: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in self.channels:
            x = nn.tanh(nn.Conv(features, (3, 3), strides=2)(x))
        x = x.reshape(*x.shape[:-3], -1)
        return nn.Dense(self.outputs)(nn.tanh(nn.Dense(self.width)(x)))
