"""Noise that is correlated over steps: what one step adds, later steps take back in part.

* strategies.py   C, a lower-triangular Toeplitz matrix: its coefficients, and how ``C^-1 z`` is drawn step by step
* streams.py      the three ways to draw it
* workloads.py    what the noise is to be small in: sums of gradients, as an update rule adds them up
* choice.py       which strategy is the best for a run
* noise.py        `add_correlated_noise`, in the place of `dpopt.add_gaussian_noise`

Samplers that it needs are in `dpopt.samplers.parts`.
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
