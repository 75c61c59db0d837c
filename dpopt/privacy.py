"""The privacy cost of a chain of transformations, before sampling and composition.

`Privacy` lists the Gaussian queries of a step: `dpopt.chain` computes it, `dpopt.inspection` finds it for other chains.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
from jax.core import Tracer

from dpopt import _stages
from dpopt.common import trees, validate
from dpopt.common.lazy import dp_accounting
from dpopt.common.types import ScalarOrSchedule
from dpopt.composition.relation import Relation as Relation
from dpopt.engines import rounding

if TYPE_CHECKING:
    from dpopt.correlated.strategy import Strategy

PRIVATE_STAGES = ("precondition", "clip_and_sum", "add_gaussian_noise", "add_correlated_noise", "normalize_by")


@dataclasses.dataclass(frozen=True)
class Query:
    """One Gaussian query of a step.

    *Privacy*: a description for accounting; it holds no data.

    >>> Query(1.5).multiplier(step=0)
    1.5
    """

    noise_multiplier: ScalarOrSchedule  # standard deviation over L2 sensitivity (add/remove-one)
    active: Callable[[int], bool] | None = None  # the steps with this query; None: all
    strategy: Strategy | None = None  # how its noise is correlated over steps; None: not at all

    def multiplier(self, step: int) -> float:
        """The noise multiplier of a step, counted from 0.

        Raises:
            ValueError: if it is traced by JAX.
        """
        value: Any = self.noise_multiplier
        if callable(value):
            # Of a step as the noise stage counts it: its powers wrap around, and those of Python integers do not.
            with jax.ensure_compile_time_eval():
                value = value(jnp.asarray(step, jnp.int32))
        if isinstance(value, Tracer):
            raise ValueError(
                "the noise multiplier is a traced value, so its privacy cannot be stated. Under "
                "optax.inject_hyperparams name it in static_args=('l2_clip_norm', 'noise_multiplier', "
                "'expected_batch_size', 'key')."
            )
        return float(value)


@dataclasses.dataclass(frozen=True)
class Privacy:
    """The privacy cost of an optimizer's step, before sampling.

    Args:
        queries: the Gaussian queries of a step. All read the same batch.
        unit: one record: ``"example"``, ``"client"`` (`dpopt.federated`) or ``"user"`` (`dpopt.users`).

    *Privacy*: `step_event` is exact for the queries listed; `dpopt.accounting` composes it over steps and sampling.

    >>> round(Privacy((Query(1.0),)).step_event().noise_multiplier, 2)
    1.0
    """

    queries: tuple[Query, ...]
    unit: str = "example"

    def step_event(self, step: int = 0, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> dp_accounting.DpEvent:
        """The event of step ``step``. Sensitivities include float32 rounding.

        Replacing a record moves a sum twice as far as removing one.

        Raises:
            ValueError: if noise is correlated over steps: then a single step has no event.
        """
        if self.correlation is not None:
            raise ValueError(
                f"this optimizer's noise is correlated over steps ({self.correlation}), so its batches must come from "
                "a sampler that keeps the steps of an example apart; no theorem covers this sampler. Use "
                "CyclicPoissonSampler (for banded strategies) or EpochSampler, of dpopt.samplers.parts."
            )
        distance = _distance(relation)
        multipliers = [q.multiplier(step) / distance for q in self.queries if q.active is None or q.active(step)]
        events: list[dp_accounting.DpEvent] = [
            dp_accounting.GaussianDpEvent(m) if m > 0 else dp_accounting.NonPrivateDpEvent() for m in multipliers
        ]
        return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)

    def only_query(self, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> tuple[float, Strategy | None]:
        """The noise multiplier and the strategy, for an optimizer with a single query and the same noise at all steps.

        Raises:
            ValueError: for any other optimizer.
        """
        if len(self.queries) != 1 or self.varies:
            raise ValueError(
                "batches from parts of the data can be accounted for with one query per step and the same noise at all "
                "steps only; this optimizer has more queries, or varies its noise. Use dpopt.PoissonSampler."
            )
        (query,) = self.queries
        return query.multiplier(0) / _distance(relation), query.strategy

    @property
    def correlation(self) -> str | None:
        """The name of the strategy that correlates noise over steps, or None."""
        return next((q.strategy.name for q in self.queries if q.strategy is not None and q.strategy.bands > 1), None)

    @property
    def varies(self) -> bool:
        """Whether the event depends on the step."""
        return any(callable(q.noise_multiplier) or q.active is not None for q in self.queries)


def _distance(relation: Relation) -> float:
    return (2.0 if Relation.of(relation) is Relation.REPLACE_ONE else 1.0) * (1 + rounding.ROUNDING)


def check_order(names: Sequence[str]) -> None:
    """Raises ValueError, with the position, unless stages with these names make a private optimizer."""
    order = "The order is precondition, clip_and_sum, add_gaussian_noise, normalize_by, then post-processing."

    def refuse(position: int, why: str) -> NoReturn:
        raise ValueError(f"stage {position} ({names[position]}) {why} {order}")

    seen: dict[str, int] = {}
    for i, name in enumerate("add_gaussian_noise" if n == "add_correlated_noise" else n for n in names):
        if name not in PRIVATE_STAGES:
            if name == "private optimizer":
                refuse(i, "adds a second clip and noise: it must come first, and alone.")
            if "add_gaussian_noise" not in seen:
                refuse(i, "comes before the noise, where it would change the sensitivity, unaccounted for.")
            seen["post-processing"] = i
            continue
        if name in seen and name != "precondition":
            refuse(i, f"repeats stage {seen[name]}: a chain clips once, draws noise once and divides once.")
        if name == "add_gaussian_noise" and "clip_and_sum" not in seen:
            refuse(i, "comes before any clip_and_sum: noise protects a clipped sum.")
        if name == "precondition" and "clip_and_sum" in seen:
            refuse(i, f"comes after clip_and_sum (stage {seen['clip_and_sum']}): it would undo the bound.")
        if name == "normalize_by" and "add_gaussian_noise" not in seen:
            refuse(i, "comes before the noise, which is calibrated to the sum: divide after it.")
        if name == "normalize_by" and "post-processing" in seen:
            refuse(i, f"comes after post-processing (stage {seen['post-processing']}): divide right after the noise.")
        seen[name] = i
    if "clip_and_sum" not in seen:
        raise ValueError(f"the chain has no clip_and_sum, so nothing bounds the effect of one example. {order}")
    if "add_gaussian_noise" not in seen:
        raise ValueError(
            "the chain has no add_gaussian_noise, so nothing is private. For a run without privacy, use "
            f"add_gaussian_noise(0.0, key) explicitly. {order}"
        )


def privacy_of_stages(stages: Sequence[_stages.Stage]) -> Privacy:
    clip = next(s for s in stages if isinstance(s, _stages.Clip))
    noise = next(s for s in stages if isinstance(s, _stages.Noise))

    def multiplier(step: int) -> float | jax.Array:
        stddev = noise.stddev(step)
        if validate.concrete(stddev) == 0:
            return 0.0  # also under an infinite clip norm
        if validate.concrete(clip.sensitivity) == math.inf:
            raise ValueError("noise on a sum with an infinite clip norm protects nothing: pass a finite l2_clip_norm.")
        if validate.concrete(clip.sensitivity) == 0:
            raise ValueError("a clip norm of 0 scales every example to zero: pass a positive one.")
        return trees.widened(stddev) / trees.widened(clip.sensitivity)

    sigma = multiplier if callable(noise.noise_stddev) else multiplier(0)
    return Privacy((Query(sigma, strategy=noise.strategy),), unit=clip.unit)


_MADE_BY = {
    "client": "the promise of dpopt.federated.client_deltas(...), or dpopt.federated.client_rows(rows, mask=mask) for "
    "changes that were computed elsewhere",
    "user": "the promise of dpopt.users.per_user_grads(...)",
}


def check_unit(rows: str, stated: str) -> None:
    """Raises, or warns, unless the rows that are clipped are the unit of the stated privacy."""
    if rows == stated:
        return
    if stated != "example":
        raise TypeError(
            f"this optimizer states its privacy for {stated}s, but got gradients of single examples, or rows that are "
            f"not marked as {stated}s: a bound on one {rows} is not a bound on one {stated}. Pass "
            f"{_MADE_BY.get(stated, f'rows that are {stated}s')}."
        )
    module = {"client": "federated", "user": "users"}.get(rows, "")
    warnings.warn(
        f"the rows are whole {rows}s, but the optimizer states its privacy for single examples: the guarantee is for "
        f"adding or removing a {rows}. Wrap it in dpopt.{module}.{rows}_level(...) to state this.",
        FutureWarning,
        stacklevel=3,
    )
