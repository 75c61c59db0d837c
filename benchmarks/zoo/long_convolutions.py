"""Convolutional models of long sequences: filters as long as the sequence, and dilated filters."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from benchmarks.cost.families import Family
from benchmarks.zoo.data import labels, next_token, normal
from benchmarks.zoo.entries import model, of_haiku, of_linen
from benchmarks.zoo.layers import Arrays, cross_entropy, layer_norm


def fft_convolved(x, filters):
    """Causal convolution of ``[T, channels]`` with filters as long as the sequence."""
    length = x.shape[0]
    spectrum = jnp.fft.rfft(x, 2 * length, axis=0) * jnp.fft.rfft(filters, 2 * length, axis=0)
    return jnp.fft.irfft(spectrum, 2 * length, axis=0)[:length]


@model("Hyena", "jax", "HazyResearch/safari")
def hyena() -> Family:
    """Gated convolutions as long as the sequence; a small network of the position generates their filters."""
    array, width, length, depth, order, vocabulary = Arrays(), 128, 256, 2, 2, 2048

    def block():
        return {
            "in": array(width, (order + 1) * width),
            "short": array(3, (order + 1) * width, scale=0.5),
            "filter": [array(9, 64, scale=1.0), array(64, 64), array(64, order * width)],
            "bias": array(order, width, scale=1.0),
            "out": array(width, width),
            "up": array(width, 2 * width),
            "down": array(2 * width, width),
        }

    params = {"table": array(vocabulary, width, scale=0.1), "blocks": [block() for _ in range(depth)]}
    times = np.linspace(0, 1, length)[:, None]
    angles = 2 * np.pi * times * np.arange(1, 5)
    features = jnp.asarray(np.concatenate([times, np.cos(angles), np.sin(angles)], -1), jnp.float32)
    window = jnp.asarray(np.exp(-times * np.linspace(3, 15, order * width)), jnp.float32)

    def mixed(p, x):
        z = x @ p["in"]
        padded = jnp.pad(z, ((2, 0), (0, 0)))
        z = sum(padded[i : i + length] * p["short"][i] for i in range(3))
        *gates, v = jnp.split(z, order + 1, -1)
        h = features
        for w in p["filter"][:-1]:
            h = jnp.sin(h @ w)
        filters = jnp.split(h @ p["filter"][-1] * window, order, -1)
        for gate, filter_, bias in zip(gates, filters, p["bias"], strict=True):
            v = gate * (fft_convolved(v, filter_) + v * bias)
        return v @ p["out"]

    def loss(params, example):
        x = params["table"][example[0]]
        for p in params["blocks"]:
            x = x + mixed(p, layer_norm(x))
            x = x + jax.nn.gelu(layer_norm(x) @ p["up"]) @ p["down"]
        return cross_entropy(layer_norm(x) @ params["table"].T, example[1])

    return Family(loss, params, next_token(vocabulary, 4, length))


class _WaveNet(nn.Module):
    """Gated, dilated causal convolutions; the outputs of all layers are summed."""

    residual: int = 64
    skip: int = 128

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, self.residual)(tokens)
        total = 0.0
        for dilation in (1, 2, 4, 8, 16, 32, 1, 2, 4, 8, 16, 32):
            h = nn.Conv(2 * self.residual, (2,), kernel_dilation=dilation, padding="CAUSAL")(x)
            a, b = jnp.split(h, 2, -1)
            h = nn.tanh(a) * nn.sigmoid(b)
            total = total + nn.Dense(self.skip)(h)
            x = x + nn.Dense(self.residual)(h)
        return nn.Dense(256)(nn.relu(nn.Dense(self.skip)(nn.relu(total))))


@model("WaveNet", "linen", "ibab/tensorflow-wavenet")
def wavenet() -> Family:
    return of_linen(_WaveNet(), cross_entropy, *next_token(256, 4, 256))


@model("TCN, weight normalised", "haiku", "locuslab/TCN")
def tcn() -> Family:
    """Residual blocks of dilated causal convolutions with weight normalisation."""

    class _Conv(hk.Module):
        def __init__(self, dilation):
            super().__init__()
            self._dilation = dilation

        def __call__(self, x):
            v = hk.get_parameter("v", (5, x.shape[-1], 96), init=hk.initializers.RandomNormal(0.05))
            g = hk.get_parameter("g", (96,), init=jnp.ones)
            w = v * (g * lax.rsqrt(jnp.sum(v * v, (0, 1)) + 1e-8))
            y = lax.conv_general_dilated(
                x[None], w, (1,), [(4 * self._dilation, 0)], rhs_dilation=(self._dilation,),
                dimension_numbers=("NWC", "WIO", "NWC"),
            )[0]  # fmt: skip
            return jax.nn.relu(y + hk.get_parameter("b", (96,), init=jnp.zeros))

    def loss(example):
        x = example[0]
        for dilation in (1, 2, 4, 8):
            y = _Conv(dilation)(_Conv(dilation)(x))
            x = jax.nn.relu(y + (x if x.shape == y.shape else hk.Linear(96)(x)))
        return cross_entropy(hk.Linear(10)(x[-1]), example[1])

    return of_haiku(loss, (normal(8, 256, 4), labels(10, 8)))
