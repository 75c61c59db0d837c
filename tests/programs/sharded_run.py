"""Runs on 8 simulated devices; prints JSON for tests/run/test_sharding.py."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import common

from dpopt import noise
from dpopt.run import entropy, loading, sharding
from dpopt.run.journal import Journal


def collectives(plan, mesh, layout, engine, microbatch_size=None):
    """The collective operations of a compiled step, with the shapes that they move."""
    data = common.make_data()
    state = sharding.place_state(plan.optimizer, common.make_params(), mesh, layout)
    batch, mask = sharding.shard_batch(({k: v[:96] for k, v in data.items()}, np.ones(96, bool)), mesh)
    step = jax.jit(plan.train_step(common.loss_fn, engine=engine, microbatch_size=microbatch_size))
    text = step.lower(state.params, state.opt_state, batch, mask).compile().as_text()
    lines = [line for line in text.splitlines() if re.search(r" (all-|collective-|reduce-scatter)", line)]
    found = [re.search(r"= (.*?) ([a-z-]+)\(", line).groups() for line in lines if "= " in line]
    return [(op, shape) for shape, op in found if op.startswith(("all-", "collective-", "reduce-scatter"))]


def draws():
    """Noise on 1, 2 and 8 devices, split along the first and the last axis, and the collectives."""
    key, tree = jax.random.key(3), {"small": (40, 24), "vector": (96,), "large": (512, 64)}
    tree = {name: jnp.zeros(shape) for name, shape in tree.items()}
    found, sent = [], []
    for count in (1, 2, 8):
        mesh = sharding.make_mesh(count)
        for spec in (jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec(None, "data")):
            cut = {n: spec if x.ndim == 2 else jax.sharding.PartitionSpec("data") for n, x in tree.items()}
            places = {name: jax.sharding.NamedSharding(mesh, cut[name]) for name in tree}
            draw = jax.jit(lambda k: noise.standard_normal_like(k, tree), out_shardings=places).lower(key).compile()
            sent += re.findall(r" ((?:all|collective|reduce-scatter)[a-z-]*)\(", draw.as_text())
            found.append("".join(np.asarray(x).tobytes().hex() for x in jax.tree.leaves(draw(key))))
    return found, sent


def rows_read():
    """Rows read of a batch of 96, split along the first of two mesh axes, and whether the result is right."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    asked = []

    def fetch(indices):
        asked.append(len(indices))
        return {"x": np.stack([indices, -indices], 1), "y": indices % 7}

    indices = np.random.default_rng(0).permutation(1_000)[:96]
    batch = loading.sharded_rows(fetch, 1_000, mesh, "data")(indices)
    own = asked.copy()
    right = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), batch, fetch(indices))
    placed = sharding.shard_batch(batch, mesh, "data")
    return own, all(jax.tree.leaves(right)), placed["x"] is batch["x"]


def main():
    plan = common.make_plan()
    meshes = {n: sharding.make_mesh(n) for n in (1, 2, 4, 8)}
    trajectories = {}
    for n in (1, 2, 4):
        entropy._runs.clear()  # as in a process of its own
        fresh = dataclasses.replace(plan, journal=Journal())
        result = common.train_on(meshes[n], sharding.replicated, plan=fresh, replay=True)
        leaves = [np.asarray(x).ravel() for x in jax.tree.leaves(result.params)]
        trajectories[n] = np.concatenate(leaves).tolist()
    drawn, sent = draws()
    print(
        json.dumps(
            {
                "draws": drawn,
                "rows read": rows_read(),
                "sent for draws": sent,
                "trajectories": trajectories,
                "data_parallel": {e: collectives(plan, meshes[8], sharding.replicated, e) for e in ("vmap", "ghost")},
                "in microbatches": {
                    e: collectives(plan, meshes[8], sharding.replicated, e, 32) for e in ("vmap", "ghost")
                },
                "fully_sharded": {"vmap": collectives(plan, meshes[8], sharding.fully_sharded, "vmap")},
            }
        )
    )


if __name__ == "__main__":
    main()
