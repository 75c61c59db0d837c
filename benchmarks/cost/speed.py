"""What a clipped gradient costs, in units of the ordinary mean gradient of the same model in the same process."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
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
from benchmarks import records
from benchmarks.cost import gradients, opacus_speed, timing
from benchmarks.cost.families import FAMILIES, Family
from benchmarks.report import plots

REST = ("noise", "update (Adam)")  # of a step; no ways to a gradient
_OTHERS = ("optax", "jax_privacy")
STEP = "whole step"  # in units of the ordinary one
COMPILE = "compile"  # likewise, to trace and compile the clipped gradient
_OF_ALL = {STEP: "step_ratio", COMPILE: "compile_ratio"}


def relative_error(a: Any, b: Any) -> float:
    """Largest difference between two trees, over the largest entry of the second."""
    scale = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(b))
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.max(jnp.abs(x - y))), a, b))) / scale


def interleaved(functions: dict[str, Callable], args: tuple, budget_s: float) -> dict[str, float]:
    """Median seconds of each function."""
    return timing.interleaved({n: _call(f, args) for n, f in functions.items()}, budget_s)


def _call(fn: Callable, args: tuple) -> timing.Call:
    return lambda: jax.block_until_ready(fn(*args))


def compiled(fn: Callable, args: tuple) -> tuple[float, Any]:
    """Seconds to trace and compile, and the memory that the program asks for."""
    t = time.perf_counter()
    program = fn.lower(*args).compile()
    return time.perf_counter() - t, program.memory_analysis()


def clip_norm(family: Family) -> float:
    """One that bites for half of the examples."""
    promise = dpopt.per_example_grads(family.loss_fn)(family.params, family.batch, mask=None)
    promise.clipped_sum(dpopt.FlatClip(1.0))
    return float(np.median(promise.sensitive.norms))


def in_microbatches(family: Family, l2_clip_norm: float) -> Any:
    """The clipped sum by the vmap engine, in microbatches."""
    size = max(1, min(8, gradients.batch_size(family) // 2))
    promise = dpopt.per_example_grads(family.loss_fn, engine="vmap", microbatch_size=size)
    return promise(family.params, family.batch, mask=None).clipped_sum(dpopt.FlatClip(l2_clip_norm)).sum


class Checked:
    """The ways to one family's gradient, each compiled, called and compared before it may be timed."""

    def __init__(
        self, family: str, args: tuple, vmap: dict[str, Callable], again: Any, rounding: float = 0.0,
        programs: Mapping[str, tuple[float, Any]] | None = None,
    ):  # fmt: skip
        """The others are compared with ``vmap``, plain and perhaps with a diagonal; ``again`` is the plain result,
        computed in another way, and ``rounding`` how much such results may differ in any case. ``programs``: what
        `compiled` said of ways that have been called already."""
        self._family, self._args = family, args
        self.compile_s: dict[str, float] = {n: seconds for n, (seconds, _) in (programs or {}).items()}
        self.memory: dict[str, Any] = {n: memory for n, (_, memory) in (programs or {}).items()}  # as XLA plans it
        self.errors: dict[str, float] = {}
        self.once: dict[str, float] = {}  # seconds of one call
        for name, fn in vmap.items():
            self.compile_s[name], self.memory[name] = compiled(fn, args)
        results = [fn(*args) for fn in vmap.values()]
        self._plain, self._scaled = results[0], results[-1]
        self._mean: Any = None  # the ordinary gradient, once it is added
        # Exactness is tested in float64. In float32 a deep network's gradient differs between programs that do the
        # same, as the vmap engine whole and in microbatches; others may differ twice as much as those.
        self.rounding = max(rounding, relative_error(again, self._plain))

    def add(self, name: str, fn: Callable) -> Callable:
        if name not in self.compile_s:
            self.compile_s[name], self.memory[name] = compiled(fn, self._args)
        result = jax.block_until_ready(fn(*self._args))
        if name == "ordinary":
            self._mean = result
        elif name != "vmap":
            scaled = self._scaled if name.endswith(", diagonal") else self._plain
            error = relative_error(result, self._mean if name == gradients.IN_PARTS else scaled)
            if not error < max(1e-4, 2 * self.rounding):
                than = "ordinary gradient" if name == gradients.IN_PARTS else "vmap engine"
                raise AssertionError(f"{self._family}: results differ from the {than}: {name} by {error:.2g}")
            self.errors[name] = error
        self.once[name] = timing.seconds_of(_call(fn, self._args))
        return fn


