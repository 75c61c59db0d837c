"""Products with complex weights that are made of real parameters, as products with real weights.

``(x + i y) (a + i b) = (x a - y b) + i (x b + y a)``, so ``a`` and ``b`` are weights of their own, and x and y are two
rows of what they meet. A complex weight as a whole has no rule, because norms are those of real parameters: every
example's gradients of ``a`` and ``b`` would be formed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from dpopt.engines.programs import equations, scan_arguments, subprograms
from dpopt.ghost import primitives
from dpopt.ghost.binding import binder
from dpopt.ghost.values import aval

Part: TypeAlias = Any  # an array, or None if it is zero
Parts: TypeAlias = tuple[Part, Part]  # the real and the imaginary one


@dataclasses.dataclass(frozen=True)
class _Known:
    """A value, whether it is computed from parameters, whether it depends on the example, and its parts if known."""

    array: Any
    of_weights: bool = False
    of_example: bool = False
    parts: Parts | None = None


def in_real_numbers(
    closed: core.ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]  it is public
    count: int,
) -> core.ClosedJaxpr:  # pyright: ignore[reportPrivateImportUsage]
    """A loss, whose first ``count`` inputs are the parameters, with products of complex weights in real numbers.

    What is no longer used is still in it."""
    if not _has_complex(closed.jaxpr):
        return closed

    def run(*args: jax.Array) -> list[Any]:
        known = [_Known(x, of_weights=i < count, of_example=i >= count) for i, x in enumerate(args)]
        return [out.array for out in _walk(closed.jaxpr, closed.consts, known)]

    avals = [aval(v) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals))


def _has_complex(jaxpr: core.Jaxpr) -> bool:
    return any(_is_complex(v) for eqn in equations(jaxpr) for v in eqn.outvars)


def _walk(jaxpr: core.Jaxpr, consts: Sequence[Any], inputs: Sequence[_Known]) -> list[_Known]:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*map(_Known, consts), *inputs), strict=True))

    def read(var: core.Var | core.Literal) -> _Known:
        return _Known(np.asarray(var.val, aval(var).dtype)) if isinstance(var, core.Literal) else env[var]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _visit(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _visit(eqn: core.JaxprEqn, inputs: list[_Known]) -> list[_Known]:
    if eqn.primitive in primitives.CALLS:
        inner = eqn.params[primitives.CALLS[eqn.primitive]]
        return _walk(inner.jaxpr, inner.consts, inputs)
    of_weights, of_example = any(v.of_weights for v in inputs), any(v.of_example for v in inputs)
    known = functools.partial(_Known, of_weights=of_weights, of_example=of_example)
    if eqn.primitive in (primitives.REAL, primitives.IMAG) and inputs[0].parts:
        return [known(_array(inputs[0].parts[eqn.primitive is primitives.IMAG], eqn))]
    if eqn.primitive in _RUNNING and any(map(_has_complex, subprograms(eqn))):
        return [known(a) for a in _RUNNING[eqn.primitive](eqn, inputs)]
    parts = _parts(eqn, inputs) if len(eqn.outvars) == 1 and _is_complex(eqn.outvars[0]) else None
    if parts is not None:
        parts = _each(lambda part: _array(part, eqn), *parts)
    if eqn.primitive in (primitives.DOT, primitives.CONVOLUTION) and parts:
        return [known(lax.complex(*(_array(p, eqn) for p in parts)), parts=parts)]
    return [known(a, parts=parts) for a in binder(eqn)(*(v.array for v in inputs))]


def _is_complex(var: core.Var | core.Literal) -> bool:
    return jnp.issubdtype(aval(var).dtype, jnp.complexfloating)


def _array(part: Part, eqn: core.JaxprEqn) -> jax.Array:
    """A part of an equation's output as an array."""
    out = aval(eqn.outvars[0])
    return jnp.broadcast_to(jnp.asarray(0 if part is None else part, _real(out.dtype)), out.shape)


def _real(dtype: Any) -> Any:
    """The type of the parts of complex numbers."""
    return jnp.finfo(dtype).dtype


def _recomputed(eqn: core.JaxprEqn, inputs: Sequence[_Known]) -> list[jax.Array]:
    """A rematerialised block."""

    def run(arrays: list[jax.Array], parts: list[Parts | None]) -> list[jax.Array]:
        known = [dataclasses.replace(v, array=a, parts=p) for v, a, p in zip(inputs, arrays, parts, strict=True)]
        return [out.array for out in _walk(eqn.params["jaxpr"], (), known)]

    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(run, **options)([v.array for v in inputs], [v.parts for v in inputs])


