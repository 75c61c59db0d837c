"""The fast engine: clipped gradient sums at about the price of an ordinary gradient.

* primitives.py    what there is to know about JAX's primitives
* values.py, program.py  the traced loss: its parts, and the program that they make, which runs with taps
* trace.py         finds where parameters meet the example, and puts taps there; linear.py through what a sum is pulled
                   back; cotangents.py where one tap is enough; canonical.py equations in the form that is fast or that
                   rules know; factored.py contacts that a rule covers; failures.py what is said where nothing will do
* rules/           one function per primitive: its gradient as a sum of outer products, of rows.py
* norms.py         per-example squared norms from those factors, with bounds on what float32 loses (squares.py);
                   standardized.py through normalised filters
* plan.py          which norm for which parameter; planner.py chooses by cost (costs.py), memory.py the way that fits
* explain.py       the same as a table
* engine.py        the clipped sum: forward and backward to the taps, norms, weighted sum
* run.py           the passes of one batch; contacts.py what is computed at one contact; chunks.py some examples at a
                   time; pullback.py from the contacts back to the parameters
* leaf_norms.py    norms per parameter; one_by_one.py those that float32 cannot tell otherwise
* weighted_sum.py  the sum; selection.py, weighing.py which examples are left out of it
* streamed.py      the clipped sum in one pass, or two, that record nothing; hooks.py what they do at a contact
"""

from dpopt.ghost.engine import GhostResult as GhostResult
from dpopt.ghost.engine import clipped_sum as clipped_sum
from dpopt.ghost.engine import plan_clipped_sum as plan_clipped_sum
from dpopt.ghost.explain import Explanation as Explanation
from dpopt.ghost.explain import explain as explain
from dpopt.ghost.failures import CannotFollow as CannotFollow
from dpopt.ghost.memory import Way as Way
from dpopt.ghost.memory import choose as choose
from dpopt.ghost.memory import single_parameters as single_parameters
from dpopt.ghost.plan import Plan as Plan
from dpopt.ghost.rules import Factors as Factors
from dpopt.ghost.rules import Use as Use
from dpopt.ghost.rules import rule as rule
