"""Clipped gradients on a GPU against the ordinary gradient, with batches that fill it, in two dtypes.

Compiling takes far longer than running there. So all cases are compiled side by side, each in its own process, which
writes its programs to a file; then they are timed one after another.
"""

import argparse
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

import dpopt
from benchmarks import arguments, records
from benchmarks.cost import checked, gradients, timing
from benchmarks.cost.families import Family
from benchmarks.cost.large_families import DTYPES, LARGE
from benchmarks.report import markdown as tables

ORDINARY, FLAT, LAYERWISE = "ordinary", "flat clip", "layerwise clip"
JAX_PRIVACY = "jax_privacy"
# Of jax_privacy: all gradients of a batch do not fit. Convolutions of several examples' own filters take minutes.
MICROBATCH, MICROBATCH_OF_CONVOLUTIONS = 64, 1
CLIP_NORM = 1e-2  # most gradients are clipped
CALLS_PROFILED = 3
KERNELS_SHOWN = 5
# Results in float32 differ by rounding to TF32, in which GPUs multiply. (In bfloat16 others may differ by any amount:
# they add up a table's gradient in it.)
MOST_ERROR = 2e-2
# What a kernel does, by its name. Products include convolutions.
KINDS = {
    "products": r"gemm|nvjet|cutlass|dot|wgmma|xmma|cudnn|dgrad|wgrad|fprop|implicit|conv(?!ert)",
    "copies": r"copy|memcpy|memset|transpose",
}
OTHER = "elementwise, sums"


def _layerwise(family: Family) -> Callable[..., Any]:
    def run(params: Any, batch: Any, diagonal: None) -> Any:
        grads = dpopt.per_example_grads(family.loss_fn)(params, batch, mask=None)
        return grads.clipped_sum(dpopt.LayerwiseClip(CLIP_NORM)).sum

    return jax.jit(run)


def _jax_privacy(family: Family) -> Callable[..., Any]:
    size = MICROBATCH_OF_CONVOLUTIONS if jax.tree.leaves(family.batch)[0].ndim == 4 else MICROBATCH
    return gradients.jax_privacy_clipped(family, False, CLIP_NORM, size)


# All of parameters, a batch and no diagonal.
WAYS: dict[str, Callable[[Family], Callable[..., Any]]] = {
    ORDINARY: gradients.ordinary,
    FLAT: lambda family: gradients.clipped(family, "auto", CLIP_NORM),
    LAYERWISE: _layerwise,
    JAX_PRIVACY: _jax_privacy,
}


class Case(NamedTuple):
    """The compiled ways of one family in one dtype, and what they are called with."""

    args: Any  # parameters, batch, None
    programs: dict[str, Callable[..., Any]]
    scratch_bytes: dict[str, int]  # that XLA plans


def compiled(name: str, dtype: str, ways: Sequence[str] = tuple(WAYS)) -> Case:
    """Compiles some ways."""
    family = LARGE[name](DTYPES[dtype])
    args = family.params, family.batch, None
    traced = [WAYS[way](family).lower(*args) for way in ways]  # JAX cannot trace one loss in several threads
    with ThreadPoolExecutor() as pool:
        programs = dict(zip(ways, pool.map(lambda program: program.compile(), traced), strict=True))
    scratch = {way: int(program.memory_analysis().temp_size_in_bytes) for way, program in programs.items()}
    return Case(args, programs, scratch)


def save(case: Case, path: Path) -> None:
    """Writes a case to a file, whole or not at all."""
    programs = {way: serialize_executable.serialize(program) for way, program in case.programs.items()}
    path.with_suffix(".unfinished").write_bytes(
        pickle.dumps(case._replace(args=jax.device_get(case.args), programs=programs))
    )
    path.with_suffix(".unfinished").rename(path)


def load(path: Path) -> Case:
    """What `save` wrote."""
    case = pickle.loads(path.read_bytes())
    programs = {way: serialize_executable.deserialize_and_load(*program) for way, program in case.programs.items()}
    return case._replace(args=jax.device_put(case.args), programs=programs)


def file_of(name: str, dtype: str) -> str:
    """The name of the file that holds the programs of a case."""
    return re.sub(r"\W+", "-", f"{name}-{dtype}".lower()) + ".programs"


