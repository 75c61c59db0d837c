"""DP2's diagonal: the second moment of private gradients, averaged over a delay to reduce the noise in it."""

import dataclasses
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpopt.common import trees, validate
from dpopt.common.types import PyTree
from dpopt.preconditioners.base import Diagonal
from dpopt.preconditioners.moments import inverse_root, next_second_moment


def phase_lengths(delay: int | tuple[int, int]) -> tuple[int, int]:
    """The numbers of plain and of adaptive steps in a cycle, from ``delay``: ``s`` or ``(s1, s2)``.

    Raises:
        ValueError, TypeError: unless they are integers of at least 1.

    *Privacy*: a public constant.

    >>> phase_lengths(5), phase_lengths((5, 2))
    ((5, 5), (5, 2))
    """
    if isinstance(delay, (tuple, list)):
        if len(delay) != 2:
            raise ValueError(
                f"delay must be an integer, or two: (plain steps, adaptive steps); got {len(delay)}: {delay}."
            )
        for i, length in enumerate(delay):
            validate.positive_int(**{f"delay[{i}]": length})
        return int(delay[0]), int(delay[1])
    validate.positive_int(delay=delay)
    return int(delay), int(delay)


class DelayedMomentsState(NamedTuple):
    """State of `delayed_moments`."""

    count: jax.Array  # (), int32: steps so far  # pyright: ignore[reportIncompatibleMethodOverride]
    v: PyTree  # like params, at least float32: second moment of the averaged private gradients
    total: PyTree  # like params: sum of the private means of this cycle's plain steps
    noise_variance: PyTree  # like params: variance of the noise in `total`; () without ``correct_noise``


@dataclasses.dataclass(frozen=True, eq=False)
class DelayedMoments:
    r"""Divides by the root of a second moment that is estimated in one phase and used in the next (DP2).

    A cycle has s1 plain steps, whose private means are summed in G, and then s2 adaptive steps. Between them

    .. math::

        v \leftarrow \beta v + (1 - \beta) (G / s_1)^2 \ \text{(RMSProp)}, \quad v \leftarrow v + (G / s_1)^2 \
        \text{(AdaGrad)}, \quad v \leftarrow v + (1 - \beta)\, \mathrm{sign}((G / s_1)^2 - v)\, (G / s_1)^2 \
        \text{(Yogi)}

    and G is reset to 0. Plain steps do not change gradients; adaptive steps divide them by
    :math:`D = \sqrt v + \epsilon`. v starts at 0 and its bias is not corrected.
    The two phases usually need different learning rates: see `scale_by_phase_learning_rate`.

    Args:
        delay: s for ``s1 = s2 = s``, or ``(s1, s2)``.
        rule: ``"rmsprop"``, ``"adagrad"`` or ``"yogi"``.
        decay: beta, in [0, 1).
        eps: epsilon, positive.
        adaptive_clip_ratio: C2 / C1, the clip norm of adaptive steps over that of the chain. Divided gradients usually
            have larger norms, so a ratio above 1 is common. The noise is in proportion.
        correct_noise: subtract the variance of the noise, :math:`\sigma^2 C_1^2 / (s_1 B^2)`, from
            :math:`(G / s_1)^2`, and clamp the difference at 0.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: v is computed from private means that are already released; the event is that of DP-SGD in both phases.

    Reference: Li et al. (2023), Differentially Private Adaptive Optimization with Delayed Preconditioners, Algorithm 1.

    >>> moments = delayed_moments(1, decay=0.0, eps=1.0)
    >>> state = moments.observe(moments.init(jnp.zeros(2)), jnp.array([0.0, 3.0]), 0.0)
    >>> moments.diagonal(state, None)[0].scale.tolist()
    [1.0, 0.25]
    """

    delay: int | tuple[int, int]
    _: dataclasses.KW_ONLY
    rule: str = "rmsprop"
    decay: float | jax.Array = 0.9
    eps: float | jax.Array = 1e-7
    adaptive_clip_ratio: float | jax.Array = 1.0
    correct_noise: bool = False

    needs_feedback = True

    def __post_init__(self):
        phase_lengths(self.delay)
        validate.one_of(("rmsprop", "adagrad", "yogi"), rule=self.rule)
        validate.fraction(decay=self.decay)
        validate.positive(eps=self.eps, adaptive_clip_ratio=self.adaptive_clip_ratio)

    def init(self, params: optax.Params) -> DelayedMomentsState:
        return DelayedMomentsState(
            count=jnp.zeros([], jnp.int32),
            v=trees.zeros(params),
            total=trees.zeros(params),
            noise_variance=trees.zeros(params) if self.correct_noise else (),
        )

    def diagonal(
        self, state: DelayedMomentsState, params: optax.Params | None, **extra_args: Any
    ) -> tuple[Diagonal, DelayedMomentsState]:
        del params, extra_args
        s1, s2 = phase_lengths(self.delay)
        is_adaptive = state.count % (s1 + s2) >= s1
        # clip(g / (D r), C) * r = clip(g / D, r C): the adaptive clip norm is r C, and its noise sigma r C.
        ratio = self.adaptive_clip_ratio
        scale = jax.tree.map(lambda x: jnp.where(is_adaptive, x / ratio, 1), inverse_root(state.v, self.eps))
        is_same = isinstance(self.adaptive_clip_ratio, numbers.Real) and self.adaptive_clip_ratio == 1
        return Diagonal(scale=scale, release=None if is_same else jnp.where(is_adaptive, ratio, 1)), state

    def observe(
        self, state: DelayedMomentsState, private_mean: optax.Updates, noise_stddev: PyTree
    ) -> DelayedMomentsState:
        s1, s2 = phase_lengths(self.delay)
        step = state.count % (s1 + s2)
        is_plain, is_last_plain = step < s1, step == s1 - 1
        where = optax.tree.where
        total = where(is_plain, jax.tree.map(jnp.add, state.total, private_mean), state.total)
        square = jax.tree.map(lambda x: jnp.square(x / s1), total)
        noise_variance = state.noise_variance
        if self.correct_noise:
            noise_variance = where(is_plain, self._with_noise_of_step(noise_variance, noise_stddev), noise_variance)
            square = jax.tree.map(lambda x, n: jnp.maximum(x - n / s1**2, 0), square, noise_variance)
            noise_variance = where(is_last_plain, jax.tree.map(jnp.zeros_like, noise_variance), noise_variance)

        # The paper refreshes v at the start of the next step, the authors' code here: v is not read in between.
        v = where(is_last_plain, next_second_moment(self.rule, state.v, square, self.decay), state.v)
        total = where(is_last_plain, jax.tree.map(jnp.zeros_like, total), total)
        return DelayedMomentsState(trees.next_count(state.count), v, total, noise_variance)

    def _with_noise_of_step(self, variance: PyTree, noise_stddev: PyTree) -> PyTree:
        if noise_stddev is None:
            raise ValueError(
                "correct_noise=True needs the standard deviation of the noise: put this diagonal in a dpopt.chain, "
                "before the clip or right after the noise."
            )
        stddev = trees.broadcast_prefix(noise_stddev, variance, "noise_stddev")
        return jax.tree.map(lambda x, s: x + jnp.square(jnp.asarray(s, x.dtype)), variance, stddev)


delayed_moments = DelayedMoments
"""Alias of `DelayedMoments`: the name to use."""
