"""Computations at one contact: its gradient for one example, or the weighted sum over all examples.

A clip coefficient multiplies one of the two factors of an example's gradient. Entries that fall below the smallest
normal number *tiny* underflow: up to tiny of the factor is lost, and the other factor, the map back to the parameter
and its diagonal enlarge the loss. Whether products and partial sums underflow depends on the other examples that they
are added to. An example that may lose more than 2^-14 of its clipped norm cannot be weighted, and is left out. In
float32 that takes factors, or diagonals, some 1e28 times the clip norm.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax

from dpopt.common.trees import accumulator_dtype, per_example
from dpopt.engines import sums
from dpopt.ghost import term_sizes
from dpopt.ghost.convolutions import channels_last
from dpopt.ghost.costs import view_bytes
from dpopt.ghost.methods.base import AtContact, FromFactors, over_groups
from dpopt.ghost.methods.explicit import formed, formed_together
from dpopt.ghost.primitives import BILINEAR, CONVOLUTION, DOT
from dpopt.ghost.rows import quick_products, summed_products, tf32, wide
from dpopt.ghost.rules import Factors
from dpopt.ghost.selection import selected
from dpopt.ghost.squares import TOLERANCE, Square, cancelled_before, of_entries
from dpopt.ghost.values import Contact

_PRECISION = lax.Precision.HIGHEST
# Windows of a convolution's input may take so much for a block of examples.
_WINDOW_BYTES = 1 << 27


class Seen(NamedTuple):
    """What the passes recorded at a contact, ``[B, ...]``, or without that axis for one example."""

    x: Any  # the input; None if the contact is the weight itself
    y: jax.Array  # the cotangent of the output
    out: jax.Array | None = None  # the output, where a norm reads it


class Formed(NamedTuple):
    """Gradients at a contact, ``[B, ...]`` or of one example, formed for their norms and kept for the weighted sum."""

    gradient: jax.Array  # folded where there are factors


Recorded: TypeAlias = Seen | Formed
Records: TypeAlias = Mapping[Contact, Recorded]


def form(contact: Contact, record: Recorded, for_sum: bool = False) -> jax.Array:
    """One example's gradient of a contact's weight, folded where there are factors.

    ``for_sum``: it is also what is added up. Then norm and sum are of the same numbers, however these are rounded, so
    that a GPU may compute them as it computes the loss."""
    if isinstance(record, Formed):
        return record.gradient
    if contact.factors is None:
        return record.y.astype(accumulator_dtype(record.y.dtype))
    return formed(contact.factors, record.x, record.y, is_quick=for_sum and contact.is_rounded)


def usage(contact: Contact) -> Hashable:
    """Equal for contacts that use one weight alike, with factors that arrange it in one way.

    Of two uses of a square matrix one may transpose it, and a square table may be read by rows and by columns."""
    folding = jax.make_jaxpr(contact.fold)(jax.ShapeDtypeStruct(contact.weight.shape, contact.weight.dtype))
    return contact.weight, contact if folding.consts else str(folding)  # the text does not show constants


def is_sum(contact: Contact, record: Recorded) -> bool:
    """Whether one example's gradient is a sum of several terms wherever it is computed.

    A gradient that is kept is computed once, and so counts as one term."""
    return isinstance(record, Seen) and contact.factors is not None and contact.factors.positions > 1


def used_alike(contacts: Sequence[Contact], records: Records) -> list[list[Contact]]:
    """Groups of contacts that use one weight, such as filters, in the same way, so that their factors can be joined."""
    groups: dict[Hashable, list[Contact]] = {}
    for c in contacts:
        if is_sum(c, records[c]) and c.factors is not None and not c.factors.one_hot:
            groups.setdefault(usage(c), []).append(c)
    return [own for own in groups.values() if len(own) > 1]


def form_together(contacts: Sequence[Contact], seen: Sequence[Seen]) -> jax.Array:
    """The sum of one example's gradients at such contacts, of the shape of the weight."""
    uses = [(cast(Factors, c.factors), s.x, s.y) for c, s in zip(contacts, seen, strict=True)]
    return contacts[0].unfold(formed_together(uses))


