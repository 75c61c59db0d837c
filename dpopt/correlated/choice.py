"""Which strategy leaves the least noise, at equal epsilon and equal compute."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
    """A strategy with the sampler and the noise that it needs.

    *Privacy*: public constants.
    """

    strategy: Strategy
    sampling: str  # what `dpopt.Builder` calls it
    noise_multiplier: float
    error: float  # noise in the workload, over that of independent noise and Poisson samples


def choices(
    *,
    epsilon: float,
    delta: float,
    num_examples: int,
    expected_batch_size: float,
    steps: int,
    workload: Any = None,
    most_bands: int = 32,
) -> list[Choice]:
    """Independent and correlated noise for a run, the least error first.

    Tried are independent noise on Poisson samples; 2, 4, 8, ... bands on cyclic Poisson samples; and on whole epochs as
    many bands as an epoch has steps, and inverses of 4 bands. Takes seconds for each, and longer from 2,000 steps on.

    Args:
        epsilon, delta: what the whole run may spend.
        num_examples, expected_batch_size, steps: see `dpopt.Builder`.
        workload: what the noise is to be small in, ``[steps, steps]``; None for prefix sums. From
            `dpopt.correlated.workload`.
        most_bands: how many bands to try, each of which takes one array of the parameters' size to keep.

    Returns:
        A list of `Choice`.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: arithmetic on public constants.

    >>> best, *_ = choices(
    ...     epsilon=8.0, delta=1e-5, num_examples=6_400, expected_batch_size=100, steps=64, most_bands=8)
    >>> best.sampling, best.error < 0.8
    ('epochs', True)
    """
    validate.positive(epsilon=epsilon, delta=delta, expected_batch_size=expected_batch_size)
    validate.positive_int(num_examples=num_examples, steps=steps, most_bands=most_bands)
    if expected_batch_size > num_examples:
        raise ValueError(f"expected_batch_size {expected_batch_size} exceeds num_examples {num_examples}.")
    workload = make_workload(min(steps, LARGEST)) if workload is None else np.asarray(workload)
    q = expected_batch_size / num_examples
    tried: list[tuple[Strategy, str, Any]] = [(independent(steps), "poisson", Poisson(q))]
    bands = 2
    while bands <= min(most_bands, steps) and bands * q <= 1:
        tried.append((_banded(bands, steps, workload), "cyclic_poisson", InParts(bands, bands * q)))
        bands *= 2
    parts = math.ceil(1 / q)
    if float(expected_batch_size).is_integer():
        tried.append((banded_inverse(4, steps=steps), "epochs", InParts(parts)))
        if 1 < parts <= most_bands:
            tried.append((_banded(min(parts, steps), steps, workload), "epochs", InParts(parts)))
    found = []
    for strategy, sampling, scheme in tried:

        def event(sigma: float, strategy: Strategy = strategy, scheme: Any = scheme) -> Any:
            return events.compose(Privacy((Query(sigma, strategy=strategy),)), scheme, steps)

        sigma = accounting.calibrate_event(event, epsilon=epsilon, delta=delta)
        found.append(Choice(strategy, sampling, sigma, sigma * error(strategy, workload)))
    unit = found[0].error
    return sorted((c._replace(error=c.error / unit) for c in found), key=lambda c: c.error)


def _banded(bands: int, steps: int, workload: np.ndarray) -> Strategy:
    if len(workload) < steps:  # too many steps for their matrix
        return banded(bands, steps=steps)
    return optimized_banded(bands, steps=steps, workload=workload)
