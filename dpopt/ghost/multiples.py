"""Weights that are a parameter times a number, such as one divided by its largest singular value.

Where such a weight multiplies an activation, the number multiplies the product instead: ``x (s w) = s (x w)``. Then
an example adds to the gradient of w that of a plain product, and a number times the gradient of s, which is the same
for all examples (`LeafPlan.numbers`). No example's gradient has to be formed.

Where ``x w`` overflows although ``x (s w)`` does not, the example is left out, like any whose loss is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpopt.common.trees import is_narrow
from dpopt.ghost.binding import binder
from dpopt.ghost.entries import describe
from dpopt.ghost.factored import factored
from dpopt.ghost.primitives import BILINEAR, BROADCAST, CASTS, DIV, LAYOUT, MUL
from dpopt.ghost.program import Scope
from dpopt.ghost.values import Multiple, Op, Value


def describe_multiple(eqn: core.JaxprEqn, inputs: Sequence[Value], outputs: Sequence[Value], scope: Scope) -> None:
    """Notes whether the output of a prologue equation is a multiple of a weight, perhaps rearranged."""
    if len(outputs) != 1:
        return
    (out,) = outputs
    if not out.leaves or is_narrow(out.dtype):  # half precision would round elsewhere
        return
    if eqn.primitive in (MUL, DIV):
        for weight, factor in (inputs, inputs[::-1]) if eqn.primitive is MUL else (inputs,):
            if weight.leaves and weight.shape == out.shape and (number := _number(factor, scope)):
                out.multiple = Multiple(weight, number, eqn.primitive)
    elif eqn.primitive is BROADCAST and (number := _number(inputs[0], scope)):
        out.multiple = Multiple(None, number, MUL)
    elif eqn.primitive in LAYOUT - CASTS and len(inputs) == 1 and (known := inputs[0].multiple) and known.weight:
        rearranged = Value.of(eqn.outvars[0])
        describe(eqn, [known.weight], [rearranged])
        describe_multiple(eqn, [known.weight], [rearranged], scope)  # which may be one, too
        scope.hoist(Op(binder(eqn), eqn.primitive, [known.weight], [rearranged], eqn.params))
        out.multiple = known._replace(weight=rearranged)


def _number(value: Value, scope: Scope) -> Value | None:
    """The number that a value is, or all of its entries are, if parameters determine it once for all steps of loops."""
    if value.multiple and value.multiple.weight is None:
        value = value.multiple.number
    if value.shape or not value.leaves or any(is_mapped for _, is_mapped in scope.locate(value)[1]):
        return None
    return value


def moved_out(eqn: core.JaxprEqn, inputs: list[Value], outputs: list[Value], position: int, scope: Scope) -> bool:
    """Adds the equation as a contact with what its weight is a multiple of, and the multiplication of its output.

    Returns whether it did."""
    weight, multiples, (out,) = inputs[position], [], outputs
    while (multiple := weight.multiple) and multiple.weight:
        weight = multiple.weight
        multiples.append(multiple)
    if not multiples or eqn.primitive not in BILINEAR or not _saves_memory(weight, inputs[1 - position], out):
        return False
    products = [*(Value(out.shape, out.dtype, dynamic=True) for _ in multiples), out]
    operands = [weight if i == position else v for i, v in enumerate(inputs)]
    contact_op = factored(eqn, operands, products[:1], position, scope)
    if contact_op is None:
        return False
    scope.ops.append(contact_op)
    for multiple, product, result in zip(reversed(multiples), products[:-1], products[1:], strict=True):
        scope.ops.append(_times(multiple, product, result, scope))
    return True


def _saves_memory(weight: Value, x: Value, out: Value) -> bool:
    """Whether gradients take more memory than input and output do: otherwise forming them costs little."""
    return math.prod(weight.shape) > math.prod(x.shape) + math.prod(out.shape)


def _times(multiple: Multiple, product: Value, result: Value, scope: Scope) -> Op:
    apply = lax.mul if multiple.primitive is MUL else lax.div
    return Op(
        lambda product, number: [apply(product, jnp.broadcast_to(number.astype(product.dtype), product.shape))],
        multiple.primitive, [product, scope.promote(multiple.number)], [result],
    )  # fmt: skip
