"""Noise that is correlated over steps: later steps cancel part of what earlier ones added.

* strategy.py     C, a lower-triangular Toeplitz matrix; strategies.py kinds of it
* streams.py      the three ways to draw ``C^-1 z`` step by step
* workloads.py    the sums of gradients in which the noise should be small, and the error of a strategy in them
* choice.py       the best strategy for a run
* noise.py        `add_correlated_noise`, which replaces `dpopt.add_gaussian_noise`

It needs a sampler of `dpopt.samplers.parts`.
"""

from dpopt.correlated.choice import Choice as Choice
from dpopt.correlated.choice import choices as choices
from dpopt.correlated.noise import AddCorrelatedNoiseState as AddCorrelatedNoiseState
from dpopt.correlated.noise import add_correlated_noise as add_correlated_noise
from dpopt.correlated.strategies import Strategy as Strategy
from dpopt.correlated.strategies import banded as banded
from dpopt.correlated.strategies import banded_inverse as banded_inverse
from dpopt.correlated.strategies import blt as blt
from dpopt.correlated.strategies import independent as independent
from dpopt.correlated.strategies import lambda_cgd as lambda_cgd
from dpopt.correlated.strategies import optimized_banded as optimized_banded
from dpopt.correlated.workloads import error as error
from dpopt.correlated.workloads import workload as workload
