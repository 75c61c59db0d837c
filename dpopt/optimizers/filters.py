"""Filters after the noise, which use that gradients change slowly from step to step and independent noise does not.

They are ordinary stages of a `dpopt.chain`. With noise that is correlated over steps (`dpopt.correlated`) they gain
less, since its low frequencies are already small.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpopt.common import trees, validate
from dpopt.common.types import Example, LossFn, PyTree
from dpopt.constants import wrapped

_MOST_AMPLIFICATION = 100.0


class LowPassState(NamedTuple):
    """State of `low_pass`; the latest first."""

    gradients: tuple[PyTree, ...]  # like params, at least float32: inputs
    filtered: tuple[PyTree, ...]  # likewise: outputs m, not corrected
    ones: jax.Array  # (gradients,): 1 for each input so far, else 0
    corrections: jax.Array  # (filtered,): the outputs c for an input of ones


def low_pass(
    feedback: Sequence[float] = (-0.9,), feedforward: Sequence[float] = (0.1,)
) -> optax.GradientTransformation:
    r"""A linear filter of noisy gradients, corrected so that it does not change a constant gradient.

    .. math::
        m_t = -\sum_{i \ge 1} a_i m_{t-i} + \sum_{i \ge 0} b_i \tilde g_{t-i}, \quad \hat m_t = m_t / c_t

    where :math:`c_t` is the output of the same filter for an input of ones.

    Args:
        feedback: a, from :math:`a_1` on.
        feedforward: b, from :math:`b_0` on. Coefficients from a design function such as ``scipy.signal.butter`` can be
            used without change, except for the leading 1 of a.

    Raises:
        ValueError, TypeError: for coefficients that are not finite, or of a filter that is not stable or maps a
            constant gradient to 0.

    *Privacy*: post-processing.

    Reference: Zhang, Bu, Hong and Razaviyayn (2024), DOPPLER: Differentially Private Optimizers with Low-pass Filter
    for Privacy Noise Reduction.

    >>> rule = low_pass((-0.5,), (0.5,))
    >>> state = rule.init(jnp.zeros(1))
    >>> for g in (4.0, 1.0):
    ...     updates, state = rule.update(jnp.array([g]), state)
    >>> updates.tolist()  # (4 / 4 + 1 / 2) / (1 / 4 + 1 / 2)
    [2.0]
    """
    a, b = np.atleast_1d(np.asarray(feedback, np.float64)), np.atleast_1d(np.asarray(feedforward, np.float64))
    if a.ndim != 1 or b.ndim != 1 or not len(b) or not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError(f"feedback and feedforward must be finite numbers; got {feedback} and {feedforward}.")
    if len(a) and np.abs(np.roots([1.0, *a])).max() >= 1:
        raise ValueError(f"feedback {feedback} makes the filter unstable: its output would grow without bound.")
    if b.sum() == 0:
        raise ValueError(f"feedforward {feedforward} adds up to 0: the filter would map a constant gradient to 0.")
    if not (most := _amplification(a, b)) <= _MOST_AMPLIFICATION:
        raise ValueError(
            f"the filter {feedback}, {feedforward} would multiply noise by up to {most:.3g}: after some step it maps a "
            "constant gradient to next to nothing, by which its output is divided. Take a filter whose response to a "
            "step does not pass zero, and which does not only delay."
        )

    def init_fn(params: optax.Params):
        gradients, filtered = (tuple(trees.zeros(params) for _ in range(n)) for n in (len(b) - 1, len(a)))
        return LowPassState(gradients, filtered, jnp.zeros(len(b) - 1), jnp.zeros(len(a)))

    def update_fn(updates: optax.Updates, state: PyTree, params: optax.Params | None = None):
        del params
        gradients = (trees.upcast(updates), *state.gradients)
        ones = jnp.concatenate([jnp.ones(1), state.ones])

        def combined(*leaves: jax.Array) -> jax.Array:
            weights = [*b.tolist(), *(-a).tolist()]  # Python floats, which do not widen what they multiply
            return sum((w * x for w, x in zip(weights, leaves, strict=True)), jnp.zeros((), leaves[0].dtype))

        now = jax.tree.map(combined, *gradients, *state.filtered)
        fed_back = jnp.sum(jnp.asarray(a, ones.dtype) * state.corrections)
        correction = jnp.sum(jnp.asarray(b, ones.dtype) * ones) - fed_back
        corrections = jnp.concatenate([correction[None], state.corrections])[: len(a)]
        new_state = LowPassState(
            gradients[: len(b) - 1], (now, *state.filtered)[: len(a)], ones[: len(b) - 1], corrections
        )
        return jax.tree.map(lambda m: m / correction.astype(m.dtype), now), new_state

    return optax.GradientTransformation(init_fn, update_fn)


def _amplification(a: np.ndarray, b: np.ndarray) -> float:
    """How many times as large as a gradient's the noise of a corrected output is at most; NaN for 0 over 0."""
    slowest = np.abs(np.roots([1.0, *a])).max(initial=0.0)
    length = len(b) + len(a) + (1 if slowest < 1e-6 else min(20_000, math.ceil(math.log(1e-6) / math.log(slowest))))
    response = np.zeros(length)  # to a single one
    for t in range(length):
        past = sum(a[i] * response[t - 1 - i] for i in range(min(len(a), t)))
        response[t] = (b[t] if t < len(b) else 0.0) - past
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.max(np.sqrt(np.cumsum(response**2)) / np.abs(np.cumsum(response))))


