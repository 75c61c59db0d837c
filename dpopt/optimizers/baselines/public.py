"""Baselines that use public data without AdaDPS's preconditioner: DP-R-Pub, DP-Adam-Pub and PDA-DPMD."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpopt.chain import PrivateOptimizer, chain
from dpopt.common import trees, validate
from dpopt.common.averages import update_average
from dpopt.common.types import PyTree, ScalarOrSchedule
from dpopt.optimizers._parts import Clip, descent, private_mean
from dpopt.optimizers.baselines.after_noise import precondition_after_noise
from dpopt.preconditioners.moments import checked_public_grads, next_second_moment, public_moments, where_finite


def dp_r_pub(
    learning_rate: optax.ScalarOrSchedule,
    *,
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    rule: str = "rmsprop",
    decay: float = 0.9,
    eps: float = 1e-3,
) -> PrivateOptimizer:
    r"""DP-R-Pub: privatise first, then divide by the root of a public second moment.

    AdaDPS in the other order: :math:`w \leftarrow w - \eta\, \tilde g / (\sqrt v + \epsilon)`, with v from public
    gradients, which every step must pass: ``update(..., public_grads=g)``.

    Args:
        learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size, key: see `dp_sgd`.
        rule, decay, eps: see `public_moments`.

    Raises:
        ValueError, TypeError: for a bad argument, named; in ``update``, if there are no public gradients.

    *Privacy*: as `dp_sgd`; dividing is post-processing.

    Reference: Li, Zaheer, Reddi and Smith (2022), Private Adaptive Optimization with Side Information, section 6.1.

    >>> opt = dp_r_pub(0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key)
    moments = public_moments(rule=rule, decay=decay, eps=eps)
    return chain(core, precondition_after_noise(moments), descent(learning_rate))


class ScaleByPublicAdamState(NamedTuple):
    """State of `scale_by_public_adam`."""

    count: jax.Array  # (), int32: updates so far  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree  # like params, at least float32: average of the blended gradients
    nu: PyTree  # like params, at least float32: average of the squared public gradients


