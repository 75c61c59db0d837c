"""DP2's ablation that adds noise first, and preconditions the noisy mean."""

import jax
import optax

from dpopt.chain import PrivateOptimizer, chain
from dpopt.common.types import ScalarOrSchedule
from dpopt.optimizers._parts import Clip, decayed_weights, private_mean
from dpopt.optimizers._phases import scale_by_phase_learning_rate
from dpopt.optimizers.baselines.after_noise import precondition_after_noise
from dpopt.preconditioners.delayed import delayed_moments


def dp2_noise_first(
    learning_rate: optax.ScalarOrSchedule,
    *,
    adaptive_learning_rate: optax.ScalarOrSchedule,
    delay: int | tuple[int, int],
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    rule: str = "rmsprop",
    decay: float = 0.9,
    eps: float = 1e-7,
    weight_decay: float = 0.0,
    correct_noise: bool = False,
) -> PrivateOptimizer:
    r"""DP2's ablation that adds noise first: adaptive steps are :math:`w \leftarrow w - \eta_2\, \tilde g / D`.

    There is one clip norm, since only plain gradients are clipped; dividing by D scales the noise with the gradient.

    Args:
        learning_rate, adaptive_learning_rate, delay, rule, decay, eps, weight_decay, correct_noise: see `dp2`.
        l2_clip_norm, noise_multiplier, expected_batch_size, key: see `dp_sgd`.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: one Gaussian query per step with multiplier sigma; the rest is post-processing.

    Reference: Li et al. (2023), section 5.3 and appendix D, ablation variant 2.

    >>> opt = dp2_noise_first(
    ...     0.3, adaptive_learning_rate=0.3, delay=780, l2_clip_norm=0.25, noise_multiplier=1.0,
    ...     expected_batch_size=64, key=jax.random.key(0), eps=1e-3)
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key)
    moments = delayed_moments(delay, rule=rule, decay=decay, eps=eps, correct_noise=correct_noise)
    rates = scale_by_phase_learning_rate(learning_rate, adaptive_learning_rate, delay)
    return chain(core, precondition_after_noise(moments), *decayed_weights(weight_decay), rates)
