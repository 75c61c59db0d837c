"""Cost model: operations and bytes of the products and norms at one contact.

The unit of cost is one floating-point operation. Only ratios matter, since all methods that are compared are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import cast

import jax.numpy as jnp
from jax.typing import DTypeLike

from dpopt.common.trees import accumulator_dtype
from dpopt.ghost.primitives import LAYOUT
from dpopt.ghost.program import Block, Loop, Scope, Trace
from dpopt.ghost.rules import SHIFTED_SUM, Factors
from dpopt.ghost.values import Contact

# Operations in the time that it takes to move one byte to or from memory: 5 to 20 on most CPUs and GPUs.
OPERATIONS_PER_BYTE = 8
_SORT = 4  # bytes in whose time an index is compared when it is sorted


def nbytes(shape: Sequence[int], dtype: DTypeLike) -> int:
    return math.prod(shape) * accumulator_dtype(dtype).itemsize


def formed_bytes(contact: Contact) -> int:
    return nbytes(contact.weight.shape, contact.weight.dtype)


def forming_bytes(contact: Contact) -> int:
    """Bytes of the gradient and of the views of the input, or of the output's cotangent, that its products read."""
    factors = cast(Factors, contact.factors)
    if factors.shape[0] == 1 and not factors.views:  # the input, read in place or copied
        return formed_bytes(contact) + nbytes(contact.input_shape, contact.weight.dtype)
    return formed_bytes(contact) + view_bytes(factors, contact.weight.dtype)


def view_bytes(factors: Factors, dtype: DTypeLike) -> int:
    """Bytes of windows of the input, or of the output's cotangent where it is these that are looked up."""
    K, N, a, p = factors.shape
    columns = (K * a if K > 1 else 0) + (p if factors.views else 0)
    return N * factors.positions * columns * accumulator_dtype(dtype).itemsize


def activation_bytes(contact: Contact) -> int:
    return nbytes(contact.tap_shape, contact.tap_dtype) + nbytes(contact.input_shape, contact.weight.dtype)


def product(contact: Contact) -> float:
    """Operations of the weighted sum at this contact, for one example."""
    if contact.factors is None:
        return math.prod(contact.tap_shape)
    K, N, a, p = contact.factors.shape
    if contact.factors.one_hot:  # a scatter-add, bound by memory
        return 2 * OPERATIONS_PER_BYTE * nbytes(contact.tap_shape, contact.tap_dtype)
    return 2 * K * N * contact.factors.positions * a * p


def norm_cost(contact: Contact, method: str, scaled: bool) -> tuple[float, float]:
    """(operations, extra bytes) of the squared norm of one example."""
    if method == "explicit":
        formed = formed_bytes(contact)
        if contact.factors is None:  # the backward pass has formed it already
            return OPERATIONS_PER_BYTE * formed, 0
        return product(contact) + 2 * OPERATIONS_PER_BYTE * formed, formed
    factors = cast(Factors, contact.factors)  # all other methods need them
    K, N, a, p = factors.shape
    T = factors.positions
    width = accumulator_dtype(contact.weight.dtype).itemsize
    if method == "rank_one":
        reads = OPERATIONS_PER_BYTE * width * N * (K * a + p)
        return reads + (2 * K * N * a * p if scaled and not factors.one_hot else 0), 0
    if method == "pairs":
        return pairs_cost(N, T, K * a, p, width)
    if method == "segments":
        return segments_cost(N, T, p, width)
    square = N * T * T * width
    if factors.inner is not None:
        pixels = N * factors.rows**2
        inner = 2 * pixels * a + SHIFTED_SUM * K * N * T * T
        return inner + 2 * N * T * T * p + 3 * OPERATIONS_PER_BYTE * square, 2 * square + pixels * width
    inner = 0 if factors.one_hot else K * a
    views = view_bytes(factors, contact.weight.dtype)
    return 2 * N * T * T * (inner + p) + 3 * OPERATIONS_PER_BYTE * square, 2 * square + views


def segments_cost(groups: int, rows: int, p: int, width: int) -> tuple[float, float]:
    """(operations, extra bytes) of adding up the rows of one index before they are squared."""
    operations = OPERATIONS_PER_BYTE * (8 * width * p + _SORT * math.log2(rows + 1))
    return groups * rows * operations, groups * rows * (width * p + 16)


def pairs_cost(groups: int, rows: int, a: int, p: int, width: int) -> tuple[float, float]:
    """(operations, extra bytes) of a squared norm with a diagonal by products of all pairs of rows."""
    pairs = groups * rows * (rows + 1) // 2
    written = width * pairs * (a + 2 * p)
    return 2 * pairs * a * p + OPERATIONS_PER_BYTE * written, written


def shared_cost(contacts: Sequence[Contact], transposed: Sequence[bool]) -> tuple[float, float]:
    """(operations, extra bytes) of the squared norm of a matrix with several contacts, some of which transpose it."""
    positions, joined = 0, 0.0
    sides = [0, 0], [0, 0]  # length, and how many vectors need inner products (one-hot ones need none)
    for contact, is_transposed in zip(contacts, transposed, strict=True):
        factors = cast(Factors, contact.factors)
        left, right = sides[::-1] if is_transposed else sides
        left[0], right[0] = factors.shape[2:]
        left[1] += 0 if factors.one_hot else factors.positions
        right[1] += factors.positions
        positions += factors.positions
        joined += activation_bytes(contact)
    operations = sum(2 * length * vectors**2 for length, vectors in sides)
    return operations + 12 * OPERATIONS_PER_BYTE * positions**2, 8 * positions**2 + joined


def leaf_bytes(trace: Trace, leaf: int) -> int:
    return nbytes(trace.leaves[leaf].shape, trace.leaves[leaf].dtype)


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
