"""Graph networks. An example is a graph with a fixed number of nodes and edges."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.cost.families import Family
from benchmarks.zoo.data import labels, normal
from benchmarks.zoo.entries import KEY, model, of_equinox, of_haiku, of_linen
from benchmarks.zoo.layers import Arrays, cross_entropy

_NODES, _EDGES = 64, 256


def _graphs(count: int, features: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Node features, and the sender and receiver of each edge."""
    ends = np.random.default_rng(6).integers(0, _NODES, (2, count, _EDGES)).astype(np.int32)
    return normal(count, _NODES, features), jnp.asarray(ends[0]), jnp.asarray(ends[1])


def _with_self_loops(senders: jax.Array, receivers: jax.Array) -> tuple[jax.Array, jax.Array]:
    loops = jnp.arange(_NODES)
    return jnp.concatenate([senders, loops]), jnp.concatenate([receivers, loops])


@model("GCN", "jax", "tkipf/gcn")
def gcn() -> Family:
    """Classifies every node; neighbours are weighted by the inverse square roots of both degrees."""
    params = Arrays().mlp((128, 256, 256, 7))

    def loss(params, example):
        (x, senders, receivers), targets = example
        senders, receivers = _with_self_loops(senders, receivers)
        degrees = jax.ops.segment_sum(jnp.ones(len(receivers)), receivers, _NODES)
        weights = jax.lax.rsqrt(degrees)[senders] * jax.lax.rsqrt(degrees)[receivers]
        for i, p in enumerate(params):
            x = jax.ops.segment_sum((x @ p["w"])[senders] * weights[:, None], receivers, _NODES) + p["b"]
            x = jax.nn.relu(x) if i < len(params) - 1 else x
        return cross_entropy(x, targets)

    return Family(loss, params, (_graphs(16, 128), labels(7, 16, _NODES)))


class _GATLayer(eqx.Module):
    """Each node attends to its neighbours, with several heads."""

    linear: eqx.nn.Linear
    sender: jax.Array
    receiver: jax.Array
    bias: jax.Array

    def __init__(self, inputs, heads, width, *, key):
        keys = jax.random.split(key, 3)
        self.linear = eqx.nn.Linear(inputs, heads * width, use_bias=False, key=keys[0])
        self.sender, self.receiver = (0.1 * jax.random.normal(k, (heads, width)) for k in keys[1:])
        self.bias = jnp.zeros(heads * width)

    def __call__(self, x, senders, receivers):
        heads, width = self.sender.shape
        h = jax.vmap(self.linear)(x).reshape(-1, heads, width)
        scores = jnp.sum(h * self.sender, -1)[senders] + jnp.sum(h * self.receiver, -1)[receivers]
        scores = jax.nn.leaky_relu(scores, 0.2)
        largest = jax.ops.segment_max(scores, receivers, _NODES)
        weights = jnp.exp(scores - jax.lax.stop_gradient(largest)[receivers])
        total = jax.ops.segment_sum(weights, receivers, _NODES)
        weights = weights / total[receivers]
        out = jax.ops.segment_sum(h[senders] * weights[..., None], receivers, _NODES)
        return out.reshape(len(x), -1) + self.bias


@model("GAT", "equinox", "PetarV-/GAT")
def gat() -> Family:
    keys = jax.random.split(KEY, 2)
    net = (_GATLayer(128, 8, 32, key=keys[0]), _GATLayer(256, 1, 7, key=keys[1]))

    def loss(net, example):
        (x, senders, receivers), targets = example
        senders, receivers = _with_self_loops(senders, receivers)
        return cross_entropy(net[1](jax.nn.elu(net[0](x, senders, receivers)), senders, receivers), targets)

    return of_equinox(net, loss, (_graphs(16, 128), labels(7, 16, _NODES)))


class _GIN(nn.Module):
    """A small network on each node's sum over its neighbours; every layer contributes to the output."""

    width: int = 128

    @nn.compact
    def __call__(self, x, senders, receivers):
        scores = nn.Dense(2)(x.sum(1))
        gather = jax.vmap(lambda x, s, r: jax.ops.segment_sum(x[s], r, _NODES))
        for layer in range(4):
            epsilon = self.param(f"epsilon_{layer}", nn.initializers.zeros, ())
            h = (1 + epsilon) * x + gather(x, senders, receivers)
            h = nn.relu(nn.LayerNorm()(nn.Dense(self.width)(h)))
            x = nn.relu(nn.LayerNorm()(nn.Dense(self.width)(h)))
            scores = scores + nn.Dense(2)(x.sum(1))
        return scores


