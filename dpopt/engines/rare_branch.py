"""A branch that is rarely taken, as a loop of at most one step."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

_State = TypeVar("_State")


def if_any(rows: jax.Array, step: Callable[[_State], _State], state: _State) -> _State:
    """``step(state)`` if any of ``rows`` is True, else ``state`` unchanged.

    Under vmap `cond` would run both branches. The loop also materialises ``state``, even when it takes no step.
    Otherwise XLA may compute a value once for each of its uses, with different rounding. If a gradient consists of
    little but the rounding error of larger terms, one version would be clipped and another added up.
    """
    wanted = jnp.any(rows)
    if not isinstance(wanted, Tracer):  # outside `jit` a loop would be compiled at every call
        return step(state) if bool(wanted) else state
    return jax.lax.while_loop(lambda s: s[0], lambda s: (s[0] & False, step(s[1])), (wanted, state))[1]
