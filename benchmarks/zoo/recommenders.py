"""Recommenders and models of tabular data."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from benchmarks.cost.families import Family
from benchmarks.zoo.data import labels, normal, words
from benchmarks.zoo.entries import KEY, model, of_equinox, of_haiku, of_linen, of_nnx
from benchmarks.zoo.layers import binary_cross_entropy, cross_entropy, haiku_layer_norm

_FIELDS, _ROWS = 26, 2_000


def _clicks(count: int) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """13 numbers and 26 categories, as in Criteo's data, and whether the user clicked."""
    return (normal(count, 13), words(_ROWS, count, _FIELDS)), labels(2, count).astype(jnp.float32)


class _DLRM(nn.Module):
    """Dot products between the embeddings of all categories and of the numbers, then an MLP."""

    width: int = 32

    @nn.compact
    def __call__(self, numbers, categories):
        for features in (512, 256, self.width):
            numbers = nn.relu(nn.Dense(features)(numbers))
        vectors = [nn.Embed(_ROWS, self.width)(categories[:, i]) for i in range(_FIELDS)]
        vectors = jnp.stack([numbers, *vectors], 1)
        products = jnp.einsum("bid,bjd->bij", vectors, vectors)
        below = np.tril_indices(_FIELDS + 1, -1)
        x = jnp.concatenate([numbers, products[:, below[0], below[1]]], -1)
        for features in (512, 512, 256):
            x = nn.relu(nn.Dense(features)(x))
        return nn.Dense(1)(x)[:, 0]


@model("DLRM", "linen", "facebookresearch/dlrm")
def dlrm() -> Family:
    return of_linen(_DLRM(), binary_cross_entropy, *_clicks(64))


