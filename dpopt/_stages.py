"""What a transformation does to privacy, said by the transformation itself.

Optax composes functions and forgets what they were. An accountant needs to know, so each of dpopt's own transformations
carries a ``stage``: a plain description (its sensitivity, its noise) that `dpopt.chain` reads when it is built. A chain
made by ``optax.chain`` has no such list; for it the stages report to a tape while the update is traced, together with
the very arrays that went in and came out. That is enough to see that the noise fell on the clipped sum itself and on
nothing else.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import optax


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

    name = "add_gaussian_noise"

    def stddev(self, step: Any) -> Any:
        return self.noise_stddev(step) if callable(self.noise_stddev) else self.noise_stddev


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
            new_updates, new_state = update(updates, state, params, **extra_args)
            record(stage, updates, new_updates)
            return new_updates, new_state

        self = super().__new__(cls, init, recorded_update)
        self.stage = stage
        return self

    def __reduce__(self):  # a NamedTuple would try to rebuild itself from (init, update) alone
        raise TypeError("a transformation holds functions and cannot be pickled; save its state instead.")


@dataclasses.dataclass(frozen=True)
class Report:
    """One stage (or the privacy of a whole chain) as it ran, with what it read and wrote."""

    what: Any
    inputs: Any
    outputs: Any


_Tape = TypeVar("_Tape", bound=list[Report] | None)
_tape: contextvars.ContextVar[list[Report] | None] = contextvars.ContextVar("dpopt_tape", default=None)


def record(what: Any, inputs: Any, outputs: Any) -> None:
    """Reports to the tape, where one is listening."""
    tape = _tape.get()
    if tape is not None:
        tape.append(Report(what, inputs, outputs))


@contextlib.contextmanager
def listening(tape: _Tape) -> Iterator[_Tape]:
    """Collects what stages report while the block runs; ``listening(None)`` silences them."""
    token = _tape.set(tape)
    try:
        yield tape
    finally:
        _tape.reset(token)


def same_arrays(a: Any, b: Any) -> bool:
    """Whether two pytrees hold the very same array objects: nothing happened in between."""
    a_leaves, b_leaves = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a_leaves) == len(b_leaves) and all(x is y for x, y in zip(a_leaves, b_leaves, strict=True))
