"""Peak memory of a clipped gradient over the ordinary mean gradient's, each measured in its own process.

There are two figures. Both cover one call with its arguments and result, without compilation:

- ``peak_bytes``, measured: the bytes of parameters and batch, plus the rise in the resident memory of the process while
  the compiled program ran. It counts every page that any part of JAX touched.
- ``compiled_bytes``, from the compiled program: parameters, batch, result, and the scratch memory that XLA plans.
  Libraries that the program calls (convolutions, large matrix products) may use more, which is not counted.

Like all other optimizer state, the diagonal is not counted: it exists before the gradient is computed.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import arguments, records
from benchmarks.cost import gradients
from benchmarks.cost.families import FAMILIES, Family
from benchmarks.report import plots

BOUND = 1.25  # dpopt's own ways should stay below this many times the ordinary gradient's peak
OWN = ("ghost", "ghost, diagonal")
WAYS = ("ordinary", *OWN, gradients.WHOLE, "vmap")
OTHERS = ("optax contrib", "jax_privacy m=1", "jax_privacy m=8", "jax_privacy m=B")
# The median is reported, because the kernel's page count varies by about 0.2 MB between readings. Programs that run for
# longer than a second need so much memory that one reading is enough.
READINGS = 3
# Makes the C library map new pages for every larger block, and unmap them when it is freed. Otherwise it would reuse
# pages that compilation touched and freed, and resident memory would not rise.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class Unmeasurable(Exception):
    """The peak memory of a running program cannot be measured here; the message gives the reason."""


def _resident_peak(reset: bool = False) -> int:
    """The peak resident memory of this process since the last reset, in bytes."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError, ValueError) as error:
        # getrusage also reports a peak, but it cannot be reset, so it would include compilation.
        raise Unmeasurable("no high-water mark that can be reset (/proc/self/clear_refs, VmHWM)") from error


def _release_pages() -> None:
    """Returns freed pages to the operating system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def rise(program: Any, args: tuple) -> int:
    """The bytes by which resident memory rises while the program runs, for scratch memory and the result.

    The first run is not measured, because it loads code and starts threads.
    """
    if jax.devices()[0].platform != "cpu":
        raise Unmeasurable("resident memory is measured on CPUs only")
    jax.block_until_ready(program(*args))
    readings = []
    began = time.perf_counter()
    while not readings or (len(readings) < READINGS and time.perf_counter() - began < 1.0):
        _release_pages()
        before = _resident_peak(reset=True)
        result = jax.block_until_ready(program(*args))
        readings.append(_resident_peak() - before)
        del result
    return sorted(readings)[len(readings) // 2]


def as_planned(given: int, program: Any) -> dict[str, int]:
    """The bytes that a compiled program plans (``memory_analysis()``); ``given`` is for parameters and batch."""
    output, scratch = program.output_size_in_bytes, program.temp_size_in_bytes
    return {
        "argument_bytes": given,
        "output_bytes": output,
        "scratch_bytes": scratch,
        "compiled_bytes": given + output + scratch,
    }


def given_bytes(family: Family) -> int:
    """The bytes of the parameters and the batch."""
    return sum(x.nbytes for x in jax.tree.leaves((family.params, family.batch)))


def measure(family: Family, name: str) -> dict[str, Any]:
    """Measures one way for one family, in this process, which must not have measured another before."""
    args = (family.params, family.batch, gradients.diagonal(family))
    given = given_bytes(family)
    program = gradients.by_name(family, name, 1.0).lower(*args).compile()
    found: dict[str, Any] = as_planned(given, program.memory_analysis())
    try:
        return found | {"peak_bytes": given + rise(program, args)}
    except Unmeasurable as error:
        return found | {"peak_bytes": None, "not_measured": str(error)}


def in_new_process(family: str, name: str) -> dict[str, Any]:
    """`measure` in a new process; if the system kills it, the record says so in place of figures."""
    command = [sys.executable, "-m", "benchmarks.cost.memory", family, name]
    done = subprocess.run(
        command, cwd=records.ROOT, env=os.environ | ALLOCATOR, capture_output=True, text=True, check=False
    )
    if done.returncode < 0:
        return {"peak_bytes": None, "not_measured": f"killed by signal {-done.returncode}"}
    if done.returncode > 0:
        raise RuntimeError(f"{family}, {name}: {done.stderr[-2_000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def ratios(row: dict[str, Any], what: str) -> dict[str, float]:
    """Ratios of ``peak_bytes`` or ``compiled_bytes`` to the ordinary gradient's; ways without a figure are omitted."""
    ways = row["ways"]
    base = ways["ordinary"].get(what)
    return {n: w[what] / base for n, w in ways.items() if base and w.get(what)}


