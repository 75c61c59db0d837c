"""Which rows count, and zeros for those that do not: zero times NaN would be NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer


def finite(leaf_norms: Sequence[jax.Array]) -> jax.Array:
    """``[B]``: whose norms, ``[B]`` or ``[B, layers]``, are all finite."""
    return jnp.all(jnp.stack([jnp.isfinite(n).reshape(len(n), -1).all(1) for n in leaf_norms]), axis=0)


def selected(chosen: jax.Array, x: Any) -> Any:
    """x, ``[B, ...]``, with zeros where not ``chosen``, ``[B]`` or ``[B, layers]``; integers and None as they are."""
    if x is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.where(chosen.reshape(*chosen.shape, *[1] * (x.ndim - chosen.ndim)), x, 0)


def once(rows: jax.Array, step: Callable[[Any], Any], state: Any) -> Any:
    """``step(state)`` if any of ``rows`` holds, else the state as it is."""
    wanted = jnp.any(rows)
    if not isinstance(wanted, Tracer):  # outside `jit` a loop would be compiled at every call
        return step(state) if bool(wanted) else state
    return lax.while_loop(lambda s: s[0], lambda s: (jnp.array(False), step(s[1])), (wanted, state))[1]


def without_bad_rows(bad: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
    """Arrays, ``[B, ...]``, with zeros for rows that are not finite, of which there are some where any are ``bad``."""
    return once(bad, lambda arrays: [selected(_finite_rows(x), x) for x in arrays], arrays)


def _finite_rows(x: jax.Array) -> jax.Array:
    """``[B]``: where all of ``x``, ``[B, ...]``, is finite."""
    return jnp.isfinite(x).reshape(len(x), -1).all(1)
