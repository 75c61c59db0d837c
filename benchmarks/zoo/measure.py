"""Checks one model's clipped gradient, and measures its time and memory against the ordinary gradient's."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import dpopt
from benchmarks.cost import gradients, memory, speed, timing
from benchmarks.cost.checked import Checked, call, compiled
from benchmarks.cost.families import Family
from benchmarks.zoo.entries import Entry, first
from benchmarks.zoo.summary import BY_LAYER
from dpopt.engines import fallback

LIGHT = ("ordinary", "auto", "ghost", BY_LAYER)
WAYS = (*LIGHT, "vmap")
FELL_BACK = "vmap, fallen back"


@contextlib.contextmanager
def dpopt_warnings() -> Iterator[list[str]]:
    """Collects dpopt's warnings, including those that it gives only once per process."""
    fallback._warned.clear()
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += dict.fromkeys(str(w.message) for w in caught if w.category is UserWarning)


def chosen(family: Family, **options: Any) -> dict[str, Any]:
    """The way that ``auto`` takes, and the planner's predictions of time and memory over the ordinary gradient's.

    ``options`` are those of `dpopt.explain`, such as ``clip``."""
    size = gradients.batch_size(family)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            explanation = dpopt.explain(family.loss_fn, family.params, first(family.batch), batch_size=size, **options)
    except dpopt.ghost.CannotFollow as error:
        return {"taken": FELL_BACK, "reason": str(error), "predicted": {}, "predicted_memory": {}}
    plan, bytes_ = explanation.plan, explanation.memory
    taken, _, reason = str(explanation).splitlines()[-1].removeprefix("engine='auto' takes ").partition(": ")
    ordinary = max(plan.ordinary_cost, 1.0)
    return {
        "taken": taken,
        "reason": reason,
        "predicted": {"ghost": plan.ghost_cost / ordinary, "vmap": plan.vmap_cost / ordinary},
        "predicted_memory": {
            "ghost": bytes_.recorded(explanation.way.parts) / bytes_.ordinary,
            "vmap": bytes_.vmap / bytes_.ordinary,
        },
    }


def rounding(family: Family) -> float:
    """The rounding error of bfloat16 if the loss uses it, else 0: engines may sum in different precisions."""
    program = str(jax.make_jaxpr(family.loss_fn)(family.params, first(family.batch)))
    return float(jnp.finfo(jnp.bfloat16).eps) if "bf16[" in program else 0.0


def _over_ordinary(figures: dict[str, float]) -> dict[str, float]:
    return {name: x / figures["ordinary"] for name, x in figures.items()}


def measure(name: str, entry: Entry, budget_s: float) -> dict[str, Any]:
    """Measures time, compile time and memory of the ordinary gradient and of dpopt's engines, and their ratios."""
    with dpopt_warnings() as messages:
        family = entry.build()
        args = (family.params, family.batch, gradients.diagonal(family))
        clip = speed.clip_norm(family)
        ways: dict[str, Callable] = {n: gradients.by_name(family, n, clip) for n in WAYS}
        calls = {n: call(f, args) for n, f in ways.items()}
        programs = {n: compiled(ways[n], args) for n in LIGHT}
        # Timed before the way that holds every per-example gradient, as in speed.py.
        light = {n: calls[n] for n in LIGHT}
        seconds = timing.with_few_slow(light, {n: timing.seconds_of(c) for n, c in light.items()}, budget_s)
        again = speed.rounded(family, clip)
        checked = Checked(name, args, {"vmap": ways["vmap"]}, again, rounding(family), programs)
        by_layer = gradients.by_name(family, BY_LAYER.replace("auto", "vmap"), clip)(*args)
        for n in WAYS:
            checked.add(n, ways[n], by_layer if n == BY_LAYER else None)
        seconds |= timing.with_few_slow({"vmap": calls["vmap"]}, checked.once, budget_s / 4)
        choice = chosen(family)
    if any("Falling back" in m for m in messages):  # some fallbacks show only when the engine runs
        choice["taken"] = FELL_BACK
    given = memory.given_bytes(family)
    bytes_ = {n: memory.as_planned(given, checked.memory[n])["compiled_bytes"] for n in WAYS}
    compile_s = {n: checked.compile_s[n] for n in WAYS}
    return {
        **about(name, entry),
        "parameters": sum(p.size for p in jax.tree.leaves(family.params)),
        "batch_size": gradients.batch_size(family),
        "clip": clip,
        "seconds": seconds,
        "ratio": _over_ordinary(seconds),
        "compile_seconds": compile_s,
        "compile_ratio": _over_ordinary(compile_s),
        "compiled_bytes": bytes_,
        "memory_ratio": _over_ordinary(bytes_),
        **choice,
        "warnings": messages,
        "largest_relative_error": checked.errors,
        "rounding": checked.rounding,
    }


def about(name: str, entry: Entry) -> dict[str, Any]:
    """The model that a row describes."""
    return {"model": name, "framework": entry.framework, "source": entry.source}
