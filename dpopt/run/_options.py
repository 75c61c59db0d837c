"""The options of a training run, for type checkers."""

from collections.abc import Callable
from typing import Any, TypedDict

import jax

from dpopt.gradients import Engine


class Options(TypedDict, total=False):
    """What ``Plan.run`` takes by name; see `dpopt.run.loop.train`."""

    steps: int | None
    budget: Any
    checkpointer: Any
    on_step: Callable[[int, Any], None] | None
    eval_fn: Callable[[Any], Any] | None
    eval_every: int | None
    progress: bool | None
    extra: Callable[[int, Any], dict[str, Any]] | None
    place_batch: Callable[[Any], Any] | None
    prefetch: int
    microbatch_size: int | None
    engine: Engine
    replay: bool
    verify: bool
    example_key: jax.Array | None
