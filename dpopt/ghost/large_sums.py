"""The weighted sum of one large parameter, without a buffer of its size for every block of examples.

Sums are added up block by block (engines/sums.py): every block of a large batch writes a sum of the parameter's size,
and reads it again to add it to another. On a CPU that takes longer than computing it. So here

* of a table only those rows are read and written that examples look up, if these are few;
* some rows, or columns, of a matrix are added up for all blocks while they are in the cache, and then the next ones.

What is added to what, and in which order, stays the same. Examples whose c is zero may have entries that are not
finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dpopt.engines import rounding, sums
from dpopt.ghost.contacts import Recorded, Seen, times_coefficients, weighs_input
from dpopt.ghost.costs import entry_bytes
from dpopt.ghost.primitives import DOT
from dpopt.ghost.rows import OneHot, summed_products, wide
from dpopt.ghost.rules import Factors
from dpopt.ghost.selection import selected
from dpopt.ghost.values import Contact

_Rows: TypeAlias = tuple[jax.Array, jax.Array]

# Smaller parameters stay in the cache.
_LARGE_BYTES = 1 << 20

# Adding pairs of floats takes several times as long as adding floats: a table so much smaller is large, too.
_OF_PAIRS = 1 / 8

# A matrix that is little larger goes whole: small products take longer, and XLA writes parts with a single core.
_PART_BYTES = 1 << 21


def is_large(uses: Sequence[tuple[Contact, Recorded]], rows: int) -> bool:
    """Whether `large_sum` adds up this many examples' gradients at contacts that use one weight, all alike."""
    if jax.default_backend() != "cpu" or jax.device_count() > 1 or rows <= rounding.ROWS:
        return False
    if not uses or not all(_is_single(*use) for use in uses):
        return False
    contact, factors = uses[0][0], cast(Factors, uses[0][0].factors)
    size = math.prod(factors.shape) * entry_bytes(contact)
    if not all(cast(Factors, k.factors).one_hot for k, _ in uses):
        return len(uses) == 1 and contact.primitive is DOT and size > _LARGE_BYTES
    if size <= _LARGE_BYTES * (_OF_PAIRS if sums.needs_remainder(rows) else 1):
        return False
    looked_up = rounding.groups(rows).length * sum(cast(Factors, k.factors).positions for k, _ in uses)
    return looked_up <= factors.shape[2]


def _is_single(contact: Contact, record: Recorded) -> bool:
    """Whether an example's gradient is a single sum of outer products of real numbers."""
    if contact.factors is None or contact.factors.shape[:2] != (1, 1) or not isinstance(record, Seen):
        return False
    return jnp.issubdtype(record.y.dtype, jnp.floating)


def large_sum(
    uses: Sequence[tuple[Contact, Seen]], c: Float[Array, " batch"], scale: jax.Array | None, spare: float
) -> sums.Sum:
    """``sum_i c_i S G_i`` of the gradients at some contacts, like their weight, where `is_large`.

    Args:
        scale: S, like the weight or a number; for a table a number.
        spare: how many bytes buffers may take.
    """
    contact, factors = uses[0][0], cast(Factors, uses[0][0].factors)
    if factors.one_hot:
        total = _of_rows([(cast(Factors, k.factors), seen) for k, seen in uses], c, scale)
    else:
        if scale is not None and scale.ndim:
            scale = factors.fold(scale).reshape(factors.shape[2:])
        total = _of_matrix(*uses[0], c, scale, spare)
    return sums.Sum(*(x if x is None else contact.unfold(x) for x in total))


@jax.jit
def in_range(total: jax.Array) -> jax.Array:
    """A sum that is about to be multiplied, with entries that have overflowed, or nearly, bounded.

    Their factors, of a diagonal or a mask, are 0 or next to it, since the products of all examples have been clipped.
    They would become NaN, whichever example has made the sum overflow. (2^24 of them may be added on the way.)"""
    most = jnp.finfo(total.dtype).max / 2**24
    return jnp.where(jnp.isnan(total), 0, jnp.clip(total, -most, most))