def square_of_one(
    contact: Contact, method: AtContact, record: Recorded, diagonal: jax.Array | None, lost: jax.Array | float,
    is_quick: bool = False,
) -> Square:  # fmt: skip
    """``|S * G|^2`` for one example; ``diagonal`` is S, like the weight; for ``lost`` see `squares.of_entries`.

    ``is_quick``: the record is one of quick_sums.py."""
    diagonal = None if diagonal is None else contact.fold(diagonal)
    return with_terms(contact, *parts_of_one(contact, method, record, diagonal, lost, is_quick), diagonal)


def parts_of_one(
    contact: Contact, method: AtContact, record: Recorded, diagonal: jax.Array | None, lost: jax.Array | float,
    is_quick: bool = False, direction: jax.Array | None = None,
) -> tuple[Square, term_sizes.Columns | None]:  # fmt: skip
    """`square_of_one` without the part that is cheaper for all examples together, which `with_terms` adds.

    Here and there ``diagonal`` is folded. ``direction``, folded as well, is that of `Square.along`."""
    factors = contact.factors
    if isinstance(method, FromFactors):
        x, y, _ = cast(Seen, record)
        return method.square(cast(Factors, factors), x, y, diagonal, is_quick), None
    gradient = form(contact, record, for_sum=is_quick)
    found = of_entries(gradient if diagonal is None else gradient * diagonal, lost)
    if direction is not None:
        found = found._replace(along=jnp.sum(gradient * direction))
    if isinstance(record, Formed) or factors is None or factors.positions == 1:
        return found, None
    terms = term_sizes.of_one(factors, record.x, record.y, diagonal)
    if isinstance(terms, term_sizes.Columns):
        return found, terms
    return cancelled_before(found, terms, gradient.dtype, is_quick), None


def with_terms(
    contact: Contact, square: Square, columns: term_sizes.Columns | None, diagonal: jax.Array | None
) -> Square:
    """`square_of_one` from the result of `parts_of_one`."""
    if columns is None:
        return square
    terms = term_sizes.behind(cast(Factors, contact.factors), columns, cast(Any, diagonal))
    return cancelled_before(square, terms, contact.tap_dtype)


def sum_at(contact: Contact, record: Recorded, c: jax.Array, is_quick: bool = False) -> jax.Array:
    """``sum_i c_i G_i`` at one contact; for ``is_quick`` see quick_sums.py."""
    if isinstance(record, Formed):
        return sum_of_formed(contact, record.gradient, c)
    return sum_of_factors(contact, record.x, record.y, c, is_quick)


def sum_of_formed(contact: Contact, formed: jax.Array, c: jax.Array) -> jax.Array:
    """The same from formed gradients."""
    return contact.unfold(sums.weighted(c.astype(formed.dtype), formed))


def sum_of_factors(contact: Contact, x: jax.Array, y: jax.Array, c: jax.Array, is_quick: bool = False) -> jax.Array:
    """The same from inputs and cotangents: the contact's primitive, linear in the weight, transposed."""
    if contact.apply is None:
        dtype = accumulator_dtype(y.dtype)
        return sums.weighted(c.astype(dtype), y.astype(dtype))
    if contact.given is not None:  # nothing has replaced what is not finite in it
        x = selected(c != 0, x)
        if contact.factors is not None and contact.factors.positions == 1:  # `records.norms_in_place`
            y = selected(c != 0, y)
    if weighs_input(contact, x, y):
        x = times_coefficients(x, c, is_quick)
    else:
        y = times_coefficients(y, c, is_quick)
    factors = contact.factors
    if factors is not None and _as_product(contact, factors, len(c)):
        left, right = (jnp.squeeze(z, 1) for z in jax.vmap(factors.split)(x, y))  # of the only group
        products = quick_products if is_quick else summed_products
        total = products(*(z.reshape(math.prod(z.shape[:-1]), z.shape[-1]) for z in (left, right)))
        return factors.unfold(total.reshape(factors.shape))
    batched = jax.vmap(contact.apply, in_axes=(None, 0))
    shape = jax.ShapeDtypeStruct(contact.weight.shape, accumulator_dtype(contact.weight.dtype))
    out = jax.eval_shape(batched, shape, x)
    transposed = jax.linear_transpose(lambda w: batched(w, x), shape)
    return channels_last(lambda y: transposed(y)[0])(y.astype(out.dtype))


