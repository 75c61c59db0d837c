"""Text models that mix tokens by Fourier transforms, states in chunks, the delta rule, or windows of attention."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cost.families import Family
from benchmarks.zoo.data import labels, next_token, words
from benchmarks.zoo.entries import model
from benchmarks.zoo.layers import Arrays, attention, causal_mask, cross_entropy, layer_norm, mlp, rms_norm


@model("FNet", "jax", "google-research/google-research: f_net")
def fnet() -> Family:
    """Tokens are mixed by the real part of a Fourier transform, without parameters."""
    arrays, width, length = Arrays(), 128, 64

    def norm():
        return {"scale": jnp.ones(width), "offset": jnp.zeros(width)}

    params = {
        "words": arrays(3000, width, scale=0.05),
        "positions": arrays(length, width, scale=0.02),
        "blocks": [
            {"mixed": norm(), "out": norm(), "feed_forward": arrays.mlp([width, 2 * width, width])} for _ in range(3)
        ],
        "head": arrays.dense(width, 4),
    }

    def normed(p, x):
        return layer_norm(x) * p["scale"] + p["offset"]

    def loss(params, example):
        tokens, label = example
        x = params["words"][tokens] + params["positions"]
        for p in params["blocks"]:
            x = normed(p["mixed"], x + jnp.fft.fft2(x).real)
            x = normed(p["out"], x + mlp(p["feed_forward"], x, jax.nn.gelu))
        return cross_entropy(x[0] @ params["head"]["w"] + params["head"]["b"], label)

    return Family(loss, params, (words(3000, 16, length), labels(4, 16)))


@model("Gated DeltaNet", "jax", "NVlabs/GatedDeltaNet")
def gated_delta_net() -> Family:
    """A scan over matrices: a token's value replaces what they hold at its key, and all of it decays."""
    arrays, vocabulary, width, heads = Arrays(), 500, 64, 4
    size = width // heads
    params = {
        "words": arrays(vocabulary, width, scale=0.1),
        "qkv": arrays(width, 3 * width),
        "rates": arrays(width, 2 * heads),
        "decay": {"log": jnp.zeros(heads), "b": jnp.full(heads, -3.0)},
        "gate": arrays(width, width),
        "norm": jnp.ones(size),
        "o": arrays(width, width),
        "head": arrays(width, vocabulary),
    }

    def unit(x):
        return x * lax.rsqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-6)

    def step(state, inputs):
        query, key, value, replaced, kept = inputs
        state = state * kept[:, None, None]
        change = replaced[:, None] * (value - jnp.einsum("hkv,hk->hv", state, key))
        state = state + jnp.einsum("hk,hv->hkv", key, change)
        return state, jnp.einsum("hkv,hk->hv", state, query)

    def loss(params, example):
        tokens, targets = example
        x = params["words"][tokens]
        h = layer_norm(x)
        q, k, v = jnp.split((h @ params["qkv"]).reshape(len(x), heads, -1), 3, -1)
        replaced, kept = jnp.split(h @ params["rates"], 2, -1)
        kept = jnp.exp(-jnp.exp(params["decay"]["log"]) * jax.nn.softplus(kept + params["decay"]["b"]))
        inputs = unit(q), unit(k), v, jax.nn.sigmoid(replaced), kept
        _, y = lax.scan(step, jnp.zeros((heads, size, size)), inputs)
        y = rms_norm(y, params["norm"]).reshape(x.shape) * jax.nn.silu(h @ params["gate"])
        return cross_entropy((x + y @ params["o"]) @ params["head"], targets)

    return Family(loss, params, next_token(vocabulary, 8, 64))


