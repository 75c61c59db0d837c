"""Adaptive clipping: a clip norm that follows a quantile of the gradients' norms, and pays for what it looks at.

Where to clip is hard to say before a run, and norms change during one. `quantile_clip` takes the place of a clip norm:
it starts somewhere and moves towards the norm below which a given share of examples lie. How many do is a second query
of every step, with noise of its own, and both come out of one noise multiplier.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpopt.chain import PrivateOptimizer
from dpopt.clipping import as_promise
from dpopt.common import trees, validate
from dpopt.common.lazy import flow
from dpopt.engines import unit_clip
from dpopt.gradients import ClippedSum
from dpopt.noise import AddGaussianNoiseState, add_gaussian_noise
from dpopt.preconditioners.base import Diagonal, Preconditioner
from dpopt.privacy import Privacy, Query
from dpopt.private_mean import privatize

# Gradients are divided by the clip norm before they are clipped: within these bounds nothing over- or underflows.
LEAST, MOST = 2.0**-60, 2.0**60
# A vote falls while a norm grows from 15/16 to 17/16 of the clip norm, and not all at once there: rows that are alike
# would all change their votes with the last bit of their norms, which may hang on one row more in the batch.
HALF_WIDTH = 2.0**-4
# What such bits move the sum of votes by, over the 1/2 of the row that is there or not: norms are taken to be the same
# to 2^-20, a vote moves by 1 / (2 * HALF_WIDTH) times that, and a batch may be twice as large as is expected.
_SLACK = 2 * 2.0**-20 / HALF_WIDTH
_COUNT_KEY = 2**31 - 4  # as far from the numbers of steps as what the sampler's seed is made of


class QuantileClipState(NamedTuple):
    """State of an optimizer whose clip norm is made by `quantile_clip`."""

    clip_norms: Any  # like the initial ones, float32: what the next step clips at
    count_noise: AddGaussianNoiseState  # of the noise on the counts
    core: Any  # of the private mean


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantileClip:
    """The clip norm made by `quantile_clip`; a description, which an optimizer takes where it takes a clip norm.

    *Privacy*: see `quantile_clip`.

    >>> QuantileClip(initial=1.0, quantile=0.5, learning_rate=0.2, count_share=0.36).split(2.4)
    (3.0, 2.0)
    """

    initial: Any  # numbers, or (layers,) arrays: a prefix of the parameters
    quantile: float
    learning_rate: float
    count_share: float

    sensitivity = 1.0  # of the sum of gradients over the norm of the C_k, which is what gets clipped

    @property
    def num_groups(self) -> int:
        """How many clip norms there are, and counts a step."""
        return sum(math.prod(np.shape(c)) for c in jax.tree.leaves(self.initial))

    def split(self, noise_multiplier: Any) -> tuple[Any, Any]:
        r"""The gradients' noise multiplier, and the standard deviation of the noise on each count.

        .. math:: z_\Delta = z / \sqrt{1 - r}, \quad \sigma_b = \tfrac{z}{2} \sqrt{m / r}

        so that :math:`z_\Delta^{-2} + m\, (2 \sigma_b)^{-2} = z^{-2}`: m counts, each of which an example moves by 1/2,
        and the gradients cost together what one Gaussian query of multiplier z costs.

        Args:
            noise_multiplier: z, a number or a schedule; both results are of the same kind.
        """
        gradients, counts = (1 - self.count_share) ** -0.5, 0.5 * (self.num_groups / self.count_share) ** 0.5
        return _times(gradients, noise_multiplier), _times(counts, noise_multiplier)

    def _initial(self) -> Any:
        return jax.tree.map(lambda c: jnp.array(c, jnp.float32), self.initial)

    def next_norms(self, clip_norms: Any, shares: Any) -> Any:
        """The clip norms after a step in which these shares of the batch were below them."""

        def moved(c: jax.Array, share: jax.Array) -> jax.Array:
            return jnp.clip(c * jnp.exp(-self.learning_rate * (share - self.quantile)), LEAST, MOST)

        return jax.tree.map(moved, clip_norms, shares)

    def private_mean(
        self,
        *,
        noise_multiplier: Any,
        expected_batch_size: Any,
        key: jax.Array,
        preconditioner: tuple[Preconditioner, ...] = (),
        noise: Any = None,
    ) -> PrivateOptimizer:
        """`dpopt.privatize` with this clip norm; it takes the same arguments.

        Raises:
            ValueError: for noise that is correlated over steps.
        """
        if noise is not None:
            raise ValueError(
                "an adaptive clip norm goes with independent noise only. Correlated noise takes back what earlier "
                "steps added; where the clip norm, and the noise with it, has moved since then, that is another amount "
                "than was added, and no account here covers such noise together with counts. Pass a fixed "
                "l2_clip_norm, or noise=None."
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

        def init_fn(params):
            noise_state = cast(AddGaussianNoiseState, count_noise.init(params))
            return QuantileClipState(self._initial(), noise_state, core.init(params))

        def run(updates, state, params=None, **extra_args):
            grads, (total, clip) = as_promise(updates, params), unit_clip.factors(state.clip_norms)
            mean, core_state, noise_stddev = core_at(total, clip).run(grads, state.core, params, **extra_args)
            counts = flow.bounded(_centred_counts(grads.latest, clip.l2_clip_norms))
            counts, noise_state = count_noise.update(counts, state.count_noise)
            shares = jax.tree.map(lambda n: 0.5 + n / jnp.asarray(expected_batch_size, n.dtype), counts)
            norms = self.next_norms(state.clip_norms, shares)
            return mean, QuantileClipState(norms, cast(AddGaussianNoiseState, noise_state), core_state), noise_stddev

        # Together the counts are moved by sqrt(m) / 2.
        counts = Query(_times(2 * self.num_groups**-0.5, count_stddev))
        privacy = Privacy((*core.privacy.queries, counts), unit=core.privacy.unit)
        return PrivateOptimizer(init_fn, run, privacy, core.stages)


def _times(factor: float, value: Any) -> Any:
    if callable(value):
        schedule: Callable[[Any], Any] = value
        return lambda step: factor * schedule(step)
    return factor * value


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptiveClipNorm:
    """The diagonal that makes a clip at 1 one at C: gradients over C before it, the noisy mean times C after the noise.

    *Privacy*: C is what was released before.

    >>> AdaptiveClipNorm(2.0, None).diagonal((), None)[0].scale
    0.5
    """

    total: Any  # (): the norm of all C_k
    rule: QuantileClip | None

    needs_feedback = True

    @property
    def clip_norm(self) -> str:
        """What a plan's summary says the sensitivity is a multiple of."""
        initial = [] if self.rule is None else jax.tree.leaves(self.rule.initial)
        start = f"{initial[0]:g}" if len(initial) == 1 and not np.ndim(initial[0]) else "those of the groups"
        return f" times the clip norm, which is adaptive, from {start}"

    def init(self, params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def diagonal(self, state: Any, params: Any, **extra_args: Any) -> tuple[Diagonal, Any]:
        del params, extra_args
        return Diagonal(scale=1 / self.total, release=self.total), state

    def observe(self, state: Any, private_mean: Any, noise_stddev: Any) -> Any:
        del private_mean, noise_stddev
        return state


def _centred_counts(seen: ClippedSum, l2_clip_norms: Any) -> Any:
    r""":math:`\sum_i \phi(\|g_{i,k}\| / C_k)` over the examples of a batch, like the clip norms.

    Padding adds nothing, and neither does a gradient that is not finite: it is no reason for a larger C_k, and with it
    more noise. So one example more or less is at most 1/2 more or less.
    """
    if seen.leaf_norms is None:  # an empty batch
        return jax.tree.map(jnp.zeros_like, l2_clip_norms)

    def of_group(c: jax.Array, group: Any) -> jax.Array:
        norms = unit_clip.group_norms(c, group)
        counts = trees.per_example(seen.sensitive.is_example, norms) & jnp.isfinite(norms)
        votes = jnp.clip((1 - norms / unit_clip.per_row(c)) / (2 * HALF_WIDTH), -0.5, 0.5)
        return jnp.sum(jnp.where(counts, votes, 0.0).astype(jnp.float32), axis=0)

    counts = [of_group(c, group) for c, group in unit_clip.groups(l2_clip_norms, seen.leaf_norms)]
    return jax.tree.unflatten(jax.tree.structure(l2_clip_norms), counts)


def quantile_clip(
    initial_l2_clip_norm: Any, *, quantile: float = 0.5, learning_rate: float = 0.2, count_share: float = 0.01
) -> QuantileClip:
    r"""A clip norm that follows a quantile of the gradients' norms; takes the place of ``l2_clip_norm``.

    .. math::

        \tilde b_t = \tfrac12 + \tfrac1B \Big( \sum_{i \in \text{batch}} \phi\Big(\frac{\|g_i\|}{C_t}\Big)
        + \sigma_b z \Big), \quad C_{t+1} = C_t \exp(-\eta\, (\tilde b_t - \gamma))

    with B the expected batch size, and :math:`\phi` falling from 1/2 to -1/2 between 15/16 and 17/16. (The paper's vote
    falls at 1 all at once, and then floating-point norms of rows that are alike may all change sides for the sake of
    one other row.) The noise on the gradients follows: its standard deviation is :math:`z_\Delta C_t`,
    which stages that must know it are told. The optimizer's ``noise_multiplier`` z, given or calibrated, is that of
    both queries together; `QuantileClip.split` says what each gets. The optimizer's state holds the clip norm:
    ``optax.tree.get(state, "clip_norms")``.

    Args:
        initial_l2_clip_norm: C_0: a number, or numbers as a pytree that is a prefix of the parameters, each for a group
            that has a clip norm, a count and a quantile of its own (see `dpopt.GroupClip`). For a parameter that a scan
            takes layer by layer it may be an array ``(layers,)``: a group each (see `dpopt.LayerwiseClip`). Clip norms
            stay between 2^-60 and 2^60.
        quantile: gamma, the share of examples that are not to be clipped, in [0, 1].
        learning_rate: eta, at least 0: a clip norm that is far off moves by a factor of up to e^eta a step.
        count_share: r in (0, 1), which part of ``1 / z**2`` the counts get, all of them together. 0.01 makes the
            gradients' noise 0.5% larger. The paper's :math:`\sigma_b = B / 20` is :math:`r = m\, (10 z / B)^2`.

    Raises:
        ValueError, TypeError: for a bad argument, named; in ``update``, if the clip norms' tree is no prefix of the
            parameters.

    *Privacy*: two Gaussian queries a step on one batch: the clipped sum, of sensitivity C_t, and m counts, each of
    which one example moves by at most 1/2, whatever its gradient. The noise on counts is larger than :math:`\sigma_b`
    by B / 2^15 of it, for what one example more may do to the last bits of all others' norms. C_t comes from noised
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
        raise ValueError("initial_l2_clip_norm has no entries; give a number, or one a group of parameters.")
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
