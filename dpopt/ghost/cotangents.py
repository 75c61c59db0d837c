"""Lets contacts whose outputs have the same cotangent share one tap.

The gates of a recurrent cell add a product of the input and a product of the state. Both products have the same
cotangent at every step, and inside a loop XLA would stack it twice.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from dpopt.ghost.primitives import ADD, SPLITTING
from dpopt.ghost.program import Block, Scope
from dpopt.ghost.values import Contact, ContactOp, Op, Value


def share_taps(scope: Scope, results: Sequence[Value]) -> None:
    """Marks the contacts of a scope, and of the scopes within, that need no tap of their own."""
    readers: dict[Value, list[Op | ContactOp | Block | None]] = {v: [None] for v in results}
    for op in scope.ops:
        read = list(op.inputs)
        if isinstance(op, Block):
            share_taps(op.scope, op.scope.results)
            read += op.scope.reads()
        for value in read:
            readers.setdefault(value, []).append(op)

    def origin(value: Value) -> Hashable:
        """What the cotangent of ``value`` is computed from. Values with equal origins have equal cotangents."""
        op, *others = readers.get(value, [None])
        if others or not isinstance(op, Op):
            return value
        if op.primitive is ADD and value.shape == op.outputs[0].shape:
            return origin(op.outputs[0])
        if op.primitive in SPLITTING and len(op.inputs) == 1:
            return op.primitive, str(op.params), value.shape, tuple(origin(v) for v in op.outputs)
        return value

    first: dict[Hashable, Contact] = {}
    # Numbers that are added to the loss: the planner asks whether they have one cotangent.
    numbers = [op for op in scope.trace.identities if scope.parent is None and math.prod(op.contact.tap_shape) == 1]
    for op in [*numbers, *scope.ops]:
        if isinstance(op, ContactOp):
            (out,) = op.outputs
            owner = first.setdefault((origin(out), out.shape, out.dtype), op.contact)
            op.contact.shares = None if owner is op.contact else owner