def measure(case: Case, dtype: str, budget_s: float) -> dict[str, Any]:
    """Times and profiles all ways, after a comparison of the flat clipped gradient with jax_privacy's, if it is one.

    Raises:
        AssertionError: if they differ in float32 by more than rounding.
    """
    results = {way: jax.block_until_ready(program(*case.args)) for way, program in case.programs.items()}
    error = float(checked.relative_error(results[FLAT], results[JAX_PRIVACY])) if JAX_PRIVACY in results else None
    if error is not None and dtype == "float32":
        assert error < MOST_ERROR, f"the clipped gradient differs from jax_privacy's by {error:.2g}"
    del results
    calls = {way: checked.call(program, case.args) for way, program in case.programs.items()}
    once = {way: timing.seconds_of(call) for way, call in calls.items()}
    seconds = timing.with_few_slow(calls, once, budget_s)
    params, batch, _ = case.args
    return {
        "parameters": sum(p.size for p in jax.tree.leaves(params)),
        "batch_size": len(jax.tree.leaves(batch)[0]),
        "seconds": seconds,
        "ratio": {way: s / seconds[ORDINARY] for way, s in seconds.items()},
        "scratch_bytes": case.scratch_bytes,
        "argument_bytes": sum(x.nbytes for x in jax.tree.leaves(case.args)),
        "largest_relative_error": error,
        "profile": {way: profiled(call) for way, call in calls.items() if way != JAX_PRIVACY},
    }


