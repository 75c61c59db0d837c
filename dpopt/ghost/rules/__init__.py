"""Rules: the gradient of a primitive's weight as a sum of outer products.

Wherever a weight ``w`` meets an example-dependent value ``x`` through a primitive that is linear
in ``w``, the gradient of one example's loss is

    ``G = sum_t left_t (x) right_t``         (x) is the outer product, t = 1..T

where ``left`` depends on ``x`` and ``right`` on the cotangent ``y`` of the primitive's output. For
a dense layer on a sequence, ``left_t`` is the input and ``right_t`` the output cotangent at
position ``t``. For an embedding, ``left_t`` is a one-hot vector, stored as its index. For a
convolution, there is one such sum for every offset of the filter. A rule states this factorisation
and nothing else. Norms and their costs (methods/) and weighted sums (contacts.py) follow from it,
so supporting a new primitive takes one function: see docs/adding_a_ghost_rule.md.

A primitive does not need a rule. Without one, the per-example gradients of its weight come from
JAX's own differentiation, which is exact and takes a buffer of ``B`` such weights.
"""

from dpopt.ghost.rules.base import SHIFTED_SUM as SHIFTED_SUM
from dpopt.ghost.rules.base import Factors as Factors
from dpopt.ghost.rules.base import Use as Use
from dpopt.ghost.rules.base import factors_for as factors_for
from dpopt.ghost.rules.base import lift as lift
from dpopt.ghost.rules.base import rule as rule
from dpopt.ghost.rules.convolution import conv_general_dilated as conv_general_dilated
from dpopt.ghost.rules.dense import dot_general as dot_general
from dpopt.ghost.rules.look_up import gather as gather
