"""Small runs that the tests of loop, checkpoints and faults share; each compiles in one shape."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpopt
from dpopt.run import entropy
from dpopt.run.loop import train

ROOT = Path(__file__).parent.parent
DATA = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
DELTA = 1e-5
RDP = dict(delta=DELTA, accountant="rdp")  # looser than "pld" and many times faster


def loss_fn(w, x):
    return 0.5 * jnp.sum((jnp.tanh(w) - x) ** 2)


def fetch(indices):
    return DATA[indices]


def start():
    return jnp.zeros(3)


def tiny_plan(*, steps=12, seed=0, noise=1.0, budget=None, clip=1.0, num_examples=64, batch=8, rule=None, **more):
    """A plan whose batches all have one shape."""
    builder = dpopt.Builder(
        num_examples=num_examples, expected_batch_size=batch, steps=steps, key=jax.random.key(seed), pad_to=32, **more
    ).clip(clip)
    builder = builder.noise(noise) if budget is None else builder.budget(epsilon=budget, **RDP)
    return builder.then(rule or optax.adam(0.1)).build()


class Died(Exception):
    pass


def die_at(step):
    """What a run calls after every step, which ends it in one of them."""

    def on_step(t, params):
        if t == step:
            raise Died

    return on_step


def run(plan, **options):
    """Trains the small model, each time as a new process would, which knows of no other run."""
    entropy._runs.clear()
    return train(
        plan, options.pop("loss", loss_fn), options.pop("params", start()), options.pop("data", fetch), **options
    )


def script(path, *arguments, devices=1, timeout=300, **environment):
    """Starts a script in a process of its own and returns the JSON of the last line that it prints."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, str(path), *map(str, arguments)], env=env, capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        raise RuntimeError(f"{path} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])
