"""DP2's ablation that asks twice a step: once to learn the diagonal, once to use it."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpopt.chain import PrivateOptimizer, chain
from dpopt.clipping import as_clip_function, as_promise
from dpopt.common import trees, validate
from dpopt.optimizers._decay import decayed_weights
from dpopt.optimizers._phases import clip_ratio, scale_by_either
from dpopt.preconditioners.base import Diagonal, apply_diagonal
from dpopt.preconditioners.moments import inverse_root, next_second_moment
from dpopt.privacy import Privacy
from dpopt.private_mean import privatize


@dataclasses.dataclass(frozen=True)
class _NotARefresh:
    """Whether a step asks the second query: all but every ``delay``-th, the first included."""

    delay: int

    def __call__(self, step: Any) -> Any:
        return step % self.delay != 0


class TwoQueriesState(NamedTuple):
    """State of the private part of `dp2_extra_query`."""

    count: jax.Array  # (), int32: steps so far
    plain: Any  # state of the query that the moments learn from
    adaptive: Any  # state of the query that adaptive steps follow
    v: Any  # like params, at least float32: second moment of the averaged private gradients
    total: Any  # like params: sum of the plain private means since v was last refreshed


def dp2_extra_query(
    learning_rate: Any,
    *,
    adaptive_l2_clip_norm: Any,
    delay: int,
    l2_clip_norm: Any,
    noise_multiplier: Any,
    expected_batch_size: Any,
    key: jax.Array,
    adaptive_learning_rate: Any = None,
    rule: str = "rmsprop",
    decay: float = 0.9,
    eps: float = 1e-7,
    weight_decay: float = 0.0,
) -> PrivateOptimizer:
    r"""DP2's ablation with an extra query: every step privatises the plain gradient, most a preconditioned one too.

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

    *Privacy*: two Gaussian queries of multiplier sigma a step on the same batch, one on every ``delay``-th step (0
    included). The second draw of those steps is discarded. The noises of the two have keys of their own.

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
    *, adaptive_l2_clip_norm: Any, delay: int, rule: str = "rmsprop", decay: float = 0.9, eps: float = 1e-7
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
    validate.one_of(("rmsprop", "adagrad", "yogi"), rule=rule)
    validate.fraction(decay=decay)
    validate.positive(eps=eps)

    def make_core(*, l2_clip_norm, noise_multiplier, expected_batch_size, key, preconditioner=()):
        if preconditioner not in ((), None):
            raise ValueError("the extra query learns a diagonal of its own: leave precondition(...) out.")
        validate.prng_key(key)
        clip = as_clip_function(l2_clip_norm)
        clip_ratio(adaptive_l2_clip_norm, clip.sensitivity)
        queries = [
            privatize(
                l2_clip_norm=norm,
                noise_multiplier=noise_multiplier,
                expected_batch_size=expected_batch_size,
                key=jax.random.fold_in(key, i),  # the two noises of a step must not be the same
            )
            for i, norm in enumerate((clip, adaptive_l2_clip_norm))
        ]
        return _two_queries(*queries, delay=int(delay), rule=rule, decay=decay, eps=eps)

    return make_core


def _two_queries(
    plain: PrivateOptimizer, adaptive: PrivateOptimizer, *, delay: int, rule: str, decay: Any, eps: Any
) -> PrivateOptimizer:
    asks_twice = _NotARefresh(delay)

    def init_fn(params):
        zeros = trees.zeros(params)
        return TwoQueriesState(jnp.zeros([], jnp.int32), plain.init(params), adaptive.init(params), zeros, zeros)

    def run(updates, state, params=None, **extra_args):
        del extra_args
        is_refresh = ~asks_twice(state.count)

        def choose(at_refresh, otherwise):
            return jax.tree.map(lambda a, b: jnp.where(is_refresh, a, b), at_refresh, otherwise)

        grads = as_promise(updates, params)
        mean1, plain_state, stddev1 = plain.run(grads, state.plain, params)
        total = jax.tree.map(jnp.add, state.total, mean1)
        gathered = jnp.where(state.count == 0, 1, delay)
        square = jax.tree.map(lambda x: jnp.square(x / gathered.astype(x.dtype)), total)
        v = choose(next_second_moment(rule, state.v, square, decay), state.v)
        total = choose(jax.tree.map(jnp.zeros_like, total), total)

        # Asked at every step, so that the step has one shape under jit; a refresh drops the answer unseen.
        mean2, adaptive_state, stddev2 = adaptive.run(
            apply_diagonal(grads, Diagonal(scale=inverse_root(v, eps))), state.adaptive, params
        )
        state = TwoQueriesState(trees.next_count(state.count), plain_state, adaptive_state, v, total)
        return choose(mean1, mean2), state, jnp.where(is_refresh, stddev1, stddev2)

    first, second = plain.privacy.queries + adaptive.privacy.queries
    privacy = Privacy((first, dataclasses.replace(second, active=asks_twice)), unit=plain.privacy.unit)
    return PrivateOptimizer(init_fn, run, privacy, (plain, adaptive))
