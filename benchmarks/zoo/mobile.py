"""Efficient convolutional classifiers: depthwise filters, squeeze and excitation, early exits."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, labels
from benchmarks.zoo.entries import KEY, model, of_equinox, of_haiku, of_linen
from benchmarks.zoo.layers import cross_entropy


class _ConvNeXtBlock(nn.Module):
    """Depthwise 7 x 7 convolution, LayerNorm, two dense layers, and a scale per channel."""

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.Conv(width, (7, 7), feature_group_count=width)(x)
        y = nn.LayerNorm(epsilon=1e-6)(y)
        y = nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(y)))
        return x + self.param("gamma", nn.initializers.constant(0.1), (width,)) * y


class _ConvNeXt(nn.Module):
    widths: tuple[int, ...] = (48, 96, 192)
    depths: tuple[int, ...] = (1, 1, 3)

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Conv(self.widths[0], (2, 2), 2)(x))
        for i, (width, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            if i:
                x = nn.Conv(width, (2, 2), 2)(nn.LayerNorm()(x))
            for _ in range(depth):
                x = _ConvNeXtBlock()(x)
        return nn.Dense(10)(nn.LayerNorm()(x.mean((1, 2))))


@model("ConvNeXt", "linen", "facebookresearch/ConvNeXt")
def convnext() -> Family:
    return of_linen(_ConvNeXt(), cross_entropy, images(8, 32), labels(10, 8))


class _InvertedResidual(eqx.Module):
    """1 x 1 expansion, depthwise 3 x 3 convolution, 1 x 1 projection."""

    layers: list
    shortcut: bool = eqx.field(static=True)

    def __init__(self, inputs, outputs, stride, expansion, *, key):
        keys, hidden = jax.random.split(key, 3), inputs * expansion
        self.shortcut = stride == 1 and inputs == outputs
        expand = [
            eqx.nn.Conv2d(inputs, hidden, 1, use_bias=False, key=keys[0]),
            eqx.nn.GroupNorm(8, hidden),
            jax.nn.relu6,
        ]
        self.layers = [
            *(expand if expansion > 1 else []),
            eqx.nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, use_bias=False, key=keys[1]),
            eqx.nn.GroupNorm(8, hidden),
            jax.nn.relu6,
            eqx.nn.Conv2d(hidden, outputs, 1, use_bias=False, key=keys[2]),
            eqx.nn.GroupNorm(8, outputs),
        ]

    def __call__(self, x):
        y = x
        for layer in self.layers:
            y = layer(y)
        return x + y if self.shortcut else y


@model("MobileNetV2", "equinox", "tonylins/pytorch-mobilenet-v2")
def mobilenet() -> Family:
    keys = iter(jax.random.split(KEY, 32))
    blocks, width = [eqx.nn.Conv2d(3, 32, 3, padding=1, use_bias=False, key=next(keys)), eqx.nn.GroupNorm(8, 32)], 32
    for expansion, outputs, count, stride in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 2, 2), (6, 64, 2, 2)):
        for i in range(count):
            blocks.append(_InvertedResidual(width, outputs, stride if i == 0 else 1, expansion, key=next(keys)))
            width = outputs
    blocks += [eqx.nn.Conv2d(width, 256, 1, use_bias=False, key=next(keys)), eqx.nn.GroupNorm(8, 256)]
    net = (blocks, eqx.nn.Linear(256, 10, key=next(keys)))

    def loss(net, example):
        x, label = example
        blocks, head = net
        for block in blocks:
            x = block(x)
        return cross_entropy(head(jnp.mean(jax.nn.relu6(x), (1, 2))), label)

    return of_equinox(net, loss, (jnp.moveaxis(images(8, 32), -1, 1), labels(10, 8)))


@jax.custom_vjp
def _swish(x):
    return x * jax.nn.sigmoid(x)


def _swish_backward(x, cotangent):
    s = jax.nn.sigmoid(x)
    return (cotangent * (s * (1 + x * (1 - s))),)


_swish.defvjp(lambda x: (_swish(x), x), _swish_backward)  # saves only its input


class _MBConv(nn.Module):
    """Inverted residual with squeeze and excitation."""

    features: int
    stride: int
    kernel: int
    expansion: int

    @nn.compact
    def __call__(self, x):
        inputs = x.shape[-1]
        y = x
        if self.expansion > 1:
            y = _swish(nn.GroupNorm(num_groups=8)(nn.Conv(inputs * self.expansion, (1, 1), use_bias=False)(y)))
        hidden = y.shape[-1]
        y = nn.Conv(hidden, (self.kernel,) * 2, self.stride, feature_group_count=hidden, use_bias=False)(y)
        y = _swish(nn.GroupNorm(num_groups=8)(y))
        squeezed = _swish(nn.Conv(inputs // 4, (1, 1))(y.mean((1, 2), keepdims=True)))
        y = nn.sigmoid(nn.Conv(hidden, (1, 1))(squeezed)) * y
        y = nn.GroupNorm(num_groups=8)(nn.Conv(self.features, (1, 1), use_bias=False)(y))
        return x + y if x.shape == y.shape else y


class _EfficientNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = _swish(nn.GroupNorm(num_groups=8)(nn.Conv(32, (3, 3), use_bias=False)(x)))
        for expansion, features, count, stride, kernel in (
            (1, 16, 1, 1, 3),
            (6, 24, 2, 2, 3),
            (6, 40, 2, 2, 5),
            (6, 80, 1, 2, 3),
        ):
            for i in range(count):
                x = _MBConv(features, stride if i == 0 else 1, kernel, expansion)(x)
        x = _swish(nn.GroupNorm(num_groups=8)(nn.Conv(256, (1, 1), use_bias=False)(x)))
        return nn.Dense(10)(x.mean((1, 2)))


@model("EfficientNet", "linen", "lukemelas/EfficientNet-PyTorch")
def efficientnet() -> Family:
    return of_linen(_EfficientNet(), cross_entropy, images(8, 32), labels(10, 8))


@model("BranchyNet", "haiku", "kunglab/branchynet")
def branchynet() -> Family:
    """Examples with low entropy take the early exit; the deeper layers run only for the others."""

    def block(x, features, stride):
        y = hk.Conv2D(features, 3, stride)(x[None])[0]
        return jax.nn.relu(hk.GroupNorm(8)(y[None])[0])

    def loss(example):
        image, label = example
        x = block(block(image, 64, 1), 64, 2)
        exit_logits = hk.Linear(10)(jnp.mean(x, (0, 1)))
        log_probabilities = jax.nn.log_softmax(exit_logits)
        entropy = -jnp.sum(jnp.exp(log_probabilities) * log_probabilities)

        def deeper(x):
            for features, stride in ((128, 2), (128, 1), (128, 1)):
                x = block(x, features, stride)
            return hk.Linear(10)(jnp.mean(x, (0, 1)))

        if hk.running_init():  # both branches of a cond must create the same parameters
            logits = deeper(x)
        else:
            logits = hk.cond(entropy < 2.2, lambda x: exit_logits, deeper, x)
        return cross_entropy(exit_logits, label) + cross_entropy(logits, label)

    return of_haiku(loss, (images(8, 32), labels(10, 8)))
