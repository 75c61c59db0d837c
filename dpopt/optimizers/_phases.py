"""DP2's two phases, plain and adaptive: one of two learning rates, one of two clip norms."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpopt.common import trees, validate
from dpopt.common.averages import at_step


class ScaleByPhaseLearningRateState(NamedTuple):
    """State of `dpopt.optimizers.dp2.scale_by_phase_learning_rate`."""

    count: jax.Array  # (), int32: steps so far


def scale_by_either(plain: Any, adaptive: Any, is_adaptive: Any) -> optax.GradientTransformation:
    """Multiplies by minus ``plain``, or by minus ``adaptive`` where ``is_adaptive(step)``; numbers or schedules."""

    def init_fn(params):
        del params
        return ScaleByPhaseLearningRateState(jnp.zeros([], jnp.int32))

    def update_fn(updates, state, params=None):
        del params
        first, second = (at_step(rate, state.count) for rate in (plain, adaptive))
        step_size = -jnp.where(is_adaptive(state.count), second, first)
        updates = jax.tree.map(lambda u: jnp.asarray(step_size, u.dtype) * u, updates)
        return updates, ScaleByPhaseLearningRateState(trees.next_count(state.count))

    return optax.GradientTransformation(init_fn, update_fn)


def clip_ratio(adaptive: Any, plain: Any) -> Any:
    """``adaptive / plain``, of two clip norms; 1 where both are infinite.

    Raises:
        ValueError: if only one of them is infinite.
    """
    validate.positive(allow_inf=True, adaptive_l2_clip_norm=adaptive)
    infinite = [validate.concrete(c) == math.inf for c in (plain, adaptive)]
    if all(infinite):
        return 1.0  # no clip in either phase; inf / inf would be NaN
    if any(infinite):
        raise ValueError(
            f"l2_clip_norm ({plain}) and adaptive_l2_clip_norm ({adaptive}) must both be finite, or both infinite for "
            "a run without privacy."
        )
    return adaptive / plain
