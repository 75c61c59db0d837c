"""Models in which the example, or a mixture, chooses among weights; and one with several copies of all weights."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, labels, normal
from benchmarks.zoo.entries import model
from benchmarks.zoo.layers import Arrays, conv2d, cross_entropy, layer_norm, mlp


@model("DARTS supernet", "jax", "quark0/darts")
def darts() -> Family:
    """Every edge of a cell is a mixture of operations, by the softmax of architecture weights."""
    arrays, width, nodes, kinds = Arrays(), 16, 3, 5
    edges = nodes * (nodes + 1) // 2
    params = {
        "stem": arrays.conv(3, 3, 3, width),
        "edges": [
            {
                name: {"depth": arrays.conv(3, 3, 1, width), "point": arrays.conv(1, 1, width, width)}
                for name in ("separable", "dilated")
            }
            for _ in range(edges)
        ],
        "architecture": arrays(edges, kinds, scale=1e-3),
        "head": arrays.dense(nodes * width, 10),
    }

    def separable(p, x, dilation):
        x = lax.conv_general_dilated(
            jax.nn.relu(x), p["depth"], (1, 1), "SAME", rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=width,
        )  # fmt: skip
        return conv2d(x, p["point"])

    def pooled(x, start, combine):
        return lax.reduce_window(x, start, combine, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")

    def mixed(p, weights, x):
        skip, largest, mean, *convs = weights
        x_max, x_mean = pooled(x, -jnp.inf, lax.max), pooled(x, 0.0, lax.add) / 9
        kinds = separable(p["separable"], x, 1), separable(p["dilated"], x, 2)
        return skip * x + largest * x_max + mean * x_mean + convs[0] * kinds[0] + convs[1] * kinds[1]

    def loss(params, example):
        image, label = example
        states = [conv2d(image[None], params["stem"])]
        weights = jax.nn.softmax(params["architecture"])
        rest = iter(zip(params["edges"], weights, strict=True))
        for _ in range(nodes):
            states.append(sum(mixed(*next(rest), x) for x in states))
        h = jnp.concatenate(states[1:], -1).mean((0, 1, 2))
        return cross_entropy(h @ params["head"]["w"] + params["head"]["b"], label)

    return Family(loss, params, (images(8, 16), labels(10, 8)))


@model("CondConv", "jax", "Yang et al.: CondConv (arXiv:1904.04971)")
def condconv() -> Family:
    """The filters of each layer are a mixture of four, with weights that depend on the image."""
    arrays, width, experts = Arrays(), 16, 4
    params = {
        "stem": arrays.conv(3, 3, 3, width),
        "layers": [
            {
                "routing": arrays.dense(width, experts),
                "filters": jnp.stack([arrays.conv(3, 3, width, width) for _ in range(experts)]),
            }
            for _ in range(3)
        ],
        "head": arrays.dense(width, 10),
    }

    def loss(params, example):
        image, label = example
        x = jax.nn.relu(conv2d(image[None], params["stem"]))
        for p in params["layers"]:
            weights = jax.nn.sigmoid(x.mean((0, 1, 2)) @ p["routing"]["w"] + p["routing"]["b"])
            x = x + jax.nn.relu(conv2d(x, jnp.tensordot(weights, p["filters"], 1)))
        return cross_entropy(x.mean((0, 1, 2)) @ params["head"]["w"] + params["head"]["b"], label)

    return Family(loss, params, (images(8, 8), labels(10, 8)))


@model("REDQ critics", "jax", "watchernyu/REDQ")
def critics() -> Family:
    """An ensemble: vmap over stacked weights of networks with the same input and target."""
    arrays, count = Arrays(), 5
    widths = ((40, 256), (256, 256), (256, 1))
    params = [{"w": arrays(count, *shape), "b": jnp.zeros((count, shape[1]))} for shape in widths]

    def loss(params, example):
        x, target = example
        values = jax.vmap(mlp, (0, None, None))(params, x, jax.nn.relu)
        return jnp.sum((values - target) ** 2)

    return Family(loss, params, (normal(64, 40), normal(64, seed=1)))


@model("MT-DNN, lax.switch", "jax", "namisan/mt-dnn")
def multitask() -> Family:
    """A shared encoder; ``lax.switch`` picks the head of the example's task."""
    arrays = Arrays()
    params = {"encoder": arrays.mlp([64, 256, 256]), "heads": [arrays.dense(256, classes) for classes in (10, 20, 5)]}

    def loss(params, example):
        x, task, label = example
        h = jax.nn.relu(mlp(params["encoder"], x, jax.nn.relu))
        branches = [lambda h, label, p=p: cross_entropy(h @ p["w"] + p["b"], label) for p in params["heads"]]
        return lax.switch(task, branches, h, label)

    return Family(loss, params, (normal(64, 64), labels(3, 64), labels(5, 64, seed=2)))


@model("Adapters of many tasks", "jax", "google-research/adapter-bert")
def adapters() -> Family:
    """The weights of an adapter and a head are gathered by the example's task."""
    arrays, width, bottleneck, tasks = Arrays(), 128, 16, 20
    params = {
        "layers": arrays.mlp([64, width, width]),
        "down": arrays(tasks, width, bottleneck),
        "up": arrays(tasks, bottleneck, width, scale=0.1),
        "heads": arrays(tasks, width, 10),
    }

    def loss(params, example):
        x, task, label = example
        h = layer_norm(mlp(params["layers"], x, jax.nn.gelu))
        h = h + jax.nn.gelu(h @ params["down"][task]) @ params["up"][task]
        return cross_entropy(h @ params["heads"][task], label)

    return Family(loss, params, (normal(64, 64), labels(tasks, 64), labels(10, 64, seed=2)))
