"""A run with augmentation multiplicity on 8 simulated devices, or one; prints JSON for tests/test_augmentation.py."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpopt
from dpopt.augmentation import augmented
from dpopt.run import sharding


def loss_fn(p, example):
    return jnp.square(jnp.tanh(example["x"] @ p["w"]) @ p["v"] - example["y"])


def flip_and_jitter(example, key):
    flip, noise = jax.random.split(key)
    x = jnp.where(jax.random.bernoulli(flip), example["x"], example["x"][::-1])
    return example | {"x": x + 0.3 * jax.random.normal(noise, x.shape)}


def main(devices: int) -> None:
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(200, 5)).astype(np.float32), "y": rng.normal(size=200).astype(np.float32)}
    builder = dpopt.Builder(num_examples=200, expected_batch_size=16, steps=5, key=jax.random.key(0), seed=1, pad_to=32)
    plan = builder.clip(0.5).noise(1.0).then(optax.adam(0.1)).build()
    mesh = sharding.make_mesh(devices)
    result = plan.run(
        augmented(loss_fn, flip_and_jitter, multiplicity=4),
        {"w": jnp.ones((5, 8)) / 5, "v": jnp.ones(8) / 8},
        data,
        replay=True,
        place_batch=lambda rows: sharding.shard_batch(rows, mesh),
    )
    params = np.concatenate([np.ravel(x) for x in jax.tree.leaves(result.params)])
    print(json.dumps({"devices": jax.device_count(), "params": params.tolist()}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
