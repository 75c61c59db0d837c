"""What memory a clipped gradient needs, in units of the ordinary mean gradient's, each in a process of its own.

Two figures, both of one call with its arguments and its result, and neither with what compilation took:

- ``peak_bytes``, measured: the bytes of parameters and batch, plus how far the resident memory of the process rose
  while the compiled program ran. It counts pages that were touched, by whatever part of JAX.
- ``compiled_bytes``, from the program itself: parameters, batch, result, and the scratch memory that XLA plans for.
  Libraries that the program calls (convolutions, large products) may take more, unseen.

The diagonal is not counted, as no other state of an optimizer is: it lies there before the gradient is computed.
"""

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

from benchmarks import records
from benchmarks.cost import gradients
from benchmarks.cost.families import FAMILIES, Family
from benchmarks.report import plots

BOUND = 1.25  # times the ordinary gradient's peak, which dpopt's own are to stay below
OWN = ("ghost", "ghost, diagonal")
WAYS = ("ordinary", *OWN, gradients.WHOLE, "vmap")
OTHERS = ("optax contrib", "jax_privacy m=1", "jax_privacy m=8", "jax_privacy m=B")
# Of which the median counts: the kernel's count of a process's pages is off by 0.2 MB or so, differently each time.
# A program that runs for longer than a second needs so much that one reading does.
READINGS = 3
# The C library gives every larger block pages of its own, and back when freed: else it would hand out again what
# compilation touched and freed, and the rise would not show.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class Unmeasurable(Exception):
    """Why the peak of a running program cannot be told here."""


def _resident_peak(reset: bool = False) -> int:
    """Largest resident memory of this process since the last reset, in bytes."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError, ValueError) as error:
        # The peak that getrusage knows cannot be reset: compilation's would be reported.
        raise Unmeasurable("no high-water mark that can be reset (/proc/self/clear_refs, VmHWM)") from error


def _give_back() -> None:
    """Returns freed pages to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def rise(program: Any, args: tuple) -> int:
    """Bytes by which resident memory rises while the program runs: scratch and result.

    The first run is not read: it loads code and starts threads, once.
    """
    if jax.devices()[0].platform != "cpu":
        raise Unmeasurable("only the processor's own memory is measured")
    jax.block_until_ready(program(*args))
    readings = []
    began = time.perf_counter()
    while not readings or (len(readings) < READINGS and time.perf_counter() - began < 1.0):
        _give_back()
        before = _resident_peak(reset=True)
        result = jax.block_until_ready(program(*args))
        readings.append(_resident_peak() - before)
        del result
    return sorted(readings)[len(readings) // 2]


def as_planned(given: int, program: Any) -> dict[str, int]:
    """Bytes by a compiled program's own account (``memory_analysis()``), ``given`` those of parameters and batch."""
    output, scratch = program.output_size_in_bytes, program.temp_size_in_bytes
    return {
        "argument_bytes": given,
        "output_bytes": output,
        "scratch_bytes": scratch,
        "compiled_bytes": given + output + scratch,
    }


def given_bytes(family: Family) -> int:
    """Of parameters and batch."""
    return sum(x.nbytes for x in jax.tree.leaves((family.params, family.batch)))


def measure(family: Family, name: str) -> dict[str, Any]:
    """One way to the gradient of one family, in this process, which must not have run another."""
    args = (family.params, family.batch, gradients.diagonal(family))
    given = given_bytes(family)
    program = gradients.by_name(family, name, 1.0).lower(*args).compile()
    found: dict[str, Any] = as_planned(given, program.memory_analysis())
    try:
        return found | {"peak_bytes": given + rise(program, args)}
    except Unmeasurable as error:
        return found | {"peak_bytes": None, "not_measured": str(error)}


def in_new_process(family: str, name: str) -> dict[str, Any]:
    """``measure`` in a fresh interpreter; one that the system killed has no figures but that."""
    command = [sys.executable, "-m", "benchmarks.cost.memory", family, name]
    done = subprocess.run(
        command, cwd=records.ROOT, env=os.environ | ALLOCATOR, capture_output=True, text=True, check=False
    )
    if done.returncode < 0:
        return {"peak_bytes": None, "not_measured": f"ended by signal {-done.returncode}"}
    if done.returncode > 0:
        raise RuntimeError(f"{family}, {name}: {done.stderr[-2_000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def ratios(row: dict[str, Any], what: str) -> dict[str, float]:
    """Of ``peak_bytes`` or ``compiled_bytes`` to the ordinary gradient's; ways without a figure are left out."""
    ways = row["ways"]
    base = ways["ordinary"].get(what)
    return {n: w[what] / base for n, w in ways.items() if base and w.get(what)}


def labels(rows: Sequence[dict[str, Any]]) -> list[str]:
    """All ways that any family was measured with, but the ordinary one."""
    return [n for n in (*WAYS[1:], *OTHERS) if any(n in r["ways"] for r in rows)]


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table: a family a line, the ordinary gradient's peak, and ratios as measured (and as compiled)."""
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
    said = [format(x / unit, form) if x is not None else "?" for x in (measured, planned)]
    return f"{said[0]} ({said[1]})"


def above(rows: Sequence[dict[str, Any]]) -> str:
    """Which of dpopt's ways take more than they should, in one sentence."""
    over = [
        f"{r['family']}, {n} {ratio:.2f}"
        for r in rows
        for n, ratio in ratios(r, "peak_bytes").items()
        if n in OWN and ratio > BOUND
    ]
    if over:
        return f"Above {BOUND} times the ordinary gradient's peak, as measured: {'; '.join(over)}."
    return f"No way of dpopt's but vmap takes more than {BOUND} times the ordinary gradient's peak, as measured."


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """For the terminal."""
    head, *lines = cells(rows)
    view = Table(title="Peak memory over the ordinary mean gradient's: measured (as compiled)")
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
    said = (
        f"On {device['device']}, {device['usable_cores']} of {device['cores']} cores. Peak memory of one call over "
        "that of the ordinary mean gradient: parameters, batch, result and scratch memory, as resident memory rose; in "
        "brackets as the compiled program plans it, also for loops that seldom run. The diagonal is not counted, as no "
        f"state of an optimizer is. {above(content['runs'])}"
    )
    return said + "\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(out: Path, only: str | None, others: bool, resume: bool) -> None:
    """Measures every family (or those whose name contains ``only``) and writes ``memory.json`` and its plot.

    What was measured before on the same machine and versions stays, but for what is measured anew; with ``resume``
    nothing is.
    """
    console = Console()
    chosen = [n for n in FAMILIES if only is None or only.lower() in n.lower()]
    if not chosen:
        raise SystemExit(f"no family matches {only!r}; there are: {'; '.join(FAMILIES)}")
    path = out / "memory.json"
    environment = records.environment() | {"usable_cores": len(getattr(os, "sched_getaffinity", lambda _: [0])(0))}
    before = json.loads(path.read_text()) if path.exists() else {"environment": None, "runs": []}
    found = {r["family"]: r for r in before["runs"] if before["environment"] == environment}
    # The ways that matter most first, of all families, for a run that is cut short.
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
