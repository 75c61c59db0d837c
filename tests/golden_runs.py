"""Replays runs recorded from the authors' own code: their gradients, their noise, our optimizer."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import enable_x64 as enable_x64

from dpopt import noise
from dpopt.engines import stacked

FOLDER = pathlib.Path(__file__).parent / "golden"
RTOL64 = 1e-10  # of the array's maximum
RTOL32 = 2e-5  # a float32 run against a float64 record, over 30 to 40 steps


@dataclasses.dataclass(frozen=True)
class Run:
    """One recorded run."""

    meta: dict
    arrays: dict

    def tree(self, prefix):
        """The leaves named ``<prefix>__*`` as a dictionary."""
        start = prefix + "__"
        return {k.removeprefix(start): v for k, v in self.arrays.items() if k.startswith(start)}

    def has(self, prefix):
        return bool(self.tree(prefix))

    def at(self, prefix, t):
        return {k: v[t] for k, v in self.tree(prefix).items()}


def load(name):
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = {k: file[k] for k in file.files}
    return Run(json.loads(str(arrays.pop("meta"))), arrays)


@dataclasses.dataclass(frozen=True)
class EpsClip:
    """The clip of some reference programs, ``min(1, C / (norm + eps))``: it differs from ours by eps / norm."""

    l2_clip_norm: float
    eps: float

    @property
    def sensitivity(self):
        return self.l2_clip_norm

    def coefficients(self, leaf_norms):
        c = jnp.minimum(1.0, self.l2_clip_norm / (stacked.global_norms(leaf_norms) + self.eps))
        return jax.tree.map(lambda _: c, leaf_norms)


def cast(tree, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def replay(
    monkeypatch, run, optimizer, dtype, *, noise_names=("z",), grads="eg", extra=None, loss_fn=None, jit=jax.jit
):
    """Runs ``optimizer`` on the recorded gradients (or on ``loss_fn`` and the recorded data) with the recorded noise.

    Returns the parameters after every step and the states, a list each.
    """
    queue = []

    def recorded(key, tree):
        del key
        return jax.tree.map(lambda z, leaf: jnp.asarray(z, leaf.dtype), queue.pop(0), tree)

    monkeypatch.setattr(noise, "standard_normal_like", recorded)
    params = cast(run.tree("init"), dtype)
    state = optimizer.init(params)
    all_params, all_states = [], []

    @jit
    def step(params, state, per_example, draws, extras):
        queue[:] = draws
        if loss_fn is not None:
            per_example = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(params, per_example)
        updates, state = optimizer.update(per_example, state, params, **extras)
        assert not queue, "the optimizer drew less noise than was recorded"
        return optax.apply_updates(params, updates), state

    for t in range(run.meta["T"]):
        inputs = cast(run.at(grads, t), dtype) if loss_fn is None else (run.arrays["x"][t], run.arrays["y"][t])
        draws = [run.at(name, t) for name in noise_names if run.has(name)]
        params, state = step(params, state, inputs, draws, {} if extra is None else extra(t, params))
        all_params.append(params)
        all_states.append(state)
    return all_params, all_states


def find_state(state, *kinds):
    """The first part of an optimizer's state that is of one of these kinds."""
    parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return next(x for x in parts if isinstance(x, kinds))


def error(run, prefix, trees):
    """Largest deviation from the record, over all steps, relative to each leaf's largest recorded value."""
    worst = 0.0
    for leaf, recorded in run.tree(prefix).items():
        ours = np.stack([np.asarray(tree[leaf], np.float64) for tree in trees])
        assert np.isfinite(recorded).all()
        size = np.max(np.abs(recorded), initial=1e-300)
        worst = np.maximum(worst, np.max(np.abs(ours - recorded)) / size)  # NaN stays NaN, and fails
    return worst


def small_net(params, example):
    """Model S of the records: a tanh layer, a bilinear form of its outputs, softmax cross-entropy."""
    x, y = example
    h = jnp.tanh(x @ params["w"] + params["b"])
    logits = jnp.einsum("i,j,ijk->k", h[:3], h[1:5], params["u"])
    return -jax.nn.log_softmax(logits)[y]


def logistic(params, example):
    """Model logreg: sigmoid cross-entropy."""
    x, y = example
    z = (x @ params["w"] + params["b"])[0]
    return jax.nn.softplus(z) - y * z


def factorization(params, example):
    """Model matfac: half the squared error of one entry."""
    (i, j), y = example
    return 0.5 * (params["w1"][i] @ params["w2"][j] - y) ** 2


def tiny_params(dtype=jnp.float32):
    """Parameters of a linear regression, which compiles in no time."""
    return {"w": jnp.array([0.5, -1.0, 2.0], dtype), "b": jnp.array(0.1, dtype)}


def tiny_loss(params, example):
    return jnp.sum((example["x"] @ params["w"] + params["b"] - example["y"]) ** 2)


def tiny_batch(seed=1):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=shape), jnp.float32) for k, shape in (("x", (4, 3)), ("y", (4,)))}


MODELS = {"S": small_net, "logreg": logistic, "matfac": factorization}
