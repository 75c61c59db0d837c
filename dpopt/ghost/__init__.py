"""The fast engine: clipped gradient sums at about the price of an ordinary gradient.

* trace.py   finds where parameters meet the example, and puts taps there
* program.py the traced loss as a program that runs with taps
* rules.py   one function per primitive: its gradient as a sum of outer products
* norms.py   per-example squared norms from those factors
* plan.py   which norm for which parameter, at what cost
* explain.py the same as a table
* engine.py  the clipped sum: forward and backward to the taps, norms, weighted sum
* run.py     those steps, for one batch; canonical.py convolutions in the order that is fast
"""

from dpopt.ghost.engine import GhostResult as GhostResult
from dpopt.ghost.engine import clipped_sum as clipped_sum
from dpopt.ghost.engine import plan_clipped_sum as plan_clipped_sum
from dpopt.ghost.explain import Explanation as Explanation
from dpopt.ghost.explain import explain as explain
from dpopt.ghost.plan import Plan as Plan
from dpopt.ghost.rules import Factors as Factors
from dpopt.ghost.rules import Use as Use
from dpopt.ghost.rules import rule as rule
from dpopt.ghost.trace import CannotFollow as CannotFollow
