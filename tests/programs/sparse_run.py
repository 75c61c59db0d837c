"""Noise on touched rows on one and on 8 simulated devices, for tests/test_sparse.py; prints JSON."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpopt
from dpopt.run import sharding
from dpopt.sparse import sparse_rows

SPECS = {"table": P("data", None), "w": P()}


def loss(p, example):
    return jnp.sum((p["table"][example["tokens"]].mean(0) @ p["w"] - example["y"]) ** 2)


def trained(params, batch, mask):
    """The result of a few steps."""
    clip = sparse_rows(
        1.0, tables=lambda p: p["table"], rows=lambda x: x["tokens"], most_rows=16, threshold=0.5, touch_share=0.5
    )
    private = dict(l2_clip_norm=clip, noise_multiplier=0.5, expected_batch_size=24, key=jax.random.key(1))
    optimizer = dpopt.dp_adam_bc(1e-2, gamma=1e-3, **private)
    step = jax.jit(dpopt.make_train_step(loss, optimizer))
    state, before = optimizer.init(params), params
    for _ in range(3):
        params, state, _ = step(params, state, batch, mask)
    moved = np.asarray(params["table"]) != np.asarray(before["table"])
    return {"moved": moved.any(1).tolist(), "params": np.asarray(params["table"]).ravel().tolist()}


def main(kind: str) -> None:
    rng = np.random.default_rng(0)
    params = {"table": jnp.asarray(rng.normal(size=(64, 4)), jnp.float32), "w": jnp.ones((4, 2))}
    batch = {"tokens": rng.integers(0, 12, (32, 3)), "y": rng.normal(size=(32, 2)).astype(np.float32)}
    mask = np.arange(32) < 27
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType[kind],))
    placed = {k: jax.device_put(p, NamedSharding(mesh, SPECS[k])) for k, p in params.items()}
    split = sharding.shard_batch((batch, mask), mesh, "data")
    print(json.dumps({"1": trained(params, batch, mask), "8": trained(placed, *split)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
