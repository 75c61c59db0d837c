"""Steps with correlated noise on 8 simulated devices, for test_sharding.py: results and shardings."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpopt
from dpopt import correlated
from dpopt.run import sharding

STEPS = 6
STRATEGIES = {
    "independent": correlated.independent(STEPS),
    "banded": correlated.banded(3, steps=STEPS),
    "redrawn": correlated.banded_inverse(3, steps=STEPS),
    "blt": correlated.blt([0.3, 0.1], [0.9, 0.5], steps=STEPS),
}
SPECS = {"w": P("fsdp", "tensor"), "b": P()}
SENDS = r" ((?:all-|collective-|reduce-scatter)[a-z-]*)\("


def loss(p, x):
    return jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) ** 2)


def trained(strategy, params, batch):
    """Parameters after a few steps, the collectives of a step, and the optimizer's state."""
    optimizer = dpopt.dp_sgd(
        0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=16, key=jax.random.key(1), noise=strategy
    )
    step = jax.jit(dpopt.make_train_step(loss, optimizer))
    mask, state = np.ones(16, bool), optimizer.init(params)
    sent = re.findall(SENDS, step.lower(params, state, batch, mask).compile().as_text())
    for _ in range(STEPS):
        params, state, _ = step(params, state, batch, mask)
    return params, sorted(sent), state


def main():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(64, 32)), jnp.float32), "b": jnp.zeros(32)}
    batch = jnp.asarray(rng.normal(size=(16, 64)), jnp.float32)
    found = []
    for kind in AxisType.Auto, AxisType.Explicit:
        mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(kind,) * 3)
        placed = {k: jax.device_put(p, NamedSharding(mesh, SPECS[k])) for k, p in params.items()}
        plain = None
        for name, strategy in STRATEGIES.items():
            want, _, _ = trained(strategy, params, batch)
            got, sent, state = trained(strategy, placed, sharding.shard_batch(batch, mesh, ("data", "fsdp")))
            plain = sent if name == "independent" else plain
            off = jax.tree.map(lambda a, b: float(np.max(np.abs(np.asarray(a) - np.asarray(b)))), got, want)
            kept = optax.tree.get(state, "buffers")
            parts = [x.addressable_shards[0].data.shape for x in jax.tree.leaves(kept)] if kept else []
            found.append([name, kind.name, max(off.values()), sent == plain, parts])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
