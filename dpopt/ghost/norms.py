"""Squared norms of per-example gradients from their factors, without the gradients where possible.

With ``G = sum_t l_t (x) r_t`` (rules/) there are five exact methods, of which the planner picks one:

* ``rank_one``  T = 1:  ``|G|^2 = |l|^2 |r|^2``; with a diagonal S, as ``pairs``.
* ``pairs``     few T and a diagonal S: ``sum_ts (l_t l_s) @ (S^2) . (r_t r_s)``: one matmul of ``T (T + 1) / 2`` rows.
* ``gram``      ``|G|^2 = <l l', r r'>``, both T x T: ``T^2 (a + p)`` operations and no weight-sized buffer.
* ``segments``  one-hot ``l`` (embeddings): add up the rows with equal index, then square.
* ``explicit``  form G (``T a p`` operations, as many as the weighted sum, which can then reuse it).

Every method is written for one group of one example; `over_groups` maps it over the groups, and the engine over the
batch. squares.py bounds what float32 loses of a square.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from dpopt.common.trees import is_narrow
from dpopt.common.types import PyTree
from dpopt.ghost import squares
from dpopt.ghost.rows import Dense, OneHot, Rows, einsum, summed_products, wide
from dpopt.ghost.rules import Factors
from dpopt.ghost.squares import Square
from dpopt.ghost.standardized import Coefficients, PerFilter

_Folded: TypeAlias = Float[Array, "K N a p"]
_Input: TypeAlias = Shaped[Array, " ..."]
_Cotangent: TypeAlias = Float[Array, " ..."]


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
    method: Callable[..., PyTree], factors: Factors, x: _Input, y: _Cotangent,
    scale: _Folded | None = None, more: Sequence[PyTree] = (), grams: bool = False,
) -> PyTree:  # fmt: skip
    """``method`` for every group of one example, stacked; ``grams``: whether it reads `Group.inner`.

    ``more`` are further arguments of ``method``, ``[N, ...]``."""
    left, right = factors.split(x, y)
    inner = factors.inner(x, lambda z: einsum("nsa,nta->nst", z, z)) if grams and factors.inner else None
    scale = None if scale is None else jnp.swapaxes(scale, 0, 1)

    def one(left: Array, right: Array, scale: Array | None, inner: Array | None, *more: PyTree) -> PyTree:
        rows = OneHot(left, factors.shape[2]) if factors.one_hot else Dense(left)
        return method(Group(rows, right, scale, inner), *more)

    return mapped(one, factors.shape[1])(left, right, scale, inner, *more)


def mapped(one: Callable[..., PyTree], groups: int) -> Callable[..., PyTree]:
    """``one`` for every group; a single group is not mapped, so that `_mixed` is mapped over the batch only."""
    if groups != 1:
        return jax.vmap(one)
    return lambda *only: jax.tree.map(lambda z: z[None], one(*jax.tree.map(lambda z: jnp.squeeze(z, 0), only)))


def square(
    method: str, factors: Factors, x: _Input, y: _Cotangent, scale: _Folded | None, is_quick: bool = False
) -> Square:
    """``|S * G|^2`` for one example; ``scale`` is S, folded; ``is_quick``: by products in the default precision."""

    def one(group: Group) -> Square:
        return METHODS[method](group._replace(is_quick=is_quick))

    return jax.tree.map(jnp.sum, over_groups(one, factors, x, y, scale, grams=method == "gram"))


def rank_one(group: Group) -> Square:
    """For T = 1."""
    (right,) = group.right if group.table() is None else group.scaled()
    right_squares = jnp.square(wide(right))  # [p]
    p, smallest = right_squares.size, squares.tiny(right_squares.dtype)
    if group.table() is not None:
        (valid,) = cast(OneHot, group.table()).squares()
        return Square(valid * jnp.sum(right_squares), jnp.asarray(p * smallest))
    if group.scale is not None:
        return pairs(group)
    left_squares = jnp.square(wide(cast(Dense, group.left).x[0]))  # [K a]
    whole, onto = jnp.sum(left_squares), jnp.sum(right_squares)
    lost = (p * smallest) * whole + (left_squares.size * smallest) * onto + 4 * smallest
    return Square(whole * onto, lost, terms=whole * onto + lost)


def pairs(group: Group) -> Square:
    """For few T and a diagonal."""
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


def gram(group: Group) -> Square:
    """``<l l', r r'>``; a diagonal is supported only for one-hot ``l``, where it multiplies the rows of ``r``."""
    right = Dense(group.right if group.table() is None else group.scaled())
    inner, outer = _left_gram(group), right.inner(right, is_quick=group.is_quick)
    sizes = right.x.shape[0], length(group.left), right.x.shape[1]
    return squares.of_products(
        _diagonal(inner), _diagonal(outer), jnp.sum(inner * outer), sizes, group.right.dtype, group.is_quick
    )


def _diagonal(square: Float[Array, "T T"]) -> Float[Array, " T"]:
    """The diagonal by a slice, which XLA fuses with its uses; `jnp.diagonal` is a look-up."""
    return square.reshape(-1)[:: len(square) + 1]


def length(rows: Rows) -> int:
    """How many terms an inner product with one of the rows has."""
    return 1 if isinstance(rows, OneHot) else rows.x.shape[1]


def _left_gram(group: Group) -> Float[Array, "T T"]:
    return group.left.inner(group.left, is_quick=group.is_quick) if group.inner is None else group.inner


def segments(group: Group) -> Square:
    """For one-hot ``l``: rows with equal index are added up first."""
    right = group.scaled()
    found = squares.of_entries(cast(OneHot, group.table()).merged(right))
    return found._replace(
        value=squares.cancelled(found.value, jnp.sum(jnp.sqrt(Dense(right).squares())), group.right.dtype)
    )


METHODS: dict[str, Callable[[Group], Square]] = {
    "rank_one": rank_one, "pairs": pairs, "gram": gram, "segments": segments
}  # fmt: skip


def explicit(factors: Factors, x: _Input, y: _Cotangent, is_quick: bool = False) -> _Folded:
    """G itself, in at least float32; ``is_quick``: its products in the device's default precision."""
    # (In float32 it takes as long.)
    if factors.joint is not None and is_narrow(x.dtype) and is_narrow(y.dtype) and jax.default_backend() == "gpu":
        return factors.joint(x, y, functools.partial(summed_products, is_quick=is_quick))
    return explicit_together([(factors, x, y)], is_quick)


