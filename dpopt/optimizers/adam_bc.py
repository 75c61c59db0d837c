"""DP-AdamBC: Adam, RMSProp and AdaGrad with the variance of the noise subtracted from the second moment.

A private gradient is g + z, where z has a known variance s^2 in each coordinate, so its mean square is too large by
s^2: where noise dominates, Adam divides by the noise and becomes SGD with momentum. Here each square enters the average
as (g + z)^2 - s^2. An average is linear, so for constant s this is exactly the paper's v^ - Phi. If s follows a
schedule, or differs between coordinates, it is still the right correction of v^: the same weighted average of the
variances of the draws in it, without a second accumulator.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from dpopt.chain import NoiseAware, PrivateOptimizer, chain
from dpopt.common import trees, validate
from dpopt.common.averages import at_step, one_minus_power, update_average
from dpopt.common.types import PyTree, ScalarOrSchedule
from dpopt.correlated.strategy import Strategy
from dpopt.optimizers._parts import Clip, decayed_weights, descent, private_mean

NoiseStddev: TypeAlias = PyTree | Callable[[jax.Array], PyTree]  # a prefix of the parameters, or a schedule of one
_Root: TypeAlias = Callable[[jax.Array], jax.Array]  # of a second moment: at least gamma, plus eps
_Rule: TypeAlias = Callable[[PyTree, PyTree, Any, _Root], tuple[PyTree, Any]]  # (updates, squares, state, root)


class ScaleByAdamBCState(NamedTuple):
    """State of `scale_by_adam_bc`."""

    count: jax.Array  # (), int32: updates so far  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree  # like params, at least float32: average update
    nu: PyTree  # like params, at least float32: average of (squared update - noise variance); may be negative


class ScaleByRmsBCState(NamedTuple):
    """State of `scale_by_rms_bc` and `scale_by_adagrad_bc`."""

    count: jax.Array  # (), int32: updates so far  # pyright: ignore[reportIncompatibleMethodOverride]
    nu: PyTree  # like params, at least float32: average (AdaGrad: sum) of (squared update - noise variance)


def scale_by_adam_bc(
    *,
    noise_stddev: NoiseStddev | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    gamma: ScalarOrSchedule = 1e-8,
    eps: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales noisy mean gradients by Adam's rule, with the noise variance subtracted from the second moment.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) \tilde g, &
        v - \Phi &\leftarrow \beta_2 (v - \Phi) + (1 - \beta_2) (\tilde g^2 - s^2), \\
        u &= \hat m / \big(\sqrt{\max(\hat v - \hat\Phi, \gamma)} + \epsilon\big), &
        \hat x_t &= x_t / (1 - \beta^t).

    For constant s the second line is :math:`\hat v - \Phi` with :math:`\Phi = s^2 = (\sigma C / B)^2`.

    Args:
        noise_stddev: s, the standard deviation of the noise in these updates: sigma C / B for a mean. A number, a
            pytree of numbers or arrays (prefix of the parameters), or a schedule from the step (first step 0) to
            either. If None, it is passed by `dpopt.chain`, where this rule must stand right after the noise; the value
            is then correct for any schedule and diagonal in the chain.
        b1, b2: decay of the first and second moment, in [0, 1).
        gamma: positive lower bound of the corrected second moment, inside the root: a number, or a schedule that
            decreases with the learning rate. Typically 1e-10 to 1e-8; see `dpopt.diagnostics.suggest_gamma`.
        eps: added outside the root, as in some published code; not in the paper.

    Raises:
        ValueError, TypeError: for a bad argument, named; in ``update``, if s is None and no chain passes it.

    *Privacy*: post-processing; reads noised updates and the public size of the noise.

    Reference: Tang, Shpilevskiy and Lécuyer (2023), DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias
    Correction), Algorithm 1.

    >>> rule = scale_by_adam_bc(noise_stddev=3.0, gamma=1e-8)
    >>> updates, _ = rule.update(jnp.array([5.0, 1.0]), rule.init(jnp.zeros(2)))
    >>> [round(u, 2) for u in updates.tolist()]  # 5 / sqrt(25 - 9), and 1 / sqrt(gamma)
    [1.25, 10000.0]
    """
    validate.fraction(b1=b1, b2=b2)

    def init_fn(params: optax.Params):
        return ScaleByAdamBCState(jnp.zeros([], jnp.int32), trees.zeros(params), trees.zeros(params))

    def update(updates: PyTree, squares: PyTree, state: ScaleByAdamBCState, root: _Root):
        count = trees.next_count(state.count)
        mu = jax.tree.map(lambda m, g: update_average(m, g, b1), state.mu, updates)
        nu = jax.tree.map(lambda v, x: update_average(v, x, b2), state.nu, squares)

        def rescale(m: jax.Array, v: jax.Array) -> jax.Array:
            m_hat = m / one_minus_power(b1, count, m.dtype)
            v_hat = v / one_minus_power(b2, count, v.dtype)
            return m_hat / root(v_hat)

        return jax.tree.map(rescale, mu, nu), ScaleByAdamBCState(count, mu, nu)

    return _noise_aware(init_fn, update, noise_stddev, gamma, eps, "scale_by_adam_bc")