def _as_product(contact: Contact, factors: Factors, rows: int) -> bool:
    """Whether the sum is computed as one product of matrices, of the factors of all examples.

    For the transposed primitive of a product XLA would first transpose y, a tenth of the time of an MLP's gradient.
    (For a product of a single example's factors it would store a broadcast.) A GPU computes gradients of filters slowly
    if it must not round factors, but for the largest images windows take too much memory."""
    if factors.one_hot or factors.shape[1] != 1 or rows == 1:
        return False
    if contact.primitive is CONVOLUTION:
        return jax.default_backend() == "gpu" and rows * view_bytes(factors, contact.weight.dtype) <= _WINDOW_BYTES
    return contact.primitive is DOT and factors.shape[0] == 1


def may_stack(contact: Contact, record: Recorded | None = None) -> bool:
    """Whether `weighted` is fast under ``vmap``, which makes slow grouped convolutions of gradients of filters."""
    return contact.primitive is not CONVOLUTION or isinstance(record, Formed)


def weighs_input(contact: Contact, x: jax.Array, y: jax.Array) -> bool:
    """Whether coefficients multiply the input: it is smaller, and layers with the same input share the product."""
    return contact.primitive in BILINEAR and x.size < y.size


def is_added_up(contact: Contact, record: Recorded) -> bool:
    """Whether entries of one example's weighted gradient are sums of several products."""
    if isinstance(record, Formed) or contact.apply is None:
        return False
    return contact.factors is None or contact.factors.positions > 1


def largest_of_other_factor(contact: Contact, record: Recorded) -> jax.Array:
    """``[B]``: the largest entry of the factor that is not weighted; 1 where there is no such factor."""
    if isinstance(record, Formed):
        return jnp.ones(len(record.gradient))
    x, y = record.x, record.y
    if x is None or contact.apply is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.ones(len(y))
    other = y if weighs_input(contact, x, y) else x
    return jnp.max(jnp.abs(other), axis=range(1, other.ndim), initial=0)


def lost_to_weighing(contact: Contact, other: jax.Array, rows: int) -> jax.Array:
    """How much an entry of the weighted sum of ``rows`` examples may lose of one of them, in units of tiny.

    (In absolute units the bound itself would underflow under a small diagonal.)

    Args:
        other: the largest entry of the factor that is not weighted; 0 where underflow of the other factor is harmless.
    """
    if contact.factors is None:
        count = math.prod(length for length, is_mapped in contact.loops if not is_mapped)
    else:
        count = contact.factors.positions
    return count * (rows + other)  # whether partial results below tiny are kept depends on other examples


def can_weigh(c: jax.Array, clipped_to: jax.Array, lost: jax.Array, tiny: float) -> jax.Array:
    """Whether coefficients may multiply examples that lose up to ``lost`` times ``tiny`` that way.

    Smaller coefficients than ``tiny`` may not: they lose digits themselves."""
    return (c >= tiny) & (lost < clipped_to * (TOLERANCE / tiny))


def times_coefficients(x: jax.Array, c: jax.Array, is_quick: bool = False) -> jax.Array:
    product = x * per_example(c.astype(accumulator_dtype(x.dtype)), x)
    return tf32(product) if is_quick else product


def along(contact: Contact, direction: jax.Array, x: jax.Array) -> jax.Array:
    """How the contact's output changes with a change of its weight, for one example."""
    if (apply := contact.apply) is None:
        return direction
    # By jvp: a gather with an index out of range returns a constant, which has no gradient.
    return jax.jvp(lambda w: apply(w, x), (direction,), (direction,))[1]


def inner(contact: Contact, direction: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """``<G, direction>`` for one example, without G."""
    if contact.factors is not None and contact.factors.one_hot:  # reads out of range have no gradient
        folded = contact.factors.fold(direction)
        return jnp.sum(over_groups(lambda group: jnp.sum(wide(group.scaled())), contact.factors, x, y, folded))
    out = along(contact, direction, x)
    return jnp.sum(out * y.astype(out.dtype))
