"""The cost of drawing noise compared with `jax.random.normal`: time per number, and compile time for many leaves.

Also the time that noise correlated over steps adds to a step of a language model with 50 million parameters.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

import dpopt
from benchmarks import arguments, records
from benchmarks.cost import llm_scaling, timing
from dpopt import correlated

TREES = {
    "one leaf of 5,000,000": [(5_000, 1_000)],
    "one leaf of 100,000": [(100_000,)],
    "100 leaves of 512 to 760": [(16 + i % 5, 32 + i % 7) for i in range(100)],
}

BANDS, STEPS = 4, 1_000
MODEL, EXAMPLES, TOKENS = (8, 512), 8, 64  # layers and width; examples per step; tokens per example


def draws_of_jax(key: jax.Array, tree: list[jax.Array]) -> list[jax.Array]:
    keys = jax.random.split(key, len(tree))
    return [jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, tree, strict=True)]


def measure(shapes: list[tuple[int, ...]], budget_s: float = 3.0) -> dict[str, Any]:
    """Times adding noise to a tree of these shapes, as a step does, with either generator."""
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


def steps(budget_s: float = 60.0) -> dict[str, Any]:
    """Times a DP-SGD step with independent and with correlated noise; states are donated, as in a training loop."""
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = llm_scaling.parameters(*MODEL)
    batch = jax.random.randint(keys[1], (EXAMPLES, TOKENS + 1), 0, llm_scaling.VOCABULARY)
    strategies = {
        "independent": None,
        f"banded, {BANDS} bands": correlated.banded(BANDS, steps=STEPS),
        f"banded inverse, {BANDS} bands": correlated.banded_inverse(BANDS, steps=STEPS),
    }
    calls, states, compiled_bytes = {}, {}, {}
    for name, strategy in strategies.items():
        optimizer = dpopt.dp_sgd(
            0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=EXAMPLES, key=keys[0], noise=strategy
        )
        make_step = dpopt.make_train_step(llm_scaling.loss, optimizer)
        params = jax.tree.map(lambda p: 0.02 * jnp.ones(p.shape), shapes)
        states[name] = params, optimizer.init(params)
        jitted = jax.jit(lambda p, s, b, f=make_step: f(p, s, b, None)[:2], donate_argnums=(0, 1))
        with jax.numpy_rank_promotion("allow"):
            step = jitted.lower(*states[name], batch).compile()
        compiled_bytes[name] = step.memory_analysis().temp_size_in_bytes

        def call(name=name, step=step):
            states[name] = jax.block_until_ready(step(*states[name], batch))
            return states[name]

        calls[name] = call
    seconds = timing.interleaved(calls, budget_s)
    return {
        "model": f"{sum(p.size for p in jax.tree.leaves(shapes)):,} parameters, {EXAMPLES} x {TOKENS} tokens",
        "seconds": seconds,
        "ratio": {name: s / seconds["independent"] for name, s in seconds.items()},
        "scratch_bytes": compiled_bytes,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.out(parser)


def run(options: argparse.Namespace) -> None:
    main(options.out)


def main(out: Path) -> None:
    """Measures draws for every tree and whole steps, and writes ``noise.json``."""
    runs = [{"tree": name, **measure(shapes)} for name, shapes in TREES.items()]
    whole = steps()
    records.write_json(out / "noise.json", {"environment": records.environment(), "runs": runs, "steps": whole})
    for run in (*runs, whole):
        Console().print(run)
