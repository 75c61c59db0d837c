"""G itself: from its factors, or as the backward pass has formed it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpopt.common.trees import is_narrow
from dpopt.ghost.costs import OPERATIONS_PER_BYTE, formed_bytes, product
from dpopt.ghost.methods.base import AtContact, Cost, Cotangent, Folded, Group, Input, mapped
from dpopt.ghost.rows import Dense, OneHot, summed_products, wide
from dpopt.ghost.rules.base import Factors
from dpopt.ghost.values import Contact


class Explicit(AtContact):
    """For every contact. (`contacts.parts_of_one` takes the norm, and may keep what is formed for the sum.)"""

    name = "explicit"
    forms = True
    bounds_terms = True

    def applies(self, contact: Contact, scaled: bool) -> bool:
        del scaled
        return contact.factors is None or contact.factors.positions != 1

    def cost(self, contact: Contact, scaled: bool) -> Cost:
        del scaled
        size = formed_bytes(contact)
        if contact.factors is None:  # the backward pass has formed it already
            return Cost(OPERATIONS_PER_BYTE * size, 0)
        return Cost(product(contact) + 2 * OPERATIONS_PER_BYTE * size, size)


EXPLICIT = Explicit()


def formed(factors: Factors, x: Input, y: Cotangent, is_quick: bool = False) -> Folded:
    """G itself, in at least float32; ``is_quick``: its products in the device's default precision."""
    # (In float32 it takes as long.)
    if factors.joint is not None and is_narrow(x.dtype) and is_narrow(y.dtype) and jax.default_backend() == "gpu":
        return factors.joint(x, y, functools.partial(summed_products, is_quick=is_quick))
    return formed_together([(factors, x, y)], is_quick)


def formed_together(uses: Sequence[tuple[Factors, Input, Cotangent]], is_quick: bool = False) -> Folded:
    """The sum of G over uses of one weight whose factors have one shape: a product of the rows of all of them."""
    factors, split = uses[0][0], [factors.split(x, y) for factors, x, y in uses]
    left, right = (jnp.concatenate(rows, axis=1) for rows in zip(*split, strict=True))
    K, N, size, _ = factors.shape

    def one(left: Array, right: Array) -> Array:
        rows = OneHot(left, size) if factors.one_hot else Dense(left)
        return _formed_group(K, is_quick, Group(rows, right, None, None))

    return jnp.swapaxes(mapped(one, N)(left, right), 0, 1)


def _formed_group(offsets: int, is_quick: bool, group: Group) -> Float[Array, "K a p"]:
    table, right = group.table(), group.right
    if table is not None:
        return table.added(right)[None]
    left, p = cast(Dense, group.left).x, right.shape[1]
    if left.shape[1] == offsets and p == 1:  # depthwise: a sum of products, which XLA fuses where a matmul would copy
        return jnp.sum(wide(left) * wide(right), axis=0)[:, None, None]
    return summed_products(left, right, is_quick=is_quick).reshape(offsets, left.shape[1] // max(offsets, 1), p)
