"""What clipped sums of the coverage cases send between 8 simulated devices, and their ordinary gradients do not."""

import json
import re
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1] / "ghost"))

import ghost_cases

import dpopt
from dpopt.ghost import memory
from dpopt.run import sharding

WAYS = {  # clips, and whether records are declared too large
    "recorded": (dpopt.FlatClip(0.5), False),
    "two passes": (dpopt.FlatClip(0.5), True),
    "one pass": (dpopt.LayerwiseClip(0.5), True),
}
ROWS = 176  # more than one block of 86 rows, so that the devices' shares are summed apart


def sent(function, *args):
    """The collectives of a compiled program, but for sums over devices: kinds and shapes."""
    text = jax.jit(function).lower(*args).compile().as_text()
    found = re.findall(r"= (.*) (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)
    return [(kind, re.findall(r"\w+\[[\d,]*\]", shape)) for shape, kind in found]


def main(part, parts):
    warnings.simplefilter("error")  # no fallback
    mesh, found, recorded = sharding.make_mesh(8), {}, memory._recorded
    for case in ghost_cases.CASES[part::parts]:
        loss_fn, params, batch = case(ghost_cases.Arrays())
        batch = jax.tree.map(lambda x: jnp.resize(x, (ROWS, *x.shape[1:])), batch)  # repeats the rows
        batch = sharding.shard_batch(batch, mesh)
        params = jax.device_put(params, jax.sharding.NamedSharding(mesh, P()))
        ordinary = sent(jax.grad(lambda p, b, f=loss_fn: jnp.mean(jax.vmap(f, (None, 0))(p, b))), params, batch)
        for way, (clip, is_streamed) in WAYS.items():
            memory._SMALL_BYTES = 0 if is_streamed else 1 << 26
            memory.allowed = lambda *_: 1 << 40
            memory._recorded = (lambda *_: None) if is_streamed else recorded

            def total(params, batch, scale, loss_fn=loss_fn, clip=clip):
                grads = dpopt.per_example_grads(loss_fn, engine="ghost")(params, batch, mask=None)
                return (grads if scale is None else grads.scale(scale)).clipped_sum(clip).sum

            for name, scale in (("no diagonal", None), ("a diagonal", params)):
                more = [c for c in sent(total, params, batch, scale) if c not in ordinary]
                found[f"{case.__name__}, {way}, {name}"] = more
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
