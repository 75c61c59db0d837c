"""Planning: chooses the cheapest norm method for every parameter.

If the only contact of a parameter keeps its entries apart (reshaped, transposed, cast, multiplied by constants), its
norm can be computed at the contact by any method that applies there (methods/). The same holds if its filters are
normalised on the way (standardized.py). For all other parameters (a low-rank product, a learned gain on a filter, a
bias added to a whole sequence) the per-example gradients of the contacts are formed and *pulled back* through the
prologue, one at a time.

Which formed gradients are kept for the weighted sum is chosen by keeping.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax

from dpopt.common.types import PyTree
from dpopt.ghost import costs, keeping
from dpopt.ghost.methods import (
    APART,
    EXPLICIT,
    NO_CONTACT,
    PULLED_BACK,
    AtContact,
    Method,
    methods_at,
    shared_methods,
)
from dpopt.ghost.methods.base import Cost
from dpopt.ghost.methods.standardized import standardized_methods
from dpopt.ghost.plan import LeafPlan, Plan
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


def make_plan(trace: Trace, batch_size: int, scaled: Sequence[bool], shifted: bool, paths: Sequence[str] = ()) -> Plan:
    """Chooses a method for every parameter.

    Args:
        scaled: per parameter, whether a diagonal (not a mere number) multiplies its gradient.
        shifted: whether an offset is added to the gradients.
    """
    uses: list[list[Contact]] = [[c for c in trace.contacts if i in c.weight.leaves] for i in range(len(trace.leaves))]
    chosen = [_leaf_plan(trace, leaf, contacts, scaled[leaf], shifted) for leaf, contacts in enumerate(uses)]
    kept, replanned = keeping.kept(trace, chosen, shifted)
    leaves = [replanned.get(plan.leaf, plan) for plan in chosen]
    joined = [] if shifted else keeping.joined(trace, leaves, kept, scaled)
    kept = kept - {c for own in joined for c in own.contacts} | {c for own in joined for c in own.at}

    products = {c: costs.product(c) for c in trace.contacts}
    passes = 2 * sum(products.values())  # forward, and backward to the inputs
    # A concatenated weight is formed once for all its parameters.
    repeated = sum((len(c.weight.leaves) - 1) * EXPLICIT.cost(c, False).operations for c in keeping.forming(chosen))
    instead = {plan.leaf: plan for own in joined for plan in own.plans}
    norms = sum(instead.get(plan.leaf, plan).operations for plan in leaves) - repeated
    replaced = {c for own in joined for c in own.contacts}
    weighted = sum(n for c, n in products.items() if c not in kept | replaced) + sum(map(keeping.reading, kept))
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
