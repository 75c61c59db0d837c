"""Convolutional networks with max pooling, filters in groups, or channels first: of images, of speech, of DNA."""

from __future__ import annotations

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, labels, normal
from benchmarks.zoo.entries import KEY, model, of_equinox, of_haiku, of_linen
from benchmarks.zoo.layers import Arrays, conv2d, cross_entropy, mlp


class _Fire(eqx.Module):
    """A 1 x 1 convolution to few channels, then 1 x 1 and 3 x 3 ones side by side; channels first."""

    squeeze: eqx.nn.Conv2d
    narrow: eqx.nn.Conv2d
    wide: eqx.nn.Conv2d

    def __init__(self, inputs: int, squeezed: int, outputs: int, *, key):
        keys = jax.random.split(key, 3)
        self.squeeze = eqx.nn.Conv2d(inputs, squeezed, 1, key=keys[0])
        self.narrow = eqx.nn.Conv2d(squeezed, outputs // 2, 1, key=keys[1])
        self.wide = eqx.nn.Conv2d(squeezed, outputs // 2, 3, padding=1, key=keys[2])

    def __call__(self, x):
        x = jax.nn.relu(self.squeeze(x))
        return jax.nn.relu(jnp.concatenate([self.narrow(x), self.wide(x)]))


class _SqueezeNet(eqx.Module):
    layers: list

    def __init__(self, *, key):
        keys = jax.random.split(key, 6)
        pool = eqx.nn.MaxPool2d(3, 2, padding=1)
        self.layers = [
            eqx.nn.Conv2d(3, 48, 3, padding=1, key=keys[0]),
            jax.nn.relu,
            pool,
            _Fire(48, 16, 96, key=keys[1]),
            _Fire(96, 16, 96, key=keys[2]),
            pool,
            _Fire(96, 32, 192, key=keys[3]),
            _Fire(192, 32, 192, key=keys[4]),
            eqx.nn.Conv2d(192, 10, 1, key=keys[5]),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return jnp.mean(x, (1, 2))


@model("SqueezeNet", "equinox", "forresti/SqueezeNet")
def squeezenet() -> Family:
    def loss(module, example):
        image, label = example
        return cross_entropy(module(image), label)

    return of_equinox(_SqueezeNet(key=KEY), loss, (normal(16, 3, 32, 32), labels(10, 16)))


class _Inception(nn.Module):
    """Convolutions of three sizes and a pooling of stride 1, side by side."""

    width: int

    @nn.compact
    def __call__(self, x):
        def conv(x, size):
            return nn.relu(nn.Conv(self.width, (size, size))(x))

        pooled = nn.max_pool(x, (3, 3), (1, 1), "SAME")
        return jnp.concatenate([conv(x, 1), conv(conv(x, 1), 3), conv(conv(x, 1), 5), conv(pooled, 1)], -1)


class _GoogLeNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (3, 3), (2, 2), "SAME")
        x = _Inception(24)(_Inception(16)(x))
        x = _Inception(32)(nn.max_pool(x, (3, 3), (2, 2), "SAME"))
        return nn.Dense(10)(x.mean((1, 2)))


@model("GoogLeNet", "linen", "Szegedy et al.: Going Deeper with Convolutions (arXiv:1409.4842)")
def googlenet() -> Family:
    return of_linen(_GoogLeNet(), cross_entropy, images(16, 32), labels(10, 16))


@model("LeNet with max pooling", "linen", "google/flax: examples/mnist")
def lenet() -> Family:
    class LeNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            for width in (32, 64):
                x = nn.max_pool(nn.relu(nn.Conv(width, (3, 3))(x)), (2, 2), (2, 2))
            return nn.Dense(10)(nn.relu(nn.Dense(256)(x.reshape(len(x), -1))))

    return of_linen(LeNet(), cross_entropy, images(64, 28, 1), labels(10, 64))


@model("ResNeXt", "jax", "facebookresearch/ResNeXt")
def resnext() -> Family:
    """3 x 3 filters in groups of four channels between 1 x 1 ones."""
    arrays, width = Arrays(), 64
    params = {
        "stem": arrays.conv(3, 3, 3, width),
        "blocks": [
            {
                "in": arrays.conv(1, 1, width, width),
                "grouped": arrays.conv(3, 3, 4, width),
                "out": arrays.conv(1, 1, width, width),
            }
            for _ in range(4)
        ],
        "head": arrays.dense(width, 10),
    }

    def loss(params, example):
        image, label = example
        x = jax.nn.relu(conv2d(image[None], params["stem"]))
        for i, p in enumerate(params["blocks"]):
            y = jax.nn.relu(conv2d(x, p["in"]))
            y = jax.nn.relu(conv2d(y, p["grouped"], groups=width // 4))
            x = jax.nn.relu(x + 0.5 * conv2d(y, p["out"]))
            if i % 2:
                x = nn.max_pool(x, (2, 2), (2, 2))
        return cross_entropy(mlp([params["head"]], x.mean((0, 1, 2)), jax.nn.relu), label)

    return Family(loss, params, (images(8, 32), labels(10, 8)))


@model("ShuffleNet", "haiku", "jaxony/ShuffleNet")
def shufflenet() -> Family:
    """1 x 1 filters in groups, a shuffle of channels, a depthwise filter."""

    def unit(x, width, groups):
        y = jax.nn.relu(hk.Conv2D(width, 1, feature_group_count=groups)(x))
        y = jnp.swapaxes(y.reshape(*y.shape[:-1], groups, -1), -1, -2).reshape(y.shape)
        y = hk.DepthwiseConv2D(1, 3)(y)
        return jax.nn.relu(x + hk.Conv2D(x.shape[-1], 1, feature_group_count=groups)(y))

    def loss(example):
        image, label = example
        x = jax.nn.relu(hk.Conv2D(96, 3, 2)(image[None]))
        for _ in range(2):
            x = hk.max_pool(unit(unit(x, 48, 4), 48, 4), (2, 2, 1), (2, 2, 1), "SAME")
        return cross_entropy(hk.Linear(10)(x.mean((0, 1, 2))), label)

    return of_haiku(loss, (images(16, 32), labels(10, 16)))


@model("Speech commands, raw waveform", "haiku", "pytorch/tutorials: M5 (arXiv:1610.00087)")
def waveform() -> Family:
    """Four one-dimensional convolutions, each followed by a pooling over four positions."""

    def loss(example):
        wave, label = example
        x = wave[None, :, None]
        for width, size, stride in ((32, 80, 4), (32, 3, 1), (64, 3, 1), (64, 3, 1)):
            x = jax.nn.relu(hk.GroupNorm(8)(hk.Conv1D(width, size, stride)(x)))
            x = hk.max_pool(x, (4, 1), (4, 1), "SAME")
        return cross_entropy(hk.Linear(35)(x.mean((0, 1))), label)

    return of_haiku(loss, (normal(16, 4000), labels(35, 16)))


@model("DeepSEA", "linen", "FunctionLab/selene")
def deepsea() -> Family:
    """Long filters over four nucleotides, pooled; many binary labels."""

    class DeepSEA(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.max_pool(nn.relu(nn.Conv(64, (8,))(x)), (4,), (4,))
            x = nn.max_pool(nn.relu(nn.Conv(96, (8,))(x)), (4,), (4,))
            x = nn.relu(nn.Conv(128, (8,))(x))
            return nn.Dense(50)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))

    def loss(logits, present):
        return jnp.mean(jax.nn.softplus(logits) - logits * present)

    sequences = jax.nn.one_hot(labels(4, 16, 256), 4)
    return of_linen(DeepSEA(), loss, sequences, labels(2, 16, 50, seed=2).astype(jnp.float32))


@model("Maxout network", "jax", "Goodfellow et al.: Maxout Networks (arXiv:1302.4389)")
def maxout() -> Family:
    """Each unit is the largest of four linear ones."""
    arrays, pieces = Arrays(), 4
    params = {"layers": [arrays.dense(i, pieces * 128) for i in (256, 128)], "head": arrays.dense(128, 10)}

    def loss(params, example):
        x, label = example
        for p in params["layers"]:
            x = jnp.max((x @ p["w"] + p["b"]).reshape(-1, pieces), -1)
        return cross_entropy(mlp([params["head"]], x, jax.nn.relu), label)

    return Family(loss, params, (normal(64, 256), labels(10, 64)))
