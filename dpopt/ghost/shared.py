"""Squared norms of the gradient of a matrix that several contacts use, cross terms included: tied weights, say."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dpopt.ghost import norms, squares
from dpopt.ghost.rows import Dense, OneHot, Rows, join
from dpopt.ghost.rules import Factors
from dpopt.ghost.squares import Square

# The factors, whether they are transposed relative to the matrix, the input and the cotangent.
Use = tuple[Factors, bool, Array, Array]


def square(method: str, uses: Sequence[Use], scale: Float[Array, "a p"] | None) -> Square:
    """``|S * sum_k G_k|^2`` for one example; ``method`` is "gram", or one of norms.py for all uses together.

    That takes uses of one kind. For "gram", look-ups may be beside products if there is no diagonal."""
    rows = [_rows(use, scale if method == "gram" else None) for use in uses]
    if method == "gram":
        return _gram(rows, min((y.dtype for *_, y in uses), key=lambda dtype: jnp.finfo(dtype).bits))
    left, right = (join([pair[side] for pair in rows]) for side in (0, 1))
    return norms.METHODS[method](norms.Group(left, right[0], scale, None))


def _rows(use: Use, scale: Float[Array, "a p"] | None) -> tuple[Rows, Rows]:
    """The matrix's rows and columns. A diagonal multiplies the rows that are looked up."""
    factors, is_transposed, x, y = use
    left, right = (jnp.squeeze(z, 0) for z in factors.split(x, y))  # a plain matrix has one group, else this raises
    rows: Rows = OneHot(left, factors.shape[2]) if factors.one_hot else Dense(left)
    if isinstance(rows, OneHot) and scale is not None:
        right = right * rows.times(scale.T if is_transposed else scale)
    return (Dense(right), rows) if is_transposed else (rows, Dense(right))


def _gram(rows: Sequence[tuple[Rows, Rows]], computed_in: DTypeLike) -> Square:
    """Uses of one kind are joined, so that an unrolled recurrent network has one Gram matrix, not one per two steps."""
    kinds: dict[tuple[type, type], list[tuple[Rows, Rows]]] = {}
    for pair in rows:
        kinds.setdefault((type(pair[0]), type(pair[1])), []).append(pair)
    joined = [(join([a for a, _ in pairs]), join([b for _, b in pairs])) for pairs in kinds.values()]
    total = jnp.zeros(())
    for i, pair in enumerate(joined):
        for j, other in enumerate(joined[: i + 1]):
            term = jnp.sum(pair[0].inner(other[0]) * pair[1].inner(other[1]))
            total += term if i == j else 2 * term
    lefts, rights = (jnp.concatenate([pair[side].squares() for pair in joined]) for side in (0, 1))
    left_length, right_length = (max(norms.length(pair[side]) for pair in joined) for side in (0, 1))
    return squares.of_products(lefts, rights, total, (len(lefts), left_length, right_length), computed_in)
