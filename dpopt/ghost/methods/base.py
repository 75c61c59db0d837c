"""What a norm method is; and the groups of one example's factors, for each of which methods compute one square.

`over_groups` maps a method over the groups, and the engine over the batch. squares.py bounds what float32 loses of a
square.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from dpopt.common.types import PyTree
from dpopt.ghost.rows import Dense, OneHot, Rows, einsum
from dpopt.ghost.rules.base import Factors
from dpopt.ghost.squares import Square
from dpopt.ghost.values import Contact

Folded: TypeAlias = Float[Array, "K N a p"]
Input: TypeAlias = Shaped[Array, " ..."]
Cotangent: TypeAlias = Float[Array, " ..."]


class Group(NamedTuple):
    """One group's factors: ``G = sum_t left_t (x) right_t``, a matrix ``[K a, p]``."""

    left: Rows  # [T, K a]
    right: Float[Array, "T p"]
    scale: Float[Array, "K a p"] | None  # a diagonal that multiplies G
    inner: Float[Array, "T T"] | None  # left left', if it can be computed more cheaply than from left
    is_quick: bool = False  # whether products may be in the device's default precision (quick_sums.py)

    def diagonal(self) -> Float[Array, "Ka p"]:
        """The diagonal of a group that has one."""
        scale = cast(Array, self.scale)
        return scale.reshape(-1, scale.shape[-1])

    def table(self) -> OneHot | None:
        """The rows that are looked up, if this is a look-up, which has one left factor."""
        return self.left if isinstance(self.left, OneHot) else None

    def scaled(self) -> Float[Array, "T p"]:
        """``right`` times the rows of the diagonal that are looked up."""
        table = cast(OneHot, self.table())
        return self.right if self.scale is None else self.right * table.times(self.diagonal())


def over_groups(
    one_group: Callable[..., PyTree], factors: Factors, x: Input, y: Cotangent,
    scale: Folded | None = None, more: Sequence[PyTree] = (), grams: bool = False,
) -> PyTree:  # fmt: skip
    """``one_group`` for every group of one example, stacked; ``grams``: whether it reads `Group.inner`.

    ``more`` are further arguments of ``one_group``, ``[N, ...]``."""
    left, right = factors.split(x, y)
    inner = factors.inner(x, lambda z: einsum("nsa,nta->nst", z, z)) if grams and factors.inner else None
    scale = None if scale is None else jnp.swapaxes(scale, 0, 1)

    def one(left: Array, right: Array, scale: Array | None, inner: Array | None, *more: PyTree) -> PyTree:
        rows = OneHot(left, factors.shape[2]) if factors.one_hot else Dense(left)
        return one_group(Group(rows, right, scale, inner), *more)

    return mapped(one, factors.shape[1])(left, right, scale, inner, *more)


def mapped(one: Callable[..., PyTree], groups: int) -> Callable[..., PyTree]:
    """``one`` for every group; a single group is not mapped, so that pairs.py is mapped over the batch only."""
    if groups != 1:
        return jax.vmap(one)
    return lambda *only: jax.tree.map(
        lambda z: lax.expand_dims(z, [0]), one(*jax.tree.map(lambda z: lax.squeeze(z, [0]), only))
    )


def length(rows: Rows) -> int:
    """How many terms an inner product with one of the rows has."""
    return 1 if isinstance(rows, OneHot) else rows.x.shape[1]


class Cost(NamedTuple):
    """What the norm of one example takes."""

    operations: float
    bytes: float  # of buffers that an ordinary gradient does not need


class Method:
    """A way to compute the norms of one parameter's per-example gradients."""

    name: str
    forms: ClassVar[bool] = False  # whether it forms the gradients at the contacts


class _NoContact(Method):
    """For a parameter that no example meets."""

    name = "none"


NO_CONTACT = _NoContact()


class _Apart(Method):
    """For a parameter with several contacts that share no entry of it: their squares add up (`LeafPlan.parts`)."""

    name = "apart"


APART = _Apart()


class AtContact(Method, abc.ABC):
    """A method for a weight with one contact, which keeps the entries of the parameter apart."""

    bounds_terms: ClassVar[bool] = False  # whether its result has `Square.terms`, which quick_sums.py reads

    @abc.abstractmethod
    def applies(self, contact: Contact, scaled: bool) -> bool:
        """Whether it is exact at this contact, with a diagonal (``scaled``) or without."""

    @abc.abstractmethod
    def cost(self, contact: Contact, scaled: bool) -> Cost:
        """What the norm of one example takes, in the units of costs.py."""


class FromFactors(AtContact):
    """A method that reads the factors of G, and does not form it."""

    reads_grams: ClassVar[bool] = False  # whether it reads `Group.inner`

    @abc.abstractmethod
    def of_group(self, group: Group) -> Square:
        """``|S * G|^2`` for one group of one example."""

    def square(self, factors: Factors, x: Input, y: Cotangent, scale: Folded | None, is_quick: bool = False) -> Square:
        """``|S * G|^2`` for one example; ``scale`` is S; ``is_quick``: by products in the default precision."""

        def one(group: Group) -> Square:
            return self.of_group(group._replace(is_quick=is_quick))

        return jax.tree.map(jnp.sum, over_groups(one, factors, x, y, scale, grams=self.reads_grams))
