"""The sizes of the terms that a parameter's gradient is added up from, over all of its contacts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax.numpy as jnp
from jaxtyping import Array

from dpopt.ghost.contacts import Recorded, Seen, is_sum
from dpopt.ghost.plan import is_direct
from dpopt.ghost.rules import Factors
from dpopt.ghost.values import Contact

_Size = TypeVar("_Size")


def sizes_of_terms(
    gains: Sequence[Mapping[int, Array | None]], contacts: Sequence[Contact], formed: Sequence[Any],
    records: Sequence[Recorded], of_array: Callable[[Array], _Size],
    of_factors: Callable[[Factors, Array, Array, Array | None], _Size],
) -> list[list[_Size]]:  # fmt: skip
    """For each parameter, the sizes of the terms that one example's ``S g`` was added up from, at each of its contacts.

    None where nothing was added up.

    Args:
        gains: from `Run.gains`.
        formed: the example's gradients at the contacts, formed from ``records``; not read at look-ups or sums.
        of_array: an upper bound on the norm of an array.
        of_factors: one on the norm of a sum, from factors, x, y and a diagonal, like `term_sizes.square`.
    """

    def behind(i: int, gain: Array | None) -> _Size:
        contact, record = contacts[i], records[i]
        is_look_up = isinstance(record, Seen) and contact.factors is not None and contact.factors.one_hot
        if not is_look_up and not is_sum(contact, record):
            return of_array(formed[i] if gain is None else gain * jnp.abs(formed[i]))
        factors, record = cast(Factors, contact.factors), cast(Seen, record)
        gain = None if gain is None else factors.fold(jnp.broadcast_to(gain, contact.weight.shape))
        return of_factors(factors, record.x, record.y, gain)

    def is_copied(own: Collection[int]) -> bool:
        return len(own) <= 1 and all(is_direct(contacts[i]) and not is_sum(contacts[i], records[i]) for i in own)

    return [[] if is_copied(own) else [behind(*of) for of in own.items()] for own in gains]
