"""A run to be killed: trains in a directory, resumes what it finds there, and prints its result as JSON."""

import hashlib
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpopt
from dpopt.run.checkpoint import Checkpointer
from dpopt.run.loop import train

STEPS = 60


def main(directory: str, released_file: str, replay: str = "") -> None:
    data = np.random.default_rng(0).normal(size=(256, 6)).astype(np.float32)
    plan = (
        dpopt.Builder(num_examples=256, expected_batch_size=16, steps=STEPS, key=jax.random.key(5), pad_to=48)
        .clip(1.0)
        .noise(1.1)
        .then(optax.adam(0.05))
        .build()
    )
    params = {"w": jnp.ones((6, 4)), "b": jnp.zeros(4)}

    def loss_fn(p, x):
        return jnp.sum(jnp.square(jnp.tanh(x @ p["w"] + p["b"]) - x[:4]))

    # What leaves the process, as others see it: one line per step.
    with open(released_file, "a") as released, Checkpointer(directory, every=7, keep=2) as checkpointer:

        def on_step(t, p):
            released.write(f"{t} {np.asarray(p['w']).tobytes().hex()}\n")
            released.flush()

        def fetch(indices):
            time.sleep(0.01)  # otherwise the run ends before it can be killed
            return data[indices]

        print("started", flush=True)
        result = train(plan, loss_fn, params, fetch, checkpointer=checkpointer, on_step=on_step, replay=bool(replay))
    leaves = jax.tree.leaves((result.params, result.state.opt_state))
    leaves = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
    table = [f"{t:4d} {plan.epsilon(t, delta=1e-5):.6f}" for t in (1, 30, STEPS)]
    table.append(f"{result.ledger.steps:4d} {result.epsilon(delta=1e-5):.6f} {result.message}")
    print(
        json.dumps(
            {
                "state": hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest(),
                "params": np.asarray(result.params["w"]).tobytes().hex(),
                "ledger": result.ledger.to_json(),
                "steps": result.ledger.steps,
                "table": table,
                "lost": result.lost,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
