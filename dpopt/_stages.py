"""What a transformation does to privacy, said by the transformation itself.

Optax composes functions and forgets what they were. An accountant needs to know, so each of dpopt's own transformations
carries a ``stage``: a plain description (its sensitivity, its noise) that `dpopt.chain` reads when it is built. A chain
made by ``optax.chain`` has no such list; for it the stages report while `dpopt.inspection` traces the update.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import optax

from dpopt.common import validate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precondition:
    """A diagonal applied to every per-example gradient before the clip."""

    preconditioner: Any

    name = "precondition"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
    """Bounds what one example can add to the sum."""

    sensitivity: Any  # L2, add/remove of one unit of privacy; a float, or traced under inject_hyperparams
    unit: str = "example"

    name = "clip_and_sum"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """Adds Gaussian noise of the given standard deviation to the clipped sum."""

    noise_stddev: Any  # float, or a schedule: step -> float
    strategy: Any = None  # `dpopt.correlated.Strategy`: how noise is correlated over steps; None: not at all

    @property
    def name(self) -> str:
        return "add_gaussian_noise" if self.strategy is None else "add_correlated_noise"

    def stddev(self, step: Any) -> Any:
        return self.noise_stddev(step) if callable(self.noise_stddev) else self.noise_stddev

    def stddev_in(self, state: Any) -> Any:
        """Standard deviation of what is added next."""
        if self.strategy is None:
            return self.stddev(state.count)
        return self.noise_stddev * self.strategy.deviation(state.count - state.start)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Normalize:
    """Divides the noisy sum by a public constant."""

    divisor: Any

    name = "normalize_by"


Stage = Precondition | Clip | Noise | Normalize


class StagedTransformation(optax.GradientTransformationExtraArgs):
    """An Optax transformation that carries a description of what it does to privacy."""

    stage: Stage

    def __new__(cls, init: Callable, update: Callable, stage: Stage) -> "StagedTransformation":
        def recorded_update(updates, state, params=None, **extra_args):
            validate.public_arguments(extra_args)
            new_updates, new_state = update(updates, state, params, **extra_args)
            record(stage)
            return new_updates, new_state

        self = super().__new__(cls, init, recorded_update)
        self.stage = stage
        return self

    def __reduce__(self):  # a NamedTuple would try to rebuild itself from (init, update) alone
        raise TypeError("a transformation holds functions and cannot be pickled; save its state instead.")


_reports: contextvars.ContextVar[list | None] = contextvars.ContextVar("dpopt_reports", default=None)


def record(what: Any) -> None:
    """Reports a stage (or the privacy of a whole chain) that has run, where somebody is listening."""
    reports = _reports.get()
    if reports is not None:
        reports.append(what)


@contextlib.contextmanager
def listening(reports: list | None) -> Iterator[None]:
    """Collects what stages report while the block runs; ``listening(None)`` silences them."""
    token = _reports.set(reports)
    try:
        yield
    finally:
        _reports.reset(token)
