"""What a chain of transformations costs in privacy, before sampling and composition.

`Privacy` lists the Gaussian queries of a step. `dpopt.chain` reads it off the stages it is given; for a chain put
together by ``optax.chain``, `dpopt.inspection` finds it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from jax.core import Tracer

from dpopt import _stages
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.engines import sums

PRIVATE_STAGES = ("precondition", "clip_and_sum", "add_gaussian_noise", "add_correlated_noise", "normalize_by")


class Relation(enum.Enum):
    """Which data sets are neighbours, under the names that ``dp_accounting`` gives them.

    *Privacy*: a description; it holds no data.

    >>> Relation.of(dp_accounting.NeighboringRelation.REPLACE_ONE)
    <Relation.REPLACE_ONE: 'replace one'>
    """

    ADD_OR_REMOVE_ONE = "add or remove one"
    REPLACE_ONE = "replace one"

    @classmethod
    def of(cls, relation: Any) -> Relation:
        """This relation, or ``dp_accounting``'s of the same name."""
        return cls[relation.name]


@dataclasses.dataclass(frozen=True)
class Query:
    """One Gaussian query of a step.

    *Privacy*: the description that accounting reads; it holds no data.

    >>> Query(1.5).multiplier(step=0)
    1.5
    """

    noise_multiplier: float | Callable[[int], float]  # standard deviation over L2 sensitivity (add/remove-one)
    active: Callable[[int], bool] | None = None  # the steps on which it is asked; None: all
    strategy: Any = None  # `dpopt.correlated.Strategy`: how its noise is correlated over steps; None: not at all

    def multiplier(self, step: int) -> float:
        value = self.noise_multiplier(step) if callable(self.noise_multiplier) else self.noise_multiplier
        if isinstance(value, Tracer):
            raise ValueError(
                "the noise multiplier is a traced value, so its privacy cannot be stated. Under "
                "optax.inject_hyperparams name it in static_args=('l2_clip_norm', 'noise_multiplier', "
                "'expected_batch_size', 'key')."
            )
        return float(value)