def scale_by_rms_bc(
    *,
    noise_stddev: NoiseStddev | None = None,
    decay: float = 0.9,
    gamma: ScalarOrSchedule = 1e-8,
    eps: float = 0.0,
    bias_correction: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""RMSProp without the noise variance: :math:`\tilde g / (\sqrt{\max(v - \Phi, \gamma)} + \epsilon)`.

    The average v starts at 0, so after t steps the noise has added :math:`(1 - \beta^t)\Phi` to it. Exactly that is
    subtracted.

    Args:
        noise_stddev, gamma, eps: see `scale_by_adam_bc`.
        decay: beta, decay of the mean square, in [0, 1).
        bias_correction: whether to divide the average by :math:`1 - \beta^t`, which RMSProp does not.

    Raises:
        ValueError, TypeError: see `scale_by_adam_bc`.

    *Privacy*: post-processing; reads noised updates and the public size of the noise.

    >>> rule = scale_by_rms_bc(noise_stddev=3.0, decay=0.75)
    >>> updates, _ = rule.update(jnp.array([5.0]), rule.init(jnp.zeros(1)))  # 5 / sqrt((25 - 9) / 4)
    >>> updates.tolist()
    [2.5]
    """
    validate.fraction(decay=decay)

    def update(updates: PyTree, squares: PyTree, state: ScaleByRmsBCState, root: _Root):
        count = trees.next_count(state.count)
        nu = jax.tree.map(lambda v, x: update_average(v, x, decay), state.nu, squares)

        def rescale(g: jax.Array, v: jax.Array) -> jax.Array:
            v_hat = v / one_minus_power(decay, count, v.dtype) if bias_correction else v
            return g / root(v_hat)

        return jax.tree.map(rescale, updates, nu), ScaleByRmsBCState(count, nu)

    return _noise_aware(_init_second_moment, update, noise_stddev, gamma, eps, "scale_by_rms_bc")


def scale_by_adagrad_bc(
    *, noise_stddev: NoiseStddev | None = None, gamma: ScalarOrSchedule = 1e-8, eps: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    r"""AdaGrad without the noise variance: :math:`\tilde g / (\sqrt{\max(\sum\tilde g^2 - t\Phi, \gamma)} + \epsilon)`.

    Args:
        noise_stddev, gamma, eps: see `scale_by_adam_bc`. The sum grows with t, and its error with the root of t, so
            gamma should be larger than for an average, or a growing schedule.

    Raises:
        ValueError, TypeError: see `scale_by_adam_bc`.

    *Privacy*: post-processing; reads noised updates and the public size of the noise.

    >>> rule = scale_by_adagrad_bc(noise_stddev=3.0)
    >>> state = rule.init(jnp.zeros(1))
    >>> for _ in range(4):
    ...     updates, state = rule.update(jnp.array([5.0]), state)  # 5 / sqrt(4 * (25 - 9)) at the last step
    >>> updates.tolist()
    [0.625]
    """

    def update(updates: PyTree, squares: PyTree, state: ScaleByRmsBCState, root: _Root):
        nu = jax.tree.map(jnp.add, state.nu, squares)
        updates = jax.tree.map(lambda g, v: g / root(v), updates, nu)
        return updates, ScaleByRmsBCState(trees.next_count(state.count), nu)

    return _noise_aware(_init_second_moment, update, noise_stddev, gamma, eps, "scale_by_adagrad_bc")


def dp_adam_bc(
    learning_rate: optax.ScalarOrSchedule,
    *,
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    gamma: ScalarOrSchedule = 1e-8,
    weight_decay: float = 0.0,
    noise: Strategy | None = None,
) -> PrivateOptimizer:
    r"""DP-AdamBC: :math:`w \leftarrow w - \eta\, \hat m / \sqrt{\max(\hat v - \Phi, \gamma)}` on the private mean.

    Args:
        learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size, key, noise: see `dpopt.dp_sgd`.
        b1, b2, gamma: see `scale_by_adam_bc`.
        weight_decay: decoupled weight decay, multiplied by the learning rate.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: as `dpopt.dp_sgd`; the rule is post-processing.

    Reference: see `scale_by_adam_bc`.

    >>> opt = dp_adam_bc(1e-3, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key, noise)
    rule = scale_by_adam_bc(b1=b1, b2=b2, gamma=gamma)
    return chain(core, rule, *decayed_weights(weight_decay), descent(learning_rate))


def _init_second_moment(params: optax.Params) -> ScaleByRmsBCState:
    return ScaleByRmsBCState(jnp.zeros([], jnp.int32), trees.zeros(params))


def _noise_aware(
    init_fn: optax.TransformInitFn,
    rule: _Rule,
    noise_stddev: NoiseStddev | None,
    gamma: ScalarOrSchedule,
    eps: float,
    name: str,
) -> optax.GradientTransformationExtraArgs:
    """The transformation around a rule; its chain passes the noise if that is None here."""
    if not callable(gamma):
        validate.positive(gamma=gamma)
    validate.non_negative(eps=eps)

    def update(updates: PyTree, state: PyTree, stddev: PyTree):
        updates = trees.upcast(updates)
        floor = at_step(gamma, state.count)

        def noiseless_square(g: jax.Array, s: ArrayLike) -> jax.Array:
            s = jnp.asarray(s, g.dtype)
            return (g - s) * (g + s)  # avoids the cancellation of g^2 - s^2 where the two are close

        def root(v: jax.Array) -> jax.Array:
            return jnp.sqrt(jnp.maximum(v, jnp.asarray(floor, v.dtype))) + eps

        stddev = trees.broadcast_prefix(stddev, updates, "noise_stddev")
        return rule(updates, jax.tree.map(noiseless_square, updates, stddev), state, root)

    if noise_stddev is None:

        def in_chain(updates: PyTree, state: PyTree, params: PyTree = None, *, noise_stddev: PyTree = None, **_: Any):
            del params
            if noise_stddev is None:
                raise ValueError(
                    f"{name} got no noise_stddev. Put it right after the noise in a dpopt.chain, which passes it, or "
                    f"make it with {name}(noise_stddev=sigma * C / B)."
                )
            return update(updates, state, noise_stddev)

        in_chain.__qualname__ = name  # the name in the messages of dpopt.chain
        return NoiseAware(init_fn, in_chain)

    if not callable(noise_stddev):
        _check_stddev(noise_stddev)

    def alone(updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **_: Any):
        del params
        return update(updates, state, at_step(noise_stddev, state.count))

    alone.__qualname__ = name
    return optax.GradientTransformationExtraArgs(init_fn, alone)


def _check_stddev(noise_stddev: PyTree) -> None:
    entries = jax.tree_util.tree_leaves_with_path(noise_stddev)
    if not entries:
        raise ValueError("noise_stddev has no entries; give a number, a schedule, or a pytree of numbers.")
    for path, entry in entries:
        where = f"noise_stddev{jax.tree_util.keystr(path)}"
        if jnp.ndim(entry) == 0:
            validate.non_negative(**{where: entry})
        elif not isinstance(entry, Tracer) and not bool(jnp.all((entry >= 0) & jnp.isfinite(entry))):
            raise ValueError(f"{where} must be non-negative and finite everywhere.")
