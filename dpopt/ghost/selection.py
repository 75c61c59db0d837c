"""Which rows count, and zeros for those that do not, since zero times NaN is NaN."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from dpopt.common.trees import at_once, per_example
from dpopt.engines.rare_branch import if_any

_Key = TypeVar("_Key")


def finite(leaf_norms: Sequence[jax.Array]) -> jax.Array:
    """``[B]``: the examples whose norms, ``[B]`` or ``[B, layers]``, are all finite."""
    flags = at_once(jnp.isfinite, [*leaf_norms])
    return jnp.all(jnp.concatenate([f.reshape(len(f), -1) for f in flags], axis=1), axis=1)


def selected(chosen: jax.Array, x: Any) -> Any:
    """x, ``[B, ...]``, with zeros where not ``chosen``, ``[B]`` or ``[B, layers]``; integers and None unchanged."""
    if x is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.where(per_example(chosen, x), x, 0)


def settled(bad: jax.Array, trees: Mapping[_Key, Any]) -> dict[_Key, Any]:
    """Trees of arrays ``[B, ...]``, materialised, so that they are computed only once: what was seen, or coefficients.

    If a loss has lost its digits to rounding and a cotangent were computed twice, the one that is added up would not be
    the one whose norm was taken. `if_any` prevents that. (An optimization barrier does not on the CPU of JAX 0.10.) Its
    step, taken if rows are ``bad``, replaces their infinities by NaN, which is treated the same.
    """
    arrays, rebuild = distinct_arrays(trees)

    def step(arrays: list[jax.Array]) -> list[jax.Array]:
        return [_without_infinities(bad, x) for x in arrays]

    return rebuild(if_any(bad, step, arrays))


@jax.jit  # traced once for equal shapes
def _without_infinities(bad: jax.Array, x: jax.Array) -> jax.Array:
    if x.dtype == bool:
        return x
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.where(per_example(bad, x) & jnp.isinf(x), jnp.nan, x)
    # An index: out of range as before.
    return jnp.where(per_example(bad, x), jnp.minimum(x, jnp.iinfo(x.dtype).max - 1), x)


def without_bad_entries(bad: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
    """The arrays, ``[B, ...]``, with zeros for entries of ``bad`` examples that are not finite.

    Other examples may have entries that are not finite if the pull-back drops them. They stay unchanged, since what an
    example adds must not depend on whether another is bad."""
    return [_without_bad_entries(bad, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in arrays]


@jax.jit
def _without_bad_entries(bad: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(per_example(bad, x) & ~jnp.isfinite(x), 0, x)


def distinct_arrays(trees: Mapping[_Key, Any]) -> tuple[list[jax.Array], Callable[[list[jax.Array]], dict[_Key, Any]]]:
    """The distinct arrays of some trees, and a function that rebuilds the trees from arrays in their places.

    A layer shares its cotangent with its bias, and layers may share an input: a loop would copy arrays held twice."""
    leaves, structure = jax.tree.flatten(list(trees.values()))
    distinct = {id(x): x for x in leaves}

    def rebuild(arrays: list[jax.Array]) -> dict[_Key, Any]:
        found = dict(zip(distinct, arrays, strict=True))
        return dict(zip(trees, structure.unflatten(found[id(x)] for x in leaves), strict=True))

    return list(distinct.values()), rebuild
