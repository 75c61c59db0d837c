"""The weighted sum of all examples' gradients: at the contacts, where they are never formed, and pulled back once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpopt.engines import sums
from dpopt.ghost.contacts import Formed, Seen, weighted
from dpopt.ghost.run import Run
from dpopt.ghost.values import Contact


def weighted_sum(run: Run, weights: Mapping[int, jax.Array], records: Mapping[Contact, Seen | Formed]) -> sums.Sum:
    """``sum_i c_i (S g_i + o)`` of some parameters; ``weights`` holds their c, zero for examples that do not count."""
    distinct, groups = grouped(weights)
    contacts = run.contacts_of(list(weights))

    def one_group(rows):
        coefficients, own = rows[0], dict(zip(contacts, rows[1], strict=True))

        def added(contact: Contact, group: int) -> jax.Array:
            block = own[contact], coefficients[group]
            return sums.in_blocks(lambda block: weighted(contact, *block), block)

        return to_leaves(run, groups, coefficients, added)

    return sums.over_examples(one_group, (distinct, [records[k] for k in contacts]))


def grouped(weights: Mapping[int, jax.Array]) -> tuple[list[jax.Array], dict[int, int]]:
    """The distinct arrays among coefficients, and which of them is whose: parameters may share one."""
    distinct = {id(c): c for c in weights.values()}
    place = {key: i for i, key in enumerate(distinct)}
    return list(distinct.values()), {leaf: place[id(c)] for leaf, c in weights.items()}


def to_leaves(
    run: Run, groups: Mapping[int, int], coefficients: Sequence[jax.Array], added: Callable[[Contact, int], jax.Array]
) -> list[jax.Array]:
    """``sum_i c_i (S g_i + o)`` per parameter, from sums at the contacts.

    Args:
        groups: of each parameter, which of ``coefficients``, ``[B]`` each, is its own.
        added: ``added(contact, group)`` is the contact's ``sum_i c_i G_i``.
    """
    totals: dict[int, Any] = dict.fromkeys(groups)
    for group, c in enumerate(coefficients):
        members = [leaf for leaf, g in groups.items() if g == group]
        if not members:
            continue
        mine = run.contacts_of(members)
        cotangents = [added(k, group) for k in mine]
        for leaf, g in zip(members, run.pull_back(mine, cotangents, members), strict=True):
            scale, offset = run.scales[leaf], run.offsets[leaf]
            g = g if scale is None else g * scale
            totals[leaf] = g if offset is None else g + jnp.sum(c) * offset
            totals[leaf] = totals[leaf].astype(run.wide[leaf].dtype)
    return list(totals.values())


def to_leaf(run: Run, contact: Contact, total: jax.Array) -> jax.Array:
    """``S sum_i c_i g_i`` of a parameter with one contact, from the sum there."""
    (leaf,) = contact.weight.leaves
    (g,) = run.pull_back([contact], [total], [leaf])
    return run.affine(leaf, g).astype(run.wide[leaf].dtype)
