"""Adaptive clipping on one and on 8 simulated devices, for tests/test_adaptive.py; prints JSON."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpopt
from dpopt.run import sharding

SPECS = {"w": P("data", None), "b": P()}


def loss(p, x):
    return jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) ** 2)


def trained(params, batch, mask):
    """The result of a few steps."""
    clip = dpopt.adaptive.quantile_clip({"w": 1.0, "b": 0.3}, quantile=0.4, count_share=0.1)
    private = dict(l2_clip_norm=clip, noise_multiplier=1.0, expected_batch_size=24, key=jax.random.key(1))
    optimizer = dpopt.dp_adam_bc(1e-2, gamma=1e-3, **private)
    step = jax.jit(dpopt.make_train_step(loss, optimizer))
    state = optimizer.init(params)
    for _ in range(5):
        params, state, _ = step(params, state, batch, mask)
    norms = optax.tree.get(state, "clip_norms")
    return {
        "norms": [float(x) for x in jax.tree.leaves(norms)],
        "params": np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(params)]).tolist(),
    }


def main(kind: str) -> None:
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(64, 16)), jnp.float32), "b": jnp.zeros(16)}
    batch, mask = jnp.asarray(rng.normal(size=(32, 64)), jnp.float32), np.arange(32) < 27
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType[kind],))
    placed = {k: jax.device_put(p, NamedSharding(mesh, SPECS[k])) for k, p in params.items()}
    split = sharding.shard_batch((batch, mask), mesh, "data")
    print(json.dumps({"1": trained(params, batch, mask), "8": trained(placed, *split)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
