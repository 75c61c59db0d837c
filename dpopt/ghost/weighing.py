"""Leaves out the examples that cannot be multiplied by their clip coefficients (`contacts.can_weigh`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dpopt._norms import safe_norm
from dpopt._once import if_any
from dpopt.ghost.contacts import SMALL, Formed, Seen, can_weigh, lost_to_weighing, not_weighed
from dpopt.ghost.run import Run
from dpopt.ghost.values import Contact


def without_too_large(
    run: Run,
    weights: Mapping[int, jax.Array],
    norms: Mapping[int, jax.Array],
    records: Mapping[Contact, Seen | Formed],
    known: Mapping[Contact, jax.Array],
) -> dict[int, jax.Array]:
    """The ``weights``, coefficients ``[B]`` per parameter, with zeros for examples that are too large for them.

    One array for several parameters stays one.

    Args:
        norms: per parameter, ``[B]``.
        records: what is known of the examples at contacts.
        known: at the other contacts, how large entries of the factor are that is not weighed, ``[B]``.
    """
    distinct = {id(c): c for c in weights.values()}
    members = {key: [leaf for leaf, c in weights.items() if id(c) == key] for key in distinct}

    def step(coefficients: list[jax.Array]) -> list[jax.Array]:
        return [_checked(run, c, leaves, norms, records, known)
                for c, leaves in zip(coefficients, members.values(), strict=True)]  # fmt: skip

    is_small = jnp.stack([(c > 0) & (c < SMALL) for c in distinct.values()])
    found = dict(zip(distinct, if_any(is_small, step, list(distinct.values())), strict=True))
    return {leaf: found[id(c)] for leaf, c in weights.items()}


def _checked(run: Run, c: jax.Array, leaves: list[int], norms: Mapping, records: Mapping, known: Mapping) -> jax.Array:
    contacts = run.contacts_of(leaves)
    lost: Any = jnp.zeros(())
    for own in run.gains(contacts, leaves):
        for i, gain in own.items():
            contact = contacts[i]
            gains = math.prod(contact.weight.shape) ** 0.5 if gain is None else safe_norm(gain.reshape(-1), axis=0)
            other = known[contact] if contact in known else not_weighed(contact, records[contact])
            lost += gains * lost_to_weighing(contact, other, c.dtype)
    clipped_to = jnp.max(jnp.stack([c * jnp.where(c > 0, norms[leaf], 0) for leaf in leaves]), axis=0)
    return jnp.where(can_weigh(c, clipped_to, lost), c, 0)
