"""Clipped sums and steps of a given number of rows on meshes of 8 simulated devices, for test_sharding.py."""

import json
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpopt
from dpopt.ghost import memory, streamed
from dpopt.run import sharding

MESHES = {"data": 8}, {"data": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}
BY_LAYER = dpopt.LayerwiseClip(1.0, scanned={"w": False, "v": False, "b": False, "layers": True})


def loss(p, example, weight=lambda q: q):
    x = jnp.tanh(example["x"] @ p["w"])
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, q: (x + jnp.tanh(x @ weight(q)), None)), x[None], p["layers"])
    return -jax.nn.log_softmax(x[0] @ p["v"] + p["b"])[example["y"]]


def normalised(p, example):
    return loss(p, example, weight=lambda q: q / jnp.linalg.norm(q, axis=0, keepdims=True))


CLIPS = {
    "flat": (loss, dpopt.FlatClip(1.0), "recorded"),
    "two passes": (loss, dpopt.FlatClip(1.0), "streamed"),
    "one pass": (loss, BY_LAYER, "streamed"),
    "one pass, normalised layers": (normalised, BY_LAYER, "streamed"),
}


def problem(size):
    k = jax.random.split(jax.random.key(0), 5)
    params = {
        "w": jax.random.normal(k[0], (16, 32)),
        "layers": jax.random.normal(k[1], (3, 32, 32)) / 6,
        "v": jax.random.normal(k[2], (32, 8)),
        "b": jnp.zeros(8),
    }
    return params, {"x": jax.random.normal(k[3], (size, 16)), "y": jax.random.randint(k[4], (size,), 0, 8)}


def placed(params, batch, axes, kind):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))
    split = ("data", "fsdp") if "fsdp" in axes else "data"
    fsdp, tensor = "fsdp" if "fsdp" in axes else None, "tensor" if "tensor" in axes else None
    specs = {"w": P(fsdp, tensor), "layers": P(None, fsdp, tensor), "v": P(tensor, fsdp), "b": P()}
    params = {k: jax.device_put(p, NamedSharding(mesh, specs[k])) for k, p in params.items()}
    return params, sharding.shard_batch(batch, mesh, split)


def trained(loss, params, batch, clip):
    """A clipped sum, and the parameters after a step, whose noise is the same on any mesh."""
    size = len(batch["y"])
    mask = jnp.arange(size) != 3
    grads = dpopt.per_example_grads(loss, engine="ghost", microbatch_size=size)
    total = jax.jit(lambda p, b: grads(p, b, mask=mask).clipped_sum(clip).sum)
    optimizer = dpopt.dp_adam(
        0.01, l2_clip_norm=clip, noise_multiplier=1.0, expected_batch_size=size, key=jax.random.key(1)
    )
    step = jax.jit(dpopt.make_train_step(loss, optimizer, engine="ghost", microbatch_size=size))
    return jax.device_get((total(params, batch), step(params, optimizer.init(params), batch, mask)[0]))


def main(size, meshes):
    warnings.simplefilter("error")  # no fallback
    params, batch = problem(size)
    found, real, recorded = [], streamed.clipped_sum, memory._recorded

    def counted(*args):
        counted.calls += 1
        return real(*args)

    streamed.clipped_sum = counted
    for name, (loss, clip, way) in CLIPS.items():
        # Records are small here: to stream them, declare that no number of parts fits.
        memory._SMALL_BYTES = 0 if way == "streamed" else 1 << 26
        memory.allowed = lambda *_: 1 << 40
        memory._recorded = (lambda *_: None) if way == "streamed" else recorded
        counted.calls = 0
        want = trained(loss, params, batch, clip)
        for axes in MESHES[:meshes]:
            for kind in AxisType.Auto, AxisType.Explicit:
                got = trained(loss, *placed(params, batch, axes, kind), clip)
                pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
                found.append([name, list(axes), kind.name, max(float(np.max(np.abs(a - b))) for a, b in pairs)])
        assert (counted.calls > 0) == (way == "streamed"), name
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
