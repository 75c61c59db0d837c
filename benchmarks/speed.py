"""What a clipped gradient costs, in units of the ordinary mean gradient of the same model in the same process."""

import json
import statistics
import time
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
from benchmarks import records
from benchmarks.families import FAMILIES, Family

KEY = jax.random.key(0)


def clipped(family: Family, engine: str, diagonal: Any, l2_clip_norm: float) -> Callable:
    """The clipped sum by one of dpopt's engines, as a function of parameters and batch."""

    def run(params, batch):
        grads = dpopt.per_example_grads(family.loss_fn, engine=engine)(params, batch)
        if diagonal is not None:
            grads = grads.scale(diagonal)
        return grads.clipped_sum(dpopt.FlatClip(l2_clip_norm)).sum

    return jax.jit(run)


def ordinary(family: Family) -> Callable:
    """The mean gradient that training without privacy computes."""

    def mean_loss(params, batch):
        return jnp.mean(jax.vmap(family.loss_fn, (None, 0))(params, batch))

    return jax.jit(jax.grad(mean_loss))


def jax_privacy_clipped(family: Family, l2_clip_norm: float, microbatch_size: int | None) -> Callable:
    """jax_privacy's clipped gradient."""
    from jax_privacy import clipping

    fn = clipping.clipped_grad(
        family.loss_fn, l2_clip_norm=l2_clip_norm, keep_batch_dim=False, microbatch_size=microbatch_size
    )
    return jax.jit(lambda params, batch: fn(params, batch))


def optax_contrib(family: Family, l2_clip_norm: float) -> Callable:
    """Optax's differentially private aggregation, noise 0, fed by ``vmap(grad)``: it returns the mean."""
    batch_size = len(jax.tree.leaves(family.batch)[0])
    aggregate = optax.contrib.differentially_private_aggregate(l2_clip_norm, 0.0, KEY)

    def run(params, batch):
        grads = jax.vmap(jax.grad(family.loss_fn), (None, 0))(params, batch)
        mean, _ = aggregate.update(grads, aggregate.init(params), params)
        return jax.tree.map(lambda x: x * batch_size, mean)

    return jax.jit(run)


def relative_error(a: Any, b: Any) -> float:
    """Largest difference between two trees, over the largest entry of the second."""
    scale = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(b))
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.max(jnp.abs(x - y))), a, b))) / scale


def interleaved(functions: dict[str, Callable], args: tuple, budget_s: float) -> dict[str, float]:
    """Median seconds of each function. They take turns, so that a busy moment of the machine hits all alike.

    Each is called once untimed before every timed call: giving back what the one before it held is not its own cost.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    started = time.perf_counter()
    while min(map(len, times.values())) < 5 or (
        time.perf_counter() - started < budget_s and min(map(len, times.values())) < 50
    ):
        for name, fn in functions.items():
            jax.block_until_ready(fn(*args))
            t = time.perf_counter()
            jax.block_until_ready(fn(*args))
            times[name].append(time.perf_counter() - t)
    return {name: statistics.median(ts) for name, ts in times.items()}


def compiled(fn: Callable, args: tuple) -> tuple[float, int]:
    """Seconds to trace and compile, and the bytes of scratch memory the program asks for."""
    t = time.perf_counter()
    program = fn.lower(*args).compile()
    return time.perf_counter() - t, program.memory_analysis().temp_size_in_bytes


def measure(name: str, *, others: bool, budget_s: float) -> dict[str, Any]:
    """Times one family: ordinary gradient, dpopt's engines with and without a diagonal, and other libraries."""
    family = FAMILIES[name]()
    args = (family.params, family.batch)
    rng = np.random.default_rng(0)
    diagonal = jax.tree.map(lambda p: jnp.asarray(rng.uniform(0.5, 2.0, p.shape), jnp.float32), family.params)
    norms = dpopt.per_example_grads(family.loss_fn, engine="vmap", microbatch_size=8)(*args)
    norms.clipped_sum(dpopt.FlatClip(1.0))
    clip = float(np.median(norms.sensitive.norms))  # so that the clip bites for half of the examples

    functions: dict[str, Callable] = {
        "ordinary": ordinary(family),
        "ghost": clipped(family, "ghost", None, clip),
        "ghost, diagonal": clipped(family, "ghost", diagonal, clip),
        "auto": clipped(family, "auto", None, clip),
        "vmap": clipped(family, "vmap", None, clip),
    }
    if others:
        functions["optax contrib"] = optax_contrib(family, clip)
        batch_size = len(jax.tree.leaves(family.batch)[0])
        for m in (1, 8, None):
            functions[f"jax_privacy m={m or batch_size}"] = jax_privacy_clipped(family, clip, m)
    compile_s, scratch = {}, {}
    for label, fn in functions.items():
        compile_s[label], scratch[label] = compiled(fn, args)
    expected = functions["vmap"](*args)
    errors = {n: relative_error(f(*args), expected) for n, f in functions.items() if n not in ("ordinary", "vmap")}
    scaled = clipped(family, "vmap", diagonal, clip)(*args)
    errors["ghost, diagonal"] = relative_error(functions["ghost, diagonal"](*args), scaled)
    # Exactness is tested in float64. In float32 a deep network's gradient differs between programs that do the same, as
    # the vmap engine whole and in microbatches; others may differ twice as much as those.
    rounding = relative_error(norms.clipped_sum(dpopt.FlatClip(clip)).sum, expected)
    bound = max(1e-4, 2 * rounding)
    wrong = {n: e for n, e in errors.items() if not e < bound}
    if wrong:
        raise AssertionError(f"{name}: results differ from the vmap engine: {wrong}")
    # Apart from those that hold every gradient: after one of them, memory that was given back is slow to get again.
    light = {n: f for n, f in functions.items() if n == "ordinary" or n.startswith(("ghost", "auto"))}
    seconds = interleaved(light, args, budget_s)
    seconds |= interleaved({n: f for n, f in functions.items() if n not in light}, args, budget_s)
    seconds |= noise_and_update(family)
    return {
        "family": name,
        "parameters": sum(p.size for p in jax.tree.leaves(family.params)),
        "seconds": seconds,
        "ratio": {n: s / seconds["ordinary"] for n, s in seconds.items()},
        "compile_seconds": compile_s,
        "scratch_bytes": scratch,
        "largest_relative_error": errors,
        "rounding": rounding,
    }


