"""Planning: which norm for which parameter, and what it should cost.

A parameter whose every contact keeps its entries apart (reshaped, transposed, cast, multiplied by
constants) can have its norm taken at the contact by any method of norms.py, and so can one whose
filters are normalised on the way (standardized.py). For any other (a low-rank product, a learned gain
on a filter, a bias added to a whole sequence) the contacts' per-example gradients are formed and
*pulled back* through the prologue, example by example.

A formed gradient is *kept* for the weighted sum, which then needs no matrix product of its own, as
long as all that is kept stays smaller than the activations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax

from dpopt import _sums
from dpopt.ghost.costs import (
    OPERATIONS_PER_BYTE,
    activation_bytes,
    computed,
    formed_bytes,
    forming_bytes,
    leaf_bytes,
    norm_cost,
    product,
    shared_cost,
)
from dpopt.ghost.primitives import CONVOLUTION
from dpopt.ghost.program import Trace
from dpopt.ghost.standardized import Standardized, standardized
from dpopt.ghost.values import Contact, Entry, wide_dtype

# XLA turns a vmapped filter gradient into a grouped convolution, which takes about three times as long
# (924 ms against 304 on two cores for 128x32x32x64 to 64 channels).
_VMAPPED_CONVOLUTION = 3
# Ghost must not lose to vmap by more than 5%; the model is trusted to that and no further.
_MARGIN = 1.05
# Where all gradients of the batch are smaller than this, both engines take the same few microseconds, and vmap half as
# long to compile (measured on networks of 300 to 70,000 parameters).
_TINY_BYTES = 1 << 16
# Kept gradients may take this share of what the contacts' inputs and cotangents take.
_KEPT_SHARE = 1.0
# ... and one contact's gradients at most this many times its own input and cotangent, which they
# replace in memory from then on.
_KEPT_RATIO = 1.0
# Formed gradients that are not kept live in a buffer of this size: it should fit a cache.
_CHUNK_BYTES = 1 << 22
# ... and in two passes of this size: a loop over chunks holds its inputs twice.
_STREAMED_CHUNK_BYTES = 1 << 26
# A batch whose forward pass computes less is taken whole: CPUs hold it, and allocators hand out the same memory again.
_WHOLE_BYTES = 1 << 25
# Bytes moved in the time that it takes to start one more operation.
_START_BYTES = 1 << 10


@dataclass(frozen=True)
class LeafPlan:
    """How one parameter's per-example norms are found."""

    leaf: int
    contacts: tuple[Contact, ...]
    method: str  # none, rank_one, gram, segments, shared_gram, explicit or pulled_back
    operations: float  # for the norms of the whole batch
    bytes: float  # of buffers that an ordinary gradient does not have
    standardized: Standardized | None = None  # its filters are normalised on the way to the contact


