"""Planning: for every parameter the norm that should cost least.

A parameter whose only contact keeps its entries apart (reshaped, transposed, cast, multiplied by constants) can have
its norm taken at the contact by any method of norms.py, and so can one whose filters are normalised on the way
(standardized.py). For any other (a low-rank product, a learned gain on a filter, a bias added to a whole sequence) the
contacts' per-example gradients are formed and *pulled back* through the prologue, example by example.

A formed gradient is *kept* for the weighted sum, which then needs no matrix product of its own, as long as all that is
kept stays smaller than the activations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax

from dpopt.ghost.costs import (
    OPERATIONS_PER_BYTE,
    activation_bytes,
    formed_bytes,
    leaf_bytes,
    norm_cost,
    product,
    shared_cost,
)
from dpopt.ghost.plan import LeafPlan, Plan, is_direct, methods, orientation
from dpopt.ghost.primitives import CONVOLUTION
from dpopt.ghost.program import Trace
from dpopt.ghost.standardized import standardized
from dpopt.ghost.values import Contact, Entry, wide_dtype

# XLA turns a vmapped filter gradient into a grouped convolution, which takes about three times as long
# (924 ms against 304 on two cores for 128x32x32x64 to 64 channels).
_VMAPPED_CONVOLUTION = 3
# To form the gradients of all examples costs so many times a pass over them: the memory is fresh, batched products
# write it slowly, norms and the sum read it again. (Measured: between 5 and 190 times for most models of the zoo.)
_ALL_FORMED = 24
# Kept gradients may take this share of what the contacts' inputs and cotangents take.
_KEPT_SHARE = 1.0
# ... and one contact's gradients at most this many times its own input and cotangent, which they
# replace in memory from then on.
_KEPT_RATIO = 1.0


def make_plan(trace: Trace, batch_size: int, scaled: Sequence[bool], shifted: bool, paths: Sequence[str] = ()) -> Plan:
    """Chooses a method for every parameter.

    Args:
      trace: the traced loss.
      batch_size: examples in the batch.
      scaled: per parameter, whether a diagonal (not a mere number) multiplies its gradient.
      shifted: whether an offset is added to the gradients.
      paths: names of the parameters, for ``explain``.
    """
    uses: list[list[Contact]] = [[c for c in trace.contacts if i in c.weight.leaves] for i in range(len(trace.leaves))]
    chosen = [_leaf_plan(trace, leaf, contacts, scaled[leaf], shifted) for leaf, contacts in enumerate(uses)]
    kept, anew = _kept(trace, chosen, shifted)
    leaves = [anew.get(plan.leaf, plan) for plan in chosen]

    products = {c: product(c) for c in trace.contacts}
    passes = 2 * sum(products.values())  # forward, and backward to the inputs
    # A concatenated weight is formed once for all its parameters.
    repeated = sum((len(c.weight.leaves) - 1) * norm_cost(c, "explicit", False)[0] for c in _forming(chosen))
    norms = sum(plan.operations for plan in leaves) - repeated
    weighted = sum(OPERATIONS_PER_BYTE * formed_bytes(c) if c in kept else products[c] for c in trace.contacts)
    vmapped = sum(n * (_VMAPPED_CONVOLUTION if c.primitive is CONVOLUTION else 1) for c, n in products.items())
    per_example = (
        _ALL_FORMED * OPERATIONS_PER_BYTE * sum(_written(trace, i, contacts) for i, contacts in enumerate(uses))
    )
    return Plan(
        trace,
        batch_size,
        leaves,
        kept,
        ordinary_cost=passes + sum(products.values()),
        ghost_cost=passes + norms + weighted,
        vmap_cost=passes + vmapped + per_example,
        scaled=scaled,
        shifted=shifted,
        paths=paths,
    )


def _written(trace: Trace, leaf: int, contacts: Sequence[Contact]) -> float:
    """Bytes of one example's gradient of a parameter, each time that vmap adds to it: at every use, in every step."""
    steps = (math.prod(length for length, is_mapped in c.loops if not is_mapped) for c in contacts)
    return leaf_bytes(trace, leaf) * max(1, sum(steps))


