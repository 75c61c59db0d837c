"""The weighted sum of one large parameter, without a buffer of its size for every block of examples.

Sums are added up block by block (engines/sums.py): every block of a large batch writes a sum of the parameter's size,
and reads it again to add it to another. On a CPU that takes longer than computing it. So here

* of a table only those rows are read and written that examples look up, if these are few;
* some rows, or columns, of a matrix are added up for all blocks while they are in the cache, and then the next ones.

What is added to what, and in which order, stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dpopt.engines import rounding, sums
from dpopt.ghost.contacts import Records, Seen, usage, weighed, weighs_input
from dpopt.ghost.costs import leaf_bytes
from dpopt.ghost.plan import is_direct
from dpopt.ghost.primitives import DOT
from dpopt.ghost.rows import OneHot, summed_products, wide
from dpopt.ghost.rules import Factors
from dpopt.ghost.run import Run
from dpopt.ghost.values import Contact, Entry

_Rows: TypeAlias = tuple[jax.Array, jax.Array]

# Smaller parameters stay in the cache.
_LARGE_BYTES = 1 << 20

# A matrix goes whole, or in more than two parts: small products take longer, and XLA writes parts with a single core.
_PART_BYTES = 1 << 21


def large_sum(run: Run, leaf: int, c: Float[Array, " batch"], records: Records) -> sums.Sum | None:
    """``sum_i c_i S g_i`` for one parameter, or None if it is added up like all others."""
    uses = run.contacts_of([leaf])
    if jax.default_backend() != "cpu" or jax.device_count() > 1 or len(c) <= rounding.ROWS:
        return None
    if leaf_bytes(run.trace, leaf) <= _LARGE_BYTES or run.offsets[leaf] is not None:
        return None
    if not uses or not all(_is_copy(k, records) for k in uses):
        return None
    first, factors = uses[0], cast(Factors, uses[0].factors)
    looked_up = rounding.groups(len(c))[1] * sum(cast(Factors, k.factors).positions for k in uses)
    if run.is_table(leaf) and looked_up <= factors.shape[2] and len({usage(k) for k in uses}) == 1:
        total = _of_rows([(cast(Factors, k.factors), cast(Seen, records[k])) for k in uses], c, run.scales[leaf])
    elif len(uses) == 1 and first.primitive is DOT:
        scale = run.scales[leaf]
        if scale is not None and scale.ndim:
            scale = factors.fold(cast(Array, run.diagonal(leaf, first, scale))).reshape(factors.shape[2:])
        total = _of_matrix(first, cast(Seen, records[first]), c, scale)
    else:
        return None
    return sums.Sum(*(x if x is None else _pulled_back(run, leaf, first, x) for x in total))


def _is_copy(contact: Contact, records: Records) -> bool:
    """Whether the contact's weight is a copy of one parameter whose gradients are single sums of outer products."""
    factors, record = contact.factors, records[contact]
    if factors is None or factors.shape[:2] != (1, 1) or not isinstance(record, Seen):
        return False
    is_real = jnp.issubdtype(record.y.dtype, jnp.floating)
    return is_real and is_direct(contact) and cast(Entry, contact.weight.entry).copy


def _pulled_back(run: Run, leaf: int, contact: Contact, folded: jax.Array) -> jax.Array:
    (g,) = run.pull_back([contact], [contact.unfold(folded)], [leaf])
    return g.astype(run.wide[leaf].dtype)


def _of_rows(uses: Sequence[tuple[Factors, Seen]], c: jax.Array, number: jax.Array | None) -> sums.Sum:
    """The sum of a table, folded; of a group of examples only the rows that these look up are read and written.

    A diagonal multiplies the rows as they are recorded (`Run.row_scales`), so that S is a number here."""
    split = [jax.vmap(factors.split)(seen.x, seen.y) for factors, seen in uses]
    ids = jnp.concatenate([left[:, 0] for left, _ in split], axis=1)  # [B, T]
    rows = jnp.concatenate([wide(right[:, 0]) for _, right in split], axis=1)  # [B, T, p]
    _, _, size, p = shape = uses[0][0].shape
    pairs, (groups, _) = sums.needs_remainder(len(c)), rounding.groups(len(c))

    def step(total: sums.Sum, rows: _Rows, c: jax.Array) -> sums.Sum:
        ids, y = rows
        ranks, places = OneHot(ids.reshape(-1), size).ranked()

        def one_block(rows: _Rows, c: jax.Array) -> jax.Array:
            ranks, y = rows
            return jnp.zeros((len(places), p), y.dtype).at[ranks.reshape(-1)].add(weighed(y, c).reshape(-1, p))

        added = sums.in_blocks(one_block, (ranks.reshape(ids.shape), y), c)
        own = sums.Sum(added if number is None else added * number)
        if groups > 1:
            own = sums.add(jax.tree.map(lambda x: x.at[places].get(mode="fill", fill_value=0), total), own)
            # Both are computed before either is written.
            own = sums.Sum(*lax.optimization_barrier([x for x in own if x is not None]))
        return jax.tree.map(lambda x, y: x.at[places].set(y, mode="drop"), total, own)

    zeros = sums.zeros_after((rows, c), jnp.zeros((size, p), rows.dtype))
    total = sums.over_groups(step, sums.Sum(zeros, zeros if pairs else None), (ids, rows), c)
    return jax.tree.map(lambda x: x.reshape(shape), total)


def _of_matrix(contact: Contact, seen: Seen, c: jax.Array, scale: jax.Array | None) -> sums.Sum:
    """The sum of a matrix, folded: a part along its longer axis after another. S is a number or ``[a, p]``."""
    factors, of_input = cast(Factors, contact.factors), weighs_input(contact, seen.x, seen.y)
    left, right = (z[:, 0] for z in jax.vmap(factors.split)(seen.x, seen.y))  # [B, T, a] and [B, T, p]
    _, _, a, p = shape = factors.shape
    axis, long, short = (0, a, p) if a >= p else (1, p, a)
    count = -(-long // max(1, _PART_BYTES // (4 * short)))
    length = -(-long // count) if count > 2 else long  # the last part may begin in the one before

    def one_block(rows: _Rows, c: jax.Array) -> jax.Array:
        x, y = (weighed(rows[0], c), rows[1]) if of_input else (rows[0], weighed(rows[1], c))
        return summed_products(x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]))

    def part(i: jax.Array, so_far: list[jax.Array]) -> list[jax.Array]:
        start = jnp.minimum(i * length, long - length)
        own = [lax.dynamic_slice_in_dim(z, start, length, 2) if k == axis else z for k, z in enumerate((left, right))]
        own_scale = lax.dynamic_slice_in_dim(scale, start, length, axis) if scale is not None and scale.ndim else scale

        def one_group(rows: _Rows, c: jax.Array) -> jax.Array:
            total = sums.in_blocks(one_block, rows, c)
            return total if own_scale is None else total * own_scale

        total = [x for x in sums.over_examples(one_group, (own[0], own[1]), c) if x is not None]
        return [lax.dynamic_update_slice_in_dim(x, y, start, axis) for x, y in zip(so_far, total, strict=True)]

    zeros = jnp.zeros((a, p), jnp.promote_types(jnp.result_type(left, right), jnp.float32))
    nothing = [zeros] * (1 + sums.needs_remainder(len(c)))
    found = lax.fori_loop(0, -(-long // length), part, sums.zeros_after((left, right, c), nothing))
    return sums.Sum(*(x.reshape(shape) for x in found))
