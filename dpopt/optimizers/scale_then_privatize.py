"""Scale-then-privatise: Adam, with gradients clipped after they are scaled as Adam scales its steps."""

import jax
import optax

from dpopt.chain import PrivateOptimizer, chain
from dpopt.common import validate
from dpopt.common.types import ScalarOrSchedule
from dpopt.correlated.strategy import Strategy
from dpopt.optimizers._parts import Clip, private_mean
from dpopt.preconditioners.moments import last_moments


def scale_then_privatize(
    learning_rate: optax.ScalarOrSchedule,
    *,
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_scale: float = 1e-2,
    weight_decay: float = 0.0,
    noise: Strategy | None = None,
) -> PrivateOptimizer:
    r"""Scales by the second moment of the last step, clips, adds noise, undoes the scale, then applies Adam.

    .. math::

        \tilde g_t = \tfrac{1}{s_t B} \big( \textstyle\sum_i \mathrm{clip}(s_t g_i, C) + \sigma C z \big), \quad
        s_t = 1 / (\sqrt{\hat v_{t-1}} + \epsilon_s), \quad s_1 = 1

    Adam is applied to :math:`\tilde g_t`; v is its second moment.

    Args:
        learning_rate: a number or a schedule.
        l2_clip_norm: C; bounds the SCALED gradient, whose norm is of the order of the root of the dimension.
        noise_multiplier, expected_batch_size, key, noise: see `dp_sgd`.
        b1, b2, eps: see ``optax.adam``.
        eps_scale: epsilon_s, positive; bounds the scale where v is small.
        weight_decay: decoupled, multiplied by the learning rate.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: one Gaussian query per step with multiplier sigma: the scale is computed from earlier releases.

    Reference: Ganesh, McMahan and Thakurta (2025), On Design Principles for Private Adaptive Optimizers, Algorithm 8.

    >>> opt = scale_then_privatize(
    ...     1e-3, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    validate.rate(learning_rate=learning_rate)
    validate.fraction(b1=b1)
    validate.non_negative(eps=eps, weight_decay=weight_decay)
    moments = last_moments(b2=b2, eps_scale=eps_scale)
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key, noise, moments)
    return chain(core, optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay))