def explicit_together(uses: Sequence[tuple[Factors, _Input, _Cotangent]], is_quick: bool = False) -> _Folded:
    """The sum of G over uses of one weight whose factors have one shape: a product of the rows of all of them."""
    factors, split = uses[0][0], [factors.split(x, y) for factors, x, y in uses]
    left, right = (jnp.concatenate(rows, axis=1) for rows in zip(*split, strict=True))
    K, N, size, _ = factors.shape

    def one(left: Array, right: Array) -> Array:
        rows = OneHot(left, size) if factors.one_hot else Dense(left)
        return _formed(K, is_quick, Group(rows, right, None, None))

    return jnp.swapaxes(mapped(one, N)(left, right), 0, 1)


def _formed(offsets: int, is_quick: bool, group: Group) -> Float[Array, "K a p"]:
    table, right = group.table(), group.right
    if table is not None:
        return table.added(right)[None]
    left, p = cast(Dense, group.left).x, right.shape[1]
    if left.shape[1] == offsets and p == 1:  # depthwise: a sum of products, which XLA fuses where a matmul would copy
        return jnp.sum(wide(left) * wide(right), axis=0)[:, None, None]
    return summed_products(left, right, is_quick=is_quick).reshape(offsets, left.shape[1] // max(offsets, 1), p)


def along_rows(factors: Factors, direction: Float[Array, " ..."], x: _Input, y: _Cotangent) -> Float[Array, ""]:
    """``<G, direction>`` for one example of a look-up; ``direction`` has the shape of the weight."""
    return jnp.sum(over_groups(lambda group: jnp.sum(wide(group.scaled())), factors, x, y, factors.fold(direction)))


def standardized_gram(
    factors: Factors, x: Float[Array, " ..."], y: Float[Array, "*out"], out: Float[Array, "*out"], c: Coefficients
) -> Square:
    """``|alpha G + p + q u|^2`` (standardized.py) from Gram matrices; ``out`` is the output of the standardised weight.

    Per filter the square is ``|alpha G|^2 + 2 alpha (p <1, G> + q <u, G>) + p^2 n + 2 p q sum u + q^2 sum u^2``.
    """

    def one(group: Group, out: Array, c: PerFilter) -> Square:
        inner, right = _left_gram(group), wide(group.right)
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
        found = squares.of_products(_diagonal(inner), _diagonal(outer), value, sizes, group.right.dtype)
        # The terms may cancel in part, so the rounding error of their sum counts as well.
        of_terms = cast(jax.Array, sum(jnp.sum(jnp.abs(t)) for t in terms))
        return found._replace(value=squares.cancelled(found.value, jnp.sqrt(of_terms), group.right.dtype))

    size = c.size
    groups = over_groups(one, factors, x, y, more=(factors.split(x, out)[1], c.per_filter), grams=True)
    return jax.tree.map(jnp.sum, groups)


def standardized_explicit(formed: _Folded, deviation: _Folded, scale: _Folded | None, c: Coefficients) -> Square:
    """``|S (alpha G + p + q u)|^2`` from G itself; all arrays but those of ``c`` are folded."""
    total, along = (jnp.sum(z, axis=(0, 2)) for z in (formed, formed * deviation))
    p, q = (z[None, :, None] for z in c.per_filter.pulled(along, total))
    parts = [formed * c.per_filter.slope[None, :, None], jnp.broadcast_to(p, formed.shape), q * deviation]
    parts = parts if scale is None else [part * scale for part in parts]
    found = squares.of_entries(cast(jax.Array, sum(parts)))
    total = cast(jax.Array, sum(jnp.sqrt(squares.sum_squares(part)) for part in parts))
    return found._replace(value=squares.cancelled(found.value, total, formed.dtype))
