"""Sweeps: many settings times many seeds, one JSON file per run, resumable however they ended.

A run's file is written whole or not at all, under a name that its setting and seed determine: a run with a file is
finished, one without is still to do. There is no other state.
"""

import concurrent.futures
import json
import multiprocessing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import records
from benchmarks.utility import runs


def stored(path: Path) -> dict[str, Any] | None:
    """The record at ``path``, or None if it is missing or unreadable."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def missing(settings: Iterable[runs.Setting], seeds: Sequence[int], out: Path) -> list[tuple[runs.Setting, list[int]]]:
    """What is still to do: settings, each with its seeds that have no record."""
    todo = ((s, [seed for seed in seeds if stored(out / s.name(seed)) is None]) for s in settings)
    return [(s, left) for s, left in todo if left]


_PROGRAMS: dict[tuple[str, Path | None], runs.Program] = {}


def program(setting: runs.Setting, where: Path | None) -> runs.Program:
    """The compiled program of a setting: the previous one, if only the learning rate has changed."""
    code = setting.program(), where
    if code not in _PROGRAMS:
        _PROGRAMS.clear()  # one is enough: settings that share a program are adjacent
        _PROGRAMS[code] = runs.Program(setting, where=where)
    return _PROGRAMS[code]


def _run(
    setting: runs.Setting, seeds: Sequence[int], out: Path, where: Path | None, together: int, advance=None
) -> None:
    made = program(setting, where)
    for i in range(0, len(seeds), together):
        group = list(seeds[i : i + together])
        for record in made.train(group, advance or (lambda steps: None), setting):
            records.write_json(out / setting.name(record["seed"]), record)


def sweep(
    settings: Sequence[runs.Setting],
    seeds: Sequence[int],
    *,
    out: Path,
    where: Path | None = None,
    jobs: int = 1,
    together: int = 1,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Runs what is missing and returns all records, in the order of the settings and seeds.

    Args:
        settings, seeds: every setting runs with every seed.
        out: folder of the records.
        where: data folder.
        jobs: processes at a time.
        together: seeds of one setting that run as one program, under ``vmap``.
        console: shows the progress.
    """
    out.mkdir(parents=True, exist_ok=True)
    todo = missing(settings, seeds, out)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("runs", total=sum(s.steps * len(left) for s, left in todo))
        if jobs == 1:
            for setting, left in todo:
                progress.update(bar, description=setting.label)
                _run(setting, left, out, where, together, lambda n: progress.advance(bar, n))
        else:
            context = multiprocessing.get_context("spawn")  # JAX does not survive a fork
            with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
                started = {pool.submit(_run, s, left, out, where, together): s.steps * len(left) for s, left in todo}
                for done in concurrent.futures.as_completed(started):
                    done.result()
                    progress.advance(bar, started[done])
    # This sweep's label: the file may have been written under another one.
    found = [(s, stored(out / s.name(seed))) for s in settings for seed in seeds]
    return [record | {"label": s.label} for s, record in found if record is not None]
