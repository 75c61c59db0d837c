"""The sizes of the terms whose sum is a gradient at a contact: its rounding error is proportional to them.

A diagonal, or the map back to the parameter, may enlarge entries whose terms cancel and which contain only rounding
error. So it is applied to the terms, entry by entry.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from dpopt.engines.norms import safe_norm
from dpopt.ghost import squares
from dpopt.ghost.methods.base import Group, mapped, over_groups
from dpopt.ghost.methods.pairs import PAIRS
from dpopt.ghost.rows import Dense, wide
from dpopt.ghost.rules import Factors
from dpopt.ghost.squares import Square
from dpopt.ghost.standardized import Coefficients


class Columns(NamedTuple):
    """Norms of the columns of one example's factors: the part of `behind` that depends on the example."""

    left: jax.Array  # [N, K a]
    right: jax.Array  # [N, p]


def columns(factors: Factors, x: jax.Array, y: jax.Array) -> Columns:
    """Column norms of factors that are not one-hot."""
    if factors.columns is None:
        both = over_groups(lambda g: (_columns(cast(Dense, g.left).x), _columns(g.right)), factors, x, y)
        return Columns(*both)
    left = jnp.swapaxes(factors.columns(x), 0, 1).reshape(factors.shape[1], -1)
    return Columns(jnp.sqrt(left), over_groups(lambda group: _columns(group.right), factors, x, y))


def behind(factors: Factors, found: Columns, scale: jax.Array) -> Square:
    """`square` from ``found``. If this is mapped, a shared diagonal multiplies all examples at once."""
    diagonal = jnp.swapaxes(scale, 0, 1).reshape(*found.left.shape, -1)
    total = jax.tree.map(jnp.sum, mapped(_behind, len(diagonal))(*found, diagonal))
    return total._replace(missing=factors.positions * total.missing)


def of_one(factors: Factors, x: jax.Array, y: jax.Array, scale: jax.Array | None) -> Square | Columns:
    """`square`, or what `behind` computes it from where a diagonal multiplies all examples."""
    return square(factors, x, y, scale) if scale is None or factors.one_hot else columns(factors, x, y)


def square(factors: Factors, x: jax.Array, y: jax.Array, scale: jax.Array | None) -> Square:
    """An upper bound on ``|S * sum_t |l_t| (x) |r_t||^2``, the size of ``S * G`` if no terms cancelled.

    ``scale`` is S, folded to ``[K, N, a, p]``."""
    if factors.one_hot:
        return jax.tree.map(jnp.sum, over_groups(_square_of_rows, factors, x, y, scale))
    if scale is not None:
        return behind(factors, columns(factors, x, y), scale)
    if factors.shape[0] == 1 and factors.views is None and factors.overlap is None:
        return jax.tree.map(jnp.sum, over_groups(_square_of_products, factors, x, y))
    # For windows of one input, the whole input instead of each window: it is read once.
    right = jnp.max(over_groups(lambda group: squares.sum_squares(group.right), factors, x, y))
    left, views, smallest = squares.sum_squares(x), factors.views or factors.shape[0], squares.tiny(right.dtype)
    value = (factors.overlap or factors.shape[0]) * left * right
    return Square(value, views * smallest * (y.size * left + x.size * right + 1))


def as_product(factors: Factors, x: jax.Array, y: jax.Array, scale: jax.Array | None) -> tuple[float, list[jax.Array]]:
    """The root of `square` as a number times the norms of arrays, which neither underflow nor overflow: slow."""
    if factors.one_hot or scale is not None:
        return 1.0, [over_groups(_size_of_group, factors, x, y, scale)]
    return (factors.views or factors.shape[0]) ** 0.5, [wide(x), wide(y)]


def _square_of_rows(group: Group) -> Square:
    rows = Dense(group.scaled())
    # Smaller entries than the root of tiny are covered by the bound of `of_entries`.
    return Square(jnp.square(jnp.sum(jnp.sqrt(rows.squares()))), jnp.zeros(()))


def _square_of_products(group: Group) -> Square:
    """Row by row: a large input at a position whose cotangent is zero, where a unit is saturated, has no part in G."""
    left, right = wide(cast(Dense, group.left).x), wide(group.right)
    lefts, rights = (jnp.sum(jnp.square(z), axis=1) for z in (left, right))
    size = jnp.sum(jnp.sqrt(lefts) * jnp.sqrt(rights))
    # Each square may have lost tiny for every entry, so that all products together may have lost D, and
    # (size + D)^2 <= 1.01 size^2 + 101 D^2.
    least = left.size * jnp.sum(rights) + right.size * jnp.sum(lefts) + left.size * right.shape[1]
    return Square(1.01 * jnp.square(size), 303 * squares.tiny(right.dtype) * least)


def _behind(left: jax.Array, right: jax.Array, diagonal: jax.Array) -> Square:
    """By Cauchy-Schwarz, an entry is at most the product of the norms of its row and its column."""
    return PAIRS.of_group(Group(Dense(left[None]), right[None], diagonal[None], None))


def _size_of_group(group: Group) -> jax.Array:
    if group.table() is not None:
        return len(group.right) ** 0.5 * safe_norm(group.scaled().reshape(-1), axis=0)
    left, right = (safe_norm(wide(x), axis=0) for x in (cast(Dense, group.left).x, group.right))
    return safe_norm((left[:, None] * right[None] * group.diagonal()).reshape(-1), axis=0)


def _columns(rows: jax.Array) -> jax.Array:
    """Norms of columns of ``[T, n]``."""
    return jnp.sqrt(jnp.sum(jnp.square(wide(rows)), axis=0))


def standardized_square(
    factors: Factors, found: Columns, deviation: jax.Array, scale: jax.Array | None, c: Coefficients
) -> Square:
    """`square` for ``S (alpha G + p + q u)``; ``deviation`` and ``scale`` are folded."""
    left, right = jnp.sum(jnp.square(found.left), axis=1, keepdims=True), jnp.square(found.right)
    missing = factors.positions * squares.tiny(right.dtype) * (left + c.size * right + 1)
    per_filter, own = Square(left * right, missing), c.per_filter
    ones = jnp.ones(factors.shape, deviation.dtype) if scale is None else scale
    # |<u, G>| is at most |u| |G|, and |<1, G>| the root of n times |G|.
    largest = jax.tree.map(jnp.abs, own).pulled(jnp.sqrt(own.sums[1]), c.size**0.5)
    p, q = (jnp.square(z) for z in largest)
    levels, slopes = (jnp.sum(jnp.square(z), axis=(0, 2)) for z in (ones, ones * deviation))
    parts = [jax.tree.map(lambda z, by=by: jnp.sum(by * z), per_filter) for by in (p * levels, q * slopes)]
    parts.append(behind(factors, found, ones * own.slope[None, :, None]))
    size = functools.reduce(jnp.add, (jnp.sqrt(part.value) for part in parts))
    missing = functools.reduce(jnp.add, (part.missing for part in parts))
    return Square(jnp.square(size), len(parts) * missing)
