"""Rules: how a primitive's gradient by its weight is a sum of outer products.

Wherever a weight ``w`` meets an example-dependent value ``x`` through a primitive that is linear
in ``w``, the gradient of one example's loss is

    ``G = sum_t left_t (x) right_t``         (x) the outer product, t = 1..T

where ``left`` is read off ``x`` and ``right`` off the cotangent ``y`` of the primitive's output. For
a dense layer on a sequence, ``left_t`` is the input and ``right_t`` the output cotangent at
position ``t``; for an embedding ``left_t`` is a one-hot vector, kept as its index; for a
convolution there is one such sum for every offset of the filter. A rule states this
factorisation and nothing else. Norms (norms.py), costs (costs.py) and weighted sums (contacts.py)
follow from it, so a new primitive is one function here: see docs/adding_a_ghost_rule.md.

A primitive without a rule is not an error: the engine then takes the gradient of its weight
per example by JAX's own differentiation, which is exact and costs a buffer of ``B`` such weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpopt.ghost.primitives import CONVOLUTION, DOT, GATHER
from dpopt.ghost.rows import bounded


class Use(NamedTuple):
    """One equation where a weight meets an example-dependent value, as a rule sees it.

    Shapes are those of a single example and, under ``scan``, of a single step.
    """

    params: dict[str, Any]  # the equation's parameters
    position: int  # which input is the weight
    input_position: int  # which input is the example-dependent value x
    literals: dict[int, Any]  # the other inputs that are known constants
    weight: tuple[int, ...]  # shapes ...
    input: tuple[int, ...]
    output: tuple[int, ...]


class Factors(NamedTuple):
    """``G[k, n] = sum_t left[k][n, t] (x) right[n, t]``, an array ``[K, N, a, p]`` per example.

    ``K`` counts offsets that share ``right`` (a filter's window; else 1), ``N`` independent groups
    (batch dimensions of the weight), ``T`` contracted positions.
    """

    shape: tuple[int, int, int, int]  # K, N, a, p
    positions: int  # T
    split: Callable[[jax.Array, jax.Array], tuple[list[jax.Array], jax.Array]]
    """``(x, y) -> (left, right)`` for one example: K arrays [N, T, a] (or indices [N, T], see rows.py); [N, T, p]."""
    fold: Callable[[jax.Array], jax.Array]
    """The weight rearranged to ``[K, N, a, p]``."""
    unfold: Callable[[jax.Array], jax.Array]
    """The inverse of ``fold``."""
    one_hot: bool = False  # left holds indices of one-hot vectors
    axes: tuple[int, int] | None = None  # weight axes of a and p when each is one axis and K = N = 1
    filters: tuple[int, ...] | None = None  # weight axes that make up N, then p, if they do
    inner: Callable[[jax.Array, Callable], jax.Array] | None = None
    """``(x, product) -> sum_k left[k] left[k]'`` [N, T, T] in a cheaper way than that, where there is one.

    ``product`` gives ``z z'``, [N, S, S], of an array [N, S, a] transposed to [N, a, S]."""
    rows: int = 0  # S


# Operations in the time that it takes to add one shifted entry to a sum of them.
SHIFTED_SUM = 16

Rule = Callable[[Use], "Factors | None"]
_RULES: dict[Any, Rule] = {}


def rule(primitive: Any) -> Callable[[Rule], Rule]:
    """Registers the decorated function as the rule of a JAX primitive; None from it means "not mine"."""

    if not isinstance(primitive, core.Primitive):
        raise TypeError(f"rule needs a JAX primitive, such as jax.lax.gather_p; got {primitive!r}.")

    def register(function: Rule) -> Rule:
        _RULES[primitive] = function
        return function

    return register


def factors_for(primitive: Any, use: Use) -> Factors | None:
    """The factorisation of one use, or None where no rule applies."""
    found = _RULES.get(primitive)
    return found(use) if found else None


def _pick(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    return math.prod(shape[i] for i in axes)


def _arranger(shape: tuple[int, ...], *groups: tuple[int, ...]):
    """``fold`` and ``unfold`` between ``shape`` and ``[1, *groups]``, each group of axes merged."""
    order = [axis for group in groups for axis in group]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    merged = (1, *(_pick(shape, group) for group in groups))
    permuted = tuple(shape[i] for i in order)
    return (
        lambda w: jnp.transpose(w, order).reshape(merged),
        lambda g: jnp.transpose(g.reshape(permuted), inverse),
    )


@rule(DOT)
def dot_general(use: Use) -> Factors | None:
    """Dense layers of any rank: contracted axes are ``a``, free axes ``p``, batch axes ``N``."""
    contracting, batching = use.params["dimension_numbers"]
    ours, theirs = use.position, use.input_position
    w_contract, x_contract = tuple(contracting[ours]), tuple(contracting[theirs])
    w_batch, x_batch = tuple(batching[ours]), tuple(batching[theirs])
    w_free = tuple(i for i in range(len(use.weight)) if i not in w_contract + w_batch)
    x_free = tuple(i for i in range(len(use.input)) if i not in x_contract + x_batch)
    groups, positions = _pick(use.weight, w_batch), _pick(use.input, x_free)
    a, p = _pick(use.weight, w_contract), _pick(use.weight, w_free)
    # The output's axes are: batch, then the left operand's free axes, then the right operand's.
    weight_last = ours == 1

    def split(x, y):
        left = jnp.transpose(x, x_batch + x_free + x_contract).reshape(groups, positions, a)
        if weight_last:
            right = y.reshape(groups, positions, p)
        else:
            right = jnp.swapaxes(y.reshape(groups, p, positions), 1, 2)
        return [left], right

    fold, unfold = _arranger(use.weight, w_batch, w_contract, w_free)
    single = len(w_contract) == len(w_free) == 1 and not w_batch
    axes = (w_contract[0], w_free[0]) if single else None
    return Factors((1, groups, a, p), positions, split, fold, unfold, axes=axes, filters=(*w_batch, *w_free))


def _rows(use: Use, axes: tuple[int, ...], positions: int, offset: tuple[int, ...], index: Callable) -> Factors:
    """Factors of a look-up along some axes of a table; ``offset``: output axes that hold what was looked up."""
    size = _pick(use.weight, axes)
    p = math.prod(use.weight) // max(size, 1)
    looked_up = tuple(i for i in range(len(use.output)) if i not in offset)
    rest = tuple(i for i in range(len(use.weight)) if i not in axes)

    def split(x, y):
        # An index out of range read a fill value, or one that it must not rely on: neither has a gradient. It stays
        # out of range, which stands for a row of zeros (rows.py).
        ids = index(x).reshape(1, positions)
        right = jnp.transpose(y, looked_up + offset).reshape(1, positions, p)
        return [ids], jnp.where(((ids >= 0) & (ids < size))[..., None], right, 0)

    fold, unfold = _arranger(use.weight, (), axes, rest)
    single = (axes[0], rest[0]) if len(axes) == len(rest) == 1 else None
    return Factors((1, 1, size, p), positions, split, fold, unfold, one_hot=True, axes=single)


@rule(GATHER)
def gather(use: Use) -> Factors | None:
    """Look-ups, ``table[i]`` or ``table[i, j]``, repeated indices included: along each axis one entry, or all.

    (What looks up once, a dynamic slice, has become one when it is traced.)"""
    dims, sizes = use.params["dimension_numbers"], tuple(use.params["slice_sizes"])
    if use.position != 0:
        return None
    batched = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True))
    whole = [axis for axis, n in enumerate(use.weight) if sizes[axis] == n and axis not in batched]
    axes = tuple(axis for axis in range(len(use.weight)) if axis not in whole)
    if not axes or any(sizes[axis] != 1 for axis in axes) or not {*axes} <= {*dims.start_index_map, *batched}:
        return None
    clips, size = use.params["mode"] == lax.GatherScatterMode.CLIP, _pick(use.weight, axes)

    def index(x):
        """The place among the looked-up axes, counted together."""
        flat, inside = jnp.zeros(x.shape[:-1], jnp.int32), jnp.ones(x.shape[:-1], bool)
        for axis in (*whole, *axes):  # where an axis is taken whole, it has to start at 0
            n, last = use.weight[axis], use.weight[axis] - sizes[axis]
            if axis in batched:
                at = lax.broadcasted_iota(jnp.int32, flat.shape, batched[axis])
            elif axis in dims.start_index_map:
                at = bounded(x[..., dims.start_index_map.index(axis)], last + 1)
            else:
                continue
            inside &= (at >= 0) & (at <= last)
            if axis in axes:
                flat = flat * n + jnp.clip(at, 0, last)
        return flat if clips else jnp.where(inside, flat, size)

    return _rows(use, axes, math.prod(use.input[:-1]), tuple(dims.offset_dims), index)


