"""Language models with mixtures of experts or with linear attention."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.cost.families import Family
from benchmarks.zoo.data import next_token
from benchmarks.zoo.entries import KEY, model, of_equinox, of_haiku, of_linen
from benchmarks.zoo.layers import Arrays, attention, causal_mask, cross_entropy, haiku_layer_norm, rms_norm

_VOCABULARY, _WIDTH, _LENGTH = 2048, 192, 64


class _SparseFeedForward(nn.Module):
    """Routes each token to its best expert, up to that expert's capacity, by products with one-hot arrays."""

    experts: int = 4
    hidden: int = 512

    @nn.compact
    def __call__(self, x):
        _b, t, c = x.shape
        capacity = 2 * t // self.experts
        router = nn.softmax(nn.Dense(self.experts, use_bias=False)(x))
        gate, expert = jnp.max(router, -1), jnp.argmax(router, -1)
        chosen = jax.nn.one_hot(expert, self.experts)
        place = jnp.cumsum(chosen, 1) * chosen - 1
        dispatch = chosen[..., None] * jax.nn.one_hot(place.astype(int), capacity)
        up = self.param("wi", nn.initializers.lecun_normal(batch_axis=0), (self.experts, c, self.hidden))
        down = self.param("wo", nn.initializers.lecun_normal(batch_axis=0), (self.experts, self.hidden, c))
        h = jnp.einsum("btec,btd->becd", dispatch, x)
        h = jnp.einsum("becf,efd->becd", nn.relu(jnp.einsum("becd,edf->becf", h, up)), down)
        balance = self.experts * jnp.sum(chosen.mean(1) * router.mean(1), -1)
        return jnp.einsum("becd,btec->btd", h, dispatch * gate[..., None, None]), balance


