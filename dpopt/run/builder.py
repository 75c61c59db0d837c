"""The builder: describes a private run, validates it step by step, and calibrates its noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpopt import accounting, events
from dpopt._units import stated_for
from dpopt.chain import PrivateOptimizer, chain
from dpopt.clipping import AdaptiveClip, FixedClip, as_clip_function
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.common.types import ScalarOrSchedule
from dpopt.correlated.strategy import Strategy
from dpopt.ledger import Ledger
from dpopt.optimizers.averaging import average_params
from dpopt.preconditioners.base import Preconditioner, precondition
from dpopt.private_mean import privatize
from dpopt.run.allowance import spent_by
from dpopt.run.plan import Budget, Plan, Sampler
from dpopt.samplers.parts import BallsInBinsSampler, CyclicPoissonSampler, EpochSampler
from dpopt.samplers.truncated import TruncatedPoissonSampler
from dpopt.sampling import FixedSizeSampler, PoissonSampler

if TYPE_CHECKING:
    from dpopt.run.results import TrainResult
    from dpopt.tuning.selection import Selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Builder:
    """Builds a private run: ``Builder(...).precondition(...).clip(...).budget(...).then(...).build()``.

    Immutable: every method returns a new builder and checks its arguments at once.

    Args:
        num_examples: size of the data set (for user-level privacy, the number of clients or users).
        expected_batch_size: expected number of examples in a batch.
        steps: number of steps of the whole run.
        key: PRNG key of the noise, for this run alone. Each call of `Plan.run` mixes fresh bits of the operating system
            into it; with ``replay=True`` it does not, and noise and batches derive from the key. The sampler's seed is
            derived from it unless one is given.
        seed: seed of the sampler, or None.
        sampling: ``"poisson"``, or ``"fixed_size"`` (distinct examples, drawn afresh each step; accounted replace-one);
            or ``"truncated_poisson"``, whose batches all have ``max_batch_size`` rows (`dpopt.samplers.truncated`);
            or, for correlated noise, ``"cyclic_poisson"``, ``"epochs"`` or ``"balls_in_bins"``
            (`dpopt.samplers.parts`).
        parts: number of parts of the data, which ``"cyclic_poisson"`` samples in turn; None for the number of steps
            over which the noise is correlated.
        pad_to: batches are padded to a multiple of this; None for the sampler's default.
        max_batch_size: rows of a batch, required by ``"truncated_poisson"``.
        unit: ``"example"``, ``"client"`` or ``"user"``: what one row of the data is. A plan for clients or users counts
            and samples them, and runs with the result of `dpopt.federated.client_deltas` or
            `dpopt.users.per_user_grads` in place of a loss.

    Raises:
        ValueError, TypeError: here and in every method, for a bad argument or a call out of order.

    *Privacy*: `build` draws nothing and reads no data; the `Plan` it returns states what the run will cost.

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
    parts: int | None = None
    pad_to: int | None = None
    max_batch_size: int | None = None
    unit: str = "example"

    _preconditioners: tuple[Preconditioner, ...] = ()
    _clip: Any = None
    _strategy: Strategy | None = None
    _noise_multiplier: ScalarOrSchedule | None = None
    _budget: Budget | None = None
    _mechanism: Callable[..., PrivateOptimizer] = privatize
    _post: tuple[optax.GradientTransformation, ...] = ()
    _average: optax.GradientTransformation | None = None

    def __post_init__(self):
        for name in ("num_examples", "expected_batch_size", "steps", "seed", "parts", "pad_to", "max_batch_size"):
            object.__setattr__(self, name, validate.plain(getattr(self, name)))
        validate.positive_int(steps=self.steps)
        validate.prng_key(self.key)
        schemes = "poisson", "truncated_poisson", "fixed_size", "cyclic_poisson", "epochs", "balls_in_bins"
        validate.one_of(schemes, sampling=self.sampling)
        if self.parts is not None and self.sampling != "cyclic_poisson":
            raise ValueError(f"parts={self.parts} is for sampling='cyclic_poisson'; got sampling={self.sampling!r}.")
        if (self.max_batch_size is not None) != (self.sampling == "truncated_poisson"):
            raise ValueError(
                f"sampling='truncated_poisson' and max_batch_size go together; got sampling={self.sampling!r} and "
                f"max_batch_size={self.max_batch_size}."
            )
        if self.sampling == "truncated_poisson" and self.pad_to is not None:
            raise ValueError(f"batches of max_batch_size rows are padded to no multiple; got pad_to={self.pad_to}.")
        validate.one_of(("example", "client", "user"), unit=self.unit)
        self._sampler()

    def precondition(self, preconditioner: Preconditioner) -> Builder:
        """Adds a diagonal before the clip (`dpopt.side_information` and its relatives); several multiply."""
        precondition(preconditioner)
        if self._clip is not None:
            raise ValueError("precondition(...) must come before clip(...): after it, it would undo the bound.")
        return dataclasses.replace(self, _preconditioners=(*self._preconditioners, preconditioner))

    def clip(self, l2_clip_norm: FixedClip | AdaptiveClip) -> Builder:
        """Sets the clip norm, or a clip function of `dpopt.clipping`, or `dpopt.adaptive.quantile_clip`."""
        if self._clip is not None:
            raise ValueError("clip(...) was called already: a run clips once.")
        clip = l2_clip_norm if isinstance(l2_clip_norm, AdaptiveClip) else as_clip_function(l2_clip_norm)
        return dataclasses.replace(self, _clip=clip)

    def correlate(self, strategy: Strategy) -> Builder:
        """Correlates the noise over steps, by a strategy of `dpopt.correlated` that covers all of them."""
        if not isinstance(strategy, Strategy):  # pyright: ignore[reportUnnecessaryIsInstance]  whatever a user passes
            raise TypeError(
                f"strategy must be made by dpopt.correlated, such as banded(8, steps=...); got {strategy!r}."
            )
        if strategy.steps < self.steps:
            raise ValueError(f"{strategy.name} covers {strategy.steps} steps, and the run has {self.steps}.")
        if self._strategy is not None:
            raise ValueError("correlate(...) was called already: a run has one strategy.")
        return dataclasses.replace(self, _strategy=strategy)

    def noise(self, noise_multiplier: ScalarOrSchedule) -> Builder:
        """Sets the noise multiplier: a number, or a schedule ``step -> number``. 0 means no privacy."""
        if not callable(noise_multiplier):
            validate.non_negative(noise_multiplier=noise_multiplier)
        self._check_noise_is_free("noise")
        return dataclasses.replace(self, _noise_multiplier=validate.plain(noise_multiplier))._checked()

    def budget(
        self,
        *,
        epsilon: float,
        delta: float,
        accountant: accounting.Accountant = "pld",
        earlier: dp_accounting.DpEvent | TrainResult | Selection | None = None,
    ) -> Builder:
        """Calibrates the noise to the least that keeps the whole run within (epsilon, delta).

        ``earlier`` is what was spent before on the same records: the result of an earlier run, or an event for the same
        ``unit``, which an event does not say. It and the run together stay within the budget, and every epsilon and
        statement of the plan and of its results covers both.

        Warns (UserWarning) if delta is not below 1 / num_examples.
        """
        self._check_noise_is_free("budget")
        event = spent_by(earlier, self.unit)
        budget = Budget(epsilon, delta, accountant, event)
        if event is not None and (spent := budget.spent(Ledger())) >= epsilon:
            raise ValueError(f"earlier: {spent:.4g} is spent already at delta {delta:g}, and epsilon is {epsilon:g}.")
        validate.small_delta(delta, self.num_examples)
        if self.sampling == "fixed_size" and accountant != "rdp":
            raise ValueError("batches of fixed size have a Renyi bound only: pass accountant='rdp'.")
        return dataclasses.replace(self, _budget=budget)._checked()

    def mechanism(self, make_core: Callable[..., PrivateOptimizer]) -> Builder:
        """Replaces the private part, for optimizers with more than one query per step.

        ``make_core`` takes the arguments of `dpopt.privatize` and states its own privacy, which the budget then covers.
        """
        if not callable(make_core):
            raise TypeError(f"mechanism must be a function with the arguments of dpopt.privatize; got {make_core!r}.")
        return dataclasses.replace(self, _mechanism=make_core)

    def then(self, *transformations: optax.GradientTransformation) -> Builder:
        """Appends post-processing: any Optax transformations, ending with the learning rate."""
        if not self._noise_is_set:
            raise ValueError(
                "then(...) is post-processing, which comes after the noise: call noise(...) or budget(...) first."
            )
        return dataclasses.replace(self, _post=self._post + transformations)._checked()

    def average(self, decay: float = 0.999) -> Builder:
        """Keeps a moving average of the parameters beside them (`dpopt.average_params`): ``result.averaged_params``."""
        if self._average is not None:
            raise ValueError("average(...) was called already: a run keeps one average.")
        return dataclasses.replace(self, _average=average_params(decay))

    def build(self) -> Plan:
        """Calibrates the noise and returns the `Plan`.

        Raises:
            ValueError: if the clip, the noise or the update rule is missing, or the budget cannot be met.
        """
        calls = {
            "clip(l2_clip_norm)": self._clip is not None,
            "noise(multiplier) or budget(epsilon=..., delta=...)": self._noise_is_set,
            "then(optax.sgd(...)) or another update rule": bool(self._post),
        }
        if missing := [call for call, was_made in calls.items() if not was_made]:
            raise ValueError(f"the builder is missing {'; '.join(missing)}.")
        sampler = self._sampler()
        noise_multiplier = self._noise_multiplier if self._budget is None else self._calibrated(self._budget)
        optimizer = self._optimizer(noise_multiplier)
        # Fails now if no theorem covers this noise (correlated, or varying) under the sampler.
        events.step_event(optimizer.privacy, sampler.scheme, self.steps - 1)
        return Plan(
            optimizer=optimizer,
            sampler=sampler,
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

    def _checked(self) -> Builder:
        """Builds the optimizer, with any noise, so that a misplaced stage is reported now."""
        self._optimizer(self._noise_multiplier if self._budget is None else 1.0)
        return self

    def _calibrated(self, budget: Budget) -> float:
        def make_event(noise_multiplier: float) -> dp_accounting.DpEvent:
            event = events.compose(self._optimizer(noise_multiplier).privacy, self._sampler(), self.steps)
            return events.following(budget.earlier, event)

        return accounting.calibrate_event(
            make_event, epsilon=budget.epsilon, delta=budget.delta, accountant=budget.accountant
        )

    def _optimizer(self, noise_multiplier: ScalarOrSchedule | None) -> PrivateOptimizer:
        more = {} if self._strategy is None else {"noise": self._strategy}
        core = self._mechanism(
            l2_clip_norm=self._clip,
            noise_multiplier=noise_multiplier,
            expected_batch_size=self.expected_batch_size,
            key=self.key,
            preconditioner=self._preconditioners,
            **more,
        )
        last = () if self._average is None else (self._average,)
        optimizer = chain(core, *self._post, *last)
        return optimizer if self.unit == "example" else stated_for(self.unit, optimizer)

    def _sampler(self) -> Sampler:
        seed = self.seed
        if seed is None:
            # Far from the numbers that noise folds in (0, 1, 2, ...), so that batches and noise share no randomness.
            bits = jax.random.bits(jax.random.fold_in(self.key, 2**31 - 1), (2,), jnp.uint32)
            seed = int.from_bytes(np.asarray(bits).tobytes(), "little")
        n, batch, pad_to = self.num_examples, self.expected_batch_size, self.pad_to
        size = cast(int, batch)  # samplers that need an integer reject any other number
        match self.sampling:
            case "poisson":
                return PoissonSampler(n, batch, seed=seed, pad_to=pad_to)
            case "truncated_poisson":
                return TruncatedPoissonSampler(n, batch, max_batch_size=cast(int, self.max_batch_size), seed=seed)
            case "cyclic_poisson":
                own = 1 if self._strategy is None else self._strategy.bands
                parts = own if self.parts is None else self.parts
                return CyclicPoissonSampler(n, batch, parts=parts, seed=seed, pad_to=pad_to)
            case "epochs":
                return EpochSampler(n, size, seed=seed, pad_to=pad_to)
            case "balls_in_bins":
                return BallsInBinsSampler(n, size, seed=seed, pad_to=pad_to)
            case _:
                return FixedSizeSampler(n, size, seed=seed, pad_to=1 if pad_to is None else pad_to)
