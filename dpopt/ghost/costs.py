"""Cost model: operations and bytes of the products at one contact. (Those of norms are in methods/.)

The unit of cost is one floating-point operation. Only ratios matter, since all methods that are compared are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from jax.typing import DTypeLike

from dpopt.common.trees import accumulator_dtype
from dpopt.ghost.program import Trace
from dpopt.ghost.rules.base import Factors
from dpopt.ghost.values import Contact

# Operations in the time that it takes to move one byte to or from memory: 5 to 20 on most CPUs and GPUs.
OPERATIONS_PER_BYTE = 8


def nbytes(shape: Sequence[int], dtype: DTypeLike) -> int:
    """Bytes of an array that is computed in at least float32."""
    return math.prod(shape) * accumulator_dtype(dtype).itemsize


def entry_bytes(contact: Contact) -> int:
    """Of one entry of the contact's gradient."""
    return nbytes((), contact.weight.dtype)


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


def leaf_bytes(trace: Trace, leaf: int) -> int:
    return nbytes(trace.leaves[leaf].shape, trace.leaves[leaf].dtype)
