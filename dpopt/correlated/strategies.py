"""Kinds of strategies: their matrices C, and how ``C^-1 z`` is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from dpopt.common import validate
from dpopt.correlated.strategy import Strategy as Strategy
from dpopt.correlated.streams import Numbers, Recurrent, Redrawn, Stream, Substituted, inverse_series


def independent(steps: int) -> Strategy:
    """Independent noise at each step: C is the identity.

    Args:
        steps: how many steps the run may take.

    Raises:
        ValueError, TypeError: unless ``steps`` is a positive integer.

    *Privacy*: public constants.

    >>> independent(100).bands
    1
    """
    return _strategy("independent", steps, np.ones(1), lambda c: Redrawn((1 / c[0],)))


def banded(bands: int, *, steps: int, momentum: float = 0.0, coefficients: Numbers | None = None) -> Strategy:
    r"""C with a few bands: the truncated square root of the workload, or with given coefficients.

    For prefix sums the square root has :math:`c_0 = 1, c_k = c_{k-1} (2k - 1) / (2k)`. The last ``bands - 1`` noises
    are stored, each in arrays of the size of the parameters.

    Args:
        bands: b, at least 1; the columns of steps that are b or more apart do not overlap.
        steps: how many steps the run may take.
        momentum: decay of the momentum after the noise; 0 for sums.
        coefficients: ``bands`` numbers, in any scale, instead of the square root.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: public constants.

    Reference: Choquette-Choo et al. (2023), (Amplified) Banded Matrix Factorization.

    >>> [round(c, 3) for c in banded(3, steps=10).coefficients]
    [0.848, 0.424, 0.318]
    """
    validate.positive_int(bands=bands, steps=steps)
    validate.fraction(momentum=momentum)
    bands = min(int(bands), int(steps))
    if coefficients is None:
        root = _root_of_sums(bands)
        root_of_decays = root * np.asarray(momentum, np.float64) ** np.arange(bands)  # (1 - momentum x)^(-1/2)
        coefficients = np.convolve(root, root_of_decays)[:bands]
    elif np.shape(coefficients) != (bands,):
        raise ValueError(f"coefficients must be {bands} numbers, one per band; got shape {np.shape(coefficients)}.")
    return _strategy(f"banded({bands})", steps, coefficients, lambda c: Substituted(tuple(c.tolist())))


def optimized_banded(bands: int, *, steps: int, workload: np.ndarray) -> Strategy:
    """The banded C with the smallest error in a workload, for examples whose steps are at least ``bands`` apart.

    Args:
        bands, steps: see `banded`.
        workload: a matrix ``[steps, steps]``, from `dpopt.correlated.workload`.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: public constants.

    >>> from dpopt.correlated import error, workload
    >>> sums = workload(64)
    >>> best = optimized_banded(8, steps=64, workload=sums)
    >>> error(best, sums) < error(banded(8, steps=64), sums) < error(independent(64), sums)
    True
    """
    from dpopt.correlated.workloads import best_coefficients  # imports this module

    start = banded(bands, steps=steps)
    found = best_coefficients(np.asarray(start.coefficients), np.asarray(workload), steps)
    return dataclasses.replace(banded(bands, steps=steps, coefficients=found), name=f"optimized_banded({bands})")


def banded_inverse(bands: int, *, steps: int) -> Strategy:
    r"""``C^-1`` with a few bands: no noise is stored, since earlier draws are repeated from the key.

    They are those of the inverse square root of prefix sums: :math:`d_0 = 1, d_k = -c_k / (2k - 1)`, c as in `banded`.

    Args:
        bands: number of draws in the noise of a step, at least 1; each takes as long as independent noise.
        steps: how many steps the run may take.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: public constants.

    Reference: Kalinin et al. (2025), Back to Square Roots: BISR.

    >>> strategy = banded_inverse(2, steps=10)
    >>> (strategy.inverse[:3] / strategy.inverse[0]).tolist()
    [1.0, -0.5, 0.0]
    """
    validate.positive_int(bands=bands, steps=steps)
    k = np.arange(bands)
    return _from_inverse(f"banded_inverse({bands})", steps, -_root_of_sums(bands) / (2 * k - 1))


def lambda_cgd(decay: float, *, steps: int) -> Strategy:
    """``z_t - lambda z_{t-1}``: subtracts a share of the noise of the last step.

    Args:
        decay: lambda, in [0, 1).
        steps: how many steps the run may take.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: public constants.

    Reference: lambda-CGD (2026), arXiv 2601.22334.

    >>> lambda_cgd(0.9, steps=100).stream.num_buffers
    0
    """
    validate.fraction(decay=decay)
    validate.positive_int(steps=steps)
    return _from_inverse(f"lambda_cgd({decay:g})", steps, np.array([1.0, -decay] if decay else [1.0]))


def blt(
    weights: Numbers | None = None,
    decays: Numbers | None = None,
    *,
    steps: int,
    separation: int | None = None,
    participations: int = 1,
) -> Strategy:
    """A buffered linear Toeplitz matrix: ``c_0 = 1, c_k = sum_j w_j a_j^(k-1)``, with one stored array per j.

    Args:
        weights, decays: w, positive, and a, in (0, 1). None: ``jax_privacy`` minimises the largest error of prefix sums
            (``pip install "dpopt[correlated]"``).
        steps: how many steps the run may take.
        separation, participations: for this optimisation: the smallest distance between two steps of an example, and
            the largest number of its steps. By default one step.

    Raises:
        ValueError, TypeError: for an argument out of range; ImportError: without ``jax_privacy``.

    *Privacy*: public constants.

    Reference: McMahan, Xu and Zhang (2024), A Hassle-free Algorithm for Strong Differential Privacy in Federated
    Learning Systems.

    >>> blt([0.5], [0.9], steps=4).bands
    4
    """
    validate.positive_int(steps=steps, participations=participations)
    if (weights is None) != (decays is None):
        raise ValueError("pass both weights and decays, or neither to have them optimised.")
    if weights is None or decays is None:
        weights, decays = _optimized_blt(steps, separation, participations)
    w, a = (np.atleast_1d(np.asarray(x, np.float64)) for x in (weights, decays))
    if w.shape != a.shape or w.ndim != 1 or not ((w > 0).all() and (a > 0).all() and (a < 1).all()):
        raise ValueError(f"weights must be positive, and decays as many, in (0, 1); got {weights} and {decays}.")
    column = Recurrent(1.0, tuple(w.tolist()), tuple(a.tolist())).column(steps)

    def stream(c: np.ndarray) -> Recurrent:
        return Recurrent(float(c[0]), tuple((w * c[0]).tolist()), tuple(a.tolist()))

    return _strategy(f"blt({len(w)})", steps, column, stream)


def _strategy(name: str, steps: int, coefficients: Numbers, stream: Callable[[np.ndarray], Stream]) -> Strategy:
    """The strategy with a given first column, which may have any scale."""
    validate.positive_int(steps=steps)
    c = np.asarray(coefficients, np.float64)[:steps]
    c = c / np.linalg.norm(c)
    return Strategy(name, int(steps), tuple(c.tolist()), stream(c))


def _from_inverse(name: str, steps: int, inverse: np.ndarray) -> Strategy:
    inverse = inverse[:steps]
    c = inverse_series(inverse, steps) if len(inverse) > 1 else np.ones(1)
    return _strategy(name, steps, c, lambda _: Redrawn(tuple((inverse * np.linalg.norm(c)).tolist())))


def _root_of_sums(count: int) -> np.ndarray:
    """The coefficients of ``(1 - x)^(-1/2)``, the square root of the matrix of prefix sums."""
    k = np.arange(1, count)
    return np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))


def _optimized_blt(steps: int, separation: int | None, participations: int) -> tuple[np.ndarray, np.ndarray]:
    from jax_privacy.matrix_factorization import buffered_toeplitz

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        found = buffered_toeplitz.optimize(
            n=steps, min_sep=1 if separation is None else separation, max_participations=participations
        )
        return np.asarray(found.output_scale), np.asarray(found.buf_decay)
