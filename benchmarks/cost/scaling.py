"""How time and memory of a private step grow with batch size, parameters, sequence length and devices."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import dpopt
from benchmarks import arguments, records
from benchmarks.cost import llm_scaling, models
from dpopt.flax import linen_loss
from dpopt.run.sharding import shard_batch


def _tokens(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2_000, (batch, length)).astype(np.int32)


def _normal(batch: int, size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(batch, size)).astype(np.float32)


# For each axis: the model's name, the sizes, and the model and input at each size.
AXES: dict[str, tuple[str, Sequence[int], Callable[[int], tuple[Any, np.ndarray]]]] = {
    "batch": ("MLP 256-512-10", (32, 64, 128, 256, 512), lambda n: (models.MLP((512,), 10), _normal(n, 256))),
    "parameters": (
        "MLP 256-width-10, batch 64, by width",
        (128, 256, 512, 1_024, 2_048),
        lambda n: (models.MLP((n,), 10), _normal(64, 256)),
    ),
    "sequence length": (
        "Transformer 1 x 64, batch 8",
        (32, 64, 128, 256),
        lambda n: (models.Transformer(2_000, 64, 1, 4, 2), _tokens(8, n)),
    ),
}


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The least-squares slope of log y over log x: y grows like x to this power."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def measure(
    model: Any, x: np.ndarray, repeats: int, place: Callable[[Any], Any] = lambda batch: batch
) -> dict[str, float]:
    """Measures a DP-Adam step: median seconds, and the bytes of scratch memory that the compiled step plans."""
    params = model.init(jax.random.key(0), x[:1])["params"]
    loss = linen_loss(model, optax.softmax_cross_entropy_with_integer_labels)
    optimizer = dpopt.dp_adam(
        1e-3, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=len(x), key=jax.random.key(0)
    )
    batch = place((jnp.asarray(x), jnp.zeros(len(x), jnp.int32)))
    args = (params, optimizer.init(params), batch, None)  # no row is padding
    step = jax.jit(dpopt.make_train_step(loss, optimizer)).lower(*args).compile()
    jax.block_until_ready(step(*args))
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(step(*args))
        seconds.append(time.perf_counter() - began)
    memory = step.memory_analysis()
    return {
        "parameters": sum(p.size for p in jax.tree.leaves(params)),
        "seconds": float(np.median(seconds)),
        "scratch_bytes": int(memory.temp_size_in_bytes) if memory is not None else 0,
    }


def growth(repeats: int = 15) -> list[dict[str, Any]]:
    """Measures every axis and fits exponents."""
    rows = []
    for axis, (model_name, sizes, make) in AXES.items():
        points = [{"size": n} | measure(*make(n), repeats) for n in track(sizes, axis, console=Console(stderr=True))]
        x = [p["parameters"] if axis == "parameters" else p["size"] for p in points]
        fits = {
            f"{what}_exponent": exponent(x, [max(p[what], 1e-9) for p in points])
            for what in ("seconds", "scratch_bytes")
        }
        rows.append({"axis": axis, "model": model_name, "points": points, **fits})
    return rows


def devices(repeats: int = 15) -> list[dict[str, Any]]:
    """Measures a step whose batch is sharded over 1, 2, 4... available devices; memory is per device."""
    available = jax.devices()
    model, x = models.MLP((512,), 10), _normal(512, 256)
    points = []
    for count in (n for n in (1, 2, 4, 8, 16) if n <= len(available)):
        mesh = dpopt.run.sharding.make_mesh(count)
        points.append({"size": count} | measure(model, x, repeats, lambda tree, mesh=mesh: shard_batch(tree, mesh)))
    fits = {
        f"{what}_exponent": exponent([p["size"] for p in points], [p[what] for p in points])
        for what in ("seconds", "scratch_bytes")
    }
    return [{"axis": "devices", "model": "MLP 256-512-10, batch 512", "points": points, **fits}]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The table for the terminal."""
    view = Table(title="A private step grows like (size)^exponent")
    for column in ("what grows", "model", "sizes", "time", "scratch memory"):
        view.add_column(column)
    for row in rows:
        view.add_row(*_cells(row))
    return view


def _cells(row: dict[str, Any]) -> list[str]:
    sizes = [p["size"] for p in row["points"]]
    memory = row.get("scratch_bytes_exponent")
    times = f"{row['seconds_exponent']:.2f} ({1e3 * row['points'][0]['seconds']:.1f} to "
    times += f"{1e3 * row['points'][-1]['seconds']:.1f} ms)"
    return [row["axis"], row["model"], f"{sizes[0]} to {sizes[-1]}", times, "" if memory is None else f"{memory:.2f}"]


def markdown(content: dict[str, Any]) -> str:
    """The table for RESULTS.md."""
    lines = [["what grows", "model", "sizes", "time: exponent", "scratch memory: exponent"], ["---"] * 5]
    lines += [_cells(row) for row in content["runs"]]
    device = content["environment"]
    return f"On {device['device']}, {device['cores']} cores.\n\n" + "\n".join(
        "| " + " | ".join(line) + " |" for line in lines
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, help="measure only the growth with devices, up to this many (simulated)")
    parser.add_argument("--llm", action="store_true", help="compile (but do not run) language models on many devices")
    parser.add_argument(
        "--size", action="append", help="with --llm: compile only 1.7, 7 or 30 billion parameters (repeatable)"
    )
    arguments.out(parser)


def run(options: argparse.Namespace) -> None:
    if not options.llm:
        main(options.out, options.devices)
        return
    unknown = set(options.size or ()) - set(llm_scaling.SIZES)
    if unknown:
        known = ", ".join(llm_scaling.SIZES)
        raise arguments.UsageError(f"--size must be one of {known}; got {sorted(unknown)}")
    counts = [options.devices] if options.devices else list(llm_scaling.DEVICES)
    llm_scaling.main(options.out, options.size or list(llm_scaling.SIZES), counts)


def main(out: Path, num_devices: int | None) -> None:
    """Measures and writes ``scaling.json``, or ``scaling-devices.json`` if a number of devices is given.

    On a CPU, JAX simulates that many devices. This shows the memory per device and the cost of communication, but no
    speed-up.
    """
    if num_devices is not None:
        jax.config.update("jax_num_cpu_devices", num_devices)
    rows = growth() if num_devices is None else devices()
    console = Console()
    console.print(table(rows))
    path = out / ("scaling.json" if num_devices is None else "scaling-devices.json")
    records.write_json(path, {"environment": records.environment(), "runs": rows})
    console.print(f"Wrote {path}.")