def measure(name: str, *, others: bool, slow: bool = True, budget_s: float) -> dict[str, Any]:
    """Times one family: ordinary gradient, dpopt's engines with and without a diagonal, and other libraries.

    Without ``slow`` what takes many times an ordinary gradient is run once, as a check, and not timed."""
    family = FAMILIES[name]()
    args = (family.params, family.batch, gradients.diagonal(family))
    clip = clip_norm(family)
    ways = {n: gradients.by_name(family, n, clip) for n in (*gradients.LIGHT, "vmap", "vmap, diagonal")}
    programs = {n: compiled(ways[n], args) for n in gradients.LIGHT}  # a call would compile them
    # Before those that hold every gradient: after them memory that was given back is slow to get again, and whose turn
    # that is depends on what was freed before. (Nothing is kept of them if the results turn out to differ.)
    seconds = interleaved({n: ways[n] for n in gradients.LIGHT}, args, budget_s)
    vmap = {n: ways[n] for n in ("vmap", "vmap, diagonal")}
    checked = Checked(name, args, vmap, in_microbatches(family, clip), programs=programs)
    for n in gradients.LIGHT:
        checked.add(n, ways[n])
    heavy = {n: checked.add(n, vmap[n]) for n in (vmap if others else ["vmap"])}
    found: dict[str, Any] = {"parts": dpopt.ghost.plan_clipped_sum(*family).parts}
    if found["parts"] > 1:  # what the parts are worth to an ordinary gradient (in a loop, where XLA may do badly)
        heavy[gradients.IN_PARTS] = checked.add(gradients.IN_PARTS, gradients.by_name(family, gradients.IN_PARTS, clip))
    if others:
        rivals, found["jax_privacy_microbatch"] = _others(family, clip, checked)
        heavy |= rivals
    if slow:
        seconds |= timing.with_few_slow({n: _call(f, args) for n, f in heavy.items()}, checked.once, budget_s / 2)
    seconds |= noise_and_update(family)
    steps = whole_steps(family, clip, budget_s / 2)
    return {
        "family": name,
        "parameters": sum(p.size for p in jax.tree.leaves(family.params)),
        "seconds": seconds,
        "ratio": {n: s / seconds["ordinary"] for n, s in seconds.items()},
        "step_seconds": steps,
        "step_ratio": steps["private"] / steps["ordinary"],
        "compile_seconds": checked.compile_s,
        "compile_ratio": checked.compile_s["ghost"] / checked.compile_s["ordinary"],
        "scratch_bytes": {n: m.temp_size_in_bytes for n, m in checked.memory.items()},
        "largest_relative_error": checked.errors,
        "rounding": checked.rounding,
        **found,
    }


def _others(family: Family, clip: float, checked: Checked) -> tuple[dict[str, Callable], dict[str, Any]]:
    """Optax's and jax_privacy's, plain and scaled; jax_privacy's at the microbatch size whose one call is fastest."""

    def add(name: str) -> Callable:
        return checked.add(name, gradients.by_name(family, name, clip))

    found = {name: add(name) for name in ("optax contrib", "optax contrib, diagonal")}
    tried = {
        m: (add(f"jax_privacy m={m}"), checked.once[f"jax_privacy m={m}"]) for m in gradients.microbatch_sizes(family)
    }
    best = min(tried, key=lambda m: tried[m][1])
    found["jax_privacy"], checked.once["jax_privacy"] = tried[best]
    name = "jax_privacy, diagonal"
    found[name] = checked.add(name, gradients.by_name(family, f"jax_privacy m={best}, diagonal", clip))
    return found, {"best": best, "seconds_of_one_call": {str(m): s for m, (_, s) in tried.items()}}


def noise_and_update(family: Family) -> dict[str, float]:
    """The rest of a private step, apart: the noise draw, and Adam's update."""
    noise, adam = dpopt.add_gaussian_noise(1.0, gradients.KEY), optax.adam(1e-3)
    noise_state, adam_state = noise.init(family.params), adam.init(family.params)
    return interleaved(
        {
            "noise": jax.jit(lambda p: noise.update(p, noise_state)[0]),
            "update (Adam)": jax.jit(lambda p: adam.update(p, adam_state, p)[0]),
        },
        (family.params,),
        budget_s=2.0,
    )


def whole_steps(family: Family, l2_clip_norm: float, budget_s: float) -> dict[str, float]:
    """A step of DP-Adam, with its metrics, and one of Adam, with its loss."""
    count, adam = gradients.batch_size(family), optax.adam(1e-3)
    private = dpopt.dp_adam(
        1e-3, l2_clip_norm=l2_clip_norm, noise_multiplier=1.0, expected_batch_size=count, key=gradients.KEY
    )
    private_step = jax.jit(dpopt.make_train_step(family.loss_fn, private))

    @jax.jit
    def ordinary_step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(gradients.mean_loss(family))(params, batch)
        updates, state = adam.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    return interleaved(
        {
            "ordinary": lambda params, batch, states: ordinary_step(params, states[0], batch),
            "private": lambda params, batch, states: private_step(params, states[1], batch, None),
        },
        (family.params, family.batch, (adam.init(family.params), private.init(family.params))),
        budget_s,
    )


def labels(rows: list[dict[str, Any]]) -> list[str]:
    """The ways to a gradient that any of the families was timed with, but for the ordinary one."""
    found = dict.fromkeys(label for r in rows for label in r["ratio"])
    return [label for label in found if label not in ("ordinary", *REST)]


