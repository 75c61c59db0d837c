"""Workloads: the sums of gradients that an update rule computes, in which correlated noise should be small."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dpopt.common import validate
from dpopt.common.averages import at_step
from dpopt.correlated.strategy import Strategy
from dpopt.correlated.streams import inverse_series

LARGEST = 4096  # steps; a workload is a dense matrix


def workload(steps: int, *, momentum: float = 0.0, learning_rate: float | Callable[[int], float] = 1.0) -> np.ndarray:
    r"""How the parameters after each step depend on the gradients so far: ``[steps, steps]``, lower-triangular.

    .. math:: A_{ts} = \sum_{j=s}^t \eta_j \beta^{j-s}

    Args:
        steps: number of steps.
        momentum: beta, decay of the momentum trace; 0 for plain SGD, whose workload is prefix sums.
        learning_rate: eta, a number or a schedule ``step -> number``.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: public constants.

    >>> workload(3, momentum=0.5).tolist()
    [[1.0, 0.0, 0.0], [1.5, 1.0, 0.0], [1.75, 1.5, 1.0]]
    """
    validate.positive_int(steps=steps)
    validate.fraction(momentum=momentum)
    if steps > LARGEST:
        raise ValueError(f"a workload is a dense matrix, so it can have at most {LARGEST} steps; got {steps}.")
    rates = [float(at_step(learning_rate, t)) for t in range(steps)]
    decays = _toeplitz(float(momentum) ** np.arange(steps))
    return np.cumsum(np.asarray(rates)[:, None] * decays, axis=0)


def error(strategy: Strategy, workload: np.ndarray) -> float:
    r"""The noise in a workload for noise multiplier 1, :math:`\|A C^{-1}\|_F / \sqrt T`.

    To compare strategies at equal epsilon, multiply by the noise multiplier that each needs.

    Args:
        strategy: C, for at least as many steps.
        workload: A, ``[steps, steps]``.

    Raises:
        ValueError: if the strategy covers fewer steps.

    *Privacy*: public constants.

    >>> from dpopt.correlated import banded, independent
    >>> sums = workload(100)
    >>> round(error(independent(100), sums), 1), round(error(banded(10, steps=100), sums), 1)
    (7.1, 3.0)
    """
    steps = len(workload)
    if strategy.steps < steps:
        raise ValueError(f"the workload has {steps} steps, but {strategy.name} covers only {strategy.steps}.")
    return float(np.linalg.norm(np.asarray(workload) @ _toeplitz(strategy.inverse[:steps])) / np.sqrt(steps))


def best_coefficients(start: np.ndarray, workload: np.ndarray, steps: int) -> np.ndarray:
    """Coefficients ``[bands]``, in any scale, that minimise ``|A C^-1|_F |c|``, found from ``start``; none is negative.

    Raises:
        ValueError: unless the workload A is ``[steps, steps]``.

    >>> best_coefficients(np.ones(1), np.eye(3), 3).tolist()
    [1.0]
    """
    import scipy.optimize  # slow to import

    if workload.shape != (steps, steps):
        raise ValueError(f"workload must be a matrix [{steps}, {steps}], one row per step; got shape {workload.shape}.")
    bands = len(start)
    if bands == 1:
        return start

    def loss(rest: np.ndarray) -> tuple[float, np.ndarray]:
        c = np.concatenate([[1.0], rest])
        inverse = _toeplitz(inverse_series(c, steps))
        product = workload @ inverse
        squared = np.sum(np.square(product))
        in_matrix = -2 * (product.T @ product) @ inverse.T  # since d(C^-1) = -C^-1 dC C^-1
        by_band = np.array([np.trace(in_matrix, offset=-k) for k in range(bands)])
        gradient = by_band / squared + 2 * c / np.sum(np.square(c))
        return float(np.log(squared) + np.log(np.sum(np.square(c)))), gradient[1:]

    found = scipy.optimize.minimize(
        loss, start[1:] / start[0], jac=True, method="L-BFGS-B", bounds=[(0, None)] * (bands - 1)
    )
    return np.concatenate([[1.0], found.x])


def _toeplitz(column: np.ndarray) -> np.ndarray:
    """Lower-triangular, from its first column."""
    lag = np.arange(len(column))[:, None] - np.arange(len(column))
    return np.where(lag >= 0, column[np.maximum(lag, 0)], 0.0)