class _Switch(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(_VOCABULARY, _WIDTH)(tokens)
        balance = 0.0
        for _ in range(2):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(h, mask=nn.make_causal_mask(tokens))
            h, extra = _SparseFeedForward()(nn.LayerNorm()(x))
            x, balance = x + h, balance + extra
        return nn.Dense(_VOCABULARY)(nn.LayerNorm()(x)), balance


@model("Switch Transformer, one-hot dispatch", "linen", "google/flaxformer: mixture of experts")
def switch() -> Family:
    def loss(outputs, targets):
        logits, balance = outputs
        return cross_entropy(logits, targets) + 0.01 * jnp.mean(balance)

    return of_linen(_Switch(), loss, *next_token(_VOCABULARY, 4, _LENGTH))


def _ragged_dot(rows, weights, sizes):
    """``ragged_dot`` whose weights formally depend on the example: ``vmap`` has no rule for shared weights."""
    return jax.lax.ragged_dot(rows, weights + 0 * rows[0, 0], sizes)


@model("Mixtral, ragged_dot", "jax", "mistralai/mistral-inference")
def mixtral() -> Family:
    """Routes each token to two experts: tokens are sorted by expert and multiplied by ``ragged_dot``."""
    array, experts, hidden, heads = Arrays(), 4, 384, 4

    def block():
        return {
            "norms": jnp.ones((2, _WIDTH)),
            "qkv": array(_WIDTH, 3 * _WIDTH),
            "o": array(_WIDTH, _WIDTH),
            "gate": array(_WIDTH, experts),
            "w1": array(experts, _WIDTH, hidden),
            "w3": array(experts, _WIDTH, hidden),
            "w2": array(experts, hidden, _WIDTH),
        }

    params = {
        "table": array(_VOCABULARY, _WIDTH, scale=1.0),
        "blocks": [block() for _ in range(2)],
        "norm": jnp.ones(_WIDTH),
        "output": array(_WIDTH, _VOCABULARY),
    }

    def mixture(p, x):
        scores, chosen = jax.lax.top_k(x @ p["gate"], 2)
        weights = jax.nn.softmax(scores).reshape(-1)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=experts)
        rows = x[order // 2]
        h = jax.nn.silu(_ragged_dot(rows, p["w1"], sizes)) * _ragged_dot(rows, p["w3"], sizes)
        h = _ragged_dot(h, p["w2"], sizes) * weights[order][:, None]
        return jnp.zeros_like(x).at[order // 2].add(h)

    def loss(params, example):
        inputs, targets = example
        x = params["table"][inputs]
        for p in params["blocks"]:
            q, k, v = jnp.split((rms_norm(x, p["norms"][0]) @ p["qkv"]).reshape(_LENGTH, heads, -1), 3, -1)
            x = x + attention(q, k, v, causal_mask(_LENGTH)).reshape(_LENGTH, -1) @ p["o"]
            x = x + mixture(p, rms_norm(x, p["norms"][1]))
        return cross_entropy(rms_norm(x, params["norm"]) @ params["output"], targets)

    return Family(loss, params, next_token(_VOCABULARY, 4, _LENGTH))


@model("RWKV-4", "haiku", "BlinkDL/RWKV-LM")
def rwkv() -> Family:
    """A weighted sum over the past, by a scan in log space; each channel learns its rate of decay."""

    def vector(name, value):
        return hk.get_parameter(name, (_WIDTH,), init=hk.initializers.Constant(value))

    def shifted(x):
        return jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])

    def mixed(name, x):
        weight = vector(f"mix_{name}", 0.5)
        return x * weight + shifted(x) * (1 - weight)

    def linear(name, x, width=_WIDTH):
        return hk.Linear(width, with_bias=False, name=name)(x)

    def time_mixing(x):
        k, v, r = (linear(n, mixed(n, x)) for n in ("key", "value", "receptance"))
        decay, bonus = -jnp.exp(vector("decay", -1.0)), vector("bonus", 0.3)

        def step(state, inputs):
            (a, b, p), (k, v) = state, inputs
            top = jnp.maximum(p, bonus + k)
            e1, e2 = jnp.exp(p - top), jnp.exp(bonus + k - top)
            out = (e1 * a + e2 * v) / (e1 * b + e2)
            top = jnp.maximum(p + decay, k)
            e1, e2 = jnp.exp(p + decay - top), jnp.exp(k - top)
            return (e1 * a + e2 * v, e1 * b + e2, top), out

        start = (jnp.zeros(_WIDTH), jnp.zeros(_WIDTH), jnp.full(_WIDTH, -1e30))
        _, y = jax.lax.scan(step, start, (k, v))
        return linear("output", jax.nn.sigmoid(r) * y)

    def channel_mixing(x):
        h = jnp.square(jax.nn.relu(linear("key", mixed("key", x), 4 * _WIDTH)))
        return jax.nn.sigmoid(linear("receptance", mixed("receptance", x))) * linear("value", h)

    class _Time(hk.Module):
        def __call__(self, x):
            return time_mixing(x)

    class _Channel(hk.Module):
        def __call__(self, x):
            return channel_mixing(x)

    def loss(example):
        inputs, targets = example
        x = haiku_layer_norm(hk.Embed(_VOCABULARY, _WIDTH)(inputs))
        for _ in range(3):
            x = x + _Time()(haiku_layer_norm(x))
            x = x + _Channel()(haiku_layer_norm(x))
        return cross_entropy(linear("head", haiku_layer_norm(x), _VOCABULARY), targets)

    return of_haiku(loss, next_token(_VOCABULARY, 4, _LENGTH))


