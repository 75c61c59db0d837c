"""Models of audio: waveforms, spectrograms and speech."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from benchmarks.cost.families import Family
from benchmarks.zoo.data import labels, normal
from benchmarks.zoo.entries import model, of_haiku, of_linen, of_nnx
from benchmarks.zoo.layers import binary_cross_entropy, cross_entropy, squared_error


class _Wav2Vec(nn.Module):
    """Strided convolutions, then a transformer with convolutional positions, trained by a contrastive loss."""

    width: int = 192

    @nn.compact
    def __call__(self, wave, masked, others):
        x = wave[..., None]
        for i, (size, stride) in enumerate(((10, 5), (3, 2), (3, 2), (2, 2))):
            x = nn.Conv(128, (size,), strides=(stride,), padding="VALID", use_bias=False)(x)
            x = nn.gelu(nn.GroupNorm(128)(x) if i == 0 else x)
        features = nn.LayerNorm()(x)
        x = nn.Dense(self.width)(features)
        mask = self.param("mask", nn.initializers.uniform(), (self.width,))
        x = jnp.where(masked[..., None], mask, x)
        x = nn.LayerNorm()(x + nn.gelu(nn.Conv(self.width, (16,), feature_group_count=8)(x)))
        for _ in range(2):
            x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(4)(x))
            x = nn.LayerNorm()(x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(x))))
        found, targets = nn.Dense(64)(x), nn.Dense(64)(features)
        candidates = jnp.concatenate([targets[:, :, None], jax.vmap(lambda t, o: t[o])(targets, others)], 2)
        found, candidates = (z / (jnp.linalg.norm(z, axis=-1, keepdims=True) + 1e-6) for z in (found, candidates))
        return jnp.einsum("btd,btnd->btn", found, candidates) / 0.1


@model("wav2vec 2.0", "linen", "facebookresearch/fairseq: wav2vec2")
def wav2vec() -> Family:
    rng, length = np.random.default_rng(0), 49
    masked = jnp.asarray(rng.random((4, length)) < 0.5)
    others = jnp.asarray(rng.integers(0, length, (4, length, 10)), jnp.int32)

    def loss(logits, masked):
        losses = -jax.nn.log_softmax(logits)[..., 0]
        return jnp.sum(losses * masked) / jnp.maximum(jnp.sum(masked), 1)

    return of_linen(_Wav2Vec(), loss, (normal(4, 2005), masked, others), masked)


class _Conformer(nnx.Module):
    """Attention and a gated convolution, between two feed-forward layers of half weight."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        def feed_forward():
            return nnx.Sequential(
                nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 4 * width, rngs=rngs), nnx.silu,
                nnx.Linear(4 * width, width, rngs=rngs),
            )  # fmt: skip

        self.first, self.second = feed_forward(), feed_forward()
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(3)])
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.widen = nnx.Conv(width, 2 * width, (1,), rngs=rngs)
        self.depthwise = nnx.Conv(width, width, (15,), feature_group_count=width, rngs=rngs)
        self.group_norm = nnx.GroupNorm(width, num_groups=8, rngs=rngs)
        self.narrow = nnx.Conv(width, width, (1,), rngs=rngs)

    def __call__(self, x):
        x = x + 0.5 * self.first(x)
        x = x + self.attention(self.norms[0](x))
        h = self.depthwise(nnx.glu(self.widen(self.norms[1](x))))
        x = x + self.narrow(nnx.silu(self.group_norm(h)))
        return self.norms[2](x + 0.5 * self.second(x))