def _rest(rows: list[dict[str, Any]]) -> list[str]:
    return [*REST, *(label for label, key in _OF_ALL.items() if any(key in r for r in rows))]


def cells(row: dict[str, Any], columns: list[str]) -> list[str]:
    """One family's ratios; jax_privacy's says at which microbatch size it was best, ghost's how many parts it took."""
    said = {label: f"{ratio:.2f}" for label, ratio in row["ratio"].items()}
    if row["parts"] > 1:
        said["ghost"] += f" ({row['parts']} parts)"
    for label, key in _OF_ALL.items():
        if key in row:
            said[label] = f"{row[key]:.2f}"
    if "jax_privacy_microbatch" in row:
        said["jax_privacy"] += f" (m={row['jax_privacy_microbatch']['best']})"
    return [said.get(label, "") for label in columns]


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Ratios to the ordinary gradient: dpopt's, and those of other libraries where they were timed."""
    foreign = [label for label in labels(rows) if label.startswith(_OTHERS)]
    views = []
    for columns in ([*(label for label in labels(rows) if label not in foreign), *_rest(rows)], foreign):
        view = Table(title="Clipped gradient: time over the ordinary mean gradient's")
        view.add_column("family")
        for label in ["ordinary (ms)", *columns]:
            view.add_column(label, justify="right")
        for r in rows:
            view.add_row(r["family"], f"{1e3 * r['seconds']['ordinary']:.1f}", *cells(r, columns))
        views.append(view)
    return views if foreign else views[:1]


def plot(rows: list[dict[str, Any]], out: Path) -> Path:
    """The ratios as bars."""
    shown = [{"name": r["family"], "ratios": {n: r["ratio"].get(n) for n in labels(rows)}} for r in rows]
    return plots.ratios(shown, "time over the ordinary mean gradient's", out / "speed.svg")


def markdown(content: dict[str, Any]) -> str:
    """The table for RESULTS.md."""
    rows, device = content["runs"], content["environment"]
    columns = [*labels(rows), *_rest(rows)]
    body = [[r["family"], f"{1e3 * r['seconds']['ordinary']:.1f}", *cells(r, columns)] for r in rows]
    lines = [["family", "ordinary (ms)", *columns], ["---"] + ["---:"] * (len(columns) + 1), *body]
    tables = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    last = f"; `{STEP}` is one of DP-Adam, noise and metrics included, over one of Adam" if STEP in columns else ""
    if COMPILE in columns:
        last += f", and `{COMPILE}` the time to trace and compile `ghost`, over the ordinary gradient's"
    said = (
        f"On {device['device']}, {device['cores']} cores: time over the ordinary mean gradient's{last}. On CPUs the "
        "fast engine takes a large batch in parts, whose memory is used again; `ghost whole` does not, and `ordinary "
        "in parts` is the ordinary gradient added up over as many parts in a loop, where XLA's convolutions are slow."
    )
    return f"{said}\n\n{tables}"


def main(out: Path, only: str | None, others: bool, slow: bool, budget_s: float) -> None:
    """Measures every family (or those whose name contains ``only``) and writes ``speed.json`` and its plot."""
    console = Console()
    names = [n for n in FAMILIES if only is None or only.lower() in n.lower()]
    if not names:
        raise SystemExit(f"no family matches {only!r}; there are: {'; '.join(FAMILIES)}")
    path, environment = out / "speed.json", records.environment()
    before = json.loads(path.read_text()) if path.exists() else {"environment": None, "runs": []}
    # What was measured before on the same machine and versions stays, but for what is measured anew.
    found = {r["family"]: r for r in before["runs"] if before["environment"] == environment}
    for name in track(names, "measuring", console=console):
        found[name] = _with_slow(measure(name, others=others, slow=slow, budget_s=budget_s), found.get(name, {}))
        records.write_json(path, {"environment": environment, "runs": [found[n] for n in FAMILIES if n in found]})
    rows = [found[n] for n in FAMILIES if n in found]
    for view in tables(rows):
        console.print(view)
    console.print(f"Wrote {path} and {plot(rows, out)}.")
    if others:
        with_opacus(out, only, budget_s)


def _with_slow(row: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The row, with what the slow ways took over the ordinary gradient's time before, if they were left out now."""
    kept = {"ratio": {n: row["ratio"].get(n, r) for n, r in (before.get("ratio", {}) | row["ratio"]).items()}}
    if "jax_privacy_microbatch" in before:
        kept["jax_privacy_microbatch"] = row.get("jax_privacy_microbatch", before["jax_privacy_microbatch"])
    return row | kept


def with_opacus(out: Path, only: str | None, budget_s: float) -> None:
    """Opacus, in a process of its own: torch's threads and JAX's would be in each other's way."""
    if not opacus_speed.installed():
        print(f"Not compared with Opacus: {opacus_speed.MISSING}")
        return
    command = [sys.executable, "-m", "benchmarks", "opacus", "--seconds", str(budget_s), "--out", str(out.absolute())]
    subprocess.run([*command, *(["--only", only] if only else [])], cwd=records.ROOT, check=False)