def noise_and_update(family: Family) -> dict[str, float]:
    """The rest of a private step, apart: the noise draw, and Adam's update."""
    noise, adam = dpopt.add_gaussian_noise(1.0, KEY), optax.adam(1e-3)
    noise_state, adam_state = noise.init(family.params), adam.init(family.params)
    return interleaved(
        {
            "noise": jax.jit(lambda p: noise.update(p, noise_state)[0]),
            "update (Adam)": jax.jit(lambda p: adam.update(p, adam_state, p)[0]),
        },
        (family.params,),
        budget_s=2.0,
    )


def table(rows: list[dict[str, Any]]) -> Table:
    """Ratios to the ordinary gradient."""
    labels = ["ordinary", "ghost", "ghost, diagonal", "auto", "vmap"]
    extra = [n for n in rows[0]["ratio"] if n not in labels and n not in ("noise", "update (Adam)")]
    view = Table(title="Clipped gradient: time over the ordinary mean gradient's")
    view.add_column("family")
    for label in [*labels, *extra, "noise", "update (Adam)"]:
        view.add_column("ordinary (ms)" if label == "ordinary" else label, justify="right")
    for r in rows:
        cells = [f"{1e3 * r['seconds']['ordinary']:.1f}"]
        cells += [f"{r['ratio'][n]:.2f}" if n in r["ratio"] else "" for n in [*labels[1:], *extra]]
        view.add_row(r["family"], *cells, f"{r['ratio']['noise']:.2f}", f"{r['ratio']['update (Adam)']:.2f}")
    return view


def main(out: Path, only: str | None, others: bool, budget_s: float) -> None:
    """Measures every family (or those whose name contains ``only``) and writes ``speed.json``."""
    console = Console()
    names = [n for n in FAMILIES if only is None or only.lower() in n.lower()]
    if not names:
        raise SystemExit(f"no family matches {only!r}; there are: {'; '.join(FAMILIES)}")
    path, environment = out / "speed.json", records.environment()
    before = json.loads(path.read_text()) if path.exists() else {"environment": None, "runs": []}
    # What was measured before on the same machine and versions stays, but for what is measured anew.
    found = {r["family"]: r for r in before["runs"] if before["environment"] == environment}
    for name in track(names, "measuring", console=console):
        found[name] = measure(name, others=others, budget_s=budget_s)
        records.write_json(path, {"environment": environment, "runs": [found[n] for n in FAMILIES if n in found]})
    console.print(table([found[n] for n in FAMILIES if n in found]))
    console.print(f"Wrote {path}.")
