"""A plan: which norm for which parameter, what it should cost, and in how many parts a batch is best taken.

planner.py makes it, for one example; whatever is said of a batch follows from that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jax

from dpopt.engines import sums
from dpopt.ghost.costs import (
    computed,
    forming_bytes,
    leaf_bytes,
    norm_cost,
)
from dpopt.ghost.program import Trace
from dpopt.ghost.standardized import Standardized
from dpopt.ghost.values import Contact, Entry

# Ghost must not lose to vmap by more than 5%; the model is trusted to that and no further.
_MARGIN = 1.05
# Where all gradients of the batch are smaller than this, both engines take the same few microseconds, and vmap half as
# long to compile (measured on networks of 300 to 70,000 parameters).
_TINY_BYTES = 1 << 16
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
    operations: float  # for one example's norm
    bytes: float  # of buffers that an ordinary gradient does not have, for one example
    standardized: Standardized | None = None  # its filters are normalised on the way to the contact


@dataclass
class Plan:
    """The trace, a method for every parameter, and the contacts whose gradients are kept.

    Costs are in operations, for one example."""

    trace: Trace
    batch_size: int
    leaves: list[LeafPlan]
    kept: frozenset[Contact]
    ordinary_cost: float
    ghost_cost: float
    vmap_cost: float
    scaled: Sequence[bool]  # what it was made for: see `planner.make_plan`
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

    @property
    def outputs(self) -> frozenset[Contact]:
        """The contacts whose outputs norms are computed from."""
        return frozenset(leaf.contacts[0] for leaf in self.leaves if leaf.standardized and leaf.method == "gram")

    def chunk(self, contacts: Sequence[Contact]) -> int:
        """How many examples to form gradients for at a time."""
        size = sum(forming_bytes(c) for c in contacts if c.factors)
        return self._divisor(self._chunk_bytes / max(size, 1))

    def fitting(self, size: float) -> int:
        """How many examples to take at a time, if each needs buffers of this many bytes."""
        return self._divisor(self._chunk_bytes / max(size, 1))

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
        plan = dataclasses.replace(self, batch_size=batch_size)
        return plan.streaming(self.single) if self.streamed else plan

    def streaming(self, single: Collection[int] = ()) -> Plan:
        """The same in two passes (streamed.py), or one for those of the ``single`` parameters that can be streamed."""
        chosen = {}
        for leaf in self.leaves:
            if len(leaf.contacts) == 1 and not self.shifted and is_direct(leaf.contacts[0]):
                (contact,), one = leaf.contacts, cast(Contact, leaf.contacts[0].of_step)
                scaling = self.scaled[leaf.leaf] or not cast(Entry, contact.weight.entry).copy
                if all(is_mapped for _, is_mapped in contact.loops):
                    ways = methods(one, scaling)
                    # What is formed in one pass is added up as well: then the norm costs next to nothing.
                    if leaf.leaf in single and self.batch_size <= sums.ROWS and jax.device_count() == 1:
                        ways = [m for m in ways if m in ("explicit", "rank_one", "segments")]
                    chosen[contact] = min(ways, key=lambda m, c=one, s=scaling: norm_cost(c, m, s)[0])
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


def methods(contact: Contact, scaled: bool) -> list[str]:
    """The ways to the norm of one contact's gradient where its weight's entries stay apart, under a diagonal or not."""
    if contact.factors is None:
        return ["explicit"]
    if contact.factors.positions == 1:
        return ["rank_one"]
    if contact.factors.one_hot:
        return ["gram", "segments", "explicit"]
    return ["explicit"] if scaled else ["gram", "explicit"]


def is_direct(contact: Contact) -> bool:
    """Whether the contact's weight is one parameter whose entries stay apart."""
    return len(contact.weight.leaves) == 1 and contact.weight.entry is not None


def orientation(contact: Contact) -> tuple[int, int] | None:
    """The parameter's axes that are a and p at this contact, if it is a matrix used as it is."""
    entry, factors = contact.weight.entry, contact.factors
    if not is_direct(contact) or entry is None or factors is None or factors.axes is None:
        return None
    if not entry.copy or entry.order is None or len(entry.order) != 2:
        return None
    return entry.order[factors.axes[0]], entry.order[factors.axes[1]]
