"""Planning: chooses the cheapest norm method for every parameter.

If the only contact of a parameter keeps its entries apart (reshaped, transposed, cast, multiplied by constants), its
norm can be computed at the contact by any method that applies there (methods/). The same holds if its filters are
normalised on the way (standardized.py). For all other parameters (a low-rank product, a learned gain on a filter, a
bias added to a whole sequence) the per-example gradients of the contacts are formed and *pulled back* through the
prologue, one at a time.

A formed gradient is *kept* for the weighted sum, which then needs no matrix product, as long as all kept gradients
together stay smaller than the activations; memory.py keeps more where there is room. Of a parameter with several
contacts, or that is pulled back, it is the parameter's own gradient that is kept (joined.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Sequence

import jax

from dpopt.common.trees import accumulator_dtype
from dpopt.common.types import PyTree
from dpopt.ghost import costs
from dpopt.ghost.methods import (
    APART,
    EXPLICIT,
    GRAM,
    NO_CONTACT,
    PULLED_BACK,
    RANK_ONE,
    AtContact,
    FromFactors,
    Method,
    Shared,
    methods_at,
    shared_methods,
)
from dpopt.ghost.methods.base import Cost
from dpopt.ghost.methods.standardized import standardized_methods
from dpopt.ghost.plan import Joined, LeafPlan, Plan, connected
from dpopt.ghost.primitives import CONVOLUTION
from dpopt.ghost.program import Trace
from dpopt.ghost.standardized import standardized
from dpopt.ghost.values import Contact

# XLA turns a vmapped filter gradient into a grouped convolution, which takes about three times as long
# (924 ms against 304 on two cores for 128x32x32x64 to 64 channels).
_VMAPPED_CONVOLUTION = 3
# Forming the gradients of all examples costs as much as this many passes over them: they are written, and the norms
# and the sum read them again. (Measured on models of the zoo: 0 to 12, half of them below 3; with 6 to 24, `auto` takes
# the same way on all of them.)
_ALL_FORMED = 6
# Kept gradients may take this share of the memory of the contacts' inputs and cotangents.
_KEPT_SHARE = 1.0
# The gradients of one contact may take at most this many times its own input and cotangent, which they replace.
_KEPT_RATIO = 1.0
# A GPU multiplies float32 numbers about so many times as fast if it may round them to TF32.
_ROUNDED_FASTER = 8


def make_plan(trace: Trace, batch_size: int, scaled: Sequence[bool], shifted: bool, paths: Sequence[str] = ()) -> Plan:
    """Chooses a method for every parameter.

    Args:
        scaled: per parameter, whether a diagonal (not a mere number) multiplies its gradient.
        shifted: whether an offset is added to the gradients.
    """
    uses: list[list[Contact]] = [[c for c in trace.contacts if i in c.weight.leaves] for i in range(len(trace.leaves))]
    chosen = [_leaf_plan(trace, leaf, contacts, scaled[leaf], shifted) for leaf, contacts in enumerate(uses)]
    kept, replanned = _kept(trace, chosen, shifted)
    leaves = [replanned.get(plan.leaf, plan) for plan in chosen]
    joined = [] if shifted else _joined(trace, leaves, kept, scaled)
    kept = kept - {c for own in joined for c in own.contacts} | {c for own in joined for c in own.at}

    products = {c: costs.product(c) for c in trace.contacts}
    passes = 2 * sum(products.values())  # forward, and backward to the inputs
    # A concatenated weight is formed once for all its parameters.
    repeated = sum((len(c.weight.leaves) - 1) * EXPLICIT.cost(c, False).operations for c in _forming(chosen))
    instead = {plan.leaf: plan for own in joined for plan in own.plans}
    norms = sum(instead.get(plan.leaf, plan).operations for plan in leaves) - repeated
    replaced = {c for own in joined for c in own.contacts}
    weighted = sum(n for c, n in products.items() if c not in kept | replaced) + sum(map(_reading, kept))
    vmapped = sum(n * (_VMAPPED_CONVOLUTION if c.primitive is CONVOLUTION else 1) for c, n in products.items())
    written = sum(_written(trace, i, contacts) for i, contacts in enumerate(uses))
    by_vmap = passes + vmapped + _ALL_FORMED * costs.OPERATIONS_PER_BYTE * written
    return Plan(
        trace, batch_size, leaves, kept,
        ordinary_cost=passes + sum(products.values()), ghost_cost=passes + norms + weighted,
        vmap_cost=by_vmap if trace.can_be_vmapped else math.inf,
        scaled=scaled, shifted=shifted, paths=paths, joined=joined,
    )  # fmt: skip


def _written(trace: Trace, leaf: int, contacts: Sequence[Contact]) -> float:
    """Bytes that vmap writes for one example's gradient of a parameter: all of it, at every use and in every step."""
    steps = (math.prod(length for length, is_mapped in c.loops if not is_mapped) for c in contacts)
    return costs.leaf_bytes(trace, leaf) * max(1, sum(steps))


