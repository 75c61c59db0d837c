"""Squared norms of per-example gradients: one file per method, with where it applies, what it costs, and the norm.

With ``G = sum_t l_t (x) r_t`` (rules/) there are five exact methods, of which the planner picks one:

* ``rank_one``  T = 1:  ``|G|^2 = |l|^2 |r|^2``; with a diagonal S, as ``pairs``.
* ``pairs``     few T and a diagonal S: ``sum_ts (l_t l_s) @ (S^2) . (r_t r_s)``: one matmul of ``T (T + 1) / 2`` rows.
* ``gram``      ``|G|^2 = <l l', r r'>``, both T x T: ``T^2 (a + p)`` operations and no weight-sized buffer.
* ``segments``  one-hot ``l`` (embeddings): add up the rows with equal index, then square.
* ``explicit``  form G (``T a p`` operations, as many as the weighted sum, which can then reuse it).

Where contacts read different parts of a parameter, each has a method (``apart``). A matrix that several contacts use
has methods of its own (shared.py), and the gradients of what is neither are formed and pulled back (pulled_back.py).
standardized.py has the norms behind normalised filters.
"""

from dpopt.ghost.methods.base import APART as APART
from dpopt.ghost.methods.base import NO_CONTACT as NO_CONTACT
from dpopt.ghost.methods.base import AtContact as AtContact
from dpopt.ghost.methods.base import FromFactors as FromFactors
from dpopt.ghost.methods.base import Method as Method
from dpopt.ghost.methods.explicit import EXPLICIT as EXPLICIT
from dpopt.ghost.methods.gram import GRAM as GRAM
from dpopt.ghost.methods.pairs import PAIRS as PAIRS
from dpopt.ghost.methods.pulled_back import PULLED_BACK as PULLED_BACK
from dpopt.ghost.methods.rank_one import RANK_ONE as RANK_ONE
from dpopt.ghost.methods.segments import SEGMENTS as SEGMENTS
from dpopt.ghost.methods.shared import Shared as Shared
from dpopt.ghost.methods.shared import shared_methods as shared_methods
from dpopt.ghost.values import Contact

AT_CONTACT: tuple[AtContact, ...] = (RANK_ONE, PAIRS, GRAM, SEGMENTS, EXPLICIT)


def methods_at(contact: Contact, scaled: bool) -> list[AtContact]:
    """The methods for a contact whose weight keeps its entries apart, with a diagonal or without."""
    return [method for method in AT_CONTACT if method.applies(contact, scaled)]
