"""One batch through the plan: the passes with taps, the norms at the contacts, and the weighted sum.

Nothing here forms the gradients of single examples unless the plan says that it is cheap, or some norm is not finite:
then they are formed one at a time from what the passes recorded (`Run.one_by_one`), which is slow and rare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from dpopt import _sums
from dpopt._norms import safe_norm
from dpopt.ghost import norms
from dpopt.ghost.chunks import in_chunks, join_rows, split_rows
from dpopt.ghost.contacts import along, combined, form, forming, inner, transposed, unfold
from dpopt.ghost.plan import LeafPlan, Plan, is_direct, orientation
from dpopt.ghost.rules import Factors
from dpopt.ghost.squares import Square, cancelled_before, largest, of_entries, shifted, sum_squares, tiny
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
        self.row_scales = {i: s for i, s in enumerate(scales) if s is not None and s.size > 1 and self._is_table(i)}
        self.scales = [None if i in self.row_scales else s for i, s in enumerate(scales)]
        self.offsets = offsets
        self.wide = [x.astype(wide_dtype(x.dtype)) if v.leaves else x
                     for x, v in zip(leaves, self.trace.leaves, strict=True)]  # fmt: skip

    def passes(self, batch: Sequence[jax.Array]):
        """Losses, aux, and per contact the recorded (input x, output) and the tap's cotangent y, all [B, ...].

        Cotangents of rows of a table come scaled."""
        static, contacts = self.trace.run_prologue(self.leaves), self.trace.contacts
        tapped = [c for c in contacts if not c.shares]

        def one(example):
            def loss(taps):
                value, aux, recorded = self.trace.run_body(static, example, dict(zip(tapped, taps, strict=True)))
                return value, (aux, recorded)

            taps = [jnp.zeros(c.tap_shape, c.tap_dtype) for c in tapped]
            (value, (aux, recorded)), cotangents = jax.value_and_grad(loss, has_aux=True)(taps)
            return value, aux, recorded, cotangents

        losses, aux, recorded, cotangents = jax.vmap(one, axis_size=self.plan.batch_size)(batch)
        own = dict(zip(tapped, cotangents, strict=True))
        xs, outs = ({c: r[i] for c, r in zip(contacts, recorded, strict=True)} for i in (0, 1))
        ys = {c: own[c.shares or c] for c in contacts}
        return losses, aux, xs, {c: self._with_row_scale(c, xs[c], y) for c, y in ys.items()}, outs

    def _is_table(self, leaf: int) -> bool:
        contacts = self.plan.leaves[leaf].contacts
        return all(
            is_direct(k) and cast(Entry, k.weight.entry).copy and k.factors and k.factors.one_hot for k in contacts
        )

    def _with_row_scale(self, contact: Contact, x: jax.Array, y: jax.Array) -> jax.Array:
        leaves = contact.weight.leaves & self.row_scales.keys()
        if not leaves:
            return y
        (leaf,) = leaves
        table = jnp.broadcast_to(self.row_scales[leaf], self.wide[leaf].shape).astype(self.wide[leaf].dtype)
        diagonal = self._push(leaf, table, [contact])[0]
        return y * jax.vmap(lambda row: along(contact, diagonal, row))(x)

    def norms(self, xs: dict, ys: dict, outs: dict) -> tuple[list[jax.Array], list[jax.Array], dict[Contact, Any]]:
        """Per-example norms of ``S g + o`` per parameter, no smaller than they are; the same without what is added for
        squares that vanished (squares.py); and the gradients that were kept."""
        kept = {c: self._kept(c, xs[c], ys[c]) for c in self.plan.kept}
        found: list[Any] = [None] * len(self.leaves)
        for leaf_plan in self.plan.leaves:
            if leaf_plan.method != "pulled_back":
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
            gradients = self._pull_back(contacts, formed, leaves)
            found = [of_entries(self._affine(i, g), lost) for i, g, lost in zip(leaves, gradients, losses, strict=True)]
            # What is kept, or has one position, is added up over examples as it is.
            sums = [i for i, c in enumerate(contacts) if c not in kept and c.factors and c.factors.positions > 1]
            if sums:
                size = sum((sum_squares(g) for g in formed), jnp.zeros(()))
                total = sum((norms.mass(cast(Factors, contacts[i].factors), *inputs[i]) for i in sums), jnp.zeros(()))
                found = [cancelled_before(square, size, total) for square in found]
            return [shifted(square, o) for square, o in zip(found, offsets, strict=True)]

        losses = [self._lost(i, contacts) for i in leaves]
        offsets = [0.0 if o is None else safe_norm(o.reshape(-1), axis=0) for o in (self.offsets[i] for i in leaves)]

        inputs = [kept[c] if c in kept else (xs[c], ys[c]) for c in contacts]
        return in_chunks(jax.vmap(one), inputs, self.plan.batch_size, self.plan.chunk(contacts))

    def _affine(self, leaf: int, gradient: jax.Array) -> jax.Array:
        """``S g + o`` for one parameter and one gradient."""
        scale, offset = self.scales[leaf], self.offsets[leaf]
        gradient = gradient if scale is None else gradient * scale
        return gradient if offset is None else gradient + offset

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
        number = scale if scale is not None and scale.size == 1 else None
        if method == "none":
            zero = jnp.zeros(shape, self.wide[leaf].dtype)
            alone = jnp.broadcast_to(safe_norm(self._affine(leaf, zero).reshape(-1), axis=0), (self.plan.batch_size,))
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
            upper, lower = (x * jnp.abs(number.reshape(())) for x in (upper, lower))
        if offset is None:
            return upper, lower
        # |S g + o|^2 = |S g|^2 + 2 <g, S o> + |o|^2, and <g, S o> is a directional derivative.
        offset = jnp.broadcast_to(offset, shape)
        direction = offset if scale is None else offset * scale
        mixed: Any = 0.0
        for c, v in zip(contacts, self._push(leaf, direction, contacts), strict=True):
            mixed += jax.vmap(lambda x, y, c=c, v=v: inner(c, v, x, y))(xs[c], ys[c])
        return norms.with_offset(upper, lower, mixed, safe_norm(offset.reshape(-1), axis=0))

    def _direct(self, leaf_plan: LeafPlan, scale: jax.Array | None, xs, ys, kept) -> tuple[Callable, Any]:
        """One example's squared norm, and what it is a function of, where the weight's entries stay apart."""
        leaf, (contact,), factors = leaf_plan.leaf, leaf_plan.contacts, leaf_plan.contacts[0].factors
        diagonal = None
        if scale is not None or not cast(Entry, contact.weight.entry).copy:
            tangent = jnp.ones(self.trace.leaves[leaf].shape, self.wide[leaf].dtype)
            tangent = tangent if scale is None else tangent * scale
            diagonal = self._push(leaf, tangent, [contact])[0]
            diagonal = diagonal if factors is None else factors.fold(diagonal)
        if leaf_plan.method != "explicit":
            return lambda f: norms.square(leaf_plan.method, cast(Factors, factors), f[0], f[1], diagonal), (
                xs[contact],
                ys[contact],
            )

        one, inputs = forming(contact, xs, ys, kept)
        lost = self._lost(leaf, [contact])

        def square(f):
            found = of_entries(one(f) if diagonal is None else one(f) * diagonal, lost)
            if contact in kept or factors is None or factors.positions == 1:
                return found
            return cancelled_before(
                found, found.value if diagonal is None else sum_squares(one(f)), norms.mass(factors, *f)
            )

        return square, inputs

    def _standardized(self, leaf_plan: LeafPlan, scale: jax.Array | None, xs, ys, outs, kept) -> tuple[Callable, Any]:
        """The same, where filters are normalised on the way to the contact."""
        (contact,), found = leaf_plan.contacts, cast(Standardized, leaf_plan.standardized)
        factors, coefficients = cast(Factors, contact.factors), found.coefficients(self.wide[leaf_plan.leaf])
        if leaf_plan.method == "gram":
            inputs = xs[contact], ys[contact], outs[contact]
            return lambda f: norms.standardized_gram(factors, f[0], f[1], f[2], coefficients), inputs
        deviation, diagonal = factors.fold(coefficients.deviation), None if scale is None else factors.fold(scale)
        one, inputs = forming(contact, xs, ys, kept)
        return lambda f: norms.standardized_explicit(one(f), deviation, diagonal, coefficients), inputs

    def weighted_sum(self, weights: list, xs: dict, ys: dict, kept: dict) -> _sums.Sum:
        """``sum_i c_i (S g_i + o)`` per parameter; ``weights`` holds c, zero for masked examples."""
        distinct = {id(c): c for c in weights}
        read = [kept[k] if k in kept else (xs[k], ys[k]) for k in self.trace.contacts]

        def one_group(rows):
            weights_of = dict(zip(distinct, rows[0], strict=True))
            recorded = dict(zip(self.trace.contacts, rows[1], strict=True))
            return self._group([weights_of[id(c)] for c in weights], recorded, kept)

        return _sums.over_examples(one_group, (list(distinct.values()), read))

    def _group(self, weights: list, recorded: dict, kept: dict) -> list[jax.Array]:
        """The weighted sum of so few examples that float32 adds them up closely enough, block by block."""
        totals: list = [None] * len(weights)
        groups: dict[int, list[int]] = {}
        for leaf, c in enumerate(weights):
            groups.setdefault(id(c), []).append(leaf)
        for members in groups.values():
            c = weights[members[0]]
            mine = [k for k in self.trace.contacts if k.weight.leaves & set(members)]

            def added(k, c=c):
                if k in kept:
                    return _sums.in_blocks(lambda rows: combined(k, *rows), (recorded[k], c))
                return _sums.in_blocks(lambda rows: transposed(k, *rows), (*recorded[k], c))

            cotangents = [added(k) for k in mine]
            for leaf, g in zip(members, self._pull_back(mine, cotangents, members), strict=True):
                scale, offset = self.scales[leaf], self.offsets[leaf]
                g = g if scale is None else g * scale
                totals[leaf] = g if offset is None else g + jnp.sum(c) * offset
                totals[leaf] = totals[leaf].astype(self.wide[leaf].dtype)
        return totals

    def one_by_one(
        self,
        weigh: Callable,
        mask: jax.Array,
        certain: tuple[jax.Array, list[jax.Array]],
        xs: dict,
        ys: dict,
        kept: dict,
        in_pairs: bool,
    ) -> tuple[_sums.Sum, list[jax.Array], jax.Array]:
        """Sum, norms and which examples counted, from gradients formed one at a time.

        ``certain``: which rows' norms are known, and these norms.

        Tells a gradient that is not finite (contributes zero) from one whose squares overflow (clipped as usual: its
        norm is taken relative to its largest entry). Two sweeps of one loop, the first for the norms and the second
        for the sum, so that it is compiled once. As many examples as there are devices go together, so that each
        device visits its own share of a sharded batch. The sum comes with a remainder if ``in_pairs``.
        """
        contacts = self.trace.contacts
        together = math.gcd(self.plan.batch_size, jax.device_count())
        zeros = [jnp.zeros(x.shape, x.dtype) for x in self.wide]

        def gradient(recorded):
            batches_of_one = jax.tree.map(lambda x: x[None], recorded)
            # The primitives transposed: few operations, hence quick to compile.
            formed = [
                unfold(c, r) if c in kept else transposed(c, alone[0], alone[1], jnp.ones(1))
                for c, r, alone in zip(contacts, recorded, batches_of_one, strict=True)
            ]
            return [self._affine(i, g) for i, g in enumerate(self._pull_back(contacts, formed, range(len(zeros))))]

        def add(total, recorded, weights, keep, certain):
            g, (is_certain, known) = gradient(recorded), certain
            leaf_norms = [safe_norm(x.reshape(-1), axis=0) for x in g]
            keep &= jnp.all(jnp.isfinite(jnp.stack(leaf_norms)))
            leaf_norms = [jnp.where(is_certain, n, own) for n, own in zip(known, leaf_norms, strict=True)]
            mine = [jnp.where(keep, x * c, 0) for x, c in zip(g, weights, strict=True)]
            return _sums.add(total, _sums.Sum(mine)), (leaf_norms, keep)

        def add_several(total, inputs):
            parts, seen = jax.vmap(lambda rows: add(_sums.Sum(zeros), *rows))(inputs)
            return _sums.add(total, _sums.fold(parts, 1)), seen

        recorded = [kept[c] if c in kept else (xs[c], ys[c]) for c in contacts]

        def sweep(state, _):
            inputs = (recorded, weigh(state[1]), mask, certain)
            nothing = _sums.zero(zeros, together, self.plan.batch_size // together)
            if together == 1:
                total, seen = lax.scan(lambda total, rows: add(total, *rows), nothing, inputs)
            else:
                total, seen = lax.scan(add_several, nothing, jax.tree.map(lambda x: split_rows(x, together), inputs))
                seen = jax.tree.map(join_rows, seen)
            return (_sums.Sum(total.value, total.remainder if in_pairs else None), *seen), None

        start = (
            _sums.Sum(zeros, zeros if in_pairs else None),
            [jnp.zeros(mask.shape, x.dtype) for x in self.wide],
            mask,
        )
        return lax.scan(sweep, start, length=2)[0]

    def _weights(self, contacts: Sequence[Contact], leaves: Sequence[int]) -> Callable:
        """The contacts' weights as a function of some of the parameters."""

        def function(chosen):
            wide = list(self.wide)
            for leaf, x in zip(leaves, chosen, strict=True):
                wide[leaf] = x
            env = self.trace.run_prologue(wide, wide=True)
            return [env[c.weight] for c in contacts]

        return function

    def _pull_back(self, contacts: Sequence[Contact], cotangents: list, leaves: Sequence[int]) -> list:
        """Gradients with respect to the contacts' weights, taken to the parameters."""
        function = self._weights(contacts, leaves)
        values, pull = jax.vjp(function, [self.wide[i] for i in leaves])
        return pull([g.astype(v.dtype) for g, v in zip(cotangents, values, strict=True)])[0]

    def _push(self, leaf: int, tangent: jax.Array, contacts: Sequence[Contact]) -> list[jax.Array]:
        function = self._weights(contacts, [leaf])
        return jax.jvp(function, ([self.wide[leaf]],), ([tangent],))[1]
