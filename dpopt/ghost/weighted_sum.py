"""The weighted sum of all examples' gradients: summed at the contacts, without forming them, then pulled back once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from dpopt.engines import sums
from dpopt.ghost.contacts import Recorded, Records, Seen, may_stack, sum_at, usage
from dpopt.ghost.large_sums import in_range, is_large, large_sum
from dpopt.ghost.rules import Factors
from dpopt.ghost.run import Run
from dpopt.ghost.values import Contact

# Leaf norms, [B] or [B, layers] per parameter, and a mask, to coefficients of the same shapes.
Weigh: TypeAlias = Callable[[list[Float[Array, " batch *layers"]], Bool[Array, " batch"]], list[Array]]

# ``sum_i c_i G_i`` at a contact for the c of some index.
Added: TypeAlias = Callable[[Contact, int], Array]


def weighted_sum(run: Run, weights: Mapping[int, Float[Array, " batch"]], records: Records) -> sums.Sum:
    """``sum_i c_i (S g_i + o)`` for some parameters; ``weights`` are their c, zero for examples that do not count."""
    found = {leaf: total for leaf, c in weights.items() if (total := _large_sum(run, leaf, c, records)) is not None}
    rest = {leaf: c for leaf, c in weights.items() if leaf not in found}
    if rest:
        value, remainder = _together(run, rest, records)
        pairs = zip(value, [None] * len(rest) if remainder is None else remainder, strict=True)
        found |= {leaf: sums.Sum(*pair) for leaf, pair in zip(rest, pairs, strict=True)}
    value, remainder = ([found[leaf][i] for leaf in weights] for i in range(2))
    return sums.Sum(value, None if None in remainder[:1] else remainder)


def _large_sum(run: Run, leaf: int, c: Float[Array, " batch"], records: Records) -> sums.Sum | None:
    """That of a parameter whose contacts read nothing but copies of it, if it is large; else None."""
    uses, scale = [(k, records[k]) for k in run.contacts_of([leaf])], run.scales[leaf]
    if run.offsets[leaf] is not None or not is_large(uses, len(c)) or not all(k.is_copy for k, _ in uses):
        return None
    first = uses[0][0]
    if len(uses) > 1 and len({usage(k) for k, _ in uses}) > 1:
        return None
    if scale is not None and scale.ndim:
        if cast(Factors, first.factors).one_hot:
            return None
        scale = run.diagonal(leaf, first, scale)
    total = large_sum([(k, cast(Seen, seen)) for k, seen in uses], c, scale, run.plan.spare_bytes)
    return sums.Sum(*(x if x is None else _pulled_back(run, leaf, first, x) for x in total))


def _pulled_back(run: Run, leaf: int, contact: Contact, total: jax.Array) -> jax.Array:
    (g,) = _of_sums(run, [contact], [total], [leaf])
    return g.astype(run.wide[leaf].dtype)


def _of_sums(run: Run, contacts: Sequence[Contact], totals: Sequence[Array], leaves: Sequence[int]) -> list[Array]:
    """Sums at contacts, pulled back to parameters. That of no example is 0, also through an infinite derivative."""
    totals = [t if _is_clipped_size(run, c) else in_range(t) for c, t in zip(contacts, totals, strict=True)]
    found = run.pull_back(contacts, totals, leaves)
    if all(c.is_direct for c in contacts):
        return found
    is_some = jnp.any(jnp.stack([jnp.any(total != 0) for total in totals]))
    return [jnp.where(is_some, g, 0) for g in found]


def _is_clipped_size(run: Run, contact: Contact) -> bool:
    """Whether gradients at a contact are those that are clipped, so that their sum is in range."""
    return contact.is_copy and all(run.scales[leaf] is None for leaf in contact.weight.leaves)


def _together(run: Run, weights: Mapping[int, Float[Array, " batch"]], records: Records) -> sums.Sum:
    """`weighted_sum` of parameters whose sums are added up at once, block by block."""
    distinct, groups = grouped(weights)
    contacts = run.contacts_of(weights)

    def one_group(rows: list[Recorded], coefficients: list[Array]) -> list[Array]:
        own = dict(zip(contacts, rows, strict=True))

        def added(contact: Contact, group: int) -> Array:  # a loop for each: its sum stays in the cache
            is_quick = contact in run.plan.quick
            one_block = functools.partial(sum_at, contact, is_quick=is_quick)
            return sums.in_blocks(one_block, own[contact], coefficients[group])

        return to_leaves(run, groups, coefficients, added)

    can_stack = all(may_stack(c, records[c]) for c in contacts)
    return sums.over_examples(one_group, [records[k] for k in contacts], distinct, may_stack=can_stack)


def grouped(
    weights: Mapping[int, Shaped[Array, "batch ..."]],
) -> tuple[list[Shaped[Array, "batch ..."]], dict[int, int]]:
    """The distinct arrays among coefficients, and for each parameter the index of its array: some may share one."""
    distinct = {id(c): c for c in weights.values()}
    place = {key: i for i, key in enumerate(distinct)}
    return list(distinct.values()), {leaf: place[id(c)] for leaf, c in weights.items()}


def to_leaves(
    run: Run, groups: Mapping[int, int], coefficients: Sequence[Float[Array, " batch"]], added: Added
) -> list[Array]:
    """``sum_i c_i (S g_i + o)`` per parameter; ``groups`` are indices of the parameters' c in ``coefficients``."""
    totals: dict[int, Any] = dict.fromkeys(groups)
    for group, c in enumerate(coefficients):
        members = [leaf for leaf, g in groups.items() if g == group]
        if not members:
            continue
        contacts = run.contacts_of(members)
        cotangents = [added(k, group) for k in contacts]
        for leaf, g in zip(members, _of_sums(run, contacts, cotangents, members), strict=True):
            scale, offset = run.scales[leaf], run.offsets[leaf]
            g = g if scale is None else g * scale
            totals[leaf] = g if offset is None else g + jnp.sum(c) * offset
            totals[leaf] = totals[leaf].astype(run.wide[leaf].dtype)
    return list(totals.values())


def to_leaf(run: Run, contact: Contact, total: Float[Array, " ..."]) -> Float[Array, " ..."]:
    """``S sum_i c_i g_i`` for a parameter with one contact, from the sum there."""
    (leaf,) = contact.weight.leaves
    (g,) = _of_sums(run, [contact], [total], [leaf])
    return run.affine(leaf, g).astype(run.wide[leaf].dtype)
