"""Looking at a run: what noise does to an adaptive optimizer, before and while it trains.

Functions of public constants and released values can be used freely. Those named ``sensitive_...`` read un-noised
quantities: they are for research on data that may be looked at, live outside the optimizer's state, and no epsilon
covers what they return.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpopt.common import trees, validate
from dpopt.common.averages import at_step
from dpopt.gradients import SensitiveAux

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def sgdm_learning_rate_schedule(learning_rate: Any, *, b1: float = 0.9, noise_stddev: Any) -> Callable[..., Any]:
    r"""The learning rate at which DP-SGD with momentum does what DP-Adam does where noise dominates.

    There the root of Adam's second moment is about :math:`\sqrt\Phi = s` in every coordinate, so a step is SGD with
    momentum at :math:`\eta_t = \eta (1 - \beta_1) / ((1 - \beta_1^t)\, s)`.

    Args:
        learning_rate: eta of DP-Adam, a number or a schedule.
        b1: beta_1 of DP-Adam, and the momentum of ``dp_sgd`` to use the result with.
        noise_stddev: s = sigma C / B, the noise in the mean gradient: a number or a schedule.

    Returns:
        A schedule from the step (first step 0, where t = 1).

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: arithmetic on public constants.

    Reference: Tang, Shpilevskiy and Lécuyer (2023), DP-AdamBC, section on DP-Adam as DP-SGD with momentum.

    >>> schedule = sgdm_learning_rate_schedule(1e-3, b1=0.9, noise_stddev=0.4 * 0.1 / 256)
    >>> round(float(schedule(0)), 2), round(float(schedule(1_000)), 2)
    (6.4, 0.64)
    """
    validate.fraction(b1=b1)
    for name, value in (("learning_rate", learning_rate), ("noise_stddev", noise_stddev)):
        if not callable(value):
            validate.positive(**{name: value})

    def schedule(step):
        eta, s = at_step(learning_rate, step), at_step(noise_stddev, step)
        return eta * (1 - b1) / ((1 - b1 ** (jnp.asarray(step) + 1)) * s)

    return schedule


def second_moment_error_bound(
    *, noise_stddev: Any, step: Any, b2: float = 0.999, failure_prob: float = 0.05
) -> jax.Array | float:
    r"""How far DP-AdamBC's corrected second moment may be from the clean one, with probability 1 - alpha.

    With :math:`\Phi = s^2`, :math:`\nu = 4 \Phi \sqrt{(1 - \beta_2^{2t}) / (1 - \beta_2^2)}`, :math:`b = 4 \Phi`:
    :math:`\xi = \frac{1 - \beta_2}{1 - \beta_2^t} \max(\sqrt{2 \nu^2 \ln(2 / \alpha)},\, 2 b \ln(2 / \alpha))`.

    The proposition is about one coordinate and a fixed sequence of gradients, and bounds the average of the squared
    noise around Phi; the cross term of gradient and noise has mean 0 and is left out of it.

    Args:
        noise_stddev: s = sigma C / B, the noise in the mean gradient.
        step: t, the number of updates, at least 1. May be an array or traced.
        b2: decay of the second moment, in [0, 1).
        failure_prob: alpha, in (0, 1].

    Returns:
        xi: a float if all arguments are Python numbers, else an array.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: arithmetic on public constants.

    Reference: Tang, Shpilevskiy and Lécuyer (2023), DP-AdamBC, Proposition 3.

    >>> round(second_moment_error_bound(noise_stddev=0.4 * 0.1 / 256, step=10_000) * 1e9, 3)
    5.933
    """
    validate.non_negative(noise_stddev=noise_stddev)
    validate.fraction(b2=b2)
    validate.probability(failure_prob=failure_prob)
    if isinstance(step, int):
        validate.positive_int(step=step)
    on_host = all(isinstance(x, (int, float)) for x in (noise_stddev, step, b2, failure_prob))
    xp = np if on_host else jnp

    def gathered(decay, t):  # 1 - decay ** t without the cancellation
        return -xp.expm1(t * (math.log(decay) if decay > 0 else -math.inf))

    b = 4 * noise_stddev**2
    nu = b * xp.sqrt(gathered(b2, 2 * step) / (1 - b2**2))
    log_term = math.log(2 / failure_prob)
    tail = xp.maximum(nu * math.sqrt(2 * log_term), 2 * b * log_term)
    bound = (1 - b2) / gathered(b2, step) * tail
    return float(bound) if on_host else bound


def suggest_gamma(
    *, noise_stddev: float, steps: int | None = None, b2: float = 0.999, failure_prob: float = 0.05
) -> Any:
    """A floor for DP-AdamBC's corrected second moment: the size of the error that noise leaves in it.

    Below it a corrected second moment is mostly error, and its root in the denominator would be too. A place to start
    tuning from.

    Args:
        noise_stddev: s = sigma C / B, the noise in the mean gradient.
        steps: the number of updates of the run, for one number (the bound at its end), or None for a schedule that
            decreases as the error does (first step 0).
        b2, failure_prob: see `second_moment_error_bound`.

    Returns:
        A float, or a schedule; either goes into ``gamma`` of `dpopt.dp_adam_bc`.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: arithmetic on public constants.

    >>> float(f"{suggest_gamma(noise_stddev=0.4 * 0.1 / 256, steps=10_000):.3e}")
    5.933e-09
    """
    validate.positive(noise_stddev=noise_stddev)
    fixed = {"noise_stddev": noise_stddev, "b2": b2, "failure_prob": failure_prob}
    if steps is not None:
        return second_moment_error_bound(step=steps, **fixed)
    second_moment_error_bound(step=1, **fixed)  # complains now about what is wrong
    return lambda step: second_moment_error_bound(step=jnp.asarray(step) + 1, **fixed)


def tree_quantiles(tree: Any, quantiles: Sequence[float] = QUANTILES) -> jax.Array:
    """Quantiles over all coordinates of all leaves.

    *Privacy*: as sensitive as what it is given; of released values (a private optimizer's moments) it is free.

    >>> tree_quantiles({"a": jnp.arange(4.0), "b": jnp.array(4.0)}, (0.0, 0.5, 1.0)).tolist()
    [0.0, 2.0, 4.0]
    """
    flat = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(trees.upcast(tree))])
    return jnp.quantile(flat, jnp.asarray(quantiles, flat.dtype))


class SensitiveMoments(NamedTuple):
    """State of `SensitiveMomentRecorder`. Keep it out of optimizer states and checkpoints.

    *Privacy*: the ``clean`` fields are averages of un-noised gradients.
    """

    count: jax.Array  # (), int32: updates so far
    clean_m: Any  # like params: average of the clipped, un-noised mean gradient
    clean_v: Any  # like params: average of its square
    private_m: Any  # like params: average of the private mean gradient
    private_v: Any  # like params: average of its square
    noise_v: Any  # like params, or scalars: average of the noise's variance


@dataclasses.dataclass(frozen=True, kw_only=True)
class SensitiveMomentRecorder:
    r"""Follows Adam's moments with and without noise, to see what the noise does to them.

    A step's clean mean gradient is what the same clip gives without noise,
    ``promise.clipped_sum(clip).sum / expected_batch_size``; the private one what `dpopt.privatize` gives.

    Args:
        b1, b2: decay of the moments, in [0, 1).

    *Privacy*: none. What it is given and what it returns is raw; see the module's text.

    Reference: Tang, Shpilevskiy and Lécuyer (2023), DP-AdamBC, Table 2, Figures 1 and 4.

    >>> recorder = SensitiveMomentRecorder(b1=0.5, b2=0.5)
    >>> moments = recorder.update(recorder.init(jnp.zeros(1)), jnp.array([3.0]), jnp.array([5.0]), noise_stddev=4.0)
    >>> {name: q.tolist() for name, q in recorder.quantiles(moments, (0.5,)).items()}
    {'m clean': [3.0], 'm private': [5.0], 'v clean': [9.0], 'v private': [25.0], 'v corrected': [9.0]}
    """

    b1: float = 0.9
    b2: float = 0.999

    def __post_init__(self):
        validate.fraction(b1=self.b1, b2=self.b2)

    def init(self, params: Any) -> SensitiveMoments:
        """Moments before the first step."""
        return SensitiveMoments(jnp.zeros([], jnp.int32), *(trees.zeros(params) for _ in range(5)))

    def update(
        self, moments: SensitiveMoments, clean_mean: Any, private_mean: Any, *, noise_stddev: Any
    ) -> SensitiveMoments:
        """Moments after a step. ``noise_stddev`` is that of the private mean: a number or a pytree (prefix allowed)."""
        noise = trees.broadcast_prefix(noise_stddev, moments.noise_v, "noise_stddev")

        def average(decay, order):
            return lambda old, new: decay * old + (1 - decay) * jnp.asarray(new, old.dtype) ** order

        m, v = average(self.b1, 1), average(self.b2, 2)
        return SensitiveMoments(
            moments.count + 1,
            jax.tree.map(m, moments.clean_m, clean_mean),
            jax.tree.map(v, moments.clean_v, clean_mean),
            jax.tree.map(m, moments.private_m, private_mean),
            jax.tree.map(v, moments.private_v, private_mean),
            jax.tree.map(v, moments.noise_v, noise),
        )

    def quantiles(self, moments: SensitiveMoments, quantiles: Sequence[float] = QUANTILES) -> dict[str, jax.Array]:
        """Quantiles over all coordinates of the bias-corrected moments: clean, private, and with Phi subtracted."""
        weights = {"m": 1 - self.b1**moments.count, "v": 1 - self.b2**moments.count}
        corrected = jax.tree.map(jnp.subtract, moments.private_v, moments.noise_v)
        rows = {
            "m clean": moments.clean_m,
            "m private": moments.private_m,
            "v clean": moments.clean_v,
            "v private": moments.private_v,
            "v corrected": corrected,
        }
        return {name: tree_quantiles(tree, quantiles) / weights[name[0]] for name, tree in rows.items()}


def sensitive_staleness(clean_means: Any, private_means: Any, *, delay: int, eps: float) -> jax.Array:
    r"""DP2's :math:`h(s)`: how fast gradients outgrow the preconditioner built from older ones. Small is good.

    .. math:: h(s) = \max_t \frac{\|g_t\|_1}{\|G / s\|_1 + d \epsilon}

    G / s is the average of the private means over the last complete window of s steps before t. The expectations of the
    paper are replaced by the one run given.

    Args:
        clean_means: leaves ``(T, ...)``, the un-noised mean gradients :math:`g_t` of T steps.
        private_means: the same with noise.
        delay: s, at least 1, below T.
        eps: the constant added to DP2's preconditioner.

    Returns:
        h(s), a scalar.

    Raises:
        ValueError, TypeError: for a bad argument, or a run that ends with its first window.

    *Privacy*: none for ``clean_means``: the result is raw. With the private means in both places it is a function of
    released values.

    Reference: Li et al. (2023), Differentially Private Adaptive Optimization with Delayed Preconditioners, Theorem 2.

    >>> grads = jnp.array([[1.0, 1.0], [1.0, 3.0], [4.0, -8.0]])
    >>> float(sensitive_staleness(grads, grads, delay=2, eps=0.5))  # (4 + 8) / (1 + 2 + 2 * 0.5)
    3.0
    """
    validate.positive_int(delay=delay)
    validate.non_negative(eps=eps)
    clean, private = _flat_steps(clean_means, "clean_means"), _flat_steps(private_means, "private_means")
    steps, d = clean.shape
    if private.shape != clean.shape:
        raise ValueError(f"clean_means and private_means must match; they flatten to {clean.shape}, {private.shape}.")
    windows = steps // delay
    if steps <= delay:
        raise ValueError(f"a run of {steps} steps has no step after a window of delay={delay}.")
    averages = jnp.mean(private[: windows * delay].reshape(windows, delay, d), axis=1)
    past = jnp.arange(delay, steps) // delay - 1
    ratios = jnp.sum(jnp.abs(clean), axis=1)[delay:] / (jnp.sum(jnp.abs(averages), axis=1)[past] + d * eps)
    return jnp.max(ratios)


def sensitive_clip_fraction(aux: SensitiveAux) -> jax.Array:
    """The share of real, finite examples that the clip scaled down.

    Args:
        aux: ``promise.sensitive``, after the optimizer's update. An empty batch gives 0.

    *Privacy*: none: it counts private examples. Do not choose a clip norm by it in a run that must be private.

    >>> from dpopt.gradients import stacked_grads
    >>> from dpopt.clipping import FlatClip
    >>> promise = stacked_grads(jnp.array([[3.0], [0.5], [-2.0], [0.0]]), mask=None)
    >>> float(sensitive_clip_fraction(promise.clipped_sum(FlatClip(1.0)).sensitive))
    0.5
    """
    counted = aux.is_example & aux.is_finite
    return jnp.sum(aux.was_clipped & counted) / jnp.maximum(jnp.sum(counted), 1)


def _flat_steps(tree: Any, name: str) -> jax.Array:
    leaves = jax.tree.leaves(trees.upcast(tree))
    if not leaves or any(jnp.ndim(x) == 0 for x in leaves) or len({x.shape[0] for x in leaves}) > 1:
        raise ValueError(f"{name} must have leaves (T, ...), one row a step, of the same T.")
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in leaves], axis=1)