@dataclass
class Plan:
    """The trace, a method for every parameter, and the contacts whose gradients are kept."""

    trace: Trace
    batch_size: int
    leaves: list[LeafPlan]
    kept: frozenset[Contact]
    ordinary_cost: float
    ghost_cost: float
    vmap_cost: float
    scaled: Sequence[bool]  # what it was made for: see make_plan
    shifted: bool
    paths: Sequence[str] = ()
    streamed: Mapping[Contact, str] = dataclasses.field(default_factory=dict)  # contacts with hooks, and their methods
    single: frozenset[int] = frozenset()  # parameters that are clipped in the first pass

    @property
    def pulled_back(self) -> list[tuple[list[Contact], list[int]]]:
        """Contacts and parameters whose norms are found together, since they are connected."""
        groups: list[tuple[set[Contact], set[int]]] = []
        for leaf in self.leaves:
            if leaf.method != "pulled_back":
                continue
            contacts, members = set(leaf.contacts), {leaf.leaf}
            apart = []
            for other in groups:
                if other[0] & contacts:
                    contacts, members = contacts | other[0], members | other[1]
                else:
                    apart.append(other)
            groups = [*apart, (contacts, members)]
        return [(sorted(c, key=lambda k: k.index), sorted(m)) for c, m in groups]

    def chunk(self, contacts: Sequence[Contact]) -> int:
        """How many examples to form gradients for at a time."""
        size = sum(forming_bytes(c) for c in contacts if c.factors)
        return self._divisor(self._chunk_bytes / max(size, 1))

    def fitting(self, size: float) -> int:
        """How many examples to take at a time, if all of them need buffers of this many bytes together."""
        return self._divisor(self._chunk_bytes * self.batch_size / max(size, 1))

    @property
    def _chunk_bytes(self) -> int:
        return _STREAMED_CHUNK_BYTES if self.streamed else _CHUNK_BYTES

    @property
    def parts(self) -> int:
        """Into how many equal parts the batch is best taken, one after the other in the same memory.

        On CPUs memory that is touched for the first time costs more than most of what is computed in it. Of A bytes of
        activations k parts touch A / k; and k times they read the parameters and add up their sums, P bytes, and start
        their operations. A / k + k P is least at k = sqrt(A / P). Elsewhere small parts leave processors idle, and
        across devices a part has to be a part on each of them: there the batch is taken whole.
        """
        if jax.default_backend() != "cpu" or jax.device_count() > 1:
            return 1
        activations, operations = computed(self.trace.body)
        activations *= self.batch_size
        if activations < _WHOLE_BYTES:
            return 1
        again = sum(leaf_bytes(self.trace, leaf.leaf) for leaf in self.leaves) + _START_BYTES * operations
        return self._divisor(min(math.sqrt(activations / again), activations / _CHUNK_BYTES))

    def of(self, batch_size: int) -> Plan:
        """The same for another batch size."""
        plan = make_plan(self.trace, batch_size, self.scaled, self.shifted, self.paths)
        return plan.streaming(self.single) if self.streamed else plan

    def streaming(self, single: Collection[int] = ()) -> Plan:
        """The same in two passes (streamed.py), or one for those of the ``single`` parameters that can be streamed."""
        chosen = {}
        for leaf in self.leaves:
            if len(leaf.contacts) == 1 and not self.shifted and is_direct(leaf.contacts[0]):
                (contact,), one = leaf.contacts, cast(Contact, leaf.contacts[0].of_step)
                scaling = self.scaled[leaf.leaf] or not cast(Entry, contact.weight.entry).copy
                if all(is_mapped for _, is_mapped in contact.loops):
                    methods = _methods(one, scaling)
                    # What is formed in one pass is added up as well: then the norm costs next to nothing.
                    if leaf.leaf in single and self.batch_size <= _sums.ROWS and jax.device_count() == 1:
                        methods = [m for m in methods if m in ("explicit", "rank_one", "segments")]
                    chosen[contact] = min(methods, key=lambda m, c=one, s=scaling: norm_cost(c, m, s)[0])
        # Contacts that share a tap are recorded together or not at all.
        groups: dict[Contact, set[Contact]] = {}
        for contact in self.trace.contacts:
            groups.setdefault(contact.shares or contact, set()).add(contact)
        for members in groups.values():
            if not members <= chosen.keys():
                chosen = {c: m for c, m in chosen.items() if c not in members}
        leaves = {leaf for c in chosen for leaf in c.weight.leaves}
        return dataclasses.replace(self, streamed=chosen, single=leaves & frozenset(single), kept=frozenset())

    def streamed_chunk(self, contact: Contact) -> int:
        """How many examples' gradients, or Gram matrices, of one step to form at a time."""
        one, scaling = cast(Contact, contact.of_step), not cast(Entry, contact.weight.entry).copy
        return self._divisor(self._chunk_bytes / max(norm_cost(one, self.streamed[contact], scaling)[1], 1))

    def _divisor(self, most: float) -> int:
        """The largest divisor of the batch size up to ``most``, at least one."""
        return max(n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0 and n <= max(1, most))

    @property
    def prefers_vmap(self) -> bool:
        """True where plain per-example gradients should be faster by more than the margin, or are next to nothing."""
        formed = self.batch_size * sum(leaf_bytes(self.trace, leaf.leaf) for leaf in self.leaves)
        return formed <= _TINY_BYTES or self.ghost_cost > _MARGIN * self.vmap_cost


def _methods(contact: Contact, scaled: bool) -> list[str]:
    if contact.factors is None:
        return ["explicit"]
    if contact.factors.positions == 1:
        return ["rank_one"]
    if contact.factors.one_hot:
        return ["gram", "segments", "explicit"]
    return ["explicit"] if scaled else ["gram", "explicit"]


def _standardized_methods(contact: Contact, scaled: bool) -> list[str]:
    # The Gram matrices' way reads the contact's output, which must not have been rounded more than they are.
    reads_output = contact.is_precise and contact.tap_dtype == wide_dtype(contact.tap_dtype)
    return ["gram", "explicit"] if reads_output and not scaled else ["explicit"]


def _sources(trace: Trace) -> list[list[Contact]]:
    uses: list[list[Contact]] = [[] for _ in trace.leaves]
    for contact in trace.contacts:
        for leaf in contact.weight.leaves:
            uses[leaf].append(contact)
    return uses


def is_direct(contact: Contact) -> bool:
    return len(contact.weight.leaves) == 1 and contact.weight.entry is not None


def orientation(contact: Contact) -> tuple[int, int] | None:
    """The parameter's axes that are a and p at this contact, if it is a matrix used as it is."""
    entry, factors = contact.weight.entry, contact.factors
    if not is_direct(contact) or entry is None or factors is None or factors.axes is None:
        return None
    if not entry.copy or entry.order is None or len(entry.order) != 2:
        return None
    return entry.order[factors.axes[0]], entry.order[factors.axes[1]]


