"""Times a clipped gradient against the ordinary mean gradient of the same model, in the same process."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
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
from benchmarks.cost import gradients, opacus_speed, timing
from benchmarks.cost.checked import Checked, call, compiled
from benchmarks.cost.families import FAMILIES, Family
from benchmarks.report import plots

REST = ("noise", "update (Adam)")  # the other parts of a step
_OTHERS = ("optax", "jax_privacy")
STEP = "whole step"  # over the ordinary one
COMPILE = "compile"  # time to trace and compile the clipped gradient, over the ordinary one
_COLUMNS = {STEP: "step_ratio", COMPILE: "compile_ratio"}


def interleaved(functions: dict[str, Callable], args: tuple, budget_s: float) -> dict[str, float]:
    """Median seconds of each function."""
    return timing.interleaved({n: call(f, args) for n, f in functions.items()}, budget_s)


def clip_norm(family: Family) -> float:
    """The median per-example gradient norm, so that half of the examples are clipped."""
    grads = dpopt.per_example_grads(family.loss_fn)(family.params, family.batch, mask=None)
    grads.clipped_sum(dpopt.FlatClip(1.0))
    return float(np.median(grads.sensitive.norms))


def rounded(family: Family, l2_clip_norm: float) -> Any:
    """The clipped sum by the vmap engine in microbatches, at parameters that differ by a rounding each.

    Programs of one engine may round alike. In a deep ReLU network a rounding can decide a sign."""
    rng = np.random.default_rng(0)

    def nearby(x: jax.Array) -> jax.Array:
        return (x * (1 + jnp.finfo(x.dtype).eps * rng.choice([-1, 1], x.shape))).astype(x.dtype)

    size = max(1, min(8, gradients.batch_size(family) // 2))
    grads_fn = dpopt.per_example_grads(family.loss_fn, engine="vmap", microbatch_size=size)
    grads = grads_fn(jax.tree.map(nearby, family.params), family.batch, mask=None)
    return grads.clipped_sum(dpopt.FlatClip(l2_clip_norm)).sum


def measure(name: str, *, others: bool, slow: bool = True, budget_s: float) -> dict[str, Any]:
    """Times one family: ordinary gradient, dpopt's engines with and without a diagonal, and other libraries.

    Without ``slow``, ways that take many times as long as an ordinary gradient are checked once but not timed.
    """
    family = FAMILIES[name]()
    args = (family.params, family.batch, gradients.diagonal(family))
    clip = clip_norm(family)
    ways = {n: gradients.by_name(family, n, clip) for n in (*gradients.LIGHT, "vmap", "vmap, diagonal")}
    programs = {n: compiled(ways[n], args) for n in gradients.LIGHT}  # otherwise the first call would compile
    # Timed before the ways that hold every per-example gradient: memory that those free is slow to allocate again, and
    # which way pays for that depends on what was freed before. (If the results differ, these times are discarded.)
    seconds = interleaved({n: ways[n] for n in gradients.LIGHT}, args, budget_s)
    vmap = {n: ways[n] for n in ("vmap", "vmap, diagonal")}
    checked = Checked(name, args, vmap, rounded(family, clip), programs=programs)
    for n in gradients.LIGHT:
        checked.add(n, ways[n])
    heavy = {n: checked.add(n, vmap[n]) for n in (vmap if others else ["vmap"])}
    found: dict[str, Any] = {"parts": dpopt.ghost.plan_clipped_sum(*family).parts}
    if found["parts"] > 1:  # the same split of an ordinary gradient (in a loop, where XLA may be slow)
        heavy[gradients.IN_PARTS] = checked.add(gradients.IN_PARTS, gradients.by_name(family, gradients.IN_PARTS, clip))
    if others:
        rivals, found["jax_privacy_microbatch"] = _others(family, clip, checked)
        heavy |= rivals
    if slow:
        seconds |= timing.with_few_slow({n: call(f, args) for n, f in heavy.items()}, checked.once, budget_s / 2)
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
    """Optax and jax_privacy, with and without a diagonal; jax_privacy at the microbatch size of its fastest call."""

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
    """Times the rest of a private step: the noise draw, and Adam's update."""
    noise, adam = dpopt.add_gaussian_noise(1.0, jax.random.key(gradients.SEED)), optax.adam(1e-3)
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
    """Times a DP-Adam step with its metrics, and an Adam step with its loss."""
    count, adam = gradients.batch_size(family), optax.adam(1e-3)
    private = dpopt.dp_adam(
        1e-3,
        l2_clip_norm=l2_clip_norm,
        noise_multiplier=1.0,
        expected_batch_size=count,
        key=jax.random.key(gradients.SEED),
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
    """All ways that were timed for any family, except the ordinary one."""
    found = dict.fromkeys(label for r in rows for label in r["ratio"])
    return [label for label in found if label not in ("ordinary", *REST)]


def _rest(rows: list[dict[str, Any]]) -> list[str]:
    return [*REST, *(label for label, key in _COLUMNS.items() if any(key in r for r in rows))]


def cells(row: dict[str, Any], columns: list[str]) -> list[str]:
    """One family's ratios; jax_privacy's shows its best microbatch size, and ghost's the number of parts."""
    shown = {label: f"{ratio:.2f}" for label, ratio in row["ratio"].items()}
    if row["parts"] > 1:
        shown["ghost"] += f" ({row['parts']} parts)"
    for label, key in _COLUMNS.items():
        if key in row:
            shown[label] = f"{row[key]:.2f}"
    if "jax_privacy_microbatch" in row:
        shown["jax_privacy"] += f" (m={row['jax_privacy_microbatch']['best']})"
    return [shown.get(label, "") for label in columns]


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Ratios to the ordinary gradient: dpopt's, and other libraries' if they were timed."""
    foreign = [label for label in labels(rows) if label.startswith(_OTHERS)]
    views = []
    for columns in ([*(label for label in labels(rows) if label not in foreign), *_rest(rows)], foreign):
        view = Table(title="Time of a clipped gradient over the ordinary mean gradient's")
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
    intro = f"Time over the ordinary mean gradient's, on {device['device']}, {device['cores']} cores. "
    if STEP in columns:
        intro += f"`{STEP}` is a DP-Adam step, with noise and metrics, over an Adam step. "
    if COMPILE in columns:
        intro += f"`{COMPILE}` is the time to trace and compile `ghost`, over the ordinary gradient's. "
    intro += (
        "On CPUs the ghost engine splits a large batch into parts that reuse memory. `ghost whole` does not split it, "
        "and `ordinary in parts` accumulates the ordinary gradient over as many parts in a loop, where XLA's "
        "convolutions are slow."
    )
    return f"{intro}\n\n{tables}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="measure only families whose name contains this text")
    parser.add_argument(
        "--others", action="store_true", help="also time optax.contrib and jax_privacy (and Opacus, if installed)"
    )
    parser.add_argument("--quick", action="store_true", help="do not time vmap; keep its earlier times from the JSON")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="seconds to spend on timing each family (default 20)"
    )
    arguments.out(parser, "folder for the JSON and the plot")


def run(options: argparse.Namespace) -> None:
    main(options.out, options.only, options.others, not options.quick, options.seconds)


def main(out: Path, only: str | None, others: bool, slow: bool, budget_s: float) -> None:
    """Measures every family (or those whose name contains ``only``) and writes ``speed.json`` and its plot."""
    console = Console()
    names = [n for n in FAMILIES if only is None or only.lower() in n.lower()]
    if not names:
        raise SystemExit(f"no family matches {only!r}; there are: {'; '.join(FAMILIES)}")
    path, environment = out / "speed.json", records.environment()
    before = json.loads(path.read_text()) if path.exists() else {"environment": None, "runs": []}
    # Earlier results from the same machine and versions are kept unless measured again.
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
    """The row, with earlier ratios for the slow ways that were not timed now."""
    kept = {"ratio": {n: row["ratio"].get(n, r) for n, r in (before.get("ratio", {}) | row["ratio"]).items()}}
    if "jax_privacy_microbatch" in before:
        kept["jax_privacy_microbatch"] = row.get("jax_privacy_microbatch", before["jax_privacy_microbatch"])
    return row | kept


def with_opacus(out: Path, only: str | None, budget_s: float) -> None:
    """Measures Opacus in a separate process, because torch's threads and JAX's would slow each other down."""
    if not opacus_speed.installed():
        print(f"Not compared with Opacus: {opacus_speed.MISSING}")
        return
    command = [sys.executable, "-m", "benchmarks", "opacus", "--seconds", str(budget_s), "--out", str(out.absolute())]
    subprocess.run([*command, *(["--only", only] if only else [])], cwd=records.ROOT, check=False)