class _SpeechToText(nnx.Module):
    def __init__(self, width: int, letters: int, *, rngs: nnx.Rngs):
        self.subsample = nnx.List([
            nnx.Conv(1, 32, (3, 3), strides=2, rngs=rngs),
            nnx.Conv(32, 32, (3, 3), strides=2, rngs=rngs),
        ])  # fmt: skip
        self.project = nnx.Linear(20 * 32, width, rngs=rngs)
        self.blocks = nnx.List([_Conformer(width, 4, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(width, letters, rngs=rngs)

    def __call__(self, spectrum):
        x = spectrum[..., None]
        for conv in self.subsample:
            x = nnx.relu(conv(x))
        x = self.project(x.reshape(*x.shape[:2], -1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@model("Conformer, CTC", "nnx", "sooftware/conformer")
def conformer() -> Family:
    def loss(logits, letters):
        no_padding = jnp.zeros(logits.shape[:2]), jnp.zeros(letters.shape)
        return jnp.mean(optax.ctc_loss(logits, no_padding[0], letters, no_padding[1]))

    letters = 1 + labels(28, 4, 12)
    return of_nnx(_SpeechToText(144, 29, rngs=nnx.Rngs(0)), loss, normal(4, 128, 80), letters)


@model("Audio spectrogram CNN", "haiku", "qiuqiangkong/audioset_tagging_cnn")
def spectrogram() -> Family:
    """Multi-label tagging; the loss computes the spectrogram of the waveform."""
    size, hop = 256, 128
    window = jnp.asarray(np.hanning(size), jnp.float32)
    bands = jnp.asarray(np.abs(np.random.default_rng(3).normal(size=(size // 2 + 1, 64))) / size, jnp.float32)

    def loss(example):
        wave, tags = example
        frames = jnp.stack([wave[i : i + size] for i in range(0, len(wave) - size + 1, hop)])
        power = jnp.abs(jnp.fft.rfft(frames * window)) ** 2
        x = jnp.log(power @ bands + 1e-6)[..., None]
        for features in (32, 64, 128):
            for _ in range(2):
                x = jax.nn.relu(hk.GroupNorm(8)(hk.Conv2D(features, 3, with_bias=False)(x[None]))[0])
            x = hk.avg_pool(x, (2, 2, 1), (2, 2, 1), "VALID")
        x = jnp.mean(x, 1)
        x = jax.nn.relu(hk.Linear(256)(jnp.max(x, 0) + jnp.mean(x, 0)))
        return binary_cross_entropy(hk.Linear(50)(x), tags)

    return of_haiku(loss, (normal(8, 8192), (labels(10, 8, 50) == 0).astype(jnp.float32)))


class _Demucs(nn.Module):
    """A U-Net over the waveform, with an LSTM in the middle."""

    @nn.compact
    def __call__(self, wave):
        x, kept = wave[..., None], []
        for features in (32, 64, 128):
            x = nn.relu(nn.Conv(features, (8,), strides=(4,))(x))
            x = nn.glu(nn.Conv(2 * features, (1,))(x))
            kept.append(x)
        x = nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(128)), nn.RNN(nn.OptimizedLSTMCell(128)))(x)
        x = nn.Dense(128)(x)
        for i, features in enumerate((64, 32, 2)):
            x = x + kept.pop()
            x = nn.glu(nn.Conv(2 * x.shape[-1], (3,))(x))
            x = nn.ConvTranspose(features, (8,), strides=(4,))(x)
            x = nn.relu(x) if i < 2 else x
        return x


@model("Demucs", "linen", "facebookresearch/demucs")
def demucs() -> Family:
    """Separates a mixture into two sources."""
    sources = normal(4, 2048, 2)
    return of_linen(_Demucs(), squared_error, sources.sum(-1), sources)


@model("Keyword spotting, depthwise", "haiku", "ARM-software/ML-KWS-for-MCU")
def keywords() -> Family:
    def loss(example):
        x, word = example[0][None, ..., None], example[1]
        x = jax.nn.relu(hk.GroupNorm(8)(hk.Conv2D(96, (10, 4), (2, 2))(x)))
        for _ in range(4):
            x = jax.nn.relu(hk.GroupNorm(8)(hk.DepthwiseConv2D(1, 3)(x)))
            x = jax.nn.relu(hk.GroupNorm(8)(hk.Conv2D(96, 1)(x)))
        return cross_entropy(hk.Linear(12)(jnp.mean(x, (0, 1, 2))), word)

    return of_haiku(loss, (normal(16, 49, 10), labels(12, 16)))
