"""Model, data and plan of the examples on several devices: a small network, Adam, epsilon 3."""

import argparse
import contextlib
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpopt
from dpopt import loading, sharding

NUM_EXAMPLES, FEATURES, HIDDEN = 512, 16, 32
STEPS = 6


def make_plan():
    return (
        dpopt.Builder(
            # Batches are padded to a multiple of the number of devices.
            num_examples=NUM_EXAMPLES, expected_batch_size=64, steps=STEPS, key=jax.random.key(0), pad_to=96,
        )
        .clip(1.0)
        .budget(epsilon=3.0, delta=1e-4, accountant="rdp")
        .then(optax.adam(1e-2, eps=1e-3))
        .build()
    )  # fmt: skip


def make_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_EXAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.float32)}


def make_params():
    rng = np.random.default_rng(1)
    kernel = rng.normal(size=(FEATURES, HIDDEN)).astype(np.float32) / 4
    out = rng.normal(size=HIDDEN).astype(np.float32) / 4
    return {"hidden": {"kernel": kernel, "bias": np.zeros(HIDDEN, np.float32)}, "out": out}


def loss_fn(params, example):
    hidden = jnp.tanh(example["x"] @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return optax.sigmoid_binary_cross_entropy(hidden @ params["out"], example["y"])


def parsed(description):
    """The options of an example that runs on the devices of one process."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="?", type=int, help="how many to use (default: all)")
    parser.add_argument("--replay", action="store_true", help="noise and batches follow from the plan's key alone")
    return parser.parse_args()


def train_on(mesh, layout, directory=None, plan=None, replay=False):
    """Trains on a mesh; with a directory, saves checkpoints there and resumes from them.

    With ``replay``, two runs can be compared.
    """
    plan, data = plan or make_plan(), make_data()
    with contextlib.ExitStack() as stack:
        checkpointer = None
        if directory is not None:
            from dpopt.run.checkpoint import Checkpointer

            checkpointer = stack.enter_context(Checkpointer(directory, every=2))
        return dpopt.train(
            plan,
            loss_fn,
            sharding.place_state(plan.optimizer, make_params(), mesh, layout),
            loading.sharded_rows(data, NUM_EXAMPLES, mesh),  # each host reads the rows of its own devices
            place_batch=lambda rows: sharding.shard_batch(rows, mesh),
            checkpointer=checkpointer,
            replay=replay,
        )


def report(result, mesh):
    """Prints the result of the run as one line of JSON."""
    everywhere = jax.jit(lambda tree: tree, out_shardings=sharding.replicated(result.params, mesh))(result.params)
    params = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(everywhere)])
    print(
        json.dumps(
            {
                "devices": mesh.size,
                "processes": jax.process_count(),
                "steps": result.ledger.steps,
                "lost": result.lost,
                "epsilon": result.epsilon(delta=1e-4, accountant="rdp"),
                "params": params.tolist(),
                "sha256": hashlib.sha256(params.tobytes()).hexdigest(),
            }
        )
    )
