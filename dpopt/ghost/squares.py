"""Squared norms, with a bound on what float32 loses of them.

A norm bounds a sensitivity, so it must not be underestimated. Squares and products below the smallest normal number
*tiny* (1.2e-38 in float32) underflow: hardware replaces them by zero. So a `Square` has, besides its value, a bound on
what may be missing from it:

* a square that underflows loses less than tiny, so ``n`` of them lose less than ``n tiny``;
* an inner product of n terms is off by less than ``n tiny``. For ``sum_ts <l_t, l_s> <r_t, r_s>`` with rows of lengths
  a and p that is less than ``tiny (p (sum |l_t|)^2 + a (sum |r_t|)^2 + T^2)``, where ``(sum |l_t|)^2`` is at most
  ``T sum |l_t|^2``;
* an entry of a formed gradient is a sum of T products, so it is off by less than ``T tiny``, which a diagonal S
  enlarges at most ``max |S|`` times: ``n (T tiny max |S|)^2`` of the square.

The engine computes coefficients from ``value + missing``. Where those from ``value`` alone would be larger by more than
`TOLERANCE`, what is missing matters: that example's gradient is formed and scaled before it is squared. With a clip
norm of 1 and a parameter of a million entries that takes a factor of 1e16.

Sums of squares cannot cancel, and XLA adds up long ones in a tree: they are off by 2^-20 at most, or 2^-15 in JAX
0.10.0 (measured for up to 2^24 terms, tests/faults/test_norms.py). Matrix products are accumulated in several registers
and are off by at most 2^-14 of the product of the rows' norms. Where terms cancel, that is a larger share of the
result, hence `cancelled`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from dpopt.common.trees import accumulator_dtype
from dpopt.ghost.rows import wide

# The fraction by which coefficients may exceed their bound because of what is missing from a norm.
TOLERANCE = 2.0**-14
# The rounding error of a sum of products, in units of eps times the sum of their absolute values.
_ROUNDINGS = 4
QUICK_ROUNDINGS = 16  # on the processors of a GPU that multiply TF32 (quick_sums.py)


class Square(NamedTuple):
    """``value <= |G|^2 <= value + missing``, up to rounding."""

    value: jax.Array
    missing: jax.Array
    # An upper bound on the squared entries of S, if the method computes one anyway: the search takes a tenth of a step.
    diagonal: jax.Array | None = None
    # ``<G, direction>``, if it is asked for and the method forms G: from the same numbers as the square.
    along: jax.Array | None = None
    # ``(sum_t |l_t| |r_t|)^2`` or an upper bound, if the method computes one anyway (quick_sums.py).
    terms: jax.Array | None = None


def tiny(dtype: jax.typing.DTypeLike) -> float:
    return float(jnp.finfo(dtype).tiny)


def eps(*dtypes: jax.typing.DTypeLike) -> float:
    """The largest rounding error among dtypes, each at least float32.

    Parameters and diagonals may be float64 where the terms of a gradient are added up in float32."""
    return max(float(jnp.finfo(accumulator_dtype(d)).eps) for d in dtypes)


def to_one(x: Any) -> tuple[Any, jax.Array]:
    """x divided by a power of two, in at least float32, so that its largest entry is in [1, 2); and that power of two.

    That is 0 for zeros, so that what is multiplied by it is 0. None and integers are returned unchanged."""
    if x is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x, jnp.ones(())
    x = wide(x)
    most = largest(x)
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(most) & (most > 0), most, 1))
    unit = jnp.ldexp(jnp.ones((), x.dtype), exponent - 1)
    return jnp.ldexp(x, 1 - exponent), jnp.where(_is_zero(x), 0, unit)


def _is_zero(x: jax.Array) -> jax.Array:
    """Whether x is nothing but zeros, by their bits: a CPU takes what is below *tiny* for 0, too."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return jnp.max(bits << 1, initial=0) == 0  # without the signs


def sum_squares(x: jax.Array) -> jax.Array:
    """Sum of squares in at least float32."""
    return jnp.sum(jnp.square(wide(x)))


def largest(x: jax.Array) -> jax.Array:
    """``max |x|``. (The barrier prevents constant folding, which takes XLA seconds.)"""
    return jnp.max(jnp.abs(lax.optimization_barrier(x)), initial=0)


