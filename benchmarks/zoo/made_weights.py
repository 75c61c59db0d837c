"""Models whose weights are made of parameters, and one whose weights are also used without a derivative."""

import itertools

import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, labels, next_token, normal, words
from benchmarks.zoo.entries import model, of_haiku
from benchmarks.zoo.layers import (
    Arrays,
    attention,
    binary_cross_entropy,
    causal_mask,
    conv2d,
    cross_entropy,
    layer_norm,
    rms_norm,
    squared_error,
)


@model("DoRA of a Transformer", "jax", "NVlabs/DoRA")
def dora() -> Family:
    """Adapters merged into their weights, whose columns have learned lengths; their norm counts as constant."""
    width, heads, rank, arrays = 128, 4, 8, Arrays()
    frozen = [
        {name: arrays(*shape) for name, shape in
         {**{n: (width, width) for n in "qkvo"}, "up": (width, 4 * width), "down": (4 * width, width)}.items()}
        for _ in range(3)
    ]  # fmt: skip
    params = [
        {n: {"a": arrays(width, rank), "b": arrays(rank, width, scale=0.1), "length": jnp.linalg.norm(block[n], axis=0)}
         for n in "qkvo"} for block in frozen
    ]  # fmt: skip

    def adapted(weight, own):
        merged = weight + 2.0 * own["a"] @ own["b"]
        return merged / lax.stop_gradient(jnp.linalg.norm(merged, axis=0)) * own["length"]

    def loss(params, example):
        x, targets = example
        for weights, own in zip(frozen, params, strict=True):
            h = layer_norm(x)
            q, k, v = ((h @ adapted(weights[n], own[n])).reshape(len(h), heads, -1) for n in "qkv")
            x = x + attention(q, k, v).reshape(x.shape) @ adapted(weights["o"], own["o"])
            x = x + jax.nn.gelu(layer_norm(x) @ weights["up"]) @ weights["down"]
        return squared_error(x, targets)

    return Family(loss, params, (normal(8, 32, width), normal(8, 32, width, seed=1)))


@model("Tensor-train layer", "jax", "Bihaqo/TensorNet")
def tensor_train() -> Family:
    """A matrix of 1024 by 512 as a product of three small tensors."""
    arrays = Arrays()
    sizes = [(8, 8), (8, 8), (16, 8)]
    ranks = [1, 8, 8, 1]
    cores = [arrays(r, *size, s, scale=0.4) for (r, s), size in zip(itertools.pairwise(ranks), sizes, strict=True)]
    params = {"cores": cores, "head": arrays.dense(512, 10)}

    def loss(params, example):
        x, label = example
        weight = jnp.einsum("aijb,bklc,cmnd->ikmjln", *params["cores"]).reshape(1024, 512)
        h = jax.nn.relu(x @ weight)
        return cross_entropy(h @ params["head"]["w"] + params["head"]["b"], label)

    return Family(loss, params, (normal(64, 1024), labels(10, 64)))


@model("BitNet b1.58", "haiku", "microsoft/BitNet")
def bitnet() -> Family:
    """A decoder whose weights are rounded to -1, 0 and 1 and whose activations to 8 bits."""
    vocabulary, width, heads = 500, 128, 4

    def rounded(x, steps, low, high):
        return x + lax.stop_gradient(jnp.clip(jnp.round(x * steps), low, high) / steps - x)

    def linear(x, outputs, name):
        w = hk.get_parameter(name, (x.shape[-1], outputs), init=hk.initializers.VarianceScaling())
        x = rms_norm(x, jnp.ones(x.shape[-1]))
        x = rounded(x, 127 / jnp.max(jnp.abs(x), -1, keepdims=True), -128, 127)
        return x @ rounded(w, 1 / jnp.mean(jnp.abs(w)), -1, 1)

    def loss(example):
        tokens, targets = example
        x = hk.Embed(vocabulary, width)(tokens)
        for i in range(2):
            q, k, v = (linear(x, width, f"{n}{i}").reshape(len(x), heads, -1) for n in "qkv")
            x = x + linear(attention(q, k, v, causal_mask(len(x))).reshape(x.shape), width, f"o{i}")
            x = x + linear(jax.nn.relu(linear(x, 4 * width, f"up{i}")) ** 2, width, f"down{i}")
        return cross_entropy(hk.Linear(vocabulary)(x), targets)

    return of_haiku(loss, next_token(vocabulary, 8, 32))


