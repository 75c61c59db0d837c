"""Decides which equations a weighted sum of gradients may be pulled back through.

The engine pulls ``sum_i c_i G_i`` through the prologue once, where ``jax.grad`` pulls back every ``G_i``. The two agree
only if the backward pass is linear in the cotangent, and users may write one that is not, such as a ``custom_vjp`` that
clips gradients. So the primitives that are known to be linear are listed (primitives.py), by identity and not by name.
Any other equation goes to the body, which is differentiated example by example, and its inputs become contacts.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend import core

from dpopt.common.trees import is_narrow
from dpopt.engines.programs import equations
from dpopt.ghost.canonical import binder
from dpopt.ghost.precision import precise
from dpopt.ghost.primitives import HOLDING, ORDINARY, ROUND_TO, WIDENED
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
    return eqn.primitive in HOLDING and _is_linear(eqn, inputs)


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


def _is_wide_and_ordinary(eqn: core.JaxprEqn) -> bool:
    """Whether an equation within another one is linear, and rounds nothing: it cannot be run in more bits."""
    if eqn.primitive not in (ORDINARY | HOLDING) - {ROUND_TO} or precise(eqn) is not eqn:
        return False
    return not any(is_narrow(aval(v).dtype) for v in (*eqn.invars, *eqn.outvars))