def labels(rows: Sequence[dict[str, Any]]) -> list[str]:
    """All ways that were measured for any family, except the ordinary one."""
    return [n for n in (*WAYS[1:], *OTHERS) if any(n in r["ways"] for r in rows)]


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table: the ordinary gradient's peak and the ratios of each family, as measured (and as compiled)."""
    columns = labels(rows)
    lines = [["family", "ordinary (MB)", *columns]]
    for r in rows:
        measured, planned = ratios(r, "peak_bytes"), ratios(r, "compiled_bytes")
        ordinary = r["ways"]["ordinary"]
        line = [r["family"], _both(ordinary["peak_bytes"], ordinary["compiled_bytes"], 1e6, ".1f")]
        line += [_both(measured.get(n), planned.get(n), 1.0, ".2f") if n in r["ways"] else "" for n in columns]
        lines.append(line)
    return lines


def _both(measured: float | None, planned: float | None, unit: float, form: str) -> str:
    shown = [format(x / unit, form) if x is not None else "?" for x in (measured, planned)]
    return f"{shown[0]} ({shown[1]})"


def above(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence on which of dpopt's ways exceed `BOUND`."""
    over = [
        f"{r['family']}, {n} {ratio:.2f}"
        for r in rows
        for n, ratio in ratios(r, "peak_bytes").items()
        if n in OWN and ratio > BOUND
    ]
    if over:
        return f"Above {BOUND} times the ordinary gradient's peak, as measured: {'; '.join(over)}."
    return f"None of dpopt's ways except vmap takes more than {BOUND} times the ordinary gradient's peak, as measured."


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The table for the terminal."""
    head, *lines = cells(rows)
    view = Table(title="Peak memory over the ordinary mean gradient's, measured (as compiled)")
    for i, column in enumerate(head):
        view.add_column(column, justify="right" if i else "left")
    for line in lines:
        view.add_row(*line)
    return view


def plot(rows: Sequence[dict[str, Any]], out: Path) -> Path:
    """The measured ratios as bars."""
    shown = [{"name": r["family"], "ratios": {n: ratios(r, "peak_bytes").get(n) for n in labels(rows)}} for r in rows]
    return plots.ratios(shown, "peak memory over the ordinary mean gradient's", out / "memory.svg")


def markdown(content: dict[str, Any]) -> str:
    """The table for RESULTS.md."""
    device, lines = content["environment"], cells(content["runs"])
    lines.insert(1, ["---"] + ["---:"] * (len(lines[0]) - 1))
    intro = (
        "Peak memory of one call over the ordinary mean gradient's, on "
        f"{device['device']}, {device['usable_cores']} of {device['cores']} cores. It counts parameters, batch, result "
        "and scratch memory, by the rise in resident memory; in brackets is what the compiled program plans, including "
        f"loops that seldom run. Like all optimizer state, the diagonal is not counted. {above(content['runs'])}"
    )
    return intro + "\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="measure only families whose name contains this text")
    parser.add_argument(
        "--others", action="store_true", help="also measure optax.contrib and jax_privacy (if installed)"
    )
    parser.add_argument("--resume", action="store_true", help="measure only what the JSON in the folder lacks")
    arguments.out(parser, "folder for the JSON and the plot")


def run(options: argparse.Namespace) -> None:
    main(options.out, options.only, options.others, options.resume)


def main(out: Path, only: str | None, others: bool, resume: bool) -> None:
    """Measures every family (or those whose name contains ``only``) and writes ``memory.json`` and its plot.

    Earlier results from the same machine and versions are kept unless measured again; with ``resume``, nothing is
    measured again.
    """
    console = Console()
    chosen = [n for n in FAMILIES if only is None or only.lower() in n.lower()]
    if not chosen:
        raise SystemExit(f"no family matches {only!r}; there are: {'; '.join(FAMILIES)}")
    path = out / "memory.json"
    environment = records.environment() | {"usable_cores": len(getattr(os, "sched_getaffinity", lambda _: [0])(0))}
    before = json.loads(path.read_text()) if path.exists() else {"environment": None, "runs": []}
    found = {r["family"]: r for r in before["runs"] if before["environment"] == environment}
    # The most important ways come first, for all families, in case the run is interrupted.
    work = [(family, n) for n in (WAYS + OTHERS if others else WAYS) for family in chosen]
    for family, n in track(work, "measuring", console=console):
        row = found.setdefault(family, {"family": family, "ways": {}})
        if resume and n in row["ways"]:
            continue
        row["ways"][n] = in_new_process(family, n)
        if "ordinary" in row["ways"]:
            row["ratio"], row["compiled_ratio"] = ratios(row, "peak_bytes"), ratios(row, "compiled_bytes")
        records.write_json(path, {"environment": environment, "runs": [found[f] for f in FAMILIES if f in found]})
    rows = [found[f] for f in FAMILIES if f in found]
    console.print(table(rows))
    console.print(above(rows))
    console.print(f"Wrote {path} and {plot(rows, out)}.")


if __name__ == "__main__":
    print(json.dumps(measure(FAMILIES[sys.argv[1]](), sys.argv[2])))
