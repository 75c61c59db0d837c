"""The ghost engine: clipped gradient sums at about the cost of an ordinary gradient.

Tracing the loss:

* primitives.py    properties of JAX's primitives
* values.py        the parts of a traced loss; program.py the program of these parts, which runs with taps
* trace.py         finds where parameters meet the example, and puts taps there
* linear.py        the operations through which a sum can be pulled back; cotangents.py contacts that can share a tap
* entries.py       weights that are mapped entry by entry; multiples.py those multiplied by a number; products.py
                   those that are products of matrices; complex_weights.py those with complex numbers
* derivatives.py   which uses of a weight have a derivative
* canonical.py     equations rewritten into a form that rules cover; binding.py equations as functions; convolutions.py
                   channels last, few_channels.py those whose groups are small; max_pooling.py a gradient of its own;
                   precision.py of products; experts.py matrices for groups of rows
* factored.py      contacts that a rule covers; given.py those that read an array of the example
* failures.py      the error for a loss that cannot be traced
* rules/           one function per primitive: its gradient as a sum of outer products of rows (rows.py)

Planning:

* methods/         one file per way to take squared norms from factors: where it applies, its cost, the norm
* plan.py          which of them for which parameter; planner.py chooses it by cost (costs.py, forward.py), and
                   keeping.py the formed gradients that are kept for the sum
* memory.py        chooses passes and microbatches that fit in memory; residuals.py what an ordinary gradient keeps
* layers.py        which parameters, and layers of them, can be clipped one by one
* explain.py       the plan as a table

Running:

* engine.py        the clipped sum: forward and backward to the taps, norms, weighted sum
* run.py           the passes over one batch; chunks.py a batch in chunks
* records.py       what they recorded, without copies of the batch; joined.py the gradients of parameters with several
                   uses, in place of it
* contacts.py      gradients and weighted sums at one contact; pullback.py from the contacts back to the parameters
* standardized.py  filters that are normalised on the way to a contact
* quick_sums.py    products that a GPU computes in TF32
* squares.py       bounds on what float32 loses of a square; term_sizes.py the sizes of the terms that rounding is
                   proportional to
* leaf_norms.py    norms per parameter; one_by_one.py those that float32 cannot compute that way
* weighted_sum.py  the sum; large_sums.py of a large table or matrix
* selection.py     examples left out because they are not finite; underflow.py because float32 cannot weight them
* streamed.py      the clipped sum in one or two passes that record nothing; hooks.py their computations at a contact;
                   hook_vjp.py the differentiation rule of a hook
"""

from dpopt.ghost.engine import clipped_sum as clipped_sum
from dpopt.ghost.engine import plan_clipped_sum as plan_clipped_sum
from dpopt.ghost.explain import Explanation as Explanation
from dpopt.ghost.explain import explain as explain
from dpopt.ghost.failures import CannotFollow as CannotFollow
from dpopt.ghost.layers import single_parameters as single_parameters
from dpopt.ghost.memory import Way as Way
from dpopt.ghost.memory import choose as choose
from dpopt.ghost.plan import Plan as Plan
from dpopt.ghost.rules import Factors as Factors
from dpopt.ghost.rules import Use as Use
from dpopt.ghost.rules import rule as rule
