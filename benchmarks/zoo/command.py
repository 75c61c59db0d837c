"""`python -m benchmarks zoo`: measures every model and compares the results with targets."""

import argparse
import concurrent.futures
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks import arguments, records
from benchmarks.zoo import summary
from benchmarks.zoo.measure import about, measure
from benchmarks.zoo.registry import ZOO

_WIDTH = 180  # columns, where the output is not a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="measure only models whose name contains this text")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="seconds to spend on timing each model (default 10)"
    )
    arguments.out(parser)


def run(options: argparse.Namespace) -> None:
    main(options.out, options.only, options.seconds)


def main(out: Path, only: str | None, budget_s: float) -> None:
    """Measures every model (or those whose name contains ``only``) and writes ``zoo.json``.

    Earlier results from the same machine and versions are kept unless measured again. If a model fails, the others are
    still measured.

    Raises:
        SystemExit: if no name matches; or, after all are measured, if a model failed.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    names = [n for n in ZOO if only is None or only.lower() in n.lower()]
    if not names:
        raise SystemExit(f"no model matches {only!r}; there are: {'; '.join(ZOO)}")
    path = out / "zoo.json"
    environment = records.environment((*records.PACKAGES, "equinox", "dm-haiku"))
    before = json.loads(path.read_text()) if path.exists() else {"environment": None, "runs": []}
    found = {r["model"]: r for r in before["runs"] if before["environment"] == environment}
    for name in track(names, "measuring", console=console):
        try:
            found[name] = in_new_process(measure, name, ZOO[name], budget_s)
        except Exception as error:
            found[name] = about(name, ZOO[name]) | {"error": f"{type(error).__name__}: {error}"}
        console.print(*summary.cells(found[name]), sep="  ")
        runs = [found[n] for n in ZOO if n in found]
        records.write_json(path, {"environment": environment, "models": len(ZOO), "runs": runs})
    rows = [found[n] for n in ZOO if n in found]
    for view in summary.tables(rows):
        console.print(view)
    for note in summary.notes(rows):
        console.print(note, markup=False)
    console.print(f"Wrote {path}.")
    if failed := summary.failed([found[n] for n in names]):
        raise SystemExit(f"{len(failed)} of {len(names)} models failed: {'; '.join(r['model'] for r in failed)}")


def in_new_process(measure: Callable[..., Any], *args: Any) -> Any:
    """Measures a model in a process that has run no other.

    What a process allocated before decides whether memory of a few tens of MB is mapped anew for every call: ratios of
    models that take more memory for one gradient than for another depended on which models had run before."""
    new = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=new) as pool:
        return pool.submit(measure, *args).result()
