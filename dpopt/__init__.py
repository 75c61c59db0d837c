"""Differentially private training in JAX: a private optimizer = a diagonal x a clip x noise x any Optax rule.

>>> import jax, jax.numpy as jnp, optax, dpopt
>>> loss_fn = lambda w, example: (w @ example["x"] - example["y"]) ** 2
>>> opt = dpopt.dp_adam(1e-2, l2_clip_norm=1.0, noise_multiplier=1.1, expected_batch_size=4, key=jax.random.key(0))
>>> params = jnp.zeros(2)
>>> state = opt.init(params)
>>> batch = {"x": jnp.ones((4, 2)), "y": jnp.ones(4)}
>>> grads = dpopt.per_example_grads(loss_fn)(params, batch, mask=None)
>>> updates, state = opt.update(grads, state, params)
>>> params = optax.apply_updates(params, updates)
"""

import importlib as _importlib
import typing as _typing
from importlib import metadata as _metadata

from dpopt import _moved

# Per-example gradients
from dpopt.gradients import per_example_grads as per_example_grads
from dpopt.verification import verify as verify

# Clipping
from dpopt.clipping import FlatClip as FlatClip
from dpopt.clipping import GroupClip as GroupClip
from dpopt.clipping import LayerwiseClip as LayerwiseClip
from dpopt.clipping import clip_and_sum as clip_and_sum

# Preconditioning
from dpopt.preconditioners.base import precondition as precondition
from dpopt.preconditioners.base import precondition_by_side_information as precondition_by_side_information
from dpopt.preconditioners.base import side_information as side_information
from dpopt.preconditioners.moments import last_moments as last_moments
from dpopt.preconditioners.moments import public_moments as public_moments
from dpopt.preconditioners.delayed import delayed_moments as delayed_moments

# Noise
from dpopt.noise import add_gaussian_noise as add_gaussian_noise
from dpopt.noise import normalize_by as normalize_by

# Composition of a private optimizer
from dpopt.chain import PrivateOptimizer as PrivateOptimizer
from dpopt.chain import chain as chain
from dpopt.private_mean import privatize as privatize
from dpopt.inspection import privacy_event as privacy_event
from dpopt.inspection import privacy_of as privacy_of

# Accounting
from dpopt.ledger import Ledger as Ledger
from dpopt.accounting import calibrate as calibrate
from dpopt.accounting import epsilon as epsilon
from dpopt.accounting import epsilon_of_event as epsilon_of_event

# Sampling
from dpopt.sampling import FixedSizeSampler as FixedSizeSampler
from dpopt.sampling import PoissonSampler as PoissonSampler
from dpopt.samplers import truncated as truncated
from dpopt.run.loading import Steps as Steps

# Named optimizers
from dpopt.optimizers.sgd import dp_adagrad as dp_adagrad
from dpopt.optimizers.sgd import dp_adam as dp_adam
from dpopt.optimizers.sgd import dp_adamw as dp_adamw
from dpopt.optimizers.sgd import dp_rmsprop as dp_rmsprop
from dpopt.optimizers.sgd import dp_sgd as dp_sgd
from dpopt.optimizers.sgd import dp_yogi as dp_yogi
from dpopt.optimizers.adadps import adadps as adadps
from dpopt.optimizers.dp2 import dp2 as dp2
from dpopt.optimizers.adam_bc import dp_adam_bc as dp_adam_bc
from dpopt.optimizers.adam_bc import scale_by_adam_bc as scale_by_adam_bc
from dpopt.optimizers.microadam import dp_micro_adam as dp_micro_adam
from dpopt.optimizers.microadam import scale_by_micro_adam as scale_by_micro_adam
from dpopt.optimizers.scale_then_privatize import scale_then_privatize as scale_then_privatize
from dpopt.optimizers.public import warm_start as warm_start

# Averaging of parameters
from dpopt.optimizers.averaging import average_params as average_params

# Description of a whole run
from dpopt.run.plan import Budget as Budget
from dpopt.run.builder import Builder as Builder
from dpopt.run.plan import Plan as Plan

# Training within a budget, and resuming (checkpoints: dpopt.run.checkpoint, which needs orbax)
from dpopt.run.training import make_train_step as make_train_step
from dpopt.run.results import BudgetExceeded as BudgetExceeded
from dpopt.run.loop import train as train
from dpopt.keys import example_keys as example_keys
from dpopt.keys import secure_key as secure_key
from dpopt.keys import secure_seed as secure_seed

# Modules: baselines of the papers, user-level privacy, many devices, tuning, diagnostics and more
from dpopt import adaptive as adaptive
from dpopt.optimizers import baselines as baselines
from dpopt import correlated as correlated
from dpopt import diagnostics as diagnostics
from dpopt import federated as federated
from dpopt.run import loading as loading
from dpopt.run import sharding as sharding
from dpopt import sparse as sparse
from dpopt import tuning as tuning
from dpopt import users as users

# The ghost engine, imported on first use: see common/lazy.py
_LATER = "explain", "ghost"

__version__ = _metadata.version("dpopt")


if _typing.TYPE_CHECKING:
    from dpopt import ghost as ghost
    from dpopt.ghost import explain as explain
else:  # hidden from type checkers, for which every name would exist
    _moved.install()

    def __getattr__(name: str):
        if name in _LATER:
            module = _importlib.import_module("dpopt.ghost")
            return module.explain if name == "explain" else module
        return _moved.attribute("dpopt", name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})
