"""A user-level run on 8 simulated devices, or one; prints JSON for tests/test_users.py."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpopt
from dpopt import users
from dpopt.run import sharding


def main(devices: int) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(40, size=300)
    data = {"x": rng.normal(size=(300, 5)).astype(np.float32), "y": rng.normal(size=300).astype(np.float32)}
    groups = users.group(ids, max_examples=4, how="resample", seed=3)
    builder = dpopt.Builder(
        num_examples=groups.num_users, expected_batch_size=16, steps=5, key=jax.random.key(0), unit="user", pad_to=32
    )
    plan = builder.clip(0.5).noise(1.0).then(optax.adam(0.1)).build()

    def loss_fn(p, example):
        return jnp.square(jnp.tanh(example["x"] @ p["w"]) @ p["v"] - example["y"])

    params = {"w": jnp.ones((5, 8)) / 5, "v": jnp.ones(8) / 8}
    mesh = sharding.make_mesh(devices)
    result = plan.run(
        users.per_user_grads(loss_fn),
        params,
        groups.batches(data),
        replay=True,
        place_batch=lambda rows: sharding.shard_batch(rows, mesh),
    )
    print(
        json.dumps(
            {
                "devices": jax.device_count(),
                "params": np.concatenate([np.ravel(x) for x in jax.tree.leaves(result.params)]).tolist(),
                "unit": result.unit,
                "steps": result.ledger.steps,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
