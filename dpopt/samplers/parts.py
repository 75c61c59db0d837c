"""The data in parts, one after the other: samplers that keep the steps of an example apart, as correlated noise needs.

Which part an example is in depends on its index, or on a draw of its own, and not on other examples: one more example
moves nobody.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, cast

import numpy as np

from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.privacy import Privacy, Relation
from dpopt.sampling import _Sampler, padding


@dataclasses.dataclass(frozen=True)
class InParts:
    """Step t looks at part ``t % parts`` of the data, or at a Poisson sample of it.

    Args:
        parts: how many parts; an example is in at most every ``parts``-th step.
        sampling_prob: probability with which an example is in a step of its part; 1: always.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: a run's first t steps are what has a cost, since the steps of different parts are about different
    examples, and correlated noise is worth what all steps of an example make of it. `event` gives it.

    >>> from dpopt.privacy import Query
    >>> InParts(4, 0.5).event(Privacy((Query(2.0),)), 0, 9).count
    3
    """

    parts: int
    sampling_prob: float = 1.0

    relation = Relation.ADD_OR_REMOVE_ONE

    def __post_init__(self):
        validate.positive_int(parts=self.parts)
        validate.probability(sampling_prob=self.sampling_prob)

    def event(self, privacy: Privacy, first: int, last: int) -> dp_accounting.DpEvent:
        """The event that steps ``first .. last - 1`` add to the steps before them, since the noise's strategy began.

        Without a sample: the Gaussian query whose noise is divided by the sensitivity of an example's steps together
        (`dpopt.correlated.Strategy.cost`). With one: as many Poisson samples as an example has steps, which takes a
        strategy that keeps them apart (Choquette-Choo et al. 2023).

        Raises:
            ValueError: for noise that is correlated over more steps than samples are apart, for more steps than the
                strategy covers, for several queries a step, or noise that varies.
        """
        multiplier, strategy = privacy.only_query(self.relation)
        if last <= first:
            return dp_accounting.NoOpDpEvent()
        if multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        if strategy is not None and last > strategy.steps:
            raise ValueError(
                f"{strategy.name} covers {strategy.steps} steps, and step {last} was asked for: make it with steps= "
                "of the whole run."
            )
        bands = 1 if strategy is None else strategy.bands
        if self.sampling_prob < 1:
            if bands > self.parts:
                raise ValueError(
                    f"{cast(Any, strategy).name} correlates noise over {bands} steps, and an example may be sampled "
                    f"again after {self.parts}: no theorem covers that. Use a strategy of at most {self.parts} bands "
                    f"(dpopt.correlated.banded), CyclicPoissonSampler(..., parts={bands}), or an EpochSampler."
                )
            count = math.ceil(last / self.parts) - math.ceil(first / self.parts)
            sample = dp_accounting.PoissonSampledDpEvent(self.sampling_prob, dp_accounting.GaussianDpEvent(multiplier))
            if count <= 1:
                return sample if count else dp_accounting.NoOpDpEvent()
            return dp_accounting.SelfComposedDpEvent(sample, count)
        if strategy is None:
            squared: float = math.ceil(last / self.parts) - math.ceil(first / self.parts)
        else:
            cost = strategy.cost(self.parts)
            squared = float(cost[last] - cost[first])
        if squared <= 0:
            return dp_accounting.NoOpDpEvent()
        return dp_accounting.GaussianDpEvent(multiplier * squared**-0.5)


class _PartSampler(_Sampler):
    scheme: InParts

    def part(self, step: int) -> np.ndarray:
        """The indices of the part that step ``step`` looks at."""
        return np.arange(step % self.scheme.parts, self.num_examples, self.scheme.parts)


class CyclicPoissonSampler(_PartSampler):
    """Poisson samples of one part of the data after the other.

    Example i is in part ``i % parts``, and step t samples part ``t % parts``, each of its examples with probability
    ``parts * expected_batch_size / num_examples``. The more parts, the further apart an example's steps are, and the
    less a sample amplifies.

    Args:
        num_examples: size of the data set.
        expected_batch_size: expected number of examples in a batch, at most ``num_examples / parts``.
        parts: how many parts: at least as many as the noise's strategy has bands.
        seed, pad_to, start: see `dpopt.PoissonSampler`.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: see `InParts`. What is drawn follows it exactly.

    >>> sampler = CyclicPoissonSampler(1_000, 50, parts=4, seed=0)
    >>> sampler.scheme.sampling_prob, {int(i) % 4 for i in sampler.drawn(6)}
    (0.2, {2})
    """

    def __init__(
        self,
        num_examples: int,
        expected_batch_size: float,
        *,
        parts: int,
        seed: int,
        pad_to: int | None = None,
        start: int = 0,
    ):
        validate.positive(expected_batch_size=expected_batch_size)
        validate.positive_int(parts=parts)
        pad_to = padding(expected_batch_size) if pad_to is None else pad_to
        super().__init__(num_examples, seed=seed, pad_to=pad_to, start=start)
        if parts * expected_batch_size > num_examples:
            raise ValueError(
                f"{parts} parts of {num_examples} examples have {num_examples / parts:g} each, fewer than "
                f"expected_batch_size {expected_batch_size}: use fewer parts."
            )
        self.expected_batch_size = expected_batch_size
        self.scheme = InParts(int(parts), parts * expected_batch_size / num_examples)

    def _draw(self, rng: np.random.Generator, step: int) -> np.ndarray:
        part = self.part(step)
        size = rng.binomial(len(part), self.scheme.sampling_prob)
        return rng.choice(part, size, replace=False, shuffle=False).astype(np.int64)


class EpochSampler(_PartSampler):
    """Every example once an epoch, in the same order in all epochs.

    Example i is in part ``i % parts``, and step t takes the whole of part ``t % parts``, where ``parts`` is the number
    of examples over the expected batch size, rounded up. There is no amplification by sampling: of use with correlated
    noise, and for small data.

    Args:
        num_examples: size of the data set.
        expected_batch_size: at most so many examples a step, at most ``num_examples``.
        seed: non-negative integer, of the padding.
        pad_to, start: see `dpopt.PoissonSampler`; ``pad_to`` is the size of a batch by default.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: see `InParts`. The data's order must not depend on what is private.

    >>> sampler = EpochSampler(10, 4, seed=0)
    >>> sampler.scheme.parts, sampler.drawn(0).tolist() == sampler.drawn(3).tolist()
    (3, True)
    """

    def __init__(
        self, num_examples: int, expected_batch_size: int, *, seed: int, pad_to: int | None = None, start: int = 0
    ):
        validate.positive_int(num_examples=num_examples, expected_batch_size=expected_batch_size)
        if expected_batch_size > num_examples:
            raise ValueError(f"expected_batch_size {expected_batch_size} exceeds num_examples {num_examples}.")
        parts = math.ceil(num_examples / expected_batch_size)
        size = math.ceil(num_examples / parts)
        super().__init__(num_examples, seed=seed, pad_to=size if pad_to is None else pad_to, start=start)
        self.expected_batch_size = expected_batch_size
        self.scheme = InParts(parts)

    def _draw(self, rng: np.random.Generator, step: int) -> np.ndarray:
        del rng
        return self.part(step)


class BallsInBinsSampler(_PartSampler):
    """Every example once an epoch, in a part that is drawn for each example by itself, the same in all epochs.

    As `EpochSampler`, but parts are random, and their sizes with them.

    Args:
        num_examples: size of the data set.
        expected_batch_size: expected number of examples in a batch; ``num_examples`` is a multiple of it.
        seed, pad_to, start: see `dpopt.PoissonSampler`.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: see `InParts`: as parts that are fixed, since they are drawn without a look at the data. That they are
    secret is not counted in anyone's favour.

    >>> sampler = BallsInBinsSampler(1_000, 100, seed=0)
    >>> sorted(np.concatenate([sampler.drawn(t) for t in range(10)]).tolist()) == list(range(1_000))
    True
    """

    def __init__(
        self, num_examples: int, expected_batch_size: int, *, seed: int, pad_to: int | None = None, start: int = 0
    ):
        validate.positive_int(num_examples=num_examples, expected_batch_size=expected_batch_size)
        if num_examples % expected_batch_size:
            raise ValueError(
                f"expected_batch_size {expected_batch_size} does not divide num_examples {num_examples}: parts are "
                "drawn with equal probability, and there is a whole number of them."
            )
        pad_to = padding(expected_batch_size) if pad_to is None else pad_to
        super().__init__(num_examples, seed=seed, pad_to=pad_to, start=start)
        self.expected_batch_size = expected_batch_size
        self.scheme = InParts(num_examples // expected_batch_size)

    def part(self, step: int) -> np.ndarray:
        return np.flatnonzero(_bins(self.seed, self.num_examples, self.scheme.parts) == step % self.scheme.parts)

    def _draw(self, rng: np.random.Generator, step: int) -> np.ndarray:
        del rng
        return self.part(step)


@functools.lru_cache(maxsize=2)  # the same at all steps of a segment
def _bins(seed: int, num_examples: int, parts: int) -> np.ndarray:
    return np.random.default_rng([seed, 0, 1]).integers(parts, size=num_examples)  # steps draw from [seed, step]
