"""How far one entry of a contact's gradient moves a parameter's: the norms of the columns of the map between the two.

By linearity they are the norms of the rows of the map from the parameter to the weight, one for each entry of the
weight. Both estimates here are of the program of that map, applied to all entries at once:

* random numbers: what comes out is about as large as the norm, and where entries of the parameter add up in several
  ways (a learned gain, an average, a difference of differences) finds out by how much. It is below a share c of the
  norm with a chance of about 2 c for each of the `_PROBES`, whatever the map. (Signs are equal for half of all
  ``w_i - w_j``.)
* squares, added up as if whatever meets were independent: right where entries meet once.

The larger one is taken. What rounding may leave counts as 2^-10.5 of the terms (squares.py). It is 2^-14 of them at
most, for the longest sums, and mostly 2^-20: a tenth of the norm always suffices, a thousandth mostly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from dpopt.ghost import primitives
from dpopt.ghost.binding import binder
from dpopt.ghost.own_rules import inlined
from dpopt.ghost.values import aval

_PROBES = 4
_MORE_PROBES = 12  # for maps that are not followed, where squares are not added up
# The numbers that stand for independent entries are between this one and 1, of either sign; their mean square.
_SMALLEST = 1 / 4
_MEAN_SQUARE = (1 + _SMALLEST + _SMALLEST**2) / 3
# Linear maps whose coefficients are 0 and 1.
_COPIES = (primitives.LAYOUT | primitives.STRUCTURAL) - primitives.CASTS
_ADDITIONS = frozenset({primitives.ADD, primitives.ADD_ANY, primitives.SUB})
# Products with numbers that do not depend on the parameter.
_MULTIPLIED = primitives.BILINEAR | {primitives.MUL, primitives.DIV}
# Parts of complex numbers, whose squares are at most those of the whole.
_PARTS = frozenset({primitives.REAL, primitives.IMAG, primitives.CONJ})


def row_norms(
    linear: Callable[[jax.Array], list[jax.Array]], x: jax.Array, scale: jax.Array | None = None
) -> list[jax.Array]:
    """For a linear map from arrays like x, the norm of the map from ``scale * (one of them)`` to each entry.

    ``scale`` is like x; None stands for 1."""

    # In a loop, since each probe takes an array like x. Behind a barrier nothing is constant, so XLA folds nothing.
    first = jnp.ones((), x.dtype) if scale is None else scale.astype(x.dtype)
    first, numbers = lax.optimization_barrier((first, jnp.arange(_PROBES, dtype=jnp.uint32)))

    def probe(largest: list[jax.Array], number: jax.Array) -> tuple[list[jax.Array], None]:
        outs = linear(first * independent(x.shape, number).astype(x.dtype))
        return [jnp.maximum(m, jnp.abs(y)) for m, y in zip(largest, outs, strict=True)], None

    zeros = [jnp.zeros(y.shape, jnp.finfo(y.dtype).dtype) for y in jax.eval_shape(linear, x)]
    probed, _ = lax.scan(probe, zeros, numbers)
    first, probed = lax.optimization_barrier((first, probed))
    most = jnp.max(jnp.abs(first), initial=0)
    most = jnp.where((most > 0) & jnp.isfinite(most), most, 1)  # squares of numbers up to 1 do not overflow
    program = inlined(jax.make_jaxpr(linear)(x))
    constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    varied = _Varied.of(jnp.broadcast_to((first / most) ** 2, x.shape))
    squares = _squares(program.jaxpr, constants, {program.jaxpr.invars[0]: varied})
    found = [most * jnp.sqrt(s.total()).astype(y.dtype) for s, y in zip(squares, probed, strict=True)]
    return [jnp.where(jnp.isfinite(f), jnp.maximum(f, y), y) for f, y in zip(found, probed, strict=True)]


class _Varied(NamedTuple):
    """An array of the linear program: a multiple, entry by entry, of another one that has independent entries."""

    squares: jax.Array  # of the other one
    multiple: jax.Array | float = 1.0
    other: object = None  # tells it from the rest

    @classmethod
    def of(cls, squares: jax.Array) -> _Varied:
        return cls(squares, other=object())

    def total(self) -> jax.Array:
        return self.squares * _squared(self.multiple)


def _squares(jaxpr: core.Jaxpr, fixed: dict[Any, Any], varied: dict[Any, _Varied]) -> list[_Varied]:
    """The sums of squares that come out of a linear program, from those that go in.

    Args:
        fixed: the values of variables that do not depend on the parameter.
        varied: the sums of squares in place of those that do.
    """
    for eqn in jaxpr.eqns:
        if any(isinstance(v, core.Var) and v in varied for v in eqn.invars):
            varied.update(zip(eqn.outvars, _of_equation(eqn, fixed, varied), strict=True))
        else:
            fixed.update(zip(eqn.outvars, binder(eqn)(*(_read(v, fixed) for v in eqn.invars)), strict=True))
    return [varied[v] if v in varied else _Varied.of(jnp.zeros(aval(v).shape)) for v in jaxpr.outvars]


def _read(v: core.Var | core.Literal, env: dict[Any, jax.Array]) -> Any:
    return v.val if isinstance(v, core.Literal) else env[v]


def _of_equation(eqn: core.JaxprEqn, fixed: dict[Any, Any], varied: dict[Any, _Varied]) -> Sequence[_Varied]:
    own = [varied.get(v) if isinstance(v, core.Var) else None for v in eqn.invars]
    if eqn.primitive is primitives.REMAT:
        inner = eqn.params["jaxpr"]
        given = [*zip(inner.invars, eqn.invars, own, strict=True)]
        still = {v: _read(x, fixed) for v, x, s in given if s is None}
        return _squares(inner, still, {v: s for v, _, s in given if s is not None})
    if (multiple := _multiple(eqn, own, fixed)) is not None:
        return [multiple]
    totals = [None if s is None else s.total() for s in own]
    if eqn.primitive in _PARTS and totals[0] is not None:
        return [_Varied.of(totals[0])]
    if eqn.primitive in _ADDITIONS:
        return [_Varied.of(functools.reduce(jnp.add, [s for s in totals if s is not None]))]
    if eqn.primitive in _MULTIPLIED and sum(s is not None for s in own) == 1:
        args = [_squared(_read(v, fixed)) if s is None else s for v, s in zip(eqn.invars, totals, strict=True)]
        return [*map(_Varied.of, _bound(eqn, args))]
    if eqn.primitive in _COPIES:
        args = [_kept(_read(v, fixed)) if s is None else s for v, s in zip(eqn.invars, totals, strict=True)]
        return [*map(_Varied.of, _bound(eqn, args))]
    return [*map(_Varied.of, _by_probing(eqn, totals, fixed))]


def _multiple(eqn: core.JaxprEqn, own: Sequence[_Varied | None], fixed: dict[Any, Any]) -> _Varied | None:
    """What is an entrywise multiple of what its operands are multiples of: ``e + e * t``, as in the slope of tanh."""
    first, others = own[0], [_read(v, fixed) for v, s in zip(eqn.invars, own, strict=True) if s is None]
    if eqn.primitive is primitives.MUL and first is None:
        first = own[1]
    if first is None or any(map(jnp.iscomplexobj, others)):
        return None
    if eqn.primitive in primitives.CASTS:
        return first
    if eqn.primitive is primitives.NEG:
        return first._replace(multiple=-first.multiple)
    if eqn.primitive in (primitives.MUL, primitives.DIV) and len(others) == 1:
        bind = jnp.multiply if eqn.primitive is primitives.MUL else jnp.divide
        return first._replace(multiple=bind(first.multiple, others[0]))
    if eqn.primitive in _ADDITIONS and own[1] is not None and own[1].other is first.other:
        bind = jnp.subtract if eqn.primitive is primitives.SUB else jnp.add
        return first._replace(multiple=bind(first.multiple, own[1].multiple))
    return None


def _bound(eqn: core.JaxprEqn, args: Sequence[Any]) -> list[jax.Array]:
    """The equation's outputs for other numbers, which are float32 or float64, whatever its own are."""
    dtypes = {x.dtype for x in args if jnp.issubdtype(x.dtype, jnp.floating)}
    widest = functools.reduce(jnp.promote_types, dtypes)
    args = [x.astype(widest) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
    others = {"preferred_element_type": widest, "precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST)}
    params = {name: others.get(name, value) for name, value in eqn.params.items()}
    found = eqn.primitive.bind(*args, **params)
    return list(found) if eqn.primitive.multiple_results else [found]


def _squared(x: Any) -> jax.Array:
    return jnp.abs(jnp.asarray(x)).astype(jnp.promote_types(jnp.float32, jnp.abs(jnp.asarray(x)).dtype)) ** 2


def _kept(x: Any) -> jax.Array:
    """An index, or a choice; and no square where a number that is not varied stands beside those that are."""
    x = jnp.asarray(x)
    return jnp.zeros(x.shape, jnp.float32) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _by_probing(eqn: core.JaxprEqn, own: Sequence[jax.Array | None], fixed: dict[Any, Any]) -> list[jax.Array]:
    """By random numbers, for all other maps (a Fourier transform, a solver): never far below what is usual there."""
    roots = [None if s is None else jnp.sqrt(s) for s in own]
    given = [_read(v, fixed) if s is None else None for v, s in zip(eqn.invars, own, strict=True)]

    def probe(total: list[jax.Array], number: jax.Array) -> tuple[list[jax.Array], None]:
        args = [
            x if s is None else (s * independent(s.shape, number + _MORE_PROBES * k)).astype(aval(v).dtype)
            for k, (v, s, x) in enumerate(zip(eqn.invars, roots, given, strict=True))
        ]
        return [t + jnp.abs(y) ** 2 for t, y in zip(total, binder(eqn)(*args), strict=True)], None

    dtypes = [jnp.promote_types(jnp.finfo(aval(v).dtype).dtype, jnp.float32) for v in eqn.outvars]
    zeros = [jnp.zeros(aval(v).shape, dtype) for v, dtype in zip(eqn.outvars, dtypes, strict=True)]
    # Other numbers than those of `row_norms`.
    total, _ = lax.scan(probe, zeros, _PROBES + jnp.arange(_MORE_PROBES, dtype=jnp.uint32))
    unit = 0.75 * _MORE_PROBES * _MEAN_SQUARE  # rather too large than too small
    return [jnp.maximum(t, jnp.mean(t) / 16) / unit if t.size else t for t in total]


def independent(shape: Sequence[int], number: Any) -> jax.Array:
    """Pseudorandom numbers of sizes 1/4 to 1: a hash of the index. (Random bits take XLA longer to compile.)"""
    index = jnp.zeros(shape, jnp.uint32)
    for axis, length in enumerate(shape):
        index = index * np.uint32(length) + lax.broadcasted_iota(jnp.uint32, shape, axis)
    index = index ^ (jnp.asarray(number, jnp.uint32) * np.uint32(0x9E3779B9))
    for multiplier in (0x7FEB352D, 0x846CA68B):
        index = (index ^ (index >> 16)) * np.uint32(multiplier)
    size = _SMALLEST + (1 - _SMALLEST) * ((index >> 8) & 0x7FFFFF).astype(jnp.float32) * 2.0**-23
    return jnp.where(index >> 31, -size, size)
