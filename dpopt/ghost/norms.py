"""Squared norms of per-example gradients from their factors, without the gradients where possible.

With ``G = sum_t l_t (x) r_t`` (rules.py) there are four ways, all exact, and the planner picks one:

* ``rank_one``  T = 1:  ``|G|^2 = |l|^2 |r|^2``; with a diagonal S, ``(l^2) @ (S^2) . (r^2)``: one matmul.
* ``gram``      ``|G|^2 = <l l', r r'>``, both T x T: ``T^2 (a + p)`` operations and no weight-sized buffer.
* ``segments``  one-hot ``l`` (embeddings): add up the rows of equal index, then square.
* ``explicit``  form G (``T a p``, what the weighted sum costs, which can then reuse it).

Every function takes one example; the engine maps them over the batch.

A norm bounds a sensitivity, so it must not come out too small. A Gram matrix loses digits where terms cancel, hence a
slack of a few roundings is added to it; and where factors are so large that squares of the other side may have
vanished, the answer is infinity, which makes the engine compute that batch by the plain definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from dpopt.ghost.rules import Factors
from dpopt.ghost.standardized import Coefficients

# Norms bound the sensitivity: they are taken at full float32 precision on accelerators, too.
_PRECISION = lax.Precision.HIGHEST


def _einsum(spec: str, *operands: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(jnp.result_type(*operands), jnp.float32)
    return jnp.einsum(spec, *operands, precision=_PRECISION, preferred_element_type=dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def sum_squares(x: jax.Array) -> jax.Array:
    """Sum of squares in at least float32."""
    return jnp.sum(jnp.square(_wide(x)))


def _guarded(square: jax.Array, *sizes: jax.Array) -> jax.Array:
    """``square``, or infinity where a squared factor is beyond the root of the largest number."""
    limit = jnp.finfo(square.dtype).max ** 0.5
    return jnp.where(jnp.max(jnp.stack([jnp.max(x) for x in sizes])) > limit, jnp.inf, square)


def _with_slack(square: jax.Array, row_sizes: jax.Array) -> jax.Array:
    """Adds what rounding may have taken from a Gram sum whose rows have norms ``|l_t| |r_t|``."""
    return jnp.maximum(square, 0) + 4 * jnp.finfo(square.dtype).eps * jnp.square(jnp.sum(row_sizes))


def rank_one(factors: Factors, x: jax.Array, y: jax.Array, scale: jax.Array | None) -> jax.Array:
    """``|S * G|^2`` for T = 1; ``scale`` is folded to ``[K, N, a, p]``."""
    left, right = factors.split(x, y)
    right_squares = jnp.square(_wide(right[:, 0]))  # [N, p]
    if factors.one_hot:
        if scale is not None:
            right_squares = right_squares * jnp.square(scale[0, 0].at[left[0][:, 0]].get(mode="clip"))
        return jnp.sum(right_squares)
    total, sizes = 0, [right_squares]
    for k, rows in enumerate(left):
        left_squares = jnp.square(_wide(rows[:, 0]))  # [N, a]
        sizes.append(left_squares)
        if scale is None:
            total += jnp.sum(jnp.sum(left_squares, axis=1) * jnp.sum(right_squares, axis=1))
        else:
            mixed = _einsum("na,nap->np", left_squares, jnp.square(scale[k]))
            total += jnp.sum(mixed * right_squares)
    return _guarded(cast(jax.Array, total), *sizes)  # there is at least one k


def gram(factors: Factors, x: jax.Array, y: jax.Array, scale: jax.Array | None) -> jax.Array:
    """``<l l', r r'>``; with a diagonal only for one-hot ``l``, whose rows it multiplies."""
    left, right = factors.split(x, y)
    if factors.one_hot:
        ids = left[0]
        if scale is not None:
            right = right * scale[0, 0].at[ids].get(mode="clip")
        inner = (ids[:, :, None] == ids[:, None, :]).astype(jnp.float32)
    else:
        inner = _left_gram(factors, x, left)
    outer = _einsum("ntp,nsp->nts", right, right)
    left_squares, right_squares = (jnp.diagonal(m, axis1=1, axis2=2) for m in (inner, outer))
    square = _with_slack(jnp.sum(inner * outer), jnp.sqrt(left_squares) * jnp.sqrt(right_squares))
    return _guarded(square, left_squares, right_squares)


def _left_gram(factors: Factors, x: jax.Array, left: list[jax.Array]) -> jax.Array:
    """``sum_k left[k] left[k]'``."""
    if factors.inner is not None:
        return factors.inner(x, lambda z: _einsum("nas,nat->nst", z, z))
    return cast(jax.Array, sum(_einsum("nta,nsa->nts", rows, rows) for rows in left))


