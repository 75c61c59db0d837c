"""What a draw of noise takes, beside `jax.random.normal`: time a number, and time to compile for many leaves."""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

import dpopt
from benchmarks import records, timing

TREES = {
    "one leaf of 5,000,000": [(5_000, 1_000)],
    "one leaf of 100,000": [(100_000,)],
    "100 leaves of 512 to 760": [(16 + i % 5, 32 + i % 7) for i in range(100)],
}


def draws_of_jax(key: jax.Array, tree: list[jax.Array]) -> list[jax.Array]:
    keys = jax.random.split(key, len(tree))
    return [jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, tree, strict=True)]


def measure(shapes: list[tuple[int, ...]], budget_s: float = 3.0) -> dict[str, Any]:
    """Adds noise to a tree of these shapes, as a step does, with either draw."""
    args = jax.random.key(0), [jnp.zeros(shape) for shape in shapes]
    compile_s, calls = {}, {}
    for name, draw in {"jax.random.normal": draws_of_jax, "dpopt": dpopt.noise.standard_normal_like}.items():
        began = time.perf_counter()
        added = jax.jit(lambda k, tree, draw=draw: jax.tree.map(jnp.add, tree, draw(k, tree))).lower(*args).compile()
        compile_s[name] = time.perf_counter() - began
        calls[name] = lambda added=added: jax.block_until_ready(added(*args))
    seconds = timing.interleaved(calls, budget_s)
    numbers = sum(leaf.size for leaf in args[1])
    return {
        "ns_per_number": {name: 1e9 * s / numbers for name, s in seconds.items()},
        "ratio": seconds["dpopt"] / seconds["jax.random.normal"],
        "compile_seconds": compile_s,
    }


def main(out: Path) -> None:
    """Measures every tree and writes ``noise.json``."""
    runs = [{"tree": name, **measure(shapes)} for name, shapes in TREES.items()]
    records.write_json(out / "noise.json", {"environment": records.environment(), "runs": runs})
    for run in runs:
        Console().print(run)
