"""Types at the seams of a run: what training needs of a sampler, and the options it takes by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self, TypedDict

if TYPE_CHECKING:
    import jax

    from dpopt.common.types import PyTree
    from dpopt.gradients import Engine
    from dpopt.run.checkpoint import Checkpointer
    from dpopt.run.plan import Budget
    from dpopt.samplers.parts import InParts
    from dpopt.sampling import Batch, Scheme


class RunSampler(Protocol):
    """A sampler as a run uses it: any of `dpopt.sampling` and `dpopt.samplers`."""

    num_examples: int
    seed: int

    @property
    def scheme(self) -> Scheme | InParts: ...

    def batch(self, step: int, /) -> Batch: ...

    def reseeded(self, seed: int, /) -> Self: ...

    def hand_out(self, stop: int, /) -> None: ...


class Options(TypedDict, total=False):
    """What ``Plan.run`` takes by name; see `dpopt.run.loop.train`."""

    steps: int | None
    budget: Budget | None
    checkpointer: Checkpointer | None
    on_step: Callable[[int, PyTree], None] | None
    eval_fn: Callable[[PyTree], PyTree] | None
    eval_every: int | None
    progress: bool | None
    extra: Callable[[int, PyTree], dict[str, Any]] | None
    place_batch: Callable[[Any], Any] | None
    prefetch: int
    microbatch_size: int | None
    engine: Engine
    replay: bool
    verify: bool
    example_key: jax.Array | None


def check_options(budget: Any, checkpointer: Any, functions: dict[str, Any]) -> None:
    """Raises a TypeError for what is none of its kind."""
    if budget is not None and not hasattr(budget, "replacing"):
        raise TypeError(f"budget must be a dpopt.Budget(epsilon, delta); got {budget!r}.")
    if checkpointer is not None and not hasattr(checkpointer, "restore"):
        raise TypeError(f"checkpointer must be a dpopt.run.checkpoint.Checkpointer(directory); got {checkpointer!r}.")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function; got {function!r}.")
