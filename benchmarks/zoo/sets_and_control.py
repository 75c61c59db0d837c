"""Models of sets, reinforcement learning, and networks that generate or adapt other networks."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, labels, normal
from benchmarks.zoo.entries import KEY, model, of_equinox, of_haiku, of_linen
from benchmarks.zoo.layers import Arrays, conv2d, cross_entropy, haiku_layer_norm, mlp, squared_error


class _DeepSets(nn.Module):
    """Layers that subtract a projection of the maximum over all points."""

    width: int = 256

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            largest = jnp.max(x, axis=1, keepdims=True)
            x = nn.tanh(nn.Dense(self.width)(x) - nn.Dense(self.width, use_bias=False)(largest))
        x = jnp.max(x, axis=1)
        return nn.Dense(40)(nn.tanh(nn.Dense(self.width)(x)))


@model("Deep Sets", "linen", "manzilzaheer/DeepSets")
def deep_sets() -> Family:
    return of_linen(_DeepSets(), cross_entropy, normal(16, 100, 3), labels(40, 16))


class _MAB(eqx.Module):
    """One set attends to another."""

    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    o: eqx.nn.Linear
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, queries, keys, width, *, key):
        ks = jax.random.split(key, 4)
        self.q, self.k = eqx.nn.Linear(queries, width, key=ks[0]), eqx.nn.Linear(keys, width, key=ks[1])
        self.v, self.o = eqx.nn.Linear(keys, width, key=ks[2]), eqx.nn.Linear(width, width, key=ks[3])
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]

    def __call__(self, x, y):
        q, k, v = jax.vmap(self.q)(x), jax.vmap(self.k)(y), jax.vmap(self.v)(y)
        heads = (z.reshape(len(z), 4, -1) for z in (q, k, v))
        h = jax.vmap(self.norms[0])(q + self._attend(*heads))
        return jax.vmap(self.norms[1])(h + jax.nn.relu(jax.vmap(self.o)(h)))

    @staticmethod
    def _attend(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / (q.shape[1] * q.shape[2]) ** 0.5)
        return jnp.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


class _SetTransformer(eqx.Module):
    """Points attend to each other through a few learned inducing points."""

    inducing: list[jax.Array]
    into: list[_MAB]
    back: list[_MAB]
    seed: jax.Array
    pool: _MAB
    head: eqx.nn.Linear

    def __init__(self, width, *, key):
        keys = jax.random.split(key, 9)
        self.inducing = [0.1 * jax.random.normal(k, (32, width)) for k in keys[:2]]
        self.into = [_MAB(width, i, width, key=k) for i, k in zip((3, width), keys[2:4], strict=True)]
        self.back = [_MAB(i, width, width, key=k) for i, k in zip((3, width), keys[4:6], strict=True)]
        self.seed = 0.1 * jax.random.normal(keys[6], (4, width))
        self.pool, self.head = _MAB(width, width, width, key=keys[7]), eqx.nn.Linear(4 * width, 40, key=keys[8])

    def __call__(self, x):
        for points, into, back in zip(self.inducing, self.into, self.back, strict=True):
            x = back(x, into(points, x))
        return self.head(self.pool(self.seed, x).reshape(-1))


@model("Set Transformer", "equinox", "juho-lee/set_transformer")
def set_transformer() -> Family:
    batch = (normal(16, 100, 3), labels(40, 16))
    return of_equinox(_SetTransformer(128, key=KEY), lambda net, e: cross_entropy(net(e[0]), e[1]), batch)


@model("Decision Transformer", "haiku", "kzl/decision-transformer")
def decision_transformer() -> Family:
    """A sequence of returns, states and actions; each action is predicted from its state's token."""
    width, steps = 128, 20

    def loss(example):
        returns, states, actions, times = example
        when = hk.Embed(1000, width)(times)
        tokens = [hk.Linear(width)(z) + when for z in (returns[:, None], states, actions)]
        x = haiku_layer_norm(jnp.stack(tokens, 1).reshape(3 * steps, width))
        causal = jnp.tril(jnp.ones((1, 3 * steps, 3 * steps), bool))
        for _ in range(3):
            h = haiku_layer_norm(x)
            x = x + hk.MultiHeadAttention(4, width // 4, model_size=width, w_init_scale=1.0)(h, h, h, causal)
            x = x + hk.nets.MLP([4 * width, width], activation=jax.nn.gelu)(haiku_layer_norm(x))
        x = haiku_layer_norm(x).reshape(steps, 3, width)
        return squared_error(jnp.tanh(hk.Linear(6)(x[:, 1])), actions)

    rng = np.random.default_rng(0)
    times = jnp.asarray(rng.integers(0, 900, (16, 1)) + np.arange(steps), jnp.int32)
    actions = jnp.tanh(normal(16, steps, 6))
    return of_haiku(loss, (normal(16, steps), normal(16, steps, 17), actions, times))


@model("Hypernetwork", "jax", "Ha, Dai, Le: HyperNetworks (arXiv:1609.09106)")
def hypernetwork() -> Family:
    """One small network generates the filters of all layers, from a learned vector per layer."""
    array, width, code, depth = Arrays(), 32, 64, 4
    params = {
        "codes": array(depth, code, scale=1.0),
        "hidden": array.dense(code, 64),
        "filters": {"w": array(64, 3 * 3 * width * width, scale=0.01), "b": array(3 * 3 * width * width, scale=0.05)},
        "first": array.conv(3, 3, 3, width),
        "head": array(width, 10),
    }

    def loss(params, example):
        image, label = example
        x = conv2d(image[None], params["first"])
        for code in params["codes"]:
            h = jax.nn.relu(code @ params["hidden"]["w"] + params["hidden"]["b"])
            filters = (h @ params["filters"]["w"] + params["filters"]["b"]).reshape(3, 3, width, width)
            x = x + jax.nn.relu(conv2d(x, filters))
        return cross_entropy(x.mean((0, 1, 2)) @ params["head"], label)

    return Family(loss, params, (images(8, 24), labels(10, 8)))


class _AtariQ(nn.Module):
    """The value of each action given four frames of a game, as a state value plus advantages."""

    actions: int = 6

    @nn.compact
    def __call__(self, frames):
        x = frames.astype(jnp.float32) / 255.0
        for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(nn.Conv(features, (size, size), stride, padding="VALID")(x))
        x = x.reshape(len(x), -1)
        value = nn.Dense(1)(nn.relu(nn.Dense(256)(x)))
        advantage = nn.Dense(self.actions)(nn.relu(nn.Dense(256)(x)))
        return value + advantage - advantage.mean(-1, keepdims=True)


@model("Atari Q-network, duelling", "linen", "google/dopamine")
def atari() -> Family:
    rng = np.random.default_rng(0)
    frames = jnp.asarray(rng.integers(0, 256, (16, 84, 84, 4)), jnp.uint8)

    def loss(values, targets):
        action, wanted = targets
        found = jnp.take_along_axis(values, action[:, None], axis=1)[:, 0]
        error = jnp.abs(found - wanted)
        return jnp.mean(jnp.where(error < 1, 0.5 * error**2, error - 0.5))

    return of_linen(_AtariQ(), loss, frames, (labels(6, 16), normal(16)))


@model("MAML, one inner step", "haiku", "cbfinn/maml")
def maml() -> Family:
    """An example is a task: the loss contains a gradient step on the task's own examples."""
    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([256, 256, 1])(x)))
    x, slope = normal(32, 20, 1), normal(32, 1, 1)
    params = network.init(KEY, x[0])

    def loss(params, task):
        x, y = task

        def error(params, x, y):
            return squared_error(network.apply(params, x), y)

        gradient = jax.grad(error)(params, x[:10], y[:10])
        adapted = jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient)
        return error(adapted, x[10:], y[10:])

    return Family(loss, params, (x, jnp.sin(x + slope)))


