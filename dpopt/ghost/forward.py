"""How much the forward pass of a traced loss computes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax.numpy as jnp

from dpopt.ghost.primitives import LAYOUT
from dpopt.ghost.program import Block, Loop, Scope


def forward_work(scope: Scope, of_step: float = 1) -> tuple[float, float]:
    """Bytes of the floating-point values that the forward pass of one example computes, and its number of equations.

    Those of each step of a loop count ``of_step``."""
    found = list(_equations(scope))
    return sum(times * size for _, size, times in found), sum(n if n == 1 else n * of_step for *_, n in found)


def largest_value(scope: Scope) -> int:
    """Bytes of the largest floating-point value that the forward pass of one example computes."""
    return max((largest for largest, *_ in _equations(scope)), default=0)


def _equations(scope: Scope, times: int = 1) -> Iterator[tuple[int, int, int]]:
    """Of each equation that computes: bytes of its largest value, and of all; and how many times it is computed."""
    for op in scope.ops:
        if isinstance(op, Block):
            yield from _equations(op.scope, times * op.scope.length if isinstance(op, Loop) else times)
        elif getattr(op, "primitive", None) not in LAYOUT:
            values = [v for v in op.outputs if jnp.issubdtype(v.dtype, jnp.floating)]
            sizes = [math.prod(v.shape) * v.dtype.itemsize for v in values]
            yield max(sizes, default=0), sum(sizes), times
