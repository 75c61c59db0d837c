"""Weights that are normalised filter by filter (weight standardisation), and gradient norms through them.

A filter ``w`` becomes ``v = alpha w + beta``, where the numbers alpha and beta depend on w only through the sum and the
sum of squares of its n entries. With ``w = mean + u``, ``first = sum u`` and ``second = sum u^2``, a gradient G with
respect to v is pulled back to

    ``alpha G + p + q u``,   p = alpha_1 <u, G> + beta_1 <1, G>,   q = 2 alpha_2 <u, G> + 2 beta_2 <1, G>

where alpha_1 is the derivative of alpha by first, and alpha_2 by second. So the norm needs two inner products and the
norm of each filter's G, and the factors give these without forming G (methods/standardized.py).

A weight is recognised by running the equations between it and its parameter on pairs (alpha, beta) instead of arrays.
An equation that cannot be run on pairs raises `_NotStandardized`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.extend import core

from dpopt.common.trees import accumulator_dtype
from dpopt.ghost import primitives
from dpopt.ghost.program import Trace
from dpopt.ghost.values import Contact, Op, Value, read


class PerFilter(NamedTuple):
    """The numbers of one parameter's filters, each ``[N, p]``."""

    slope: jax.Array  # alpha
    level: jax.Array  # beta, for entries counted from the mean: v = slope u + level
    slopes: tuple[jax.Array, jax.Array]  # derivatives of the slope by first and second
    levels: tuple[jax.Array, jax.Array]
    sums: tuple[jax.Array, jax.Array]  # first and second

    def pulled(self, along: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """p and q of gradients with ``<u, G> = along`` and ``<1, G> = total``."""
        p = self.slopes[0] * along + self.levels[0] * total
        q = 2 * (self.slopes[1] * along + self.levels[1] * total)
        return p, q


class Coefficients(NamedTuple):
    """What is needed to pull a gradient back through the normalisation."""

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
        """The coefficients at the parameter's value ``w``."""
        mean = jnp.mean(w, self.axes, keepdims=True)
        u = w - mean
        sums = jnp.sum(u, self.axes, keepdims=True), jnp.sum(u * u, self.axes, keepdims=True)

        def affine(first: jax.Array, second: jax.Array) -> tuple[jax.Array, ...]:
            v = self._run(mean, first, second, w.shape)
            return tuple(jnp.broadcast_to(jnp.asarray(0 if x is None else x, w.dtype), mean.shape) for x in v)

        ones = jnp.ones_like(mean)
        # Filters do not mix, so one tangent gives the derivative of each.
        (slope, level), by_first = jax.jvp(affine, sums, (ones, jnp.zeros_like(ones)))
        _, by_second = jax.jvp(affine, sums, (jnp.zeros_like(ones), ones))

        def fold(x: jax.Array) -> jax.Array:
            return jnp.transpose(x, (*self.axes, *self.filters)).reshape(self.groups, -1)

        slopes, levels = zip(by_first, by_second, strict=True)
        of_filters = jax.tree.map(fold, PerFilter(slope, level, slopes, levels, sums))
        return Coefficients(u, of_filters, math.prod(w.shape[i] for i in self.axes))

    def gain(self, found: Coefficients, scale: jax.Array | None) -> jax.Array:
        """An upper bound on the norm of what an entry of G, if it is 1, adds to ``S (alpha G + p + q u)``.

        It broadcasts against the parameter. (``|u_j|`` is at most ``|u|``.)"""
        size = jnp.sqrt(found.per_filter.sums[1])
        own = jax.tree.map(jnp.abs, found.per_filter)
        p, q = own.pulled(size, 1.0)
        slope, shared = self._unfolded(own.slope), self._unfolded(p * found.size**0.5 + q * size)
        if scale is None:
            return slope + shared
        return slope * jnp.abs(scale) + shared * jnp.max(jnp.abs(scale), self.axes, keepdims=True)

    def _unfolded(self, x: jax.Array) -> jax.Array:
        """Numbers of filters, ``[N, p]``, in the parameter's axes."""
        lengths = [1] * len(self.axes) + [self.source.shape[i] for i in self.filters]
        order = (*self.axes, *self.filters)
        return jnp.transpose(x.reshape(lengths), [order.index(i) for i in range(len(order))])

    def _run(self, mean: jax.Array, first: jax.Array, second: jax.Array, shape: tuple[int, ...]) -> _Affine:
        """The weight as an affine function of ``u``."""
        per_filter = _FilterAlgebra(first, second, shape, mean.shape, self.axes)
        env: dict[Value, Any] = {self.source: _Affine(1.0, mean)}
        fixed: set[Value] = set()  # values that do not depend on the parameter
        for op in self.ops:
            args, (out,) = read(env, op.inputs), op.outputs
            if all(v.constant is not None or v in fixed for v in op.inputs):
                fixed.add(out)
                (env[out],) = op.run(*args)
            else:
                env[out] = per_filter.step(op, args)
        found = env[self.target]
        if not isinstance(found, _Affine):
            raise _NotStandardized(self.target)
        return found


def standardized(trace: Trace, contact: Contact) -> Standardized | None:
    """The description of a weight that is one parameter normalised filter by filter; None for any other weight."""
    factors = contact.factors
    if factors is None or factors.filters is None or len(contact.weight.leaves) != 1:
        return None
    (leaf,) = contact.weight.leaves
    source, filters = trace.leaves[leaf], factors.filters
    axes = tuple(i for i in range(len(source.shape)) if i not in filters)
    ops = trace.behind([contact.weight])
    outputs = [v for op in ops for v in op.outputs]
    if contact.weight.shape != source.shape or len(outputs) != len(ops):
        return None
    if any(v is not source and v in trace.leaves for op in ops for v in op.inputs):
        return None  # through `stop_gradient` it depends on another parameter
    if any(v.dtype != accumulator_dtype(source.dtype) for v in outputs if v.leaves and v is not contact.weight):
        return None  # half precision rounds on the way, which the closed form does not
    found = Standardized(ops, source, contact.weight, axes, filters, factors.shape[1])
    try:
        jax.eval_shape(found.coefficients, jax.ShapeDtypeStruct(source.shape, accumulator_dtype(source.dtype)))
    except _NotStandardized:
        return None
    return found


class _NotStandardized(Exception):
    """The equations do not normalise a weight filter by filter."""


_Number = jax.Array | float


class _Affine(NamedTuple):
    """``slope u + level`` entry by entry, with one number per filter (its axes have length 1). None is zero."""

    slope: _Number | None
    level: _Number | None


class _Quadratic(NamedTuple):
    """``two u^2 + one u + zero`` entry by entry."""

    two: _Number | None
    one: _Number | None
    zero: _Number | None


_Operand = _Affine | _Quadratic | _Number


class _FilterAlgebra(NamedTuple):
    """Runs equations on affine functions of a filter's entries."""

    first: jax.Array
    second: jax.Array
    shape: tuple[int, ...]  # of the parameter
    kept: tuple[int, ...]  # the same, with axes of length 1 for those of a filter
    axes: tuple[int, ...]

    def step(self, op: Op, args: Sequence[Any]) -> _Operand:
        """The output of one equation: an affine or quadratic function, or numbers per filter."""
        if op.params is None:  # inside a loop
            raise _NotStandardized(op)
        if not any(isinstance(x, _Affine | _Quadratic) for x in args):
            if op.primitive not in primitives.PER_FILTER:
                raise _NotStandardized(op)
            if op.primitive is primitives.BROADCAST and op.outputs[0].shape == self.shape != self.kept:
                return self._spread(op, *args)
            return op.run(*args)[0]
        if op.primitive in primitives.CASTS:
            return self._cast(op, args[0])
        if op.primitive is primitives.REDUCE_SUM and tuple(op.params["axes"]) == self.axes:
            return jnp.squeeze(self._total(args[0]), self.axes)
        if op.primitive is primitives.SQUARE or (op.primitive is primitives.INTEGER_POW and op.params["y"] == 2):
            return _product(self._affine(args[0]), self._affine(args[0]))
        if op.primitive is primitives.NEG:
            return _product(self._affine(args[0]), self._affine(-1.0))
        if op.primitive not in _AFFINE_RULES:
            raise _NotStandardized(op)
        return _AFFINE_RULES[op.primitive](*(self._affine(x) for x in args))

    def _cast(self, op: Op, x: _Operand) -> _Operand:
        is_float = jnp.issubdtype(op.outputs[0].dtype, jnp.floating)
        if op.primitive is primitives.ROUND_TO or not is_float:  # no affine function of each entry
            raise _NotStandardized(op)
        return x

    def _affine(self, x: _Operand) -> _Affine:
        if isinstance(x, _Quadratic):
            raise _NotStandardized(x)
        return x if isinstance(x, _Affine) else _Affine(None, self._keep(x))

    def _keep(self, x: _Number) -> _Number:
        """Checks that ``x`` is one number, or one per filter in the parameter's axes."""
        shape = jnp.shape(x)
        if shape and (len(shape) != len(self.kept) or any(shape[i] != 1 for i in self.axes)):
            raise _NotStandardized(x)
        return x

    def _spread(self, op: Op, x: jax.Array) -> _Affine:
        kept, axes = [1] * len(self.shape), cast(dict[str, Any], op.params)["broadcast_dimensions"]
        for size, axis in zip(jnp.shape(x), axes, strict=True):
            kept[axis] = size
        return _Affine(None, self._keep(jnp.reshape(x, kept)))

    def _total(self, x: _Affine | _Quadratic) -> jax.Array:
        x = _Quadratic(None, *x) if isinstance(x, _Affine) else x
        total, size = jnp.zeros(self.kept, self.first.dtype), math.prod(self.shape[i] for i in self.axes)
        for factor, value in zip(x, (self.second, self.first, size), strict=True):
            total = total if factor is None else total + factor * value
        return total


def _plus(x: _Number | None, y: _Number | None) -> _Number | None:
    return y if x is None else x if y is None else x + y


def _times(x: _Number | None, y: _Number | None) -> _Number | None:
    return None if x is None or y is None else x * y


def _product(x: _Affine, y: _Affine) -> _Affine | _Quadratic:
    one, zero = _plus(_times(x.slope, y.level), _times(x.level, y.slope)), _times(x.level, y.level)
    if x.slope is None or y.slope is None:
        return _Affine(one, zero)
    return _Quadratic(_times(x.slope, y.slope), one, zero)


def _quotient(x: _Affine, y: _Affine) -> _Affine:
    if y.slope is not None or y.level is None:
        raise _NotStandardized(y)
    return _Affine(None if x.slope is None else x.slope / y.level, None if x.level is None else x.level / y.level)


def _sum(x: _Affine, y: _Affine) -> _Affine:
    return _Affine(_plus(x.slope, y.slope), _plus(x.level, y.level))


_AFFINE_RULES: dict[core.Primitive, Callable[[_Affine, _Affine], _Affine | _Quadratic]] = {
    primitives.ADD: _sum,
    primitives.ADD_ANY: _sum,
    primitives.SUB: lambda x, y: _sum(x, _Affine(*(None if part is None else -part for part in y))),
    primitives.MUL: _product,
    primitives.DIV: _quotient,
}
