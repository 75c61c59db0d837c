"""The sizes of the terms that a parameter's gradient is added up from, over all of its contacts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import jax.numpy as jnp
from jaxtyping import Array

from dpopt.common.trees import accumulator_dtype
from dpopt.ghost import term_sizes
from dpopt.ghost.contacts import Recorded, Seen, is_sum
from dpopt.ghost.rules import Factors
from dpopt.ghost.squares import Square, sum_squares, tiny
from dpopt.ghost.values import Contact

_Size = TypeVar("_Size")
# For each parameter, the factor from each of its contacts' gradients to its own (`Run.gains`).
Gains: TypeAlias = Sequence[Mapping[int, Array | None]]
Sizes: TypeAlias = Sequence[Sequence[Array | term_sizes.Columns]]


def sizes_of_terms(
    gains: Gains, contacts: Sequence[Contact], formed: Sequence[Any],
    records: Sequence[Recorded], of_array: Callable[[Array], _Size],
    of_factors: Callable[[Factors, Array, Array, Array | None], _Size],
) -> list[list[_Size]]:  # fmt: skip
    """For each parameter, the sizes of the terms that one example's ``S g`` was added up from, at each of its contacts.

    None where nothing was added up.

    Args:
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
        return of_factors(factors, record.x, record.y, _folded(contact, gain))

    def is_copied(own: Collection[int]) -> bool:
        return len(own) <= 1 and all(contacts[i].is_direct and not is_sum(contacts[i], records[i]) for i in own)

    return [[] if is_copied(own) else [behind(*of) for of in own.items()] for own in gains]


def _folded(contact: Contact, gain: Array | None) -> Array | None:
    return None if gain is None else cast(Factors, contact.factors).fold(jnp.broadcast_to(gain, contact.weight.shape))


def sizes_of_one(
    gains: Gains, contacts: Sequence[Contact], formed: Sequence[Any], records: Sequence[Recorded]
) -> Sizes:
    """`sizes_of_terms` of one example, those behind a gain without the part that `totals` computes for all of them."""
    return sizes_of_terms(gains, contacts, formed, records, _root, _of_factors)


def totals(gains: Gains, contacts: Sequence[Contact], sizes: Sizes) -> list[Array]:
    """For each parameter, the size of all its terms together. If this is mapped, examples share the gains."""

    def size(contact: Contact, gain: Array | None, own: Array | term_sizes.Columns) -> Array:
        if not isinstance(own, term_sizes.Columns):
            return own
        return _root_of(term_sizes.behind(cast(Factors, contact.factors), own, cast(Array, _folded(contact, gain))))

    def total(of_leaf: Mapping[int, Array | None], sizes: Sequence[Array | term_sizes.Columns]) -> Array:
        uses = zip(of_leaf.items(), sizes, strict=True) if sizes else ()
        return functools.reduce(jnp.hypot, (size(contacts[i], gain, s) for (i, gain), s in uses), jnp.zeros(()))

    return [total(*of) for of in zip(gains, sizes, strict=True)]


def _of_factors(factors: Factors, x: Array, y: Array, gain: Array | None) -> Array | term_sizes.Columns:
    found = term_sizes.of_one(factors, x, y, gain)
    return found if isinstance(found, term_sizes.Columns) else _root_of(found)


def _root_of(square: Square) -> Array:
    return jnp.sqrt(square.value + square.missing)


def _root(x: Array) -> Array:
    """An upper bound on the norm of an array, underflow included (`safe_norm` would read the array twice)."""
    return jnp.sqrt(sum_squares(x) + x.size * tiny(accumulator_dtype(x.dtype)))
