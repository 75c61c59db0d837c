"""Sums over examples that one example moves by no more than its own row and `rounding.ROUNDING`.

Rows are added up block by block, and blocks group by group (rounding.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dpopt.common.trees import per_example
from dpopt.common.types import PyTree
from dpopt.engines import rounding


class Sum(NamedTuple):
    """A sum and its rounding error, pytrees of one structure.

    No ``remainder`` where that is within `rounding.ROUNDING`."""

    value: PyTree
    remainder: PyTree = None


def zero(like: PyTree, rows: int, *counts: int) -> Sum:
    """Zeros like a pytree of arrays, to which parts are added one after another: the last of ``counts``.

    A part is a block of ``rows`` rows, or has been added up from blocks as the other ``counts`` say (`rounding.lost`).
    """
    zeros = jax.tree.map(jnp.zeros_like, like)
    return Sum(zeros, None if rounding.floats_suffice(rows, *counts) else zeros)


def zero_for_parts(like: PyTree, size: int, count: int) -> Sum:
    """`zero` for ``count`` parts which are sums `over_examples`, of ``size`` examples each."""
    of_devices = shares(size)
    levels = rounding.levels(size // of_devices)
    return zero(like, size, count) if levels is None else zero(like, *levels, of_devices, count)


def paired(total: Sum) -> Sum:
    """``total`` in pairs of floats."""
    return total if total.remainder is not None else Sum(total.value, jax.tree.map(jnp.zeros_like, total.value))


def add(a: Sum, b: Sum) -> Sum:
    """``a + b``, in pairs of floats if one of them is."""
    if a.remainder is None and b.remainder is None:
        return Sum(jax.tree.map(_plus, a.value, b.value))
    a = paired(a)
    rest = jax.tree.map(lambda x: jnp.zeros((), x.dtype), b.value) if b.remainder is None else b.remainder
    pairs = jax.tree.map(_add_in_place, *a, b.value, rest)
    return Sum(*jax.tree.transpose(jax.tree.structure(a.value), jax.tree.structure((0, 0)), pairs))


def _plus(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a + b``, for a sum ``b`` of rows.

    Before JAX 0.12 XLA adds a product of a vector and a matrix to ``a`` row by row on a CPU, unless it is read twice.
    """
    if jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12):
        b = jnp.where(jnp.isnan(b), jnp.nan, b)
    return a + b


_PART = 1 << 17  # numbers that are added at a time: they fit a CPU's cache, and keep its cores busy


