"""A plan: the norm method of each parameter, what it should cost, and how much memory its buffers may take.

planner.py makes the plan for one example; all figures for a batch follow from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp

from dpopt.engines import rounding
from dpopt.ghost import costs, splitting
from dpopt.ghost.costs import activation_bytes, forming_bytes, leaf_bytes, nbytes
from dpopt.ghost.methods import APART, EXPLICIT, GRAM, PULLED_BACK, AtContact, Method, methods_at
from dpopt.ghost.primitives import DOT
from dpopt.ghost.program import Trace
from dpopt.ghost.splitting import largest_divisor
from dpopt.ghost.standardized import Standardized
from dpopt.ghost.values import Contact

# Ghost must not be slower than vmap by more than 5%: the cost model is not more accurate than that.
MARGIN = 1.05
# If all gradients of the batch take no more than this, both engines run in the same few microseconds, whatever the cost
# model says, and vmap compiles in half the time (measured on networks of 300 to 70,000 parameters).
TINY_BYTES = 1 << 16
# It may only be this share of what an ordinary gradient takes, or this small: a program has a few of them at a time.
_CHUNK_SHARE = 1 / 16
_SMALL_CHUNK_BYTES = 1 << 20
# In hooks the buffer may be as large as this, because a loop over chunks holds its inputs twice.
_STREAMED_CHUNK_BYTES = 1 << 26
# Dtypes of factors that TF32 represents, or rounds without leaving its range.
_ROUNDED = {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}


@dataclass(frozen=True)
class LeafPlan:
    """How the per-example norms of one parameter are computed."""

    leaf: int
    contacts: tuple[Contact, ...]
    method: Method
    operations: float  # for one example's norm
    bytes: float  # of buffers that an ordinary gradient does not need, for one example
    standardized: Standardized | None = None  # if its filters are normalised on the way to the contact
    # Those of the contacts, after the first, whose weights are numbers with one cotangent: a penalty in the loss, say.
    numbers: tuple[Contact, ...] = ()
    parts: tuple[LeafPlan, ...] = ()  # of `APART`, one for each contact


@dataclass(frozen=True, eq=False)
class Joined:
    """Parameters whose gradients are formed from all that they are used for, and kept for the sum."""

    contacts: tuple[Contact, ...]
    plans: tuple[LeafPlan, ...]
    at: tuple[Contact, ...]  # for each of the plans, a contact that stands for the parameter itself

    @property
    def leaves(self) -> list[int]:
        """The indices of the parameters."""
        return [p.leaf for p in self.plans]


@dataclass(frozen=True, eq=False)
class Plan:
    """The trace, the method of each parameter, and the contacts whose gradients are kept.

    Costs are in operations, for one example."""

    trace: Trace
    batch_size: int
    leaves: list[LeafPlan]
    kept: frozenset[Contact]
    ordinary_cost: float
    ghost_cost: float
    vmap_cost: float
    scaled: Sequence[bool]  # as passed to `planner.make_plan`
    shifted: bool
    paths: Sequence[str] = ()
    streamed: Mapping[Contact, AtContact] = dataclasses.field(default_factory=dict)  # contacts with hooks
    single: frozenset[int] = frozenset()  # parameters that are clipped in the first pass
    joined: Sequence[Joined] = ()  # whose contacts' records are replaced by gradients (joined.py)

    @functools.cached_property
    def contacts(self) -> list[Contact]:
        """Those of the trace, or what stands for parameters in their place, as norms and sums read them."""
        replaced = {c for own in self.joined for c in own.contacts}
        return [c for c in self.trace.contacts if c not in replaced] + [c for own in self.joined for c in own.at]

    @functools.cached_property
    def norms(self) -> list[LeafPlan]:
        """How the norms of each parameter are computed from the records at `contacts`."""
        at = {p.leaf: (c,) for own in self.joined for p, c in zip(own.plans, own.at, strict=True)}
        return [LeafPlan(p.leaf, at[p.leaf], EXPLICIT, 0, 0) if p.leaf in at else p for p in self.leaves]

    @functools.cached_property
    def quick(self) -> frozenset[Contact]:
        """The contacts whose weighted sums a GPU computes in TF32 (quick_sums.py)."""
        if self.shifted:
            return frozenset()
        alone = [leaf for leaf in self.leaves if len(leaf.contacts) == 1 and not self.scaled[leaf.leaf]]
        method = {leaf.contacts[0]: leaf.method for leaf in alone} | dict(self.streamed)
        own = {leaf.contacts[0] for leaf in alone} - self.kept
        found = (c for c in own if isinstance(at := method[c], AtContact) and at.bounds_terms)
        return frozenset(c for c in found if _may_be_quick(c, c.of_step if c in self.streamed else c))

    @property
    def outputs(self) -> frozenset[Contact]:
        """The contacts whose outputs are needed for norms."""
        return frozenset(leaf.contacts[0] for leaf in self.leaves if leaf.standardized and leaf.method is GRAM)

    def chunk(self, contacts: Sequence[Contact]) -> int:
        """How many examples' gradients to form at a time."""
        return self.fitting(sum(forming_bytes(c) for c in contacts if c.factors))

    def fitting(self, size: float) -> int:
        """How many examples to process at a time if each needs buffers of ``size`` bytes."""
        most = max(_SMALL_CHUNK_BYTES, _CHUNK_SHARE * self._ordinary_bytes)
        if self.streamed:
            most = min(_STREAMED_CHUNK_BYTES, most)
        elif jax.default_backend() == "cpu":
            most = min(splitting.CACHED_BYTES, most)
        return largest_divisor(self.batch_size, most / max(size, 1))

    def norm_bytes(self, leaf: LeafPlan) -> float:
        """Bytes of what the norms of a parameter are computed from, and nothing else reads."""
        squared = leaf_bytes(self.trace, leaf.leaf) if self.scaled[leaf.leaf] else 0
        return squared + self.fitting(leaf.bytes) * leaf.bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(leaf_bytes(self.trace, leaf.leaf) for leaf in self.leaves)

    @functools.cached_property
    def _ordinary_bytes(self) -> float:
        """About the memory of an ordinary gradient: activations, parameters and their gradients."""
        activations = sum(activation_bytes(c) for c in self.trace.contacts)
        return self.batch_size * activations + 2 * self.weight_bytes

    @property
    def spare_bytes(self) -> float:
        """How much memory buffers of one parameter's sum may take: less than is allowed by default for everything."""
        return self._ordinary_bytes / 5

    @property
    def parts(self) -> int:
        """The number of equal parts in which the batch is processed fastest, one after the other."""
        return splitting.parts(self.trace.body, self.weight_bytes, self.batch_size)

    def of(self, batch_size: int) -> Plan:
        """This plan for another batch size."""
        plan = dataclasses.replace(self, batch_size=batch_size)
        return plan.streaming(self.single) if self.streamed else plan

    def streaming(self, single: Collection[int] = ()) -> Plan:
        """This plan in two passes (streamed.py), or in one for those ``single`` parameters that can be streamed."""
        chosen: dict[Contact, AtContact] = {}
        alone = [leaf for leaf in self.leaves if len(leaf.contacts) == 1 or leaf.method is APART]
        for contact in () if self.shifted else (c for leaf in alone for c in leaf.contacts if c.is_direct):
            (leaf,), one = contact.weight.leaves, cast(Contact, contact.of_step)
            scaling = self.scaled[leaf] or not contact.is_copy
            if all(is_mapped for _, is_mapped in contact.loops):
                # In one pass, gradients that are formed for the norm are added up as they are (hooks.py).
                kept = leaf in single and self.batch_size <= rounding.ROWS and jax.device_count() == 1
                cost = functools.partial(_streamed_cost, one, scaled=scaling, are_added_up=kept)
                chosen[contact] = min(methods_at(one, scaling), key=cost)
        # Contacts that share a tap, or a parameter, are recorded together or not at all.
        while others := {c for c in self.trace.contacts if c not in chosen}:
            taps, recorded = {c.shares or c for c in others}, {leaf for c in others for leaf in c.weight.leaves}
            joined = {c for c in chosen if (c.shares or c) in taps or recorded & c.weight.leaves}
            if not joined:
                break
            chosen = {c: m for c, m in chosen.items() if c not in joined}
        leaves = {leaf for c in chosen for leaf in c.weight.leaves}
        own = leaves & frozenset(single)
        return dataclasses.replace(self, streamed=chosen, single=own, kept=frozenset(), joined=())

    def streamed_chunk(self, contact: Contact) -> int:
        """How many examples' gradients, or Gram matrices, of one step to form at a time."""
        one, scaling = cast(Contact, contact.of_step), not contact.is_copy
        method = self.streamed[contact]
        is_formed = method is EXPLICIT and one.factors is not None
        chunk = self.fitting(forming_bytes(one) if is_formed else method.cost(one, scaling).bytes)
        if contact.given is None or not self.is_one_pass:  # two passes have a copy of each block of the batch
            return chunk
        # Factors are scaled before they are squared, which copies a chunk of the batch.
        copied = nbytes(contact.input_shape, contact.input_dtype)
        return min(chunk, largest_divisor(self.batch_size, self.spare_bytes / max(copied, 1)))

    @property
    def is_one_pass(self) -> bool:
        """Whether all parameters that are streamed are clipped in the first pass, so that there is no second."""
        return {leaf for c in self.streamed for leaf in c.weight.leaves} <= self.single

    @property
    def records_nothing(self) -> bool:
        """Whether all parameters are clipped in the first pass."""
        return {leaf.leaf for leaf in self.leaves if leaf.contacts} <= self.single

    @property
    def all_formed_bytes(self) -> int:
        """Bytes of the plain per-example gradients of the batch."""
        return self.batch_size * self.weight_bytes

    @property
    def is_tiny(self) -> bool:
        """Whether per-example gradients are so small that vmap is used whatever the costs are."""
        return self.all_formed_bytes <= TINY_BYTES

    @property
    def prefers_vmap(self) -> bool:
        """Whether plain per-example gradients should be faster by more than the margin, or are tiny."""
        return self.vmap_cost < math.inf and (self.is_tiny or self.ghost_cost > MARGIN * self.vmap_cost)


