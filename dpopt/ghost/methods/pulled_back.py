"""Gradients formed at their contacts and pulled back to the parameters, one example at a time.

For whatever a contact's weight is computed by: a low-rank product, a learned gain on a filter, a weight with several
contacts of different kinds. `leaf_norms` computes these norms for all parameters of a group together.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpopt.ghost.costs import leaf_bytes
from dpopt.ghost.methods.base import Cost, Method
from dpopt.ghost.methods.explicit import EXPLICIT
from dpopt.ghost.program import Trace
from dpopt.ghost.values import Contact


class PulledBack(Method):
    """For every parameter."""

    name = "pulled_back"
    forms = True

    def cost(self, trace: Trace, leaf: int, contacts: Sequence[Contact], scaled: bool) -> Cost:
        """What the norm of one example takes: all gradients at the contacts, and that of the parameter."""
        formed = [EXPLICIT.cost(contact, scaled) for contact in contacts]
        return Cost(sum(c.operations for c in formed), sum(c.bytes for c in formed) + leaf_bytes(trace, leaf))


PULLED_BACK = PulledBack()