@model("Mamba-2, in chunks", "jax", "state-spaces/mamba: Mamba-2")
def mamba2() -> Family:
    """Within chunks, products of all pairs of tokens; across chunks, a scan over their states."""
    arrays, vocabulary, width, inner, heads, states = Arrays(), 500, 64, 128, 4, 16
    length, size = 64, 16
    chunks = length // size
    params = {
        "words": arrays(vocabulary, width, scale=0.1),
        "inputs": arrays(width, 2 * inner + 2 * states + heads),
        "conv": arrays(4, 1, inner + 2 * states, scale=0.5),
        "log_rate": jnp.zeros(heads),
        "step": jnp.full(heads, -2.0),
        "skip": jnp.ones(heads),
        "norm": jnp.ones(inner),
        "o": arrays(inner, width),
        "head": arrays(width, vocabulary),
    }

    def causal_conv(x, filters):
        return lax.conv_general_dilated(
            x[None], filters, (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=x.shape[-1]
        )[0]

    def scanned(x, log_decay, write, read):
        """Of arrays ``[chunks, size, ...]``: what each token reads of all before it."""
        logs = jnp.cumsum(log_decay, 1)
        between = jnp.where(causal_mask(size)[..., None], logs[:, :, None] - logs[:, None], -jnp.inf)
        within = jnp.einsum("cqn,ckn,cqkh,ckhp->cqhp", read, write, jnp.exp(between), x)
        added = jnp.einsum("ckn,ckh,ckhp->chpn", write, jnp.exp(logs[:, -1:] - logs), x)

        def carry(state, inputs):
            added, decay = inputs
            return state * decay[:, None, None] + added, state

        start = jnp.zeros((heads, inner // heads, states))
        _, before = lax.scan(carry, start, (added, jnp.exp(logs[:, -1])))
        return within + jnp.einsum("cqn,chpn,cqh->cqhp", read, before, jnp.exp(logs))

    def loss(params, example):
        tokens, targets = example
        residual = params["words"][tokens]
        h = layer_norm(residual) @ params["inputs"]
        gate, h, step = jnp.split(h, [inner, 2 * inner + 2 * states], -1)
        h = jax.nn.silu(causal_conv(h, params["conv"]))
        x, write, read = (a.reshape(chunks, size, -1) for a in jnp.split(h, [inner, inner + states], -1))
        x = x.reshape(chunks, size, heads, -1)
        step = jax.nn.softplus(step + params["step"]).reshape(chunks, size, heads)
        y = scanned(x * step[..., None], -jnp.exp(params["log_rate"]) * step, write, read)
        y = (y + x * params["skip"][:, None]).reshape(length, inner)
        y = rms_norm(y * jax.nn.silu(gate), params["norm"])
        return cross_entropy((residual + y @ params["o"]) @ params["head"], targets)

    return Family(loss, params, next_token(vocabulary, 8, length))


@model("Gemma 3, windows by gathers", "jax", "google-deepmind/gemma: Gemma 3")
def gemma() -> Family:
    """One layer gathers the last 16 keys of each query, one sees all; a large tied table, and shared keys."""
    arrays, vocabulary, width, heads, groups, size = Arrays(), 8000, 64, 4, 2, 16
    length, window = 64, 16
    params = {
        "words": arrays(vocabulary, width, scale=width**-0.5),
        "layers": [
            {
                "norms": jnp.ones((4, width)),
                "q": arrays(width, heads * size),
                "kv": arrays(width, 2 * groups * size),
                "qk_norms": jnp.ones((2, size)),
                "o": arrays(heads * size, width),
                "gate": arrays(width, 2 * width),
                "up": arrays(width, 2 * width),
                "down": arrays(2 * width, width),
            }
            for _ in range(2)
        ],
        "norm": jnp.ones(width),
    }
    angles = np.arange(length)[:, None, None] * 10_000.0 ** (-np.arange(size // 2) / (size // 2))
    cosine, sine = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    places = np.arange(length)[:, None] - np.arange(window)

    def turned(x):
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)

    def local(q, k, v):
        """Queries ``[T, heads, d]`` attend to the last keys, of which those before the text do not exist."""
        q = q.reshape(length, groups, -1, size)
        scores = jnp.einsum("tgrd,twgd->tgrw", q, k[places]) * size**-0.5
        scores = jnp.where(places[:, None, None] >= 0, scores, -jnp.inf)
        return jnp.einsum("tgrw,twgd->tgrd", jax.nn.softmax(scores), v[places])

    def whole(q, k, v):
        k, v = (jnp.repeat(a, heads // groups, axis=1) for a in (k, v))
        return attention(q, k, v, causal_mask(length))

    def loss(params, example):
        tokens, targets = example
        x = params["words"][tokens] * width**0.5
        for p, attend in zip(params["layers"], (local, whole), strict=True):
            h = rms_norm(x, p["norms"][0])
            k, v = jnp.split((h @ p["kv"]).reshape(length, groups, -1), 2, -1)
            q = turned(rms_norm((h @ p["q"]).reshape(length, heads, -1), p["qk_norms"][0]))
            k = turned(rms_norm(k, p["qk_norms"][1]))
            x = x + rms_norm(attend(q, k, v).reshape(length, -1) @ p["o"], p["norms"][1])
            h = rms_norm(x, p["norms"][2])
            h = (jax.nn.gelu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
            x = x + rms_norm(h, p["norms"][3])
        return cross_entropy(rms_norm(x, params["norm"]) @ params["words"].T, targets)

    return Family(loss, params, next_token(vocabulary, 8, length))
