"""Norms of gradients that are formed one example at a time from what the passes recorded: slow, and rare.

For examples whose norms float32 cannot compute otherwise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpopt.engines.norms import norms_together, safe_norm
from dpopt.engines.rare_branch import if_any
from dpopt.ghost import costs, squares, term_sizes
from dpopt.ghost.chunks import join_rows, split_rows
from dpopt.ghost.contacts import Formed, Recorded, Records, Seen, form, is_sum, sum_at, usage
from dpopt.ghost.leaf_terms import sizes_of_terms
from dpopt.ghost.methods.base import mapped
from dpopt.ghost.primitives import CONVOLUTION, DOT
from dpopt.ghost.pullback import Pull
from dpopt.ghost.records import without_given
from dpopt.ghost.rows import OneHot
from dpopt.ghost.rules import Factors
from dpopt.ghost.run import Run
from dpopt.ghost.selection import distinct_arrays, finite, without_bad_entries
from dpopt.ghost.squares import TOLERANCE, shifted_norm, with_roundings
from dpopt.ghost.values import Contact
from dpopt.ghost.weighted_sum import Weigh

# Bytes of a gradient that has its norm taken before the next one is formed, to save memory.
_LARGE = 1 << 18


def certain(
    run: Run, upper: list[jax.Array], lower: list[jax.Array], weigh: Weigh, mask: jax.Array, records: Records,
    leaves: Sequence[int] | None = None,
) -> tuple[list[jax.Array], dict[Contact, Recorded]]:  # fmt: skip
    """The upper bounds on norms, replaced by norms of formed gradients where the difference matters; and the records.

    Examples with a norm that is not finite contribute zero. In their records, entries that are not finite are replaced
    by zeros, since zero times NaN is NaN.

    This distinguishes a gradient that is not finite, which contributes zero, from one whose squares overflow, which is
    clipped as usual: its norm is computed relative to its largest entry.

    Args:
        lower: the norms without what may be missing from them (squares.py).
        weigh: maps norms and a mask to coefficients.
        records: of the examples at the contacts of ``leaves`` (None: all), whose norms are checked.
    """
    leaves = range(len(upper)) if leaves is None else leaves
    if not leaves:
        return upper, {**records}
    high, low = weigh(upper, mask), weigh(lower, mask)
    distinct = {(id(high[i]), id(low[i])): (high[i], low[i]) for i in leaves}.values()
    are_finite = finite([upper[i] for i in leaves])
    fine = [are_finite, *(c >= (1 - TOLERANCE) * most for c, most in distinct)]
    uncertain = mask & ~functools.reduce(jnp.logical_and, fine)
    computed, put_back = without_given(records)
    arrays, rebuild = _flat(*distinct_arrays(computed))
    tables = _tables(run, leaves, records)
    pull_back = _pull_back(run, leaves, tables)
    run.gains(run.contacts_of(leaves), leaves)  # remembers what the loop below must not compute anew

    def step(state: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        own = _norms(run, uncertain, state[0], put_back(rebuild(state[1])), leaves, tables, pull_back)
        return own, without_bad_entries(~jnp.all(jnp.isfinite(own), axis=0), state[1])

    together = jnp.stack([upper[i] for i in leaves])  # one array, so that a loop copies few
    own, arrays = if_any(uncertain | ~are_finite, step, (together, arrays))
    norms = dict(zip(leaves, own, strict=True))
    return [norms[i].astype(n.dtype) if i in norms else n for i, n in enumerate(upper)], put_back(rebuild(arrays))


def _flat(
    arrays: list[jax.Array], rebuild: Callable[[list[jax.Array]], dict[Contact, Recorded]]
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], dict[Contact, Recorded]]]:
    """The same with arrays ``[B, n]`` on a GPU.

    Otherwise XLA arranges all records as the loop would like to read them, though it hardly ever runs."""
    if jax.default_backend() != "gpu" or jax.device_count() > 1:
        return arrays, rebuild
    shapes = [x.shape for x in arrays]
    flat = [x.reshape(len(x), -1) for x in arrays]
    return flat, lambda flat: rebuild([x.reshape(shape) for x, shape in zip(flat, shapes, strict=True)])


def _tables(run: Run, leaves: Sequence[int], records: Records) -> dict[int, list[Contact]]:
    """The parameters whose gradients are zero but in the few rows that an example looks up; their contacts.

    There the whole gradient is not formed: it would take more memory than an ordinary gradient may have."""
    found = {}
    for leaf in leaves:
        contacts = run.contacts_of([leaf])
        if contacts and run.is_table(leaf) and run.offsets[leaf] is None:
            is_kept = any(isinstance(records[c], Formed) for c in contacts)
            if not is_kept and len({usage(c) for c in contacts}) == 1 and _is_sparse(contacts):
                found[leaf] = contacts
    return found


def _is_sparse(contacts: Sequence[Contact]) -> bool:
    """Whether there are no more look-ups than rows."""
    factors = [cast(Factors, c.factors) for c in contacts]
    return sum(f.positions for f in factors) <= factors[0].shape[2]


def _pull_back(run: Run, leaves: Sequence[int], tables: Mapping[int, Sequence[Contact]]) -> Pull:
    """From what is formed at the contacts of ``leaves`` to their gradients, without those of ``tables``."""
    contacts, others = run.contacts_of(leaves), [i for i in leaves if i not in tables]
    # Where they share but a number, one by one: otherwise all would be in memory together, with what they are made of.
    alone = [i for i in others if run.plan.leaves[i].numbers]
    rest = [i for i in others if i not in alone]
    together = run.contacts_of(rest)
    pull = run.pull_back.of(together, rest)

    def pulled(formed: Sequence[Any]) -> list[jax.Array]:
        at = dict(zip(contacts, formed, strict=True))
        own = dict(zip(rest, pull([at[c] for c in together]), strict=True))
        for i in alone:
            behind = run.contacts_of([i])
            (own[i],) = run.pull_back.inside(behind, [at[c] for c in behind], i)
        return [own[i] for i in others]

    return pulled


def _norms(
    run: Run, chosen: jax.Array, known: jax.Array, records: Records, leaves: Sequence[int],
    tables: Mapping[int, Sequence[Contact]], pull_back: Pull,
) -> jax.Array:  # fmt: skip
    """Norms of ``leaves``, ``[leaves, B]``, like ``known``.

    For ``chosen`` examples they are those of the formed gradients, plus the rounding error of their sum."""
    contacts, looked_up = run.contacts_of(leaves), {c for own in tables.values() for c in own}
    gains = run.gains(contacts, leaves)
    rounding = np.array([squares.eps(run.wide[i].dtype, run.trace.narrowest) for i in leaves])
    offsets = [run.offset_norm(i) for i in leaves]
    is_shifted, offset = np.array([not isinstance(o, float) for o in offsets]), jnp.stack([*map(jnp.asarray, offsets)])

    def one(rows: tuple[list[Recorded], jax.Array, jax.Array]) -> jax.Array:
        records, is_chosen, known = rows
        formed: list[Any] = []
        large = None  # the last one of those
        for i, (c, r) in enumerate(zip(contacts, records, strict=True)):
            if c in looked_up:
                formed.append(None)
                continue
            is_large = is_sum(c, r) and costs.formed_bytes(c) >= _LARGE
            if is_large and large is not None:
                formed[large], records[i] = lax.optimization_barrier((formed[large], r))
            large = i if is_large else large
            formed.append(_formed(c, records[i]))
        at = dict(zip(contacts, records, strict=True))
        own = {i: _merged(looking, [at[c] for c in looking]) for i, looking in tables.items()}
        own |= zip((i for i in leaves if i not in tables), pull_back(formed), strict=True)
        gradients = [run.affine(i, own[i]) for i in leaves]

        products = [[(1.0, [g])] for g in gradients]
        products += sizes_of_terms(gains, contacts, formed, records, lambda x: (1.0, [x]), term_sizes.as_product)
        own, total = _sizes(products).reshape(2, -1)
        eps = jnp.asarray(rounding, own.dtype)
        own = with_roundings(own, total, eps)
        own = jnp.where(is_shifted, shifted_norm(own, offset.astype(own.dtype), eps), own)
        return jnp.where(is_chosen, own.astype(known.dtype), known)

    rows = [records[c] for c in contacts], chosen, known.T
    # One example per device at a time, so that each processes its share of a sharded batch.
    together = math.gcd(run.plan.batch_size, jax.device_count())
    if together == 1:
        return lax.map(one, rows).T
    several = lax.map(jax.vmap(one), jax.tree.map(lambda x: split_rows(x, together), rows))
    return join_rows(several).T


def _sizes(several: Sequence[Sequence[tuple[float, list[jax.Array]]]]) -> jax.Array:
    """For each sequence the root of the sum of squares of its products: of a number and the norms of arrays.

    As vectors: a scalar of its own would take a kernel, which takes a CPU 10 ms to compile."""
    products = [product for own in several for product in own]
    arrays = [x for _, own in products for x in own]
    norms = jnp.append(norms_together(arrays), 1)
    place = iter(range(len(arrays)))
    at = [[next(place) for _ in own] for _, own in products]
    factors = jnp.asarray([factor for factor, _ in products], norms.dtype)
    sizes = jnp.append(factors * jnp.prod(norms[_table(at, len(arrays))], axis=1), 0)
    place = iter(range(len(products)))
    found = sizes[_table([[next(place) for _ in own] for own in several], len(products))]
    return found[:, 0] if found.shape[1] == 1 else safe_norm(found, axis=1)


def _table(rows: Sequence[Sequence[int]], fill: int) -> np.ndarray:
    return np.array([[*row, *[fill] * (max(map(len, rows)) - len(row))] for row in rows])


def _formed(contact: Contact, record: Recorded) -> jax.Array:
    """One example's gradient at a contact, as it is quick to compile: for most primitives by their transpose.

    That of a product of matrices copies them first, and that of a grouped convolution takes a product for each offset.
    """
    factors = contact.factors
    is_matrices = contact.primitive is DOT and factors is not None and factors.positions > 1
    is_grouped = contact.primitive is CONVOLUTION and factors is not None and factors.shape[1] > 1
    if isinstance(record, Formed) or is_matrices or is_grouped:
        return contact.unfold(form(contact, record))
    return sum_at(contact, jax.tree.map(lambda x: x[None], record), jnp.ones(1))


def _merged(contacts: Sequence[Contact], records: Sequence[Recorded]) -> jax.Array:
    """The rows of one example's gradient that it looks up at some contacts of one table."""
    factors, seen = [cast(Factors, c.factors) for c in contacts], [cast(Seen, r) for r in records]
    split = [f.split(s.x, s.y) for f, s in zip(factors, seen, strict=True)]
    ids, rows = (jnp.concatenate(z, axis=1) for z in zip(*split, strict=True))
    _, groups, size, _ = factors[0].shape
    return mapped(lambda ids, rows: OneHot(ids, size).merged(rows), groups)(ids, rows)