def connected(leaves: Sequence[LeafPlan]) -> list[tuple[list[Contact], list[int]]]:
    """Groups of contacts and parameters that are connected and have their norms computed together."""
    groups: list[tuple[set[Contact], set[int]]] = []
    for leaf in leaves:
        if leaf.method is PULLED_BACK:
            joined = [g for g in groups if g[0] & set(leaf.contacts)]
            contacts = set(leaf.contacts).union(*(own for own, _ in joined))
            members = {leaf.leaf}.union(*(own for _, own in joined))
            groups = [*(g for g in groups if g not in joined), (contacts, members)]
    return [(sorted(c, key=lambda k: k.index), sorted(m)) for c, m in groups]


def _streamed_cost(contact: Contact, method: AtContact, *, scaled: bool, are_added_up: bool) -> float:
    """Operations of one example's norm in a hook, and of its part of the sum.

    ``are_added_up``: gradients that are formed are, so that the sum multiplies nothing."""
    is_read = are_added_up and method is EXPLICIT
    of_sum = costs.OPERATIONS_PER_BYTE * costs.formed_bytes(contact) if is_read else costs.product(contact)
    return method.cost(contact, scaled).operations + of_sum


def _may_be_quick(contact: Contact, added_up: Contact | None) -> bool:
    """Whether the weighted sum at a contact is a matrix product of factors that a GPU would round, and nothing else.

    Args:
        added_up: the contact of one step, where its steps are added up one by one; else the contact."""
    factors = added_up.factors if added_up else None
    is_matrix = contact.primitive is DOT and factors is not None and factors.shape[:2] == (1, 1) and not factors.one_hot
    dtypes = {jnp.dtype(d) for d in (contact.weight.dtype, contact.tap_dtype, contact.input_dtype)}
    return contact.is_rounded and contact.is_copy and is_matrix and dtypes <= _ROUNDED
