"""The private mean gradient, which every named optimizer starts with."""

import math
from typing import cast

import jax
import jax.numpy as jnp
from jax.core import Tracer

from dpopt.chain import PrivateOptimizer, chain
from dpopt.clipping import AdaptiveClip, FixedClip, as_clip_function, clip_and_sum
from dpopt.common import trees, validate
from dpopt.common.types import ScalarOrSchedule
from dpopt.correlated.noise import add_correlated_noise
from dpopt.correlated.strategy import Strategy
from dpopt.noise import add_gaussian_noise, normalize_by
from dpopt.preconditioners.base import Preconditioner, precondition


def privatize(
    *,
    l2_clip_norm: FixedClip | AdaptiveClip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    preconditioner: Preconditioner | tuple[Preconditioner, ...] | None = None,
    noise: Strategy | None = None,
) -> PrivateOptimizer:
    r"""The private mean gradient: :math:`(\sum_i \mathrm{clip}(S g_i) + \sigma C z) / B`.

    Args:
        l2_clip_norm: C, or a clip function of `dpopt.clipping`, or `dpopt.adaptive.quantile_clip`.
        noise_multiplier: sigma, the noise's standard deviation over the sensitivity, or a schedule. 0: no privacy.
        expected_batch_size: B, a public constant.
        key: PRNG key for the noise, used for nothing else.
        noise: None for independent noise; a strategy of `dpopt.correlated` needs a sampler of `dpopt.samplers.parts`.
        preconditioner: where S comes from (`dpopt.preconditioners.base`): one, a tuple (they multiply), or None.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: one Gaussian query per step with multiplier sigma, under add/remove of one example.

    >>> core = privatize(l2_clip_norm=1.0, noise_multiplier=0.0, expected_batch_size=2, key=jax.random.key(0))
    >>> mean, _ = core.update(jnp.array([[3.0, 4.0], [0.0, 0.5]]), core.init(jnp.zeros(2)), jnp.zeros(2))
    >>> [round(x, 3) for x in mean.tolist()]
    [0.3, 0.65]
    """
    if not callable(noise_multiplier):
        validate.non_negative(noise_multiplier=noise_multiplier)
    validate.positive(expected_batch_size=expected_batch_size)
    if not isinstance(preconditioner, tuple):
        preconditioner = () if preconditioner is None else (preconditioner,)
    if isinstance(l2_clip_norm, AdaptiveClip):
        return l2_clip_norm.private_mean(
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            key=key,
            preconditioner=preconditioner,
            noise=noise,
        )
    clip = as_clip_function(l2_clip_norm)
    stages = tuple(precondition(p) for p in preconditioner)
    stddev = noise_stddev(noise_multiplier, clip.sensitivity)
    added = add_gaussian_noise(stddev, key) if noise is None else add_correlated_noise(noise, stddev, key)
    return chain(*stages, clip_and_sum(clip), added, normalize_by(expected_batch_size))


def noise_stddev(noise_multiplier: ScalarOrSchedule, sensitivity: float | jax.Array) -> ScalarOrSchedule:
    """The standard deviation of the noise on a sum of this sensitivity: a number, or a schedule if the multiplier is.

    Raises:
        ValueError: if the multiplier is positive and the sensitivity infinite or 0.

    *Privacy*: arithmetic on public constants.

    >>> noise_stddev(2.0, 0.5), noise_stddev(0.0, math.inf)
    (1.0, 0.0)
    """
    if callable(noise_multiplier):
        return lambda step: trees.widened(noise_multiplier(step)) * trees.widened(sensitivity)
    noise_multiplier = cast(float | jax.Array, trees.widened(noise_multiplier))
    sensitivity = cast(float | jax.Array, trees.widened(sensitivity))
    if validate.concrete(noise_multiplier) == 0:
        return 0.0  # 0 * inf is not 0
    if isinstance(noise_multiplier, Tracer):
        return jnp.where(noise_multiplier == 0, 0.0, noise_multiplier * sensitivity)
    if validate.concrete(sensitivity) == math.inf:
        raise ValueError(
            "noise_multiplier > 0 needs a finite l2_clip_norm: noise scaled to an infinite norm is infinite. Set "
            "noise_multiplier=0 to switch privacy off."
        )
    if validate.concrete(sensitivity) == 0:
        raise ValueError("l2_clip_norm=0 scales every example to zero: pass a positive one.")
    return noise_multiplier * sensitivity
