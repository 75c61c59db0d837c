"""Layers of a stacked parameter that are clipped one by one, as `dpopt.LayerwiseClip` does.

Their coefficients apply within the step of the loop that reads a layer, so all of its gradient has to be there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from jax.typing import ArrayLike

from dpopt.engines import sums
from dpopt.ghost.plan import Plan
from dpopt.ghost.values import Contact, Entry


def is_by_layer(plan: Plan, leaf: int) -> bool:
    """Whether the gradient of each layer of a parameter is that of one contact in one step, or there is none."""
    contacts = plan.leaves[leaf].contacts
    if len(contacts) != 1 or not contacts[0].is_direct:
        return not contacts
    (contact,) = contacts
    on_weight = int(contact.apply is None)  # outside loops, such a contact has all layers
    return all(is_mapped for _, is_mapped in contact.loops) and cast(Entry, contact.weight.entry).layers == (
        len(contact.loops) or on_weight
    )


def single_parameters(plan: Plan, limits: Sequence[ArrayLike | None], layer_axes: Sequence[int]) -> frozenset[int]:
    """The parameters that can be clipped as soon as their gradients are computed, in one pass."""
    if all(limit is None for limit in limits):
        return frozenset()
    # The remainder of a float sum cannot be multiplied: that would round the sum as a whole.
    may_multiply = not sums.needs_remainder(plan.batch_size)

    def is_single(contact: Contact) -> bool:
        (leaf,) = contact.weight.leaves
        is_alone = len(plan.leaves[leaf].contacts) == 1 and not contact.loops
        is_apart = is_by_layer(plan, leaf) if layer_axes and layer_axes[leaf] else is_alone
        is_exact = may_multiply or (contact.is_copy and not plan.scaled[leaf])
        return limits[leaf] is not None and is_apart and is_exact

    return frozenset(leaf for c in plan.streaming().streamed if is_single(c) for leaf in c.weight.leaves)


def why_not_by_layer(plan: Plan, leaf: int) -> str:
    """Why the layers of a parameter cannot be clipped one by one."""
    contacts = plan.leaves[leaf].contacts
    if not contacts:
        what = "is not read, but has an offset added"
    elif is_by_layer(plan, leaf):
        what = (
            f"is multiplied by a diagonal or changed on its way, and a sum of {plan.batch_size} examples is in pairs "
            "of floats, which cannot be multiplied: a microbatch_size of 256 makes it one of floats"
        )
    elif len(contacts) > 1:
        what = f"is used in {len(contacts)} ways"
    elif not all(c.is_direct for c in contacts):
        what = "is changed on its way to its layer (normalised, put in another order, read by index)"
    else:
        what = "is not read one layer a step, each once, by a single scan"
    return f"{plan.paths[leaf]}, whose layers are clipped one by one, {what}"
