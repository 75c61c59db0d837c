"""The printed summary of a plan."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dpopt import events
from dpopt.chain import PrivateOptimizer
from dpopt.common.names import name_of
from dpopt.common.types import PyTree
from dpopt.ledger import Ledger
from dpopt.samplers.parts import InParts
from dpopt.sampling import FixedSizeSampler

if TYPE_CHECKING:
    from dpopt.run.plan import Plan


def summary(plan: Plan, params: PyTree) -> str:
    """A table of the plan; see `dpopt.run.plan.Plan.summary`."""
    sampler = plan.sampler
    core, *post = plan.optimizer.stages
    stages = (*(core.stages or (core,)), *post)
    rows = [
        ("stages", " > ".join(_stage_name(s) for s in stages)),
        ("sensitivity", _sensitivity(plan, stages)),
        ("noise multiplier", _noise_multiplier(plan)),
        *_queries(plan),
        ("sampling", f"{sampler.scheme}, {sampler.expected_batch_size:g} of {sampler.num_examples} expected"),
        *_correlation(plan),
        ("step event", _step_event(plan)),
        *_spent_earlier(plan),
        ("planned epsilon", _epsilon_by_step(plan)),
        ("optimizer state", f"{_bytes_per_parameter(plan.optimizer, params)} bytes per parameter"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _stage_name(transformation: Any) -> str:
    stage = getattr(transformation, "stage", None)
    if stage is not None:
        made_by = getattr(stage, "preconditioner", None)
        return f"{stage.name}({type(made_by).__name__})" if made_by is not None else stage.name
    return name_of(transformation.update)


def _sensitivity(plan: Plan, stages: tuple[Any, ...]) -> str:
    makers = (getattr(getattr(s, "stage", None), "preconditioner", None) for s in stages)
    norm = "".join(getattr(m, "sensitivity_note", "") for m in makers)
    return f"{plan.sensitivity:g}{norm} (L2, add or remove one {plan.optimizer.privacy.unit})"


def _noise_multiplier(plan: Plan) -> str:
    if callable(plan.noise_multiplier):
        return "schedule"
    twice = ", and replacing an example counts twice" if isinstance(plan.sampler, FixedSizeSampler) else ""
    return f"{plan.noise_multiplier:.4g} (the step event has less: it pays for rounding{twice})"


def _queries(plan: Plan) -> list[tuple[str, str]]:
    queries = plan.optimizer.privacy.queries
    if len(queries) < 2:
        return []
    if plan.optimizer.privacy.varies:
        return [("queries a step", f"up to {len(queries)}, and not the same at every step")]
    multipliers = " and ".join(f"{q.multiplier(0):.4g}" for q in queries)
    return [("queries a step", f"{len(queries)}, with noise multipliers {multipliers}")]


def _correlation(plan: Plan) -> list[tuple[str, str]]:
    strategies = [q.strategy for q in plan.optimizer.privacy.queries if q.strategy is not None]
    if not strategies:
        return []
    (strategy,) = strategies
    draws, kept = strategy.stream.draws, strategy.stream.num_buffers
    return [("noise over steps", f"{strategy.name}: {draws} draws a step, keeps {kept} arrays like the parameters")]


def _step_event(plan: Plan) -> str:
    privacy, scheme = plan.optimizer.privacy, plan.sampler.scheme
    if isinstance(scheme, InParts):  # the cost of a step depends on those before it
        return f"the first: {events.step_event(privacy, scheme, 0)!r}"
    return ("the first: " if privacy.varies else "") + repr(privacy.step_event(0, scheme.relation))


def _spent_earlier(plan: Plan) -> list[tuple[str, str]]:
    if plan.budget is None or plan.budget.earlier is None:
        return []
    return [("spent earlier", f"{plan.budget.spent(Ledger()):.3g} (in the planned epsilon)")]


def _epsilon_by_step(plan: Plan) -> str:
    if plan.budget is None:
        return "no delta set; see epsilon(step, delta=...)"
    steps = sorted({max(1, math.ceil(plan.steps * part)) for part in (0.01, 0.1, 0.25, 0.5, 1.0)})
    spent = ", ".join(f"{t}: {plan.epsilon(t):.3f}" for t in steps)
    return f"{spent} (delta {plan.budget.delta:g}, {plan.budget.accountant})"


def _bytes_per_parameter(optimizer: PrivateOptimizer, params: PyTree) -> str:
    params = jax.ShapeDtypeStruct((1_000, 1_000), jnp.float32) if params is None else params
    try:
        state = jax.eval_shape(optimizer.init, params)
    except ValueError:
        return "unknown (a diagonal is bound to the model's tree: see summary(params))"
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    return f"{size / sum(math.prod(jnp.shape(p)) for p in jax.tree.leaves(params)):.2f}"
