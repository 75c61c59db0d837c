"""One batch run through a plan: the passes with taps, and what norms and sums need of each parameter."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp

from dpopt.common.trees import accumulator_dtype
from dpopt.common.types import PyTree
from dpopt.engines.norms import safe_norm
from dpopt.ghost.contacts import Seen, along
from dpopt.ghost.hooks import Hooks
from dpopt.ghost.plan import Plan
from dpopt.ghost.pullback import PullBack
from dpopt.ghost.squares import largest
from dpopt.ghost.standardized import Coefficients, Standardized
from dpopt.ghost.values import Contact, Record

PerLeaf: TypeAlias = Sequence[jax.Array | None]


class Run:
    """A plan together with the parameters, diagonals S and offsets o that it is run with, one per leaf."""

    def __init__(self, plan: Plan, leaves: list[jax.Array], scales: PerLeaf, offsets: PerLeaf):
        self.plan, self.trace, self.leaves = plan, plan.trace, leaves
        # For a look-up table, S multiplies the rows that are looked up, which saves a pass over the whole table.
        # (Not with hooks: the second pass adds up gradients that are not scaled yet.)
        self.row_scales = {i: s for i, s in enumerate(scales) if s is not None and s.size > 1 and self.is_table(i)}
        self.scales = [None if i in self.row_scales else s for i, s in enumerate(scales)]
        self.offsets = offsets
        # Of every diagonal, read once for whatever needs it.
        self.largest = [None if s is None else largest(s) for s in self.scales]
        self.wide = [x.astype(accumulator_dtype(x.dtype)) if v.leaves else x
                     for x, v in zip(leaves, self.trace.leaves, strict=True)]  # fmt: skip
        self.pull_back = PullBack(self.trace, self.wide)
        self._coefficients: dict[int, Coefficients] = {}
        self._of_numbers: dict[int, jax.Array] = {}
        self._mixed_gains: dict[tuple[int, tuple[Contact, ...]], list[jax.Array]] = {}

    def passes(
        self, batch: Sequence[jax.Array], mask: jax.Array, hooks: Hooks | None = None,
        coefficients: Sequence[jax.Array] = (), in_place: Sequence[jax.Array] = (),
    ) -> tuple[jax.Array, list[jax.Array], dict[Contact, Seen], dict[Contact, Any]]:  # fmt: skip
        """Losses, aux, what was seen at each contact, all ``[B, ...]``, and the results of each hook.

        Cotangents of table rows are scaled. Contacts with hooks (hooks.py) are not among those seen.

        Args:
            in_place: the batch as it is, where ``batch`` is without what padding holds (`Record`)."""
        static, hooks = self.trace.run_prologue(self.leaves), hooks or {}
        keep = jnp.where(mask, 1.0, 0.0)
        contacts = [c for c in self.trace.contacts if c not in hooks]
        tapped = [c for c in contacts if not c.shares]

        def one(example: PyTree, keep: jax.Array, coefficients: list[jax.Array], raw: PyTree) -> tuple[PyTree, ...]:
            def loss(taps: list[jax.Array], slots: list[PyTree]) -> tuple[jax.Array, PyTree]:
                given = dict(zip(tapped, taps, strict=True))
                given |= {c: h.filled(s, keep, coefficients) for (c, h), s in zip(hooks.items(), slots, strict=True)}
                record = Record(self.plan.outputs, self.plan.quick, (raw, keep > 0))
                value, aux, recorded = self.trace.run_body(static, example, given, record)
                return value, (aux, [recorded[c.index] for c in contacts])

            taps = [jnp.zeros(c.tap_shape, c.tap_dtype) for c in tapped], [h.slots for h in hooks.values()]
            (value, (aux, recorded)), cotangents = jax.value_and_grad(loss, (0, 1), has_aux=True)(*taps)
            return value, aux, recorded, cotangents

        out_axes = 0, 0, 0, (0, [h.slot_axes for h in hooks.values()])
        losses, aux, recorded, (cotangents, hooked) = jax.vmap(one, out_axes=out_axes)(
            batch, keep, list(coefficients), in_place
        )
        own = dict(zip(tapped, cotangents, strict=True))
        seen = {
            c: Seen(x, self._with_row_scale(c, x, own[c.shares or c]), out)
            for c, (x, out) in zip(contacts, recorded, strict=True)
        }
        return losses, aux, seen, dict(zip(hooks, hooked, strict=True))

    def is_table(self, leaf: int) -> bool:
        """Whether a parameter is only looked up, so that S, unless a single number, is part of the rows recorded."""
        contacts = self.plan.leaves[leaf].contacts
        return not self.plan.streamed and all(k.is_copy and k.factors and k.factors.one_hot for k in contacts)

    def _with_row_scale(self, contact: Contact, x: jax.Array, y: jax.Array) -> jax.Array:
        if not contact.weight.leaves & self.row_scales.keys():
            return y
        (leaf,) = contact.weight.leaves
        table = jnp.broadcast_to(self.row_scales[leaf], self.wide[leaf].shape).astype(self.wide[leaf].dtype)
        diagonal = self.pull_back.push(leaf, table, [contact])[0]
        return y * jax.vmap(lambda row: along(contact, diagonal, row))(x)

    def affine(self, leaf: int, gradient: jax.Array) -> jax.Array:
        """``S g + o`` for one parameter and one gradient."""
        scale, offset = self.scales[leaf], self.offsets[leaf]
        gradient = gradient if scale is None else gradient * scale
        return gradient if offset is None else gradient + offset

    def offset_norm(self, leaf: int) -> jax.Array | float:
        """The norm of o for one parameter, a float if there is none."""
        offset = self.offsets[leaf]
        return 0.0 if offset is None else safe_norm(offset.reshape(-1), axis=0)

    def gains(self, contacts: Sequence[Contact], leaves: Sequence[int]) -> list[dict[int, jax.Array | None]]:
        """For each parameter and each of its contacts, the factor from the contact's gradient to ``S g``, by entry.

        None stands for 1. Broadcasts against the weight. Signs may be wrong; approximate where that mixes entries."""

        def of_leaf(leaf: int) -> dict[int, jax.Array | None]:
            own, scale = {i: c for i, c in enumerate(contacts) if leaf in c.weight.leaves}, self.scales[leaf]
            if all(c.is_direct for c in own.values()):
                return {i: self.diagonal(leaf, c, scale) for i, c in own.items()}
            if numbers := self.plan.leaves[leaf].numbers:
                most = safe_norm(self.of_numbers(leaf).reshape(-1), axis=0)
                return {i: most if c in numbers else self.diagonal(leaf, c, scale) for i, c in own.items()}
            if self.plan.leaves[leaf].standardized:
                return {i: self._standardized(leaf).gain(self.coefficients(leaf), scale) for i in own}
            key = leaf, tuple(own.values())
            if key not in self._mixed_gains:
                self._mixed_gains[key] = self._gains(leaf, list(own.values()))
            return dict(zip(own, self._mixed_gains[key], strict=True))

        return [of_leaf(leaf) for leaf in leaves]

    def _gains(self, leaf: int, contacts: Sequence[Contact]) -> list[jax.Array]:
        """`gains` of contacts whose weights are computed from a parameter in any way."""
        scale, others = self.scales[leaf], [c for c in contacts if not c.is_number]
        found = dict(zip(others, self.pull_back.gains(leaf, scale, others) if others else (), strict=True))
        for c in contacts:
            if c not in found:  # of a number, exactly
                (gradient,) = self.pull_back([c], [jnp.ones(c.weight.shape)], [leaf])
                found[c] = safe_norm((gradient if scale is None else gradient * scale).reshape(-1), axis=0)
        return [found[c] for c in contacts]

    def largest_gain(self, leaf: int, contact: Contact, gain: jax.Array) -> jax.Array:
        """The largest entry of one of `gains`."""
        most = self.largest[leaf]
        if most is not None and contact.is_copy:
            return most
        return largest(gain)

    def of_numbers(self, leaf: int) -> jax.Array:
        """``S d``, for d the gradient of the sum of the numbers that the contacts of `LeafPlan.numbers` read."""
        if leaf not in self._of_numbers:
            numbers, scale = self.plan.leaves[leaf].numbers, self.scales[leaf]
            ones = [jnp.ones(c.weight.shape) for c in numbers]
            (gradient,) = self.pull_back(numbers, ones, [leaf])
            self._of_numbers[leaf] = gradient if scale is None else gradient * scale
        return self._of_numbers[leaf]

    def coefficients(self, leaf: int) -> Coefficients:
        """Of a parameter whose filters are normalised; computed once."""
        if leaf not in self._coefficients:
            self._coefficients[leaf] = self._standardized(leaf).coefficients(self.wide[leaf])
        return self._coefficients[leaf]

    def _standardized(self, leaf: int) -> Standardized:
        return cast(Standardized, self.plan.leaves[leaf].standardized)

    def scalar_scale(self, leaf: int) -> jax.Array | None:
        """The diagonal of a parameter if it is a single number, else None."""
        scale = self.scales[leaf]
        return scale.reshape(()) if scale is not None and scale.size == 1 else None

    def diagonal(self, leaf: int, contact: Contact, scale: jax.Array | None) -> jax.Array | None:
        """S at a contact, of the shape of its weight, each of whose entries depends on one entry of the parameter."""
        if scale is None and contact.is_copy:
            return None
        tangent = jnp.ones(self.trace.leaves[leaf].shape, self.wide[leaf].dtype)
        return self.pull_back.push(leaf, tangent if scale is None else tangent * scale, [contact])[0]

    def contacts_of(self, leaves: Collection[int]) -> list[Contact]:
        """The contacts whose weights depend on some of ``leaves``, as norms and sums read them."""
        return [k for k in self.plan.contacts if not k.weight.leaves.isdisjoint(leaves)]
