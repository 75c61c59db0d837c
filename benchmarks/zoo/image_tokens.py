"""Models that treat images and point clouds as sets of tokens: transformers, mixers, PointNet."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, labels, normal
from benchmarks.zoo.entries import KEY, model, of_equinox, of_linen
from benchmarks.zoo.layers import Arrays, attention, cross_entropy, layer_norm


class _Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, heads, *, key):
        keys = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x):
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h)
        h = jax.vmap(self.up)(jax.vmap(self.norm2)(x))
        return x + jax.vmap(self.down)(jax.nn.gelu(h))


class _ViT(eqx.Module):
    patch: eqx.nn.Linear
    positions: jax.Array
    token: jax.Array
    blocks: list[_Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, width, depth, heads, *, key):
        keys = jax.random.split(key, depth + 4)
        self.patch = eqx.nn.Linear(4 * 4 * 3, width, key=keys[0])
        self.positions = 0.02 * jax.random.normal(keys[1], (65, width))
        self.token = 0.02 * jax.random.normal(keys[2], (1, width))
        self.blocks = [_Block(width, heads, key=k) for k in keys[4:]]
        self.norm, self.head = eqx.nn.LayerNorm(width), eqx.nn.Linear(width, 10, key=keys[3])

    def __call__(self, image):
        patches = image.reshape(3, 8, 4, 8, 4).transpose(1, 3, 2, 4, 0).reshape(64, -1)
        x = jnp.concatenate([self.token, jax.vmap(self.patch)(patches)]) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[0]))


@model("ViT", "equinox", "patrick-kidger/equinox: examples/vision_transformer")
def vit() -> Family:
    batch = (jnp.moveaxis(images(16, 32), -1, 1), labels(10, 16))
    return of_equinox(_ViT(192, 4, 6, key=KEY), lambda net, e: cross_entropy(net(e[0]), e[1]), batch)


class _MlpBlock(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(self.hidden)(x)))


class _Mixer(nn.Module):
    """Dense layers across patches, then across channels, in turn."""

    width: int = 256
    depth: int = 4

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.width, (4, 4), strides=(4, 4))(x)
        x = x.reshape(x.shape[0], -1, self.width)
        for _ in range(self.depth):
            y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
            x = x + jnp.swapaxes(_MlpBlock(128)(y), 1, 2)
            x = x + _MlpBlock(1024)(nn.LayerNorm()(x))
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


@model("MLP-Mixer", "linen", "google-research/vision_transformer")
def mixer() -> Family:
    return of_linen(_Mixer(), cross_entropy, images(16, 32), labels(10, 16))


def _windows(x, size):
    """Splits ``[B, H, W, C]`` into ``[B, windows, size * size, C]``."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // size, size, w // size, size, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, size * size, c)


