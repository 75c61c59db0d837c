"""One batch through the plan: the passes with taps, and what norms and sums ask about parameters.

Nothing here forms the gradients of single examples unless the plan says that it is cheap. Where a norm is not finite,
or not certain, they are formed one at a time (one_by_one.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp

from dpopt.ghost.contacts import Seen, along
from dpopt.ghost.hooks import ClipHook, EitherHook
from dpopt.ghost.plan import Plan, is_direct
from dpopt.ghost.pullback import PullBack
from dpopt.ghost.values import Contact, Entry, Record, wide_dtype


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
        hooks: Mapping[Contact, EitherHook | ClipHook] | None = None,
        mask: jax.Array | None = None,
        coefficients: Sequence[jax.Array] = (),
    ):
        """Losses, aux, what was seen at each contact, all ``[B, ...]``, and what each hook was given.

        Cotangents of rows of a table come scaled. At contacts with hooks (hooks.py) nothing is seen."""
        static, hooks = self.trace.run_prologue(self.leaves), dict(hooks or {})
        keep = jnp.ones(self.plan.batch_size) if mask is None else jnp.where(mask, 1.0, 0.0)
        contacts = [c for c in self.trace.contacts if c not in hooks]
        tapped = [c for c in contacts if not c.shares]

        def one(example, keep, coefficients):
            def loss(taps, asked):
                given = dict(zip(tapped, taps, strict=True))
                given |= {c: h.asking(a, keep, coefficients) for (c, h), a in zip(hooks.items(), asked, strict=True)}
                value, aux, recorded = self.trace.run_body(static, example, given, Record(self.plan.outputs))
                return value, (aux, [recorded[c.index] for c in contacts])

            taps = [jnp.zeros(c.tap_shape, c.tap_dtype) for c in tapped], [h.asked for h in hooks.values()]
            (value, (aux, recorded)), cotangents = jax.value_and_grad(loss, (0, 1), has_aux=True)(*taps)
            return value, aux, recorded, cotangents

        out_axes = 0, 0, 0, (0, [h.asked_axes for h in hooks.values()])
        losses, aux, recorded, (cotangents, asked) = jax.vmap(one, out_axes=out_axes)(batch, keep, list(coefficients))
        own = dict(zip(tapped, cotangents, strict=True))
        seen = {
            c: Seen(x, self._with_row_scale(c, x, own[c.shares or c]), out)
            for c, (x, out) in zip(contacts, recorded, strict=True)
        }
        return losses, aux, seen, dict(zip(hooks, asked, strict=True))

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

    def affine(self, leaf: int, gradient: jax.Array) -> jax.Array:
        """``S g + o`` for one parameter and one gradient."""
        scale, offset = self.scales[leaf], self.offsets[leaf]
        gradient = gradient if scale is None else gradient * scale
        return gradient if offset is None else gradient + offset

    def gains(self, contacts: Sequence[Contact], leaves: Sequence[int]) -> list[dict[int, jax.Array | None]]:
        """Per parameter and contact of its own: how much entries of the contact's gradient count in ``S g``.

        None: as they are. About, where the contact's weight mixes entries."""

        def of_leaf(leaf) -> dict[int, jax.Array | None]:
            own, scale = {i: c for i, c in enumerate(contacts) if leaf in c.weight.leaves}, self.scales[leaf]
            if all(is_direct(c) for c in own.values()):
                diagonals = {i: self.diagonal(leaf, c, scale) for i, c in own.items()}
                return {i: None if d is None else jnp.abs(d) for i, d in diagonals.items()}
            found: list[jax.Array | None] = [*self.pull_back.gains(leaf, scale, list(own.values()))]
            return dict(zip(own, found, strict=True))

        return [of_leaf(leaf) for leaf in leaves]

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

    def contacts_of(self, leaves: Sequence[int] | None) -> list[Contact]:
        """The contacts that some parameters (None: any) take part in."""
        return [k for k in self.trace.contacts if leaves is None or k.weight.leaves & set(leaves)]