@model("Recurrent world model", "jax", "danijar/dreamer")
def world_model() -> Family:
    """A GRU with a sampled latent at every step; the loss reconstructs images and rewards and matches the prior."""
    array, width, latent, size = Arrays(), 200, 30, 256

    params = {
        "encoder": array.mlp((size, width, width)),
        "inputs": array.dense(latent + 4, width),
        "gru": array.dense(2 * width, 3 * width),
        "prior": array.mlp((width, width, 2 * latent)),
        "posterior": array.mlp((2 * width, width, 2 * latent)),
        "decoder": array.mlp((width + latent, width, size)),
        "reward": array.mlp((width + latent, width, 1)),
    }

    def network(layers, x):
        return mlp(layers, x, jax.nn.elu)

    def gaussian(layers, x):
        mean, spread = jnp.split(network(layers, x), 2)
        return mean, jax.nn.softplus(spread) + 0.1

    def loss(params, example):
        pictures, actions, rewards, noise = example

        def step(state, inputs):
            (h, z), (seen, action, noise) = state, inputs
            x = jax.nn.elu(network([params["inputs"]], jnp.concatenate([z, action])))
            gates = network([params["gru"]], jnp.concatenate([x, h]))
            reset, new, update = jnp.split(gates, 3)
            update = jax.nn.sigmoid(update - 1)
            h = update * jnp.tanh(jax.nn.sigmoid(reset) * new) + (1 - update) * h
            (m1, s1), prior = gaussian(params["posterior"], jnp.concatenate([h, seen])), gaussian(params["prior"], h)
            m2, s2 = prior
            z = m1 + s1 * noise
            divergence = jnp.sum(jnp.log(s2 / s1) + (s1**2 + (m1 - m2) ** 2) / (2 * s2**2) - 0.5)
            return (h, z), (jnp.concatenate([h, z]), divergence)

        seen = jax.nn.elu(network(params["encoder"], pictures))
        _, (states, divergences) = jax.lax.scan(step, (jnp.zeros(width), jnp.zeros(latent)), (seen, actions, noise))
        explained = squared_error(network(params["decoder"], states), pictures) * size
        return explained + squared_error(network(params["reward"], states)[:, 0], rewards) + jnp.mean(divergences)

    pictures, actions = normal(16, 16, size), normal(16, 16, 4, seed=1)
    rewards, noise = normal(16, 16), normal(16, 16, latent)
    return Family(loss, params, (pictures, actions, rewards, noise))
