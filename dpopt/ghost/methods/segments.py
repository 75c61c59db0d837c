"""``|G|^2`` of a look-up: rows with equal index are added up, and then squared."""

from __future__ import annotations

import math
from typing import cast

import jax.numpy as jnp

from dpopt.ghost import squares
from dpopt.ghost.costs import OPERATIONS_PER_BYTE, entry_bytes
from dpopt.ghost.methods.base import Cost, FromFactors, Group
from dpopt.ghost.rows import Dense, OneHot
from dpopt.ghost.rules.base import Factors
from dpopt.ghost.squares import Square
from dpopt.ghost.values import Contact

_SORT = 4  # bytes in whose time an index is compared when it is sorted


class Segments(FromFactors):
    """For one-hot ``l``."""

    name = "segments"

    def applies(self, contact: Contact, scaled: bool) -> bool:
        del scaled
        return contact.factors is not None and contact.factors.positions != 1 and contact.factors.one_hot

    def cost(self, contact: Contact, scaled: bool) -> Cost:
        del scaled
        factors = cast(Factors, contact.factors)
        _, N, _, p = factors.shape
        return cost_of_segments(N, factors.positions, p, entry_bytes(contact))

    def of_group(self, group: Group) -> Square:
        right = group.scaled()
        found = squares.of_entries(cast(OneHot, group.table()).merged(right))
        return found._replace(
            value=squares.cancelled(found.value, jnp.sum(jnp.sqrt(Dense(right).squares())), group.right.dtype)
        )


SEGMENTS = Segments()


def cost_of_segments(groups: int, rows: int, p: int, width: int) -> Cost:
    """The cost for numbers of ``width`` bytes."""
    operations = OPERATIONS_PER_BYTE * (8 * width * p + _SORT * math.log2(rows + 1))
    return Cost(groups * rows * operations, groups * rows * (width * p + 16))