def scale_by_public_adam(
    *, b1: float = 0.9, b2: float = 0.9, b3: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    r"""Adam's rule with private and public gradients in the first moment and only public ones in the second.

    .. math::

        m \leftarrow \beta_2 m + (1 - \beta_2)(\beta_1 \tilde g + (1 - \beta_1) \hat g), \quad
        v \leftarrow \beta_3 v + (1 - \beta_3) \hat g^2, \quad u = \hat m / (\sqrt{\hat v} + \epsilon)

    Args:
        b1: share of the private gradient, in [0, 1).
        b2, b3: decay of the first and second moment, in [0, 1).
        eps: positive.

    Raises:
        ValueError, TypeError: for a bad argument; in ``update``, if ``public_grads`` is missing or does not fit.

    *Privacy*: post-processing, with public data.

    Reference: Li et al. (2022), Private Adaptive Optimization with Side Information, appendix C (DP-Adam-Pub).

    >>> rule = scale_by_public_adam(b1=0.5, eps=1e-8)
    >>> state = rule.init(jnp.zeros(1))
    >>> [round(x, 3) for x in rule.update(jnp.array([4.0]), state, public_grads=jnp.array([2.0]))[0].tolist()]
    [1.5]
    """
    validate.fraction(b1=b1, b2=b2, b3=b3)
    validate.positive(eps=eps)

    def init_fn(params: optax.Params):
        return ScaleByPublicAdamState(jnp.zeros([], jnp.int32), trees.zeros(params), trees.zeros(params))

    def update_fn(updates: PyTree, state: PyTree, params: PyTree = None, *, public_grads: PyTree = None, **_: Any):
        del params
        public = checked_public_grads(public_grads, updates)
        count = trees.next_count(state.count)
        blend = jax.tree.map(lambda g, p: b1 * g + (1 - b1) * p, updates, public)
        nu = next_second_moment("rmsprop", state.nu, jax.tree.map(jnp.square, public), b3)
        mu = jax.tree.map(lambda m, g: update_average(m, g, b2), state.mu, blend)
        # A NaN would stay in the moments for ever: without a usable public gradient those so far serve again.
        count, mu, nu = where_finite((count, mu, nu), tuple(state))
        mu_hat = optax.tree.bias_correction(mu, b2, jnp.maximum(count, 1))
        nu_hat = optax.tree.bias_correction(nu, b3, jnp.maximum(count, 1))
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu_hat, nu_hat)
        return updates, ScaleByPublicAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def dp_adam_pub(
    learning_rate: optax.ScalarOrSchedule,
    *,
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.9,
    b3: float = 0.999,
    eps: float = 1e-8,
) -> PrivateOptimizer:
    """DP-Adam-Pub: the private mean gradient, then `scale_by_public_adam`.

    Args:
        learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size, key: see `dp_sgd`.
        b1, b2, b3, eps: see `scale_by_public_adam`.

    Raises:
        ValueError, TypeError: for a bad argument, named; in ``update``, if there are no public gradients.

    *Privacy*: as `dp_sgd`; the rest is post-processing.

    Reference: Li et al. (2022), Private Adaptive Optimization with Side Information, appendix C.

    >>> opt = dp_adam_pub(0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key)
    rule = scale_by_public_adam(b1=b1, b2=b2, b3=b3, eps=eps)
    return chain(core, rule, descent(learning_rate))


class BlendPublicGradientsState(NamedTuple):
    """State of `blend_public_gradients`."""

    count: jax.Array  # (), int32: updates so far  # pyright: ignore[reportIncompatibleMethodOverride]


def blend_public_gradients(total_steps: int) -> optax.GradientTransformationExtraArgs:
    r"""Fades from the private gradient to the public one: :math:`\alpha_t \tilde g + (1 - \alpha_t) \hat g`.

    :math:`\alpha_t = \cos(\tfrac{\pi}{2} \tfrac{t}{T})`, with t counted from 0; from step T on it is 0. Entries of the
    public gradient that are not finite count as 0.

    Args:
        total_steps: T, a positive integer.

    Raises:
        ValueError, TypeError: for a bad T; in ``update``, if ``public_grads`` is missing or does not fit.

    *Privacy*: post-processing, with public data.

    >>> blend = blend_public_gradients(2)
    >>> blend.update(jnp.array([4.0]), blend.init(jnp.zeros(1)), public_grads=jnp.array([2.0]))[0].tolist()
    [4.0]
    """
    validate.positive_int(total_steps=total_steps)

    def init_fn(params: optax.Params):
        del params
        return BlendPublicGradientsState(jnp.zeros([], jnp.int32))

    def update_fn(updates: PyTree, state: PyTree, params: PyTree = None, *, public_grads: PyTree = None, **_: Any):
        del params
        public = checked_public_grads(public_grads, updates)

        def blend(g: jax.Array, p: jax.Array) -> jax.Array:
            progress = jnp.minimum(state.count, total_steps).astype(g.dtype) / total_steps
            alpha = jnp.cos(math.pi / 2 * progress)
            return alpha * g + (1 - alpha) * jnp.where(jnp.isfinite(p), p, 0)

        return jax.tree.map(blend, updates, public), BlendPublicGradientsState(trees.next_count(state.count))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def pda_dpmd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    total_steps: int,
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
) -> PrivateOptimizer:
    r"""PDA-DPMD: private gradients at first, then increasingly public ones.

    :math:`w \leftarrow w - \eta\, (\alpha_t \tilde g + (1 - \alpha_t) \hat g)`, with a public :math:`\hat g`: the
    first-order form of private mirror descent that the DP2 and AdaDPS papers compare with. For alpha see
    `blend_public_gradients`. Every step must pass the public gradient: ``update(..., public_grads=g)``.

    Args:
        total_steps: T, the number of steps of the run.
        learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size, key: see `dp_sgd`.

    Raises:
        ValueError, TypeError: for a bad argument, named; in ``update``, if there are no public gradients.

    *Privacy*: as `dp_sgd`; the rest is post-processing.

    Reference: Amid et al. (2022), Public Data-Assisted Mirror Descent for Private Model Training.

    >>> opt = pda_dpmd(
    ...     0.1, total_steps=9, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key)
    return chain(core, blend_public_gradients(total_steps), descent(learning_rate))
