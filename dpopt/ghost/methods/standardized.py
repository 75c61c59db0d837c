"""Squared norms behind normalised filters (ghost/standardized.py), from Gram matrices or from formed gradients."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpopt.common.trees import accumulator_dtype
from dpopt.ghost import squares
from dpopt.ghost.methods.base import AtContact, Folded, Group, length, over_groups
from dpopt.ghost.methods.explicit import EXPLICIT
from dpopt.ghost.methods.gram import GRAM, diagonal_of, left_gram
from dpopt.ghost.rows import Dense, einsum, wide
from dpopt.ghost.rules.base import Factors
from dpopt.ghost.squares import Square
from dpopt.ghost.standardized import Coefficients, PerFilter
from dpopt.ghost.values import Contact


def standardized_methods(contact: Contact, scaled: bool) -> list[AtContact]:
    """The methods for a contact whose filters are normalised, with a diagonal or without."""
    # The Gram method reads the contact's output, which must be as precise as the Gram matrices.
    reads_output = contact.is_precise and contact.tap_dtype == accumulator_dtype(contact.tap_dtype)
    return [GRAM, EXPLICIT] if reads_output and not scaled else [EXPLICIT]


def from_gram(
    factors: Factors, x: Float[Array, " ..."], y: Float[Array, "*out"], out: Float[Array, "*out"], c: Coefficients
) -> Square:
    """``|alpha G + p + q u|^2`` (standardized.py) from Gram matrices; ``out`` is the output of the standardised weight.

    Per filter the square is ``|alpha G|^2 + 2 alpha (p <1, G> + q <u, G>) + p^2 n + 2 p q sum u + q^2 sum u^2``.
    """

    def one(group: Group, out: Array, c: PerFilter) -> Square:
        inner, right = left_gram(group), wide(group.right)
        scaled = Dense(right * c.slope[None])
        outer = scaled.inner(scaled)
        # <1, G> = sum_t right_t sum(left_t), and <v, G> = sum_t right_t out_t for the weight v itself.
        total = einsum("t,tp->p", jnp.sum(wide(cast(Dense, group.left).x), axis=1), right)
        along = (jnp.sum(right * wide(out), axis=0) - c.level * total) / c.slope
        p, q = c.pulled(along, total)
        first, second = c.sums
        terms = [2 * c.slope * p * total, 2 * c.slope * q * along, p * p * size, 2 * p * q * first, q * q * second]
        sizes = right.shape[0], length(group.left), right.shape[1]
        value = jnp.sum(inner * outer) + sum(jnp.sum(t) for t in terms)
        found = squares.of_products(diagonal_of(inner), diagonal_of(outer), value, sizes, group.right.dtype)
        # The terms may cancel in part, so the rounding error of their sum counts as well.
        of_terms = cast(jax.Array, sum(jnp.sum(jnp.abs(t)) for t in terms))
        return found._replace(value=squares.cancelled(found.value, jnp.sqrt(of_terms), group.right.dtype))

    size = c.size
    groups = over_groups(one, factors, x, y, more=(factors.split(x, out)[1], c.per_filter), grams=True)
    return jax.tree.map(jnp.sum, groups)


def from_formed(formed: Folded, deviation: Folded, scale: Folded | None, c: Coefficients) -> Square:
    """``|S (alpha G + p + q u)|^2`` from G itself; all arrays but those of ``c`` are folded."""
    total, along = (jnp.sum(z, axis=(0, 2)) for z in (formed, formed * deviation))
    p, q = (z[None, :, None] for z in c.per_filter.pulled(along, total))
    parts = [formed * c.per_filter.slope[None, :, None], jnp.broadcast_to(p, formed.shape), q * deviation]
    parts = parts if scale is None else [part * scale for part in parts]
    found = squares.of_entries(cast(jax.Array, sum(parts)))
    total = cast(jax.Array, sum(jnp.sqrt(squares.sum_squares(part)) for part in parts))
    return found._replace(value=squares.cancelled(found.value, total, formed.dtype))
