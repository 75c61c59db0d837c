"""Samplers: the examples of each batch, drawn by NumPy on the host from the seed and the step alone.

A sampler can therefore restart at any step. Its scheme (`Poisson`, `WithoutReplacement`) is what accounting uses.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.composition.relation import Relation

Indices: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
_Scheme = TypeVar("_Scheme")


class Scheme(Protocol):
    """A way of sampling batches, as accounting uses it."""

    @property
    def relation(self) -> Relation: ...

    def event(self, step_event: dp_accounting.DpEvent, /) -> dp_accounting.DpEvent: ...


class HasScheme(Protocol):
    """A sampler, as accounting uses it: it has a `Scheme`, or a `dpopt.samplers.parts.InParts`."""

    @property
    def scheme(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Each example is in a batch with probability ``sampling_prob``, independently of everything else.

    *Privacy*: amplifies by subsampling, under add-or-remove-one.

    >>> Poisson(0.5).event(dp_accounting.GaussianDpEvent(1.0)).sampling_probability
    0.5
    """

    sampling_prob: float

    relation = Relation.ADD_OR_REMOVE_ONE

    def __post_init__(self):
        validate.probability(sampling_prob=self.sampling_prob)
        object.__setattr__(self, "sampling_prob", validate.plain(self.sampling_prob))

    def event(self, step_event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        """The event of a step on a sample."""
        return dp_accounting.PoissonSampledDpEvent(self.sampling_prob, step_event)


@dataclasses.dataclass(frozen=True)
class WithoutReplacement:
    """Each batch holds ``batch_size`` distinct examples out of ``num_examples``; all such batches are equally likely.

    *Privacy*: amplifies by subsampling, under replace-one: replacing an example moves the sum by up to twice the clip
    norm, which `dpopt.privacy.Privacy.step_event` takes into account.

    >>> WithoutReplacement(10, 2).event(dp_accounting.GaussianDpEvent(1.0)).sample_size
    2
    """

    num_examples: int
    batch_size: int

    relation = Relation.REPLACE_ONE

    def __post_init__(self):
        validate.positive_int(num_examples=self.num_examples, batch_size=self.batch_size)
        for name in ("num_examples", "batch_size"):
            object.__setattr__(self, name, validate.plain(getattr(self, name)))
        if self.batch_size > self.num_examples:
            raise ValueError(f"batch_size {self.batch_size} exceeds num_examples {self.num_examples}.")

    def event(self, step_event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        """The event of a step on a sample."""
        return dp_accounting.SampledWithoutReplacementDpEvent(self.num_examples, self.batch_size, step_event)


class Batch(NamedTuple):
    """The padded batch of one step.

    Padding rows are other examples of the data. No index occurs twice, unless the batch has more rows than there are
    examples. Padding is not part of the sample: wherever the indices are used, the mask must be used too.

    *Privacy*: which examples were drawn, and how many, is as private as the data; it must not be released.
    """

    indices: Indices  # (size,): first the sample, then padding
    mask: Mask  # (size,): False for padding


AGAIN = (
    "these batches have been iterated over before, and are the same again. They are the steps of a whole run, which "
    "has no epochs: training on a batch twice costs as much as two queries of one sample, which no epsilon here "
    "counts. For more steps, ask for more; for another run, make a sampler with a seed of its own."
)


class _Sampler(Generic[_Scheme]):
    """Draws the batch of any step from the seed and the step alone."""

    scheme: _Scheme

    def __init__(self, num_examples: int, *, seed: int, pad_to: int, start: int):
        validate.positive_int(num_examples=num_examples, pad_to=pad_to)
        validate.non_negative_int(seed=seed, start=start)
        self.num_examples: int = validate.plain(num_examples)
        self.seed: int = validate.plain(seed)
        self.pad_to: int = validate.plain(pad_to)
        self.start: int = validate.plain(start)
        self._iterated = False
        self._drawn_to = [0]  # shared with copies made by `reseeded`, which feed the same run
        self.accounted: list[Any] = []  # the used optimizer that `dpopt.privacy_event` saw first, shared likewise

    def _draw(self, rng: np.random.Generator, step: int) -> Indices:
        raise NotImplementedError

    def _rng(self, step: int) -> np.random.Generator:
        validate.non_negative_int(step=step)
        return np.random.default_rng([self.seed, step])

    def reseeded(self, seed: int) -> Self:
        """The same sampler with another seed: other batches, from the same distribution."""
        other = copy.copy(self)
        other.seed = seed
        return other

    @property
    def drawn_to(self) -> int:
        """One more than the last step whose batch was handed out; 0 if there was none."""
        return self._drawn_to[0]

    def hand_out(self, stop: int) -> None:
        """Records that the batches of all steps before ``stop`` are, or will be, handed out."""
        self._drawn_to[0] = max(self._drawn_to[0], stop)

    def __repr__(self) -> str:  # the seed is secret
        return f"{type(self).__name__}({self.num_examples}, {self.scheme}, pad_to={self.pad_to})"

    def drawn(self, step: int) -> Indices:
        """The distinct indices of step ``step``, ``(n,)``, without padding."""
        return self._draw(self._rng(step), step)

    def batch(self, step: int, *, size: int | None = None) -> Batch:
        """The batch of step ``step``, padded to a multiple of ``pad_to``, or to ``size`` if given.

        Raises:
            ValueError: if more than ``size`` examples were drawn. Dropping some would change the privacy guarantee.
        """
        rng = self._rng(step)
        drawn = self._draw(rng, step)
        if size is None:
            size = max(1, math.ceil(len(drawn) / self.pad_to)) * self.pad_to
        if len(drawn) > size:
            raise ValueError(
                f"step {step} drew {len(drawn)} examples, which do not fit in {size} rows. Dropping some would change "
                "the privacy guarantee: pass a larger size (batches(...) finds one), or use dpopt.samplers.truncated, "
                "which accounts for dropped examples."
            )
        self.hand_out(step + 1)
        others = rng.choice(self.num_examples, min(size, self.num_examples), replace=False, shuffle=False)
        rows = np.concatenate([drawn, others[~np.isin(others, drawn)]])  # at least `size`, or all examples
        return Batch(np.resize(rows, size), np.arange(size) < len(drawn))

    def batches(self, start: int, stop: int) -> Batch:
        """Batches of steps ``start .. stop - 1``, all as large as the largest, stacked for ``jax.lax.scan``."""
        validate.non_negative_int(start=start, stop=stop)
        if stop <= start:
            raise ValueError(f"stop must exceed start; got start {start}, stop {stop}.")
        most = max(len(self.drawn(t)) for t in range(start, stop))
        size = max(1, math.ceil(most / self.pad_to)) * self.pad_to
        rows = [self.batch(t, size=size) for t in range(start, stop)]
        return Batch(np.stack([r.indices for r in rows]), np.stack([r.mask for r in rows]))

    def __iter__(self) -> Iterator[Batch]:
        """Batches of steps ``start``, ``start + 1``, ..., endlessly. There is a UserWarning if they are drawn again."""
        if self._iterated:
            warnings.warn(AGAIN, UserWarning, stacklevel=2)
        self._iterated = True
        return map(self.batch, itertools.count(self.start))


def padding(expected_batch_size: float) -> int:
    """The default ``pad_to`` for batches of varying size: about an eighth of the expected size.

    *Privacy*: arithmetic on public constants.

    >>> padding(50)
    8
    """
    return max(1, 2 ** round(math.log2(max(1.0, float(expected_batch_size) / 8))))


class PoissonSampler(_Sampler[Poisson]):
    """Poisson samples: each example is in a batch with probability ``expected_batch_size / num_examples``.

    Iterating gives ``(indices, mask)`` for steps ``start``, ``start + 1``, ...; `batch` gives any step. Batches differ
    in size, and some may be empty. An empty batch is a step like any other, with noise and with a cost.

    Args:
        num_examples: size of the data set.
        expected_batch_size: expected number of examples in a batch, at most ``num_examples``.
        seed: non-negative integer, as secret as the data.
        pad_to: batches are padded to a multiple of this, so that ``jit`` compiles for few shapes. By default about an
            eighth of the expected size; with microbatches, pass their size.
        start: first step of an iteration, to resume a run.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: `scheme` is a `Poisson` scheme, which the draws follow exactly.

    >>> sampler = PoissonSampler(1_000, 50, seed=0, pad_to=16)
    >>> indices, mask = next(iter(sampler))
    >>> len(indices) % 16, int(mask.sum()) == len(set(indices[mask].tolist()))
    (0, True)
    >>> bool((sampler.batch(7).indices == PoissonSampler(1_000, 50, seed=0, pad_to=16).batch(7).indices).all())
    True
    """

    def __init__(
        self, num_examples: int, expected_batch_size: float, *, seed: int, pad_to: int | None = None, start: int = 0
    ):
        validate.positive(expected_batch_size=expected_batch_size)
        pad_to = padding(expected_batch_size) if pad_to is None else pad_to
        super().__init__(num_examples, seed=seed, pad_to=pad_to, start=start)
        if expected_batch_size > num_examples:
            raise ValueError(f"expected_batch_size {expected_batch_size} exceeds num_examples {num_examples}.")
        self.expected_batch_size = expected_batch_size
        self.scheme = Poisson(expected_batch_size / num_examples)

    def _draw(self, rng: np.random.Generator, step: int) -> Indices:
        del step
        # The number of heads in n independent coin flips is binomial, and given that number all subsets are equally
        # likely. So this has the distribution of n coin flips, at a cost proportional to the batch.
        size = rng.binomial(self.num_examples, self.scheme.sampling_prob)
        return rng.choice(self.num_examples, size, replace=False, shuffle=False).astype(np.int64)


class FixedSizeSampler(_Sampler[WithoutReplacement]):
    """Batches of exactly ``batch_size`` distinct examples, drawn uniformly and independently at each step.

    These are not epochs over shuffled data, which have no such amplification guarantee.

    Args:
        num_examples: size of the data set.
        batch_size: at most ``num_examples``.
        seed, pad_to, start: see `PoissonSampler`; ``pad_to`` is 1 by default.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: accounted for under replace-one with ``accountant="rdp"``; see `WithoutReplacement`.

    >>> batch = FixedSizeSampler(10, 4, seed=0).batch(0)
    >>> len(set(batch.indices.tolist())), bool(batch.mask.all())
    (4, True)
    """

    def __init__(self, num_examples: int, batch_size: int, *, seed: int, pad_to: int = 1, start: int = 0):
        super().__init__(num_examples, seed=seed, pad_to=pad_to, start=start)
        self.scheme = WithoutReplacement(num_examples, batch_size)

    @property
    def expected_batch_size(self) -> int:
        return self.scheme.batch_size

    def _draw(self, rng: np.random.Generator, step: int) -> Indices:
        del step
        return rng.choice(self.num_examples, self.scheme.batch_size, replace=False, shuffle=False).astype(np.int64)


def sampling_prob(sampling: Any) -> float:
    """Probability that a given example is in a given batch; of `dpopt.samplers.truncated`, before truncation.

    *Privacy*: arithmetic on public constants.

    >>> sampling_prob(WithoutReplacement(10, 4))
    0.4
    """
    scheme = getattr(sampling, "scheme", sampling)
    if isinstance(scheme, WithoutReplacement):
        return scheme.batch_size / scheme.num_examples
    return scheme.sampling_prob / getattr(scheme, "parts", 1)
