"""Truncated Poisson samples: batches of one shape, with truncation accounted for.

Truncation makes examples depend on each other: an additional example in a full sample replaces another one, and moves
the sum by up to twice the clip norm. The event includes the probability of that.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.composition.relation import Relation
from dpopt.events import merged
from dpopt.sampling import Indices, _Sampler  # pyright: ignore[reportPrivateUsage]  within the package


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson:
    """A Poisson sample; if it has more than ``max_batch_size`` examples, a random subset of that size.

    Args:
        num_examples: size of the data set. Epsilon holds for removing one of these, and for adding one.
        sampling_prob: probability that an example is drawn, before truncation.
        max_batch_size: largest number of examples kept.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: amplifies by subsampling, under add-or-remove-one, slightly less than `dpopt.sampling.Poisson`. Epsilon
    depends on the number of examples, which is assumed to be public.

    Reference: Tighter Privacy Analysis for Truncated Poisson Sampling (2025), https://arxiv.org/abs/2508.15089

    >>> TruncatedPoisson(100, 0.1, 20).event(dp_accounting.GaussianDpEvent(2.0))
    TruncatedSubsampledGaussianDpEvent(dataset_size=100, sampling_probability=0.1, truncated_batch_size=20, \
noise_multiplier=2.0)
    """

    num_examples: int
    sampling_prob: float
    max_batch_size: int

    relation = Relation.ADD_OR_REMOVE_ONE

    def __post_init__(self):
        validate.positive_int(num_examples=self.num_examples, max_batch_size=self.max_batch_size)
        validate.probability(sampling_prob=self.sampling_prob)
        for name in ("num_examples", "sampling_prob", "max_batch_size"):
            object.__setattr__(self, name, validate.plain(getattr(self, name)))

    def event(self, step_event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        """The event of a step on a sample. Its queries are merged, since all of them read the same sample."""
        query = merged(step_event)
        if not isinstance(query, dp_accounting.GaussianDpEvent):
            return query  # no noise, or no cost
        return dp_accounting.TruncatedSubsampledGaussianDpEvent(
            dataset_size=self.num_examples,
            sampling_probability=self.sampling_prob,
            truncated_batch_size=self.max_batch_size,
            noise_multiplier=query.noise_multiplier,
        )


class TruncatedPoissonSampler(_Sampler[TruncatedPoisson]):
    """Poisson samples in batches of exactly ``max_batch_size`` rows: smaller samples are padded, larger ones truncated.

    Args:
        num_examples: size of the data set.
        expected_batch_size: expected number of examples drawn, at most ``num_examples``.
        max_batch_size: rows of every batch, at least ``expected_batch_size``. `ample_batch_size` returns a size at
            which truncation costs almost nothing.
        seed, start: see `dpopt.PoissonSampler`.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: see `TruncatedPoisson`, which the draws follow exactly. Which samples were truncated is as private as the
    samples are.

    >>> sampler = TruncatedPoissonSampler(1_000, 50, max_batch_size=64, seed=0)
    >>> {len(sampler.batch(t).mask) for t in range(100)}
    {64}
    """

    def __init__(
        self, num_examples: int, expected_batch_size: float, *, max_batch_size: int, seed: int, start: int = 0
    ):
        validate.positive(expected_batch_size=expected_batch_size)
        validate.positive_int(max_batch_size=max_batch_size)
        super().__init__(num_examples, seed=seed, pad_to=max_batch_size, start=start)
        if expected_batch_size > num_examples:
            raise ValueError(f"expected_batch_size {expected_batch_size} exceeds num_examples {num_examples}.")
        if max_batch_size < expected_batch_size:
            raise ValueError(
                f"max_batch_size {max_batch_size} is below expected_batch_size {expected_batch_size}: most samples "
                "would be truncated, but the sum is divided by expected_batch_size. Decrease expected_batch_size or "
                "increase max_batch_size (dpopt.samplers.truncated.ample_batch_size)."
            )
        self.expected_batch_size = expected_batch_size
        self.scheme = TruncatedPoisson(num_examples, expected_batch_size / num_examples, int(max_batch_size))

    def _draw(self, rng: np.random.Generator, step: int) -> Indices:
        del step
        # Given its size, a Poisson sample is a uniform subset, and so is a random subset of it. So only the size has to
        # be drawn and truncated.
        size = min(rng.binomial(self.num_examples, self.scheme.sampling_prob), self.scheme.max_batch_size)
        return rng.choice(self.num_examples, size, replace=False, shuffle=False).astype(np.int64)


def ample_batch_size(
    num_examples: int, expected_batch_size: float, *, steps: int, delta: float, share: float = 0.01
) -> int:
    r"""The smallest ``max_batch_size`` at which truncation costs at most a share of delta.

    A sample is full without one more example with probability :math:`\tau = P(\mathrm{Bin}(n, q) \ge B)`. If no sample
    of a run is, truncation changes nothing. So with :math:`T \tau \le` ``share * delta``, epsilon at delta is at most
    that of plain Poisson samples at ``(1 - share) * delta``.

    Args:
        num_examples, expected_batch_size: as for `TruncatedPoissonSampler`.
        steps: number of steps of the whole run.
        delta: the delta of the guarantee.
        share: share of delta that truncation may cost, in (0, 1].

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: arithmetic on public constants.

    >>> ample_batch_size(50_000, 512, steps=2_000, delta=1e-6)
    673
    """
    from scipy import stats

    validate.positive_int(num_examples=num_examples, steps=steps)
    validate.positive(expected_batch_size=expected_batch_size)
    validate.delta(delta)
    validate.probability(share=share)
    if expected_batch_size > num_examples:
        raise ValueError(f"expected_batch_size {expected_batch_size} exceeds num_examples {num_examples}.")
    return 1 + int(stats.binom.isf(share * delta / steps, num_examples, expected_batch_size / num_examples))
