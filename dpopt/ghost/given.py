"""Inputs of contacts that are arrays of the example, which need no copy."""

from __future__ import annotations

import math

import jax

from dpopt.ghost import primitives
from dpopt.ghost.program import Trace
from dpopt.ghost.values import ContactOp, Op


def mark_given(trace: Trace) -> None:
    """Marks the contacts whose input is an array of the example, in some shape.

    They have to be in memory before the engine starts. Only loops ensure that on the CPU of JAX 0.10 and 0.11, which
    drops barriers too early, and copy them."""
    if jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12):
        return
    given = {value: i for i, value in enumerate(trace.example)}
    for op in trace.body.ops:
        if isinstance(op, ContactOp):
            op.contact.given = None if op.input_position is None else given.get(op.inputs[op.input_position])
        elif isinstance(op, Op) and op.primitive in primitives.RESHAPING and (source := op.inputs[0]) in given:
            given |= {v: given[source] for v in op.outputs if math.prod(v.shape) == math.prod(source.shape)}
