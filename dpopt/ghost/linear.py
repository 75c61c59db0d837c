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
from jax import lax
from jax.extend.core import primitives

from dpopt._programs import equations
from dpopt.ghost.values import LAYOUT, Value, is_narrow


def _found(names: str) -> set[Any]:
    places = (primitives, lax)
    return {getattr(place, f"{name}_p", None) for name in names.split() for place in places} - {None}


# JAX's own operations, whose derivatives are the mathematical ones.
_ORDINARY = _found("""
    abs acos acosh add add_jaxvals asin asinh atan atan2 atanh bessel_i0e bessel_i1e broadcast_in_dim cbrt ceil cholesky
    clamp complex concatenate conj conv_general_dilated convert_element_type copy cos cosh cumlogsumexp cummax cummin
    cumprod cumsum device_put digamma div dot_general dynamic_slice dynamic_update_slice eig eigh erf erf_inv erfc exp
    exp2 expm1 fft floor gather householder_product igamma igamma_grad_a igammac imag integer_pow lgamma log log1p
    logistic lu max min mul name neg nextafter optimization_barrier pad polygamma pow qr real reduce_max reduce_min
    reduce_precision reduce_prod reduce_sum reduce_window_max reduce_window_min reduce_window_sum
    regularized_incomplete_beta rem reshape rev round rsqrt scatter scatter_add scatter_max scatter_min scatter_mul
    scatter_sub select_and_gather_add select_and_scatter_add select_n sharding_constraint sign sin sinh slice sort split
    sqrt square squeeze stack stop_gradient sub svd tan tanh tile top_k transpose triangular_solve unstack zeta
    and argmax argmin bitcast_convert_type clz eq eq_to ge gt iota is_finite le le_to lt lt_to lu_pivots_to_permutation
    ne not or population_count reduce_and reduce_or reduce_xor shift_left shift_right_arithmetic shift_right_logical xor
""")
# Linear if all that they hold is, derivative rules included.
_HOLDING = _found("call closed_call cond custom_jvp_call jit remat scan")
# Computed in float32 where the loss has fewer bits: they take operands of any floating type.
ELEMENTWISE = {
    "neg", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sqrt", "rsqrt", "square",
    "abs", "sin", "cos", "integer_pow", "sign", "erf", "add", "sub", "mul", "div", "max", "min",
}  # fmt: skip
_WIDENED = LAYOUT | ELEMENTWISE | {
    "add_any", "clamp", "concatenate", "cumsum", "dot_general", "floor", "pad", "pow", "reduce_max", "reduce_min",
    "reduce_sum", "round", "select_n",
}  # fmt: skip


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
    if any(is_narrow(v.dtype) for v in own) and eqn.primitive.name not in _WIDENED:
        return False
    if eqn.primitive in _ORDINARY:
        return True
    return eqn.primitive in _HOLDING and _is_linear(run, inputs)


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
    return all(e.primitive in _ORDINARY | _HOLDING for e in equations(program.jaxpr))
