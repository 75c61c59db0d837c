"""A branch that ordinarily is not taken, as a loop."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

_State = TypeVar("_State")


def if_any(rows: jax.Array, step: Callable[[_State], _State], state: _State) -> _State:
    """``step(state)`` if any of ``rows`` holds, else the state as it is.

    `cond` would run both sides under vmap. And what a loop takes along has to settle in memory, also if the loop takes
    no step: XLA may otherwise compute what has several uses once for each of them, rounded another way, so that of a
    gradient that is what rounding has left of larger terms, one version would be clipped and another added up.
    """
    wanted = jnp.any(rows)
    if not isinstance(wanted, Tracer):  # outside `jit` a loop would be compiled at every call
        return step(state) if bool(wanted) else state
    return jax.lax.while_loop(lambda s: s[0], lambda s: (jnp.array(False), step(s[1])), (wanted, state))[1]
