"""Convolutional image classifiers, in the style of torchvision and timm, with GroupNorm in place of BatchNorm."""

import itertools

import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, labels
from benchmarks.zoo.entries import model, of_haiku, of_linen, of_nnx
from benchmarks.zoo.layers import Arrays, conv2d, cross_entropy, mlp


class _BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.features, (3, 3), self.stride, use_bias=False)(x)
        y = nn.relu(nn.GroupNorm(num_groups=16)(y))
        y = nn.GroupNorm(num_groups=16)(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = nn.GroupNorm(num_groups=16)(nn.Conv(self.features, (1, 1), self.stride, use_bias=False)(x))
        return nn.relu(x + y)


class _ResNet18(nn.Module):
    width: int = 32

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(num_groups=16)(nn.Conv(self.width, (3, 3), use_bias=False)(x)))
        for stage in range(4):
            for block in range(2):
                x = _BasicBlock(self.width * 2**stage, 2 if stage and not block else 1)(x)
        return nn.Dense(10)(x.mean((1, 2)))


@model("ResNet-18", "linen", "kuangliu/pytorch-cifar")
def resnet() -> Family:
    return of_linen(_ResNet18(), cross_entropy, images(8, 32), labels(10, 8))


def _scaled_standardized_conv(x, features, size=3, stride=1, groups=1):
    """Convolution whose filters have mean 0 and variance 1 over the fan-in, times a learned gain."""
    shape = (size, size, x.shape[-1] // groups, features)
    w = hk.get_parameter("w", shape, init=hk.initializers.VarianceScaling(1.0, "fan_in", "normal"))
    gain = hk.get_parameter("gain", (features,), init=jnp.ones)
    bias = hk.get_parameter("b", (features,), init=jnp.zeros)
    fan_in = shape[0] * shape[1] * shape[2]
    mean, variance = jnp.mean(w, (0, 1, 2), keepdims=True), jnp.var(w, (0, 1, 2), keepdims=True)
    w = (w - mean) * lax.rsqrt(jnp.maximum(variance * fan_in, 1e-4)) * gain
    return conv2d(x[None], w, stride, groups)[0] + bias


class _WSConv(hk.Module):
    def __init__(self, features: int, size: int = 3, stride: int = 1, groups: int = 1):
        super().__init__()
        self._options = (features, size, stride, groups)

    def __call__(self, x):
        return _scaled_standardized_conv(x, *self._options)


@model("NF-ResNet", "haiku", "google-deepmind/deepmind-research: nfnets")
def nf_resnet() -> Family:
    alpha = 0.2

    def block(x, features, stride, beta):
        out = jax.nn.relu(x) * 1.7139588594436646 * beta
        shortcut = x
        if stride > 1 or features != x.shape[-1]:
            pooled = hk.avg_pool(out, (2, 2, 1), (2, 2, 1), "SAME") if stride > 1 else out
            shortcut = _WSConv(features, 1)(pooled)
        out = _WSConv(features // 2, 1)(out)
        out = _WSConv(features // 2, 3, stride, 2)(jax.nn.relu(out) * 1.7139588594436646)
        out = _WSConv(features, 1)(jax.nn.relu(out) * 1.7139588594436646)
        gate = jnp.mean(out, (0, 1))
        gate = hk.Linear(features)(jax.nn.relu(hk.Linear(features // 4)(gate)))
        out = out * 2 * jax.nn.sigmoid(gate)
        skip_gain = hk.get_parameter(f"skip_gain_{features}_{stride}_{beta:.3f}", (), init=jnp.zeros)
        return shortcut + out * alpha * (skip_gain + 1)

    def loss(example):
        image, label = example
        x = _WSConv(48)(image)
        for features, depth, stride in ((96, 1, 1), (192, 2, 2), (192, 1, 2)):
            expected = 1.0
            for i in range(depth):
                x = block(x, features, stride if i == 0 else 1, expected**-0.5)
                expected = 1.0 + alpha**2 if i == 0 else expected + alpha**2
        return cross_entropy(hk.Linear(10)(jnp.mean(jax.nn.relu(x), (0, 1))), label)

    return of_haiku(loss, (images(8, 32), labels(10, 8)))


class _DenseLayer(nnx.Module):
    def __init__(self, inputs: int, growth: int, *, rngs: nnx.Rngs):
        self.norm1 = nnx.GroupNorm(inputs, num_groups=8, rngs=rngs)
        self.conv1 = nnx.Conv(inputs, 4 * growth, (1, 1), use_bias=False, rngs=rngs)
        self.norm2 = nnx.GroupNorm(4 * growth, num_groups=8, rngs=rngs)
        self.conv2 = nnx.Conv(4 * growth, growth, (3, 3), use_bias=False, rngs=rngs)

    def __call__(self, x):
        y = self.conv1(nnx.relu(self.norm1(x)))
        return jnp.concatenate([x, self.conv2(nnx.relu(self.norm2(y)))], -1)


class _DenseNet(nnx.Module):
    def __init__(self, growth: int = 24, *, rngs: nnx.Rngs):
        width = 2 * growth
        layers = [nnx.Conv(3, width, (3, 3), use_bias=False, rngs=rngs)]
        for stage, count in enumerate((3, 3, 3)):
            for _ in range(count):
                layers.append(_DenseLayer(width, growth, rngs=rngs))
                width += growth
            if stage < 2:
                layers += [
                    nnx.GroupNorm(width, num_groups=8, rngs=rngs),
                    nnx.relu,
                    nnx.Conv(width, width // 2 // 8 * 8, (1, 1), use_bias=False, rngs=rngs),
                    lambda x: nnx.avg_pool(x, (2, 2), (2, 2)),
                ]
                width = width // 2 // 8 * 8
        self.features = nnx.Sequential(*layers)
        self.norm = nnx.GroupNorm(width, num_groups=8, rngs=rngs)
        self.classifier = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        return self.classifier(nnx.relu(self.norm(self.features(x))).mean((1, 2)))


@model("DenseNet", "nnx", "liuzhuang13/DenseNet")
def densenet() -> Family:
    return of_nnx(_DenseNet(rngs=nnx.Rngs(0)), cross_entropy, images(8, 32), labels(10, 8))


@model("VGG-11", "jax", "chengyangfu/pytorch-vgg-cifar10")
def vgg() -> Family:
    array, plan = Arrays(), (32, "pool", 64, "pool", 128, 128, "pool", 256, 256, "pool")
    widths = (3, *(p for p in plan if p != "pool"))
    params = {
        "conv": [{"w": array.conv(3, 3, i, o), "b": jnp.zeros(o)} for i, o in itertools.pairwise(widths)],
        "dense": array.mlp((4 * widths[-1], 256, 256, 10)),
    }

    def loss(params, example):
        image, label = example
        x, layers = image[None], iter(params["conv"])
        for step in plan:
            if step == "pool":
                x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            else:
                layer = next(layers)
                x = jax.nn.relu(conv2d(x, layer["w"]) + layer["b"])
        return cross_entropy(mlp(params["dense"], x.reshape(-1), jax.nn.relu), label)

    return Family(loss, params, (images(16, 32), labels(10, 16)))
