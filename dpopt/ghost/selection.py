"""Which rows count, and zeros for those that do not: zero times NaN would be NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def finite(leaf_norms: Sequence[jax.Array]) -> jax.Array:
    """``[B]``: whose norms, ``[B]`` or ``[B, layers]``, are all finite."""
    return jnp.all(jnp.stack([jnp.isfinite(n).reshape(len(n), -1).all(1) for n in leaf_norms]), axis=0)


def selected(chosen: jax.Array, x: Any) -> Any:
    """x, ``[B, ...]``, with zeros where not ``chosen``, ``[B]`` or ``[B, layers]``; integers and None as they are."""
    if x is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.where(chosen.reshape(*chosen.shape, *[1] * (x.ndim - chosen.ndim)), x, 0)
