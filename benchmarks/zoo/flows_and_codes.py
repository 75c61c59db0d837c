"""Generative models: invertible flows, codes of a book, a diffusion Transformer and mixtures of normal densities."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, labels, normal, uniform
from benchmarks.zoo.entries import model
from benchmarks.zoo.layers import Arrays, attention, conv2d, layer_norm, mlp, squared_error


@model("Glow", "jax", "openai/glow")
def glow() -> Family:
    """Mixes channels by invertible matrices, whose log determinants are in the loss."""
    arrays, channels, width = Arrays(), 12, 64
    params = [
        {
            "bias": jnp.zeros(channels),
            "log_scale": jnp.zeros(channels),
            "mix": jnp.linalg.qr(arrays(channels, channels))[0],
            "convs": [arrays.conv(3, 3, channels // 2, width), arrays.conv(1, 1, width, width)],
            "last": arrays(3, 3, width, channels, scale=0.01),
        }
        for _ in range(4)
    ]

    def loss(params, image):
        x = image.reshape(8, 2, 8, 2, 3).transpose(0, 2, 1, 3, 4).reshape(1, 8, 8, channels)
        log_volume = 0.0
        for p in params:
            x = (x + p["bias"]) * jnp.exp(p["log_scale"]) @ p["mix"]
            log_volume += 64 * (jnp.sum(p["log_scale"]) + jnp.linalg.slogdet(p["mix"])[1])
            kept, changed = jnp.split(x, 2, -1)
            h = kept
            for filters in p["convs"]:
                h = jax.nn.relu(conv2d(h, filters))
            shift, scale = jnp.split(conv2d(h, p["last"]), 2, -1)
            scale = jax.nn.sigmoid(scale + 2)
            log_volume += jnp.sum(jnp.log(scale))
            x = jnp.concatenate([kept, (changed + shift) * scale], -1)
        return (jnp.sum(x**2) / 2 - log_volume) / x.size

    return Family(loss, params, images(16, 16))


@model("Neural spline flow", "jax", "bayesiains/nsf")
def spline_flow() -> Family:
    """Half of the coordinates choose a rational-quadratic spline for each of the other half, alternately."""
    arrays, half, bins, bound = Arrays(), 4, 8, 3.0
    params = [arrays.mlp([half, 128, 128, half * (3 * bins - 1)]) for _ in range(2)]

    def spline(x, raw):
        """The value and the log derivative of one spline; it is the identity beyond its bounds."""
        sizes = 2 * bound * (0.01 + (1 - 0.01 * bins) * jax.nn.softmax(raw[: 2 * bins].reshape(2, bins)))
        left, bottom = jnp.pad(jnp.cumsum(sizes, 1), ((0, 0), (1, 0))) - bound
        slopes = jnp.pad(jax.nn.softplus(raw[2 * bins :]), 1, constant_values=1.0)
        i = jnp.clip(jnp.searchsorted(left, x) - 1, 0, bins - 1)
        (width, height), slope, next_slope = sizes[:, i], slopes[i], slopes[i + 1]
        share = jnp.clip((x - left[i]) / width, 0, 1)
        mean, both = height / width, share * (1 - share)
        divisor = mean + (slope + next_slope - 2 * mean) * both
        y = bottom[i] + height * (mean * share**2 + slope * both) / divisor
        rise = next_slope * share**2 + 2 * mean * both + slope * (1 - share) ** 2
        inside = jnp.abs(x) < bound
        return jnp.where(inside, y, x), jnp.where(inside, jnp.log(rise) + 2 * jnp.log(mean / divisor), 0.0)

    def loss(params, x):
        kept, changed = jnp.split(x, 2)
        log_volume = 0.0
        for p in params:
            raw = mlp(p, kept, jax.nn.relu).reshape(half, -1)
            changed, logs = jax.vmap(spline)(changed, raw)
            log_volume += jnp.sum(logs)
            kept, changed = changed, kept
        return jnp.sum(kept**2 + changed**2) / 2 - log_volume

    return Family(loss, params, normal(256, 2 * half))


@model("VQ-VAE", "jax", "google-deepmind/sonnet: examples/vqvae_example")
def vq_vae() -> Family:
    """Replaces each code by the nearest row of a book, through which the gradient passes unchanged."""
    arrays, width = Arrays(), 32
    params = {
        "down": [arrays.conv(4, 4, 3, width), arrays.conv(4, 4, width, width)],
        "book": arrays(128, width, scale=1.0),
        "up": [arrays.conv(4, 4, width, width), arrays.conv(4, 4, width, 3)],
    }

    def loss(params, image):
        first, second = params["down"]
        codes = conv2d(jax.nn.relu(conv2d(image[None], first, stride=2)), second, stride=2)
        rows, book = codes.reshape(-1, width), params["book"]
        distances = jnp.sum(rows**2, 1, keepdims=True) - 2 * rows @ book.T + jnp.sum(book**2, 1)
        nearest = book[jnp.argmin(distances, 1)]
        commitment = squared_error(lax.stop_gradient(rows), nearest)
        commitment += 0.25 * squared_error(rows, lax.stop_gradient(nearest))
        x = (rows + lax.stop_gradient(nearest - rows)).reshape(codes.shape)
        first, second = params["up"]
        x = jax.nn.relu(lax.conv_transpose(x, first, (2, 2), "SAME"))
        return squared_error(lax.conv_transpose(x, second, (2, 2), "SAME")[0], image) + commitment

    return Family(loss, params, images(16, 32))


@model("DiT", "jax", "facebookresearch/DiT")
def dit() -> Family:
    """The time and the class scale and shift every layer normalisation and scale every block's output."""
    arrays, width, heads, patch = Arrays(), 96, 4, 4
    pixels = 3 * patch**2
    params = {
        "patches": arrays.dense(pixels, width),
        "positions": arrays(16, width, scale=0.02),
        "time": arrays.mlp([64, width, width]),
        "classes": arrays(10, width, scale=0.02),
        "blocks": [
            {
                "condition": arrays(width, 6 * width, scale=0.02),
                "qkv": arrays(width, 3 * width),
                "o": arrays(width, width),
                "feed_forward": arrays.mlp([width, 4 * width, width]),
            }
            for _ in range(3)
        ],
        "condition": arrays(width, 2 * width, scale=0.02),
        "head": arrays.dense(width, pixels),
    }
    frequencies = jnp.asarray(10_000.0 ** (-np.arange(32) / 32), jnp.float32)

    def patches(image):
        return image.reshape(4, patch, 4, patch, 3).transpose(0, 2, 1, 3, 4).reshape(16, pixels)

    def loss(params, example):
        image, noise, signal, label = example
        x = patches(jnp.sqrt(signal) * image + jnp.sqrt(1 - signal) * noise)
        x = x @ params["patches"]["w"] + params["patches"]["b"] + params["positions"]
        angles = 1000 * signal * frequencies
        time = mlp(params["time"], jnp.concatenate([jnp.cos(angles), jnp.sin(angles)]), jax.nn.silu)
        condition = jax.nn.silu(time + params["classes"][label])
        for p in params["blocks"]:
            shift, scale, gate, shift2, scale2, gate2 = jnp.split(condition @ p["condition"], 6)
            h = layer_norm(x) * (1 + scale) + shift
            q, k, v = jnp.split((h @ p["qkv"]).reshape(len(x), heads, -1), 3, -1)
            x = x + gate * (attention(q, k, v).reshape(x.shape) @ p["o"])
            h = layer_norm(x) * (1 + scale2) + shift2
            x = x + gate2 * mlp(p["feed_forward"], h, jax.nn.gelu)
        shift, scale = jnp.split(condition @ params["condition"], 2)
        x = (layer_norm(x) * (1 + scale) + shift) @ params["head"]["w"] + params["head"]["b"]
        return squared_error(x, patches(noise))

    signal = 0.1 + 0.8 * uniform(16)
    return Family(loss, params, (images(16, 16), normal(16, 16, 16, 3, seed=5), signal, labels(10, 16)))


