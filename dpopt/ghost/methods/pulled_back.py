"""Gradients formed at their contacts and pulled back to the parameters, one example at a time.

For whatever a contact's weight is computed by: a low-rank product, a learned gain on a filter, a weight with several
contacts of different kinds. `leaf_norms` computes these norms for all parameters of a group together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from dpopt.ghost.costs import leaf_bytes, product
from dpopt.ghost.methods.base import Cost, Method
from dpopt.ghost.methods.explicit import EXPLICIT
from dpopt.ghost.program import Trace
from dpopt.ghost.values import Contact


class PulledBack(Method):
    """For every parameter."""

    name = "pulled_back"
    forms = True

    def cost(self, trace: Trace, leaf: int, contacts: Sequence[Contact], scaled: bool) -> Cost:
        """What the norm of one example takes: all gradients at the contacts, and that of the parameter.

        That of a weight which several contacts use alike is formed once (`contacts.used_alike`)."""
        formed = {_formed_once(c): c for c in contacts}
        once = [EXPLICIT.cost(contact, scaled) for contact in formed.values()]
        repeated = sum(product(c) for c in contacts) - sum(product(c) for c in formed.values())
        operations, extra = (sum(of) for of in zip(*once, strict=True))
        return Cost(operations + repeated, extra + leaf_bytes(trace, leaf))


def _formed_once(contact: Contact) -> Hashable:
    """About equal for contacts whose gradients are formed together."""
    factors = contact.factors
    return contact if factors is None or factors.one_hot else (contact.weight, contact.primitive, factors.shape)


PULLED_BACK = PulledBack()
