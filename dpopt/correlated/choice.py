"""Comparison of strategies by the noise that they leave, at equal epsilon and equal compute."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dpopt import accounting, events
from dpopt.common import validate
from dpopt.correlated.strategies import Strategy, banded, banded_inverse, independent, optimized_banded
from dpopt.correlated.workloads import LARGEST, error
from dpopt.correlated.workloads import workload as make_workload
from dpopt.privacy import Privacy, Query
from dpopt.samplers.parts import InParts
from dpopt.sampling import Poisson


class Choice(NamedTuple):
    """A strategy, with the sampling and the noise multiplier that it needs.

    *Privacy*: public constants.
    """

    strategy: Strategy
    sampling: str  # the name in `dpopt.Builder`
    noise_multiplier: float
    error: float  # noise in the workload, relative to independent noise and Poisson samples


def choices(
    *,
    epsilon: float,
    delta: float,
    num_examples: int,
    expected_batch_size: float,
    steps: int,
    workload: np.ndarray | None = None,
    most_bands: int = 32,
) -> list[Choice]:
    """Candidates of independent and correlated noise for a run, in order of increasing error.

    The candidates are independent noise on Poisson samples; 2, 4, 8, ... bands on cyclic Poisson samples; and, on whole
    epochs, as many bands as an epoch has steps, and an inverse of 4 bands. Each takes seconds (more from 2,000 steps).

    Args:
        epsilon, delta: the budget of the whole run.
        num_examples, expected_batch_size, steps: see `dpopt.Builder`.
        workload: the matrix in which the noise should be small, ``[steps, steps]``, from `dpopt.correlated.workload`;
            None for prefix sums.
        most_bands: largest number of bands to try. Each band stores one array of the size of the parameters.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: arithmetic on public constants.

    >>> best, *_ = choices(
    ...     epsilon=8.0, delta=1e-5, num_examples=3_200, expected_batch_size=100, steps=32, most_bands=4)
    >>> best.sampling, best.error < 0.8
    ('epochs', True)
    """
    validate.positive(epsilon=epsilon, delta=delta, expected_batch_size=expected_batch_size)
    validate.positive_int(num_examples=num_examples, steps=steps, most_bands=most_bands)
    if expected_batch_size > num_examples:
        raise ValueError(f"expected_batch_size ({expected_batch_size}) exceeds num_examples ({num_examples}).")
    workload = make_workload(min(steps, LARGEST)) if workload is None else np.asarray(workload)
    q = expected_batch_size / num_examples
    candidates: list[tuple[Strategy, str, Poisson | InParts]] = [(independent(steps), "poisson", Poisson(q))]
    bands = 2
    while bands <= min(most_bands, steps) and bands * q <= 1:
        candidates.append((_banded(bands, steps, workload), "cyclic_poisson", InParts(bands, bands * q)))
        bands *= 2
    parts = math.ceil(num_examples / expected_batch_size)  # as an EpochSampler has them
    if float(expected_batch_size).is_integer():
        candidates.append((banded_inverse(4, steps=steps), "epochs", InParts(parts)))
        if 1 < parts <= most_bands:
            candidates.append((_banded(min(parts, steps), steps, workload), "epochs", InParts(parts)))

    def choice(strategy: Strategy, sampling: str, scheme: Poisson | InParts) -> Choice:
        sigma = accounting.calibrate_event(
            lambda x: events.compose(Privacy((Query(x, strategy=strategy),)), scheme, steps),
            epsilon=epsilon,
            delta=delta,
        )
        return Choice(strategy, sampling, sigma, sigma * error(strategy, workload))

    found = [choice(*candidate) for candidate in candidates]
    unit = found[0].error
    return sorted((c._replace(error=c.error / unit) for c in found), key=lambda c: c.error)


def _banded(bands: int, steps: int, workload: np.ndarray) -> Strategy:
    if len(workload) < steps:  # too many steps for a matrix
        return banded(bands, steps=steps)
    return optimized_banded(bands, steps=steps, workload=workload)
