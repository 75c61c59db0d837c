"""A matrix that several contacts use, cross terms included: tied weights, say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dpopt.common.trees import accumulator_dtype
from dpopt.ghost import squares
from dpopt.ghost.costs import OPERATIONS_PER_BYTE, activation_bytes
from dpopt.ghost.methods.base import Cost, FromFactors, Group, Method, length
from dpopt.ghost.methods.gram import GRAM
from dpopt.ghost.methods.pairs import FEW, PAIRS, cost_of_pairs
from dpopt.ghost.methods.segments import SEGMENTS, cost_of_segments
from dpopt.ghost.rows import Dense, OneHot, Rows, join
from dpopt.ghost.rules.base import Factors
from dpopt.ghost.squares import Square
from dpopt.ghost.values import Contact, Entry

# The factors, whether they are transposed relative to the matrix, the input and the cotangent.
Use = tuple[Factors, bool, Array, Array]
_Scale = Float[Array, "a p"] | None
# The parameter's axes that a and p at a contact consist of.
_Orientation = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Shared(Method):
    """A method for the rows of all contacts together: `GRAM`, or one for uses of one kind."""

    method: FromFactors

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"shared_{self.method.name}"

    def square(self, contacts: Sequence[Contact], xs: Sequence[Array], ys: Sequence[Array], scale: _Scale) -> Square:
        """``|S * sum_k G_k|^2`` for one example, from the inputs and cotangents at the contacts."""
        uses = zip([cast(Factors, c.factors) for c in contacts], _turned(contacts), xs, ys, strict=True)
        # Where look-ups are beside products there is no diagonal.
        rows = [_rows(use, scale if self.method is GRAM else None) for use in uses]
        if self.method is GRAM:
            return _gram(rows, min((y.dtype for y in ys), key=lambda dtype: jnp.finfo(dtype).bits))
        left, right = (join([pair[side] for pair in rows]) for side in (0, 1))
        return self.method.of_group(Group(left, right[0], scale, None))


def shared_methods(contacts: Sequence[Contact], scaled: bool) -> dict[Shared, Cost]:
    """The methods for a matrix with several contacts, each with its cost."""
    first, *others = (_orientation(c) for c in contacts)
    if first is None or not {*others} <= {first, first[::-1]}:
        return {}
    factors, turned = [cast(Factors, c.factors) for c in contacts], _turned(contacts)
    looked_up, rows = [f.one_hot for f in factors], sum(f.positions for f in factors)
    a, p, width = *factors[0].shape[2:], accumulator_dtype(contacts[0].weight.dtype).itemsize
    found = {}
    if all(looked_up) and not any(turned):
        found[Shared(SEGMENTS)] = cost_of_segments(1, rows, p, width)
    if all(looked_up) or not scaled:
        found[Shared(GRAM)] = _cost_of_gram(contacts, turned)
    elif not any(looked_up) and rows <= FEW:
        found[Shared(PAIRS)] = cost_of_pairs(1, rows, a, p, width)
    return found


def _orientation(contact: Contact) -> _Orientation | None:
    """The axes that a and p at this contact consist of, if the parameter is used unchanged, as a matrix."""
    factors = contact.factors
    if not contact.is_copy or factors is None or factors.axes is None:
        return None
    order = cast(Entry, contact.weight.entry).order
    return None if order is None else cast(Any, tuple(tuple(order[i] for i in axes) for axes in factors.axes))


def _turned(contacts: Sequence[Contact]) -> list[bool]:
    """Which contacts use the transpose of the matrix that the first one uses."""
    return [_orientation(c) != _orientation(contacts[0]) for c in contacts]


def _cost_of_gram(contacts: Sequence[Contact], turned: Sequence[bool]) -> Cost:
    positions, joined = 0, 0.0
    sides = [0, 0], [0, 0]  # length, and how many vectors need inner products (one-hot ones need none)
    for contact, is_transposed in zip(contacts, turned, strict=True):
        factors = cast(Factors, contact.factors)
        left, right = sides[::-1] if is_transposed else sides
        left[0], right[0] = factors.shape[2:]
        left[1] += 0 if factors.one_hot else factors.positions
        right[1] += factors.positions
        positions += factors.positions
        joined += activation_bytes(contact)
    operations = sum(2 * length * vectors**2 for length, vectors in sides)
    return Cost(operations + 12 * OPERATIONS_PER_BYTE * positions**2, 8 * positions**2 + joined)


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
    left_length, right_length = (max(length(pair[side]) for pair in joined) for side in (0, 1))
    return squares.of_products(lefts, rights, total, (len(lefts), left_length, right_length), computed_in)
