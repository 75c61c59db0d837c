"""Contacts on the output of an equation that a rule covers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpopt.ghost import rules
from dpopt.ghost.binding import differentiated
from dpopt.ghost.precision import is_precise, precisions
from dpopt.ghost.program import Scope
from dpopt.ghost.values import Contact, ContactOp, Value


def factored(
    eqn: core.JaxprEqn, inputs: list[Value], outputs: list[Value], position: int, scope: Scope
) -> ContactOp | None:
    """The equation with a contact on its output, or None where no rule covers it. Input ``position`` is the weight."""
    moving = [i for i, v in enumerate(inputs) if v.dynamic]
    # A real weight's gradient is only the real part of a product of complex factors.
    if len(moving) != 1 or jnp.issubdtype(outputs[0].dtype, jnp.complexfloating):
        return None
    fixed = {i: v.constant for i, v in enumerate(inputs) if i not in (position, moving[0])}
    if any(value is None for value in fixed.values()):
        return None
    weight, x, out = inputs[position], inputs[moving[0]], outputs[0]
    use = rules.Use(eqn.params, position, moving[0], weight.shape, x.shape, out.shape)
    factors = rules.factors_for(eqn.primitive, use)
    if factors is None:
        return None
    located, loops = scope.locate(weight)
    steps = tuple(length for length, _ in loops)
    apply, precision = _wide_apply(eqn, position, moving[0], fixed), (is_precise(eqn), _is_rounded(eqn))
    of_step = Contact(-1, weight, eqn.primitive, out.shape, out.dtype, factors, apply, x.shape, x.dtype, *precision)
    for length, mapped in reversed(loops):
        factors = rules.lift(factors, length, mapped)
        apply = jax.vmap(apply, in_axes=(0 if mapped else None, 0))
    contact = scope.trace.new_contact(
        located, eqn.primitive, (*steps, *out.shape), out.dtype, factors, apply,
        (*steps, *x.shape), x.dtype, *precision, loops=loops, of_step=of_step,
    )  # fmt: skip
    return ContactOp(contact, differentiated(eqn, moving), inputs, outputs, moving[0])


def _is_rounded(eqn: core.JaxprEqn) -> bool:
    return precisions(eqn) <= {None, lax.Precision.DEFAULT} and jax.default_backend() == "gpu"


def _wide_apply(eqn: core.JaxprEqn, position: int, moving: int, fixed: dict[int, Any]) -> Callable[..., jax.Array]:
    """The equation as a linear function of its weight, computed in at least float32 and at full precision."""

    def apply(weight: jax.Array, x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(jnp.promote_types(x.dtype, weight.dtype))
            weight = weight.astype(x.dtype)
        args = {**fixed, position: weight, moving: x}
        params = dict(eqn.params)
        if params.get("preferred_element_type") is not None:
            params["preferred_element_type"] = weight.dtype
        if "precision" in params:  # like the norms, whatever precision the model uses
            params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
        return eqn.primitive.bind(*(args[i] for i in sorted(args)), **params)

    return apply
