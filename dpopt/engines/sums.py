"""Sums over examples that one example moves by no more than its own row and `ROUNDING`.

A float32 sum of B rows of norm C that are added up one after another rounds at every step, by up to ``u B C`` with
``u = 2**-24``, and one row more or less can turn all of these roundings around: together up to ``u B**2 C``, whole
multiples of C at B = 28,666 (Casacuberta et al. 2022). Here rows are added up in float32 at most `ROWS` at a time, in
whatever order the device likes, and three of these blocks one after the other; beyond that sums are pairs of floats,
whose rounding is next to nothing. Neighbouring batches differ in one row of one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ROWS = 86  # in a block: three hold 256
BLOCKS = 3  # added up in floats


def _lost(rows: int, count: int) -> int:
    """What ``count`` blocks of ``rows`` rows lose to roundings, in units of u C: see `ROUNDING`."""
    return rows**2 + rows * (count * (count + 1) - 2) + 2 * rows * count


_NORM = 1024
_PAIRS = 188
ROUNDING = (_lost(ROWS, BLOCKS) + _NORM + _PAIRS) * 2.0**-24
"""By which part of C one example can move a clipped float32 sum further than C: 6.0e-4, paid for in every event.

In units of ``u = 2**-24`` these are 9984, of which

* 7396 are for a block of n = 86 rows: the k-th addition in any order (or the k-th step of a matrix product, fused or
  not) rounds a partial sum of norm at most ``k C`` by at most ``u k C`` in L2. All together that is
  ``u (n (n + 1) / 2 - 1)``; the neighbour's block, of n - 1 rows, may be rounded the other way: less than ``u n**2``;
* 860 are for adding up three blocks: sums of 2 n and 3 n rows, rounded once each, for both neighbours;
* 516 are for the diagonal after the sum of three blocks, for both neighbours;
* 1024 are for the norm by which the row was clipped;
* 188 are for pairs of floats. M of those, of a batch of B, lose less than ``3 u**2 B M``: 111 u for 400,000 examples in
  blocks of 258, 84 u for 200,000 in blocks of 86. (Of smaller blocks there are more, which lose less themselves.)

