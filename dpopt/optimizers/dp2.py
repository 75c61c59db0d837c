"""DP2: delayed preconditioners. Plain private steps teach the diagonal that adaptive steps then use."""

from typing import Any

import jax
import optax

from dpopt.chain import PrivateOptimizer, chain
from dpopt.clipping import as_clip_function
from dpopt.correlated.strategies import Strategy
from dpopt.optimizers._decay import decayed_weights
from dpopt.optimizers._phases import clip_ratio, scale_by_either
from dpopt.preconditioners.delayed import delayed_moments, phase_lengths
from dpopt.private_mean import privatize


def dp2(
    learning_rate: Any,
    *,
    adaptive_learning_rate: Any,
    adaptive_l2_clip_norm: Any,
    delay: Any,
    l2_clip_norm: Any,
    noise_multiplier: Any,
    expected_batch_size: Any,
    key: jax.Array,
    rule: str = "rmsprop",
    decay: float = 0.9,
    eps: float = 1e-7,
    weight_decay: float = 0.0,
    correct_noise: bool = False,
    noise: Strategy | None = None,
) -> PrivateOptimizer:
    r"""DP2: s1 steps of DP-SGD, then s2 adaptive steps with the diagonal learned from them, and again.

    .. math::

        \text{plain:} \quad & \tilde g = (\textstyle\sum_i \mathrm{clip}(g_i, C_1) + \sigma C_1 z) / B, &
        w \leftarrow w - \eta_1 \tilde g \\
        \text{adaptive:} \quad & \tilde g = (\textstyle\sum_i \mathrm{clip}(g_i / D, C_2) + \sigma C_2 z) / B, &
        w \leftarrow w - \eta_2 \tilde g

    See `delayed_moments` for D. Without noise and with both clip norms ``math.inf`` this is the paper's non-private
    optimizer with delayed preconditioners.

    Args:
        learning_rate: eta_1, a number or a schedule of the step (counted over both phases).
        adaptive_learning_rate: eta_2, likewise.
        adaptive_l2_clip_norm: C2; bounds the PRECONDITIONED gradient of adaptive steps.
        delay: s for ``s1 = s2 = s``, or ``(s1, s2)``.
        l2_clip_norm: C1, or a clip function; adaptive steps then use the same function, in proportion.
        noise_multiplier, expected_batch_size, key: see `dp_sgd`.
        rule, decay, eps, correct_noise: see `delayed_moments`.
        weight_decay: adds ``weight_decay * w`` to the private gradient, in both phases.
        noise: a strategy of `dpopt.correlated`, for noise that is correlated over steps; None: independent noise.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: one Gaussian query a step with multiplier sigma, in either phase.

    Reference: Li, Zaheer, Liu, Reddi, McMahan and Smith (2023), Differentially Private Adaptive Optimization with
    Delayed Preconditioners, Algorithm 1.

    >>> opt = dp2(
    ...     0.1, adaptive_learning_rate=3.0, adaptive_l2_clip_norm=5.0, delay=195, l2_clip_norm=0.5,
    ...     noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event(step=200).noise_multiplier, 2)
    1.0
    """
    clip = as_clip_function(l2_clip_norm)
    core = privatize(
        l2_clip_norm=clip,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        key=key,
        noise=noise,
        preconditioner=delayed_moments(
            delay,
            rule=rule,
            decay=decay,
            eps=eps,
            adaptive_clip_ratio=clip_ratio(adaptive_l2_clip_norm, clip.sensitivity),
            correct_noise=correct_noise,
        ),
    )
    rates = scale_by_phase_learning_rate(learning_rate, adaptive_learning_rate, delay)
    return chain(core, *decayed_weights(weight_decay), rates)


def scale_by_phase_learning_rate(
    learning_rate: Any, adaptive_learning_rate: Any, delay: Any
) -> optax.GradientTransformation:
    """Multiplies by minus one learning rate in DP2's plain phase, and by minus another in its adaptive phase.

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
