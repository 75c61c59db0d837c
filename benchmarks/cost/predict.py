"""Predicts the cost of a private run from the time of an ordinary gradient and the planner's ratios.

python -m benchmarks.cost.predict            # compares predictions with the recorded times of the speed table
python -m benchmarks.cost.predict --measure  # also times one microbatch of the CIFAR-10 recipe (minutes)
"""

import argparse
import contextlib
import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled

import dpopt
from benchmarks import records
from benchmarks.cost import timing

SPEED = records.RESULTS / "speed.json"
MEASURED = records.RESULTS / "predictions.json"


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a run whose every step processes ``microbatches`` of one size, one after the other.

    Costs per step (noise, the update) and per run (compilation, evaluation) are left out: they are small compared with
    many microbatches.
    """

    ordinary_seconds: float  # of an ordinary gradient of a microbatch, measured
    time_ratio: float  # of a clipped gradient, predicted
    ordinary_bytes: float  # of an ordinary gradient, without parameters and data, as compiled
    memory_ratio: float  # of a clipped gradient, predicted
    microbatches: float  # per step
    steps: int

    @property
    def step_seconds(self) -> float:
        return self.ordinary_seconds * self.time_ratio * self.microbatches

    @property
    def run_seconds(self) -> float:
        return self.step_seconds * self.steps

    @property
    def bytes(self) -> float:
        return self.ordinary_bytes * self.memory_ratio

    def __str__(self) -> str:
        return (
            f"an ordinary gradient of a microbatch takes {duration(self.ordinary_seconds)} and "
            f"{self.ordinary_bytes / 1e9:.3g} GB here (measured)\n"
            f"a clipped one should take {self.time_ratio:.2f} times the time and {self.memory_ratio:.2f} times the "
            f"memory (planned): {self.bytes / 1e9:.3g} GB\n"
            f"so a step of {self.microbatches:.4g} microbatches takes about {duration(self.step_seconds)}, and "
            f"{self.steps:,} steps about {duration(self.run_seconds)}"
        )


def duration(seconds: float) -> str:
    """A time in a readable unit.

    >>> duration(0.25), duration(90), duration(7_200), duration(200_000)
    ('0.25 s', '90 s', '2 h', '2.31 days')
    """
    for unit, size, least in (("days", 86_400, 1.5), ("h", 3_600, 1.5), ("min", 60, 2)):
        if seconds >= least * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def ratios(explanation: dpopt.ghost.Explanation) -> tuple[float, float]:
    """Predicted time and memory of ``engine='auto'`` over an ordinary gradient of the same batch."""
    plan, way, memory = explanation.plan, explanation.way, explanation.memory
    if way.plan is None:
        operations, size = plan.vmap_cost, memory.vmap
    elif not way.plan.streamed:
        operations, size = plan.ghost_cost, memory.recorded(way.parts)
    else:
        used = {leaf.leaf for leaf in plan.leaves if leaf.contacts}
        second = 0.0 if used <= way.plan.single else plan.ordinary_cost
        operations, size = plan.ghost_cost + second, memory.streamed
    return operations / max(plan.ordinary_cost, 1.0), size / max(memory.ordinary, 1.0)


def explained(loss_fn: Callable, params: Any, batch: Any, *, may_split: bool) -> dpopt.ghost.Explanation:
    """`dpopt.explain` for a batch, without printing. Unless it may split, the batch stays one microbatch."""
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    with contextlib.redirect_stdout(io.StringIO()):
        found = dpopt.explain(loss_fn, params, example, batch_size=len(jax.tree.leaves(batch)[0]))
    if may_split:
        return found
    way = dpopt.ghost.choose(found.plan, 1.25, may_split=False, may_vmap=True)
    return dataclasses.replace(found, way=way)


def ordinary(loss_fn: Callable, params: Any, batch: Any) -> Compiled:
    """The compiled mean gradient of a batch."""
    mean = jax.grad(lambda params, batch: jnp.mean(jax.vmap(loss_fn, (None, 0))(params, batch)))
    return jax.jit(mean).lower(params, batch).compile()


def private(loss_fn: Callable, params: Any, batch: Any) -> Compiled:
    """The compiled clipped sum of a batch, as one microbatch."""
    size = len(jax.tree.leaves(batch)[0])
    grads = dpopt.per_example_grads(loss_fn, microbatch_size=size)
    return (
        jax.jit(lambda p, b: grads(p, b, mask=None).clipped_sum(dpopt.FlatClip(1.0)).sum).lower(params, batch).compile()
    )


def cost(loss_fn: Callable, params: Any, batch: Any, *, microbatches: float, steps: int) -> Cost:
    """Times an ordinary gradient of a microbatch and predicts the rest."""
    gradient = ordinary(loss_fn, params, batch)
    seconds = timing.interleaved({"ordinary": lambda: jax.block_until_ready(gradient(params, batch))}, 0.0, at_least=3)
    size = gradient.memory_analysis().temp_size_in_bytes
    time_ratio, memory_ratio = ratios(explained(loss_fn, params, batch, may_split=False))
    return Cost(seconds["ordinary"], time_ratio, size, memory_ratio, microbatches, steps)


def against_speed_table(only: str = "") -> list[dict[str, Any]]:
    """Planned and recorded time ratios of the families whose names contain ``only``."""
    from benchmarks.cost.families import FAMILIES

    rows = [row for row in json.loads(SPEED.read_text())["runs"] if only in row["family"]]
    found = []
    for row in rows:
        family = FAMILIES[row["family"]]()
        planned, _ = ratios(explained(*family, may_split=True))
        recorded = {name: row["ratio"][name] for name in ("ghost whole", "ghost", "auto")}
        found.append({"family": row["family"], "planned": planned, "recorded": recorded})
    return found


def measured(microbatch: int) -> dict[str, Any]:
    """Predicts one microbatch of the CIFAR-10 recipe, on random images, and times both gradients in turns."""
    from benchmarks import cifar10_recipe

    loss_fn, params = cifar10_recipe.loss_and_params()
    batch = cifar10_recipe.noise_batch(microbatch)
    predicted = cost(loss_fn, params, batch, microbatches=1, steps=1)
    ways = {"ordinary": ordinary(loss_fn, params, batch), "private": private(loss_fn, params, batch)}
    calls = {name: lambda way=way: jax.block_until_ready(way(params, batch)) for name, way in ways.items()}
    return {
        "microbatch": microbatch,
        "multiplicity": cifar10_recipe.MULTIPLICITY,
        "planned": {"time": predicted.time_ratio, "memory": predicted.memory_ratio},
        "seconds": timing.interleaved(calls, 20.0),
        "bytes": {name: way.memory_analysis().temp_size_in_bytes for name, way in ways.items()},
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="also time one microbatch of the CIFAR-10 recipe")
    parser.add_argument(
        "--microbatch", type=int, default=2, help="images in the microbatch, with 16 augmentations each (default 2)"
    )
    parser.add_argument("--out", type=Path, default=MEASURED, help="the JSON file that --measure writes")
    options = parser.parse_args(argv)
    for row in against_speed_table():
        recorded = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["recorded"].items())
        print(f"{row['family']}: planned {row['planned']:.2f}; recorded {recorded}")
    if options.measure:
        found = measured(options.microbatch)
        records.write_json(options.out, {"environment": records.environment(), "run": found})
        for what, key in (("time", "seconds"), ("memory", "bytes")):
            ratio = found[key]["private"] / found[key]["ordinary"]
            print(f"CIFAR-10 recipe, {what}: planned {found['planned'][what]:.2f}; measured {ratio:.2f}")


if __name__ == "__main__":
    main()
