"""Models of time series, of molecules and images in space, and two that repeat a step: to a fixed point, or to grow."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, labels, normal, uniform
from benchmarks.zoo.entries import model
from benchmarks.zoo.layers import Arrays, attention, conv2d, cross_entropy, layer_norm, mlp, squared_error


@model("N-BEATS", "jax", "ServiceNow/N-BEATS")
def nbeats() -> Family:
    """Each block explains a part of the past, which is subtracted, and adds its share of the forecast."""
    arrays, past, future, width = Arrays(), 60, 12, 256
    params = [
        {
            "trunk": arrays.mlp([past, width, width, width]),
            "backcast": arrays(width, past, scale=0.02),
            "forecast": arrays(width, future, scale=0.02),
        }
        for _ in range(4)
    ]

    def loss(params, example):
        x, wanted = example
        forecast = jnp.zeros(future)
        for p in params:
            h = jax.nn.relu(mlp(p["trunk"], x, jax.nn.relu))
            x, forecast = x - h @ p["backcast"], forecast + h @ p["forecast"]
        return jnp.mean(jnp.abs(forecast - wanted))

    return Family(loss, params, (normal(128, past), normal(128, future, seed=1)))


@model("PatchTST", "jax", "yuqinie98/PatchTST")
def patch_tst() -> Family:
    """A Transformer of overlapping patches, with the same weights for every channel."""
    arrays, width, heads, patch, stride, past, future = Arrays(), 64, 4, 16, 8, 96, 24
    places = np.arange(0, past - patch + 1, stride)[:, None] + np.arange(patch)
    params = {
        "patches": arrays.dense(patch, width),
        "positions": arrays(len(places), width, scale=0.02),
        "blocks": [
            {
                "qkv": arrays(width, 3 * width),
                "o": arrays(width, width),
                "feed_forward": arrays.mlp([width, 2 * width, width]),
            }
            for _ in range(3)
        ],
        "head": arrays.dense(len(places) * width, future),
    }

    def forecast(params, series):
        mean, deviation = series.mean(), series.std() + 1e-5
        x = ((series - mean) / deviation)[places]
        x = x @ params["patches"]["w"] + params["patches"]["b"] + params["positions"]
        for p in params["blocks"]:
            q, k, v = jnp.split((layer_norm(x) @ p["qkv"]).reshape(len(x), heads, -1), 3, -1)
            x = x + attention(q, k, v).reshape(x.shape) @ p["o"]
            x = x + mlp(p["feed_forward"], layer_norm(x), jax.nn.gelu)
        return (x.reshape(-1) @ params["head"]["w"] + params["head"]["b"]) * deviation + mean

    def loss(params, example):
        series, wanted = example
        return squared_error(jax.vmap(forecast, (None, 0))(params, series), wanted)

    return Family(loss, params, (normal(16, 7, past), normal(16, 7, future, seed=1)))


@model("EGNN", "jax", "vgsatorras/egnn")
def egnn() -> Family:
    """Messages between all atoms depend on distances and also move the atoms."""
    arrays, width, atoms = Arrays(), 32, 12
    params = {
        "elements": arrays(10, width, scale=0.5),
        "layers": [
            {
                "message": arrays.mlp([2 * width + 1, width, width]),
                "move": [arrays.dense(width, width), {"w": arrays(width, 1, scale=0.01), "b": jnp.zeros(1)}],
                "update": arrays.mlp([2 * width, width, width]),
            }
            for _ in range(3)
        ],
        "head": arrays.mlp([width, width, 1]),
    }

    def loss(params, example):
        elements, places, energy = example
        h = params["elements"][elements]
        for p in params["layers"]:
            apart = places[:, None] - places[None]
            ends = jnp.broadcast_to(h[:, None], (atoms, atoms, width)), jnp.broadcast_to(h, (atoms, atoms, width))
            squares = jnp.sum(apart**2, -1, keepdims=True)
            messages = jax.nn.silu(mlp(p["message"], jnp.concatenate([*ends, squares], -1), jax.nn.silu))
            places = places + jnp.mean(apart * mlp(p["move"], messages, jax.nn.silu), 1)
            h = h + mlp(p["update"], jnp.concatenate([h, jnp.sum(messages, 1)], -1), jax.nn.silu)
        return squared_error(jnp.mean(mlp(params["head"], h, jax.nn.silu)), energy)

    return Family(loss, params, (labels(10, 16, atoms), normal(16, atoms, 3), normal(16, seed=1)))


@model("Spatial transformer", "jax", "pytorch/tutorials: spatial_transformer_tutorial")
def spatial_transformer() -> Family:
    """A network chooses an affine map, by which the image is sampled before it is classified."""
    arrays, size = Arrays(), 28
    params = {
        "place": arrays.dense(size * size, 32),
        "affine": {"w": arrays(32, 6, scale=0.01), "b": jnp.asarray([1.0, 0, 0, 0, 1, 0])},
        "convs": [arrays.conv(5, 5, 1, 16), arrays.conv(5, 5, 16, 32)],
        "head": arrays.dense(7 * 7 * 32, 10),
    }
    line = jnp.linspace(-1.0, 1.0, size)
    grid = jnp.stack(jnp.meshgrid(line, line, indexing="ij"), -1)

    def loss(params, example):
        image, label = example
        h = jax.nn.relu(image.reshape(-1) @ params["place"]["w"] + params["place"]["b"])
        affine = (h @ params["affine"]["w"] + params["affine"]["b"]).reshape(2, 3)
        places = (grid @ affine[:, :2].T + affine[:, 2] + 1) * (size - 1) / 2
        x = jax.scipy.ndimage.map_coordinates(image[..., 0], [places[..., 0], places[..., 1]], order=1)
        x = x[None, ..., None]
        for filters in params["convs"]:
            x = jax.nn.relu(conv2d(x, filters, stride=2))
        return cross_entropy(x.reshape(-1) @ params["head"]["w"] + params["head"]["b"], label)

    return Family(loss, params, (images(32, size, 1), labels(10, 32)))


@model("Neural cellular automaton", "jax", "google-research/self-organising-systems: growing_ca")
def cellular_automaton() -> Family:
    """One rule for every cell, scanned over time; random cells change, and those far from living ones die."""
    arrays, channels, size, steps = Arrays(), 16, 20, 8
    params = {
        "hidden": arrays.dense(3 * channels, 128),
        "change": arrays(128, channels, scale=0.01),
    }
    slope = np.outer([1, 2, 1], [-1, 0, 1]) / 8
    kernels = np.stack([np.pad([[1.0]], 1), slope, slope.T], -1)
    filters = jnp.asarray(np.tile(kernels[:, :, None], channels), jnp.float32)
    seed = jnp.zeros((1, size, size, channels)).at[:, size // 2, size // 2, 3:].set(1.0)

    def alive(cells):
        return lax.reduce_window(cells[..., 3:4], -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") > 0.1

    def loss(params, example):
        image, active = example

        def step(cells, active):
            seen = conv2d(cells, filters, groups=channels)
            h = jax.nn.relu(seen @ params["hidden"]["w"] + params["hidden"]["b"])
            new = cells + (h @ params["change"]) * active
            return jnp.where(alive(cells) & alive(new), new, 0.0), None

        cells, _ = lax.scan(step, seed, active)
        return squared_error(cells[0, ..., :4], image)

    active = (uniform(8, steps, size, size, 1) < 0.5).astype(jnp.float32)
    return Family(loss, params, (uniform(8, size, size, 4, seed=3), active))


@model("Deep equilibrium model", "jax", "locuslab/deq")
def equilibrium() -> Family:
    """The output is a fixed point; its own derivative rule solves for the gradient by iteration."""
    arrays, width = Arrays(), 64
    params = {
        "layer": {"state": arrays(width, width, scale=0.05), "input": arrays.dense(32, width)},
        "head": arrays.dense(width, 10),
    }

    def layer(p, state, x):
        return jnp.tanh(state @ p["state"] + x @ p["input"]["w"] + p["input"]["b"])

    @jax.custom_vjp
    def fixed_point(p, x):
        return lax.fori_loop(0, 30, lambda _, state: layer(p, state, x), jnp.zeros(width))

    def forward(p, x):
        state = fixed_point(p, x)
        return state, (p, x, state)

    def backward(kept, cotangent):
        p, x, state = kept
        _, of_state = jax.vjp(lambda state: layer(p, state, x), state)
        solved = lax.fori_loop(0, 30, lambda _, u: cotangent + of_state(u)[0], cotangent)
        _, of_inputs = jax.vjp(lambda p, x: layer(p, state, x), p, x)
        return of_inputs(solved)

    fixed_point.defvjp(forward, backward)

    def loss(params, example):
        x, label = example
        state = fixed_point(params["layer"], x)
        return cross_entropy(state @ params["head"]["w"] + params["head"]["b"], label)

    return Family(loss, params, (normal(128, 32), labels(10, 128)))
