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


class ScaleByPhaseLearningRateState(NamedTuple):
    """State of `dpopt.optimizers.dp2.scale_by_phase_learning_rate`."""

    count: jax.Array  # (), int32: steps so far


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
    """``adaptive / plain`` for two clip norms; 1 if both are infinite.

    Raises:
        ValueError: if only one of them is infinite.
    """
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