class _DeepFM(nnx.Module):
    """A factorisation machine and a deep network that share the embeddings of all fields."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.offsets = tuple(range(0, _FIELDS * _ROWS, _ROWS))
        self.linear = nnx.Embed(_FIELDS * _ROWS, 1, rngs=rngs)
        self.table = nnx.Embed(_FIELDS * _ROWS, width, rngs=rngs)
        self.deep = nnx.Sequential(
            nnx.Linear(_FIELDS * width, 400, rngs=rngs), nnx.relu,
            nnx.Linear(400, 400, rngs=rngs), nnx.relu, nnx.Linear(400, 1, rngs=rngs),
        )  # fmt: skip
        self.bias = nnx.Param(jnp.zeros(()))

    def __call__(self, categories):
        rows = categories + jnp.asarray(self.offsets)
        vectors = self.table(rows)
        crossed = jnp.square(vectors.sum(1)) - jnp.square(vectors).sum(1)
        first = self.linear(rows).sum((1, 2)) + self.bias[...]
        return first + 0.5 * crossed.sum(-1) + self.deep(vectors.reshape(len(vectors), -1))[:, 0]


@model("DeepFM", "nnx", "shenweichen/DeepCTR")
def deep_fm() -> Family:
    (_, categories), clicked = _clicks(64)
    return of_nnx(_DeepFM(16, rngs=nnx.Rngs(0)), binary_cross_entropy, categories, clicked)


@model("Neural collaborative filtering", "haiku", "hexiangnan/neural_collaborative_filtering")
def collaborative() -> Family:
    users, items = 6_040, 3_706

    def loss(example):
        user, item, liked = example
        product = hk.Embed(users, 64)(user) * hk.Embed(items, 64)(item)
        x = jnp.concatenate([hk.Embed(users, 128)(user), hk.Embed(items, 128)(item)])
        for features in (512, 256, 128):
            x = jax.nn.relu(hk.Linear(features)(x))
        return binary_cross_entropy(hk.Linear(1)(jnp.concatenate([product, x]))[0], liked)

    rng = np.random.default_rng(7)
    pairs = (jnp.asarray(rng.integers(0, n, 64), jnp.int32) for n in (users, items))
    return of_haiku(loss, (*pairs, labels(2, 64).astype(jnp.float32)))


class _FTLayer(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, *, key):
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(
            8, width, use_query_bias=True, use_key_bias=True, use_value_bias=True, use_output_bias=True, key=keys[0]
        )
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(2 * width, width, key=keys[2])

    def __call__(self, x):
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h)
        a, b = jnp.split(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)), 2, -1)
        return x + jax.vmap(self.down)(a * jax.nn.relu(b))


class _FTTransformer(eqx.Module):
    """Each column is a token: a vector times the number, or the embedding of the category."""

    weight: jax.Array
    bias: jax.Array
    table: eqx.nn.Embedding
    token: jax.Array
    layers: list[_FTLayer]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, width, depth, *, key):
        keys = jax.random.split(key, depth + 5)
        self.weight = jax.random.normal(keys[0], (13, width)) / width**0.5
        self.bias = jax.random.normal(keys[1], (13 + _FIELDS, width)) / width**0.5
        self.token = jax.random.normal(keys[2], (1, width)) / width**0.5
        self.table = eqx.nn.Embedding(_FIELDS * _ROWS, width, key=keys[3])
        self.layers = [_FTLayer(width, key=k) for k in keys[5:]]
        self.norm, self.head = eqx.nn.LayerNorm(width), eqx.nn.Linear(width, 1, key=keys[4])

    def __call__(self, numbers, categories):
        rows = jax.vmap(self.table)(categories + _ROWS * jnp.arange(_FIELDS))
        x = jnp.concatenate([self.token, jnp.concatenate([self.weight * numbers[:, None], rows]) + self.bias])
        for layer in self.layers:
            x = layer(x)
        return self.head(jax.nn.relu(self.norm(x[0])))[0]


@model("FT-Transformer", "equinox", "yandex-research/rtdl-revisiting-models")
def ft_transformer() -> Family:
    net = _FTTransformer(96, 3, key=KEY)
    return of_equinox(net, lambda net, e: binary_cross_entropy(net(*e[0]), e[1]), _clicks(16))


class _TwoTower(nn.Module):
    """Scores of a user against one item and sampled negatives, by cosine similarity of two embeddings."""

    items: int = 20_000
    width: int = 64

    @nn.compact
    def __call__(self, seen, user, candidates):
        table = nn.Embed(self.items, self.width, name="items")
        x = jnp.concatenate([table(seen).mean(1), nn.Embed(5_000, 32, name="users")(user)], -1)
        query = nn.Dense(self.width)(nn.relu(nn.Dense(512)(x)))
        y = nn.Dense(self.width)(nn.relu(nn.Dense(512)(table(candidates))))
        query, y = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (query, y))
        return jnp.einsum("bd,bcd->bc", query, y) / 0.1


@model("Two towers, sampled softmax", "linen", "tensorflow/recommenders: retrieval")
def two_tower() -> Family:
    rng = np.random.default_rng(8)
    candidates = jnp.asarray(rng.integers(0, 20_000, (32, 101)), jnp.int32)
    users = jnp.asarray(rng.integers(0, 5_000, 32), jnp.int32)
    return of_linen(_TwoTower(), cross_entropy, (words(20_000, 32, 20), users, candidates), jnp.zeros(32, jnp.int32))


@model("SASRec", "haiku", "kang205/SASRec")
def sasrec() -> Family:
    """Scores the next item against a random one, at every position of a user's history."""
    items, width, length = 5_000, 128, 50

    def loss(example):
        history, following, others = example
        table = hk.Embed(items, width)
        x = table(history) * width**0.5 + hk.get_parameter("positions", (length, width), init=jnp.zeros)
        causal = jnp.tril(jnp.ones((1, length, length), bool))
        for _ in range(2):
            h = haiku_layer_norm(x)
            x = h + hk.MultiHeadAttention(2, width // 2, model_size=width, w_init_scale=1.0)(h, x, x, causal)
            h = haiku_layer_norm(x)
            x = h + hk.Conv1D(width, 1)(jax.nn.relu(hk.Conv1D(width, 1)(h)))
        x = haiku_layer_norm(x)
        liked, other = jnp.sum(x * table(following), -1), jnp.sum(x * table(others), -1)
        return jnp.mean(jax.nn.softplus(-liked) + jax.nn.softplus(other))

    history = words(items, 16, length + 1)
    others = jnp.asarray(np.random.default_rng(9).integers(0, items, (16, length)), jnp.int32)
    return of_haiku(loss, (history[:, :-1], history[:, 1:], others))
