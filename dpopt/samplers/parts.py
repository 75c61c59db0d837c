"""Samplers that go through the data part by part, so that the steps of an example are apart, for correlated noise.

The part of an example depends on its index, or on a draw of its own, but not on other examples. An example that is
added is the last one, so that all others stay where they are; one that is removed leaves its index free. (If indices
were ranks, as `dpopt.users.group` numbers users, all later ones would move to other parts: `dpopt.train` refuses it.)
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt

from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.composition.relation import Relation
from dpopt.privacy import Privacy
from dpopt.sampling import Indices, _Sampler, padding  # pyright: ignore[reportPrivateUsage]  within the package


@dataclasses.dataclass(frozen=True)
class InParts:
    """Step t reads part ``t % parts`` of the data, or a Poisson sample of it.

    Args:
        parts: number of parts; an example is in at most every ``parts``-th step.
        sampling_prob: probability that an example is in a step of its part; 1 for always.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: a single step has no cost of its own, since steps of different parts read different examples, and the
    cost under correlated noise depends on all steps of an example together. `event` gives the cost of a range of steps.

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
        for name in ("parts", "sampling_prob"):
            object.__setattr__(self, name, validate.plain(getattr(self, name)))

    def event(self, privacy: Privacy, first: int, last: int) -> dp_accounting.DpEvent:
        """The event that steps ``first .. last - 1`` add to those before them; steps count from the strategy's first.

        Without sampling: one Gaussian query, with the noise divided by the sensitivity of all steps of an example
        together (`dpopt.correlated.Strategy.cost`). With sampling: as many Poisson samples as an example has steps;
        noise must not be correlated between these (Choquette-Choo et al. 2023).

        Raises:
            ValueError: if noise is correlated between the samples of an example, for more steps than the strategy
                covers, for several queries a step, or noise that varies.
        """
        multiplier, strategy = privacy.only_query(self.relation)
        if last <= first:
            return dp_accounting.NoOpDpEvent()
        if multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        if strategy is not None and last > strategy.steps:
            raise ValueError(
                f"{strategy.name} covers {strategy.steps} steps, but the run has at least {last}: make it with "
                "steps= of the whole run."
            )
        count = math.ceil(last / self.parts) - math.ceil(first / self.parts)  # steps of an example
        if self.sampling_prob < 1:
            if strategy is not None and strategy.bands > self.parts:
                raise ValueError(
                    f"{strategy.name} correlates noise over {strategy.bands} steps, but an example may be sampled "
                    f"again after {self.parts}: no theorem covers that. Use a strategy of at most {self.parts} bands "
                    f"(dpopt.correlated.banded), CyclicPoissonSampler(..., parts={strategy.bands}), or an EpochSampler."
                )
            if count == 0:
                return dp_accounting.NoOpDpEvent()
            sample = dp_accounting.PoissonSampledDpEvent(self.sampling_prob, dp_accounting.GaussianDpEvent(multiplier))
            return sample if count == 1 else dp_accounting.SelfComposedDpEvent(sample, count)
        cost = None if strategy is None else strategy.cost(self.parts)
        squared = count if cost is None else float(cost[last] - cost[first])  # the sensitivity
        if squared <= 0:
            return dp_accounting.NoOpDpEvent()
        return dp_accounting.GaussianDpEvent(multiplier * squared**-0.5)


class _PartSampler(_Sampler[InParts]):
    goes_by_number = True  # whether the part of an example is determined by its index

    def part(self, step: int) -> Indices:
        """The indices of the part that step ``step`` reads."""
        return np.arange(step % self.scheme.parts, self.num_examples, self.scheme.parts)

    def _draw(self, rng: np.random.Generator, step: int) -> Indices:
        return self.part(step)


class CyclicPoissonSampler(_PartSampler):
    """Poisson samples of one part of the data after another.

    Example i is in part ``i % parts``. Step t samples from part ``t % parts``, each example with probability
    ``parts * expected_batch_size / num_examples``. With more parts, the steps of an example are further apart, but
    there is less amplification by sampling.

    Args:
        num_examples: size of the data set.
        expected_batch_size: expected number of examples in a batch, at most ``num_examples / parts``.
        parts: number of parts, at least the number of bands of the noise strategy.
        seed, pad_to, start: see `dpopt.PoissonSampler`.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: see `InParts`, which the draws follow exactly.

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
                f"each of {parts} parts has {num_examples / parts:g} of the {num_examples} examples, fewer than "
                f"expected_batch_size {expected_batch_size}: use fewer parts."
            )
        self.expected_batch_size = expected_batch_size
        self.scheme = InParts(int(parts), parts * expected_batch_size / num_examples)

    def _draw(self, rng: np.random.Generator, step: int) -> Indices:
        part = self.part(step)
        size = rng.binomial(len(part), self.scheme.sampling_prob)
        return rng.choice(part, size, replace=False, shuffle=False).astype(np.int64)


class EpochSampler(_PartSampler):
    """Every example once per epoch, in the same order in every epoch.

    Example i is in part ``i % parts``, and step t takes all of part ``t % parts``, where ``parts`` is the number of
    examples over the expected batch size, rounded up. There is no amplification by sampling. Useful with correlated
    noise, and for small data.

    Args:
        num_examples: size of the data set.
        expected_batch_size: largest number of examples in a step, at most ``num_examples``.
        seed: non-negative integer, for the padding only.
        pad_to, start: see `dpopt.PoissonSampler`; ``pad_to`` is the size of the largest batch by default.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: see `InParts`. The order of the data must not depend on private values.

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


class BallsInBinsSampler(_PartSampler):
    """Every example once per epoch, in a part drawn independently for each example and kept for all epochs.

    Like `EpochSampler`, but the parts and their sizes are random.

    Args:
        num_examples: size of the data set.
        expected_batch_size: expected number of examples in a batch; must divide ``num_examples``.
        seed, pad_to, start: see `dpopt.PoissonSampler`.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: see `InParts`: accounted for like fixed parts, since they do not depend on the data. That they are secret
    does not lower epsilon.

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
                f"expected_batch_size {expected_batch_size} does not divide num_examples {num_examples}: the quotient "
                "is the number of parts, which are drawn with equal probability."
            )
        pad_to = padding(expected_batch_size) if pad_to is None else pad_to
        super().__init__(num_examples, seed=seed, pad_to=pad_to, start=start)
        self.expected_batch_size = expected_batch_size
        self.scheme = InParts(num_examples // expected_batch_size)

    goes_by_number = False

    def part(self, step: int) -> Indices:
        return np.flatnonzero(_bins(self.seed, self.num_examples, self.scheme.parts) == step % self.scheme.parts)


@functools.lru_cache(maxsize=2)  # all steps of a segment use the same
def _bins(seed: int, num_examples: int, parts: int) -> npt.NDArray[np.int64]:
    """The part of each example, independent of the draws of steps, which use ``[seed, step]``."""
    return np.random.default_rng([seed, 0, 1]).integers(parts, size=num_examples)
