"""Recurrent networks."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.cost.families import Family
from benchmarks.zoo.data import labels, next_token, normal, words
from benchmarks.zoo.entries import KEY, model, of_equinox, of_haiku, of_linen
from benchmarks.zoo.layers import Arrays, cross_entropy, squared_error


class _LanguageLSTM(nn.Module):
    vocabulary: int = 4096
    width: int = 256

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.LSTMCell(self.width))(x)
        return nn.Dense(self.vocabulary)(x)


@model("LSTM language model", "linen", "pytorch/examples: word_language_model")
def lstm() -> Family:
    return of_linen(_LanguageLSTM(), cross_entropy, *next_token(4096, 8, 35))


@model("LSTM tagger, both ways", "linen", "guillaumegenthial/sequence_tagging")
def tagger() -> Family:
    """Classifies every word with a bidirectional LSTM."""

    class Tagger(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(10_000, 128)(tokens)
            forward, backward = (nn.RNN(nn.OptimizedLSTMCell(128), name=n) for n in ("forward", "backward"))
            x = nn.Bidirectional(forward, backward)(x)
            return nn.Dense(17)(nn.tanh(nn.Dense(128)(x)))

    return of_linen(Tagger(), cross_entropy, words(10_000, 16, 40), labels(17, 16, 40))


@model("GRU sequence classifier", "haiku", "google-deepmind/dm-haiku: examples/rnn")
def gru() -> Family:
    def loss(example):
        tokens, label = example
        x, core = hk.Embed(8192, 128)(tokens), hk.GRU(256)
        outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(None))
        return cross_entropy(hk.Linear(10)(outputs[-1]), label)

    return of_haiku(loss, (words(8192, 16, 64), labels(10, 16)))


class _GRU(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, inputs, width, *, key):
        keys = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(inputs, width, key=keys[0])
        self.head = eqx.nn.Linear(width, 1, key=keys[1])

    def __call__(self, series):
        def step(state, x):
            return self.cell(x, state), None

        state, _ = jax.lax.scan(step, jnp.zeros(self.cell.hidden_size), series)
        return self.head(state)[0]


@model("GRU of a time series", "equinox", "patrick-kidger/equinox: examples/train_rnn")
def gru_series() -> Family:
    batch = (normal(32, 128, 8), labels(2, 32).astype(jnp.float32))

    def loss(net, example):
        return jnp.logaddexp(0.0, (1 - 2 * example[1]) * net(example[0]))

    return of_equinox(_GRU(8, 128, key=KEY), loss, batch)


@model("ConvLSTM", "haiku", "ndrplz/ConvLSTM_pytorch")
def conv_lstm() -> Family:
    """Predicts the next frame of a video."""

    def loss(frames):
        core = hk.Conv2DLSTM((16, 16), 32, 3)
        outputs, _ = hk.dynamic_unroll(core, frames[:-1, None], core.initial_state(1))
        predicted = hk.Conv2D(1, 1)(outputs[:, 0])
        return squared_error(predicted, frames[1:])

    return of_haiku(loss, normal(4, 7, 16, 16, 1))


@model("Sequence to sequence with attention", "jax", "pytorch/tutorials: seq2seq_translation")
def sequence_to_sequence() -> Family:
    """A GRU encoder, and a GRU decoder with additive attention to every source word."""
    array, width, vocabulary = Arrays(), 128, 2048

    def cell(inputs):
        return {"x": array(inputs, 3 * width), "h": array(width, 3 * width), "b": jnp.zeros(3 * width)}

    params = {
        "source": array(vocabulary, width, scale=1.0),
        "target": array(vocabulary, width, scale=1.0),
        "encoder": cell(width),
        "decoder": cell(2 * width),
        "attention": {"q": array(width, width), "k": array(width, width), "v": array(width)},
        "output": array(width, vocabulary),
    }

    def gru(p, h, x):
        gates, state = x @ p["x"] + p["b"], h @ p["h"]
        r = jax.nn.sigmoid(gates[:width] + state[:width])
        z = jax.nn.sigmoid(gates[width : 2 * width] + state[width : 2 * width])
        n = jnp.tanh(gates[2 * width :] + r * state[2 * width :])
        return (1 - z) * n + z * h

    def loss(params, example):
        source, target = example

        def read(h, x):
            h = gru(params["encoder"], h, x)
            return h, h

        h, memory = jax.lax.scan(read, jnp.zeros(width), params["source"][source])
        p = params["attention"]
        keys = memory @ p["k"]

        def write(h, x):
            weights = jax.nn.softmax(jnp.tanh(h @ p["q"] + keys) @ p["v"])
            h = gru(params["decoder"], h, jnp.concatenate([x, weights @ memory]))
            return h, h

        _, states = jax.lax.scan(write, h, params["target"][target[:-1]])
        return cross_entropy(states @ params["output"], target[1:])

    return Family(loss, params, (words(vocabulary, 8, 24), words(vocabulary, 8, 25)))