def _add_in_place(
    a: Float[Array, "*p"], a_rest: Float[Array, "*p"], b: Float[Array, "*p"], b_rest: Float[Array, "*#p"]
) -> tuple[Float[Array, "*p"], Float[Array, "*p"]]:
    """`_add`, for larger arrays on a CPU a part at a time, in the memory of ``a`` and ``a_rest``.

    XLA would compute all of one result and then all of the other. Both read ``a`` and ``a_rest``, so neither could
    take their place: it would copy the pairs of all parameters first."""
    if jax.default_backend() != "cpu" or jax.device_count() > 1 or a.size <= _PART:
        return _add(a, a_rest, b, b_rest)
    operands = [x.reshape(-1) if x.ndim else x for x in (b, b_rest)]
    count = -(-a.size // _PART)
    length = -(-a.size // count)

    def part(i: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        start = jnp.minimum(i * length, a.size - length)  # the last part may begin in the one before
        own = [_slice(x, start, length) if x.ndim else x for x in (*pair, *operands)]
        added = _add(*own)
        if a.size % length:
            is_new = start + jnp.arange(length) >= i * length
            added = tuple(jnp.where(is_new, x, y) for x, y in zip(added, own, strict=False))
        added = lax.optimization_barrier(added)  # both are computed before either is written
        return tuple(lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in zip(pair, added, strict=True))

    value, remainder = lax.fori_loop(0, count, part, (a.reshape(-1), a_rest.reshape(-1)))
    return value.reshape(a.shape), remainder.reshape(a.shape)


def _add(
    a: Float[Array, "*p"], a_rest: Float[Array, "*p"], b: Float[Array, "*p"], b_rest: Float[Array, "*#p"]
) -> tuple[Float[Array, "*p"], Float[Array, "*p"]]:
    total = a + b
    b_seen = total - a
    rest = (a - (total - b_seen)) + (b - b_seen)  # exactly what a + b has lost (Knuth)
    rest = rest + (a_rest + b_rest)
    value = total + rest
    finite = jnp.isfinite(total)  # the rounding error of an infinite sum is NaN, and would make the sum NaN
    return jnp.where(finite, value, total), jnp.where(finite, rest - (value - total), 0)


def weighted(c: Float[Array, " batch *layers"], x: Float[Array, " batch *shape"]) -> Float[Array, "*shape"]:
    """``sum_i c_i x_i``; of few entries by a sum, which XLA compiles once for a size, over the rows of a matrix, which
    CPUs add up ten times as fast as arrays of more axes. (GPUs are slow at products with one row.)"""
    size = math.prod(x.shape[1:])
    if c.ndim == 1 and size > 2**12 and jax.default_backend() != "gpu":
        return jnp.tensordot(c, x, 1, precision=lax.Precision.HIGHEST)
    if c.ndim == 1 and jax.default_backend() == "cpu" and jax.device_count() == 1:  # else axes may be divided
        return jnp.sum(c[:, None] * x.reshape(len(x), size), axis=0).reshape(x.shape[1:])
    return jnp.sum(per_example(c, x) * x, axis=0)


def needs_remainder(size: int) -> bool:
    """Whether `over_examples` returns pairs of floats for ``size`` examples."""
    rows = jax.ShapeDtypeStruct((size,), jnp.float32)
    return jax.eval_shape(lambda x: over_examples(lambda x, c: jnp.vdot(c, x), x, x), rows).remainder is not None


def over_examples(
    one_group: Callable[[Any, Any], PyTree], rows: Any, coefficients: Any, *, may_stack: bool = False
) -> Sum:
    """``one_group(rows, coefficients)``, a pytree of sums ``sum_i c_i x_i``, computed a group of blocks at a time.

    ``one_group`` adds up its rows with `in_blocks`. On several devices a sharded batch is split into `shares`.

    Args:
        rows: a pytree of arrays ``[B, ...]``, or of none; finite where their coefficient is zero.
        coefficients: a pytree of at least one array ``[B, ...]``.
        may_stack: whether ``one_group`` is fast under ``vmap``. Then an accelerator, which single blocks would leave
            idle, computes several of them at once.
    """
    size = _length(coefficients)
    count = shares(size)
    if count == 1:
        block = _stacked(size) if may_stack and jax.default_backend() != "cpu" else 0
        return _stacks(one_group, rows, coefficients, block) if block else _in_groups(one_group, rows, coefficients)
    split = jax.tree.map(lambda x: x.reshape(count, size // count, *x.shape[1:]), (rows, coefficients))
    levels = rounding.levels(size // count) or (size // count,)
    return fold(jax.vmap(functools.partial(_in_groups, one_group))(*split), *levels)


def shares(size: int) -> int:
    """The number of equal parts into which a batch on several devices is split, each with its own devices.

    One part per device if floats can add up the parts: across devices that is one reduction. Also one if each has more
    rows than a block. Otherwise the fewest parts of one block each, since the sum of every part is sent
    to all devices."""
    devices = math.gcd(size, jax.device_count())
    if size <= rounding.ROWS:
        return 1
    if size // devices > rounding.ROWS or rounding.floats_suffice(size // devices, devices):
        return devices
    return next(n for n in range(1, devices + 1) if devices % n == 0 and size // n <= rounding.ROWS)


def in_blocks(one_block: Callable[[Any, Any], PyTree], rows: Any, coefficients: Any) -> PyTree:
    """``one_block(rows, coefficients)``, summed over blocks of at most `rounding.ROWS` rows, one after another."""
    size = _length(coefficients)
    length, count = rounding.blocks(size)
    first = size - (count - 1) * length

    def block(start: jax.typing.ArrayLike, count: int) -> PyTree:
        return one_block(*_slice((rows, coefficients), start, count))

    def plus(a: PyTree, b: PyTree) -> PyTree:
        return jax.tree.map(_plus, a, b)

    if size <= rounding.ROWS:
        return one_block(rows, coefficients)
    # The first block, which may be shorter, is compiled separately: its rows are read in place. The loop comes last, so
    # that it adds up in the result's own memory.
    return lax.fori_loop(0, count - 1, lambda i, total: plus(total, block(first + i * length, length)), block(0, first))


def fold(parts: Sum, rows: int, *counts: int) -> Sum:
    """Sums ``parts`` over the leading axis. For ``rows`` and ``counts`` see `zero`."""
    if parts.remainder is None and rounding.floats_suffice(rows, *counts, _length(parts)):
        # The bound holds for any order, so across devices this may be one reduction.
        return Sum(jax.tree.map(lambda x: jnp.sum(x, axis=0), parts.value))
    first, *_ = each = [jax.tree.map(lambda x, i=i: x[i], parts) for i in range(_length(parts))]
    return functools.reduce(add, each, paired(Sum(jax.tree.map(jnp.zeros_like, first.value))))


def _length(tree: PyTree) -> int:
    return jax.tree.leaves(tree)[0].shape[0]


def _in_groups(one_group: Callable[[Any, Any], PyTree], rows: Any, coefficients: Any) -> Sum:
    if rounding.groups(_length(coefficients)).number == 1:
        return Sum(one_group(rows, coefficients))
    zeros = zeros_after(coefficients, jax.eval_shape(one_group, rows, coefficients))

    def step(total: Sum, rows: Any, coefficients: Any) -> Sum:
        return add(total, Sum(one_group(rows, coefficients)))

    pairs = rounding.levels(_length(coefficients)) is None
    return over_groups(step, Sum(zeros, zeros if pairs else None), rows, coefficients)


def over_groups(step: Callable[[Any, Any, Any], Any], start: Any, rows: Any, coefficients: Any) -> Any:
    """``total = step(total, rows, coefficients)`` for groups of up to three blocks, one after another.

    They have equal lengths, so that ``step`` is compiled once."""
    size = _length(coefficients)
    length, count = rounding.groups(size)

    def one(i: jax.typing.ArrayLike, total: Any) -> Any:
        # The last group may have to begin among the rows of the one before, which count as zeros here.
        start = jnp.minimum(i * length, size - length)
        own, c = _slice((rows, coefficients), start, length)
        if size % length:
            is_new = start + jnp.arange(length) >= i * length
            c = jax.tree.map(lambda c: jnp.where(is_new.reshape(-1, *[1] * (c.ndim - 1)), c, 0), c)
        return step(total, own, c)

    return lax.fori_loop(0, count, one, start)


# The sums of blocks that are computed at once may take this memory, or this share of what their rows take.
_STACK_BYTES = 1 << 26
_STACK_SHARE = 1 / 8
_CHAINED = 4  # as many are added to the total one after another


def _stacked(size: int) -> int:
    """The number of rows of a block, all blocks equal; 0 where they would have few, or be too many pairs of floats."""
    block, levels = max(n for n in range(1, min(size, rounding.ROWS) + 1) if size % n == 0), rounding.levels(size)
    if levels is None:
        fits = 3 * 2.0**-24 * size * (size // block) <= rounding.PAIRS  # `rounding.ROUNDING`
    else:  # no more than one block after another, where pairs of floats are rounded in the end
        fits = size <= rounding.BLOCKS * rounding.ROWS or block**2 + 4 * size <= rounding.lost(*levels)
    return block if block < size and 2 * block >= rounding.ROWS and fits else 0


def _stacks(one_group: Callable[[Any, Any], PyTree], rows: Any, coefficients: Any, block: int) -> Sum:
    """`_in_groups` with as many blocks at once as fit into memory."""
    size = _length(coefficients)
    count, blocks = size // block, jax.vmap(one_group)
    split = jax.tree.map(lambda x: x.reshape(count, block, *x.shape[1:]), (rows, coefficients))
    result = jax.eval_shape(blocks, *split)
    given, wanted = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (rows, result))
    most = count * max(_STACK_BYTES, _STACK_SHARE * given) / max(wanted, 1)
    stack = max(n for n in range(1, count + 1) if count % n == 0 and n <= max(1, most))
    if size <= rounding.BLOCKS * rounding.ROWS:  # floats can add them up, in any order
        if stack < count:
            return _in_groups(one_group, rows, coefficients)
        return Sum(jax.tree.map(lambda x: jnp.sum(x, axis=0), blocks(*split)))

    def found(i: jax.typing.ArrayLike) -> PyTree:
        return blocks(*_slice(split, i * stack, stack))

    def of_stack(i: jax.typing.ArrayLike) -> Sum:
        return Sum(*jax.tree.transpose(jax.tree.structure(result), None, jax.tree.map(_pair_sum, found(i))))

    def plus(i: jax.typing.ArrayLike, total: Sum) -> Sum:
        if stack > _CHAINED:
            return add(total, of_stack(i))
        # One kernel adds them all: a sum of their own would be written to memory first.
        several = found(i)
        return functools.reduce(add, (Sum(jax.tree.map(lambda x, k=k: x[k], several)) for k in range(stack)), total)

    if stack == count:
        total = of_stack(0)
    else:
        total = lax.fori_loop(0, count // stack, plus, zeros_after(coefficients, jax.eval_shape(of_stack, 0)))
    return total if rounding.levels(size) is None else Sum(total.value)


def _pair_sum(x: Float[Array, " blocks *p"]) -> tuple[Float[Array, "*p"], Float[Array, "*p"]]:
    """The sum over the first axis, in pairs of floats."""
    zero = jnp.zeros((), x.dtype)
    return lax.reduce((x, jnp.zeros_like(x)), (zero, zero), lambda a, b: _add(*a, *b), (0,))


def _slice(tree: Any, start: jax.typing.ArrayLike, count: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, count), tree)


def zeros_after(inputs: PyTree, like: PyTree) -> PyTree:
    """Zeros like a pytree, which exist only once ``inputs``, arrays of finite numbers, have been computed.

    XLA's CPU scheduler runs operations without inputs first, so constants would occupy memory during all passes."""
    late = jnp.zeros(())
    if jax.device_count() == 1:  # on several, one entry of a sharded array may be another device's
        firsts = [x.reshape(-1)[0].astype(jnp.float32) for x in jax.tree.leaves(inputs) if x.size]
        late = 0 * sum(firsts, late)
    return jax.tree.map(lambda s: jnp.broadcast_to(late.astype(s.dtype), s.shape), like)