@dataclasses.dataclass(frozen=True)
class Privacy:
    """What an optimizer does to privacy at each step, before sampling is taken into account.

    Args:
        queries: the Gaussian queries of a step. All read the same batch.
        unit: what one record is: ``"example"``, or for user-level privacy ``"client"`` (`dpopt.federated`) or
            ``"user"`` (`dpopt.users`).

    *Privacy*: `step_event` is exact for the queries listed; `dpopt.accounting` composes it over steps and sampling.

    >>> round(Privacy((Query(1.0),)).step_event().noise_multiplier, 2)
    1.0
    """

    queries: tuple[Query, ...]
    unit: str = "example"

    def step_event(self, step: int = 0, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> dp_accounting.DpEvent:
        """The event of step ``step``, for sums that float32 rounding lets move a little further than their sensitivity.

        Replacing a record moves a sum twice as far as removing one.

        Raises:
            ValueError: if noise is correlated over steps, where a step by itself has no event.
        """
        for query in self.queries:
            if query.strategy is not None and query.strategy.bands > 1:
                raise ValueError(
                    f"this optimizer's noise is correlated over steps ({query.strategy.name}), so its batches must "
                    "come from a sampler that keeps the steps of an example apart, and no theorem covers this one. "
                    "Use CyclicPoissonSampler (for banded strategies) or EpochSampler, of dpopt.samplers.parts."
                )
        distance = _distance(relation)
        asked = [q.multiplier(step) / distance for q in self.queries if q.active is None or q.active(step)]
        events: list[dp_accounting.DpEvent] = [
            dp_accounting.GaussianDpEvent(sigma) if sigma > 0 else dp_accounting.NonPrivateDpEvent() for sigma in asked
        ]
        return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)

    def only_query(self, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> tuple[float, Any]:
        """The noise multiplier and the strategy of an optimizer with one query, the same at all steps.

        Raises:
            ValueError: for any other optimizer.
        """
        if len(self.queries) != 1 or self.varies:
            raise ValueError(
                "batches from parts of the data are accounted for under one query a step with the same noise at all "
                "steps; this optimizer asks more, or varies its noise. Use dpopt.PoissonSampler."
            )
        (query,) = self.queries
        return query.multiplier(0) / _distance(relation), query.strategy

    @property
    def correlation(self) -> str | None:
        """How noise is correlated over steps: the strategy's name, or None."""
        return next((q.strategy.name for q in self.queries if q.strategy is not None and q.strategy.bands > 1), None)

    @property
    def varies(self) -> bool:
        """Whether the event depends on the step."""
        return any(callable(q.noise_multiplier) or q.active is not None for q in self.queries)


def _distance(relation: Relation) -> float:
    return (2.0 if Relation.of(relation) is Relation.REPLACE_ONE else 1.0) * (1 + sums.ROUNDING)


def check_order(names: Sequence[str]) -> None:
    """Raises ValueError, naming the position, unless stages of these names make a private optimizer."""
    order = "The order is precondition, clip_and_sum, add_gaussian_noise, normalize_by, then post-processing."

    def refuse(position: int, why: str):
        raise ValueError(f"stage {position} ({names[position]}) {why} {order}")

    seen: dict[str, int] = {}
    for i, name in enumerate("add_gaussian_noise" if n == "add_correlated_noise" else n for n in names):
        if name not in PRIVATE_STAGES:
            if name == "private optimizer":
                refuse(i, "adds a second clip and noise: it must come first, and alone.")
            if "add_gaussian_noise" not in seen:
                refuse(i, "comes before the noise: there it would change a sensitivity that nobody accounts for.")
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
        raise ValueError(f"the chain has no clip_and_sum, so nothing bounds what one example adds. {order}")
    if "add_gaussian_noise" not in seen:
        raise ValueError(
            "the chain has no add_gaussian_noise, so nothing is private. For a run without privacy, say so with "
            f"add_gaussian_noise(0.0, key). {order}"
        )


def privacy_of_stages(stages: Sequence[_stages.Stage]) -> Privacy:
    clip = next(s for s in stages if isinstance(s, _stages.Clip))
    noise = next(s for s in stages if isinstance(s, _stages.Noise))

    def multiplier(step: int) -> float:
        stddev = noise.stddev(step)
        if validate.concrete(stddev) == 0:
            return 0.0  # also under an infinite clip norm, where 0 / inf would be no better
        if validate.concrete(clip.sensitivity) == math.inf:
            raise ValueError("noise on a sum with an infinite clip norm protects nothing: pass a finite l2_clip_norm.")
        if validate.concrete(clip.sensitivity) == 0:
            raise ValueError("a clip norm of 0 leaves nothing of any example to train on: pass a positive one.")
        return stddev / clip.sensitivity

    sigma = multiplier if callable(noise.noise_stddev) else multiplier(0)
    query = Query(sigma, strategy=noise.strategy)
    return Privacy((query,), unit=clip.unit)


_MADE_BY = {
    "client": "what dpopt.federated.client_deltas(...) promises, or dpopt.federated.client_rows(rows, mask=mask) for "
    "changes that were computed elsewhere",
    "user": "what dpopt.users.per_user_grads(...) promises",
}


def check_unit(rows: str, stated: str) -> None:
    """Raises, or warns, unless the rows that are clipped are what the stated privacy is about."""
    if rows == stated:
        return
    if stated != "example":
        raise TypeError(
            f"this optimizer states its privacy for {stated}s and got gradients of single examples, or rows of which "
            f"it does not know whose they are: a bound on one {rows}'s is none on a {stated}'s. Pass "
            f"{_MADE_BY.get(stated, f'rows that are {stated}s')}."
        )
    module = {"client": "federated", "user": "users"}.get(rows, "")
    warnings.warn(
        f"the rows are whole {rows}s, and the optimizer states its privacy for single examples: the guarantee is for "
        f"adding or removing a {rows}. Wrap it in dpopt.{module}.{rows}_level(...) so that it says so.",
        FutureWarning,
        stacklevel=3,
    )