def _in_steps(eqn: core.JaxprEqn, inputs: Sequence[_Known]) -> list[jax.Array]:
    """A loop. What it carries is taken to depend on the example."""
    begin, count = scan_arguments(eqn)
    constants, carried, stacked = inputs[:begin], inputs[begin : begin + count], inputs[begin + count :]
    inner = eqn.params["jaxpr"]

    def step(
        carry: list[jax.Array], given: tuple[list[jax.Array], list[Parts | None]]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        moving = [_Known(a, of_example=True) for a in carry]
        slices = [dataclasses.replace(v, array=a, parts=p) for v, a, p in zip(stacked, *given, strict=True)]
        outs = [out.array for out in _walk(inner.jaxpr, inner.consts, [*constants, *moving, *slices])]
        return outs[:count], outs[count:]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    given = [v.array for v in stacked], [v.parts for v in stacked]
    last, outs = lax.scan(step, [v.array for v in carried], given, **options)
    return [*last, *outs]


_RUNNING = {primitives.REMAT: _recomputed, primitives.SCAN: _in_steps}


def _parts(eqn: core.JaxprEqn, inputs: Sequence[_Known]) -> Parts | None:
    """The parts of an equation's complex output, if they are known."""
    primitive = eqn.primitive
    if primitive is primitives.COMPLEX:
        return inputs[0].array, inputs[1].array
    if primitive in (primitives.DOT, primitives.CONVOLUTION):
        return _product(eqn, inputs)
    found = [_parts_of(v) for v in inputs]
    if None in found:
        return None
    (real, imaginary), *others = cast(list[Parts], found)
    if primitive in primitives.OF_PARTS:
        return _each(lambda part: binder(eqn)(part)[0], real, imaginary)
    if primitive is primitives.CAST:
        return _each(lambda part: lax.convert_element_type(part, _real(aval(eqn.outvars[0]).dtype)), real, imaginary)
    if primitive is primitives.NEG:
        return _each(lax.neg, real, imaginary)
    if primitive is primitives.CONJ:
        return real, _negative(imaginary)
    if len(others) != 1:
        return None
    ((second_real, second_imaginary),) = others
    if primitive in (primitives.ADD, primitives.ADD_ANY):
        return _sum(real, second_real), _sum(imaginary, second_imaginary)
    if primitive is primitives.SUB:
        return _sum(real, _negative(second_real)), _sum(imaginary, _negative(second_imaginary))
    # What data multiply entry by entry stays complex: what it is made of may be smaller.
    if any(v.of_weights for v in inputs) and any(v.of_example for v in inputs):
        return None
    if primitive is primitives.MUL:
        return _combined([[_times(p, q) for q in (second_real, second_imaginary)] for p in (real, imaginary)])
    if primitive is primitives.DIV and second_imaginary is None:
        return _each(lambda part: part / second_real, real, imaginary)
    return None


def _parts_of(value: _Known) -> Parts | None:
    """The parts of an input, if they are known; those of numbers are looked at, so that zeros are."""
    if value.parts is not None:
        return value.parts
    if not jnp.iscomplexobj(value.array):
        return value.array, None
    if isinstance(value.array, np.ndarray):
        return _each(lambda part: part if part.any() else None, value.array.real, value.array.imag)
    return None if value.of_weights or value.of_example else (lax.real(value.array), lax.imag(value.array))


def _each(function: Callable[[Any], Part], real: Part, imaginary: Part) -> Parts:
    return None if real is None else function(real), None if imaginary is None else function(imaginary)


def _negative(part: Part) -> Part:
    return None if part is None else -part


def _sum(one: Part, other: Part) -> Part:
    return one if other is None else other if one is None else one + other


def _times(one: Part, other: Part) -> Part:
    if one is None or other is None or _is_one(other):
        return None if other is None else one
    return other if _is_one(one) else one * other


def _is_one(part: Part) -> bool:
    return isinstance(part, np.ndarray) and part.shape == () and bool(part == 1)


def _combined(products: Sequence[Sequence[Part]]) -> Parts:
    """The parts of a product, from those of part i of one factor and part j of the other."""
    (real, one), (other, imaginary) = products
    return _sum(real, _negative(imaginary)), _sum(one, other)


def _product(eqn: core.JaxprEqn, inputs: Sequence[_Known]) -> Parts | None:
    """The parts of a product of one weight and data."""
    weights = [i for i, v in enumerate(inputs) if v.of_weights and not v.of_example]
    if len(weights) != 1 or not inputs[1 - weights[0]].of_example:
        return None
    (at,), x = weights, inputs[1 - weights[0]]
    weight, multiply = _parts_of(inputs[at]), _by_matrix if eqn.primitive is primitives.DOT else _by_filter
    if weight is None or not _is_plain(eqn, at):
        return None
    parts = _parts_of(x) or (lax.real(x.array), lax.imag(x.array))
    rows = [p for p in parts if p is not None]
    by_weight = [iter(multiply(eqn, rows, w, at)) if w is not None else None for w in weight]
    return _combined([[next(found) if p is not None and found else None for found in by_weight] for p in parts])


def _is_plain(eqn: core.JaxprEqn, at: int) -> bool:
    """Whether the rows of what a weight meets can be told apart in the product, whose layout nothing prescribes."""
    if eqn.primitive is primitives.DOT:
        return eqn.params.get("out_sharding") is None
    return at == 1 and eqn.params["batch_group_count"] == 1


def _by_matrix(eqn: core.JaxprEqn, rows: Sequence[jax.Array], weight: jax.Array, at: int) -> list[jax.Array]:
    """The products of all rows with a weight, which is operand ``at``."""
    (contracted, batched), other = eqn.params["dimension_numbers"], 1 - at
    place = len(batched[0]) + (0 if at else weight.ndim - len(batched[0]) - len(contracted[0]))

    def moved(axes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(axis + (i == other) for axis in own) for i, own in enumerate(axes))

    operands = [jnp.stack(rows), weight] if at else [weight, jnp.stack(rows)]
    (out,) = binder(_of_reals(eqn, dimension_numbers=(moved(contracted), moved(batched))))(*operands)
    return [lax.index_in_dim(out, i, place, keepdims=False) for i in range(len(rows))]


def _by_filter(eqn: core.JaxprEqn, rows: Sequence[jax.Array], weight: jax.Array, at: int) -> list[jax.Array]:
    """The convolutions of all rows with a filter."""
    images, _, out_spec = eqn.params["dimension_numbers"]
    (out,) = binder(_of_reals(eqn))(lax.concatenate([*rows], images[0]), weight)
    return jnp.split(out, len(rows), out_spec[0])


def _of_reals(eqn: core.JaxprEqn, **changed: Any) -> core.JaxprEqn:
    wanted = eqn.params["preferred_element_type"]
    return eqn.replace(
        params={**eqn.params, **changed, "preferred_element_type": wanted if wanted is None else _real(wanted)}
    )
