"""A plan: the optimizer, the sampler and the accounting of one private run, which agree with each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dpopt import accounting, events
from dpopt.chain import PrivateOptimizer
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.common.names import name_of
from dpopt.gradients import Engine
from dpopt.ledger import Ledger
from dpopt.run._options import Options
from dpopt.run.journal import Journal
from dpopt.run.loop import train
from dpopt.run.results import TrainResult
from dpopt.run.statement import Statement, state
from dpopt.run.training import TrainStep, make_train_step
from dpopt.samplers.parts import BallsInBinsSampler, CyclicPoissonSampler, EpochSampler, InParts
from dpopt.samplers.truncated import TruncatedPoissonSampler
from dpopt.sampling import FixedSizeSampler, PoissonSampler

Sampler = (
    PoissonSampler
    | TruncatedPoissonSampler
    | FixedSizeSampler
    | CyclicPoissonSampler
    | EpochSampler
    | BallsInBinsSampler
)


@dataclasses.dataclass(frozen=True)
class Budget:
    """What may be spent.

    Attributes:
        epsilon, delta: the limit.
        accountant: see `dpopt.epsilon`.
        earlier: what was spent before the run on the same examples, such as the ``ledger.event`` of an earlier result;
            it counts against the limit. None: nothing.

    *Privacy*: a limit on (epsilon, delta) for the whole run and what came before it.

    >>> Budget(3.0, 1e-5).accountant
    'pld'
    """

    epsilon: float
    delta: float
    accountant: accounting.Accountant = "pld"
    earlier: dp_accounting.DpEvent | None = None

    def __post_init__(self):
        validate.positive(epsilon=self.epsilon, delta=self.delta)
        if self.delta >= 1:
            raise ValueError(f"delta must be below 1; got {self.delta}.")
        validate.one_of(("pld", "rdp"), accountant=self.accountant)
        if self.earlier is not None:
            events.check(self.earlier)

    def spent(self, ledger: Ledger) -> float:
        """Epsilon of what a ledger holds and of what was spent earlier, at this delta and by this accountant."""
        event = events.following(self.earlier, ledger.event)
        return accounting.epsilon_of_event(event, delta=self.delta, accountant=self.accountant)

    def replacing(self, other: Budget | None) -> Budget:
        """This budget instead of a plan's: what that one counts as spent earlier stays spent.

        Raises:
            ValueError: if this one counts something else, which the run's journal would not know.
        """
        earlier = None if other is None else other.earlier
        if self.earlier not in (None, earlier):
            raise ValueError(
                f"the budget counts {self.earlier} as spent earlier, and the plan's counts {earlier}: say it to the "
                "plan, Builder.budget(..., earlier=...), whose runs write it down."
            )
        return dataclasses.replace(self, earlier=earlier)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A private run that agrees with itself: optimizer, sampler and accounting come from one description.

    Attributes:
        optimizer: the private optimizer.
        sampler: draws batches; ``sampler.batch(step)``.
        steps: number of steps of the whole run.
        noise_multiplier: what was given or calibrated.
        sensitivity: L2 sensitivity of the clipped sum.
        budget: the `Budget`, or None.
        journal: what `run` has spent so far; it grows with every step, whoever holds the plan.

    *Privacy*: `event` says what the planned steps will cost; `epsilon` what they and all that the budget counts as
    spent earlier will cost; `spent` what the run has cost, and that: more, where steps were lost. They cover the
    parameters after every step; ``print(plan)`` is safe to publish.

    >>> import dpopt, optax
    >>> builder = dpopt.Builder(num_examples=1_000, expected_batch_size=100, steps=10, key=dpopt.secure_key())
    >>> plan = builder.clip(1.0).noise(2.0).then(optax.sgd(0.1)).build()
    >>> round(plan.epsilon(10, delta=1e-5), 2)
    0.8
    """

    optimizer: PrivateOptimizer
    sampler: Sampler
    steps: int
    noise_multiplier: Any
    sensitivity: Any
    budget: Budget | None
    journal: Journal = dataclasses.field(default_factory=Journal, compare=False, repr=False)

    @property
    def event(self) -> dp_accounting.DpEvent:
        """The ``dp_accounting`` event of the whole run."""
        return events.compose(self.optimizer.privacy, self.sampler, self.steps)

    def epsilon(self, step: int | None = None, *, delta: float | None = None) -> float:
        """Epsilon that ``step`` steps of the plan will cost (default: all of them). What was spent is `spent`.

        Warns (UserWarning) where a delta that is given is not below one over the number of examples.

        Raises:
            ValueError: if the run has fewer steps, or no delta is set anywhere.
        """
        step = self.steps if step is None else step
        validate.non_negative_int(step=step)
        if step > self.steps:
            raise ValueError(f"the plan covers {self.steps} steps; got step {step}. A longer run is another plan.")
        event = events.following(self._earlier, events.compose(self.optimizer.privacy, self.sampler, step))
        return accounting.epsilon_of_event(event, delta=self._delta(delta), accountant=self._accountant)

    def spent(self, *, delta: float | None = None) -> float:
        """Epsilon that this plan's run has spent so far, by its journal: also on steps that were lost.

        Raises:
            ValueError: if no delta is set anywhere.
        """
        event = events.following(self._earlier, self.journal.ledger.event)
        return accounting.epsilon_of_event(event, delta=self._delta(delta), accountant=self._accountant)

    def statement(self, *, delta: float | None = None) -> Statement:
        """What all planned steps promise, for a paper or a file (`dpopt.run.statement`). A run's own:
        ``result.statement``.

        Raises:
            ValueError: if no delta is set anywhere.
        """
        return state(
            events.following(self._earlier, self.event),
            delta=self._delta(delta),
            unit=self.optimizer.privacy.unit,
            accountant=self._accountant,
            correlation=self.optimizer.privacy.correlation,
        )

    @property
    def _earlier(self) -> dp_accounting.DpEvent | None:
        return None if self.budget is None else self.budget.earlier

    def _delta(self, given: float | None) -> float:
        default = None if self.budget is None else self.budget.delta
        return validate.chosen_delta(given, default, self.sampler.num_examples)

    @property
    def _accountant(self) -> accounting.Accountant:
        if self.budget is not None:
            return self.budget.accountant
        return "rdp" if isinstance(self.sampler, FixedSizeSampler) else "pld"

    def run(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        fetch_batch: Callable[[np.ndarray], Any] | Any,
        **options: Unpack[Options],
    ) -> TrainResult:
        """Trains within the budget, saves, resumes: `dpopt.run.loop.train` with this plan.

        Args:
            loss_fn, params, fetch_batch: see `dpopt.run.loop.train`.
            **options: those of `dpopt.run.loop.train`, by name.
        """
        return train(self, loss_fn, params, fetch_batch, **options)

    def train_step(
        self, loss_fn: Callable[..., Any], *, microbatch_size: int | None = None, engine: Engine = "auto"
    ) -> TrainStep:
        """`dpopt.make_train_step` with this plan's optimizer."""
        return make_train_step(loss_fn, self.optimizer, microbatch_size=microbatch_size, engine=engine)

    def summary(self, params: Any = None) -> str:
        """The plan in words and numbers.

        Args:
            params: the parameters (or shapes), to count the bytes of optimizer state; None for a square float32 matrix.
        """
        sampling = self.sampler.scheme
        core, *post = self.optimizer.stages
        stages = (*(core.stages or (core,)), *post)
        rows = [
            ("stages", " > ".join(_stage_name(s) for s in stages)),
            ("sensitivity", self._sensitivity(stages)),
            ("noise multiplier", self._noise_multiplier()),
            *self._queries(),
            ("sampling", f"{sampling}, {self.sampler.expected_batch_size:g} of {self.sampler.num_examples} expected"),
            *self._correlation(),
            ("step event", self._step_event()),
            *self._spent_earlier(),
            ("planned epsilon", self._epsilon_by_step()),
            ("optimizer state", f"{_bytes_per_parameter(self.optimizer, params)} bytes per parameter"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _sensitivity(self, stages: tuple[Any, ...]) -> str:
        makers = (getattr(getattr(s, "stage", None), "preconditioner", None) for s in stages)
        norm = "".join(getattr(m, "clip_norm", "") for m in makers)
        return f"{self.sensitivity:g}{norm} (L2, add or remove one {self.optimizer.privacy.unit})"

    def _queries(self) -> list[tuple[str, str]]:
        queries = self.optimizer.privacy.queries
        if len(queries) < 2 or self.optimizer.privacy.varies:
            return []
        multipliers = " and ".join(f"{q.multiplier(0):.4g}" for q in queries)
        return [("queries a step", f"{len(queries)}, with noise multipliers {multipliers}")]

    def _step_event(self) -> str:
        privacy, scheme = self.optimizer.privacy, self.sampler.scheme
        if isinstance(scheme, InParts):  # a step is as dear as those before it make it
            return f"the first: {events.step_event(privacy, scheme, 0)!r}"
        return repr(privacy.step_event(0, scheme.relation))

    def _spent_earlier(self) -> list[tuple[str, str]]:
        if self.budget is None or self._earlier is None:
            return []
        return [("spent earlier", f"{self.budget.spent(Ledger()):.3g} (in the planned epsilon)")]

    def _noise_multiplier(self) -> str:
        if callable(self.noise_multiplier):
            return "schedule"
        twice = ", and replacing an example counts twice" if isinstance(self.sampler, FixedSizeSampler) else ""
        return f"{self.noise_multiplier:.4g} (the step event has less: it pays for rounding{twice})"

    def _correlation(self) -> list[tuple[str, str]]:
        strategies = [q.strategy for q in self.optimizer.privacy.queries if q.strategy is not None]
        if not strategies:
            return []
        (strategy,) = strategies
        stream = strategy.stream
        return [
            (
                "noise over steps",
                f"{strategy.name}: {stream.draws} draws a step, keeps {stream.num_buffers} arrays like the parameters",
            )
        ]

    def _epsilon_by_step(self) -> str:
        if self.budget is None:
            return "no delta set; see epsilon(step, delta=...)"
        steps = sorted({max(1, math.ceil(self.steps * part)) for part in (0.01, 0.1, 0.25, 0.5, 1.0)})
        spent = ", ".join(f"{t}: {self.epsilon(t):.3f}" for t in steps)
        return f"{spent} (delta {self.budget.delta:g}, {self._accountant})"

    def __str__(self) -> str:
        return self.summary()


def _stage_name(transformation: Any) -> str:
    stage = getattr(transformation, "stage", None)
    if stage is not None:
        made_by = getattr(stage, "preconditioner", None)
        return f"{stage.name}({type(made_by).__name__})" if made_by is not None else stage.name
    return name_of(transformation.update)


def _bytes_per_parameter(optimizer: PrivateOptimizer, params: Any) -> str:
    params = jax.ShapeDtypeStruct((1_000, 1_000), jnp.float32) if params is None else params
    try:
        state = jax.eval_shape(optimizer.init, params)
    except ValueError:
        return "unknown (a diagonal is bound to the model's tree: see summary(params))"
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    return f"{size / sum(math.prod(jnp.shape(p)) for p in jax.tree.leaves(params)):.2f}"
