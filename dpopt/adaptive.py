"""Adaptive clipping: a clip norm that follows a quantile of the gradients' norms, at a privacy cost that is included.

A good clip norm is hard to guess before a run, and norms change during one. `quantile_clip` moves from an initial value
towards the norm below which a given share of examples lie, by a second query of every step.
"""

import dataclasses
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpopt.chain import PrivateOptimizer
from dpopt.clipping import as_promise
from dpopt.common import trees, validate
from dpopt.common.lazy import flow
from dpopt.common.types import PyTree, ScalarOrSchedule
from dpopt.correlated.strategy import Strategy
from dpopt.engines import unit_clip
from dpopt.gradients import ClippedSum
from dpopt.noise import AddGaussianNoiseState, add_gaussian_noise
from dpopt.preconditioners.base import Diagonal, Preconditioner
from dpopt.privacy import Privacy, Query
from dpopt.private_mean import privatize

# Gradients are divided by the clip norm before they are clipped: within these bounds nothing over- or underflows.
LEAST, MOST = 2.0**-60, 2.0**60
# A vote falls linearly while a norm grows from 15/16 to 17/16 of the clip norm. If it jumped, similar rows could all
# change their votes with the last bit of their norms, which may depend on whether the batch has one row more.
HALF_WIDTH = 2.0**-4
# How much such bits move the sum of votes, relative to the 1/2 of the row that differs: norms are assumed equal to
# 2^-20, a vote moves by 1 / (2 * HALF_WIDTH) times that, and a batch may be twice as large as expected.
_SLACK = 2 * 2.0**-20 / HALF_WIDTH
_COUNT_KEY = 2**31 - 4  # folded into the key: far from step numbers, as is the number for the sampler's seed


class QuantileClipState(NamedTuple):
    """State of an optimizer with `quantile_clip`."""

    clip_norms: PyTree  # like the initial ones, float32: those of the next step
    count_noise: AddGaussianNoiseState  # of the noise on the counts
    core: optax.OptState  # of the private mean


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantileClip:
    """The clip norm made by `quantile_clip`: a description, passed to optimizers in place of a clip norm.

    *Privacy*: see `quantile_clip`.

    >>> QuantileClip(initial=1.0, quantile=0.5, learning_rate=0.2, count_share=0.36).split(2.4)
    (3.0, 2.0)
    """

    initial: PyTree  # numbers, or (layers,) arrays: a prefix of the parameters
    quantile: float
    learning_rate: float
    count_share: float

    sensitivity = 1.0  # gradients are divided by the joint norm of the C_k before they are clipped

    @property
    def num_groups(self) -> int:
        """The number of clip norms, and of counts per step."""
        return sum(math.prod(np.shape(c)) for c in jax.tree.leaves(self.initial))

    def split(self, noise_multiplier: ScalarOrSchedule) -> tuple[ScalarOrSchedule, ScalarOrSchedule]:
        r"""The noise multiplier of the gradients, and the standard deviation of the noise on each count.

        .. math:: z_\Delta = z / \sqrt{1 - r}, \quad \sigma_b = \tfrac{z}{2} \sqrt{m / r}

        so that :math:`z_\Delta^{-2} + m\, (2 \sigma_b)^{-2} = z^{-2}`. An example moves each of the m counts by 1/2.
        Together with the gradients they cost as much as one Gaussian query of multiplier z, a number or a schedule.
        """
        gradients, counts = (1 - self.count_share) ** -0.5, 0.5 * (self.num_groups / self.count_share) ** 0.5
        return _times(gradients, noise_multiplier), _times(counts, noise_multiplier)

    def _initial(self) -> PyTree:
        return jax.tree.map(lambda c: jnp.array(c, jnp.float32), self.initial)

    def next_norms(self, clip_norms: PyTree, shares: PyTree) -> PyTree:
        """The clip norms after a step in which these shares of the batch were below them."""

        def moved(c: jax.Array, share: jax.Array) -> jax.Array:
            return jnp.clip(c * jnp.exp(-self.learning_rate * (share - self.quantile)), LEAST, MOST)

        return jax.tree.map(moved, clip_norms, shares)

    def private_mean(
        self,
        *,
        noise_multiplier: ScalarOrSchedule,
        expected_batch_size: float | jax.Array,
        key: jax.Array,
        preconditioner: tuple[Preconditioner, ...] = (),
        noise: Strategy | None = None,
    ) -> PrivateOptimizer:
        """`dpopt.privatize` with this clip norm; it takes the same arguments.

        Raises:
            ValueError: for noise that is correlated over steps.
        """
        if noise is not None:
            raise ValueError(
                "an adaptive clip norm supports independent noise only. Correlated noise subtracts noise that earlier "
                "steps added; after the clip norm has changed, and the noise with it, the amounts differ, and no "
                "accounting here covers such noise together with counts. Pass a fixed l2_clip_norm, or noise=None."
            )
        gradient_multiplier, count_stddev = self.split(noise_multiplier)
        drawn_stddev = _times(1 + _SLACK * expected_batch_size, count_stddev)

        def core_at(total: jax.Array, clip: unit_clip.UnitClip) -> PrivateOptimizer:
            return privatize(
                l2_clip_norm=clip,
                noise_multiplier=gradient_multiplier,
                expected_batch_size=expected_batch_size,
                key=key,
                preconditioner=(*preconditioner, AdaptiveClipNorm(total, self)),
            )

        count_noise = add_gaussian_noise(drawn_stddev, jax.random.fold_in(key, _COUNT_KEY))
        core = core_at(*unit_clip.factors(self._initial()))

        def init_fn(params: optax.Params):
            noise_state = cast(AddGaussianNoiseState, count_noise.init(params))
            return QuantileClipState(self._initial(), noise_state, core.init(params))

        def run(updates: PyTree, state: PyTree, params: optax.Params | None = None, **extra_args: Any):
            grads, (total, clip) = as_promise(updates, params), unit_clip.factors(state.clip_norms)
            mean, core_state, noise_stddev = core_at(total, clip).run(grads, state.core, params, **extra_args)
            counts = flow.bounded(_centred_counts(grads.latest, clip.l2_clip_norms))
            counts, noise_state = count_noise.update(counts, state.count_noise)
            shares = jax.tree.map(lambda n: 0.5 + n / jnp.asarray(expected_batch_size, n.dtype), counts)
            norms = self.next_norms(state.clip_norms, shares)
            return mean, QuantileClipState(norms, cast(AddGaussianNoiseState, noise_state), core_state), noise_stddev

        # One example moves all counts together by sqrt(m) / 2.
        counts = Query(_times(2 * self.num_groups**-0.5, count_stddev))
        privacy = Privacy((*core.privacy.queries, counts), unit=core.privacy.unit)
        return PrivateOptimizer(init_fn, run, privacy, core.stages)


