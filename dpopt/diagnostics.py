"""Diagnostics: the effect of noise on an adaptive optimizer, before and during training.

Functions of public constants and released values can be used freely. Those named ``sensitive_...`` read values without
noise, for research on data that may be looked at: their state is not the optimizer's, and epsilon does not cover them.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpopt.common import trees, validate
from dpopt.common.averages import at_step, one_minus_power
from dpopt.common.types import PyTree, ScalarOrSchedule
from dpopt.gradients import SensitiveAux

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def sgdm_learning_rate_schedule(
    learning_rate: ScalarOrSchedule, *, b1: float = 0.9, noise_stddev: ScalarOrSchedule
) -> Callable[[int | jax.Array], jax.Array]:
    r"""The learning rate at which DP-SGD with momentum matches DP-Adam if noise dominates.

    The root of Adam's second moment is then about :math:`\sqrt\Phi = s` in every coordinate, so a step is SGD with
    momentum at :math:`\eta_t = \eta (1 - \beta_1) / ((1 - \beta_1^t)\, s)`.

    Args:
        learning_rate: eta of DP-Adam, a number or a schedule.
        b1: beta_1 of DP-Adam, and the momentum of ``dp_sgd`` to use the result with.
        noise_stddev: s = sigma C / B, the noise in the mean gradient: a number or a schedule.

    Returns:
        A schedule from the step (first step 0, where t = 1).

    Raises:
        ValueError, TypeError: for a bad argument.

    *Privacy*: arithmetic on public constants.

    Reference: Tang, Shpilevskiy and Lécuyer (2023), DP-AdamBC, section on DP-Adam as DP-SGD with momentum.

    >>> schedule = sgdm_learning_rate_schedule(1e-3, b1=0.9, noise_stddev=0.4 * 0.1 / 256)
    >>> round(float(schedule(0)), 2), round(float(schedule(1_000)), 2)
    (6.4, 0.64)
    """
    validate.fraction(b1=b1)
    given: dict[str, Any] = {"learning_rate": learning_rate, "noise_stddev": noise_stddev}
    validate.positive(**{name: value for name, value in given.items() if not callable(value)})

    def schedule(step: int | jax.Array) -> jax.Array:
        eta, s = (at_step(x, step) for x in (learning_rate, noise_stddev))
        return eta * (1 - b1) / (one_minus_power(b1, jnp.asarray(step) + 1, jnp.result_type(float)) * s)

    return schedule


def second_moment_error_bound(
    *, noise_stddev: float | jax.Array, step: int | jax.Array, b2: float = 0.999, failure_prob: float = 0.05
) -> jax.Array | float:
    r"""A bound on the error of DP-AdamBC's corrected second moment, which holds with probability 1 - alpha.

    With :math:`\Phi = s^2`, :math:`\nu = 4 \Phi \sqrt{(1 - \beta_2^{2t}) / (1 - \beta_2^2)}`, :math:`b = 4 \Phi`:
    :math:`\xi = \frac{1 - \beta_2}{1 - \beta_2^t} \max(\sqrt{2 \nu^2 \ln(2 / \alpha)},\, 2 b \ln(2 / \alpha))`.

    The proposition is about one coordinate and a fixed sequence of gradients. It bounds the deviation of the average
    squared noise from Phi; it omits the cross term of gradient and noise, which has mean 0.

    Args:
        noise_stddev: s = sigma C / B, the noise in the mean gradient.
        step: t, the number of updates, at least 1. May be an array or traced.
        b2: decay of the second moment, in [0, 1).
        failure_prob: alpha, in (0, 1].

    Returns:
        xi: a float if all arguments are Python numbers, otherwise an array.

    Raises:
        ValueError, TypeError: for a bad argument.

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

    def gathered(decay: float, t: int | jax.Array) -> Any:  # 1 - decay ** t without the cancellation
        return -xp.expm1(t * (math.log(decay) if decay > 0 else -math.inf))

    b = 4 * noise_stddev**2
    nu = b * xp.sqrt(gathered(b2, 2 * step) / (1 - b2**2))
    log_term = math.log(2 / failure_prob)
    tail = xp.maximum(nu * math.sqrt(2 * log_term), 2 * b * log_term)
    bound = (1 - b2) / gathered(b2, step) * tail
    return float(bound) if on_host else bound


def suggest_gamma(
    *, noise_stddev: float, steps: int | None = None, b2: float = 0.999, failure_prob: float = 0.05
) -> ScalarOrSchedule:
    """A floor for DP-AdamBC's corrected second moment: the size of its error due to noise.

    Below it, a corrected second moment is mostly error, and so is its root. A starting point for tuning.

    Args:
        noise_stddev: s = sigma C / B, the noise in the mean gradient.
        steps: the number of updates, for the bound at the end of a run; None for a decreasing schedule (first step 0).
        b2, failure_prob: see `second_moment_error_bound`.

    Returns:
        A float or a schedule, for ``gamma`` of `dpopt.dp_adam_bc`.

    Raises:
        ValueError, TypeError: for a bad argument.

    *Privacy*: arithmetic on public constants.

    >>> float(f"{suggest_gamma(noise_stddev=0.4 * 0.1 / 256, steps=10_000):.3e}")
    5.933e-09
    """
    validate.positive(noise_stddev=noise_stddev)
    fixed = {"noise_stddev": noise_stddev, "b2": b2, "failure_prob": failure_prob}
    if steps is not None:
        return second_moment_error_bound(step=steps, **fixed)
    second_moment_error_bound(step=1, **fixed)  # checks the arguments
    return lambda step: second_moment_error_bound(step=jnp.asarray(step) + 1, **fixed)