def leaf_paths(params: Any) -> list[str]:
    """The parameters' names, as ``jax.tree_util.keystr`` writes them."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def _leaf_plan(trace: Trace, leaf: int, contacts: Sequence[Contact], scaled: bool, shifted: bool) -> LeafPlan:
    """The cheapest norm, before any formed gradient is kept."""
    if not contacts:
        return LeafPlan(leaf, (), "none", 0, 0)
    if len(contacts) == 1:
        (contact,) = contacts
        found = None if is_direct(contact) or shifted else standardized(trace, contact)
        if is_direct(contact) or found:
            scaling = scaled or (found is None and not cast(Entry, contact.weight.entry).copy)
            ways = _standardized_methods(contact, scaled) if found else methods(contact, scaling)
            costs = {m: norm_cost(contact, m, scaling) for m in ways}
            method = min(costs, key=lambda m: costs[m][0] + (m == "explicit") * product(contact) * 1e-6)
            pulled = shifted and method == "explicit"
            return LeafPlan(leaf, (contact,), "pulled_back" if pulled else method, *costs[method], standardized=found)
    explicit = [norm_cost(c, "explicit", scaled) for c in contacts]
    whole = sum(n for n, _ in explicit), sum(b for _, b in explicit) + leaf_bytes(trace, leaf)
    if len(contacts) > 1 and not scaled and all(orientation(c) is not None for c in contacts):
        joined = shared_cost(contacts, [orientation(c) != orientation(contacts[0]) for c in contacts])
        if joined[0] < whole[0]:
            return LeafPlan(leaf, tuple(contacts), "shared_gram", *joined)
    return LeafPlan(leaf, tuple(contacts), "pulled_back", *whole)


def _standardized_methods(contact: Contact, scaled: bool) -> list[str]:
    # The Gram matrices' way reads the contact's output, which must not have been rounded more than they are.
    reads_output = contact.is_precise and contact.tap_dtype == wide_dtype(contact.tap_dtype)
    return ["gram", "explicit"] if reads_output and not scaled else ["explicit"]


def _forming(chosen: Iterable[LeafPlan]) -> list[Contact]:
    """Contacts whose examples' gradients have to be formed."""
    found = (c for plan in chosen if plan.method in ("explicit", "pulled_back") for c in plan.contacts)
    return list(dict.fromkeys(found))


def _kept(trace: Trace, chosen: Sequence[LeafPlan], shifted: bool) -> tuple[frozenset[Contact], dict[int, LeafPlan]]:
    """The contacts whose formed gradients are kept, and plans anew where forming them pays because they are."""
    budget = _KEPT_SHARE * sum(activation_bytes(c) for c in trace.contacts)
    kept: set[Contact] = set()
    for contact in sorted(_forming(chosen), key=formed_bytes):
        size = 0 if contact.factors is None else formed_bytes(contact)
        if size <= min(budget, _KEPT_RATIO * activation_bytes(contact)):
            kept.add(contact)
            budget -= size
    anew = {}
    savings = [] if shifted else [(*found, plan) for plan in chosen if (found := _saving(plan))]
    for _, contact, plan in sorted(savings, key=lambda s: formed_bytes(s[1]) / s[0]):
        if formed_bytes(contact) <= min(budget, _KEPT_RATIO * activation_bytes(contact)):
            kept.add(contact)
            budget -= formed_bytes(contact)
            operations, size = norm_cost(contact, "explicit", False)
            anew[plan.leaf] = dataclasses.replace(plan, method="explicit", operations=operations, bytes=size)
    return frozenset(kept), anew


def _saving(plan: LeafPlan) -> tuple[float, Contact] | None:
    """What it would save to form gradients for their norms and to keep them for the sum, and where."""
    if plan.method not in ("gram", "segments"):
        return None
    (contact,) = plan.contacts
    saving = plan.operations + product(contact) - norm_cost(contact, "explicit", False)[0]
    return (saving, contact) if saving > 0 else None
