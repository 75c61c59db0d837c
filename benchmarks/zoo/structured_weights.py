"""Layers that multiply by a structured matrix, and layers whose weights are not one matrix."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, labels, normal
from benchmarks.zoo.entries import model
from benchmarks.zoo.layers import Arrays, conv2d, cross_entropy, layer_norm, squared_error


@model("KAN, Gaussian bases", "jax", "ZiyaoLi/fast-kan")
def kan() -> Family:
    """Each connection is a learned function: a sum of Gaussians of the input, plus a multiple of its SiLU."""
    arrays, bases = Arrays(), 8
    centres = jnp.linspace(-2.0, 2.0, bases)
    params = [
        {"curves": arrays(i, bases, o, scale=0.1), "base": arrays.dense(i, o)}
        for i, o in itertools.pairwise((64, 64, 10))
    ]

    def loss(params, example):
        x, label = example
        for p in params:
            basis = jnp.exp(-(((layer_norm(x)[:, None] - centres) * (bases - 1) / 4) ** 2))
            x = jnp.einsum("ig,igo->o", basis, p["curves"]) + jax.nn.silu(x) @ p["base"]["w"] + p["base"]["b"]
        return cross_entropy(x, label)

    return Family(loss, params, (normal(128, 64), labels(10, 128)))


@model("Capsule network", "jax", "naturomics/CapsNet-Tensorflow")
def capsules() -> Family:
    """Each pair of capsules has its own matrix; three rounds of routing weigh their votes by agreement."""
    arrays, size, wide, inputs = Arrays(), 8, 16, 7 * 7 * 2
    params = {
        "first": arrays.conv(5, 5, 1, 32),
        "primary": arrays.conv(5, 5, 32, 2 * size),
        "votes": arrays(inputs, 10, size, wide),
    }

    def squash(x):
        square = jnp.sum(x**2, -1, keepdims=True)
        return square / (1 + square) * x * lax.rsqrt(square + 1e-8)

    def loss(params, example):
        x, label = example
        x = conv2d(jax.nn.relu(conv2d(x[None], params["first"], stride=2)), params["primary"], stride=2)
        votes = jnp.einsum("ik,iokj->ioj", squash(x.reshape(inputs, size)), params["votes"])
        logits = jnp.zeros((inputs, 10))
        for routing in range(3):
            out = squash(jnp.einsum("io,ioj->oj", jax.nn.softmax(logits), votes))
            if routing < 2:
                logits = logits + jnp.einsum("ioj,oj->io", votes, out)
        lengths, wanted = jnp.sqrt(jnp.sum(out**2, -1) + 1e-9), jax.nn.one_hot(label, 10)
        present, absent = jax.nn.relu(0.9 - lengths) ** 2, jax.nn.relu(lengths - 0.1) ** 2
        return jnp.sum(wanted * present + 0.5 * (1 - wanted) * absent)

    return Family(loss, params, (images(16, 28, 1), labels(10, 16)))


@model("Circulant layers", "jax", "Cheng et al.: circulant projections (arXiv:1502.03436)")
def circulant() -> Family:
    """A layer multiplies by the circulant matrix of one vector, by Fourier transforms of both."""
    arrays, width, depth = Arrays(), 1024, 3
    params = {
        "layers": [{"row": arrays(width), "b": jnp.zeros(width)} for _ in range(depth)],
        "head": arrays.dense(width, 10),
    }
    signs = jnp.sign(normal(depth, width, seed=7))

    def loss(params, example):
        x, label = example
        for p, sign in zip(params["layers"], signs, strict=True):
            spectrum = jnp.fft.rfft(x * sign) * jnp.fft.rfft(p["row"])
            x = jax.nn.relu(jnp.fft.irfft(spectrum, width) + p["b"])
        return cross_entropy(x @ params["head"]["w"] + params["head"]["b"], label)

    return Family(loss, params, (normal(64, width), labels(10, 64)))


@model("Monarch layers", "jax", "HazyResearch/fly")
def monarch() -> Family:
    """A matrix is two block-diagonal ones, with a transposition between their blocks."""
    arrays, groups, size = Arrays(), 16, 32
    width = groups * size
    params = {
        "layers": [
            {"rows": arrays(groups, size, size), "columns": arrays(size, groups, groups), "b": jnp.zeros(width)}
            for _ in range(3)
        ],
        "head": arrays.dense(width, 10),
    }

    def loss(params, example):
        x, label = example
        for p in params["layers"]:
            x = jnp.einsum("gi,gio->go", x.reshape(groups, size), p["rows"])
            x = jnp.einsum("gi,gio->go", x.T, p["columns"]).T.reshape(width)
            x = jax.nn.relu(x + p["b"])
        return cross_entropy(x @ params["head"]["w"] + params["head"]["b"], label)

    return Family(loss, params, (normal(64, width), labels(10, 64)))


@model("Orthogonal RNN, Cayley", "jax", "Helfrich, Willmott, Ye: scoRNN (arXiv:1707.09520)")
def orthogonal() -> Family:
    """The recurrent matrix is orthogonal: a linear solve makes it of a skew-symmetric one before the scan."""
    arrays, width = Arrays(), 48
    params = {
        "skew": arrays(width, width, scale=0.1),
        "inputs": arrays(8, width),
        "threshold": jnp.full(width, -0.01),
        "head": arrays.dense(width, 10),
    }
    signs = jnp.where(jnp.arange(width) < width // 2, -1.0, 1.0)

    def loss(params, example):
        series, label = example
        skew = params["skew"] - params["skew"].T
        recurrent = jnp.linalg.solve(jnp.eye(width) + skew, jnp.eye(width) - skew) * signs

        def step(h, x):
            h = h @ recurrent + x @ params["inputs"]
            return jnp.sign(h) * jax.nn.relu(jnp.abs(h) + params["threshold"]), None

        h, _ = lax.scan(step, jnp.zeros(width), series)
        return cross_entropy(h @ params["head"]["w"] + params["head"]["b"], label)

    return Family(loss, params, (normal(32, 30, 8), labels(10, 32)))


@model("Complex network", "jax", "ChihebTrabelsi/deep_complex_networks")
def complex_network() -> Family:
    """Complex matrices, kept as their real and imaginary parts; the activation shrinks the modulus."""
    arrays, width = Arrays(), 128
    params = {
        "layers": [
            {"real": arrays(width, width), "imaginary": arrays(width, width), "threshold": jnp.full(width, -0.1)}
            for _ in range(3)
        ],
        "head": arrays.dense(2 * width, 10),
    }

    def loss(params, example):
        x, label = example
        x = lax.complex(x[:width], x[width:])
        for p in params["layers"]:
            x = x @ lax.complex(p["real"], p["imaginary"])
            modulus = jnp.abs(x)
            x = jax.nn.relu(modulus + p["threshold"]) / (modulus + 1e-6) * x
        x = jnp.concatenate([x.real, x.imag])
        return cross_entropy(x @ params["head"]["w"] + params["head"]["b"], label)

    return Family(loss, params, (normal(64, 2 * width), labels(10, 64)))


@model("QLoRA, 4 bits", "jax", "artidoro/qlora")
def qlora() -> Family:
    """Trains adapters of frozen matrices, whose entries are codes of 16 levels, with a scale for every 64."""
    arrays, width, rank, depth, block = Arrays(), 256, 8, 4, 64
    quantiles = jax.scipy.stats.norm.ppf(jnp.linspace(0.03, 0.97, 16))
    levels = quantiles / quantiles[-1]

    def quantised(weight):
        blocks = weight.reshape(-1, block)
        scales = jnp.max(jnp.abs(blocks), 1, keepdims=True)
        middles = (levels[1:] + levels[:-1]) / 2
        return jnp.searchsorted(middles, blocks / scales).astype(jnp.uint8), scales

    frozen = [quantised(arrays(width, width)) for _ in range(depth)]
    params = [{"a": arrays(width, rank), "b": arrays(rank, width, scale=0.01)} for _ in range(depth)]

    def loss(params, example):
        x, targets = example
        for p, (codes, scales) in zip(params, frozen, strict=True):
            h = layer_norm(x)
            weight = (levels[codes] * scales).reshape(width, width)
            x = x + jax.nn.gelu(h @ weight + 2.0 * (h @ p["a"]) @ p["b"])
        return squared_error(x, targets)

    return Family(loss, params, (normal(16, 32, width), normal(16, 32, width, seed=1)))


@model("Involution", "jax", "d-li14/involution")
def involution() -> Family:
    """The filters at each pixel are made of that pixel's own features, and shared by a group of channels."""
    arrays, width, groups, size = Arrays(), 32, 4, 3
    params = {
        "stem": arrays.conv(3, 3, 3, width),
        "blocks": [
            {
                "reduce": arrays(width, 8),
                "span": arrays.dense(8, size * size * groups),
                "mix": arrays.dense(width, width),
            }
            for _ in range(2)
        ],
        "head": arrays.dense(width, 10),
    }

    def involve(p, x):
        _, height, length, _ = x.shape
        filters = jax.nn.relu(x @ p["reduce"]) @ p["span"]["w"] + p["span"]["b"]
        patches = lax.conv_general_dilated_patches(
            x, (size, size), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        patches = patches.reshape(height, length, groups, width // groups, size * size)
        filters = filters.reshape(height, length, groups, 1, size * size)
        return jnp.sum(patches * filters, -1).reshape(x.shape)

    def loss(params, example):
        image, label = example
        x = jax.nn.relu(conv2d(image[None], params["stem"], stride=2))
        for p in params["blocks"]:
            x = x + jax.nn.relu(involve(p, x) @ p["mix"]["w"] + p["mix"]["b"])
        return cross_entropy(x.mean((0, 1, 2)) @ params["head"]["w"] + params["head"]["b"], label)

    return Family(loss, params, (images(8, 32), labels(10, 8)))
