"""How many trials a private search runs: a random number, since a fixed one would cost far more."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from dpopt.common import validate
from dpopt.common.lazy import dp_accounting


@dataclasses.dataclass(frozen=True)
class NumTrials:
    r"""The distribution of the number of trials K: truncated negative binomial, or Poisson.

    With shape :math:`\eta` and a :math:`\gamma \in (0, 1)` that gives the mean (definition 1 of the paper), for
    :math:`k \ge 1`

    .. math:: \Pr[K = k] = \frac{(1 - \gamma)^k}{\gamma^{-\eta} - 1} \prod_{j=0}^{k-1} \frac{j + \eta}{j + 1}

    ``shape=1`` is the geometric distribution, ``shape=0`` the logarithmic one (its limit): the smaller the shape, the
    cheaper, and the likelier that there are few trials. ``shape=math.inf`` is the Poisson distribution, which is
    concentrated around its mean and may be 0; then nothing is found.

    Args:
        mean: expected number of trials, above 1. Settings are drawn with replacement, so ``m log m`` trials see
            most of ``m`` settings.
        shape: 0 or above.

    Raises:
        ValueError, TypeError: for an argument out of range.

    Reference: Papernot and Steinke (2022), Hyperparameter Tuning with Renyi Differential Privacy,
    https://arxiv.org/abs/2110.03620; Liu and Talwar (2019) for the geometric distribution.

    *Privacy*: a public description. The number that is drawn is secret: given it, the cost would be that of so many
    runs.

    >>> trials = NumTrials(mean=10.0)
    >>> round(trials.probability(1), 3), round(sum(k * trials.probability(k) for k in range(500)), 6)
    (0.1, 10.0)
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self):
        validate.positive(mean=self.mean)
        validate.non_negative(shape=self.shape, allow_inf=True)
        if self.mean <= 1:
            raise ValueError(f"mean must be above 1; got {self.mean}. A search of one trial is a plain run.")
        if next(self._probabilities())[1] < 1e-300:
            raise ValueError(
                f"so many trials (mean {self.mean:g}) of shape {self.shape:g} are not supported: lower the mean"
                + (", or pass shape=math.inf, to which this shape is near." if self.shape < math.inf else ".")
            )

    @property
    def name(self) -> str:
        """Of the distribution."""
        names = {0: "logarithmic", 1: "geometric", math.inf: "Poisson"}
        return names.get(self.shape, f"truncated negative binomial of shape {self.shape:g}")

    def event(self, trial: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        """What the best of so many trials costs, if each costs at most ``trial``."""
        return dp_accounting.dp_event.RepeatAndSelectDpEvent(trial, float(self.mean), float(self.shape))

    def probability(self, k: int) -> float:
        """Of exactly ``k`` trials."""
        validate.non_negative_int(k=k)
        least = 0 if self.shape == math.inf else 1
        return next(p for j, p in self._probabilities() if j >= k) if k >= least else 0.0

    def draw(self, rng: np.random.Generator) -> int:
        """A number of trials, by inversion. Keep it secret."""
        left = rng.random()
        for k, p in self._probabilities():
            left -= p
            if left < 0 or (k > self.mean and p < 1e-18):  # rounding may leave a little
                return k
        raise AssertionError("probabilities do not end")

    def _probabilities(self) -> Iterator[tuple[int, float]]:
        """Every k with its probability, each from the one before it."""
        if self.shape == math.inf:
            k, p = 0, math.exp(-self.mean)
            while True:
                yield k, p
                k, p = k + 1, p * self.mean / (k + 1)
        gamma, eta = self._gamma, self.shape
        exponent = -eta * math.log(gamma)
        # eta / (gamma^-eta - 1), whose limit at 0 is 1 / log(1 / gamma)
        share = -1 / math.log(gamma) if eta == 0 else eta / math.expm1(exponent) if exponent < 700 else 0.0
        k, p = 1, (1 - gamma) * share
        while True:
            yield k, p
            k, p = k + 1, p * (1 - gamma) * (k + eta) / (k + 1)

    @functools.cached_property
    def _gamma(self) -> float:
        """By bisection down to neighbouring floats; of those the one whose mean is no larger than what is paid for."""
        low, high = 0.0, 1.0
        while low < (middle := (low + high) / 2) < high:
            low, high = (low, middle) if _mean(middle, self.shape) <= self.mean else (middle, high)
        return high


def _mean(gamma: float, eta: float) -> float:
    odds = 1 / gamma - 1 if gamma > 1e-300 else math.inf
    if eta == 0:
        return odds / -math.log(gamma)
    return eta * odds / -math.expm1(eta * math.log(gamma))
