"""The interface of rules: the gradient of a primitive's weight as a sum of outer products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.extend import core


class Use(NamedTuple):
    """One equation where a weight meets an example-dependent value.

    Shapes are those of a single example and, under ``scan``, of a single step.
    """

    params: dict[str, Any]  # the equation's parameters
    position: int  # which input is the weight
    input_position: int  # which input is the example-dependent value x
    weight: tuple[int, ...]  # shape
    input: tuple[int, ...]  # shape
    output: tuple[int, ...]  # shape


class Factors(NamedTuple):
    """``G[k, n] = sum_t left[k][n, t] (x) right[n, t]``, an array ``[K, N, a, p]`` per example.

    ``K`` counts offsets that share ``right`` (a filter's window; else 1), ``N`` independent groups
    (batch dimensions of the weight), ``T`` contracted positions.
    """

    shape: tuple[int, int, int, int]  # K, N, a, p
    positions: int  # T
    split: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    """``(x, y) -> (left, right)`` for one example: [N, T, K a] (or indices [N, T], rows.py) and [N, T, p]."""
    fold: Callable[[jax.Array], jax.Array]
    """The weight rearranged to ``[K, N, a, p]``."""
    unfold: Callable[[jax.Array], jax.Array]
    """The inverse of ``fold``."""
    one_hot: bool = False  # left holds indices of one-hot vectors
    axes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The weight's axes that ``fold`` merges into a, and those that it merges into p, if that is all and K = N = 1."""
    filters: tuple[int, ...] | None = None  # weight axes that make up N, then p, if there are such
    inner: Callable[[jax.Array, Callable[[jax.Array], jax.Array]], jax.Array] | None = None
    """``(x, product) -> sum_k left[k] left[k]'`` [N, T, T], if there is a cheaper way than from ``left``.

    ``product`` maps an array z [N, S, a] to ``z z'`` [N, S, S]."""
    rows: int = 0  # S
    views: int | None = None  # an entry of x, or of y, is in at most so many rows of left, or right; None: K
    overlap: int | None = None  # an entry of x is in the rows of at most so many of the K offsets; None: of all
    columns: Callable[[jax.Array], jax.Array] | None = None
    """``x -> sum_t left[k][n, t]^2`` [K, N, a] or an upper bound, if there is a cheaper way than from ``left``."""
    joint: Callable[[jax.Array, jax.Array, Callable[[jax.Array, jax.Array], jax.Array]], jax.Array] | None = None
    """``(x, y, product) -> G`` if a GPU has a cheaper way than from ``left`` and ``right`` in half precision.

    ``product`` maps arrays [S, m] and [S, n] to the sum of outer products of their rows, [m, n]."""


# Operations in the time that it takes to add one entry of a shifted array to a sum.
SHIFTED_SUM = 16

_Rearrange = Callable[[jax.Array], jax.Array]
Rule = Callable[[Use], "Factors | None"]
_RULES: dict[core.Primitive, Rule] = {}


def rule(primitive: core.Primitive) -> Callable[[Rule], Rule]:
    """Registers the decorated function as the rule of a JAX primitive. It returns None for uses it does not cover."""
    if not isinstance(primitive, core.Primitive):  # pyright: ignore[reportUnnecessaryIsInstance]  whatever a user passes
        raise TypeError(f"rule needs a JAX primitive, such as jax.lax.gather_p; got {primitive!r}.")

    def register(function: Rule) -> Rule:
        _RULES[primitive] = function
        return function

    return register


def factors_for(primitive: core.Primitive, use: Use) -> Factors | None:
    """The factorisation of one use, or None if no rule covers it."""
    found = _RULES.get(primitive)
    return found(use) if found else None


def axes_size(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """The number of entries along some axes of an array."""
    return math.prod(shape[i] for i in axes)


def arranger(shape: tuple[int, ...], *groups: tuple[int, ...]) -> tuple[_Rearrange, _Rearrange]:
    """``fold`` and ``unfold`` between ``shape`` and ``[1, *groups]``, with each group of axes merged into one."""
    order = [axis for group in groups for axis in group]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    merged = (1, *(axes_size(shape, group) for group in groups))
    return (
        lambda w: jnp.transpose(w, order).reshape(merged),
        lambda g: jnp.transpose(g.reshape([shape[i] for i in order]), inverse),
    )


def lift(factors: Factors, length: int, mapped: bool) -> Factors:
    """The factors of a use inside ``scan``, where x and y have a leading axis of ``length`` steps.

    A weight that is scanned itself (layers) has its own gradient in every step, so steps are groups.
    The gradient of a weight that all steps share (time) is summed over steps, so steps are positions.
    """
    K, N, a, p = factors.shape

    def merge(z: jax.Array) -> jax.Array:  # [L, N, T, ...]
        if mapped:
            return z.reshape(length * N, *z.shape[2:])
        return jnp.swapaxes(z, 0, 1).reshape(N, length * factors.positions, *z.shape[3:])

    def split(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        left, right = jax.vmap(factors.split)(x, y)
        return merge(left), merge(right)

    def columns(x: jax.Array) -> jax.Array:
        found = jax.vmap(cast(_Rearrange, factors.columns), out_axes=1)(x)  # [K, L, N, a]
        return found.reshape(K, length * N, a) if mapped else jnp.sum(found, axis=1)

    lifted = factors._replace(split=split, inner=None, joint=None, columns=columns if factors.columns else None)
    if not mapped:
        return lifted._replace(positions=length * factors.positions)
    fold, unfold = jax.vmap(factors.fold, out_axes=1), jax.vmap(factors.unfold, in_axes=1)
    return lifted._replace(
        shape=(K, length * N, a, p),
        fold=lambda w: fold(w).reshape(K, length * N, a, p),
        unfold=lambda g: unfold(g.reshape(K, length, N, a, p)),
        axes=None,
        filters=None,
    )
