"""Leaves out examples whose products with their clip coefficients underflow (`contacts.can_weigh`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax

from dpopt.ghost.contacts import Records, can_weigh, is_added_up, largest_of_other_factor, lost_to_weighing
from dpopt.ghost.run import Run
from dpopt.ghost.squares import tiny
from dpopt.ghost.values import Contact
from dpopt.ghost.weighted_sum import grouped

ByLeaf: TypeAlias = Mapping[int, jax.Array]  # for some parameters


def without_underflowing(
    run: Run, weights: ByLeaf, norms: ByLeaf, records: Records, known: Mapping[Contact, jax.Array], diagonals: ByLeaf
) -> dict[int, jax.Array]:
    """The ``weights``, coefficients ``[B]`` per parameter, with zeros for examples that would lose too much.

    Parameters that share an array still share one.

    Args:
        known: at contacts without records, the largest entries of the factor that is not weighted, ``[B]``.
        diagonals: for some parameters, an upper bound on the entries of S at each of their contacts.
    """
    distinct, groups = grouped(weights)
    found = []
    for group, c in enumerate(distinct):
        leaves = [leaf for leaf, own in groups.items() if own == group]
        lost = _lost(run, leaves, records, known, diagonals)
        clipped_to = c * jnp.where(c > 0, jnp.max(jnp.stack([norms[leaf] for leaf in leaves]), axis=0), 0)
        found.append(jnp.where(can_weigh(c, clipped_to, lost, tiny(run.trace.narrowest)), c, 0))
    return {leaf: found[group] for leaf, group in groups.items()}


def _lost(
    run: Run, leaves: list[int], records: Records, known: Mapping[Contact, jax.Array], diagonals: ByLeaf
) -> jax.Array:
    """How much of ``S g`` may underflow, in units of tiny: a number, or ``[B]``."""
    contacts, lost = run.contacts_of(leaves), jnp.zeros(())
    for leaf, own in zip(leaves, run.gains(contacts, leaves), strict=True):
        for i, gain in own.items():
            contact, other = contacts[i], jnp.zeros(())
            if not _can_only_shrink(run, leaf, contact, records):
                other = known[contact] if contact in known else largest_of_other_factor(contact, records[contact])
            if gain is not None and leaf in diagonals:
                most = _largest_entry(run, leaf, contact, diagonals[leaf])
            else:
                most = 1 if gain is None else run.largest_gain(leaf, contact, gain)
            size = math.prod(contact.weight.shape) ** 0.5 * most
            lost += size * lost_to_weighing(contact, other, run.plan.batch_size)
    return lost


def _largest_entry(run: Run, leaf: int, contact: Contact, known: jax.Array) -> jax.Array:
    """An upper bound on the entries of S at a contact; ``known`` comes from squares, which may overflow."""

    def computed() -> jax.Array:
        (gain,) = run.gains([contact], [leaf])[0].values()
        return run.largest_gain(leaf, contact, cast(jax.Array, gain)).astype(known.dtype)

    return lax.cond(jnp.isfinite(known), lambda: known, computed)


def _can_only_shrink(run: Run, leaf: int, contact: Contact, records: Records) -> bool:
    """Whether underflow only makes an example's gradient smaller, since no other term would have cancelled it."""
    if run.offsets[leaf] is not None or len(run.contacts_of([leaf])) > 1 or contact not in records:
        return False
    return contact.is_direct and not is_added_up(contact, records[contact])