@rule(CONVOLUTION)
def conv_general_dilated(use: Use) -> Factors | None:
    """Convolutions: for each filter offset, the shifted and strided input meets the output cotangent."""
    p = use.params
    if use.position != 1 or p["batch_group_count"] != 1:
        return None
    dims, groups = p["dimension_numbers"], p["feature_group_count"]
    (out_axis, in_axis, *window_axes) = dims.rhs_spec
    window = tuple(use.weight[i] for i in window_axes)
    a, b = use.weight[in_axis], use.weight[out_axis] // groups
    images = use.input[dims.lhs_spec[0]]
    outputs = tuple(use.output[i] for i in dims.out_spec[2:])
    positions = images * math.prod(outputs)

    spatial = [(lo, hi, d - 1) for (lo, hi), d in zip(p["padding"], p["lhs_dilation"], strict=True)]

    def split(x, y):
        # Channels before positions: the product of left and right then contracts left's last
        # axis, which CPUs do twice as fast as the other way round.
        x = jnp.transpose(x, (dims.lhs_spec[1], dims.lhs_spec[0], *dims.lhs_spec[2:]))
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *spatial])
        left = []
        for offset in range(math.prod(window)):
            start, limit = [0, 0], [x.shape[0], images]
            for axis, at in enumerate(_unravel(offset, window)):
                first = at * p["rhs_dilation"][axis]
                start.append(first)
                limit.append(first + p["window_strides"][axis] * (outputs[axis] - 1) + 1)
            shifted = lax.slice(x, start, limit, (1, 1, *p["window_strides"]))
            left.append(jnp.swapaxes(shifted.reshape(groups, a, positions), 1, 2))
        y = jnp.transpose(y, (dims.out_spec[0], *dims.out_spec[2:], dims.out_spec[1]))
        return left, jnp.swapaxes(y.reshape(positions, groups, b), 0, 1)

    # Weight axes in the order window, output group, input channel, output channel within the group.
    order = (*window_axes, out_axis, in_axis)
    inverse = sorted(range(len(order)), key=order.__getitem__)

    def fold(w):
        w = jnp.transpose(w, order).reshape(math.prod(window), groups, b, a)
        return jnp.swapaxes(w, 2, 3)

    def unfold(g):
        g = jnp.swapaxes(g, 2, 3).reshape(*window, groups * b, a)
        return jnp.transpose(g, inverse)

    def inner(x, product):
        # Products of pixels, once; those of two windows are sums of them, shifted along both alike.
        x = jnp.transpose(x, (dims.lhs_spec[1], dims.lhs_spec[0], *dims.lhs_spec[2:]))
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *spatial])
        pixels = product(x.reshape(groups, a, -1)).reshape(groups, *x.shape[2:], *x.shape[2:])
        total = 0
        for offset in range(math.prod(window)):
            first = [at * d for at, d in zip(_unravel(offset, window), p["rhs_dilation"], strict=True)]
            start, limit = (0, *first, *first), [f + n for f, n in zip(first, outputs, strict=True)]
            total += lax.slice(pixels, start, (groups, *limit, *limit))
        return cast(jax.Array, total).reshape(groups, positions, positions)

    K, sides = math.prod(window), (use.input[i] for i in dims.lhs_spec[2:])
    padded = [max(n - 1, 0) * (d + 1) + min(n, 1) + lo + hi for n, (lo, hi, d) in zip(sides, spatial, strict=True)]
    rows = math.prod(padded)
    shifts = SHIFTED_SUM * K * positions**2
    is_cheaper = 2 * a * rows**2 + shifts < 2 * a * K * positions**2
    offered = images == 1 and set(p["window_strides"]) == {1} and is_cheaper
    return Factors(
        (K, groups, a, b), positions, split, fold, unfold,
        filters=(out_axis,), inner=inner if offered else None, rows=rows,
    )  # fmt: skip


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    at: tuple[int, ...] = ()
    for size in reversed(shape):
        flat, remainder = divmod(flat, size)
        at = (remainder, *at)
    return at


