"""``|G|^2 = <l l', r r'>``: from the inner products of the rows of each factor."""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp
from jaxtyping import Array, Float

from dpopt.ghost import squares
from dpopt.ghost.costs import OPERATIONS_PER_BYTE, entry_bytes, view_bytes
from dpopt.ghost.methods.base import Cost, FromFactors, Group, length
from dpopt.ghost.rows import Dense
from dpopt.ghost.rules.base import SHIFTED_SUM, Factors
from dpopt.ghost.squares import Square
from dpopt.ghost.values import Contact


class Gram(FromFactors):
    """For one-hot ``l``, whose rows of ``r`` a diagonal multiplies; for all others without a diagonal."""

    name = "gram"
    bounds_terms = True
    reads_grams = True

    def applies(self, contact: Contact, scaled: bool) -> bool:
        factors = contact.factors
        return factors is not None and factors.positions != 1 and (factors.one_hot or not scaled)

    def cost(self, contact: Contact, scaled: bool) -> Cost:
        del scaled
        factors = cast(Factors, contact.factors)
        K, N, a, p = factors.shape
        T, width = factors.positions, entry_bytes(contact)
        square = N * T * T * width
        read = 3 * OPERATIONS_PER_BYTE * square
        if factors.inner is not None:
            pixels = N * factors.rows**2
            inner = 2 * pixels * a + SHIFTED_SUM * K * N * T * T
            return Cost(inner + 2 * N * T * T * p + read, 2 * square + pixels * width)
        inner = 0 if factors.one_hot else K * a
        return Cost(2 * N * T * T * (inner + p) + read, 2 * square + view_bytes(factors, contact.weight.dtype))

    def of_group(self, group: Group) -> Square:
        right = Dense(group.right if group.table() is None else group.scaled())
        inner, outer = left_gram(group), right.inner(right, is_quick=group.is_quick)
        sizes = right.x.shape[0], length(group.left), right.x.shape[1]
        return squares.of_products(
            diagonal_of(inner), diagonal_of(outer), jnp.sum(inner * outer), sizes, group.right.dtype, group.is_quick
        )


GRAM = Gram()


def diagonal_of(square: Float[Array, "T T"]) -> Float[Array, " T"]:
    """The diagonal by a slice, which XLA fuses with its uses; `jnp.diagonal` is a look-up."""
    return square.reshape(-1)[:: len(square) + 1]


def left_gram(group: Group) -> Float[Array, "T T"]:
    """``l l'`` of a group."""
    return group.left.inner(group.left, is_quick=group.is_quick) if group.inner is None else group.inner
