"""`python -m benchmarks large-batches`: models with as many examples at a time as private training takes."""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from benchmarks import arguments, records
from benchmarks.cost import gradients, memory, speed, timing
from benchmarks.cost.checked import call, compiled, relative_error
from benchmarks.cost.families import FAMILIES, Family
from benchmarks.zoo import of_large_batches
from benchmarks.zoo.command import in_new_process
from benchmarks.zoo.measure import chosen, dpopt_warnings, rounding
from benchmarks.zoo.registry import ZOO

# The largest batches take minutes a model, and show what one norm for all parameters does.
WAYS = {512: ("auto", "auto, diagonal", "auto, by layer"), 4096: ("auto",)}
SLOW_S = 2.0  # an ordinary gradient that takes longer is not measured
# Models whose own batch has at least 32 examples: others would take minutes, and what matters there is in zoo.json.
MODELS = (
    "logistic regression 10,000 x 500, B 64", "MLP 784-1024-1024-10, B 256", "CNN 4 conv, B 128", "LSTM T 128, B 64",
    "matrix factorisation 943 x 1682, B 64", "TextCNN (haiku)", "fastText (jax)", "VAE (linen)", "RealNVP (haiku)",
    "MADE (jax)", "DLRM (linen)", "DeepFM (nnx)", "Neural collaborative filtering (haiku)",
    "Two towers, sampled softmax (linen)", "NeRF (equinox)", "DeepONet (haiku)", "SIREN (jax)",
    "MAML, one inner step (haiku)", "CNN, weight decay in the loss (jax)", "Bayes by Backprop (jax)",
    "Sentence encoder, triplets (haiku)", "Tensor-train layer (jax)", "Deep Interest Network (jax)",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="measure only models whose name contains this text")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds to spend on timing each (default 3)")
    arguments.out(parser)


def run(options: argparse.Namespace) -> None:
    main(options.out, options.only, options.seconds)


def main(out: Path, only: str | None, budget_s: float) -> None:
    """Measures every model at every size, each in a process of its own, and writes ``large-batches.json``.

    Earlier results from the same machine and versions are kept unless measured again.

    Raises:
        SystemExit: if no name matches.
    """
    names = [n for n in MODELS if only is None or only.lower() in n.lower()]
    if not names:
        raise SystemExit(f"no model matches {only!r}; there are: {'; '.join(MODELS)}")
    path, environment = out / "large-batches.json", records.environment((*records.PACKAGES, "equinox", "dm-haiku"))
    before = json.loads(path.read_text()) if path.exists() else {"environment": None, "runs": []}
    kept = before["runs"] if before["environment"] == environment else []
    found = {(r["model"], r["batch_size"]): r for r in kept}
    for key in [(name, size) for name in names for size in WAYS]:
        run = in_new_process(measure, *key, budget_s)
        if run is not None:
            found[key] = run
            Console().print(json.dumps(run))
        runs = [found[n, size] for n in MODELS for size in WAYS if (n, size) in found]
        records.write_json(path, {"environment": environment, "runs": runs})
    Console().print(of_large_batches.markdown({"environment": environment, "runs": runs}))


def measure(name: str, size: int, budget_s: float) -> dict[str, Any] | None:
    """One model with its own batch repeated to ``size`` examples; None if that is slow.

    Raises:
        AssertionError: if a clipped sum is not as many times that of the model's own batch, by the plain engine.
    """
    names = WAYS[size]
    own = ZOO[name].build() if name in ZOO else FAMILIES[name]()
    clip, times = speed.clip_norm(own), size // gradients.batch_size(own)
    family = own._replace(batch=jax.tree.map(lambda x: jnp.concatenate([x] * times), own.batch))
    args = (family.params, family.batch, gradients.diagonal(family))
    with dpopt_warnings() as messages:
        ways = {n: gradients.by_name(family, n, clip) for n in ("ordinary", *names)}
        programs = {n: compiled(f, args) for n, f in ways.items()}
        calls = {n: call(f, args) for n, f in ways.items()}
        calls["ordinary"]()
        if timing.seconds_of(calls["ordinary"]) > SLOW_S:
            return None
        allowed = _allowed(own, clip)
        errors = {n: _error(own, n, clip, times, ways[n](*args), allowed) for n in names}
        seconds = timing.interleaved(calls, budget_s, at_least=timing.FEW)
        taken = {n: chosen(family, **_options(family, n))["taken"] for n in names}
    given = memory.given_bytes(family)
    bytes_ = {n: memory.as_planned(given, planned)["compiled_bytes"] for n, (_, planned) in programs.items()}
    return {
        "model": name,
        "batch_size": size,
        "seconds": seconds,
        "ratio": {n: seconds[n] / seconds["ordinary"] for n in names},
        "compiled_bytes": bytes_,
        "memory_ratio": {n: bytes_[n] / bytes_["ordinary"] for n in names},
        "taken": taken,
        "warnings": messages,
        "largest_relative_error": errors,
    }


def _options(family: Family, way: str) -> dict[str, Any]:
    """What `dpopt.explain` has to know of a way."""
    scale = gradients.diagonal(family) if "diagonal" in way else None
    return {"clip": gradients.clip_function(1.0, "by layer" in way), "scale": scale}


def _allowed(own: Family, clip: float) -> float:
    """By how much sums may differ: by twice what two ways of the plain engine do."""
    plain = gradients.by_name(own, "vmap", clip)(own.params, own.batch, None)
    return max(1e-4, 2 * rounding(own), 2 * relative_error(speed.rounded(own, clip), plain))


def _error(own: Family, way: str, clip: float, times: int, found: Any, allowed: float) -> float:
    plain = gradients.by_name(own, way.replace("auto", "vmap"), clip)(own.params, own.batch, gradients.diagonal(own))
    error = relative_error(found, jax.tree.map(lambda x: x * times, plain))
    if not error < allowed:
        raise AssertionError(
            f"the clipped sum differs from the plain engine's by {error:.2g}; {allowed:.2g} is allowed"
        )
    return error
