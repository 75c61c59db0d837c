"""DP2: delayed preconditioners. Adaptive steps use a diagonal that is estimated from plain private steps."""

import jax
import optax

from dpopt.chain import PrivateOptimizer, chain
from dpopt.clipping import FixedClip, as_clip_function
from dpopt.common.types import ScalarOrSchedule
from dpopt.correlated.strategy import Strategy
from dpopt.optimizers._parts import decayed_weights, private_mean
from dpopt.optimizers._phases import clip_ratio
from dpopt.optimizers._phases import scale_by_phase_learning_rate as scale_by_phase_learning_rate
from dpopt.preconditioners.delayed import delayed_moments


def dp2(
    learning_rate: optax.ScalarOrSchedule,
    *,
    adaptive_learning_rate: optax.ScalarOrSchedule,
    adaptive_l2_clip_norm: float | jax.Array,
    delay: int | tuple[int, int],
    l2_clip_norm: FixedClip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    rule: str = "rmsprop",
    decay: float = 0.9,
    eps: float = 1e-7,
    weight_decay: float = 0.0,
    correct_noise: bool = False,
    noise: Strategy | None = None,
) -> PrivateOptimizer:
    r"""DP2: cycles of s1 steps of DP-SGD and s2 adaptive steps with a diagonal that is estimated from them.

    .. math::

        \text{plain:} \quad & \tilde g = (\textstyle\sum_i \mathrm{clip}(g_i, C_1) + \sigma C_1 z) / B, &
        w \leftarrow w - \eta_1 \tilde g \\
        \text{adaptive:} \quad & \tilde g = (\textstyle\sum_i \mathrm{clip}(g_i / D, C_2) + \sigma C_2 z) / B, &
        w \leftarrow w - \eta_2 \tilde g

    `delayed_moments` defines D. Without noise and with both clip norms ``math.inf`` this is the paper's non-private
    optimizer with delayed preconditioners.

    Args:
        learning_rate: eta_1, a number or a schedule of the step (counted over both phases).
        adaptive_learning_rate: eta_2, likewise.
        adaptive_l2_clip_norm: C2; bounds the PRECONDITIONED gradient of adaptive steps.
        delay: s for ``s1 = s2 = s``, or ``(s1, s2)``.
        l2_clip_norm: C1, or a clip function, which adaptive steps use in proportion.
        noise_multiplier, expected_batch_size, key, noise: see `dp_sgd`.
        rule, decay, eps, correct_noise: see `delayed_moments`.
        weight_decay: adds ``weight_decay * w`` to the private gradient, in both phases.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: one Gaussian query per step with multiplier sigma, in both phases.

    Reference: Li et al. (2023), Differentially Private Adaptive Optimization with Delayed Preconditioners, Algorithm 1.

    >>> opt = dp2(
    ...     0.1, adaptive_learning_rate=3.0, adaptive_l2_clip_norm=5.0, delay=195, l2_clip_norm=0.5,
    ...     noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event(step=200).noise_multiplier, 2)
    1.0
    """
    clip = as_clip_function(l2_clip_norm)
    moments = delayed_moments(
        delay,
        rule=rule,
        decay=decay,
        eps=eps,
        adaptive_clip_ratio=clip_ratio(adaptive_l2_clip_norm, clip.sensitivity),
        correct_noise=correct_noise,
    )
    core = private_mean(clip, noise_multiplier, expected_batch_size, key, noise, moments)
    rates = scale_by_phase_learning_rate(learning_rate, adaptive_learning_rate, delay)
    return chain(core, *decayed_weights(weight_decay), rates)
