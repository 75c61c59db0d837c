"""A plan: optimizer, sampler and accounting of one private run, which agree with each other."""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

import jax

from dpopt import accounting, events
from dpopt.chain import PrivateOptimizer
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.common.types import LossFn, PyTree
from dpopt.gradients import Engine
from dpopt.ledger import Ledger
from dpopt.run._summary import summary
from dpopt.run._types import Options
from dpopt.run.data import Data
from dpopt.run.journal import Journal
from dpopt.run.loop import train
from dpopt.run.results import TrainResult
from dpopt.run.statement import Statement, state
from dpopt.run.training import TrainStep, make_train_step
from dpopt.samplers.parts import BallsInBinsSampler, CyclicPoissonSampler, EpochSampler
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
    """A limit on the privacy cost of a run.

    Attributes:
        epsilon, delta: the limit.
        accountant: see `dpopt.epsilon`.
        earlier: what was spent before the run on the same records, for records of the same unit, such as the
            ``ledger.event`` of an earlier result; it counts against the limit. None: nothing.

    *Privacy*: a limit on (epsilon, delta) for the whole run and what came before it.

    >>> Budget(3.0, 1e-5).accountant
    'pld'
    """

    epsilon: float
    delta: float
    accountant: accounting.Accountant = "pld"
    earlier: dp_accounting.DpEvent | None = None

    def __post_init__(self):
        validate.positive(epsilon=self.epsilon)
        validate.delta(self.delta)
        for name in ("epsilon", "delta"):
            object.__setattr__(self, name, float(getattr(self, name)))
        validate.one_of(("pld", "rdp"), accountant=self.accountant)
        if self.earlier is not None:
            events.check(self.earlier)

    def spent(self, ledger: Ledger) -> float:
        """Epsilon of a ledger and of what was spent earlier, at this delta and by this accountant."""
        event = events.following(self.earlier, ledger.event)
        return accounting.epsilon_of_event(event, delta=self.delta, accountant=self.accountant)

    def replacing(self, other: Budget | None) -> Budget:
        """This budget in place of a plan's; what the plan's budget counts as spent earlier still counts.

        Raises:
            ValueError: if this budget counts something else as spent earlier, which would be missing from the journal.
        """
        earlier = None if other is None else other.earlier
        if self.earlier not in (None, earlier):
            raise ValueError(
                f"the budget counts {self.earlier} as spent earlier, and the plan's counts {earlier}: pass it to the "
                "plan, Builder.budget(..., earlier=...), whose runs record it."
            )
        return dataclasses.replace(self, earlier=earlier)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A private run: optimizer, sampler and accounting made from one description, so that they agree.

    The description is frozen. The journal is its one mutable part: the record of this plan's single run, created with
    the plan and appended to by `run`. It is not part of the description: plans are compared and printed without it, and
    ``dataclasses.replace(plan, ...)`` shares it unless it is given a new one.

    Attributes:
        optimizer: the private optimizer.
        sampler: draws batches; ``sampler.batch(step)``.
        steps: number of steps of the whole run.
        noise_multiplier: given or calibrated: a number, or a schedule ``step -> number``.
        sensitivity: L2 sensitivity of the clipped sum.
        budget: the `Budget`, or None.
        journal: what `run` has spent so far.

    *Privacy*: `event` is the planned cost of all steps. `epsilon` covers the planned steps and everything that the
    budget counts as spent earlier. `spent` covers what the run has actually cost, including lost steps, and what was
    spent earlier. All cover the parameters after every step; ``print(plan)`` is safe to publish.

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
    sensitivity: float | jax.Array
    budget: Budget | None
    journal: Journal = dataclasses.field(default_factory=Journal, compare=False, repr=False)

    @property
    def event(self) -> dp_accounting.DpEvent:
        """The ``dp_accounting`` event of the whole run."""
        return events.compose(self.optimizer.privacy, self.sampler, self.steps)

    def epsilon(self, step: int | None = None, *, delta: float | None = None) -> float:
        """Epsilon that ``step`` steps of the plan will cost (default: all of them). See `spent` for the actual cost.

        Warns (UserWarning) if a given delta is not below one over the number of examples.

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
        """Epsilon that this plan's run has spent so far according to its journal, including steps that were lost.

        Raises:
            ValueError: if no delta is set anywhere.
        """
        event = events.following(self._earlier, self.journal.ledger.event)
        return accounting.epsilon_of_event(event, delta=self._delta(delta), accountant=self._accountant)

    def statement(self, *, delta: float | None = None) -> Statement:
        """The guarantee of all planned steps, for a paper or a file (`dpopt.run.statement`). For that of a run use
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

    def run(self, loss_fn: LossFn, params: PyTree, fetch_batch: Data, **options: Unpack[Options]) -> TrainResult:
        """Trains within the budget, saves and resumes: `dpopt.run.loop.train` with this plan, its options by name."""
        return train(self, loss_fn, params, fetch_batch, **options)

    def train_step(self, loss_fn: LossFn, *, microbatch_size: int | None = None, engine: Engine = "auto") -> TrainStep:
        """`dpopt.make_train_step` with this plan's optimizer."""
        return make_train_step(loss_fn, self.optimizer, microbatch_size=microbatch_size, engine=engine)

    def summary(self, params: PyTree = None) -> str:
        """The plan as a table: stages, noise, sampling, and planned epsilon.

        The bytes of optimizer state are those for ``params`` (arrays or shapes), by default a square float32 matrix.
        """
        return summary(self, params)

    def __str__(self) -> str:
        return self.summary()
