"""A run with canaries, on one device or on many: ``python tests/programs/audited_run.py FOLDER STEPS``.

Prints its scores, and which canaries were included. It resumes from a checkpoint of fewer steps in FOLDER.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpopt
from dpopt import audit
from dpopt.run import sharding
from dpopt.run.checkpoint import Checkpointer


def loss_fn(w, example):
    return jnp.sum((jnp.tanh(w) - example) ** 2)


def main(folder: str, steps: int) -> None:
    x = np.random.default_rng(0).normal(size=(48, 64)).astype(np.float32)
    params = jnp.zeros(64)
    canaries = audit.gradient_canaries(params, 16, length=100.0, seed=1)
    planted = audit.plant(canaries, loss_fn, x, 48, seed=2)
    builder = dpopt.Builder(
        num_examples=planted.num_examples, expected_batch_size=16, steps=8, key=jax.random.key(0), pad_to=32
    )
    plan = planted.plan(builder.clip(1.0).noise(1.0).then(optax.sgd(0.1)).build())
    place = None
    if jax.device_count() > 1:
        mesh = sharding.make_mesh()

        def place(batch):
            return sharding.shard_batch(batch, mesh)

    with Checkpointer(folder, every=2) as checkpointer:
        result = plan.run(
            planted.loss_fn,
            params,
            planted.data,
            steps=steps,
            checkpointer=checkpointer,
            place_batch=place,
            replay=True,
            verify=False,
        )
    scores = planted.scores(params, result.params)
    print(json.dumps({"scores": scores.tolist(), "included": planted.included.tolist(), "steps": result.ledger.steps}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
