"""Descriptions of what transformations do to privacy.

Optax composes functions, which cannot be read back from the result. Accounting needs to know them, so each of dpopt's
transformations has a ``stage``: a plain description (its sensitivity, its noise) that `dpopt.chain` reads. A chain made
by ``optax.chain`` has no list of stages; for it they are recorded while `dpopt.inspection` traces the update.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax
import optax

from dpopt.common import validate
from dpopt.common.averages import at_step
from dpopt.common.types import PyTree, ScalarOrSchedule

if TYPE_CHECKING:
    from dpopt.correlated.strategy import Strategy
    from dpopt.preconditioners.base import Preconditioner
    from dpopt.privacy import Privacy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precondition:
    """A diagonal applied to every per-example gradient before the clip."""

    preconditioner: Preconditioner

    name = "precondition"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
    """Bounds what one example can add to the sum."""

    sensitivity: float | jax.Array  # L2, add/remove of one unit of privacy; traced under inject_hyperparams
    unit: str = "example"

    name = "clip_and_sum"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """Adds Gaussian noise of the given standard deviation to the clipped sum."""

    noise_stddev: ScalarOrSchedule
    strategy: Strategy | None = None  # how noise is correlated over steps; None: not at all

    @property
    def name(self) -> str:
        return "add_gaussian_noise" if self.strategy is None else "add_correlated_noise"

    def stddev(self, step: int | jax.Array) -> float | jax.Array:
        return at_step(self.noise_stddev, step)

    def stddev_in(self, state: PyTree) -> float | jax.Array:
        """The standard deviation of the noise that is added next, from the state of the noise stage."""
        stddev = self.stddev(state.count)
        return stddev if self.strategy is None else stddev * self.strategy.deviation(state.count - state.start)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Normalize:
    """Divides the noisy sum by a public constant."""

    divisor: float | jax.Array

    name = "normalize_by"


Stage: TypeAlias = Precondition | Clip | Noise | Normalize


class StageUpdate(Protocol):
    """Optax's ``update``. A stage may also take or return a promise, or a sum with its rounding error."""

    def __call__(
        self, updates: PyTree, state: optax.OptState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[PyTree, optax.OptState]: ...


class StagedTransformation(optax.GradientTransformationExtraArgs):
    """An Optax transformation with a description of what it does to privacy."""

    update: StageUpdate  # pyright: ignore[reportIncompatibleVariableOverride] a tuple's fields cannot be set
    stage: Stage

    def __new__(cls, init: optax.TransformInitFn, update: StageUpdate, stage: Stage) -> StagedTransformation:
        def recorded_update(updates: PyTree, state: PyTree, params: optax.Params | None = None, **extra_args: Any):
            validate.public_arguments(extra_args)
            new_updates, new_state = update(updates, state, params, **extra_args)
            record(stage)
            return new_updates, new_state

        self = super().__new__(cls, init, recorded_update)
        self.stage = stage
        return self

    def __reduce__(self):  # a NamedTuple would try to rebuild itself from (init, update) alone
        raise TypeError("a transformation holds functions and cannot be pickled; save its state instead.")


Reports: TypeAlias = "list[Stage | Privacy]"
_reports: contextvars.ContextVar[Reports | None] = contextvars.ContextVar("dpopt_reports", default=None)


def record(what: Stage | Privacy) -> None:
    """Reports a stage (or the privacy of a whole chain) that has run; does nothing outside of `listening`."""
    reports = _reports.get()
    if reports is not None:
        reports.append(what)


@contextlib.contextmanager
def listening(reports: Reports | None) -> Generator[None]:
    """Appends to ``reports`` what stages `record` while the block runs; ``listening(None)`` discards it."""
    token = _reports.set(reports)
    try:
        yield
    finally:
        _reports.reset(token)