class SimplifiedKalmanState(NamedTuple):
    """State of `simplified_kalman`."""

    estimate: PyTree  # like params, at least float32


def simplified_kalman(kappa: float = 0.7) -> optax.GradientTransformation:
    r"""DiSK's filter of noisy gradients, :math:`\hat g_t = (1 - \kappa) \hat g_{t-1} + \kappa \tilde g_t`.

    Use it with `look_ahead`, which adds to :math:`\tilde g_t` how the gradient has changed since the last step.

    Args:
        kappa: in (0, 1]; a smaller value filters out more noise.

    Raises:
        ValueError, TypeError: for a number out of range.

    *Privacy*: post-processing.

    Reference: see `look_ahead`.

    >>> rule = simplified_kalman(0.5)
    >>> updates, _ = rule.update(jnp.array([4.0]), rule.init(jnp.zeros(1)))
    >>> updates.tolist()
    [2.0]
    """
    validate.probability(kappa=kappa)
    kappa = float(kappa)

    def init_fn(params: optax.Params):
        return SimplifiedKalmanState(trees.zeros(params))

    def update_fn(updates: optax.Updates, state: PyTree, params: optax.Params | None = None):
        del params
        updates = trees.upcast(updates)
        estimate = jax.tree.map(lambda old, g: (1 - kappa) * old + kappa * g, state.estimate, updates)
        return estimate, SimplifiedKalmanState(estimate)

    return optax.GradientTransformation(init_fn, update_fn)


def look_ahead(
    loss_fn: LossFn, move: optax.Updates, *, kappa: float = 0.7, gamma: float | None = None
) -> Callable[[optax.Params, Example], jax.Array]:
    r"""A loss whose gradient extrapolates along the last step, for `simplified_kalman`.

    .. math::
        \alpha \nabla f(w + \gamma d) + (1 - \alpha) \nabla f(w), \quad \alpha = (1 - \kappa) / (\kappa \gamma)

    is the gradient that is clipped, where d is the last step of the parameters.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``.
        move: d, like the parameters: the updates of the last step; zeros at the first.
        kappa: see `simplified_kalman`.
        gamma: positive; None for :math:`(1 - \kappa) / \kappa`, for which alpha is 1. Only then one gradient is enough;
            any other value needs two, and twice the time.

    Raises:
        ValueError, TypeError: for a number out of range.

    *Privacy*: still one query, whose sensitivity is bounded by the clip. ``move`` must come from released parameters.

    Reference: Zhang, Bu, Balle, Hong, Razaviyayn and Mirrokni (2025), DiSK: Differentially Private Optimizer with
    Simplified Kalman Filter for Noise Reduction.

    >>> loss = look_ahead(lambda w, x: w**3 / 3, jnp.array(0.5), kappa=0.5, gamma=2.0)
    >>> float(jax.grad(loss)(jnp.array(1.0), None))  # half of (1 + 2 * 0.5)^2, plus half of 1^2
    2.5
    """
    validate.probability(kappa=kappa)
    if gamma is None:
        gamma = (1 - kappa) / kappa if kappa < 1 else 1.0
    validate.positive(gamma=gamma)
    share = (1 - kappa) / (kappa * gamma)

    def weighted(loss_fn: LossFn, params: optax.Params, example: Example) -> jax.Array:
        ahead = jax.tree.map(lambda p, d: p + jnp.asarray(gamma * jax.lax.stop_gradient(d), p.dtype), params, move)
        if math.isclose(share, 1.0):
            return loss_fn(ahead, example)
        if kappa == 1:
            return loss_fn(params, example)
        return share * loss_fn(ahead, example) + (1 - share) * loss_fn(params, example)

    return wrapped(lambda loss_fn: functools.partial(weighted, loss_fn), loss_fn)
