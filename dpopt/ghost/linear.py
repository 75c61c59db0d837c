"""Decides which equations a weighted sum of gradients may be pulled back through.

The engine pulls ``sum_i c_i G_i`` through the prologue once, where ``jax.grad`` pulls back every ``G_i``. The two agree
only if the backward pass is linear in the cotangent, and users may write one that is not, such as a ``custom_vjp`` that
clips gradients. So the primitives that are known to be linear are listed (primitives.py), by identity and not by name.
Any other equation goes to the body, which is differentiated example by example, and its inputs become contacts.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpopt.common.trees import is_narrow
from dpopt.engines.programs import equations
from dpopt.ghost.binding import binder
from dpopt.ghost.precision import precise
from dpopt.ghost.primitives import (
    BROADCAST,
    CALLS,
    CUSTOM_VJP,
    HOLDING,
    LINEAR_IN,
    LINEAR_SOLVE,
    ORDINARY,
    ROUND_TO,
    WIDENED,
)
from dpopt.ghost.values import Value, aval


def may_pull_back_sums(eqn: core.JaxprEqn, inputs: Sequence[Value], outputs: Sequence[Value]) -> bool:
    """Whether an equation between parameters and contacts may stay in the prologue.

    Complex values may not: contacts have to be real for norms to be. Nor may 16-bit operations that cannot run in more
    bits: the rounding error of a sum is not bounded by the contribution of one example.
    """
    if not any(jnp.issubdtype(v.dtype, jnp.inexact) for v in outputs):
        return True  # nothing to pull back
    own = [v for v in (*inputs, *outputs) if v.leaves or v in outputs]
    if any(jnp.issubdtype(v.dtype, jnp.complexfloating) for v in own):
        return False
    if any(is_narrow(v.dtype) for v in own) and eqn.primitive not in WIDENED:
        return False
    if eqn.primitive in ORDINARY:
        return True
    return eqn.primitive in HOLDING | {LINEAR_SOLVE} and _is_linear(eqn, inputs)


def _is_linear(eqn: core.JaxprEqn, inputs: Sequence[Value]) -> bool:
    """Whether the derivative of an equation that holds other equations consists of ordinary operations alone."""
    moving = [i for i, v in enumerate(inputs) if v.leaves]

    def push(values: list[jax.Array], tangents: list[jax.Array]):
        def function(chosen: list[jax.Array]) -> list[jax.Array]:
            args = list(values)
            for i, x in zip(moving, chosen, strict=True):
                args[i] = x
            return [x for x in binder(eqn)(*args) if jnp.issubdtype(x.dtype, jnp.inexact)]

        return jax.jvp(function, ([values[i] for i in moving],), (tangents,))

    values = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in inputs]
    try:
        program = jax.make_jaxpr(push)(values, [values[i] for i in moving])
    except Exception:  # no forward derivative, such as a `custom_vjp`
        return False
    return all(_is_wide_and_ordinary(e) for e in equations(program.jaxpr))


def _solves_linearly(eqn: core.JaxprEqn) -> bool:
    """Whether a `lax.custom_linear_solve` is one of ordinary solvers, such as an LU decomposition's.

    Its transpose calls the user's own solver, which need not be linear (an iteration that ends at a tolerance)."""
    solvers, lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
    pairs = [(solvers.solve, lengths.solve), (solvers.transpose_solve, lengths.transpose_solve)]
    return all(closed is not None and is_linear(closed.jaxpr, first) for closed, first in pairs)


def is_linear(jaxpr: core.Jaxpr, first: int) -> bool:
    """Whether all outputs are linear in the inputs from the ``first`` on: none of them is another constant than 0."""
    moving = _linear_outputs(jaxpr, [i >= first for i in range(len(jaxpr.invars))])
    zeros = zeros_of(jaxpr)
    is_zero = [v.val == 0 if isinstance(v, core.Literal) else v in zeros for v in jaxpr.outvars]
    return moving is not None and all(map(max, moving, is_zero))


def _linear_outputs(jaxpr: core.Jaxpr, moving: Sequence[bool]) -> list[bool] | None:
    """Which outputs depend on the ``moving`` inputs, if they are linear in these; else None."""
    found, zeros = {v for v, is_moving in zip(jaxpr.invars, moving, strict=True) if is_moving}, zeros_of(jaxpr)
    for eqn in jaxpr.eqns:
        own = [isinstance(v, core.Var) and v in found for v in eqn.invars]
        if not any(own):
            continue
        if eqn.primitive in CALLS:
            outs = _linear_outputs(eqn.params[CALLS[eqn.primitive]].jaxpr, own)
        else:
            outs = [True] * len(eqn.outvars) if may_move(eqn, own, zeros) else None
        if outs is None:
            return None
        found.update(v for v, is_moving in zip(eqn.outvars, outs, strict=True) if is_moving)
    return [isinstance(v, core.Var) and v in found for v in jaxpr.outvars]


def zeros_of(jaxpr: core.Jaxpr) -> set[core.Var]:
    """The variables that are zeros, spread over an array."""
    spread = [(eqn.invars[0], eqn.outvars[0]) for eqn in jaxpr.eqns if eqn.primitive is BROADCAST]
    return {out for number, out in spread if isinstance(number, core.Literal) and number.val == 0}


def may_move(eqn: core.JaxprEqn, moving: Sequence[bool], zeros: Container[core.Var]) -> bool:
    """Whether an equation is linear in those of its operands that move, and rounds nothing."""
    if not any(moving) or eqn.params.get("mode") == lax.GatherScatterMode.FILL_OR_DROP:  # with a constant
        return False
    moved, out = aval(eqn.invars[moving.index(True)]).dtype, aval(eqn.outvars[0]).dtype
    if is_narrow(out) or moved != out:
        return False
    match LINEAR_IN.get(eqn.primitive):
        case "one":
            return sum(moving) == 1
        case "first":
            return moving[0] and sum(moving) == 1
        case "second":
            return moving[1] and sum(moving) == 1
        case "others":
            chosen = zip(eqn.invars[1:], moving[1:], strict=True)
            return not moving[0] and all(m or (isinstance(v, core.Var) and v in zeros) for v, m in chosen)
        case "all":
            return all(moving)
        case _:
            return False


def _is_wide_and_ordinary(eqn: core.JaxprEqn) -> bool:
    """Whether an equation within another one is linear, and rounds nothing: it cannot be run in more bits."""
    if eqn.primitive is CUSTOM_VJP:  # of values alone, for no tangent passes through it
        return True
    if eqn.primitive is LINEAR_SOLVE:
        return _solves_linearly(eqn)
    if eqn.primitive not in (ORDINARY | HOLDING) - {ROUND_TO} or precise(eqn) is not eqn:
        return False
    return not any(is_narrow(aval(v).dtype) for v in (*eqn.invars, *eqn.outvars))
