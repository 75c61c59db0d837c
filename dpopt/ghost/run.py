"""One batch through the plan: the passes with taps, the norms at the contacts, and the weighted sum.

Nothing here forms the gradients of single examples unless the plan says that it is cheap. Where a norm is not finite,
or not certain, they are formed one at a time (one_by_one.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from dpopt import _sums
from dpopt._norms import safe_norm
from dpopt.ghost import norms
from dpopt.ghost.chunks import in_chunks
from dpopt.ghost.contacts import along, combined, form, forming, inner, square_of_one, transposed, unfold
from dpopt.ghost.hooks import ClipHook, NormHook
from dpopt.ghost.plan import LeafPlan, Plan, is_direct, orientation
from dpopt.ghost.pullback import PullBack
from dpopt.ghost.rules import Factors
from dpopt.ghost.squares import Square, cancelled_before, largest, of_entries, shifted, size_behind, tiny
from dpopt.ghost.standardized import Standardized
from dpopt.ghost.values import Contact, Entry, wide_dtype


def _roots(square: Square) -> tuple[jax.Array, jax.Array]:
    """Upper and lower bounds on a norm."""
    return jnp.sqrt(square.value + square.missing), jnp.sqrt(square.value)


class Run:
    """One batch: the plan together with the arrays it is run on."""

    def __init__(self, plan: Plan, leaves: list, scales: list, offsets: list):
        self.plan, self.trace, self.leaves = plan, plan.trace, leaves
        # Of a table S multiplies what is looked up in it: no pass over the whole table is needed.
        # (Not in two passes: the second adds up gradients that are not scaled yet.)
        self.row_scales = {i: s for i, s in enumerate(scales) if s is not None and s.size > 1 and self._is_table(i)}
        self.scales = [None if i in self.row_scales else s for i, s in enumerate(scales)]
        self.offsets = offsets
        self.wide = [x.astype(wide_dtype(x.dtype)) if v.leaves else x
                     for x, v in zip(leaves, self.trace.leaves, strict=True)]  # fmt: skip
        self.pull_back = PullBack(self.trace, self.wide)

    def passes(
        self,
        batch: Sequence[jax.Array],
        hooks: Mapping[Contact, NormHook | ClipHook] | None = None,
        mask: jax.Array | None = None,
    ):
        """Losses, aux, and per contact the recorded (input x, output) and the tap's cotangent y, all [B, ...].

        Cotangents of rows of a table come scaled. At contacts with hooks (hooks.py) nothing is recorded: of those the
        cotangent is the hook's."""
        static, hooks = self.trace.run_prologue(self.leaves), dict(hooks or {})
        keep = jnp.ones(self.plan.batch_size) if mask is None else jnp.where(mask, 1.0, 0.0)
        contacts = [c for c in self.trace.contacts if c not in hooks]
        tapped = [c for c in contacts if not c.shares]

        def one(example, keep):
            def loss(taps, asked):
                given = dict(zip(tapped, taps, strict=True))
                given |= {c: h.asking(a, keep) for (c, h), a in zip(hooks.items(), asked, strict=True)}
                value, aux, recorded = self.trace.run_body(static, example, given)
                return value, (aux, [recorded[c.index] for c in contacts])

            taps = [jnp.zeros(c.tap_shape, c.tap_dtype) for c in tapped], [h.asked for h in hooks.values()]
            (value, (aux, recorded)), cotangents = jax.value_and_grad(loss, (0, 1), has_aux=True)(*taps)
            return value, aux, recorded, cotangents

        out_axes = 0, 0, 0, (0, [h.asked_axes for h in hooks.values()])
        losses, aux, recorded, (cotangents, asked) = jax.vmap(one, out_axes=out_axes)(batch, keep)
        own = dict(zip(tapped, cotangents, strict=True))
        xs, outs = ({c: r[i] for c, r in zip(contacts, recorded, strict=True)} for i in (0, 1))
        ys = {c: self._with_row_scale(c, xs[c], own[c.shares or c]) for c in contacts}
        return losses, aux, xs, ys | dict(zip(hooks, asked, strict=True)), outs

    def _is_table(self, leaf: int) -> bool:
        contacts = self.plan.leaves[leaf].contacts
        return not self.plan.streamed and all(
            is_direct(k) and cast(Entry, k.weight.entry).copy and k.factors and k.factors.one_hot for k in contacts
        )

    def _with_row_scale(self, contact: Contact, x: jax.Array, y: jax.Array) -> jax.Array:
        leaves = contact.weight.leaves & self.row_scales.keys()
        if not leaves:
            return y
        (leaf,) = leaves
        table = jnp.broadcast_to(self.row_scales[leaf], self.wide[leaf].shape).astype(self.wide[leaf].dtype)
        diagonal = self.pull_back.push(leaf, table, [contact])[0]
        return y * jax.vmap(lambda row: along(contact, diagonal, row))(x)

    def norms(
        self, xs: dict, ys: dict, outs: dict, known: Mapping[int, tuple[jax.Array, jax.Array]] | None = None
    ) -> tuple[list[jax.Array], list[jax.Array], dict[Contact, Any]]:
        """Per-example norms of ``S g + o`` per parameter, no smaller than they are; the same without what is added for
        squares that vanished (squares.py); and the gradients that were kept. ``known`` norms are taken as they are."""
        kept = {c: self._kept(c, xs[c], ys[c]) for c in self.plan.kept if c in xs}
        known = known or {}
        found: list[Any] = [known.get(leaf) for leaf in range(len(self.leaves))]
        for leaf_plan in self.plan.leaves:
            if leaf_plan.method != "pulled_back" and leaf_plan.leaf not in known:
                found[leaf_plan.leaf] = self._norm(leaf_plan, xs, ys, outs, kept)
        for contacts, leaves in self.plan.pulled_back:
            for leaf, square in zip(leaves, self._pulled(contacts, leaves, xs, ys, kept), strict=True):
                found[leaf] = _roots(square)
        upper, lower = ([bounds[i] for bounds in found] for i in (0, 1))
        return upper, lower, kept

    def _kept(self, contact: Contact, x: jax.Array, y: jax.Array) -> Any:
        several = jax.vmap(lambda inputs: form(contact, *inputs))
        if contact.factors is None or contact.factors.shape[0] == 1:  # the input is read as it lies
            return several((x, y))
        return in_chunks(several, (x, y), self.plan.batch_size, self.plan.chunk([contact]))

    def _pulled(self, contacts, leaves, xs, ys, kept) -> list[Square]:
        """Squared norms of gradients formed at their contacts and pulled back, some examples at a time."""

        def one(inputs):
            formed = [unfold(c, f if c in kept else form(c, *f)) for c, f in zip(contacts, inputs, strict=True)]
            gradients = self.pull_back(contacts, formed, leaves)
            found = [of_entries(self.affine(i, g), lost) for i, g, lost in zip(leaves, gradients, losses, strict=True)]
            totals = self.roundings(gains, contacts, formed, inputs, kept)
            found = [cancelled_before(square, total) for square, total in zip(found, totals, strict=True)]
            return [shifted(square, o) for square, o in zip(found, offsets, strict=True)]

        gains = self.gains(contacts, leaves)
        losses = [self._lost(i, contacts) for i in leaves]
        offsets = [0.0 if o is None else safe_norm(o.reshape(-1), axis=0) for o in (self.offsets[i] for i in leaves)]

        inputs = [kept[c] if c in kept else (xs[c], ys[c]) for c in contacts]
        return in_chunks(jax.vmap(one), inputs, self.plan.batch_size, self.plan.chunk(contacts))

    def affine(self, leaf: int, gradient: jax.Array) -> jax.Array:
        """``S g + o`` for one parameter and one gradient."""
        scale, offset = self.scales[leaf], self.offsets[leaf]
        gradient = gradient if scale is None else gradient * scale
        return gradient if offset is None else gradient + offset

    def gains(self, contacts: Sequence[Contact], leaves: Sequence[int]) -> list[dict[int, jax.Array | None]]:
        """Per parameter and contact of its own: how much entries of the contact's gradient count in ``S g``, about.

        None: as they are."""

        def of_leaf(leaf):
            own = {i: c for i, c in enumerate(contacts) if leaf in c.weight.leaves}
            copies = all(is_direct(c) and cast(Entry, c.weight.entry).copy for c in own.values())
            if copies and self.scales[leaf] is None:
                return dict.fromkeys(own)
            return dict(zip(own, self.pull_back.gains(leaf, self.scales[leaf], list(own.values())), strict=True))

        return [of_leaf(leaf) for leaf in leaves]

    def roundings(self, gains: list, contacts: Sequence[Contact], formed: list, recorded: list, kept: dict) -> list:
        """Per parameter, how large the terms are that one example's ``S g`` was added up from.

        Args:
            gains: from `gains`.
            formed: its gradients at the contacts.
            recorded: what they were formed from.
            kept: the contacts with kept gradients.
        """

        def added_up(contact):  # what is kept, or has one position, is added up over examples as it is
            return contact not in kept and contact.factors is not None and contact.factors.positions > 1

        def total(contact, rows):
            x, y = rows
            factors, right = contact.factors, safe_norm(y.reshape(-1), axis=0)
            if factors.one_hot:
                return factors.positions**0.5 * right
            return factors.shape[0] ** 0.5 * safe_norm(x.reshape(-1), axis=0) * right

        totals = {i: total(c, r) for i, (c, r) in enumerate(zip(contacts, recorded, strict=True)) if added_up(c)}
        formed = [jnp.abs(g) for g in formed]
        sizes = [safe_norm(g.reshape(-1), axis=0) for g in formed]

        def behind(i, gain):
            if gain is None:
                return totals.get(i, sizes[i])
            mapped = safe_norm((gain * formed[i]).reshape(-1), axis=0)
            if i not in totals:
                return mapped
            typical = safe_norm(gain.reshape(-1), axis=0) / max(gain.size, 1) ** 0.5
            return size_behind(mapped, sizes[i], totals[i], typical)

        return [functools.reduce(jnp.hypot, (behind(*of) for of in own.items()), jnp.zeros(())) for own in gains]

    def _lost(self, leaf: int, contacts: Sequence[Contact]) -> jax.Array | float:
        """What an entry of ``S g`` may have lost to products that vanish when g is formed."""
        terms = sum(1 if c.factors is None else c.factors.positions for c in contacts)
        scale = self.scales[leaf]
        return terms * tiny(self.wide[leaf].dtype) * (1.0 if scale is None else largest(scale))

    def _norm(self, leaf_plan: LeafPlan, xs, ys, outs, kept) -> tuple[jax.Array, jax.Array]:
        """Upper and lower bounds on the norms of ``S g + o`` for one parameter, per example."""
        leaf, contacts, method = leaf_plan.leaf, leaf_plan.contacts, leaf_plan.method
        scale, offset = self.scales[leaf], self.offsets[leaf]
        shape = self.trace.leaves[leaf].shape
        number = self.number(leaf)
        if method == "none":
            zero = jnp.zeros(shape, self.wide[leaf].dtype)
            alone = jnp.broadcast_to(safe_norm(self.affine(leaf, zero).reshape(-1), axis=0), (self.plan.batch_size,))
            return alone, alone
        if method == "shared_gram":
            base = orientation(contacts[0])
            turned = [orientation(c) != base for c in contacts]

            def shared(xs, ys):
                uses = zip([cast(Factors, c.factors) for c in contacts], turned, xs, ys, strict=True)
                return norms.shared_gram(list(uses))

            square = jax.vmap(shared)([xs[c] for c in contacts], [ys[c] for c in contacts])
        else:
            diagonal = None if number is not None else scale
            if leaf_plan.standardized is not None:
                one, inputs = self._standardized(leaf_plan, diagonal, xs, ys, outs, kept)
            else:
                one, inputs = self._direct(leaf_plan, diagonal, xs, ys, kept)
            # Kept gradients too are squared in chunks: whole, a CNN took 1.11 ordinary gradients instead of 1.03.
            chunk = self.plan.chunk(contacts) if method == "explicit" else self.plan.fitting(leaf_plan.bytes)
            square = in_chunks(jax.vmap(one), inputs, self.plan.batch_size, chunk)
        upper, lower = _roots(square)
        if number is not None:  # its square may be out of range
            upper, lower = (x * jnp.abs(number) for x in (upper, lower))
        if offset is None:
            return upper, lower
        # |S g + o|^2 = |S g|^2 + 2 <g, S o> + |o|^2, and <g, S o> is a directional derivative.
        offset = jnp.broadcast_to(offset, shape)
        direction = offset if scale is None else offset * scale
        mixed: Any = 0.0
        for c, v in zip(contacts, self.pull_back.push(leaf, direction, contacts), strict=True):
            mixed += jax.vmap(lambda x, y, c=c, v=v: inner(c, v, x, y))(xs[c], ys[c])
        return norms.with_offset(upper, lower, mixed, safe_norm(offset.reshape(-1), axis=0))

    def _direct(self, leaf_plan: LeafPlan, scale: jax.Array | None, xs, ys, kept) -> tuple[Callable, Any]:
        """One example's squared norm, and what it is a function of, where the weight's entries stay apart."""
        leaf, (contact,) = leaf_plan.leaf, leaf_plan.contacts
        diagonal, lost = self.diagonal(leaf, contact, scale), self._lost(leaf, [contact])
        if contact not in kept:
            inputs = xs[contact], ys[contact]
            return lambda f: square_of_one(contact, leaf_plan.method, f[0], f[1], diagonal, lost), inputs
        if diagonal is not None and contact.factors is not None:
            diagonal = contact.factors.fold(diagonal)
        return lambda formed: of_entries(formed if diagonal is None else formed * diagonal, lost), kept[contact]

    def number(self, leaf: int) -> jax.Array | None:
        """The diagonal of a parameter, if it is a mere number."""
        scale = self.scales[leaf]
        return scale.reshape(()) if scale is not None and scale.size == 1 else None

    def diagonal(self, leaf: int, contact: Contact, scale: jax.Array | None) -> jax.Array | None:
        """What multiplies the gradient at a contact, like its weight, where the weight's entries stay apart."""
        if scale is None and cast(Entry, contact.weight.entry).copy:
            return None
        tangent = jnp.ones(self.trace.leaves[leaf].shape, self.wide[leaf].dtype)
        return self.pull_back.push(leaf, tangent if scale is None else tangent * scale, [contact])[0]

    def _standardized(self, leaf_plan: LeafPlan, scale: jax.Array | None, xs, ys, outs, kept) -> tuple[Callable, Any]:
        """The same, where filters are normalised on the way to the contact."""
        (contact,), found = leaf_plan.contacts, cast(Standardized, leaf_plan.standardized)
        factors, coefficients = cast(Factors, contact.factors), found.coefficients(self.wide[leaf_plan.leaf])
        if leaf_plan.method == "gram":
            inputs = xs[contact], ys[contact], outs[contact]
            return lambda f: norms.standardized_gram(factors, f[0], f[1], f[2], coefficients), inputs
        deviation, diagonal = factors.fold(coefficients.deviation), None if scale is None else factors.fold(scale)
        one, inputs = forming(contact, xs, ys, kept)

        def square(f):
            terms = None if contact in kept else norms.mass(factors, *f)
            return norms.standardized_explicit(one(f), deviation, diagonal, coefficients, terms)

        return square, inputs

    def recorded(self, xs: dict, ys: dict, kept: dict, leaves: Sequence[int] | None = None) -> list:
        """What sums are computed from: at each contact (of some ``leaves``) kept gradients, or input and cotangent."""
        return [kept[k] if k in kept else (xs[k], ys[k]) for k in self.contacts_of(leaves)]

    def weighted_sum(self, weights: list, recorded: list, kept: dict, leaves: Sequence[int] | None = None) -> _sums.Sum:
        """``sum_i c_i (S g_i + o)`` per parameter (of some ``leaves``); ``weights`` holds c, zero for examples that do
        not count."""
        leaves = range(len(self.leaves)) if leaves is None else leaves
        distinct = {id(c): c for c in weights}

        def one_group(rows):
            weights_of = dict(zip(distinct, rows[0], strict=True))
            recorded = dict(zip(self.contacts_of(leaves), rows[1], strict=True))
            return self._group(dict(zip(leaves, [weights_of[id(c)] for c in weights], strict=True)), recorded, kept)

        return _sums.over_examples(one_group, (list(distinct.values()), recorded))

    def _group(self, weights: dict[int, jax.Array], recorded: dict, kept: dict) -> list[jax.Array]:
        """The weighted sum of so few examples that float32 adds them up closely enough, block by block."""

        def added(contact, group):
            if contact in kept:
                rows = recorded[contact], distinct[group]
                return _sums.in_blocks(lambda rows: combined(contact, *rows), rows)
            return _sums.in_blocks(lambda rows: transposed(contact, *rows), (*recorded[contact], distinct[group]))

        distinct = list({id(c): c for c in weights.values()}.values())
        groups = {leaf: next(i for i, d in enumerate(distinct) if d is c) for leaf, c in weights.items()}
        return self.pulled_to_leaves(groups, distinct, added)

    def pulled_to_leaves(self, groups: dict[int, int], coefficients: Sequence[jax.Array], added: Callable) -> list:
        """``sum_i c_i (S g_i + o)`` per parameter, from sums at the contacts.

        Args:
            groups: of each parameter, which of ``coefficients``, ``[B]`` each, is its own.
            added: ``added(contact, group)`` is the contact's ``sum_i c_i G_i``.
        """
        totals: dict[int, Any] = dict.fromkeys(groups)
        for group, c in enumerate(coefficients):
            members = [leaf for leaf, g in groups.items() if g == group]
            mine = self.contacts_of(members)
            cotangents = [added(k, group) for k in mine]
            for leaf, g in zip(members, self.pull_back(mine, cotangents, members), strict=True):
                scale, offset = self.scales[leaf], self.offsets[leaf]
                g = g if scale is None else g * scale
                totals[leaf] = g if offset is None else g + jnp.sum(c) * offset
                totals[leaf] = totals[leaf].astype(self.wide[leaf].dtype)
        return list(totals.values())

    def pulled_to_leaf(self, contact: Contact, total: jax.Array) -> jax.Array:
        """``S sum_i c_i g_i`` of a parameter with one contact, from the sum there."""
        (leaf,) = contact.weight.leaves
        (g,) = self.pull_back([contact], [total], [leaf])
        return self.affine(leaf, g).astype(self.wide[leaf].dtype)

    def contacts_of(self, leaves: Sequence[int] | None) -> list[Contact]:
        """The contacts that some parameters (None: any) take part in."""
        return [k for k in self.trace.contacts if leaves is None or k.weight.leaves & set(leaves)]
