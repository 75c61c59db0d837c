"""Text encoders, encoder-decoders and text classifiers."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from benchmarks.cost.families import Family
from benchmarks.zoo.data import labels, words
from benchmarks.zoo.entries import model, of_haiku, of_linen, of_nnx
from benchmarks.zoo.layers import Arrays, causal_mask, cross_entropy, rms_norm

_init = nn.initializers.normal(0.02)


class _BertLayer(nn.Module):
    """Post-norm, with separate query, key and value."""

    heads: int = 4

    @nn.compact
    def __call__(self, x):
        b, t, c = x.shape
        q, k, v = (
            nn.Dense(c, kernel_init=_init, name=name)(x).reshape(b, t, self.heads, -1)
            for name in ("query", "key", "value")
        )
        weights = nn.dot_product_attention_weights(q, k)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, c)
        x = nn.LayerNorm(epsilon=1e-12)(x + nn.Dense(c, kernel_init=_init)(y))
        h = nn.gelu(nn.Dense(4 * c, kernel_init=_init)(x), approximate=False)
        return nn.LayerNorm(epsilon=1e-12)(x + nn.Dense(c, kernel_init=_init)(h))


class _Bert(nn.Module):
    """Masked language model; the output embeddings are tied to the input embeddings, plus a bias."""

    vocabulary: int = 4096
    width: int = 256
    depth: int = 3

    @nn.compact
    def __call__(self, tokens, segments, masked):
        table = nn.Embed(self.vocabulary, self.width, embedding_init=_init, name="word_embeddings")
        positions = nn.Embed(512, self.width, embedding_init=_init)(jnp.arange(tokens.shape[1])[None])
        x = table(tokens) + positions + nn.Embed(2, self.width, embedding_init=_init)(segments)
        x = nn.LayerNorm(epsilon=1e-12)(x)
        for _ in range(self.depth):
            x = _BertLayer()(x)
        x = jnp.take_along_axis(x, masked[..., None], axis=1)
        x = nn.LayerNorm(epsilon=1e-12)(nn.gelu(nn.Dense(self.width)(x)))
        return table.attend(x) + self.param("bias", nn.initializers.zeros, (self.vocabulary,))


@model("BERT, masked words", "linen", "huggingface/transformers: FlaxBertForMaskedLM")
def bert() -> Family:
    tokens = words(4096, 4, 64)
    segments = jnp.asarray(np.arange(64) >= 32, jnp.int32)[None].repeat(4, 0)
    masked = jnp.asarray(np.sort(np.random.default_rng(3).permuted(np.tile(np.arange(64), (4, 1)), axis=1)[:, :10]))
    return of_linen(_Bert(), cross_entropy, (tokens, segments, masked), jnp.take_along_axis(tokens, masked, 1))


class _Albert(nnx.Module):
    """All layers share their weights, and the embedding is factorised."""

    def __init__(self, vocabulary: int, narrow: int, width: int, depth: int, *, rngs: nnx.Rngs):
        self.depth = depth
        self.table = nnx.Embed(vocabulary, narrow, rngs=rngs)
        self.positions = nnx.Embed(128, narrow, rngs=rngs)
        self.norm = nnx.LayerNorm(narrow, rngs=rngs)
        self.widen = nnx.Linear(narrow, width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.classifier = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, tokens):
        x = self.norm(self.table(tokens) + self.positions(jnp.arange(tokens.shape[1])[None]))
        x = self.widen(x)
        for _ in range(self.depth):
            x = self.norm1(x + self.attention(x))
            x = self.norm2(x + self.down(nnx.gelu(self.up(x))))
        return self.classifier(x[:, 0])


@model("ALBERT", "nnx", "google-research/albert")
def albert() -> Family:
    net = _Albert(8192, 64, 256, 4, rngs=nnx.Rngs(0))
    return of_nnx(net, cross_entropy, words(8192, 8, 64), labels(2, 8))


def _relative_buckets(queries: int, keys: int, both_sides: bool, buckets: int = 32, farthest: int = 128) -> np.ndarray:
    """The bucket of each query and key: one per distance if near, logarithmic if far."""
    distance = np.arange(keys)[None] - np.arange(queries)[:, None]
    result = np.zeros_like(distance)
    if both_sides:
        buckets //= 2
        result += (distance > 0) * buckets
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    logs = np.log(np.maximum(distance, 1) / exact) / np.log(farthest / exact)
    far = np.minimum(exact + (logs * (buckets - exact)).astype(int), buckets - 1)
    return result + np.where(distance < exact, distance, far)


class _T5Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return rms_norm(x, self.param("scale", nn.initializers.ones, (x.shape[-1],)))


class _T5Attention(nn.Module):
    """No biases and no scaling of scores; all layers share a bias by relative position."""

    heads: int

    @nn.compact
    def __call__(self, x, context, bias):
        size = x.shape[-1] // self.heads
        q, k, v = (
            nn.DenseGeneral((self.heads, size), use_bias=False, kernel_init=nn.initializers.normal(s), name=name)(y)
            for name, y, s in (
                ("q", x, (x.shape[-1] * size) ** -0.5),
                ("k", context, x.shape[-1] ** -0.5),
                ("v", context, x.shape[-1] ** -0.5),
            )
        )
        weights = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, name="o")(y)


class _T5(nn.Module):
    vocabulary: int = 2048
    width: int = 256
    heads: int = 4
    depth: int = 2

    def _feed_forward(self, x):
        gate = nn.Dense(640, use_bias=False)(x)
        return nn.Dense(self.width, use_bias=False)(nn.gelu(gate) * nn.Dense(640, use_bias=False)(x))

    def _bias(self, name, length, both_sides):
        table = nn.Embed(32, self.heads, embedding_init=_init, name=name)
        return jnp.moveaxis(table(_relative_buckets(length, length, both_sides)), -1, 0)[None]

    @nn.compact
    def __call__(self, source, target):
        table = nn.Embed(self.vocabulary, self.width, embedding_init=nn.initializers.normal(1.0), name="shared")
        x, bias = table(source), self._bias("encoder_bias", source.shape[1], True)
        for _ in range(self.depth):
            h = _T5Norm()(x)
            x = x + _T5Attention(self.heads)(h, h, bias)
            x = x + self._feed_forward(_T5Norm()(x))
        memory = _T5Norm()(x)
        y, bias = table(target), self._bias("decoder_bias", target.shape[1], False)
        bias = bias + jnp.where(causal_mask(target.shape[1]), 0.0, -1e9)
        for _ in range(self.depth):
            h = _T5Norm()(y)
            y = y + _T5Attention(self.heads)(h, h, bias)
            y = y + _T5Attention(self.heads)(_T5Norm()(y), memory, 0.0)
            y = y + self._feed_forward(_T5Norm()(y))
        return nn.Dense(self.vocabulary, use_bias=False)(_T5Norm()(y))


@model("T5", "linen", "google-research/t5x")
def t5() -> Family:
    target = words(2048, 4, 33)
    return of_linen(_T5(), cross_entropy, (words(2048, 4, 64), target[:, :-1]), target[:, 1:])


class _WMT(nn.Module):
    """The translation model of "Attention is all you need", but pre-norm; all three embeddings are tied."""

    vocabulary: int = 2048
    width: int = 256
    depth: int = 2

    def _sines(self, length):
        angles = np.arange(length)[:, None] / 10_000 ** (np.arange(0, self.width, 2) / self.width)
        return np.concatenate([np.sin(angles), np.cos(angles)], -1)[None].astype(np.float32)

    def _feed_forward(self, x):
        return x + nn.Dense(self.width)(nn.relu(nn.Dense(1024)(nn.LayerNorm()(x))))

    @nn.compact
    def __call__(self, source, target):
        table = nn.Embed(self.vocabulary, self.width, embedding_init=_init)
        is_word = source > 0
        x = table(source) * self.width**0.5 + self._sines(source.shape[1])
        for _ in range(self.depth):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4, use_bias=False)(h, mask=nn.make_attention_mask(is_word, is_word))
            x = self._feed_forward(x)
        memory, here = nn.LayerNorm()(x), jnp.ones(target.shape)
        y = table(target) * self.width**0.5 + self._sines(target.shape[1])
        for _ in range(self.depth):
            h = nn.LayerNorm()(y)
            y = y + nn.MultiHeadDotProductAttention(4, use_bias=False)(h, mask=nn.make_causal_mask(target))
            h, mask = nn.LayerNorm()(y), nn.make_attention_mask(here, is_word)
            y = y + nn.MultiHeadDotProductAttention(4, use_bias=False)(h, memory, mask=mask)
            y = self._feed_forward(y)
        return table.attend(nn.LayerNorm()(y)) / self.width**0.5


@model("Transformer for translation", "linen", "google/flax: examples/wmt")
def wmt() -> Family:
    source, target = words(2048, 4, 48), words(2048, 4, 49)
    source = source.at[:, 40:].set(0)  # padding

    def loss(logits, targets):
        smoothed = 0.9 * jax.nn.one_hot(targets, 2048) + 0.1 / 2048
        return -jnp.mean(jnp.sum(smoothed * jax.nn.log_softmax(logits), -1))

    return of_linen(_WMT(), loss, (source, target[:, :-1]), target[:, 1:])


@model("TextCNN", "haiku", "yoonkim/CNN_sentence")
def text_cnn() -> Family:
    def loss(example):
        tokens, label = example
        x = hk.Embed(20_000, 128)(tokens)
        features = [jnp.max(jax.nn.relu(hk.Conv1D(128, n, padding="VALID")(x)), axis=0) for n in (3, 4, 5)]
        return cross_entropy(hk.Linear(2)(jnp.concatenate(features)), label)

    return of_haiku(loss, (words(20_000, 32, 64), labels(2, 32)))


@model("fastText", "jax", "facebookresearch/fastText")
def fast_text() -> Family:
    """A linear layer on the mean embedding of words and hashed word pairs."""
    array, vocabulary, buckets = Arrays(), 20_000, 50_000
    params = {"input": array(vocabulary + buckets, 64, scale=1 / 64), "output": array(64, 50, scale=0.01)}

    def loss(params, example):
        tokens, label = example
        pairs = vocabulary + (tokens[:-1] * 116_049_371 + tokens[1:]) % buckets
        features = jnp.concatenate([tokens, pairs])
        is_word = (features >= vocabulary) | (features > 0)  # token 0 is padding
        rows = jnp.take(params["input"], features, axis=0) * is_word[:, None]
        return cross_entropy((rows.sum(0) / jnp.maximum(is_word.sum(), 1)) @ params["output"], label)

    return Family(loss, params, (words(vocabulary, 64, 128), labels(50, 64)))
