"""Through which equations a weighted sum of gradients may be pulled back.

The engine pulls ``sum_i c_i G_i`` through the prologue once, where ``jax.grad`` pulls back every ``G_i``. The two agree
only if the backward pass is linear in the cotangent, and a user may write one that is not: a ``custom_vjp`` that clips
gradients, say. So what a sum may be pulled through is listed, by the primitive itself and not by its name. Anything
else belongs to the body, which is differentiated example by example, and the contacts are what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpopt.engines.programs import equations
from dpopt.ghost.primitives import HOLDING, ORDINARY, WIDENED
from dpopt.ghost.values import Value, is_narrow


def pulls_sums(eqn: Any, run: Callable, inputs: Sequence[Value], outputs: Sequence[Value]) -> bool:
    """Whether an equation between parameters and contacts may stay in the prologue.

    Complex values do not: contacts are real, so that norms are. Nor do operations in 16 bits that cannot be done in
    more, since what a sum loses by rounding is not bounded by what one example adds to it.
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
    return eqn.primitive in HOLDING and _is_linear(run, inputs)


def _is_linear(run: Callable, inputs: Sequence[Value]) -> bool:
    """Whether an equation with equations inside has a derivative made of ordinary operations alone."""
    moving = [i for i, v in enumerate(inputs) if v.leaves]

    def push(values, tangents):
        def function(chosen):
            args = list(values)
            for i, x in zip(moving, chosen, strict=True):
                args[i] = x
            return [x for x in run(*args) if jnp.issubdtype(x.dtype, jnp.inexact)]

        return jax.jvp(function, ([values[i] for i in moving],), (tangents,))

    values = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in inputs]
    try:
        program = jax.make_jaxpr(push)(values, [values[i] for i in moving])
    except Exception:  # no forward derivative, as of a `custom_vjp`
        return False
    return all(e.primitive in ORDINARY | HOLDING for e in equations(program.jaxpr))
