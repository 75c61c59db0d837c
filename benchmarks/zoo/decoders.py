"""Causal language models."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from benchmarks.cost.families import Family
from benchmarks.zoo.data import next_token
from benchmarks.zoo.entries import KEY, model, of_equinox, of_linen, of_nnx
from benchmarks.zoo.layers import Arrays, attention, causal_mask, cross_entropy, layer_norm, rms_norm

_init = nn.initializers.normal(0.02)


class _GPTBlock(nn.Module):
    """Pre-norm, with fused query, key and value."""

    heads: int = 4
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        b, t, c = x.shape
        dense = partial(nn.Dense, kernel_init=_init, dtype=self.dtype)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        q, k, v = jnp.split(dense(3 * c)(h), 3, -1)
        q, k, v = (z.reshape(b, t, self.heads, -1) for z in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]).astype(self.dtype)
        scores = jnp.where(causal_mask(t), scores, jnp.finfo(self.dtype).min)
        y = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v).reshape(b, t, c)
        x = x + dense(c)(y)
        h = dense(4 * c)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + dense(c)(nn.gelu(h))


class _GPT2(nn.Module):
    """Input and output embeddings are tied."""

    vocabulary: int = 4096
    width: int = 256
    depth: int = 4

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(self.vocabulary, self.width, embedding_init=_init)
        positions = nn.Embed(tokens.shape[-1], self.width, embedding_init=_init)
        x = table(tokens) + positions(jnp.arange(tokens.shape[-1])[None])
        for _ in range(self.depth):
            x = _GPTBlock()(x)
        return table.attend(nn.LayerNorm()(x))


@model("GPT-2", "linen", "karpathy/nanoGPT")
def gpt2() -> Family:
    return of_linen(_GPT2(), cross_entropy, *next_token(4096, 4, 64))


class _ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return _GPTBlock(dtype=jnp.bfloat16)(x), None


class _ScannedGPT(nn.Module):
    """Layers are scanned and rematerialised, and computed in bfloat16."""

    vocabulary: int = 2048
    width: int = 256
    depth: int = 4

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width, embedding_init=_init, dtype=jnp.bfloat16)(tokens)
        block = nn.remat(_ScannedBlock, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)
        stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth)
        x, _ = stack()(x, None)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=jnp.bfloat16)(nn.LayerNorm()(x))


@model("GPT scanned, remat, bfloat16", "linen", "AI-Hypercomputer/maxtext")
def gpt_scanned() -> Family:
    return of_linen(_ScannedGPT(), cross_entropy, *next_token(2048, 4, 64))


class _NnxBlock(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class _NnxGPT(nnx.Module):
    """Layers are made by ``nnx.vmap``, run by ``nnx.scan`` and rematerialised."""

    def __init__(self, vocabulary: int, width: int, depth: int, length: int, *, rngs: nnx.Rngs):
        self.table = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width)))

        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs):
            return _NnxBlock(width, 4, rngs)

        self.layers = layers(rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return layer(x)

        x = self.table(tokens) + self.positions[...]
        return self.table.attend(self.norm(run(x, self.layers)))


@model("GPT, nnx.scan and nnx.remat", "nnx", "google/flax: examples/gemma")
def gpt_nnx() -> Family:
    net = _NnxGPT(2048, 256, 4, 64, rngs=nnx.Rngs(0))
    return of_nnx(net, cross_entropy, *next_token(2048, 4, 64))


@model("Llama", "jax", "meta-llama/llama")
def llama() -> Family:
    """Rotary positions, SwiGLU, RMSNorm, and two query heads for each key head."""
    array, width, hidden, heads, groups, size, length, vocabulary = Arrays(), 256, 688, 8, 4, 32, 64, 2048

    def block():
        return {
            "attention_norm": jnp.ones(width),
            "wq": array(width, heads * size),
            "wk": array(width, groups * size),
            "wv": array(width, groups * size),
            "wo": array(heads * size, width),
            "ffn_norm": jnp.ones(width),
            "w1": array(width, hidden),
            "w3": array(width, hidden),
            "w2": array(hidden, width),
        }

    params = {
        "tok_embeddings": array(vocabulary, width, scale=1.0),
        "layers": [block() for _ in range(3)],
        "norm": jnp.ones(width),
        "output": array(width, vocabulary),
    }
    angles = np.outer(np.arange(length), 10_000.0 ** (-np.arange(0, size, 2) / size))
    cos, sin = (jnp.asarray(f(angles), jnp.float32)[:, None] for f in (np.cos, np.sin))

    def rotated(x):
        a, b = x[..., ::2], x[..., 1::2]
        return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)

    def loss(params, example):
        inputs, targets = example
        x, causal = params["tok_embeddings"][inputs], causal_mask(length)
        for p in params["layers"]:
            h = rms_norm(x, p["attention_norm"], 1e-5)
            q = rotated((h @ p["wq"]).reshape(length, heads, size))
            k = rotated((h @ p["wk"]).reshape(length, groups, size))
            v = (h @ p["wv"]).reshape(length, groups, size)
            k, v = (jnp.repeat(z, heads // groups, axis=1) for z in (k, v))
            x = x + attention(q, k, v, causal).reshape(length, -1) @ p["wo"]
            h = rms_norm(x, p["ffn_norm"], 1e-5)
            x = x + (jax.nn.silu(h @ p["w1"]) * (h @ p["w3"])) @ p["w2"]
        return cross_entropy(rms_norm(x, params["norm"], 1e-5) @ params["output"], targets)

    return Family(loss, params, next_token(vocabulary, 4, length))


class _LoraLinear(eqx.Module):
    """A low-rank update of a frozen matrix. The loss closes over the matrix, so it is not a parameter."""

    a: jax.Array
    b: jax.Array

    def __init__(self, inputs, outputs, rank, *, key):
        self.a = jax.random.normal(key, (rank, inputs)) / inputs**0.5
        self.b = 0.01 * jax.random.normal(key, (outputs, rank))

    def __call__(self, frozen, x):
        return x @ frozen + 2.0 * ((x @ self.a.T) @ self.b.T)


@model("LoRA of a GPT", "equinox", "microsoft/LoRA")
def lora() -> Family:
    width, length, vocabulary, depth = 256, 64, 4096, 4
    array = Arrays()
    table = array(vocabulary, width, scale=0.02)
    frozen = [
        {"qkv": array(width, 3 * width), "o": array(width, width), "up": array(width, 4 * width)}
        | {"down": array(4 * width, width)}
        for _ in range(depth)
    ]
    keys = jax.random.split(KEY, depth)
    adapters = [
        {n: _LoraLinear(*w.shape, 8, key=k) for k, (n, w) in zip(jax.random.split(key, 4), layer.items(), strict=True)}
        for key, layer in zip(keys, frozen, strict=True)
    ]

    def loss(adapters, example):
        inputs, targets = example
        x, causal = table[inputs], causal_mask(length)
        for adapter, layer in zip(adapters, frozen, strict=True):
            q, k, v = jnp.split(adapter["qkv"](layer["qkv"], layer_norm(x)).reshape(length, 4, -1), 3, -1)
            scores = jnp.where(causal, jnp.einsum("qhd,khd->hqk", q, k) / 8, -jnp.inf)
            y = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v).reshape(length, width)
            x = x + adapter["o"](layer["o"], y)
            x = x + adapter["down"](layer["down"], jax.nn.gelu(adapter["up"](layer["up"], layer_norm(x))))
        return cross_entropy(layer_norm(x) @ table.T, targets)

    return of_equinox(adapters, loss, next_token(vocabulary, 4, length))
