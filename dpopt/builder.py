"""The builder: says a private run in one sentence, checks it word by word, and works out the noise it needs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpopt import _validate, accounting, events
from dpopt.chain import PrivateOptimizer, chain, privatize
from dpopt.clipping import as_clip_function
from dpopt.gradients import Engine
from dpopt.journal import Journal
from dpopt.loop import TrainResult, train
from dpopt.preconditioning import Preconditioner, precondition
from dpopt.sampling import FixedSizeSampler, PoissonSampler
from dpopt.training import TrainStep, make_train_step

_NO_DELTA = "this plan was built from a noise multiplier, so no delta is set: pass delta=..."


@dataclasses.dataclass(frozen=True)
class Budget:
    """What may be spent.

    *Privacy*: a limit on (epsilon, delta) for the whole run.

    >>> Budget(3.0, 1e-5).accountant
    'pld'
    """

    epsilon: float
    delta: float
    accountant: accounting.Accountant = "pld"

    def __post_init__(self):
        _validate.positive(epsilon=self.epsilon, delta=self.delta)
        if self.delta >= 1:
            raise ValueError(f"delta must be below 1; got {self.delta}.")
        _validate.one_of(("pld", "rdp"), accountant=self.accountant)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Builder:
    """Builds a private run: ``Builder(...).precondition(...).clip(...).budget(...).then(...).build()``.

    Immutable: every method returns a new builder and checks its arguments at once.

    Args:
        num_examples: size of the data set (or number of clients, for user-level privacy).
        expected_batch_size: expected number of examples in a batch.
        steps: number of steps of the whole run.
        key: PRNG key of the noise, for this run alone. `Plan.run` mixes fresh bits of the operating system into it each
            time it is called, unless it is asked for ``replay=True``: then noise and batches follow from the key. The
            sampler's seed is derived from it unless one is given.
        seed: seed of the sampler, or None.
        sampling: ``"poisson"``, or ``"fixed_size"`` (distinct examples, drawn afresh each step; accounted replace-one).
        pad_to: batches are padded to a multiple of this; None for the sampler's default.

    Raises:
        ValueError, TypeError: here and in every method, for a bad argument or a call out of order.

    *Privacy*: `build` draws nothing and reads no data; the `Plan` it returns says what the run will cost.

    >>> plan = (
    ...     Builder(num_examples=50_000, expected_batch_size=256, steps=4_000, key=jax.random.key(0))
    ...     .clip(1.0)
    ...     .budget(epsilon=3.0, delta=1e-5)
    ...     .then(optax.adam(1e-3))
    ...     .build()
    ... )
    >>> 2.98 < plan.epsilon(step=4_000) <= 3.0
    True
    """

    num_examples: int
    expected_batch_size: float
    steps: int
    key: jax.Array = dataclasses.field(repr=False)
    seed: int | None = dataclasses.field(default=None, repr=False)
    sampling: str = "poisson"
    pad_to: int | None = None

    _preconditioners: tuple[Preconditioner, ...] = ()
    _clip: Any = None
    _noise_multiplier: Any = None
    _budget: Budget | None = None
    _mechanism: Callable[..., PrivateOptimizer] = privatize
    _post: tuple[optax.GradientTransformation, ...] = ()

    def __post_init__(self):
        _validate.positive_int(steps=self.steps)
        _validate.prng_key(self.key)
        _validate.one_of(("poisson", "fixed_size"), sampling=self.sampling)
        self._sampler()

    def precondition(self, preconditioner: Preconditioner) -> "Builder":
        """Adds a diagonal before the clip (`dpopt.side_information` and its relatives); several multiply."""
        precondition(preconditioner)
        if self._clip is not None:
            raise ValueError("precondition(...) must come before clip(...): after it, it would undo the bound.")
        return dataclasses.replace(self, _preconditioners=(*self._preconditioners, preconditioner))

    def clip(self, l2_clip_norm: Any) -> "Builder":
        """Sets the clip norm, or a clip function of `dpopt.clipping`."""
        if self._clip is not None:
            raise ValueError("clip(...) was called already: a run clips once.")
        return dataclasses.replace(self, _clip=as_clip_function(l2_clip_norm))

    def noise(self, noise_multiplier: Any) -> "Builder":
        """Sets the noise multiplier by hand: a number, or a schedule ``step -> number``. 0 means no privacy."""
        if not callable(noise_multiplier):
            _validate.non_negative(noise_multiplier=noise_multiplier)
        self._check_noise_is_free("noise")
        return dataclasses.replace(self, _noise_multiplier=noise_multiplier)._checked()

    def budget(self, *, epsilon: float, delta: float, accountant: accounting.Accountant = "pld") -> "Builder":
        """Asks for the least noise that keeps the whole run within (epsilon, delta).

        Warns (UserWarning) where delta is not below 1 / num_examples.
        """
        self._check_noise_is_free("budget")
        budget = Budget(epsilon, delta, accountant)
        _validate.small_delta(delta, self.num_examples)
        if self.sampling == "fixed_size" and accountant != "rdp":
            raise ValueError("batches of fixed size are accounted for by Renyi only: pass accountant='rdp'.")
        return dataclasses.replace(self, _budget=budget)._checked()

    def mechanism(self, make_core: Callable[..., PrivateOptimizer]) -> "Builder":
        """Replaces the private part, for optimizers that ask more than one query a step.

        ``make_core`` takes the arguments of `dpopt.privatize` and states its own privacy, which the budget then covers.
        """
        if not callable(make_core):
            raise TypeError(f"mechanism must be a function with the arguments of dpopt.privatize; got {make_core!r}.")
        return dataclasses.replace(self, _mechanism=make_core)

    def then(self, *transformations: optax.GradientTransformation) -> "Builder":
        """Appends post-processing: any Optax transformations, ending with the learning rate."""
        if self._noise_multiplier is None and self._budget is None:
            raise ValueError("then(...) is post-processing and comes after the noise: call noise(...) or budget(...).")
        return dataclasses.replace(self, _post=self._post + transformations)._checked()

    def build(self) -> "Plan":
        """Calibrates the noise and returns the `Plan`.

        Raises:
            ValueError: if the clip, the noise or the update rule is missing, or the budget cannot be met.
        """
        missing = [
            call
            for call, there in (
                ("clip(l2_clip_norm)", self._clip is not None),
                ("noise(multiplier) or budget(epsilon=..., delta=...)", self._noise_is_set),
                ("then(optax.sgd(...)) or another update rule", bool(self._post)),
            )
            if not there
        ]
        if missing:
            raise ValueError(f"the builder is missing {'; '.join(missing)}.")
        noise_multiplier = self._noise_multiplier if self._budget is None else self._calibrated(self._budget)
        return Plan(
            optimizer=self._optimizer(noise_multiplier),
            sampler=self._sampler(),
            steps=self.steps,
            noise_multiplier=noise_multiplier,
            sensitivity=self._clip.sensitivity,
            budget=self._budget,
        )

    @property
    def _noise_is_set(self) -> bool:
        return self._noise_multiplier is not None or self._budget is not None

    def _check_noise_is_free(self, call: str) -> None:
        if self._clip is None:
            raise ValueError(f"{call}(...) must come after clip(...): noise is scaled to the clip norm.")
        if self._noise_is_set:
            raise ValueError(f"{call}(...) sets the noise a second time; call noise(...) or budget(...) once.")

    def _checked(self) -> "Builder":
        """Puts the optimizer together, with any noise, so that a stage out of place is found now."""
        self._optimizer(self._noise_multiplier if self._budget is None else 1.0)
        return self

    def _calibrated(self, budget: Budget) -> float:
        def make_event(noise_multiplier: float) -> dp_accounting.DpEvent:
            return events.compose(self._optimizer(noise_multiplier).privacy, self._sampler(), self.steps)

        return accounting.calibrate_event(
            make_event, epsilon=budget.epsilon, delta=budget.delta, accountant=budget.accountant
        )

    def _optimizer(self, noise_multiplier: Any) -> PrivateOptimizer:
        core = self._mechanism(
            l2_clip_norm=self._clip,
            noise_multiplier=noise_multiplier,
            expected_batch_size=self.expected_batch_size,
            key=self.key,
            preconditioner=self._preconditioners,
        )
        return chain(core, *self._post)

    def _sampler(self) -> PoissonSampler | FixedSizeSampler:
        seed = self.seed
        if seed is None:
            # Far from the keys that noise folds in (0, 1, 2, ...), so that batches and noise share no randomness.
            bits = jax.random.bits(jax.random.fold_in(self.key, 2**31 - 1), (2,), jnp.uint32)
            seed = int.from_bytes(np.asarray(bits).tobytes(), "little")
        if self.sampling == "poisson":
            return PoissonSampler(self.num_examples, self.expected_batch_size, seed=seed, pad_to=self.pad_to)
        size = cast(int, self.expected_batch_size)  # the sampler refuses any other number
        return FixedSizeSampler(self.num_examples, size, seed=seed, pad_to=self.pad_to or 1)


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

    *Privacy*: `event` and `epsilon` say what the planned steps will cost, `spent` what the run has cost: more, where
    steps were lost. Both cover the parameters after every step; ``print(plan)`` is safe to publish.

    >>> plan = Builder(num_examples=1_000, expected_batch_size=100, steps=10, key=jax.random.key(0)).clip(1.0).noise(
    ...     2.0).then(optax.sgd(0.1)).build()
    >>> round(plan.epsilon(10, delta=1e-5), 2)
    0.8
    """

    optimizer: PrivateOptimizer
    sampler: PoissonSampler | FixedSizeSampler
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
        _validate.non_negative_int(step=step)
        if step > self.steps:
            raise ValueError(f"the plan covers {self.steps} steps; got step {step}. A longer run is another plan.")
        if delta is None:
            if self.budget is None:
                raise ValueError(_NO_DELTA)
            delta = self.budget.delta
        else:
            _validate.small_delta(delta, self.sampler.num_examples)
        event = events.compose(self.optimizer.privacy, self.sampler, step)
        return accounting.epsilon_of_event(event, delta=delta, accountant=self._accountant)

    def spent(self, *, delta: float | None = None) -> float:
        """Epsilon that this plan's run has spent so far, by its journal: also on steps that were lost.

        Raises:
            ValueError: if no delta is set anywhere.
        """
        if delta is None:
            if self.budget is None:
                raise ValueError(_NO_DELTA)
            delta = self.budget.delta
        return self.journal.ledger.epsilon(delta=delta, accountant=self._accountant)

    @property
    def _accountant(self) -> accounting.Accountant:
        if self.budget is not None:
            return self.budget.accountant
        return "rdp" if isinstance(self.sampler, FixedSizeSampler) else "pld"

    def run(self, loss_fn: Callable, params: Any, fetch_batch: Callable[[Any], Any], **options: Any) -> TrainResult:
        """Trains within the budget, saves, resumes: `dpopt.loop.train` with this plan."""
        return train(self, loss_fn, params, fetch_batch, **options)

    def train_step(
        self, loss_fn: Callable, *, microbatch_size: int | None = None, engine: Engine = "auto"
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
            ("sensitivity", f"{self.sensitivity:g} (L2, add or remove one {self.optimizer.privacy.unit})"),
            ("noise multiplier", "schedule" if callable(self.noise_multiplier) else f"{self.noise_multiplier:.4g}"),
            ("sampling", f"{sampling}, {self.sampler.expected_batch_size:g} of {self.sampler.num_examples} expected"),
            ("step event", repr(self.optimizer.privacy.step_event(0, sampling.relation))),
            ("planned epsilon", self._epsilon_by_step()),
            ("optimizer state", f"{_bytes_per_parameter(self.optimizer, params)} bytes per parameter"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

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
    return getattr(transformation.update, "__qualname__", "transformation").split(".")[0]


def _bytes_per_parameter(optimizer: PrivateOptimizer, params: Any) -> str:
    params = jax.ShapeDtypeStruct((1_000, 1_000), jnp.float32) if params is None else params
    try:
        state = jax.eval_shape(optimizer.init, params)
    except ValueError:
        return "unknown (a diagonal is bound to the model's tree: see summary(params))"
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    return f"{size / sum(math.prod(jnp.shape(p)) for p in jax.tree.leaves(params)):.2f}"