def _unwindowed(x, size, h, w):
    """Puts the windows back together as ``[B, H, W, C]``."""
    b, _, _, c = x.shape
    x = x.reshape(b, h // size, w // size, size, size, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)


def _relative_index(size):
    """The row of the bias table for each pair of pixels in a window, by their offset."""
    points = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"), -1).reshape(-1, 2)
    offsets = points[:, None] - points[None] + size - 1
    return offsets[..., 0] * (2 * size - 1) + offsets[..., 1]


def _shift_mask(h, w, size, shift):
    """0 where two pixels of a shifted window were in the same region before the shift, else -100."""
    regions = np.zeros((1, h, w, 1))
    cuts = (slice(0, -size), slice(-size, -shift), slice(-shift, None))
    for i, rows in enumerate(cuts):
        for j, columns in enumerate(cuts):
            regions[:, rows, columns] = 3 * i + j
    ids = np.asarray(_windows(regions, size))[0, :, :, 0]
    return np.where(ids[:, :, None] == ids[:, None], 0.0, -100.0).astype(np.float32)


class _SwinBlock(nn.Module):
    """Attention within windows, which are shifted in every other block."""

    heads: int
    shift: int
    size: int = 4

    @nn.compact
    def __call__(self, x):
        _, h, w, c = x.shape
        y = nn.LayerNorm()(x)
        if self.shift:
            y = jnp.roll(y, (-self.shift, -self.shift), (1, 2))
        y = _windows(y, self.size)
        qkv = nn.Dense(3 * c)(y).reshape(*y.shape[:-1], 3, self.heads, c // self.heads)
        q, k, v = jnp.moveaxis(qkv, -3, 0)
        table = self.param("bias_table", nn.initializers.normal(0.02), ((2 * self.size - 1) ** 2, self.heads))
        scores = jnp.einsum("bwqhd,bwkhd->bwhqk", q, k) / jnp.sqrt(c // self.heads)
        scores = scores + jnp.moveaxis(table[_relative_index(self.size)], -1, 0)
        if self.shift:
            scores = scores + _shift_mask(h, w, self.size, self.shift)[:, None]
        y = jnp.einsum("bwhqk,bwkhd->bwqhd", nn.softmax(scores), v).reshape(y.shape)
        y = _unwindowed(nn.Dense(c)(y), self.size, h, w)
        if self.shift:
            y = jnp.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        return x + _MlpBlock(4 * c)(nn.LayerNorm()(x))


class _Swin(nn.Module):
    width: int = 96

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Conv(self.width, (2, 2), strides=(2, 2))(x))
        for stage in range(2):
            if stage:  # merge patches, 2 x 2
                b, h, w, c = x.shape
                x = x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, h // 2, w // 2, 4 * c)
                x = nn.Dense(2 * c, use_bias=False)(nn.LayerNorm()(x))
            for shift in (0, 2):
                x = _SwinBlock(heads=3 * 2**stage, shift=shift)(x)
        return nn.Dense(10)(nn.LayerNorm()(x).mean((1, 2)))


@model("Swin Transformer", "linen", "microsoft/Swin-Transformer")
def swin() -> Family:
    return of_linen(_Swin(), cross_entropy, images(8, 32), labels(10, 8))


class _SharedMLP(eqx.Module):
    """The same dense layers for every point."""

    layers: list[eqx.nn.Linear]
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, widths, *, key):
        pairs = list(itertools.pairwise(widths))
        keys = jax.random.split(key, len(pairs))
        self.layers = [eqx.nn.Linear(i, o, key=k) for (i, o), k in zip(pairs, keys, strict=True)]
        self.norms = [eqx.nn.LayerNorm(o) for _, o in pairs]

    def __call__(self, points):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            points = jax.nn.relu(jax.vmap(norm)(jax.vmap(layer)(points)))
        return points


class _PointNet(eqx.Module):
    """A learned 3 x 3 transform of the points, shared layers, then the maximum over all points."""

    align: _SharedMLP
    turn: eqx.nn.MLP
    early: _SharedMLP
    late: _SharedMLP
    head: eqx.nn.MLP

    def __init__(self, *, key):
        keys = jax.random.split(key, 5)
        self.align = _SharedMLP((3, 64, 128, 256), key=keys[0])
        self.turn = eqx.nn.MLP(256, 9, 128, 1, key=keys[1])
        self.early = _SharedMLP((3, 64, 64), key=keys[2])
        self.late = _SharedMLP((64, 128, 512), key=keys[3])
        self.head = eqx.nn.MLP(512, 40, 256, 2, key=keys[4])

    def __call__(self, points):
        matrix = jnp.eye(3) + self.turn(jnp.max(self.align(points), 0)).reshape(3, 3)
        features = self.late(self.early(points @ matrix))
        return self.head(jnp.max(features, 0)), matrix


@model("PointNet", "equinox", "charlesq34/pointnet")
def pointnet() -> Family:
    def loss(net, example):
        points, label = example
        logits, matrix = net(points)
        return cross_entropy(logits, label) + 1e-3 * jnp.sum((matrix @ matrix.T - jnp.eye(3)) ** 2)

    return of_equinox(_PointNet(key=KEY), loss, (normal(8, 512, 3), labels(40, 8)))


@model("Perceiver", "jax", "lucidrains/perceiver-pytorch")
def perceiver() -> Family:
    """Latents attend to the pixels several times, with the same weights each time."""
    array, width, pixels, heads = Arrays(), 128, 3 + 4 * 6, 4

    def projections(inputs):
        return {"q": array(width, width), "kv": array(inputs, 2 * width), "o": array(width, width)}

    def feed_forward():
        return {"up": array(width, 2 * 4 * width), "down": array(4 * width, width)}

    params = {
        "latents": array(64, width, scale=0.02),
        "cross": projections(pixels) | feed_forward(),
        "layers": [projections(width) | feed_forward() for _ in range(2)],
        "head": array(width, 10),
    }
    grid = np.stack(np.meshgrid(*2 * [np.linspace(-1, 1, 16)]), -1).reshape(256, 2)
    angles = grid[..., None] * np.pi * 2.0 ** np.arange(6)
    fourier = jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], -1).reshape(256, -1), jnp.float32)

    def layer(p, x, context):
        q = (layer_norm(x) @ p["q"]).reshape(len(x), heads, -1)
        k, v = jnp.split((layer_norm(context) @ p["kv"]).reshape(len(context), heads, -1), 2, -1)
        x = x + attention(q, k, v).reshape(len(x), -1) @ p["o"]
        gate, value = jnp.split(layer_norm(x) @ p["up"], 2, -1)
        return x + (jax.nn.gelu(gate) * value) @ p["down"]

    def loss(params, example):
        image, label = example
        context = jnp.concatenate([image.reshape(256, 3), fourier], -1)
        x = params["latents"]
        for _ in range(3):
            x = layer(params["cross"], x, context)
            for p in params["layers"]:
                x = layer(p, x, x)
        return cross_entropy(layer_norm(x.mean(0)) @ params["head"], label)

    return Family(loss, params, (images(8, 16), labels(10, 8)))
