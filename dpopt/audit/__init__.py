"""Auditing: how much epsilon does a run spend at least, by what an attacker can tell from its results?

An attack that guesses right more often than the claimed epsilon allows has found a mistake: in the optimizer, in the
sampling, in the data pipeline, in the account. One that does not has found none. There are two kinds:

* in one run, with many canaries (`gradient_canaries`, `plant`, `one_run_bound`): as expensive as training, and the only
  kind for large models; shows about half of the truth or less;
* in many small runs, with one canary (`repeat`, `small_run`, `many_runs_bound`): nearly tight, for a small stand-in.

`report` puts a bound beside the claim. `gaussian_estimate` and the bounds on mu assume a Gaussian mechanism.

*Privacy*: where nothing else is said, a function reads released scores, the coins of canaries or runs, and counts of
them. None of these is about a person, unless a canary is.
"""

from dpopt.audit.bound import Bound as Bound
from dpopt.audit.bound import clopper_pearson as clopper_pearson
from dpopt.audit.bound import epsilon_of_rates as epsilon_of_rates
from dpopt.audit.canaries import Planted as Planted
from dpopt.audit.canaries import coordinate_usage as coordinate_usage
from dpopt.audit.canaries import gradient_canaries as gradient_canaries
from dpopt.audit.canaries import plant as plant
from dpopt.audit.examples import random_examples as random_examples
from dpopt.audit.examples import relabelled as relabelled
from dpopt.audit.gaussian import GaussianEstimate as GaussianEstimate
from dpopt.audit.gaussian import epsilon_of_mu as epsilon_of_mu
from dpopt.audit.gaussian import gaussian_estimate as gaussian_estimate
from dpopt.audit.gaussian import many_runs_mu as many_runs_mu
from dpopt.audit.gaussian import one_run_mu as one_run_mu
from dpopt.audit.gaussian import refutes_mu as refutes_mu
from dpopt.audit.many_runs import many_runs_bound as many_runs_bound
from dpopt.audit.one_run import one_run_bound as one_run_bound
from dpopt.audit.one_run import one_run_epsilon as one_run_epsilon
from dpopt.audit.one_run import one_run_p_value as one_run_p_value
from dpopt.audit.one_run import right_guesses as right_guesses
from dpopt.audit.small_runs import repeat as repeat
from dpopt.audit.small_runs import small_run as small_run
from dpopt.audit.verdict import Report as Report
from dpopt.audit.verdict import report as report
