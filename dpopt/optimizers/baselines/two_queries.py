"""DP2's ablation with two queries per step: one to estimate the diagonal, one to use it."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpopt.chain import PrivateOptimizer, chain
from dpopt.clipping import FixedClip, as_clip_function, as_promise
from dpopt.common import trees, validate
from dpopt.common.types import PyTree, ScalarOrSchedule
from dpopt.optimizers._parts import decayed_weights, private_mean
from dpopt.optimizers._phases import clip_ratio, scale_by_either
from dpopt.preconditioners.base import Diagonal, apply_diagonal, precondition
from dpopt.preconditioners.delayed import DelayedMoments, delayed_moments
from dpopt.preconditioners.moments import inverse_root, next_second_moment
from dpopt.privacy import Privacy


@dataclasses.dataclass(frozen=True)
class _NotARefresh:
    """Whether a step makes the second query: all steps but every ``delay``-th, counted from 0."""

    delay: int

    def __call__(self, step: jax.Array) -> jax.Array:
        return step % self.delay != 0


class TwoQueriesState(NamedTuple):
    """State of the private part of `dp2_extra_query`."""

    count: jax.Array  # (), int32: steps so far  # pyright: ignore[reportIncompatibleMethodOverride]
    plain: optax.OptState  # state of the query for the moments
    adaptive: optax.OptState  # state of the query for adaptive steps
    v: PyTree  # like params, at least float32: second moment of the averaged private gradients
    total: PyTree  # like params: sum of the plain private means since v was last refreshed


def dp2_extra_query(
    learning_rate: optax.ScalarOrSchedule,
    *,
    adaptive_l2_clip_norm: float | jax.Array,
    delay: int,
    l2_clip_norm: FixedClip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    adaptive_learning_rate: optax.ScalarOrSchedule | None = None,
    rule: str = "rmsprop",
    decay: float = 0.9,
    eps: float = 1e-7,
    weight_decay: float = 0.0,
) -> PrivateOptimizer:
    r"""DP2's ablation with an extra query: all steps privatise the plain gradient, most a preconditioned one as well.

    .. math::

        \tilde g_1 &= (\textstyle\sum_i \mathrm{clip}(g_i, C_1) + \sigma C_1 z_1) / B, \quad G \leftarrow G + \tilde g_1
        \\ \text{every s-th step:} \quad & v \leftarrow \mathrm{rule}(v, (G / n)^2), \quad G \leftarrow 0, \quad
        w \leftarrow w - \eta_1 \tilde g_1 \\
        \text{else:} \quad & \tilde g_2 = (\textstyle\sum_i \mathrm{clip}(g_i / D, C_2) + \sigma C_2 z_2) / B, \quad
        w \leftarrow w - \eta_2 \tilde g_2

    with :math:`D = \sqrt v + \epsilon` and n the number of gradients in G: 1 at the first step, s later on. (The
    paper's pseudo-code divides by s at the first step too; the authors' program does not.)

    Args:
        learning_rate: eta_1, a number or a schedule.
        adaptive_l2_clip_norm: C2; bounds the preconditioned gradient.
        delay: s, an integer.
        l2_clip_norm: C1.
        noise_multiplier: sigma of EACH query.
        expected_batch_size, key: see `dp_sgd`.
        adaptive_learning_rate: eta_2; None for eta_1.
        rule, decay, eps: see `delayed_moments`.
        weight_decay: see `dp2`.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: two Gaussian queries of multiplier sigma per step on the same batch, and only one at every ``delay``-th
    step, counted from 0 (a second draw is discarded there). The noises of the two queries have different keys.

    Reference: Li et al. (2023), Differentially Private Adaptive Optimization with Delayed Preconditioners, Algorithm 2.

    >>> opt = dp2_extra_query(
    ...     0.1, adaptive_l2_clip_norm=2.0, delay=780, l2_clip_norm=0.5, noise_multiplier=1.0, expected_batch_size=64,
    ...     key=jax.random.key(0))
    >>> round(opt.privacy.step_event(step=0).noise_multiplier, 2)
    1.0
    >>> len(opt.privacy.step_event(step=1).events)
    2
    """
    make_core = extra_query(adaptive_l2_clip_norm=adaptive_l2_clip_norm, delay=delay, rule=rule, decay=decay, eps=eps)
    core = make_core(
        l2_clip_norm=l2_clip_norm, noise_multiplier=noise_multiplier, expected_batch_size=expected_batch_size, key=key
    )
    rates = (learning_rate, learning_rate if adaptive_learning_rate is None else adaptive_learning_rate)
    return chain(core, *decayed_weights(weight_decay), scale_by_either(*rates, _NotARefresh(int(delay))))


def extra_query(
    *,
    adaptive_l2_clip_norm: float | jax.Array,
    delay: int,
    rule: str = "rmsprop",
    decay: float = 0.9,
    eps: float = 1e-7,
) -> Callable[..., PrivateOptimizer]:
    """The private part of `dp2_extra_query`, for ``Builder.mechanism``: a function with the arguments of `privatize`.

    Args:
        adaptive_l2_clip_norm, delay, rule, decay, eps: see `dp2_extra_query`.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: see `dp2_extra_query`; the multiplier is that of each query.

    >>> make_core = extra_query(adaptive_l2_clip_norm=2.0, delay=3)
    >>> core = make_core(l2_clip_norm=0.5, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> len(core.privacy.queries)
    2
    """
    validate.positive_int(delay=delay)
    moments = delayed_moments(int(delay), rule=rule, decay=decay, eps=eps)

    def make_core(
        *,
        l2_clip_norm: FixedClip,
        noise_multiplier: ScalarOrSchedule,
        expected_batch_size: float | jax.Array,
        key: jax.Array,
        preconditioner: object = (),
    ) -> PrivateOptimizer:
        if preconditioner not in ((), None):
            raise ValueError("the extra query computes its own diagonal: leave precondition(...) out.")
        validate.prng_key(key)
        clip = as_clip_function(l2_clip_norm)
        clip_ratio(adaptive_l2_clip_norm, clip.sensitivity)
        queries = [
            # With one key, the two noises of a step would be the same.
            private_mean(norm, noise_multiplier, expected_batch_size, jax.random.fold_in(key, i))
            for i, norm in enumerate((clip, adaptive_l2_clip_norm))
        ]
        return _two_queries(*queries, delay=int(delay), moments=moments)

    return make_core


def _two_queries(
    plain: PrivateOptimizer, adaptive: PrivateOptimizer, *, delay: int, moments: DelayedMoments
) -> PrivateOptimizer:
    is_adaptive = _NotARefresh(delay)

    def init_fn(params: optax.Params):
        v, total = trees.zeros(params), trees.zeros(params)  # apart, so that a training step may donate them
        return TwoQueriesState(jnp.zeros([], jnp.int32), plain.init(params), adaptive.init(params), v, total)

    def run(updates: PyTree, state: PyTree, params: optax.Params | None = None, **_: Any):
        is_refresh = ~is_adaptive(state.count)
        grads = as_promise(updates, params)
        mean1, plain_state, stddev1 = plain.run(grads, state.plain, params)
        total = jax.tree.map(jnp.add, state.total, mean1)
        gathered = jnp.where(state.count == 0, 1, delay)
        square = jax.tree.map(lambda x: jnp.square(x / gathered.astype(x.dtype)), total)
        v = optax.tree.where(is_refresh, next_second_moment(moments.rule, state.v, square, moments.decay), state.v)
        total = optax.tree.where(is_refresh, jax.tree.map(jnp.zeros_like, total), total)

        # Queried at every step, so that all steps are one program under jit; a refresh discards the result.
        mean2, adaptive_state, stddev2 = adaptive.run(
            apply_diagonal(grads, Diagonal(scale=inverse_root(v, moments.eps))), state.adaptive, params
        )
        state = TwoQueriesState(trees.next_count(state.count), plain_state, adaptive_state, v, total)
        return optax.tree.where(is_refresh, mean1, mean2), state, jnp.where(is_refresh, stddev1, stddev2)

    first, second = plain.privacy.queries + adaptive.privacy.queries
    privacy = Privacy((first, dataclasses.replace(second, active=is_adaptive)), unit=plain.privacy.unit)
    stages = (*plain.stages, precondition(moments), *adaptive.stages)  # as they are described
    return PrivateOptimizer(init_fn, run, privacy, stages)
