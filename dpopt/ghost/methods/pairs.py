"""``|S * G|^2`` from the products of all pairs of rows, for few positions and a diagonal S."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dpopt.ghost import squares
from dpopt.ghost.costs import OPERATIONS_PER_BYTE, entry_bytes
from dpopt.ghost.methods.base import Cost, FromFactors, Group
from dpopt.ghost.rows import Dense, einsum, wide
from dpopt.ghost.rules.base import Factors
from dpopt.ghost.squares import Square
from dpopt.ghost.values import Contact

# Of so many rows, all pairs may be multiplied: the program grows with their number.
FEW = 16


class Pairs(FromFactors):
    """For few T and a diagonal."""

    name = "pairs"

    def applies(self, contact: Contact, scaled: bool) -> bool:
        factors = contact.factors
        return scaled and factors is not None and not factors.one_hot and 1 != factors.positions <= FEW

    def cost(self, contact: Contact, scaled: bool) -> Cost:
        del scaled
        factors = cast(Factors, contact.factors)
        K, N, a, p = factors.shape
        return cost_of_pairs(N, factors.positions, K * a, p, entry_bytes(contact))

    def of_group(self, group: Group) -> Square:
        left, right = wide(cast(Dense, group.left).x), wide(group.right)
        (T, a), p, smallest = left.shape, right.shape[1], squares.tiny(right.dtype)
        mixed, columns = _mixed(left, group.diagonal())
        products = jnp.sum(mixed * _pairs(right), axis=1)
        own, most = products[:T], jnp.max(columns)
        # The sum of |l_t l_s| over all pairs and entries is at most T times this, and likewise on the right.
        whole, onto = (T * squares.sum_squares(z) for z in (left, right))
        lost = (p * smallest) * whole + (a * smallest) * onto + 4 * T * T * smallest
        missing = most * lost + smallest * whole * onto + (a + 1) * smallest * onto + T * T * p * smallest
        if T == 1:
            return Square(jnp.sum(own), missing, most)
        value = jnp.sum(own) + 2 * jnp.sum(products[T:])
        return Square(squares.cancelled(value, jnp.sum(jnp.sqrt(own)), group.right.dtype), missing, most)


PAIRS = Pairs()


def cost_of_pairs(groups: int, rows: int, a: int, p: int, width: int) -> Cost:
    """The cost for numbers of ``width`` bytes."""
    pairs = groups * rows * (rows + 1) // 2
    written = width * pairs * (a + 2 * p)
    return Cost(2 * pairs * a * p + OPERATIONS_PER_BYTE * written, written)


def _pairs(rows: Float[Array, "*batch T n"]) -> Float[Array, "*batch pairs n"]:
    """The products of all pairs of rows, each once, and those of a row with itself first."""
    T = rows.shape[-2]
    return jnp.concatenate([rows[..., : T - d, :] * rows[..., d:, :] for d in range(T)] or [rows], axis=-2)


# How many terms to add up one after another, as a product of a row with a matrix does.
_BLOCK = 1024
_Mixed: TypeAlias = tuple[Float[Array, "*batch pairs p"], Float[Array, " p"]]


@jax.custom_batching.custom_vmap
def _mixed(rows: Float[Array, "*batch T a"], diagonal: Float[Array, "a p"]) -> _Mixed:
    """``_pairs(rows) @ diagonal^2`` (elementwise square), and the column sums of ``diagonal^2``.

    Long sums are added up in blocks, and only the pairs of a block are in memory."""
    length = rows.shape[-1]
    blocks = -(-length // _BLOCK)
    block = length // blocks

    def part(start: jax.typing.ArrayLike, count: int) -> _Mixed:
        own = _pairs(lax.dynamic_slice_in_dim(rows, start, count, axis=-1))
        squared = jnp.square(wide(lax.dynamic_slice_in_dim(diagonal, start, count)))
        flat, ones = own.reshape(math.prod(own.shape[:-1]), count), jnp.ones((1, count), own.dtype)
        if jax.device_count() > 1:  # a row more would be sent, with all others, to the devices that have one less
            mixed, (columns,) = (einsum("ba,ap->bp", z, squared) for z in (flat, ones))
        else:  # the diagonal's squares are read once: the additional row adds up their columns
            out = einsum("ba,ap->bp", jnp.concatenate([flat, ones]), squared)
            mixed, columns = out[:-1], out[-1]
        return mixed.reshape(*own.shape[:-1], mixed.shape[1]), columns

    def added(start: jax.typing.ArrayLike, count: int, total: _Mixed) -> _Mixed:
        mixed, columns = part(start, count)
        return total[0] + mixed, total[1] + columns

    total = part(0, block)
    if blocks > 1:
        total = lax.fori_loop(1, blocks, lambda i, total: added(i * block, block, total), total)
    return added(blocks * block, length - blocks * block, total) if length > blocks * block else total


@_mixed.def_vmap
def _(size: int, are_mapped: Sequence[bool], rows: Array, diagonal: Array) -> tuple[_Mixed, tuple[bool, bool]]:
    if are_mapped[1]:
        rows = rows if are_mapped[0] else jnp.broadcast_to(rows, (size, *rows.shape))
        return jax.vmap(_mixed.fun)(rows, diagonal), (True, True)
    return _mixed(rows, diagonal), (True, False)  # a diagonal that all examples share