def tree_quantiles(tree: PyTree, quantiles: Sequence[float] = QUANTILES) -> jax.Array:
    """Quantiles over all coordinates of all leaves.

    *Privacy*: as sensitive as the argument; post-processing for released values, such as a private optimizer's moments.

    >>> tree_quantiles({"a": jnp.arange(4.0), "b": jnp.array(4.0)}, (0.0, 0.5, 1.0)).tolist()
    [0.0, 2.0, 4.0]
    """
    flat = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(trees.upcast(tree))])
    return jnp.quantile(flat, jnp.asarray(quantiles, flat.dtype))


class SensitiveMoments(NamedTuple):
    """State of `SensitiveMomentRecorder`. Do not store it in optimizer states or checkpoints.

    *Privacy*: the ``clean`` fields are averages of gradients without noise.
    """

    count: jax.Array  # (), int32: updates so far  # pyright: ignore[reportIncompatibleMethodOverride]
    clean_m: PyTree  # like params: average of the clipped mean gradient without noise
    clean_v: PyTree  # like params: average of its square
    private_m: PyTree  # like params: average of the private mean gradient
    private_v: PyTree  # like params: average of its square
    noise_v: PyTree  # like params: average of the noise variance


@dataclasses.dataclass(frozen=True, kw_only=True)
class SensitiveMomentRecorder:
    r"""Tracks Adam's moments with and without noise, to show the effect of the noise.

    The clean mean gradient of a step is the one clipped but without noise,
    ``promise.clipped_sum(clip).sum / expected_batch_size``; the private one is the output of `dpopt.privatize`.

    Args:
        b1, b2: decay of the moments, in [0, 1).

    *Privacy*: none. Input and output are not covered by epsilon; see the module docstring.

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

    def init(self, params: PyTree) -> SensitiveMoments:
        """Moments before the first step."""
        return SensitiveMoments(jnp.zeros([], jnp.int32), *(trees.zeros(params) for _ in range(5)))

    def update(
        self, moments: SensitiveMoments, clean_mean: PyTree, private_mean: PyTree, *, noise_stddev: PyTree
    ) -> SensitiveMoments:
        """Moments after a step. ``noise_stddev``, of the private mean, is a number or a pytree (prefix allowed)."""
        noise = trees.broadcast_prefix(noise_stddev, moments.noise_v, "noise_stddev")

        def average(decay: float, order: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
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
        dtype = jnp.result_type(float)
        weights = {m: one_minus_power(b, moments.count, dtype) for m, b in (("m", self.b1), ("v", self.b2))}
        rows = {
            "m clean": moments.clean_m,
            "m private": moments.private_m,
            "v clean": moments.clean_v,
            "v private": moments.private_v,
            "v corrected": jax.tree.map(jnp.subtract, moments.private_v, moments.noise_v),
        }
        return {name: tree_quantiles(tree, quantiles) / weights[name[0]] for name, tree in rows.items()}


def sensitive_staleness(clean_means: PyTree, private_means: PyTree, *, delay: int, eps: float) -> jax.Array:
    r"""DP2's :math:`h(s)`, a scalar: how far gradients exceed the preconditioner built from older ones. Small is good.

    .. math:: h(s) = \max_t \frac{\|g_t\|_1}{\|G / s\|_1 + d \epsilon}

    G / s averages the private means of the last complete window of s steps before t. (The paper has expectations.)

    Args:
        clean_means: leaves ``(T, ...)``, the mean gradients :math:`g_t` of T steps without noise.
        private_means: the same with noise.
        delay: s, at least 1 and below T.
        eps: the constant added to DP2's preconditioner.

    Raises:
        ValueError, TypeError: for a bad argument, or if no step follows the first window.

    *Privacy*: none for ``clean_means``: epsilon does not cover the result. Post-processing with private means for both.

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
        raise ValueError(f"a run of {steps} steps has no step after the first window of delay={delay}.")
    averages = jnp.mean(private[: windows * delay].reshape(windows, delay, d), axis=1)
    past = jnp.arange(delay, steps) // delay - 1
    ratios = jnp.sum(jnp.abs(clean), axis=1)[delay:] / (jnp.sum(jnp.abs(averages), axis=1)[past] + d * eps)
    return jnp.max(ratios)


def sensitive_clip_fraction(aux: SensitiveAux) -> jax.Array:
    """The fraction of examples, without padding and non-finite ones, that the clip scaled down; 0 for an empty batch.

    Args:
        aux: ``promise.sensitive``, after the update of the optimizer.

    *Privacy*: none: it counts private examples. Do not use it to choose a clip norm in a private run.

    >>> from dpopt.gradients import stacked_grads
    >>> from dpopt.clipping import FlatClip
    >>> promise = stacked_grads(jnp.array([[3.0], [0.5], [-2.0], [0.0]]), mask=None)
    >>> float(sensitive_clip_fraction(promise.clipped_sum(FlatClip(1.0)).sensitive))
    0.5
    """
    counted = aux.is_example & aux.is_finite
    return jnp.sum(aux.was_clipped & counted) / jnp.maximum(jnp.sum(counted), 1)


def _flat_steps(tree: PyTree, name: str) -> jax.Array:
    leaves = jax.tree.leaves(trees.upcast(tree))
    if not leaves or any(jnp.ndim(x) == 0 for x in leaves) or len({x.shape[0] for x in leaves}) > 1:
        raise ValueError(f"{name} must have leaves (T, ...), one row per step, with the same T.")
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in leaves], axis=1)