def make_plan(trace: Trace, batch_size: int, scaled: Sequence[bool], shifted: bool, paths: Sequence[str] = ()) -> Plan:
    """Chooses a method for every parameter.

    Args:
      trace: the traced loss.
      batch_size: examples in the batch.
      scaled: per parameter, whether a diagonal (not a mere number) multiplies its gradient.
      shifted: whether an offset is added to the gradients.
      paths: names of the parameters, for ``explain``.
    """
    uses = _sources(trace)
    activations = sum(activation_bytes(c) for c in trace.contacts)
    chosen: dict[int, tuple[str, float, float]] = {}
    normalized: dict[int, Standardized] = {}
    forming: set[Contact] = set()  # contacts whose per-example gradients must be formed
    optional: list[tuple[float, int, Contact]] = []  # ... or may be, with what keeping them saves
    for leaf, contacts in enumerate(uses):
        if not contacts:
            chosen[leaf] = ("none", 0, 0)
            continue
        contact = contacts[0]
        alone = len(contacts) == 1
        if alone and not is_direct(contact) and not shifted and (found := standardized(trace, contact)):
            normalized[leaf] = found
        if alone and (is_direct(contact) or leaf in normalized):
            if leaf in normalized:
                scaling, methods = scaled[leaf], _standardized_methods(contact, scaled[leaf])
            else:
                scaling = scaled[leaf] or not cast(Entry, contact.weight.entry).copy
                methods = _methods(contact, scaling)
            costs = {m: norm_cost(contact, m, scaling) for m in methods}
            method = min(costs, key=lambda m: costs[m][0] + (m == "explicit") * product(contact) * 1e-6)
            if method != "explicit" and "explicit" in costs and not shifted:
                saving = costs[method][0] + product(contact) - costs["explicit"][0]
                if saving > 0:
                    optional.append((saving, leaf, contact))
            if shifted and method == "explicit":
                method = "pulled_back"
            chosen[leaf] = (method, *costs.get(method, costs.get("explicit", (0, 0))))
            if method in ("explicit", "pulled_back"):
                forming.add(contact)
            continue
        tied = {orientation(c) for c in contacts}
        shared = len(contacts) > 1 and None not in tied and not scaled[leaf]
        explicit = [norm_cost(c, "explicit", scaled[leaf]) for c in contacts]
        whole = (sum(c for c, _ in explicit), sum(b for _, b in explicit) + leaf_bytes(trace, leaf))
        if shared:
            joined = shared_cost(contacts)
            if joined[0] < whole[0]:
                chosen[leaf] = ("shared_gram", *joined)
                continue
        chosen[leaf] = ("pulled_back", *whole)
        forming.update(contacts)
    budget = _KEPT_SHARE * activations
    kept: set[Contact] = set()
    for contact in sorted(forming, key=formed_bytes):
        size = 0 if contact.factors is None else formed_bytes(contact)
        if size <= min(budget, _KEPT_RATIO * activation_bytes(contact)):
            kept.add(contact)
            budget -= size
    for _, leaf, contact in sorted(optional, key=lambda o: formed_bytes(o[2]) / o[0]):
        if formed_bytes(contact) <= min(budget, _KEPT_RATIO * activation_bytes(contact)):
            kept.add(contact)
            budget -= formed_bytes(contact)
            chosen[leaf] = ("explicit", *norm_cost(contact, "explicit", scaled[leaf]))
    leaves = [
        LeafPlan(leaf, tuple(uses[leaf]), method, batch_size * operations, batch_size * size, normalized.get(leaf))
        for leaf, (method, operations, size) in sorted(chosen.items())
    ]
    for leaf in leaves:
        if leaf.standardized and leaf.method == "gram":
            leaf.contacts[0].output_read = True
    products = {c: product(c) for c in trace.contacts}
    passes = 2 * sum(products.values())  # forward, and backward to the inputs
    shared_forming = {c: 0.0 for c in forming}
    for contact in forming:  # a concatenated weight is formed once for all its parameters
        shared_forming[contact] = len(contact.weight.leaves) - 1
    repeated = sum(n * norm_cost(c, "explicit", False)[0] for c, n in shared_forming.items())
    norms = sum(chosen[leaf][1] for leaf in chosen) - repeated
    weighted = sum(OPERATIONS_PER_BYTE * formed_bytes(c) if c in kept else products[c] for c in trace.contacts)
    vmapped = sum(n * (_VMAPPED_CONVOLUTION if c.primitive is CONVOLUTION else 1) for c, n in products.items())
    per_example = 3 * OPERATIONS_PER_BYTE * sum(leaf_bytes(trace, i) for i in range(len(uses)))
    return Plan(
        trace,
        batch_size,
        leaves,
        frozenset(kept),
        ordinary_cost=batch_size * (passes + sum(products.values())),
        ghost_cost=batch_size * (passes + norms + weighted),
        vmap_cost=batch_size * (passes + vmapped + per_example),
        scaled=scaled,
        shifted=shifted,
        paths=paths,
    )


def leaf_paths(params: Any) -> list[str]:
    """The parameters' names, as ``jax.tree_util.keystr`` writes them."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