def profiled(call: timing.Call) -> dict[str, Any]:
    """How long the kernels of one call take, by what they do, and the slowest of them."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            began = time.perf_counter()
            for _ in range(CALLS_PROFILED):
                call()
            wall = time.perf_counter() - began
        kernels: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                if plane.name.startswith("/device:"):
                    for line in plane.lines:
                        if line.name.startswith("Stream"):  # the other lines repeat its kernels, by operation
                            for event in line.events:
                                kernels[event.name] += event.duration_ns
                                counts[event.name] += 1
    unit = 1e9 * CALLS_PROFILED
    kinds: Counter[str] = Counter()
    for name, duration in kernels.items():
        kinds[kind_of(name)] += duration / unit
    return {
        "wall": wall / CALLS_PROFILED,
        "busy": sum(kernels.values()) / unit,
        "launches": sum(counts.values()) / CALLS_PROFILED,
        "seconds_by_kind": dict(kinds),
        "slowest": {n: [t / unit, counts[n] / CALLS_PROFILED] for n, t in kernels.most_common(KERNELS_SHOWN)},
    }


def kind_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel, re.IGNORECASE)), OTHER)


def markdown(content: dict[str, Any]) -> str:
    """The table for RESULTS.md."""
    ways = [way for way in WAYS if way != ORDINARY]
    head = [
        "family",
        "dtype",
        "GPU",
        "ordinary (ms)",
        *ways,
        *(f"{way}: memory" for way in ways),
        "examples a second",
        "differs by",
        "bound by",
    ]
    lines = []
    for run in content["runs"]:
        if "failed" in run:
            lines.append([run["family"], run["dtype"], _gpu(run), "failed"] + [""] * (len(head) - 4))
            continue
        scratch = run["scratch_bytes"]
        lines.append(
            [run["family"], run["dtype"], _gpu(run), f"{1e3 * run['seconds'][ORDINARY]:.1f}"]
            + [f"{run['ratio'][way]:.2f}" if way in run["ratio"] else "" for way in ways]
            + [f"{scratch[way] / max(1, scratch[ORDINARY]):.2f}" if way in scratch else "" for way in ways]
            + [f"{run['batch_size'] / run['seconds'][FLAT]:,.0f}"]
            + ["" if run["largest_relative_error"] is None else f"{run['largest_relative_error']:.1g}"]
            + [bound_by(run["profile"][FLAT])]
        )
    intro = (
        "Time of a clipped gradient, and scratch memory that XLA plans for it, over those of the ordinary gradient, on "
        f"a GPU (XLA flags: {content['flags'] or 'none'}; *: by an earlier engine). "
        f"jax_privacy has microbatches of {MICROBATCH}, or of {MICROBATCH_OF_CONVOLUTIONS} with convolutions. "
        "`examples a second`: of the flat clip. `differs by`: "
        "the flat clip from jax_privacy, which in bfloat16 adds up the gradient of a table in it. `bound by`: the "
        "largest part of the time of the flat clip. In bfloat16, ratios far below 1 come from the ordinary gradient: "
        "XLA adds up the rows of frequent words in bfloat16, one after another, where the engine adds them up in "
        "float32."
    )
    return f"{intro}\n\n" + tables.rows(head, lines, ["---", "---", "---", *["---:"] * (len(head) - 4), "---"])


def _gpu(run: dict[str, Any]) -> str:
    """The device, in short, and whether the engine has changed since."""
    return run["device"].removeprefix("gpu: NVIDIA ").split()[0] + ("*" if run.get("earlier_engine") else "")


def bound_by(profile: dict[str, Any]) -> str:
    """The largest part of a profile."""
    idle = max(0.0, profile["wall"] - profile["busy"])
    kind, seconds = max([*profile["seconds_by_kind"].items(), ("waiting for launches", idle)], key=lambda p: p[1])
    return f"{kind} ({seconds / max(profile['wall'], profile['busy']):.0%})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only families whose name contains one of these")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="only these, among them "
                        "the ordinary gradient and the flat clip")  # fmt: skip
    parser.add_argument("--dtype", choices=list(DTYPES), help="only this one")
    parser.add_argument("--seconds", type=float, default=2.0, help="to spend on timing each case (default 2)")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds to wait for compilation (default 900)")
    parser.add_argument("--compile-into", type=Path, metavar="FOLDER", help="compile one case after another, and stop")
    arguments.out(parser)


def run(options: argparse.Namespace) -> None:
    """Measures every case and writes ``accelerator.json``."""
    names = [n for n in LARGE if options.only is None or any(text.lower() in n.lower() for text in options.only)]
    if not names:
        raise arguments.UserError(f"no family matches {' or '.join(options.only)}; there are: {'; '.join(LARGE)}")
    if not {ORDINARY, FLAT} <= set(options.ways):
        raise arguments.UserError(f"--ways has to name {ORDINARY!r} and {FLAT!r}: others are compared with them")
    cases = [(name, dtype) for name in names for dtype in ([options.dtype] if options.dtype else DTYPES)]
    if options.compile_into is not None:
        for case in cases:
            save(compiled(*case, options.ways), options.compile_into / file_of(*case))
        return
    with tempfile.TemporaryDirectory() as folder:
        _compile_side_by_side(cases, options.ways, Path(folder), options.patience)
        path, found, environment = options.out / "accelerator.json", [], records.environment()
        for name, dtype in cases:
            row: dict[str, Any] = {"family": name, "dtype": dtype, "device": environment["device"]}
            try:
                row |= measure(load(Path(folder) / file_of(name, dtype)), dtype, options.seconds)
            except Exception as error:  # a case that fails should not cost the others: time on a GPU is scarce
                row["failed"] = f"{type(error).__name__}: {error}"[:400]
            found.append(row)
            flags = os.environ.get("XLA_FLAGS", "")
            records.write_json(path, {"environment": environment, "flags": flags, "runs": found})
            print(name, dtype, row.get("ratio") or row["failed"], flush=True)
    print(f"Wrote {path}.")


def _compile_side_by_side(cases: list[tuple[str, str]], ways: list[str], folder: Path, patience: float) -> None:
    """Compiles every case in its own process, which is stopped when patience is at its end."""
    command = [sys.executable, "-m", "benchmarks", "accelerator", "--compile-into", str(folder), "--ways", *ways]
    began = time.monotonic()
    # By default a process reserves most of the device's memory.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    processes = [
        subprocess.Popen([*command, "--only", name, "--dtype", dtype], cwd=records.ROOT, env=environment)
        for name, dtype in cases
    ]
    for (name, dtype), process in zip(cases, processes, strict=True):
        try:
            process.wait(max(0.0, began + patience - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"{name}, {dtype}: not compiled within {patience:g} s", flush=True)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
