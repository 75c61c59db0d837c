"""A strategy: the lower-triangular Toeplitz matrix C that correlates the noise of a run.

Step t adds ``s (C^-1 z)_t`` to the clipped sum instead of ``s z_t``, with z standard normal. By post-processing this
costs as much privacy as releasing ``C G + s z``, where G is the column of all clipped sums of the run (Denisov et al.
2022, who show that the sums may depend on earlier releases). C is scaled so that its largest column has norm 1: an
example in only one step costs as much as with independent noise s. For an example in several steps the inner products
of its columns count as well. The sampler bounds them (`dpopt.samplers.parts`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from dpopt.correlated.streams import Stream, padded

# What a step draws anew keeps 16 bits or more in float32 beside noise that is so many times as large.
_MOST_GROWTH = 2**8


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A lower-triangular Toeplitz matrix C over the steps of a run, with columns of norm at most 1.

    Made by `independent`, `banded`, `optimized_banded`, `banded_inverse`, `lambda_cgd` or `blt`.

    Attributes:
        name: kind and parameters, for messages.
        steps: number of steps that it covers; a run of more steps is refused.
        coefficients: the first column of C, up to its last entry that is not 0; none is negative.
        stream: how ``C^-1 z`` is drawn.

    Raises:
        ValueError: if a coefficient is negative or not finite, the first is 0, or ``C^-1 z`` would grow until float32
            has no digits left for the noise of a step.

    *Privacy*: public constants.

    >>> from dpopt.correlated import lambda_cgd
    >>> strategy = lambda_cgd(0.5, steps=3)
    >>> [round(c / strategy.coefficients[0], 3) for c in strategy.coefficients]
    [1.0, 0.5, 0.25]
    """

    name: str
    steps: int
    coefficients: tuple[float, ...] = dataclasses.field(repr=False)
    stream: Stream = dataclasses.field(repr=False)

    def __post_init__(self):
        c = np.asarray(self.coefficients)
        if not (np.isfinite(c).all() and (c >= 0).all() and c[0] > 0):
            raise ValueError(
                f"the coefficients of a strategy must be finite and not negative, the first positive; got {c[:8]}. "
                "The privacy cost of several steps of one example is only known for such matrices."
            )
        if not self._growth <= _MOST_GROWTH:
            raise ValueError(
                f"within {self.steps} steps the noise of {self.name} grows to {self._growth:.3g} times what a step "
                "draws anew, which float32 would lose beside it: the step would be nearly deterministic. C^-1 must not "
                f"grow (by more than {_MOST_GROWTH}): let the coefficients decrease."
            )

    @functools.cached_property
    def _growth(self) -> float:
        """The largest standard deviation of ``(C^-1 z)_t`` beside that of its newest term, ``z_t / c_0``."""
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.max(self.deviations)) * self.coefficients[0]

    @property
    def bands(self) -> int:
        """C[i, j] is 0 from ``i - j = bands`` on."""
        return len(self.coefficients)

    def label(self) -> str:
        """A short description that differs between strategies: name, steps and a hash of the coefficients."""
        digest = hashlib.sha256(np.asarray(self.coefficients).tobytes()).hexdigest()
        return f"{self.name} over {self.steps} steps, {digest[:8]}"

    @property
    def column(self) -> np.ndarray:
        """The first column of C, ``[steps]`` float64."""
        return padded(self.coefficients, self.steps)

    @functools.cached_property
    def inverse(self) -> np.ndarray:
        """The first column of ``C^-1``, ``[steps]`` float64."""
        return self.stream.inverse(self.steps)

    @functools.cached_property
    def deviations(self) -> np.ndarray:
        """Standard deviations of ``(C^-1 z)_t``, ``[steps]``."""
        return np.sqrt(np.cumsum(np.square(self.inverse)))

    def deviation(self, step: jax.Array | int) -> jax.Array:
        """Standard deviation of ``(C^-1 z)_t`` at a step, as an array; NaN after the last."""
        deviations = jnp.append(jnp.asarray(self.deviations, jnp.float32), jnp.nan)
        return deviations[jnp.minimum(step, self.steps)]

    def cost(self, parts: int) -> np.ndarray:
        """Squared sensitivity of the first 0, 1, ... steps, ``[steps + 1]``, for examples in every ``parts``-th step.

        ``|sum_i C[:t, i parts]|^2``, in units of the squared clip norm. Examples of the first part are in the most
        steps, and since no entry is negative, the worst case is an example with the same gradient at all of its steps.
        """
        turns = -(-self.steps // parts)
        each = np.pad(self.column, (0, turns * parts - self.steps)).reshape(turns, parts)
        sums = np.cumsum(each, axis=0).ravel()[: self.steps]
        return np.concatenate([[0.0], np.cumsum(np.square(sums))])
