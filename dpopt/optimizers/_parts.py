"""Parts that most optimizers share: the private mean gradient and weight decay."""

import numbers
from typing import TypeAlias

import jax
import optax

from dpopt.chain import PrivateOptimizer
from dpopt.clipping import AdaptiveClip, FixedClip
from dpopt.common import validate
from dpopt.common.types import ScalarOrSchedule
from dpopt.correlated.strategy import Strategy
from dpopt.preconditioners.base import Preconditioner
from dpopt.private_mean import privatize

Clip: TypeAlias = FixedClip | AdaptiveClip  # C, a clip function, or one with a state


def private_mean(
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    noise: Strategy | None = None,
    preconditioner: Preconditioner | None = None,
) -> PrivateOptimizer:
    """`privatize`, with the privacy arguments in the order in which all optimizers have them."""
    return privatize(
        l2_clip_norm=l2_clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        key=key,
        noise=noise,
        preconditioner=preconditioner,
    )


def descent(learning_rate: ScalarOrSchedule) -> optax.GradientTransformation:
    """The last stage: multiplies by ``-learning_rate``, a number of at least 0 or a schedule."""
    validate.rate(learning_rate=learning_rate)
    return optax.scale_by_learning_rate(learning_rate)


def decayed_weights(weight_decay: float | jax.Array) -> tuple[optax.GradientTransformation, ...]:
    """The stage that adds ``weight_decay * params``; none if that is 0, so that ``update`` needs no parameters.

    Only a number can be seen to be 0: under `optax.inject_hyperparams` an array is known to ``init`` and not to
    ``update``, which must have the same stages."""
    validate.non_negative(weight_decay=weight_decay)
    return (
        ()
        if isinstance(weight_decay, numbers.Real) and weight_decay == 0
        else (optax.add_decayed_weights(weight_decay),)
    )