def _times(factor: float | jax.Array, value: ScalarOrSchedule) -> ScalarOrSchedule:
    if callable(value):
        return lambda step: factor * value(step)
    return factor * value


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptiveClipNorm(Preconditioner):
    """The diagonal that turns a clip at 1 into a clip at C: gradients are divided by C, the noisy mean multiplied by C.

    *Privacy*: C was released before the step.

    >>> AdaptiveClipNorm(2.0, None).diagonal((), None)[0].scale
    0.5
    """

    total: float | jax.Array  # (): the norm of all C_k
    rule: QuantileClip | None

    needs_feedback = True

    @property
    def sensitivity_note(self) -> str:
        """The factor of the sensitivity, for the summary of a plan."""
        initial = [] if self.rule is None else jax.tree.leaves(self.rule.initial)
        start = f"{initial[0]:g}" if len(initial) == 1 and not np.ndim(initial[0]) else "those of the groups"
        return f" times the clip norm, which is adaptive, from {start}"

    def diagonal(
        self, state: optax.EmptyState, params: optax.Params | None, **extra_args: Any
    ) -> tuple[Diagonal, optax.EmptyState]:
        del params, extra_args
        return Diagonal(scale=1 / self.total, release=self.total), state


def _centred_counts(seen: ClippedSum, l2_clip_norms: PyTree) -> PyTree:
    r""":math:`\sum_i \phi(\|g_{i,k}\| / C_k)` over the examples of a batch, like the clip norms.

    Padding adds nothing. Neither does a gradient that is not finite, since it should not increase C_k and with it the
    noise. So adding or removing one example changes a count by at most 1/2.
    """
    if seen.leaf_norms is None:  # an empty batch
        return jax.tree.map(jnp.zeros_like, l2_clip_norms)

    def of_group(c: jax.Array, group: PyTree) -> jax.Array:
        norms = unit_clip.group_norms(c, group)
        counts = trees.per_example(seen.sensitive.is_example, norms) & jnp.isfinite(norms)
        votes = jnp.clip((1 - norms / unit_clip.per_row(c)) / (2 * HALF_WIDTH), -0.5, 0.5)
        return jnp.sum(jnp.where(counts, votes, 0.0).astype(jnp.float32), axis=0)

    counts = [of_group(c, group) for c, group in unit_clip.groups(l2_clip_norms, seen.leaf_norms)]
    return jax.tree.unflatten(jax.tree.structure(l2_clip_norms), counts)