@jax.jit
def of_entries(x: jax.Array, lost: jax.Array | float = 0.0) -> Square:
    """``|x|^2`` for an array whose entries may each have lost up to ``lost``."""
    value = sum_squares(x)
    # The bound, whose square is infinite, keeps XLA from squaring the factors of ``lost`` separately (0 * inf).
    lost = jnp.minimum(jnp.asarray(lost, value.dtype), 2.0 ** (jnp.finfo(value.dtype).maxexp // 2))
    return Square(value, x.size * (tiny(value.dtype) + jnp.square(lost)))


def added(parts: Sequence[Square]) -> Square:
    """The square of a gradient from those of parts of it."""
    value, missing = (sum(of) for of in zip(*(part[:2] for part in parts), strict=True))
    found = [part.diagonal for part in parts if part.diagonal is not None]
    most = jnp.max(jnp.stack([jnp.max(d) for d in found])) if len(found) == len(parts) else None
    return Square(cast(jax.Array, value), cast(jax.Array, missing), most)


def shifted(square: Square, offset: jax.Array | float, computed_in: jax.typing.DTypeLike) -> Square:
    """The square of ``g + o``, uncertain where the weighted sum would be, which sums g and o separately.

    That is from about ``|g| + |o| = 256 |g + o|`` on, where the rounding error of the sum is 2^-15 of the clip norm.
    """
    size = jnp.sqrt(square.value) + 2 * offset  # at least |g| + |o|
    lost = 0 if isinstance(offset, float) else eps(square.value.dtype, computed_in) / 64 * jnp.square(size)
    return square._replace(missing=square.missing + lost)


def shifted_norm(norm: jax.Array, offset: jax.Array, eps: jax.Array) -> jax.Array:
    """``|g + o|``, or the smallest norm that `shifted` counts as certain: the sum adds up g and o separately."""
    return jnp.maximum(norm, jnp.sqrt(eps / (128 * TOLERANCE)) * (norm + 2 * offset))


def with_offset(
    upper: jax.Array, lower: jax.Array, mixed: jax.Array, offset: jax.Array, computed_in: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Bounds on ``|g + o|`` from bounds on ``|g|``, from ``<g, o>`` and ``|o|``.

    Where the two cancel, rounding error is a large share of the result. It counts as missing, so that the norm is
    computed from a formed gradient where it matters. (Rounding is relative to the largest terms, for which a factor of
    sixteen suffices; some millions of the products in ``<g, o>`` may have underflowed.)
    """
    larger = jnp.maximum(upper, offset)
    unit = jnp.where((larger > 0) & jnp.isfinite(larger), larger, 1)  # squares of the quotients stay in range
    high, low, offset = upper / unit, lower / unit, offset / unit
    cross = 2 * mixed / unit / unit
    vanished = 2.0**24 * tiny(computed_in) / unit / unit
    rounding = 16 * eps(upper.dtype, computed_in) * jnp.square(high + offset) + vanished
    highest = jnp.maximum(jnp.square(high) + cross + jnp.square(offset), 0) + rounding
    lowest = jnp.maximum(jnp.square(low) + cross + jnp.square(offset) - rounding, 0)
    return unit * jnp.sqrt(highest), unit * jnp.sqrt(lowest)


@functools.partial(jax.jit, static_argnames=("sizes", "computed_in", "is_quick"))  # traced once for equal shapes
def of_products(
    left: jax.Array, right: jax.Array, value: jax.Array, sizes: tuple[int, int, int],
    computed_in: jax.typing.DTypeLike, is_quick: bool = False,
) -> Square:  # fmt: skip
    """A sum over ``T x T`` of products of inner products; ``left`` and ``right`` are squared norms of rows, [T].

    ``computed_in``: see `cancelled`; ``is_quick``: in TF32."""
    T, a, p = sizes
    smallest = tiny(value.dtype)
    missing = (p * T * smallest) * jnp.sum(left) + (a * T * smallest) * jnp.sum(right) + (T * T + 3) * smallest
    total = jnp.sum(jnp.sqrt(left) * jnp.sqrt(right))  # sum_t |l_t| |r_t|
    # What is missing from the square also bounds what squared norms that underflow take from the total.
    terms = jnp.square(total + jnp.sqrt(missing))
    return Square(cancelled(value, total, computed_in, is_quick), missing, terms=terms)


@functools.partial(jax.jit, static_argnames=("computed_in", "is_quick"))
def cancelled(
    value: jax.Array, total: jax.Array, computed_in: jax.typing.DTypeLike, is_quick: bool = False
) -> jax.Array:
    """Adds the possible rounding error of the square of a sum of terms whose norms add up to ``total``.

    The sum was ``computed_in`` a dtype that may be narrower than that of its square, or in TF32 (``is_quick``).

    This also bounds the rounding of the weighted sum, which adds up the same terms in another order: an example's
    coefficient times its ``total`` is at most 1 / sqrt(4 eps) = 1,400 clip norms, one rounding of which is 2^-13.
    """
    return jnp.maximum(value, 0) + _share(value.dtype, computed_in, is_quick) * jnp.square(total)


def _share(dtype: jax.typing.DTypeLike, computed_in: jax.typing.DTypeLike, is_quick: bool) -> float:
    return (QUICK_ROUNDINGS if is_quick else _ROUNDINGS) * eps(dtype, computed_in)


def cancelled_before(
    square: Square, terms: Square, computed_in: jax.typing.DTypeLike, is_quick: bool = False
) -> Square:
    """`cancelled` for terms added up before a linear map; ``terms`` is the square of their size after the map."""
    share = _share(square.value.dtype, computed_in, is_quick)
    value = jnp.maximum(square.value, 0) + share * terms.value
    missing = square.missing + share * terms.missing
    return square._replace(value=value, missing=missing, terms=terms.value + terms.missing)


def with_roundings(norm: jax.Array, total: jax.Array, eps: jax.Array) -> jax.Array:
    """`cancelled` for a norm that is not squared."""
    return jnp.hypot(norm, jnp.sqrt(_ROUNDINGS * eps) * total)
