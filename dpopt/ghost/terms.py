"""How large the terms are that a gradient at a contact is the sum of: what its roundings are in proportion to.

A diagonal, or the way back to the parameter, may enlarge those entries whose terms cancel, and nothing but roundings is
left of. So it is applied to the terms, entry by entry.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp

from dpopt._norms import safe_norm
from dpopt.ghost import squares
from dpopt.ghost.norms import Group, over_groups, rank_one
from dpopt.ghost.rows import Dense, wide
from dpopt.ghost.rules import Factors
from dpopt.ghost.squares import Square
from dpopt.ghost.standardized import Coefficients


def square(factors: Factors, x: jax.Array, y: jax.Array, scale: jax.Array | None) -> Square:
    """``|S * sum_t |l_t| (x) |r_t||^2``, or more: of the terms that ``S * G`` is the sum of, where none cancels.

    ``scale`` is folded to ``[K, N, a, p]``."""
    if factors.one_hot or scale is not None:
        return jax.tree.map(jnp.sum, over_groups(_square_of_group, factors, x, y, scale))
    # Of windows of one input, the whole input instead of each: it is read once.
    right = jnp.max(over_groups(lambda group: squares.sum_squares(group.right), factors, x, y))
    left, windows, smallest = squares.sum_squares(x), factors.shape[0], squares.tiny(right.dtype)
    return Square(windows * left * right, windows * smallest * (y.size * left + x.size * right + 1))


def size(factors: Factors, x: jax.Array, y: jax.Array, scale: jax.Array | None) -> jax.Array:
    """`square` as a norm, in any range: slow."""
    if factors.one_hot or scale is not None:
        return safe_norm(over_groups(_size_of_group, factors, x, y, scale), axis=0)
    return factors.shape[0] ** 0.5 * safe_norm(wide(x).reshape(-1), axis=0) * safe_norm(wide(y).reshape(-1), axis=0)


def _square_of_group(group: Group) -> Square:
    if group.table() is not None:
        rows = Dense(group.scaled())
        # Its entries are no smaller than tiny's root, whose roundings `of_entries` has room for.
        return Square(jnp.square(jnp.sum(jnp.sqrt(rows.squares()))), jnp.zeros(()))
    # By Cauchy and Schwarz an entry is no larger than the product of its row's and its column's norm.
    left = [cast(Dense, rows).x for rows in group.left]
    # One column each is reduced where it lies; several are side by side already, where the gradient is formed.
    left = [_columns(x) for x in left] if left[0].shape[1] == 1 else [_columns(cast(Dense, group.rows()).x)]
    scale = None if group.scale is None else group.diagonal()[None]
    left = [Dense(jnp.concatenate(left, axis=1))]
    found = rank_one(Group(left, _columns(group.right), scale, None))
    return found._replace(missing=len(group.right) * found.missing)


def _size_of_group(group: Group) -> jax.Array:
    if group.table() is not None:
        return len(group.right) ** 0.5 * safe_norm(group.scaled().reshape(-1), axis=0)
    left, right = (safe_norm(wide(x), axis=0) for x in (cast(Dense, group.rows()).x, group.right))
    return safe_norm((left[:, None] * right[None] * group.diagonal()).reshape(-1), axis=0)


def _columns(rows: jax.Array) -> jax.Array:
    """``[1, n]``: norms of columns of ``[T, n]``."""
    return jnp.sqrt(jnp.sum(jnp.square(wide(rows)), axis=0, keepdims=True))


def standardized_square(
    factors: Factors, x: jax.Array, y: jax.Array, deviation: jax.Array, scale: Any, c: Coefficients
) -> Square:
    """`square` for ``S (alpha G + p + q u)``; ``deviation`` and ``scale`` are folded."""

    def per_filter(group: Group) -> Square:
        left = squares.sum_squares(cast(Dense, group.rows()).x)
        right, smallest = jnp.square(_columns(group.right)[0]), len(group.right) * squares.tiny(wide(group.right).dtype)
        return Square(left * right, smallest * (left + c.size * right + 1))

    found, own = over_groups(per_filter, factors, x, y), c.per_filter
    ones = jnp.ones(factors.shape, deviation.dtype) if scale is None else scale
    # |<u, G>| is at most |u| |G|, and |<1, G>| the root of n times |G|.
    largest = jax.tree.map(jnp.abs, own).pulled(jnp.sqrt(own.sums[1]), c.size**0.5)
    p, q = (jnp.square(z) for z in largest)
    levels, slopes = (jnp.sum(jnp.square(z), axis=(0, 2)) for z in (ones, ones * deviation))
    parts = [jax.tree.map(lambda z, by=by: jnp.sum(by * z), found) for by in (p * levels, q * slopes)]
    parts.append(square(factors, x, y, ones * own.slope[None, :, None]))
    size = functools.reduce(jnp.add, (jnp.sqrt(part.value) for part in parts))
    missing = functools.reduce(jnp.add, (part.missing for part in parts))
    return Square(jnp.square(size), len(parts) * missing)