def quantile_clip(
    initial_l2_clip_norm: PyTree, *, quantile: float = 0.5, learning_rate: float = 0.2, count_share: float = 0.01
) -> QuantileClip:
    r"""A clip norm that follows a quantile of the gradients' norms; pass it as ``l2_clip_norm``.

    .. math::

        \tilde b_t = \tfrac12 + \tfrac1B \Big( \sum_{i \in \text{batch}} \phi\Big(\frac{\|g_i\|}{C_t}\Big)
        + \sigma_b z \Big), \quad C_{t+1} = C_t \exp(-\eta\, (\tilde b_t - \gamma))

    with B the expected batch size, and :math:`\phi` falling from 1/2 to -1/2 between 15/16 and 17/16. (In the paper it
    jumps at 1, so one other row, which may change the last bits of norms, could change the votes of all similar rows.)
    The standard deviation of the noise on the gradients is :math:`z_\Delta C_t`, and is passed to stages
    that need it. The optimizer's ``noise_multiplier`` z, given or calibrated, covers both queries together; see
    `QuantileClip.split`. The clip norm is in the optimizer's state: ``optax.tree.get(state, "clip_norms")``.

    Args:
        initial_l2_clip_norm: C_0: a number, or numbers as a pytree that is a prefix of the parameters, one for each
            group with its own clip norm, count and quantile (see `dpopt.GroupClip`). An array ``(layers,)``, for a
            parameter that stacks layers for a scan, makes each layer a group. Clip norms stay between 2^-60 and 2^60.
        quantile: gamma, the share of examples that should not be clipped, in [0, 1].
        learning_rate: eta, at least 0: a clip norm that is far off moves by a factor of up to e^eta per step.
        count_share: r in (0, 1), the share of ``1 / z**2`` that all counts together get. 0.01 makes the noise on the
            gradients 0.5% larger. The paper's :math:`\sigma_b = B / 20` is :math:`r = m\, (10 z / B)^2`.

    Raises:
        ValueError, TypeError: for a bad argument, named; in ``update``, if the tree is not a prefix of the parameters.

    *Privacy*: two Gaussian queries per step on one batch: the clipped sum, of sensitivity C_t, and m counts, each of
    which one example moves by at most 1/2, whatever its gradient. The noise on counts is increased by B / 2^15 of
    :math:`\sigma_b`, because one more example may change the last bits of the other norms. C_t is computed from noised
    counts alone, and so is fixed before a batch is read.

    Reference: Andrew, Thakkar, McMahan and Ramaswamy (2021), Differentially Private Learning with Adaptive Clipping,
    Algorithm 1 and Theorem 1.

    >>> import dpopt
    >>> opt = dpopt.dp_sgd(
    ...     0.1, l2_clip_norm=quantile_clip(1.0), noise_multiplier=2.0, expected_batch_size=64, key=jax.random.key(0))
    >>> [round(query.multiplier(0), 2) for query in opt.privacy.queries]
    [2.01, 20.0]
    >>> round(dpopt.events.merged(opt.privacy.step_event()).noise_multiplier, 2)
    2.0
    """
    entries = jax.tree_util.tree_leaves_with_path(initial_l2_clip_norm)
    if not entries:
        raise ValueError("initial_l2_clip_norm has no entries; pass a number, or one per group of parameters.")
    for path, entry in entries:
        name = f"initial_l2_clip_norm{jax.tree_util.keystr(path)}"
        for value in entry if np.ndim(entry) == 1 else [entry]:
            validate.positive(**{name: value})
            validate.at_least(LEAST, _OUT_OF_BOUNDS, **{name: value})
            if (validate.concrete(value) or 0) > MOST:
                raise ValueError(f"{name} must be at most {MOST:.3g}; got {value}. {_OUT_OF_BOUNDS}")
    validate.non_negative(learning_rate=learning_rate, quantile=quantile)
    if quantile > 1:
        raise ValueError(f"quantile must lie in [0, 1]; got {quantile}.")
    validate.positive(count_share=count_share)
    if count_share >= 1:
        raise ValueError(
            f"count_share must lie in (0, 1), so that both the counts and the gradients get noise; got {count_share}."
        )
    return QuantileClip(
        initial=initial_l2_clip_norm,
        quantile=float(quantile),
        learning_rate=float(learning_rate),
        count_share=float(count_share),
    )


_OUT_OF_BOUNDS = "Multiply the loss by a constant instead."