class _Retention(eqx.Module):
    """Linear attention whose weights decay with distance, at one rate per head."""

    qkvg: eqx.nn.Linear
    out: eqx.nn.Linear
    norm: eqx.nn.GroupNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norms: list[eqx.nn.LayerNorm]
    heads: int = eqx.field(static=True, default=4)

    def __init__(self, width, *, key):
        keys = jax.random.split(key, 4)
        self.qkvg = eqx.nn.Linear(width, 4 * width, use_bias=False, key=keys[0])
        self.out = eqx.nn.Linear(width, width, use_bias=False, key=keys[1])
        self.up = eqx.nn.Linear(width, 2 * width, key=keys[2])
        self.down = eqx.nn.Linear(2 * width, width, key=keys[3])
        self.norm = eqx.nn.GroupNorm(4, channelwise_affine=False)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]

    def __call__(self, x):
        length, width = x.shape
        q, k, v, gate = jnp.split(jax.vmap(self.qkvg)(jax.vmap(self.norms[0])(x)), 4, -1)
        q, k, v = (z.reshape(length, self.heads, -1) for z in (q, k, v))
        rates = np.log(1 - 2.0 ** (-5 - np.arange(self.heads)))
        distance = np.arange(length)[:, None] - np.arange(length)[None]
        decay = np.where(distance >= 0, np.exp(rates[:, None, None] * np.maximum(distance, 0)), 0.0)
        scores = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5 * decay.astype(np.float32)
        y = jnp.einsum("hqk,khd->qhd", scores, v).reshape(length, width)
        y = jax.vmap(self.norm)(y)
        x = x + jax.vmap(self.out)(jax.nn.silu(gate) * y)
        h = jax.vmap(self.up)(jax.vmap(self.norms[1])(x))
        return x + jax.vmap(self.down)(jax.nn.gelu(h))


@model("RetNet", "equinox", "microsoft/torchscale")
def retnet() -> Family:
    keys = jax.random.split(KEY, 5)
    net = (
        eqx.nn.Embedding(_VOCABULARY, _WIDTH, key=keys[0]),
        [_Retention(_WIDTH, key=k) for k in keys[1:4]],
        eqx.nn.LayerNorm(_WIDTH),
        eqx.nn.Linear(_WIDTH, _VOCABULARY, key=keys[4]),
    )

    def loss(net, example):
        table, layers, norm, head = net
        x = jax.vmap(table)(example[0])
        for layer in layers:
            x = layer(x)
        return cross_entropy(jax.vmap(head)(jax.vmap(norm)(x)), example[1])

    return of_equinox(net, loss, next_token(_VOCABULARY, 4, _LENGTH))


@model("Performer", "jax", "google-research/google-research: performer")
def performer() -> Family:
    """Causal linear attention with random features of the softmax kernel; layers are stacked and scanned."""
    array, heads, depth, features = Arrays(), 4, 3, 32
    size = _WIDTH // heads
    params = {
        "table": array(_VOCABULARY, _WIDTH, scale=0.05),
        "positions": array(_LENGTH, _WIDTH, scale=0.05),
        "norm": jnp.ones(_WIDTH),
        "layers": {
            "norms": jnp.ones((depth, 2, _WIDTH)),
            "qkv": array(depth, _WIDTH, 3 * _WIDTH),
            "o": array(depth, _WIDTH, _WIDTH),
            "up": array(depth, _WIDTH, 4 * _WIDTH),
            "down": array(depth, 4 * _WIDTH, _WIDTH),
        },
    }
    directions = array(features, size, scale=1.0)

    def kernel(x):
        x = x * size**-0.25
        logs = x @ directions.T - jnp.sum(x * x, -1, keepdims=True) / 2
        return jnp.exp(logs - jax.lax.stop_gradient(jnp.max(logs))) + 1e-4

    def layer(x, p):
        q, k, v = jnp.split((rms_norm(x, p["norms"][0]) @ p["qkv"]).reshape(_LENGTH, heads, -1), 3, -1)
        q, k = kernel(q), kernel(k)
        past = jnp.cumsum(jnp.einsum("thf,thd->thfd", k, v), 0)
        y = jnp.einsum("thf,thfd->thd", q, past)
        y = y / jnp.einsum("thf,thf->th", q, jnp.cumsum(k, 0))[..., None]
        x = x + y.reshape(_LENGTH, -1) @ p["o"]
        return x + jax.nn.gelu(rms_norm(x, p["norms"][1]) @ p["up"]) @ p["down"], None

    def loss(params, example):
        x = params["table"][example[0]] + params["positions"]
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return cross_entropy(rms_norm(x, params["norm"]) @ params["table"].T, example[1])

    return Family(loss, params, next_token(_VOCABULARY, 4, _LENGTH))
