"""Chooses the gradients that are kept once they are formed for the norms.

The weighted sum of *kept* gradients needs no matrix product. All of them together stay smaller than the activations, as
long as memory.py finds no room for more. Of a parameter with several contacts, or that is pulled back, it is the
parameter's own gradient that is kept (joined.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import jax

from dpopt.common.trees import accumulator_dtype
from dpopt.ghost import costs
from dpopt.ghost.methods import EXPLICIT, GRAM, PULLED_BACK, RANK_ONE, FromFactors, Shared
from dpopt.ghost.plan import Joined, LeafPlan, Plan, connected
from dpopt.ghost.primitives import CONVOLUTION
from dpopt.ghost.program import Trace
from dpopt.ghost.values import Contact

# Kept gradients may take this share of the memory of the contacts' inputs and cotangents.
_KEPT_SHARE = 1.0
# The gradients of one contact may take at most this many times its own input and cotangent, which they replace.
_KEPT_RATIO = 1.0
# A GPU multiplies float32 numbers about so many times as fast if it may round them to TF32.
_ROUNDED_FASTER = 8


def forming(chosen: Iterable[LeafPlan]) -> list[Contact]:
    """Contacts whose per-example gradients have to be formed."""
    found = (c for plan in chosen for part in plan.parts or [plan] if part.method.forms for c in part.contacts)
    return list(dict.fromkeys(found))


def kept(trace: Trace, chosen: Sequence[LeafPlan], shifted: bool) -> tuple[frozenset[Contact], dict[int, LeafPlan]]:
    """The contacts whose formed gradients are kept, and new plans for parameters that are now cheaper to form."""
    budget = _KEPT_SHARE * sum(costs.activation_bytes(c) for c in trace.contacts)
    kept: set[Contact] = set()
    replanned = {}
    formed = [(contact, None) for contact in sorted(forming(chosen), key=costs.formed_bytes)]
    savings = [] if shifted else [(*found, plan) for plan in chosen if (found := _saving(plan))]
    savings.sort(key=lambda s: costs.formed_bytes(s[1]) / s[0])
    for contact, plan in [*formed, *((contact, plan) for _, contact, plan in savings)]:
        size = 0 if contact.factors is None else costs.formed_bytes(contact)
        if size <= min(budget, _KEPT_RATIO * costs.activation_bytes(contact)):
            kept.add(contact)
            budget -= size
            if plan is not None:
                replanned[plan.leaf] = _explicit(plan)
    return frozenset(kept), replanned


class _Option(NamedTuple):
    """Gradients that may be kept once they are pulled back, and the operations that this saves for one example."""

    own: Joined
    saved: float
    size: float  # bytes of one example's
    freed: float  # bytes of those at the contacts that would be kept otherwise


def _options(
    trace: Trace, leaves: Sequence[LeafPlan], kept: Collection[Contact], scaled: Sequence[bool]
) -> list[_Option]:
    """The parameters whose gradients may be kept once they are pulled back, where that saves operations.

    Those at their contacts, if they would be kept, are not."""
    groups = connected(leaves) + [([*p.contacts], [p.leaf]) for p in leaves if isinstance(p.method, Shared)]
    found = []
    for contacts, members in groups:
        size = sum(costs.leaf_bytes(trace, leaf) for leaf in members)
        freed = sum(costs.formed_bytes(c) for c in contacts if c in kept and c.factors is not None)
        plans = [leaves[leaf] for leaf in members]
        pulled = [_pulled_back(trace, p, scaled[p.leaf]) for p in plans]
        before = sum(map(_of_sum, contacts, [c in kept for c in contacts])) + sum(p.operations for p in plans)
        saved = before - sum(p.operations for p in pulled) - _passes(size)
        if saved > 0 and all(c.weight.leaves <= {*members} for c in contacts):
            at = [_itself(trace, leaf) for leaf in members]
            found.append(_Option(Joined(tuple(contacts), tuple(pulled), tuple(at)), saved, size, freed))
    return found


def joined(trace: Trace, leaves: Sequence[LeafPlan], kept: Collection[Contact], scaled: Sequence[bool]) -> list[Joined]:
    """Those of `_options` that fit into what all kept gradients may take."""
    budget = _KEPT_SHARE * sum(costs.activation_bytes(c) for c in trace.contacts)
    budget -= sum(costs.formed_bytes(c) for c in kept if c.factors is not None)
    found = []
    for own, _, size, freed in _options(trace, leaves, kept, scaled):
        if size <= min(budget + freed, _KEPT_RATIO * sum(costs.activation_bytes(c) for c in own.contacts)):
            found.append(own)
            budget += freed - size
    return found


def _passes(size: float) -> float:
    """Operations in the time that it takes to write so many bytes, and to read them for a norm and for a sum."""
    return 3 * costs.OPERATIONS_PER_BYTE * size


def _of_sum(contact: Contact, is_kept: bool) -> float:
    """Operations of the sum at a contact, and those of keeping its gradients for it."""
    if contact.factors is None:  # the backward pass has formed them
        return reading(contact)
    return _passes(costs.formed_bytes(contact)) if is_kept else costs.product(contact)


def _pulled_back(trace: Trace, plan: LeafPlan, scaled: bool) -> LeafPlan:
    cost = PULLED_BACK.cost(trace, plan.leaf, plan.contacts, scaled)
    return LeafPlan(plan.leaf, plan.contacts, PULLED_BACK, *cost)


def reading(contact: Contact) -> float:
    """Operations in the time that it takes to read a gradient of one example at a contact."""
    return costs.OPERATIONS_PER_BYTE * costs.formed_bytes(contact)


def _itself(trace: Trace, leaf: int) -> Contact:
    """A contact whose weight is a whole parameter."""
    value = trace.leaves[leaf]
    return Contact(len(trace.contacts) + leaf, value, None, value.shape, accumulator_dtype(value.dtype))


def _explicit(plan: LeafPlan) -> LeafPlan:
    """A plan that forms the gradients of one without a diagonal."""
    operations, extra = EXPLICIT.cost(plan.contacts[0], False)
    return dataclasses.replace(plan, method=EXPLICIT, operations=operations, bytes=extra)


def keeping_more(plan: Plan) -> list[Plan]:
    """Plans that keep the gradients of ever more parameters where that saves time, whatever memory they take.

    Those that save most per byte come first. A GPU may round the factors of a gradient that is kept, since norm and sum
    are of the same numbers (`contacts.form`). It must not round those of other norms; nor those of sums of
    convolutions, whose algorithms round by more than quick_sums.py counts."""
    is_gpu = jax.default_backend() == "gpu"
    by_keeping = _saved_on_gpu if is_gpu else _saved
    options: list[tuple[float, float, LeafPlan | Joined]] = [
        (costs.formed_bytes(leaf.contacts[0]), saved, leaf)
        for leaf in plan.leaves
        if (saved := by_keeping(plan, leaf)) > 0
    ]
    if not is_gpu:  # where it is not measured
        before = {leaf for own in plan.joined for leaf in own.leaves}
        found = _options(plan.trace, plan.leaves, plan.kept, plan.scaled)
        options += [(o.size, o.saved, o.own) for o in found if before.isdisjoint(o.own.leaves)]
    plans = [plan]
    for _, saves, keeping in sorted([] if plan.shifted else options, key=lambda o: o[0] / o[1]):
        last = plans[-1]
        cost = last.ghost_cost - saves
        if isinstance(keeping, Joined):
            kept = last.kept.difference(keeping.contacts).union(keeping.at)
            plans.append(dataclasses.replace(last, kept=kept, joined=[*last.joined, keeping], ghost_cost=cost))
        else:
            leaves = [_explicit(p) if p.leaf == keeping.leaf else p for p in last.leaves]
            kept = last.kept | {keeping.contacts[0]}
            plans.append(dataclasses.replace(last, leaves=leaves, kept=kept, ghost_cost=cost))
    return plans[1:]


def _saved(plan: Plan, leaf: LeafPlan) -> float:
    """Operations saved by keeping the gradients of a parameter that are formed, but not kept yet, for one example."""
    if leaf.method is not EXPLICIT or leaf.contacts[0] in plan.kept:
        return 0.0
    return _of_sum(leaf.contacts[0], is_kept=False) - _of_sum(leaf.contacts[0], is_kept=True)


def _saved_on_gpu(plan: Plan, leaf: LeafPlan) -> float:
    """The same on a GPU, also of convolutions whose gradients are not formed yet."""
    if leaf.method not in (GRAM, EXPLICIT) or leaf.contacts[0] in plan.kept:
        return 0.0
    contact = leaf.contacts[0]
    if contact.primitive is not CONVOLUTION or not contact.is_rounded:
        return 0.0
    formed, product = costs.OPERATIONS_PER_BYTE * costs.formed_bytes(contact), costs.product(contact)
    return leaf.operations + product - (product / _ROUNDED_FASTER + 3 * formed)  # written, and read twice


def _saving(plan: LeafPlan) -> tuple[float, Contact] | None:
    """Operations saved by forming a parameter's gradients for the norms and keeping them for the sum; its contact."""
    if not isinstance(plan.method, FromFactors) or plan.method is RANK_ONE:
        return None
    contact = plan.contacts[0]
    saving = plan.operations + costs.product(contact) - EXPLICIT.cost(contact, False).operations
    return (saving, contact) if saving > 0 else None
