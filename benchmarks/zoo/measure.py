"""One model: its clipped gradient is checked, and then timed and weighed beside the ordinary one."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import dpopt
from benchmarks.cost import gradients, memory, speed, timing
from benchmarks.cost.families import Family
from benchmarks.zoo.entries import Entry
from dpopt.engines import fallback

WAYS = ("ordinary", "auto", "ghost", "vmap")
FELL_BACK = "vmap, fallen back"


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """What dpopt warns of inside, though it may have done so before in this process."""
    fallback._warned.clear()
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += dict.fromkeys(str(w.message) for w in caught if w.category is UserWarning)


def chosen(family: Family) -> dict[str, Any]:
    """What ``auto`` takes, and what the planner expects of time and memory, in units of the ordinary gradient's."""
    example = jax.tree.map(lambda x: x[0], family.batch)
    size = gradients.batch_size(family)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            explanation = dpopt.explain(family.loss_fn, family.params, example, batch_size=size)
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
    """That of bfloat16 if the loss computes in it: sums that one engine takes in bfloat16 another takes in float32."""
    example = jax.tree.map(lambda x: x[0], family.batch)
    program = str(jax.make_jaxpr(family.loss_fn)(family.params, example))
    return float(jnp.finfo(jnp.bfloat16).eps) if "bf16[" in program else 0.0


def _over_ordinary(figures: dict[str, float]) -> dict[str, float]:
    return {name: x / figures["ordinary"] for name, x in figures.items()}


def measure(name: str, entry: Entry, budget_s: float) -> dict[str, Any]:
    """Seconds, seconds to compile and compiled memory of the ordinary gradient and of dpopt's engines, and ratios."""
    with said() as messages:
        family = entry.build()
        args = (family.params, family.batch, gradients.diagonal(family))
        clip = speed.clip_norm(family)
        again = speed.in_microbatches(family, clip)
        ways: dict[str, Callable] = {n: gradients.by_name(family, n, clip) for n in WAYS}
        checked = speed.Checked(name, args, {"vmap": ways["vmap"]}, again, rounding(family))
        calls = {n: _call(checked.add(n, ways[n]), args) for n in WAYS}
        seconds = timing.with_few_slow(calls, checked.once, budget_s)
        choice = chosen(family)
    if any("Falling back" in m for m in messages):  # also one that only shows where the engine runs
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
    """Which model a row is of."""
    return {"model": name, "framework": entry.framework, "source": entry.source}


def _call(fn: Callable, args: tuple) -> timing.Call:
    return lambda: jax.block_until_ready(fn(*args))
