"""Differentially private training in JAX: a private optimizer = a diagonal x a clip x noise x any Optax rule.

>>> import jax, jax.numpy as jnp, optax, dpopt
>>> loss_fn = lambda w, example: (w @ example["x"] - example["y"]) ** 2
>>> opt = dpopt.dp_adam(1e-2, l2_clip_norm=1.0, noise_multiplier=1.1, expected_batch_size=4, key=jax.random.key(0))
>>> params = jnp.zeros(2)
>>> state = opt.init(params)
>>> batch = {"x": jnp.ones((4, 2)), "y": jnp.ones(4)}
>>> grads = dpopt.per_example_grads(loss_fn)(params, batch)
>>> updates, state = opt.update(grads, state, params)
>>> params = optax.apply_updates(params, updates)
"""

from importlib import metadata as _metadata

# What did it cost?
from dpopt.accounting import Ledger as Ledger
from dpopt.accounting import calibrate as calibrate
from dpopt.accounting import epsilon as epsilon
from dpopt.accounting import epsilon_of_event as epsilon_of_event

# How is a whole run said in one sentence?
from dpopt.builder import Budget as Budget
from dpopt.builder import Builder as Builder
from dpopt.builder import Plan as Plan

# How do parts make an optimizer?
from dpopt.chain import PrivateOptimizer as PrivateOptimizer
from dpopt.chain import chain as chain
from dpopt.chain import privatize as privatize

# How is one example's influence bounded?
from dpopt.clipping import FlatClip as FlatClip
from dpopt.clipping import GroupClip as GroupClip
from dpopt.clipping import NormalizedClip as NormalizedClip
from dpopt.clipping import clip_and_sum as clip_and_sum
from dpopt.events import privacy_event as privacy_event

# Where do gradients come from?
from dpopt.gradients import PerExampleGrads as PerExampleGrads
from dpopt.gradients import per_example_grads as per_example_grads

# Where is noise added?
from dpopt.noise import add_gaussian_noise as add_gaussian_noise
from dpopt.noise import normalize_by as normalize_by

# Which optimizer?
from dpopt.optimizers.sgd import dp_adagrad as dp_adagrad
from dpopt.optimizers.sgd import dp_adam as dp_adam
from dpopt.optimizers.sgd import dp_adamw as dp_adamw
from dpopt.optimizers.sgd import dp_rmsprop as dp_rmsprop
from dpopt.optimizers.sgd import dp_sgd as dp_sgd
from dpopt.optimizers.sgd import dp_yogi as dp_yogi

# What geometry before the clip?
from dpopt.preconditioning import precondition as precondition
from dpopt.preconditioning import precondition_by_side_information as precondition_by_side_information
from dpopt.preconditioning import side_information as side_information
from dpopt.privacy import Privacy as Privacy
from dpopt.privacy import privacy_of as privacy_of

# Which examples, which step?
from dpopt.sampling import FixedSizeSampler as FixedSizeSampler
from dpopt.sampling import PoissonSampler as PoissonSampler
from dpopt.training import SensitiveMetrics as SensitiveMetrics
from dpopt.training import TrainStep as TrainStep
from dpopt.training import make_train_step as make_train_step

__version__ = _metadata.version("dpopt")
