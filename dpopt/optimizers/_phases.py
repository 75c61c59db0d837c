"""The learning rates and clip norms of DP2's two phases, plain and adaptive."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpopt.common import trees, validate
from dpopt.common.averages import at_step
from dpopt.common.types import PyTree
from dpopt.preconditioners.delayed import phase_lengths


class ScaleByPhaseLearningRateState(NamedTuple):
    """State of `dpopt.optimizers.dp2.scale_by_phase_learning_rate`."""

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
    validate.rate(learning_rate=plain, adaptive_learning_rate=adaptive)

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
    validate.positive(allow_inf=True, l2_clip_norm=plain, adaptive_l2_clip_norm=adaptive)
    infinite = [validate.concrete(c) == math.inf for c in (plain, adaptive)]
    if all(infinite):
        return 1.0  # no clip in either phase; inf / inf would be NaN
    if any(infinite):
        raise ValueError(
            f"l2_clip_norm ({plain}) and adaptive_l2_clip_norm ({adaptive}) must both be finite, or both infinite "
            "(without privacy)."
        )
    return adaptive / plain