Rows are meant to be vectors of norm C as they enter the sum. A gradient that is itself a sum over positions adds up
larger terms that cancel: SECURITY.md says what that adds. Float64 sums stay far below all of this.
"""


class Sum(NamedTuple):
    """A sum, and what rounding it to floats has lost; a ``remainder`` of None where that is within `ROUNDING`.

    Pytrees alike."""

    value: Any
    remainder: Any = None


def zero(like: Any, rows: int, count: int) -> Sum:
    """To add ``count`` parts of ``rows`` rows to, one after the other: zeros like a pytree of arrays.

    The k-th of K additions rounds a sum of k m rows. For both neighbours that makes ``m (K (K + 1) - 2) u C``, with
    ``m**2 u C`` for the parts themselves, and ``2 m K u C`` for a diagonal: where all this is no more than `BLOCKS` of
    `ROWS` rows may lose, floats do."""
    zeros = jax.tree.map(jnp.zeros_like, like)
    return Sum(zeros, None if _lost(rows, count) <= _lost(ROWS, BLOCKS) else zeros)


def paired(total: Sum) -> Sum:
    """The same in pairs of floats."""
    return total if total.remainder is not None else Sum(total.value, jax.tree.map(jnp.zeros_like, total.value))


def add(a: Sum, b: Sum) -> Sum:
    """``a + b``; in pairs of floats if ``a`` is one."""
    if a.remainder is None:
        return Sum(jax.tree.map(jnp.add, a.value, b.value))
    pairs = jax.tree.map(_add, *a, *paired(b))
    return Sum(*jax.tree.transpose(jax.tree.structure(a.value), jax.tree.structure((0, 0)), pairs))


def _add(a: jax.Array, a_rest: jax.Array, b: jax.Array, b_rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = a + b
    b_seen = total - a
    rest = (a - (total - b_seen)) + (b - b_seen)  # exactly what a + b has lost (Knuth)
    rest = rest + (a_rest + b_rest)
    value = total + rest
    finite = jnp.isfinite(total)  # what an infinite sum has lost is NaN, and would make it NaN
    return jnp.where(finite, value, total), jnp.where(finite, rest - (value - total), 0)


def needs_remainder(size: int) -> bool:
    """Whether `over_examples` of so many examples gives pairs of floats."""
    total = jax.eval_shape(
        lambda x: over_examples(lambda group: in_blocks(lambda rows: jnp.sum(rows), group), x),
        jax.ShapeDtypeStruct((size,), jnp.float32),
    )
    return total.remainder is not None


def over_examples(one_group: Callable[[Any], Any], inputs: Any) -> Sum:
    """``one_group(inputs)``, a pytree of sums over the leading axis of ``inputs``, of three blocks at a time.

    A group adds up its own rows by `in_blocks`. On several devices a sharded batch is taken in `shares`.
    """
    size = _length(inputs)
    count = shares(size)
    if count == 1:
        return _in_groups(one_group, inputs)
    split = jax.tree.map(lambda x: x.reshape(count, size // count, *x.shape[1:]), inputs)
    return fold(jax.vmap(lambda share: _in_groups(one_group, share))(split), size // count)


def shares(size: int) -> int:
    """Into how many parts of as many rows a batch on several devices is taken, each with devices of its own.

    Into one for each device where floats can add them up: across devices that is one reduction. Else into as few as
    hold `ROWS` rows, since every one of their sums is sent to all; devices with more rows than that go on alone."""
    devices = math.gcd(size, jax.device_count())
    if size <= ROWS:
        return 1
    if size // devices > ROWS or _lost(size // devices, devices) <= _lost(ROWS, BLOCKS):
        return devices
    return next(n for n in range(1, devices + 1) if devices % n == 0 and size // n <= ROWS)


def in_blocks(one_block: Callable[[Any], Any], inputs: Any) -> Any:
    """``one_block(inputs)``, of at most `ROWS` rows at a time, one after the other: at once, all would be in memory."""
    size = _length(inputs)
    whole = size // ROWS

    def block(start: Any, rows: int) -> Any:
        return one_block(jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, rows), inputs))

    if size <= ROWS:
        return one_block(inputs)
    total = block(0, ROWS)
    total = lax.fori_loop(1, whole, lambda i, t: jax.tree.map(jnp.add, t, block(i * ROWS, ROWS)), total)
    return jax.tree.map(jnp.add, total, block(whole * ROWS, size % ROWS)) if size % ROWS else total


def fold(parts: Sum, rows: int) -> Sum:
    """Adds up the leading axis of ``parts``, sums of ``rows`` rows each."""
    if zero(parts.value, rows, _length(parts)).remainder is None and parts.remainder is None:
        # The bound holds in any order, so across devices this may be one reduction.
        return Sum(jax.tree.map(lambda x: jnp.sum(x, axis=0), parts.value))
    first, *_ = each = [jax.tree.map(lambda x, i=i: x[i], parts) for i in range(_length(parts))]
    total = zero(first.value, rows, len(each))
    for part in each:
        total = add(total, part)
    return total


def _length(tree: Any) -> int:
    return jax.tree.leaves(tree)[0].shape[0]


def _in_groups(of_group: Callable[[Any], Any], inputs: Any) -> Sum:
    size, group = _length(inputs), BLOCKS * ROWS

    def one_group(start: Any, count: int) -> Sum:
        rows = inputs
        if count < size:
            rows = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, count), inputs)
        return Sum(of_group(rows))

    if size <= group:
        return one_group(0, size)
    total = paired(one_group(0, group))
    whole = size // group
    total = lax.fori_loop(1, whole, lambda i, total: add(total, one_group(i * group, group)), total)
    return add(total, one_group(whole * group, size - whole * group)) if size % group else total
