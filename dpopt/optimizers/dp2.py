"""DP2: delayed preconditioners. Adaptive steps use a diagonal that is estimated from plain private steps."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpopt.chain import PrivateOptimizer, chain
from dpopt.clipping import FixedClip, as_clip_function
from dpopt.common import trees, validate
from dpopt.common.averages import at_step
from dpopt.common.types import PyTree, ScalarOrSchedule
from dpopt.correlated.strategies import Strategy
from dpopt.optimizers._parts import decayed_weights, private_mean
from dpopt.preconditioners.delayed import delayed_moments, phase_lengths


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


class ScaleByPhaseLearningRateState(NamedTuple):
    """State of `scale_by_phase_learning_rate`."""

    count: jax.Array  # (), int32: steps so far  # pyright: ignore[reportIncompatibleMethodOverride]


def scale_by_phase_learning_rate(
    learning_rate: optax.ScalarOrSchedule,
    adaptive_learning_rate: optax.ScalarOrSchedule,
    delay: int | tuple[int, int],
) -> optax.GradientTransformation:
    """Multiplies by the negative learning rate of DP2's phase, plain or adaptive.

    Args:
        learning_rate: number, or schedule of the step (over both phases), for the s1 plain steps of a cycle.
        adaptive_learning_rate: likewise for the s2 adaptive steps.
        delay: s or ``(s1, s2)``, as in `delayed_moments`.

    Raises:
        ValueError, TypeError: for a bad delay.

    *Privacy*: post-processing.

    >>> rates = scale_by_phase_learning_rate(0.5, 2.0, delay=1)
    >>> first, state = rates.update(jnp.ones(1), rates.init(jnp.zeros(1)))
    >>> first.tolist(), rates.update(jnp.ones(1), state)[0].tolist()
    ([-0.5], [-2.0])
    """
    s1, s2 = phase_lengths(delay)
    return scale_by_either(learning_rate, adaptive_learning_rate, lambda count: count % (s1 + s2) >= s1)


def scale_by_either(
    plain: optax.ScalarOrSchedule,
    adaptive: optax.ScalarOrSchedule,
    is_adaptive: Callable[[jax.Array], jax.Array],
) -> optax.GradientTransformation:
    """Multiplies by ``-adaptive`` at steps where ``is_adaptive(step)`` holds, and by ``-plain`` at others."""

    def init_fn(params: optax.Params):
        del params
        return ScaleByPhaseLearningRateState(jnp.zeros([], jnp.int32))

    def update_fn(updates: optax.Updates, state: PyTree, params: optax.Params | None = None):
        del params
        first, second = (at_step(rate, state.count) for rate in (plain, adaptive))
        step_size = -jnp.where(is_adaptive(state.count), second, first)
        updates = jax.tree.map(lambda u: jnp.asarray(step_size, u.dtype) * u, updates)
        return updates, ScaleByPhaseLearningRateState(trees.next_count(state.count))

    return optax.GradientTransformation(init_fn, update_fn)


def clip_ratio(adaptive: float | jax.Array, plain: float | jax.Array) -> float | jax.Array:
    """``adaptive / plain`` for two clip norms; 1 if both are infinite, an error if only one is."""
    validate.positive(allow_inf=True, adaptive_l2_clip_norm=adaptive)
    infinite = [validate.concrete(c) == math.inf for c in (plain, adaptive)]
    if all(infinite):
        return 1.0  # no clip in either phase; inf / inf would be NaN
    if any(infinite):
        raise ValueError(
            f"l2_clip_norm ({plain}) and adaptive_l2_clip_norm ({adaptive}) must both be finite, or both infinite "
            "(without privacy)."
        )
    return adaptive / plain
