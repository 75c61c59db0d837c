"""DP-AdamBC: Adam, RMSProp and AdaGrad with the noise's variance taken out of the second moment.

A private gradient is g + z, where z has a known variance s^2 in each coordinate, so its average square is too large by
s^2: where noise dominates, Adam divides by the noise and turns into SGD with momentum. Here each square enters the
average as (g + z)^2 - s^2. An average is linear, so this is the paper's v^ - Phi exactly while s is constant. When s
follows a schedule, or differs between coordinates, it is the correction that belongs to v^: the same weighted average,
of the variances of the draws that are in it. No second accumulator is needed to hold it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from dpopt.chain import NoiseAware, PrivateOptimizer, chain
from dpopt.common import trees, validate
from dpopt.common.averages import at_step, one_minus_power, update_average
from dpopt.correlated.strategies import Strategy
from dpopt.optimizers._decay import decayed_weights
from dpopt.private_mean import privatize

ScalarOrSchedule = Any  # float, or step -> float


class ScaleByAdamBCState(NamedTuple):
    """State of `scale_by_adam_bc`."""

    count: jax.Array  # (), int32: updates so far
    mu: Any  # like params, at least float32: average update
    nu: Any  # like params, at least float32: average of the squared update LESS the noise's variance; may be negative


class ScaleByRmsBCState(NamedTuple):
    """State of `scale_by_rms_bc` and `scale_by_adagrad_bc`."""

    count: jax.Array  # (), int32: updates so far
    nu: Any  # like params, at least float32: average (AdaGrad: sum) of the squared update less the noise's variance


def scale_by_adam_bc(
    *,
    noise_stddev: Any = None,
    b1: float = 0.9,
    b2: float = 0.999,
    gamma: ScalarOrSchedule = 1e-8,
    eps: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales noisy mean gradients by Adam's rule, with the noise taken out of the scale.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) \tilde g, &
        v - \Phi &\leftarrow \beta_2 (v - \Phi) + (1 - \beta_2) (\tilde g^2 - s^2), \\
        u &= \hat m / \big(\sqrt{\max(\hat v - \hat\Phi, \gamma)} + \epsilon\big), &
        \hat x_t &= x_t / (1 - \beta^t).

    For constant s the second line is :math:`\hat v - \Phi` with :math:`\Phi = s^2 = (\sigma C / B)^2`.

    Args:
        noise_stddev: s, the standard deviation of the noise in these updates: sigma C / B for a mean. A number, a
            pytree of numbers or arrays (prefix of the parameters), or a schedule from the step (first step 0) to
            either. None takes it from the `dpopt.chain` around it, right after its noise; that is right for every
            schedule and diagonal the chain holds.
        b1, b2: decay of the first and second moment, in [0, 1).
        gamma: floor of the corrected second moment, inside the root, positive: a number, or a schedule that decreases
            with the learning rate. Typically 1e-10 to 1e-8; see `dpopt.diagnostics.suggest_gamma`.
        eps: added outside the root, as some published code does; the paper has none.

    Raises:
        ValueError, TypeError: for a bad argument, named; in ``update``, if s is None and no chain tells it.

    *Privacy*: post-processing; reads noised updates and the noise's public size.

    Reference: Tang, Shpilevskiy and Lécuyer (2023), DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias
    Correction), Algorithm 1.

    >>> rule = scale_by_adam_bc(noise_stddev=3.0, gamma=1e-8)
    >>> updates, _ = rule.update(jnp.array([5.0, 1.0]), rule.init(jnp.zeros(2)))
    >>> [round(u, 2) for u in updates.tolist()]  # 5 / sqrt(25 - 9), and 1 / sqrt(gamma)
    [1.25, 10000.0]
    """
    validate.fraction(b1=b1, b2=b2)
    _check_floor(gamma, eps)

    def init_fn(params):
        return ScaleByAdamBCState(jnp.zeros([], jnp.int32), trees.zeros(params), trees.zeros(params))

    def update(updates, state, stddev):
        count = trees.next_count(state.count)
        floor = at_step(gamma, state.count)
        updates = trees.upcast(updates)
        mu = jax.tree.map(lambda m, g: update_average(m, g, b1), state.mu, updates)
        nu = jax.tree.map(lambda v, x: update_average(v, x, b2), state.nu, _noiseless_squares(updates, stddev))

        def rescale(m, v):
            m_hat = m / one_minus_power(b1, count, m.dtype)
            v_hat = v / one_minus_power(b2, count, v.dtype)
            return m_hat / _floored_root(v_hat, floor, eps)

        return jax.tree.map(rescale, mu, nu), ScaleByAdamBCState(count, mu, nu)

    return _noise_aware(init_fn, update, noise_stddev, "scale_by_adam_bc")


