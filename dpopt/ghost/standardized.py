"""Weights that are normalised filter by filter (weight standardisation), and gradient norms through them.

A filter ``w`` becomes ``v = alpha w + beta``, where the numbers alpha and beta depend on w through the sum and the sum
of squares of its n entries alone. With ``w = mean + u``, ``first = sum u`` and ``second = sum u^2``, a gradient G by v
is pulled back to

    ``alpha G + p + q u``,   p = alpha_1 <u, G> + beta_1 <1, G>,   q = 2 alpha_2 <u, G> + 2 beta_2 <1, G>

where alpha_1 is alpha's derivative by first, alpha_2 by second. So the norm needs of every filter's G two inner
products and a norm, which the factors give without G (norms.py).

Whether a weight is of this kind is read off the equations between it and its parameter: they are run on the pairs
(alpha, beta) instead of on arrays, and whatever does not fit says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from dpopt.ghost.primitives import (
    ADD,
    ADD_ANY,
    BROADCAST,
    CASTS,
    DIV,
    INTEGER_POW,
    MUL,
    NEG,
    PER_FILTER,
    REDUCE_SUM,
    SQUARE,
    SUB,
)
from dpopt.ghost.program import Trace
from dpopt.ghost.values import Contact, Op, Value, wide_dtype


class PerFilter(NamedTuple):
    """One parameter's numbers, each ``[N, p]``."""

    slope: jax.Array  # alpha
    level: jax.Array  # beta, for entries counted from the mean: v = slope u + level
    slopes: tuple[jax.Array, jax.Array]  # its derivatives by first and second
    levels: tuple[jax.Array, jax.Array]
    sums: tuple[jax.Array, jax.Array]  # first and second

    def pulled(self, along: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """p and q of gradients with ``<u, G> = along`` and ``<1, G> = total``."""
        p = self.slopes[0] * along + self.levels[0] * total
        q = 2 * (self.slopes[1] * along + self.levels[1] * total)
        return p, q


class Coefficients(NamedTuple):
    """What a gradient's way through the normalisation takes."""

    deviation: jax.Array  # u, like the parameter
    per_filter: PerFilter
    size: int  # n


class Standardized(NamedTuple):
    """A weight computed from one parameter, filter by filter."""

    ops: Sequence[Op]  # from the parameter to the weight
    source: Value
    target: Value
    axes: tuple[int, ...]  # of a filter
    filters: tuple[int, ...]  # axes that number the filters: N, then p
    groups: int  # N

    def coefficients(self, w: jax.Array) -> Coefficients:
        mean = jnp.mean(w, self.axes, keepdims=True)
        u = w - mean
        sums = jnp.sum(u, self.axes, keepdims=True), jnp.sum(u * u, self.axes, keepdims=True)

        def affine(first, second):
            v = self._run(mean, first, second, w.shape)
            return tuple(jnp.broadcast_to(jnp.asarray(0 if x is None else x, w.dtype), mean.shape) for x in v)

        ones = jnp.ones_like(mean)
        # Filters do not mix, so one tangent gives the derivative of each.
        (slope, level), by_first = jax.jvp(affine, sums, (ones, jnp.zeros_like(ones)))
        _, by_second = jax.jvp(affine, sums, (jnp.zeros_like(ones), ones))

        def fold(x):
            return jnp.transpose(x, (*self.axes, *self.filters)).reshape(self.groups, -1)

        slopes, levels = ((fold(a), fold(b)) for a, b in zip(by_first, by_second, strict=True))
        n = math.prod(w.shape[i] for i in self.axes)
        return Coefficients(u, PerFilter(fold(slope), fold(level), slopes, levels, (fold(sums[0]), fold(sums[1]))), n)

    def _run(self, mean, first, second, shape) -> _Affine:
        per_filter = _PerFilter(mean, first, second, shape, self.axes)
        env: dict[Value, Any] = {self.source: _Affine(1.0, mean)}
        fixed: set[Value] = set()  # values that no parameter enters

        def read(v):
            return v.constant if v.constant is not None else env[v]

        for op in self.ops:
            args = [read(v) for v in op.inputs]
            is_fixed = all(v.constant is not None or v in fixed for v in op.inputs)
            (out,) = op.outputs
            env[out] = op.run(*args)[0] if is_fixed else per_filter.step(op, args)
            if is_fixed:
                fixed.add(out)
        found = env[self.target]
        if not isinstance(found, _Affine):
            raise _Unlike(self.target)
        return found


def standardized(trace: Trace, contact: Contact) -> Standardized | None:
    """The weight's description if it is one parameter, normalised filter by filter; else None."""
    factors = contact.factors
    if factors is None or factors.filters is None or len(contact.weight.leaves) != 1:
        return None
    (leaf,) = contact.weight.leaves
    source, filters = trace.leaves[leaf], factors.filters
    axes = tuple(i for i in range(len(source.shape)) if i not in filters)
    needed, ops = {contact.weight}, []
    for op in reversed(trace.prologue):
        if needed & set(op.outputs):
            needed.update(op.inputs)
            ops.append(op)
    outputs = [v for op in ops for v in op.outputs]
    if contact.weight.shape != source.shape or len(outputs) != len(ops):
        return None
    if any(v.dtype != wide_dtype(source.dtype) for v in outputs if v.leaves and v is not contact.weight):
        return None  # half precision rounds on the way, and the numbers here would not
    found = Standardized(ops[::-1], source, contact.weight, axes, filters, factors.shape[1])
    parameter = jax.ShapeDtypeStruct(source.shape, wide_dtype(source.dtype))
    try:
        jax.eval_shape(found.coefficients, parameter)
    except _Unlike:
        return None
    return found


class _Unlike(Exception):
    """The equations are not of this kind."""


class _Affine(NamedTuple):
    """``slope u + level`` entry by entry; numbers per filter, which keep the filter's axes as ones. None is zero."""

    slope: Any
    level: Any


class _Quadratic(NamedTuple):
    """``two u^2 + one u + zero`` entry by entry."""

    two: Any
    one: Any
    zero: Any


class _PerFilter:
    """Equations on affine functions of a filter's entries."""

    def __init__(self, mean, first, second, shape, axes):
        self.first, self.second, self.shape, self.axes = first, second, shape, axes
        self.size, self.kept = math.prod(shape[i] for i in axes), mean.shape

    def step(self, op: Op, args: Sequence[Any]) -> Any:
        whole = [isinstance(x, _Affine | _Quadratic) for x in args]
        if op.params is None:  # inside a loop
            raise _Unlike(op)
        if not any(whole):
            if op.primitive not in PER_FILTER:
                raise _Unlike(op)
            if op.primitive is BROADCAST and op.outputs[0].shape == self.shape != self.kept:
                return self._spread(op, *args)
            return op.run(*args)[0]
        if op.primitive in CASTS:
            return args[0]
        if op.primitive is REDUCE_SUM and tuple(op.params["axes"]) == self.axes:
            return jnp.squeeze(self._total(args[0]), self.axes)
        if op.primitive is SQUARE or (op.primitive is INTEGER_POW and op.params["y"] == 2):
            return self._combined(_product, args[0], args[0])
        if op.primitive is NEG:
            return self._combined(_product, args[0], -1.0)
        if op.primitive not in _WHOLE:
            raise _Unlike(op)
        return self._combined(_WHOLE[op.primitive], *args)

    def _combined(self, function: Callable, *args: Any) -> Any:
        if any(isinstance(x, _Quadratic) for x in args):
            raise _Unlike(args)
        return function(*(x if isinstance(x, _Affine) else _Affine(None, self._keep(x)) for x in args))

    def _keep(self, x: Any) -> Any:
        """A number, or one per filter in the parameter's axes."""
        shape = jnp.shape(x)
        if shape and (len(shape) != len(self.kept) or any(shape[i] != 1 for i in self.axes)):
            raise _Unlike(x)
        return x

    def _spread(self, op: Op, x: Any) -> _Affine:
        kept, axes = [1] * len(self.shape), cast(dict, op.params)["broadcast_dimensions"]
        for size, axis in zip(jnp.shape(x), axes, strict=True):
            kept[axis] = size
        return _Affine(None, self._keep(jnp.reshape(x, kept)))

    def _total(self, x: Any) -> jax.Array:
        if isinstance(x, _Affine):
            x = _Quadratic(None, *x)
        total = jnp.zeros(self.kept, self.first.dtype)
        for factor, value in zip(x, (self.second, self.first, self.size), strict=True):
            total = total if factor is None else total + factor * value
        return total


def _plus(x: Any, y: Any) -> Any:
    return y if x is None else x if y is None else x + y


def _times(x: Any, y: Any) -> Any:
    return None if x is None or y is None else x * y


def _product(x: _Affine, y: _Affine) -> Any:
    one, zero = _plus(_times(x.slope, y.level), _times(x.level, y.slope)), _times(x.level, y.level)
    if x.slope is None or y.slope is None:
        return _Affine(one, zero)
    return _Quadratic(_times(x.slope, y.slope), one, zero)


def _quotient(x: _Affine, y: _Affine) -> _Affine:
    if y.slope is not None:
        raise _Unlike(y)
    return _Affine(None if x.slope is None else x.slope / y.level, None if x.level is None else x.level / y.level)


def _negative(x: _Affine) -> _Affine:
    return _Affine(*(None if part is None else -part for part in x))


def _sum(x: _Affine, y: _Affine) -> _Affine:
    return _Affine(_plus(x.slope, y.slope), _plus(x.level, y.level))


_WHOLE: dict[Any, Callable[[_Affine, _Affine], Any]] = {
    ADD: _sum,
    ADD_ANY: _sum,
    SUB: lambda x, y: _sum(x, _negative(y)),
    MUL: _product,
    DIV: _quotient,
}