@model("GIN", "linen", "weihua916/powerful-gnns")
def gin() -> Family:
    return of_linen(_GIN(), cross_entropy, _graphs(16, 32), labels(2, 16))


@model("Message passing network of molecules", "haiku", "google-deepmind/jraph: examples/ogbg_molpcba")
def message_passing() -> Family:
    """Updates edges, nodes and the whole graph in turn, each from its neighbourhood."""
    x, senders, receivers = _graphs(8, 16)
    edges = normal(8, _EDGES, 8)
    targets = labels(2, 8, 32).astype(jnp.float32)

    def update(width):
        return hk.Sequential([hk.Linear(width), jax.nn.relu, hk.Linear(width), hk.LayerNorm(-1, True, True)])

    def loss(example):
        (x, senders, receivers), edges, targets = example
        x, edges = hk.Linear(128)(x), hk.Linear(128)(edges)
        whole = jnp.zeros(128)
        for _ in range(3):
            seen = jnp.concatenate([edges, x[senders], x[receivers], jnp.tile(whole, (_EDGES, 1))], -1)
            edges = edges + update(128)(seen)
            received = jax.ops.segment_sum(edges, receivers, _NODES)
            sent = jax.ops.segment_sum(edges, senders, _NODES)
            x = x + update(128)(jnp.concatenate([x, received, sent, jnp.tile(whole, (_NODES, 1))], -1))
            whole = whole + update(128)(jnp.concatenate([whole, x.mean(0), edges.mean(0)]))
        logits = hk.Linear(32)(whole)
        return jnp.mean(jnp.logaddexp(0.0, (1 - 2 * targets) * logits))

    return of_haiku(loss, ((x, senders, receivers), edges, targets))


class _SchNet(eqx.Module):
    """Filters depend on the distance between two atoms; the energy is a sum over atoms."""

    atoms: eqx.nn.Embedding
    filters: list[eqx.nn.MLP]
    inputs: list[eqx.nn.Linear]
    outputs: list[eqx.nn.MLP]
    head: eqx.nn.MLP

    def __init__(self, width, depth, *, key):
        keys = jax.random.split(key, 2 + 3 * depth)

        def softplus(x):
            return jax.nn.softplus(x) - jnp.log(2.0)

        self.atoms = eqx.nn.Embedding(20, width, key=keys[0])
        self.head = eqx.nn.MLP(width, 1, width // 2, 1, softplus, key=keys[1])
        self.filters = [eqx.nn.MLP(32, width, width, 1, softplus, key=k) for k in keys[2 : 2 + depth]]
        self.inputs = [eqx.nn.Linear(width, width, use_bias=False, key=k) for k in keys[2 + depth : 2 + 2 * depth]]
        self.outputs = [eqx.nn.MLP(width, width, width, 1, softplus, key=k) for k in keys[2 + 2 * depth :]]

    def __call__(self, kinds, positions):
        offsets = positions[:, None] - positions[None]
        distances = jnp.sqrt(jnp.sum(offsets**2, -1) + 1e-6)
        bumps = jnp.exp(-10.0 * (distances[..., None] - jnp.linspace(0.0, 5.0, 32)) ** 2)
        x = jax.vmap(self.atoms)(kinds)
        for filter_, linear, output in zip(self.filters, self.inputs, self.outputs, strict=True):
            weights = jax.vmap(jax.vmap(filter_))(bumps) * (1 - jnp.eye(len(kinds)))[..., None]
            x = x + jax.vmap(output)(jnp.einsum("ijc,jc->ic", weights, jax.vmap(linear)(x)))
        return jnp.sum(jax.vmap(self.head)(x))


@model("SchNet, energies and forces", "equinox", "atomistic-machine-learning/schnetpack")
def schnet() -> Family:
    """Forces are the negative gradient of the energy, so the loss contains a derivative."""

    def loss(net, example):
        kinds, positions, energy, forces = example
        found, slope = jax.value_and_grad(net, argnums=1)(kinds, positions)
        return 0.01 * (found - energy) ** 2 + jnp.mean((slope + forces) ** 2)

    kinds = labels(20, 8, 16)
    batch = (kinds, 1.5 * normal(8, 16, 3), normal(8), normal(8, 16, 3))
    return of_equinox(_SchNet(96, 2, key=KEY), loss, batch)