def _of_rows(uses: Sequence[tuple[Factors, Seen]], c: jax.Array, number: jax.Array | None) -> sums.Sum:
    """The sum of a table, folded; of a group of examples only the rows that these look up are read and written.

    A diagonal multiplies the rows as they are recorded (`Run.row_scales`), so that S is a number here."""
    split = [jax.vmap(factors.split)(seen.x, seen.y) for factors, seen in uses]
    ids = jnp.concatenate([left[:, 0] for left, _ in split], axis=1)  # [B, T]
    rows = jnp.concatenate([wide(right[:, 0]) for _, right in split], axis=1)  # [B, T, p]
    _, _, size, p = shape = uses[0][0].shape
    pairs, groups = sums.needs_remainder(len(c)), rounding.groups(len(c)).number

    def step(total: sums.Sum, rows: _Rows, c: jax.Array) -> sums.Sum:
        ids, y = rows
        ranks, places = OneHot(ids.reshape(-1), size).ranked()

        def one_block(rows: _Rows, c: jax.Array) -> jax.Array:
            ranks, y = rows[0], selected(c != 0, rows[1])
            found = times_coefficients(y, c).reshape(-1, p)
            return jnp.zeros((len(places), p), y.dtype).at[ranks.reshape(-1)].add(found)

        added = sums.in_blocks(one_block, (ranks.reshape(ids.shape), y), c)
        own = sums.Sum(added if number is None else added * number)
        if groups > 1:
            own = sums.add(jax.tree.map(lambda x: x.at[places].get(mode="fill", fill_value=0), total), own)
            # Both are computed before either is written.
            own = sums.Sum(*lax.optimization_barrier([x for x in own if x is not None]))
        return jax.tree.map(lambda x, y: x.at[places].set(y, mode="drop"), total, own)

    zeros = sums.zeros_after(c, jnp.zeros((size, p), rows.dtype))
    total = sums.over_groups(step, sums.Sum(zeros, zeros if pairs else None), (ids, rows), c)
    return jax.tree.map(lambda x: x.reshape(shape), total)


def _of_matrix(contact: Contact, seen: Seen, c: jax.Array, scale: jax.Array | None, spare: float) -> sums.Sum:
    """The sum of a matrix, folded: a part along its longer axis after another. S is a number or ``[a, p]``."""
    factors, of_input = cast(Factors, contact.factors), weighs_input(contact, seen.x, seen.y)
    left, right = (z[:, 0] for z in jax.vmap(factors.split)(seen.x, seen.y))  # [B, T, a] and [B, T, p]
    _, _, a, p = shape = factors.shape
    axis, long = (0, a) if a >= p else (1, p)
    length = -(-long // _parts(4 * a * p, len(c), spare))  # the last part may begin in the one before

    def one_block(rows: _Rows, c: jax.Array) -> jax.Array:
        x, y = (selected(c != 0, z) for z in rows)
        x, y = (times_coefficients(x, c), y) if of_input else (x, times_coefficients(y, c))
        return summed_products(x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]))

    def part(i: jax.Array, so_far: list[jax.Array]) -> list[jax.Array]:
        start = jnp.minimum(i * length, long - length)
        own = [lax.dynamic_slice_in_dim(z, start, length, 2) if k == axis else z for k, z in enumerate((left, right))]
        own_scale = lax.dynamic_slice_in_dim(scale, start, length, axis) if scale is not None and scale.ndim else scale

        def one_group(rows: _Rows, c: jax.Array) -> jax.Array:
            total = sums.in_blocks(one_block, rows, c)
            return total if own_scale is None else in_range(total) * own_scale

        total = [x for x in sums.over_examples(one_group, (own[0], own[1]), c) if x is not None]
        return [lax.dynamic_update_slice_in_dim(x, y, start, axis) for x, y in zip(so_far, total, strict=True)]

    zeros = jnp.zeros((a, p), jnp.promote_types(jnp.result_type(left, right), jnp.float32))
    nothing = [zeros] * (1 + sums.needs_remainder(len(c)))
    found = lax.fori_loop(0, -(-long // length), part, sums.zeros_after(c, nothing))
    return sums.Sum(*(x.reshape(shape) for x in found))


def _parts(size: int, rows: int, spare: float) -> int:
    """Into how many parts a matrix of ``size`` bytes is split, if buffers may take no more than ``spare``."""
    groups = rounding.groups(rows).number
    # The sum of a block, and of a group those of two. (The sum of all groups is the result.)
    if size <= 2 * _PART_BYTES and min(groups, 2) * size <= spare:
        return 1
    # The sum of a part, too, and its remainder.
    buffers = 1 + min(groups, 2) + sums.needs_remainder(rows)
    return math.ceil(size / min(_PART_BYTES, spare / buffers))