def lift(factors: Factors, length: int, mapped: bool) -> Factors:
    """The factors of a use inside ``scan``: x and y gain a leading axis of ``length`` steps.

    A weight that is itself scanned (layers) has its own gradient in every step: steps are groups.
    A weight that all steps share (time) adds up over steps: steps are positions.
    """
    K, N, a, p = factors.shape
    inner = jax.vmap(factors.split)

    def split(x, y):
        left, right = inner(x, y)  # [L, N, T, ...]
        if mapped:
            return [z.reshape(length * N, *z.shape[2:]) for z in left], right.reshape(length * N, factors.positions, p)

        def merge(z):
            z = jnp.swapaxes(z, 0, 1)
            return z.reshape(N, length * factors.positions, *z.shape[3:])

        return [merge(z) for z in left], merge(right)

    if not mapped:
        return factors._replace(positions=length * factors.positions, split=split, inner=None)
    fold, unfold = jax.vmap(factors.fold, out_axes=1), jax.vmap(factors.unfold, in_axes=1)
    return factors._replace(
        shape=(K, length * N, a, p),
        split=split,
        fold=lambda w: fold(w).reshape(K, length * N, a, p),
        unfold=lambda g: unfold(g.reshape(K, length, N, a, p)),
        axes=None,
        filters=None,
        inner=None,
    )
