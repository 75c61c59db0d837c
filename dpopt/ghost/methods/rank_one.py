"""``|G|^2 = |l|^2 |r|^2`` for one position; with a diagonal as in pairs.py."""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp

from dpopt.ghost import squares
from dpopt.ghost.costs import OPERATIONS_PER_BYTE, entry_bytes
from dpopt.ghost.methods.base import Cost, FromFactors, Group
from dpopt.ghost.methods.pairs import PAIRS
from dpopt.ghost.rows import Dense, OneHot, wide
from dpopt.ghost.rules.base import Factors
from dpopt.ghost.squares import Square
from dpopt.ghost.values import Contact


class RankOne(FromFactors):
    """For T = 1."""

    name = "rank_one"
    bounds_terms = True

    def applies(self, contact: Contact, scaled: bool) -> bool:
        del scaled
        return contact.factors is not None and contact.factors.positions == 1

    def cost(self, contact: Contact, scaled: bool) -> Cost:
        factors = cast(Factors, contact.factors)
        K, N, a, p = factors.shape
        reads = OPERATIONS_PER_BYTE * entry_bytes(contact) * N * (K * a + p)
        return Cost(reads + (2 * K * N * a * p if scaled and not factors.one_hot else 0), 0)

    def of_group(self, group: Group) -> Square:
        (right,) = group.right if group.table() is None else group.scaled()
        right_squares = jnp.square(wide(right))  # [p]
        p, smallest = right_squares.size, squares.tiny(right_squares.dtype)
        if group.table() is not None:
            (valid,) = cast(OneHot, group.table()).squares()
            return Square(valid * jnp.sum(right_squares), jnp.asarray(p * smallest))
        if group.scale is not None:
            return PAIRS.of_group(group)
        left_squares = jnp.square(wide(cast(Dense, group.left).x[0]))  # [K a]
        whole, onto = jnp.sum(left_squares), jnp.sum(right_squares)
        lost = (p * smallest) * whole + (left_squares.size * smallest) * onto + 4 * smallest
        return Square(whole * onto, lost, terms=whole * onto + lost)


RANK_ONE = RankOne()