def leaf_paths(params: PyTree) -> list[str]:
    """The names of the parameters, as ``jax.tree_util.keystr`` writes them."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def _leaf_plan(trace: Trace, leaf: int, contacts: Sequence[Contact], scaled: bool, shifted: bool) -> LeafPlan:
    """The cheapest norm method if no formed gradient is kept."""
    if not contacts:
        return LeafPlan(leaf, (), NO_CONTACT, 0, 0)
    if len(contacts) == 1:
        (contact,) = contacts
        found = None if contact.is_direct or shifted else standardized(trace, contact)
        if contact.is_direct or found:
            scaling = scaled or (found is None and not contact.is_copy)
            ways = standardized_methods(contact, scaled) if found else methods_at(contact, scaling)
            method, cost = _cheapest(contact, ways, scaling)
            used = PULLED_BACK if shifted and method is EXPLICIT else method
            return LeafPlan(leaf, (contact,), used, *cost, standardized=found)
    if not shifted and (found := _beside_numbers(leaf, contacts, scaled)):
        return found
    if not shifted and (found := _apart(leaf, contacts, scaled)):
        return found
    options: dict[Method, Cost] = {PULLED_BACK: PULLED_BACK.cost(trace, leaf, contacts, scaled)}
    if len(contacts) > 1:
        options |= shared_methods(contacts, scaled)
    method = min(options, key=lambda m: options[m].operations)
    return LeafPlan(leaf, tuple(contacts), method, *options[method])


def _apart(leaf: int, contacts: Sequence[Contact], scaled: bool) -> LeafPlan | None:
    """The plan of a parameter whose contacts each read another part of it, such as a layer by its index."""
    entries = [c.weight.entry for c in contacts]
    if len(entries) == 1 or not all(a and b and a.is_apart(b) for a, b in itertools.combinations(entries, 2)):
        return None
    parts = []
    for contact in contacts:
        scaling = scaled or not contact.is_copy
        method, cost = _cheapest(contact, methods_at(contact, scaling), scaling)
        parts.append(LeafPlan(leaf, (contact,), method, *cost))
    operations, extra = (sum(of) for of in zip(*((p.operations, p.bytes) for p in parts), strict=True))
    return LeafPlan(leaf, tuple(contacts), APART, operations, extra, parts=tuple(parts))


def _cheapest(contact: Contact, ways: Sequence[AtContact], scaled: bool) -> tuple[AtContact, Cost]:
    """The method that takes fewest operations. If it may be one that forms gradients or another, it is the other."""
    options = {m: m.cost(contact, scaled) for m in ways}
    method = min(options, key=lambda m: options[m].operations + m.forms * costs.product(contact) * 1e-6)
    return method, options[method]


def _beside_numbers(leaf: int, contacts: Sequence[Contact], scaled: bool) -> LeafPlan | None:
    """The plan of a parameter with one direct contact, and others whose weights are numbers with one cotangent.

    Their part of the gradient is that cotangent times one array for all examples (`leaf_norms._beside_numbers`)."""
    others = [c for c in contacts if not c.is_number]
    numbers = tuple(c for c in contacts if c.is_number)
    if len(others) != 1 or not others[0].is_direct or len({c.shares or c for c in numbers}) != 1:
        return None
    (contact,) = others
    scaling = scaled or not contact.is_copy
    method, cost = _cheapest(contact, methods_at(contact, scaling), scaling)
    along = costs.product(contact)  # the inner product with that array
    return LeafPlan(leaf, (contact, *numbers), method, cost.operations + along, cost.bytes, numbers=numbers)


def _forming(chosen: Iterable[LeafPlan]) -> list[Contact]:
    """Contacts whose per-example gradients have to be formed."""
    found = (c for plan in chosen for part in plan.parts or [plan] if part.method.forms for c in part.contacts)
    return list(dict.fromkeys(found))


def _kept(trace: Trace, chosen: Sequence[LeafPlan], shifted: bool) -> tuple[frozenset[Contact], dict[int, LeafPlan]]:
    """The contacts whose formed gradients are kept, and new plans for parameters that are now cheaper to form."""
    budget = _KEPT_SHARE * sum(costs.activation_bytes(c) for c in trace.contacts)
    kept: set[Contact] = set()
    replanned = {}
    forming = [(contact, None) for contact in sorted(_forming(chosen), key=costs.formed_bytes)]
    savings = [] if shifted else [(*found, plan) for plan in chosen if (found := _saving(plan))]
    savings.sort(key=lambda s: costs.formed_bytes(s[1]) / s[0])
    for contact, plan in [*forming, *((contact, plan) for _, contact, plan in savings)]:
        size = 0 if contact.factors is None else costs.formed_bytes(contact)
        if size <= min(budget, _KEPT_RATIO * costs.activation_bytes(contact)):
            kept.add(contact)
            budget -= size
            if plan is not None:
                replanned[plan.leaf] = _explicit(plan)
    return frozenset(kept), replanned


def _joined(
    trace: Trace, leaves: Sequence[LeafPlan], kept: Collection[Contact], scaled: Sequence[bool]
) -> list[Joined]:
    """The parameters whose gradients are kept once they are pulled back, where that saves operations.

    Those at their contacts, if they would be kept, are not."""
    budget = _KEPT_SHARE * sum(costs.activation_bytes(c) for c in trace.contacts)
    budget -= sum(costs.formed_bytes(c) for c in kept if c.factors is not None)
    groups = connected(leaves) + [([*p.contacts], [p.leaf]) for p in leaves if isinstance(p.method, Shared)]
    found = []
    for contacts, members in groups:
        size = sum(costs.leaf_bytes(trace, leaf) for leaf in members)
        freed = sum(costs.formed_bytes(c) for c in contacts if c in kept and c.factors is not None)
        plans = [leaves[leaf] for leaf in members]
        pulled = [_pulled_back(trace, p, scaled[p.leaf]) for p in plans]
        before = sum(map(_of_sum, contacts, [c in kept for c in contacts])) + sum(p.operations for p in plans)
        saved = before - sum(p.operations for p in pulled) - _passes(size)
        is_closed = all(c.weight.leaves <= {*members} for c in contacts)
        fits = size <= min(budget + freed, _KEPT_RATIO * sum(costs.activation_bytes(c) for c in contacts))
        if is_closed and fits and saved > 0:
            at = [_itself(trace, leaf) for leaf in members]
            found.append(Joined(tuple(contacts), tuple(pulled), tuple(at)))
            budget += freed - size
    return found


def _passes(size: float) -> float:
    """Operations in the time that it takes to write so many bytes, and to read them for a norm and for a sum."""
    return 3 * costs.OPERATIONS_PER_BYTE * size


def _of_sum(contact: Contact, is_kept: bool) -> float:
    """Operations of the sum at a contact, and those of keeping its gradients for it."""
    if contact.factors is None:  # the backward pass has formed them
        return _reading(contact)
    return _passes(costs.formed_bytes(contact)) if is_kept else costs.product(contact)


def _pulled_back(trace: Trace, plan: LeafPlan, scaled: bool) -> LeafPlan:
    cost = PULLED_BACK.cost(trace, plan.leaf, plan.contacts, scaled)
    return LeafPlan(plan.leaf, plan.contacts, PULLED_BACK, *cost)


def _reading(contact: Contact) -> float:
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
    by_keeping = _saved_on_gpu if jax.default_backend() == "gpu" else _saved
    saved = {leaf.leaf: by_keeping(plan, leaf) for leaf in plan.leaves}
    chosen = [leaf for leaf in plan.leaves if saved[leaf.leaf] > 0 and not plan.shifted]
    chosen.sort(key=lambda leaf: costs.formed_bytes(leaf.contacts[0]) / saved[leaf.leaf])
    plans, leaves = [plan], list(plan.leaves)
    for leaf in chosen:
        contact, last = leaf.contacts[0], plans[-1]
        leaves[leaf.leaf] = _explicit(leaf)
        cost = last.ghost_cost - saved[leaf.leaf]
        plans.append(dataclasses.replace(last, leaves=[*leaves], kept=last.kept | {contact}, ghost_cost=cost))
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