def standardized_gram(factors: Factors, x: jax.Array, y: jax.Array, out: jax.Array, c: Coefficients) -> jax.Array:
    """``|alpha G + p + q u|^2`` (standardized.py) from Gram matrices; ``out`` is what the standardised weight gave.

    Per filter the square is ``|alpha G|^2 + 2 alpha (p <1, G> + q <u, G>) + p^2 n + 2 p q sum u + q^2 sum u^2``.
    """
    left, right = factors.split(x, y)
    inner = _left_gram(factors, x, left)
    right = _wide(right)
    scaled = right * c.slope[:, None]
    outer = _einsum("ntp,nsp->nts", scaled, scaled)
    left_squares, right_squares = (jnp.diagonal(m, axis1=1, axis2=2) for m in (inner, outer))
    # <1, G> = sum_t right_t sum(left_t), and <v, G> = sum_t right_t out_t for the weight v itself.
    total = _einsum("nt,ntp->np", jnp.sum(cast(jax.Array, sum(map(_wide, left))), axis=2), right)
    onto_weight = jnp.sum(right * _wide(factors.split(x, out)[1]), axis=1)
    along = (onto_weight - c.level * total) / c.slope
    p, q = c.pulled(along, total)
    first, second = c.sums
    terms = [2 * c.slope * p * total, 2 * c.slope * q * along, p * p * c.size, 2 * p * q * first, q * q * second]
    row_sizes = jnp.sqrt(left_squares) * jnp.sqrt(right_squares)
    # The terms cancel in part: what rounding may have taken from their sum counts as well.
    slack = 4 * jnp.finfo(outer.dtype).eps * sum(jnp.sum(jnp.abs(t)) for t in terms)
    square = _with_slack(jnp.sum(inner * outer) + sum(jnp.sum(t) for t in terms), row_sizes) + slack
    return _guarded(square, left_squares, right_squares)


def standardized_explicit(formed: jax.Array, deviation: jax.Array, scale: Any, c: Coefficients) -> jax.Array:
    """``|S (alpha G + p + q u)|^2`` from G itself; all arrays but c's are folded to ``[K, N, a, p]``."""
    total, along = (jnp.sum(z, axis=(0, 2)) for z in (formed, formed * deviation))
    p, q = (z[None, :, None] for z in c.pulled(along, total))
    pulled = formed * c.slope[None, :, None] + p + q * deviation
    return sum_squares(pulled if scale is None else pulled * scale)


def segments(factors: Factors, x: jax.Array, y: jax.Array, scale: jax.Array | None) -> jax.Array:
    """One-hot ``l``: rows of equal index are added at the index's first position."""
    (ids,), right = factors.split(x, y)
    right = _wide(right)
    if scale is not None:
        right = right * scale[0, 0].at[ids].get(mode="clip")
    positions = jnp.arange(ids.shape[1])
    equal = ids[0, :, None] == ids[0, None, :]
    first = jnp.min(jnp.where(equal, positions[None], ids.shape[1]), axis=1)
    return sum_squares(jnp.zeros_like(right[0]).at[first].add(right[0]))


METHODS: dict[str, Callable[..., jax.Array]] = {"rank_one": rank_one, "gram": gram, "segments": segments}


def explicit(factors: Factors, x: jax.Array, y: jax.Array) -> jax.Array:
    """G itself, ``[K, N, a, p]`` in at least float32."""
    left, right = factors.split(x, y)
    K, N, a, p = factors.shape
    if factors.one_hot:
        table = jnp.zeros((a, p), jnp.promote_types(right.dtype, jnp.float32))
        return table.at[left[0][0]].add(right[0].astype(table.dtype), mode="drop")[None, None]
    if a == p == 1:  # depthwise: a sum of products, which XLA fuses where a matmul would copy
        return jnp.stack([jnp.sum(_wide(rows) * _wide(right), axis=1, keepdims=True) for rows in left])
    # One product for all k: as fast as one for each, and a ninth of the kernels to compile.
    formed = _einsum("nta,ntp->nap", jnp.concatenate(left, axis=2), right)
    return jnp.swapaxes(formed.reshape(N, K, a, p), 0, 1)


def shared_gram(uses: Sequence[tuple[Factors, bool, jax.Array, jax.Array]]) -> jax.Array:
    """``|sum_k G_k|^2`` for several uses of one matrix (tied weights), cross terms included.

    Each use is ``(factors, is it transposed?, x, y)``, relative to the parameter. Uses of one kind
    are joined along T, so that an unrolled recurrent network is one Gram matrix, not one for each
    pair of steps.
    """
    kinds: dict[Any, list] = {}
    for factors, transposed, x, y in uses:
        (left,), right = factors.split(x, y)
        pair = [(factors.one_hot, left[0]), (False, right[0])]
        if transposed:
            pair.reverse()
        kinds.setdefault((pair[0][0], pair[1][0]), []).append(pair)
    joined = [
        [(side[0][0], jnp.concatenate([z for _, z in side])) for side in zip(*pairs, strict=True)]
        for pairs in kinds.values()
    ]
    total, row_sizes, sizes = 0, [], []
    for i, (left, right) in enumerate(joined):
        squares = [_row_squares(*side) for side in (left, right)]
        sizes += squares
        row_sizes.append(jnp.sqrt(squares[0]) * jnp.sqrt(squares[1]))
        for j, (other_left, other_right) in enumerate(joined[: i + 1]):
            term = jnp.sum(_inner(left, other_left) * _inner(right, other_right))
            total += term if i == j else 2 * term
    total = cast(jax.Array, total)  # there is at least one pair
    return _guarded(_with_slack(total, jnp.concatenate(row_sizes)), *sizes)


def _row_squares(one_hot: bool, x: jax.Array) -> jax.Array:
    return jnp.ones(x.shape, jnp.float32) if one_hot else jnp.sum(jnp.square(_wide(x)), axis=1)


def _inner(one: tuple[bool, jax.Array], other: tuple[bool, jax.Array]) -> jax.Array:
    """Inner products of all rows of ``one`` with all rows of ``other``; True marks one-hot indices."""
    (one_hot, x), (other_hot, y) = one, other
    if one_hot and other_hot:
        return (x[:, None] == y[None, :]).astype(jnp.float32)
    if one_hot:
        return _wide(y).T.at[x].get(mode="clip")
    if other_hot:
        return _inner(other, one).T
    return _einsum("ta,sa->ts", x, y)