@model("Mixture density network, full covariances", "jax", "tensorflow/probability: layers.MixtureSameFamily")
def mixture_density() -> Family:
    """Predicts the Cholesky factor of each component's covariance; the likelihood solves with it."""
    arrays, components, size = Arrays(), 5, 4
    rows, columns = np.tril_indices(size)
    params = {
        "trunk": arrays.mlp([32, 128, 128]),
        "means": arrays.dense(128, components * size),
        "factors": {"w": arrays(128, components * len(rows), scale=0.02), "b": jnp.zeros(components * len(rows))},
        "weights": arrays.dense(128, components),
    }

    def loss(params, example):
        x, y = example
        h = jnp.tanh(mlp(params["trunk"], x, jnp.tanh))
        means, factors, weights = (h @ params[n]["w"] + params[n]["b"] for n in ("means", "factors", "weights"))
        lower = jnp.zeros((components, size, size)).at[:, rows, columns].set(factors.reshape(components, -1))
        factor = jnp.where(np.eye(size, dtype=bool), jax.nn.softplus(lower), lower)
        errors = (y - means.reshape(components, size))[..., None]
        whitened = lax.linalg.triangular_solve(factor, errors, left_side=True, lower=True)[..., 0]
        log_volume = jnp.sum(jnp.log(jnp.diagonal(factor, axis1=1, axis2=2)), 1)
        logs = -log_volume - jnp.sum(whitened**2, 1) / 2
        return -jax.nn.logsumexp(logs + jax.nn.log_softmax(weights))

    return Family(loss, params, (normal(256, 32), normal(256, size, seed=1)))
