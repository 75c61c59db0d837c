"""Times a full private run on IMDB, by the closed form and by dpopt's engines on dense rows."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from benchmarks import arguments, records
from benchmarks.utility import runs
from benchmarks.utility.suites import papers

CLOSED = "closed form"
ENGINES = (CLOSED, "auto", "vmap")
TOLERANCE = 1e-4  # relative to the largest parameter; float32 sums depend on their order


def setting(engine: str, steps: int) -> runs.Setting:
    """DP-SGD as in DP2's Table 1, with one of `ENGINES`."""
    full = papers.dp2_imdb()[0].setting
    options = {} if engine == CLOSED else {"engine": engine}
    return dataclasses.replace(full, label=engine, task_options=options, steps=steps)


def check(steps: int, where: Path | None) -> dict[str, float]:
    """Each engine's largest difference in final parameters from the closed form, over the largest parameter.

    Raises:
        AssertionError: if a difference is not small, because comparing times would then make no sense.
    """
    trained = {}
    for engine in ENGINES:
        program = runs.Program(setting(engine, steps), where=where)
        program.train([0])
        trained[engine] = np.concatenate([np.ravel(x) for x in jax.tree.leaves(program.trained)])
    expected = trained[CLOSED]
    size = np.abs(expected).max()
    differences = {e: float(np.abs(trained[e] - expected).max() / size) for e in ENGINES if e != CLOSED}
    wrong = {e: d for e, d in differences.items() if not d < TOLERANCE}
    if wrong or not size > 0:
        raise AssertionError(f"after {steps} steps the engines differ from the closed form: {wrong}")
    return differences


def timed(engine: str, steps: int, where: Path | None) -> dict[str, Any]:
    """Times one run, after compilation; ``full_run_seconds`` is scaled up from a run of fewer steps."""
    (record,) = runs.Program(setting(engine, steps), where=where).train([0])
    per_step = record["seconds"] / steps
    return {
        "engine": engine,
        "steps": steps,
        "seconds": record["seconds"],
        "seconds_per_step": per_step,
        "full_run_steps": papers.IMDB_STEPS,
        "full_run_seconds": per_step * papers.IMDB_STEPS,
        "is_scaled": steps != papers.IMDB_STEPS,
        "sampling_seconds": record["sampling_seconds"],
        "compile_seconds": record["compile_seconds"],
        "epsilon": record["epsilon"],
        "score": record["score"],
    }


def markdown(content: dict[str, Any]) -> str:
    """The section of RESULTS.md."""
    device, first = content["environment"], content["runs"][0]
    lines = [
        f"DP-SGD as in DP2's Table 1: {first['full_run_steps']:,} steps of 64 reviews on average, 100 epochs. On "
        f"{device['device']}, {device['cores']} cores, without compilation and scoring. After "
        f"{content['checked_steps']} steps, parameters differ from the closed form's by at most "
        f"{max(content['differences'].values()):.0e} of the largest parameter. The engines get dense rows of 10,000.",
        "",
        "| gradients by | steps timed | ms / step | s / full run | over the closed form |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for run in content["runs"]:
        scaled = " (scaled up)" if run["is_scaled"] else ""
        lines.append(
            f"| {run['engine']} | {run['steps']:,} | {1e3 * run['seconds_per_step']:.2f} | "
            f"{run['full_run_seconds']:.1f}{scaled} | {run['seconds_per_step'] / first['seconds_per_step']:.1f} |"
        )
    sampling = f"Sampling the batches of those {first['steps']:,} steps took another {first['sampling_seconds']:.1f} s"
    return "\n".join(lines) + f"\n\n{sampling}; the engines sample in the same way."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.count(parser, "--steps", 39_000, "steps of the closed form (default 39000, which is 100 epochs)")
    arguments.count(parser, "--engine-steps", 2_000, "steps of dpopt's engines (default 2000; times are scaled up)")
    arguments.count(parser, "--checked-steps", 200, "steps after which all must agree (default 200)")
    arguments.data(parser)
    arguments.out(parser)


def run(options: argparse.Namespace) -> None:
    main(options.out, options.steps, options.engine_steps, options.checked_steps, options.data)


def main(out: Path, steps: int, engine_steps: int, checked_steps: int, where: Path | None) -> None:
    """Checks that all engines agree, times them, and writes ``imdb-speed.json``."""
    console = Console()
    differences = check(checked_steps, where)
    console.print(f"After {checked_steps} steps, all agree: {differences}")
    found: Sequence[dict[str, Any]] = [timed(e, steps if e == CLOSED else engine_steps, where) for e in ENGINES]
    content = {"environment": records.environment(), "checked_steps": checked_steps, "differences": differences}
    content = json.loads(json.dumps(content | {"runs": found}))
    records.write_json(out / "imdb-speed.json", content)
    console.print(markdown(content))
    console.print(f"Wrote {out / 'imdb-speed.json'}.")
