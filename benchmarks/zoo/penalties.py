"""Models whose loss has a term of the parameters alone."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, labels, normal
from benchmarks.zoo.entries import model
from benchmarks.zoo.layers import Arrays, conv2d


@model("CNN, weight decay in the loss", "jax", "google/flax, examples/imagenet")
def weight_decay() -> Family:
    """As Flax's example of ImageNet has it: half the squares of all parameters but vectors."""
    arrays, sizes = Arrays(), ((3, 32), (32, 64), (64, 128))
    params = {
        "layers": [{"w": arrays.conv(3, 3, a, b), "b": jnp.zeros(b)} for a, b in sizes],
        "head": arrays(128, 10),
    }

    def loss(params, example):
        x, label = example
        h = x[None]
        for layer in params["layers"]:
            h = jax.nn.relu(conv2d(h, layer["w"], stride=2) + layer["b"])
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params) if p.ndim > 1)
        logits = jnp.mean(h, (0, 1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label) + 1e-4 * 0.5 * penalty

    return Family(loss, params, (images(32, 32), labels(10, 32)))


@model("Bayes by Backprop", "jax", "nitarshan/bayes-by-backprop")
def bayes() -> Family:
    """Weights are normal variables: outputs are drawn, and the loss has their divergence from the prior."""
    arrays, sizes = Arrays(), ((784, 256), (256, 256), (256, 10))
    params = [{"mean": arrays(*size), "rho": jnp.full(size, -4.0), "b": jnp.zeros(size[1])} for size in sizes]

    def loss(params, example):
        h, label, noise = example
        divergence = 0.0
        for i, (layer, z) in enumerate(zip(params, noise, strict=True)):
            deviation = jax.nn.softplus(layer["rho"])
            h = h @ layer["mean"] + jnp.sqrt(h**2 @ deviation**2 + 1e-9) * z + layer["b"]
            h = jax.nn.relu(h) if i < len(params) - 1 else h
            divergence += jnp.sum((deviation**2 + layer["mean"] ** 2) / 2 - jnp.log(deviation))
        return optax.softmax_cross_entropy_with_integer_labels(h, label) + 1e-6 * divergence

    noise = [normal(64, outputs, seed=i) for i, (_, outputs) in enumerate(sizes)]
    return Family(loss, params, (normal(64, 784), labels(10, 64), noise))