@model("Energy-based model, Langevin", "jax", "openai/ebm_code_release")
def energy() -> Family:
    """Negative examples are found by steps down the energy, which are not differentiated."""
    arrays = Arrays()
    params = arrays.mlp([64, 256, 256, 1])

    def energy(params, x):
        for p in params[:-1]:
            x = jax.nn.swish(x @ p["w"] + p["b"])
        return (x @ params[-1]["w"] + params[-1]["b"])[0]

    def loss(params, example):
        x, start, noise = example
        sample = start
        for step in noise:
            sample = sample - 0.1 * jax.grad(energy, 1)(params, sample) + 0.005 * step
        real, fake = energy(params, x), energy(params, lax.stop_gradient(sample))
        return real - fake + 0.1 * (real**2 + fake**2)

    return Family(loss, params, (normal(64, 64), normal(64, 64, seed=1), normal(64, 5, 64, seed=2)))


@model("Group-equivariant CNN, p4", "jax", "tscohen/GrouPy")
def equivariant() -> Family:
    """Each filter is used in four rotations."""
    arrays = Arrays()
    params = {
        "first": arrays.conv(3, 3, 3, 16),
        "others": [arrays.conv(4, 3, 3, 16, 16) for _ in range(2)],
        "head": arrays.dense(16, 10),
    }

    def turned(filters, k):  # [4, H, W, in, out]: each orientation of the input rotates and moves to the next
        return jnp.concatenate(list(jnp.roll(jnp.rot90(filters, k, (1, 2)), k, 0)), axis=2)

    def loss(params, example):
        x, label = example
        first = jnp.concatenate([jnp.rot90(params["first"], k) for k in range(4)], axis=-1)
        h = jax.nn.relu(conv2d(x[None], first, stride=2))
        for filters in params["others"]:
            h = jax.nn.relu(conv2d(h, jnp.concatenate([turned(filters, k) for k in range(4)], axis=-1)))
        h = jnp.max(h.mean((0, 1, 2)).reshape(4, 16), axis=0)
        return cross_entropy(h @ params["head"]["w"] + params["head"]["b"], label)

    return Family(loss, params, (images(8, 32), labels(10, 8)))


@model("Deep Interest Network", "jax", "zhougr1993/DeepInterestNetwork")
def interest() -> Family:
    """Attention of an advertisement to the items that a user has seen."""
    width, arrays = 32, Arrays()
    params = {
        "items": arrays(5_000, width, scale=0.1),
        "categories": arrays(200, width, scale=0.1),
        "attention": arrays.mlp([8 * width, 80, 40, 1]),
        "slopes": jnp.full(200, 0.25),
        "first": arrays.dense(6 * width, 200),
        "head": arrays.mlp([200, 80, 1]),
    }

    def loss(params, example):
        items, categories, item, category, clicked = example
        seen = jnp.concatenate([params["items"][items], params["categories"][categories]], axis=-1)
        target = jnp.concatenate([params["items"][item], params["categories"][category]])
        wide = jnp.broadcast_to(target, seen.shape)
        h = jnp.concatenate([seen, wide, seen - wide, seen * wide], axis=-1)
        for p in params["attention"][:-1]:
            h = jax.nn.sigmoid(h @ p["w"] + p["b"])
        weights = h @ params["attention"][-1]["w"] + params["attention"][-1]["b"]
        user = jnp.sum(weights * seen, axis=0)
        z = jnp.concatenate([user, target, user * target]) @ params["first"]["w"] + params["first"]["b"]
        z = jnp.where(z > 0, z, params["slopes"] * z)
        first, last = params["head"]
        z = jax.nn.relu(z @ first["w"] + first["b"]) @ last["w"] + last["b"]
        return binary_cross_entropy(z[0], clicked)

    history = words(5_000, 64, 20), labels(200, 64, 20)
    return Family(loss, params, (*history, labels(5_000, 64), labels(200, 64, seed=2), labels(2, 64, seed=3) * 1.0))
