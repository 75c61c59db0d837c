"""A sharded run that dies on one number of devices and is resumed on another; prints JSON."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpopt
from dpopt.run import sharding
from dpopt.run.checkpoint import Checkpointer
from dpopt.run.loop import train


def main(directory, devices, dies_after):
    plan = (
        dpopt.Builder(num_examples=64, expected_batch_size=8, steps=10, key=jax.random.key(0), pad_to=32)
        .clip(1.0)
        .budget(epsilon=2.0, delta=1e-5, accountant="rdp")
        .then(optax.sgd(0.1))
        .build()
    )
    data = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    mesh = sharding.make_mesh(int(devices))

    def on_step(t, params):
        if t == int(dies_after):
            checkpointer.wait()
            print(json.dumps({"died": True, "journal": plan.journal.ledger.steps}), flush=True)
            os._exit(0)

    with Checkpointer(directory, every=3) as checkpointer:
        result = train(
            plan,
            lambda w, x: jnp.sum((w - x) ** 2),
            sharding.place_state(plan.optimizer, np.zeros(8, np.float32), mesh, sharding.fully_sharded),
            lambda indices: data[indices],
            place_batch=lambda rows: sharding.shard_batch(rows, mesh),
            checkpointer=checkpointer,
            on_step=on_step,
            steps=40,
            replay=True,
        )
    print(
        json.dumps(
            {
                "update": result.state.update,
                "steps": result.ledger.steps,
                "lost": result.lost,
                "segments": sum(not entry.is_step for entry in plan.journal.entries),
                "stopped": result.stopped,
                "epsilon": result.epsilon(delta=1e-5, accountant="rdp"),
                "budget": 2.0,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