def scale_by_rms_bc(
    *,
    noise_stddev: Any = None,
    decay: float = 0.9,
    gamma: ScalarOrSchedule = 1e-8,
    eps: float = 0.0,
    bias_correction: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""RMSProp with the noise taken out: :math:`\tilde g / (\sqrt{\max(v - \Phi, \gamma)} + \epsilon)`.

    The average v starts at 0, so after t steps it holds :math:`(1 - \beta^t)\Phi` of noise, and that is what is taken
    out.

    Args:
        noise_stddev, gamma, eps: see `scale_by_adam_bc`.
        decay: beta, decay of the mean square, in [0, 1).
        bias_correction: whether to divide the corrected average by :math:`1 - \beta^t`. RMSProp does not.

    Raises:
        ValueError, TypeError: see `scale_by_adam_bc`.

    *Privacy*: post-processing; reads noised updates and the noise's public size.

    >>> rule = scale_by_rms_bc(noise_stddev=3.0, decay=0.75)
    >>> updates, _ = rule.update(jnp.array([5.0]), rule.init(jnp.zeros(1)))  # 5 / sqrt((25 - 9) / 4)
    >>> updates.tolist()
    [2.5]
    """
    validate.fraction(decay=decay)
    _check_floor(gamma, eps)

    def update(updates, state, stddev):
        count = trees.next_count(state.count)
        floor = at_step(gamma, state.count)
        updates = trees.upcast(updates)
        nu = jax.tree.map(lambda v, x: update_average(v, x, decay), state.nu, _noiseless_squares(updates, stddev))

        def rescale(g, v):
            v_hat = v / one_minus_power(decay, count, v.dtype) if bias_correction else v
            return g / _floored_root(v_hat, floor, eps)

        return jax.tree.map(rescale, updates, nu), ScaleByRmsBCState(count, nu)

    return _noise_aware(_init_second_moment, update, noise_stddev, "scale_by_rms_bc")


def scale_by_adagrad_bc(
    *, noise_stddev: Any = None, gamma: ScalarOrSchedule = 1e-8, eps: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    r"""AdaGrad with the noise taken out: :math:`\tilde g / (\sqrt{\max(\sum \tilde g^2 - t\Phi, \gamma)} + \epsilon)`.

    Args:
        noise_stddev, gamma, eps: see `scale_by_adam_bc`. The sum grows with t, and so does its error (by the root of
            t), so the floor wants to be larger than for an average, or a growing schedule.

    Raises:
        ValueError, TypeError: see `scale_by_adam_bc`.

    *Privacy*: post-processing; reads noised updates and the noise's public size.

    >>> rule = scale_by_adagrad_bc(noise_stddev=3.0)
    >>> state = rule.init(jnp.zeros(1))
    >>> for _ in range(4):
    ...     updates, state = rule.update(jnp.array([5.0]), state)  # at last 5 / sqrt(4 * (25 - 9))
    >>> updates.tolist()
    [0.625]
    """
    _check_floor(gamma, eps)

    def update(updates, state, stddev):
        floor = at_step(gamma, state.count)
        updates = trees.upcast(updates)
        nu = jax.tree.map(jnp.add, state.nu, _noiseless_squares(updates, stddev))
        updates = jax.tree.map(lambda g, v: g / _floored_root(v, floor, eps), updates, nu)
        return updates, ScaleByRmsBCState(trees.next_count(state.count), nu)

    return _noise_aware(_init_second_moment, update, noise_stddev, "scale_by_adagrad_bc")


def dp_adam_bc(
    learning_rate: ScalarOrSchedule,
    *,
    l2_clip_norm: Any,
    noise_multiplier: Any,
    expected_batch_size: Any,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    gamma: ScalarOrSchedule = 1e-8,
    weight_decay: float = 0.0,
    noise: Strategy | None = None,
) -> PrivateOptimizer:
    r"""DP-AdamBC: :math:`w \leftarrow w - \eta\, \hat m / \sqrt{\max(\hat v - \Phi, \gamma)}` on the private mean.

    Args:
        learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size, key: see `dpopt.dp_sgd`.
        b1, b2, gamma: see `scale_by_adam_bc`.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        noise: a strategy of `dpopt.correlated`, for noise that is correlated over steps; None: independent noise.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: as `dpopt.dp_sgd`; the rule is post-processing.

    Reference: see `scale_by_adam_bc`.

    >>> opt = dp_adam_bc(1e-3, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    core = privatize(
        l2_clip_norm=l2_clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        key=key,
        noise=noise,
    )
    rule = scale_by_adam_bc(b1=b1, b2=b2, gamma=gamma)
    return chain(core, rule, *decayed_weights(weight_decay), optax.scale_by_learning_rate(learning_rate))


def _init_second_moment(params: Any) -> ScaleByRmsBCState:
    return ScaleByRmsBCState(jnp.zeros([], jnp.int32), trees.zeros(params))


def _noiseless_squares(updates: Any, stddev: Any) -> Any:
    """``g^2 - s^2``, whose mean is that of the squared gradient without noise."""
    stddev = trees.broadcast_prefix(stddev, updates, "noise_stddev")
    # (g - s)(g + s) keeps digits that g^2 - s^2 loses where the two are close.
    return jax.tree.map(lambda g, s: (g - jnp.asarray(s, g.dtype)) * (g + jnp.asarray(s, g.dtype)), updates, stddev)


def _floored_root(second_moment: jax.Array, floor: Any, eps: Any) -> jax.Array:
    return jnp.sqrt(jnp.maximum(second_moment, jnp.asarray(floor, second_moment.dtype))) + eps


def _check_floor(gamma: Any, eps: Any) -> None:
    if not callable(gamma):
        validate.positive(gamma=gamma)
    validate.non_negative(eps=eps)


def _noise_aware(init_fn: Callable, update: Callable, noise_stddev: Any, name: str):
    """The transformation around ``update(updates, state, stddev)``: told the noise by its maker, or by its chain."""
    if noise_stddev is None:

        def told_by_chain(updates, state, params=None, *, noise_stddev=None, **extra_args):
            del params, extra_args
            if noise_stddev is None:
                raise ValueError(
                    f"{name} does not know the noise in its input. Put it right after the noise in a dpopt.chain, "
                    f"which tells it, or pass {name}(noise_stddev=sigma * C / B)."
                )
            return update(updates, state, noise_stddev)

        told_by_chain.__qualname__ = name  # what dpopt.chain calls it in its messages
        return NoiseAware(init_fn, told_by_chain)

    if not callable(noise_stddev):
        entries = jax.tree_util.tree_leaves_with_path(noise_stddev)
        if not entries:
            raise ValueError("noise_stddev has no entries; give a number, a schedule, or a pytree of numbers.")
        for path, entry in entries:
            where = f"noise_stddev{jax.tree_util.keystr(path)}"
            if jnp.ndim(entry) == 0:
                validate.non_negative(**{where: entry})
            elif not isinstance(entry, Tracer) and not bool(jnp.all((entry >= 0) & jnp.isfinite(entry))):
                raise ValueError(f"{where} must be non-negative and finite everywhere.")

    def told_by_maker(updates, state, params=None, **extra_args):
        del params, extra_args
        stddev = at_step(noise_stddev, state.count)
        return update(updates, state, stddev)

    told_by_maker.__qualname__ = name
    return optax.GradientTransformationExtraArgs(init_fn, told_by_maker)
