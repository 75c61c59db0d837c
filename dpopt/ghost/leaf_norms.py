"""Norms of every example's gradient, parameter by parameter, from the inputs and cotangents at the contacts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dpopt.common.trees import at_once
from dpopt.engines.norms import safe_norm
from dpopt.ghost import squares, term_sizes
from dpopt.ghost.chunks import in_chunks
from dpopt.ghost.contacts import (
    Formed,
    Recorded,
    Records,
    Seen,
    form,
    inner,
    is_sum,
    parts_of_one,
    with_terms,
)
from dpopt.ghost.joined import pulled_back
from dpopt.ghost.leaf_terms import Sizes, sizes_of_one, totals
from dpopt.ghost.methods import APART, EXPLICIT, GRAM, NO_CONTACT, PULLED_BACK, AtContact, Shared, standardized
from dpopt.ghost.plan import LeafPlan, connected
from dpopt.ghost.rules import Factors
from dpopt.ghost.run import Run
from dpopt.ghost.squares import Square, cancelled, cancelled_before, of_entries, shifted, tiny
from dpopt.ghost.values import Contact

Norms: TypeAlias = Float[Array, " batch *layers"]
# An upper bound on norms, and the same without what squares.py adds.
Bounds: TypeAlias = tuple[Norms, Norms]
SeenAt: TypeAlias = Mapping[Contact, Any]  # what was seen at a contact, or gradients that are kept in its place
_Tree = TypeVar("_Tree")
# Norms that take less memory are left to XLA, which computes several at a time.
_LARGE_BYTES = 1 << 18


class LeafNorms(NamedTuple):
    """Norms of ``S g + o`` per parameter, and the records that the sum is computed from."""

    upper: list[Norms]  # upper bounds
    lower: list[Norms]  # without what is added for squares that underflow (squares.py)
    records: dict[Contact, Recorded]
    diagonals: dict[int, Float[Array, ""]]  # for some parameters, an upper bound on entries of S at their contacts
    terms: dict[int, Norms]  # for the parameters of `Plan.quick`, the sum of the norms of the terms of ``S g``


def leaf_norms(run: Run, seen: SeenAt, known: Mapping[int, Bounds] | None = None) -> LeafNorms:
    """Norms of all parameters, except ``known`` ones, which are returned unchanged."""
    records: dict[Contact, Recorded] = {
        c: _kept(run, c, s) if isinstance(s, Seen) and c in run.plan.kept else _without_output(s)
        for c, s in seen.items()
    }
    found: list[Any] = [(known or {}).get(leaf) for leaf in range(len(run.leaves))]
    own = [p for p in run.plan.norms if p.method is not PULLED_BACK and found[p.leaf] is None]
    squared, last = _squares(run, [p for p in own if p.method is not NO_CONTACT], seen, records)
    largest_entries = [(p.leaf, squared[p.leaf].diagonal) for p in own if p.leaf in squared and not p.numbers]
    diagonals = {leaf: _scaled(run, leaf, jnp.sqrt(jnp.max(d))) for leaf, d in largest_entries if d is not None}
    quick = [p.leaf for p in own if not run.plan.quick.isdisjoint(p.contacts)]
    terms = {leaf: _scaled(run, leaf, jnp.sqrt(cast(Array, squared[leaf].terms))) for leaf in quick}
    for contacts, leaves in connected(run.plan.norms):
        squared |= zip(leaves, _pulled(run, contacts, leaves, records, last), strict=True)
    value, missing = ({leaf: square[i] for leaf, square in sorted(squared.items())} for i in range(2))
    upper, lower = at_once(lambda v, m: jnp.sqrt(v + m), value, missing), at_once(jnp.sqrt, value)
    for leaf_plan in run.plan.norms:
        leaf = leaf_plan.leaf
        if leaf_plan.method is NO_CONTACT:
            found[leaf] = found[leaf] or _without_contacts(run, leaf)
        elif leaf_plan.method is PULLED_BACK:
            found[leaf] = upper[leaf], lower[leaf]
        elif leaf in upper:
            found[leaf] = _affine(run, leaf_plan, (upper[leaf], lower[leaf]), squared[leaf].along, seen)
    # A loss may compute in fewer bits than its parameters have.
    upper, lower = ([b[i].astype(x.dtype) for b, x in zip(found, run.wide, strict=True)] for i in (0, 1))
    return LeafNorms(upper, lower, records, diagonals, terms)


def _kept(run: Run, contact: Contact, seen: Seen) -> Formed:
    # Inner products with an offset are computed from the factors, not from these gradients.
    several = jax.vmap(lambda seen: form(contact, seen, for_sum=not run.plan.shifted))
    seen = seen._replace(out=None)
    if contact.factors is None or contact.factors.shape[0] == 1:  # the input is read in place
        return Formed(several(seen))
    return Formed(in_chunks(several, seen, run.plan.batch_size, run.plan.chunk([contact])))


def _squares(
    run: Run, leaf_plans: Sequence[LeafPlan], seen: SeenAt, records: Records
) -> tuple[dict[int, Square], Array | None]:
    """`_square` for several parameters, and an array that is computed after those of large ones.

    A CPU forms the gradients, or squares the diagonal, of a large parameter once the norms of the one before it are
    known. XLA would do that for all of them first, and keep the results for their norms."""
    found: dict[int, Square] = {}
    last = None
    for p in leaf_plans:
        is_large = jax.default_backend() == "cpu" and run.plan.norm_bytes(p) > _LARGE_BYTES
        found[p.leaf] = _square(run, p, seen, records, last if is_large else None)
        last = found[p.leaf].value if is_large else last
    return found, last


def _after(before: Array | None, tree: _Tree) -> _Tree:
    """The arrays of a pytree, which are only read once ``before`` is computed."""
    return tree if before is None else lax.optimization_barrier((tree, before))[0]


def _square(run: Run, leaf_plan: LeafPlan, seen: SeenAt, records: Records, before: Array | None = None) -> Square:
    """The squared norms of ``S g`` for one parameter, or of g where S is a number. (Its square may be out of range.)

    ``before``: what is computed first."""
    leaf, contacts, method = leaf_plan.leaf, leaf_plan.contacts, leaf_plan.method
    if method is APART:
        return squares.added([_square(run, part, seen, records, before) for part in leaf_plan.parts])
    diagonal = None if run.scalar_scale(leaf) is not None else run.scales[leaf]
    if before is not None:
        diagonal, several = _after(before, (diagonal, [_written(seen[c]) for c in contacts]))
        seen = {c: seen[c]._replace(**written) for c, written in zip(contacts, several, strict=True)}
        records = {c: _without_output(seen[c]) if isinstance(records[c], Seen) else records[c] for c in contacts}
    if isinstance(method, Shared):
        return _shared(run, leaf_plan, method, diagonal, [seen[c] for c in contacts])
    if leaf_plan.standardized is None:
        one, rest, inputs = _direct(run, leaf_plan, diagonal, records)
    else:
        one, rest, inputs = _standardized(run, leaf_plan, diagonal, seen, records)
    # Kept gradients are squared in chunks, too: otherwise a CNN took 1.11 ordinary gradients instead of 1.03. A GPU,
    # which has no such cache, starts fewer kernels.
    chunk = run.plan.chunk(contacts) if method is EXPLICIT else run.plan.fitting(leaf_plan.bytes)
    if jax.default_backend() == "gpu" and run.plan.kept.issuperset(contacts):
        chunk = run.plan.batch_size
    found = in_chunks(jax.vmap(one), inputs, run.plan.batch_size, chunk)
    return jax.vmap(rest)(*found)  # for all examples, which share a diagonal


def _written(record: Recorded) -> dict[str, Array]:
    """What the backward pass computed of a record. (Inputs, which parameters may share, are left as they are.)"""
    return {"y": record.y} if isinstance(record, Seen) else {"gradient": record.gradient}


def _without_output(record: Recorded) -> Recorded:
    return record._replace(out=None) if isinstance(record, Seen) else record


def _without_contacts(run: Run, leaf: int) -> Bounds:
    zero = jnp.zeros(run.trace.leaves[leaf].shape, run.wide[leaf].dtype)
    norm = jnp.broadcast_to(safe_norm(run.affine(leaf, zero).reshape(-1), axis=0), (run.plan.batch_size,))
    return norm, norm


def _scaled(run: Run, leaf: int, norm: Norms) -> Norms:
    """The norm times S, if S is a number."""
    number = run.scalar_scale(leaf)
    return norm if number is None else norm * jnp.abs(number)


def _affine(run: Run, leaf_plan: LeafPlan, roots: Bounds, along: Norms | None, seen: SeenAt) -> Bounds:
    """The norms of ``S g + o`` from the roots of `_square`."""
    leaf, contacts = leaf_plan.leaf, leaf_plan.contacts
    scale, offset = run.scales[leaf], run.offsets[leaf]
    upper, lower = (_scaled(run, leaf, x) for x in roots)
    if leaf_plan.numbers:
        return _beside_numbers(run, leaf_plan, (upper, lower), along, seen)
    if offset is None:
        return upper, lower
    # |S g + o|^2 = |S g|^2 + 2 <g, S o> + |o|^2, and <g, S o> is a directional derivative.
    offset = jnp.broadcast_to(offset, run.trace.leaves[leaf].shape)
    direction = offset if scale is None else offset * scale
    mixed: Any = 0.0
    for c, v in zip(contacts, run.pull_back.push(leaf, direction, contacts), strict=True):
        mixed += jax.vmap(lambda x, y, c=c, v=v: inner(c, v, x, y))(seen[c].x, seen[c].y)
    return squares.with_offset(upper, lower, mixed, safe_norm(offset.reshape(-1), axis=0), run.trace.narrowest)


def _beside_numbers(run: Run, leaf_plan: LeafPlan, roots: Bounds, along: Norms | None, seen: SeenAt) -> Bounds:
    """The norms of ``S (g + y d)`` from those of ``S g``, for contacts with numbers whose cotangent is y.

    d is the gradient of the sum of these numbers, the same for all examples."""
    leaf, (contact, *_) = leaf_plan.leaf, leaf_plan.contacts
    fixed = run.of_numbers(leaf)  # S d
    y = seen[leaf_plan.numbers[0]].y.reshape(-1).astype(fixed.dtype)
    if along is None:
        direction = _direction(run, leaf_plan)
        along = jax.vmap(lambda x, y: inner(contact, direction, x, y))(seen[contact].x, seen[contact].y)
    offset = jnp.abs(y) * safe_norm(fixed.reshape(-1), axis=0)
    return squares.with_offset(*roots, y * along, offset, run.trace.narrowest)


def _direction(run: Run, leaf_plan: LeafPlan) -> Array:
    """The v at the first contact for which ``<G, v>`` is ``<S g, S d>``."""
    fixed, scale = run.of_numbers(leaf_plan.leaf), run.scales[leaf_plan.leaf]
    tangent = fixed if scale is None else fixed * scale
    return run.pull_back.push(leaf_plan.leaf, tangent, leaf_plan.contacts[:1])[0]


def _shared(run: Run, leaf_plan: LeafPlan, method: Shared, scale: Array | None, seen: Sequence[Seen]) -> Square:
    """The squared norms of a matrix that several contacts use."""
    contacts = leaf_plan.contacts
    scale = run.diagonal(leaf_plan.leaf, contacts[0], scale)
    scale = None if scale is None else jnp.squeeze(contacts[0].fold(scale), (0, 1))

    def one(seen: list[tuple[Array, Array]]) -> Square:
        xs, ys = zip(*seen, strict=True)
        return method.square(contacts, xs, ys, scale)._replace(terms=None)

    chunk = run.plan.fitting(leaf_plan.bytes)
    return in_chunks(jax.vmap(one), [(s.x, s.y) for s in seen], run.plan.batch_size, chunk)


Parts: TypeAlias = tuple[Callable[..., tuple[Square, Any]], Callable[..., Square], Any]
"""A function of one example, mapped in chunks; one from its result to the square, mapped at once; the inputs."""


def _direct(run: Run, leaf_plan: LeafPlan, scale: Array | None, records: Records) -> Parts:
    """For a weight whose entries each depend on one entry of the parameter."""
    leaf, contact, method = leaf_plan.leaf, leaf_plan.contacts[0], cast(AtContact, leaf_plan.method)
    diagonal, lost = run.diagonal(leaf, contact, scale), _lost(run, leaf, [contact])
    diagonal, is_quick = None if diagonal is None else contact.fold(diagonal), contact in run.plan.quick
    forms = leaf_plan.numbers and leaf_plan.method is EXPLICIT
    direction = contact.fold(_direction(run, leaf_plan)) if forms else None

    def one(record: Recorded) -> tuple[Square, term_sizes.Columns | None]:
        square, columns = parts_of_one(contact, method, record, diagonal, lost, is_quick, direction)
        return square if is_quick else square._replace(terms=None), columns

    def rest(square: Square, columns: term_sizes.Columns | None) -> Square:
        return with_terms(contact, square, columns, diagonal)

    return one, rest, records[contact]


def _standardized(run: Run, leaf_plan: LeafPlan, scale: Array | None, seen: SeenAt, records: Records) -> Parts:
    """For a weight whose filters are normalised."""
    (contact,) = leaf_plan.contacts
    factors, coefficients = cast(Factors, contact.factors), run.coefficients(leaf_plan.leaf)
    if leaf_plan.method is GRAM:

        def from_gram(f: Seen) -> tuple[Square, None]:
            square = standardized.from_gram(factors, f.x, f.y, cast(Array, f.out), coefficients)
            return square._replace(terms=None), None

        return from_gram, lambda square, columns: square, seen[contact]
    deviation, diagonal = factors.fold(coefficients.deviation), None if scale is None else factors.fold(scale)

    def explicit(record: Recorded) -> tuple[Square, term_sizes.Columns | None]:
        square = standardized.from_formed(form(contact, record), deviation, diagonal, coefficients)
        if isinstance(record, Seen) and is_sum(contact, record):
            return square, term_sizes.columns(factors, record.x, record.y)
        return square, None

    def rest(square: Square, columns: term_sizes.Columns | None) -> Square:
        if columns is None:
            return square
        terms = term_sizes.standardized_square(factors, columns, deviation, diagonal, coefficients)
        return cancelled_before(square, terms, contact.tap_dtype)

    return explicit, rest, records[contact]


def _pulled(
    run: Run, contacts: Sequence[Contact], leaves: Sequence[int], records: Records, before: Array | None
) -> list[Square]:
    """For gradients that are formed at their contacts and pulled back, a chunk of examples at a time."""
    pulled = pulled_back(run, contacts, leaves, records)

    def one(records: list[Recorded]) -> tuple[list[Square], Sizes]:
        gradients, formed = pulled(records)
        found = [of_entries(run.affine(i, g), lost) for i, g, lost in zip(leaves, gradients, losses, strict=True)]
        return found, sizes_of_one(gains, contacts, formed, records)

    def rest(found: list[Square], sizes: Sizes) -> list[Square]:
        several = zip(found, totals(gains, contacts, sizes), offsets, strict=True)
        return [shifted(s._replace(value=cancelled(s.value, total, narrow)), o, narrow) for s, total, o in several]

    gains, narrow = _after(before, run.gains(contacts, leaves)), run.trace.narrowest
    losses = [_lost(run, i, contacts) for i in leaves]
    offsets = [run.offset_norm(i) for i in leaves]
    found = in_chunks(jax.vmap(one), [records[c] for c in contacts], run.plan.batch_size, run.plan.chunk(contacts))
    return jax.vmap(rest)(*found)  # for all examples, which share the gains


def _lost(run: Run, leaf: int, contacts: Sequence[Contact]) -> Array | float:
    """How much an entry of ``S g`` may have lost to products that underflow when g is formed."""
    count = sum(1 if c.factors is None else c.factors.positions for c in contacts)
    most = run.largest[leaf]
    return count * tiny(run.trace.narrowest) * (1.0 if most is None else most)
