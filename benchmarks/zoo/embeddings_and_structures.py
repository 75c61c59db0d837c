"""Embeddings of words, entities and features, and models whose output or input is structured: tags, tours, tables."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.cost.families import Family
from benchmarks.zoo.data import labels, normal, uniform, words
from benchmarks.zoo.entries import model
from benchmarks.zoo.layers import Arrays, binary_cross_entropy, cross_entropy, mlp


@model("word2vec", "jax", "tmikolov/word2vec")
def word2vec() -> Family:
    """A word should predict one near it, but none of eight random ones."""
    arrays, vocabulary = Arrays(), 20_000
    params = {"input": arrays(vocabulary, 64, scale=0.1), "output": arrays(vocabulary, 64, scale=0.1)}

    def loss(params, example):
        word, near, random = example
        vector = params["input"][word]
        found = jax.nn.log_sigmoid(vector @ params["output"][near])
        return -found - jnp.sum(jax.nn.log_sigmoid(-params["output"][random] @ vector))

    text = words(vocabulary, 64, 10)
    return Family(loss, params, (text[:, 0], text[:, 1], text[:, 2:]))


@model("GloVe", "jax", "stanfordnlp/GloVe")
def glove() -> Family:
    """An example is a pair of words and how often they occur together."""
    arrays, vocabulary = Arrays(), 20_000
    params = [{"vectors": arrays(vocabulary, 50, scale=0.1), "biases": jnp.zeros(vocabulary)} for _ in range(2)]

    def loss(params, example):
        pair, count = example
        (vector, bias), (vector2, bias2) = (
            (p["vectors"][word], p["biases"][word]) for p, word in zip(params, pair, strict=True)
        )
        error = vector @ vector2 + bias + bias2 - jnp.log(count)
        return jnp.minimum(1.0, (count / 100) ** 0.75) * error**2

    return Family(loss, params, (words(vocabulary, 256, 2), 1 + 199 * uniform(256)))


@model("RotatE", "jax", "DeepGraphLearning/KnowledgeGraphEmbedding")
def rotate() -> Family:
    """A relation turns complex numbers; the false tails that seem truest weigh most."""
    arrays, width, margin = Arrays(), 50, 9.0
    params = {"entities": arrays(14_000, 2 * width, scale=0.5), "phases": arrays(200, width, scale=1.0)}

    def loss(params, example):
        head, relation, tail, false_tails = example
        real, imaginary = jnp.split(params["entities"][head], 2)
        cosine, sine = jnp.cos(params["phases"][relation]), jnp.sin(params["phases"][relation])
        real, imaginary = real * cosine - imaginary * sine, real * sine + imaginary * cosine

        def score(tails):
            tail_real, tail_imaginary = jnp.split(params["entities"][tails], 2, -1)
            distance = jnp.sqrt((real - tail_real) ** 2 + (imaginary - tail_imaginary) ** 2 + 1e-9)
            return margin - jnp.sum(distance, -1)

        false = score(false_tails)
        weights = lax.stop_gradient(jax.nn.softmax(false))
        return -jax.nn.log_sigmoid(score(tail)) - jnp.sum(weights * jax.nn.log_sigmoid(-false))

    tails = labels(14_000, 64, seed=3), labels(14_000, 64, 16, seed=4)
    return Family(loss, params, (labels(14_000, 64), labels(200, 64, seed=2), *tails))


@model("xDeepFM", "jax", "Leavingseason/xDeepFM")
def xdeepfm() -> Family:
    """Multiplies all pairs of features, coordinate by coordinate, and compresses the products, twice."""
    arrays, fields, width, maps = Arrays(), 12, 16, 32
    params = {
        "table": arrays(fields * 500, width, scale=0.1),
        "weights": jnp.zeros(fields * 500),
        "compress": [arrays(known, fields, maps, scale=(known * fields) ** -0.5) for known in (fields, maps)],
        "maps": arrays(2 * maps),
        "deep": arrays.mlp([fields * width, 128, 128, 1]),
    }
    offsets = jnp.arange(fields) * 500

    def loss(params, example):
        features, clicked = example
        features = features + offsets
        vectors = params["table"][features]
        x, sums = vectors, []
        for compress in params["compress"]:
            x = jax.nn.relu(jnp.einsum("id,jd,ijo->od", x, vectors, compress))
            sums.append(jnp.sum(x, 1))
        deep = mlp(params["deep"], vectors.reshape(-1), jax.nn.relu)[0]
        logit = jnp.sum(params["weights"][features]) + jnp.concatenate(sums) @ params["maps"] + deep
        return binary_cross_entropy(logit, clicked)

    return Family(loss, params, (words(500, 64, fields), labels(2, 64) * 1.0))


@model("DCN v2", "jax", "Wang et al.: DCN V2 (arXiv:2008.13535)")
def dcn() -> Family:
    """Each cross layer multiplies the features by a low-rank map of the crosses so far."""
    arrays, fields, width, rank = Arrays(), 20, 16, 32
    total = fields * width
    params = {
        "table": arrays(fields * 1000, width, scale=0.1),
        "crosses": [{"down": arrays(total, rank), "up": arrays.dense(rank, total)} for _ in range(3)],
        "deep": arrays.mlp([total, 256, 128]),
        "head": arrays.dense(total + 128, 1),
    }
    offsets = jnp.arange(fields) * 1000

    def loss(params, example):
        features, clicked = example
        x = params["table"][features + offsets].reshape(-1)
        crossed = x
        for p in params["crosses"]:
            crossed = x * (crossed @ p["down"] @ p["up"]["w"] + p["up"]["b"]) + crossed
        deep = jax.nn.relu(mlp(params["deep"], x, jax.nn.relu))
        logit = jnp.concatenate([crossed, deep]) @ params["head"]["w"] + params["head"]["b"]
        return binary_cross_entropy(logit[0], clicked)

    return Family(loss, params, (words(1000, 128, fields), labels(2, 128) * 1.0))


@model("Dilated CNN with a CRF", "jax", "iesl/dilated-cnn-ner")
def crf() -> Family:
    """A scan adds up the scores of all tag sequences; one block of dilated convolutions is applied twice."""
    arrays, width, tags = Arrays(), 64, 12
    params = {
        "words": arrays(2000, width, scale=0.1),
        "convs": [{"w": arrays.conv(3, width, width), "b": jnp.zeros(width)} for _ in range(2)],
        "tags": arrays.dense(width, tags),
        "start": jnp.zeros(tags),
        "transitions": arrays(tags, tags, scale=0.1),
    }

    def dilated(x, p, dilation):
        x = lax.conv_general_dilated(
            x, p["w"], (1,), "SAME", rhs_dilation=(dilation,), dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jax.nn.relu(x + p["b"])

    def loss(params, example):
        tokens, target = example
        x = params["words"][tokens][None]
        for _ in range(2):
            for p, dilation in zip(params["convs"], (1, 2), strict=True):
                x = dilated(x, p, dilation)
        scores = x[0] @ params["tags"]["w"] + params["tags"]["b"]
        transitions = params["transitions"]

        def step(totals, scores):
            return jax.nn.logsumexp(totals[:, None] + transitions, axis=0) + scores, None

        totals, _ = lax.scan(step, params["start"] + scores[0], scores[1:])
        found = jnp.sum(jnp.take_along_axis(scores, target[:, None], 1))
        found += params["start"][target[0]] + jnp.sum(transitions[target[:-1], target[1:]])
        return jax.nn.logsumexp(totals) - found

    return Family(loss, params, (words(2000, 32, 40), labels(tags, 32, 40)))


@model("Pointer network", "jax", "Vinyals, Fortunato, Jaitly: Pointer Networks (arXiv:1506.03134)")
def pointer() -> Family:
    """An LSTM reads points; another points at them, one after another."""
    arrays, width = Arrays(), 64

    def cell():
        return {"x": arrays(width, 4 * width), "h": arrays(width, 4 * width), "b": jnp.zeros(4 * width)}

    params = {
        "points": arrays(2, width),
        "encoder": cell(),
        "decoder": cell(),
        "keys": arrays(width, width),
        "queries": arrays(width, width),
        "scores": arrays(width),
        "start": arrays(width, scale=0.1),
    }

    def lstm(p, state, x):
        h, memory = state
        enter, forget, new, leave = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4)
        memory = jax.nn.sigmoid(forget + 1) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
        h = jax.nn.sigmoid(leave) * jnp.tanh(memory)
        return (h, memory), h

    def loss(params, example):
        points, order = example
        x = points @ params["points"]
        nothing = jnp.zeros(width)
        state, read = lax.scan(lambda s, x: lstm(params["encoder"], s, x), (nothing, nothing), x)
        keys = read @ params["keys"]

        def step(state, x):
            state, h = lstm(params["decoder"], state, x)
            return state, jnp.tanh(keys + h @ params["queries"]) @ params["scores"]

        _, logits = lax.scan(step, state, jnp.concatenate([params["start"][None], x[order[:-1]]]))
        return cross_entropy(logits, order)

    return Family(loss, params, (uniform(16, 20, 2), jnp.argsort(uniform(16, 20, seed=3), axis=1)))


@model("TabNet", "jax", "dreamquark-ai/tabnet")
def tabnet() -> Family:
    """Each step attends to few features, by a sparse softmax, and to those that earlier steps did not use."""
    arrays, features, width = Arrays(), 64, 32
    params = {
        "first": arrays.dense(features, 2 * width),
        "steps": [{"mask": arrays(width, features), "features": arrays.dense(features, 2 * width)} for _ in range(3)],
        "head": arrays.dense(width, 2),
    }

    def sparsemax(x):
        largest = -jnp.sort(-x)
        sums, places = jnp.cumsum(largest), jnp.arange(1, len(x) + 1)
        count = jnp.sum(1 + places * largest > sums)
        return jax.nn.relu(x - (sums[count - 1] - 1) / count)

    def gated(p, x):
        value, gate = jnp.split(x @ p["w"] + p["b"], 2)
        return value * jax.nn.sigmoid(gate)

    def loss(params, example):
        x, label = example
        h, unused = gated(params["first"], x), jnp.ones(features)
        total, entropy = jnp.zeros(width), 0.0
        for p in params["steps"]:
            mask = sparsemax(h @ p["mask"] * unused)
            unused = unused * (1.3 - mask)
            entropy -= jnp.sum(mask * jnp.log(mask + 1e-9))
            h = gated(p["features"], x * mask)
            total = total + jax.nn.relu(h)
        return cross_entropy(total @ params["head"]["w"] + params["head"]["b"], label) + 1e-3 * entropy

    return Family(loss, params, (normal(128, features), labels(2, 128)))
