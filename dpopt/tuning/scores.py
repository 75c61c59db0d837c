"""How the trials of a private search are scored, and what a score costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpopt import noise
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.privacy import Privacy, Query

# Sums are counted in units of 2^-20, and the noise is rounded to these. So the noisy sum is a rounding of a sum of real
# numbers, and may be any whole number of units whatever the data are. The last digits of a float would show to which
# sums a draw can have been added.
_UNITS = 2**20


@dataclasses.dataclass(frozen=True)
class PublicScore:
    """A score on data that nobody has to protect, or on none.

    Args:
        function: from what a trial returned to a number, of which the largest wins. NaN loses to every number.
        data: what it reads, in words, and so the caller's declaration that this needs no protection.

    Raises:
        TypeError, ValueError: for a function or a declaration that is none.

    *Privacy*: post-processing of the trial and of public data. Rows of the training data, or other people's private
    rows, are not public: `PrivateScore`.

    >>> score = PublicScore(lambda w: -float(np.sum(w**2)), data="none")
    >>> score(np.ones(2), jax.random.key(0)), score.event
    (-2.0, NoOpDpEvent())
    """

    function: Callable[[Any], Any]
    data: str

    def __post_init__(self):
        if not callable(self.function):
            raise TypeError(f"function must take what a trial returns, and return a number; got {self.function!r}.")
        if not isinstance(self.data, str) or not self.data.strip():  # pyright: ignore[reportUnnecessaryIsInstance]  whatever a user passes
            raise ValueError(f"data must say in words which public data the score reads; got {self.data!r}.")

    @property
    def event(self) -> dp_accounting.DpEvent:
        """What one score costs: nothing."""
        return dp_accounting.NoOpDpEvent()

    @property
    def description(self) -> str:
        """Which data it reads."""
        return f"public: {self.data}"

    def __call__(self, value: Any, key: jax.Array) -> float:
        del key
        return float(self.function(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateScore:
    """A mean over private examples, with noise: accuracy on rows that are protected as the training data are.

    Args:
        per_example: from what a trial returned to ``(num_examples,)`` numbers between 0 and 1, one an example, each of
            which depends on that example alone: whether it is classified right, or one minus an error that is at most
            1. What lies outside is cut, and NaN counts as 0.
        num_examples: how many examples are scored; public.
        noise_multiplier: standard deviation of the noise in the *sum*, to which an example adds at most 1.

    Raises:
        TypeError, ValueError: for a bad argument, or, when called, for another number of values.

    *Privacy*: a Gaussian query of sensitivity 1, which each trial pays for besides its training. The rows may be those
    of the training: cost adds up. Rows of other people cost them this query alone, which is less.

    >>> score = PrivateScore(per_example=lambda w: np.full(1_000, 0.75), num_examples=1_000, noise_multiplier=5.0)
    >>> 0.7 < score(None, jax.random.key(0)) < 0.8
    True
    """

    per_example: Callable[[Any], Any]
    num_examples: int
    noise_multiplier: float

    def __post_init__(self):
        if not callable(self.per_example):
            raise TypeError(f"per_example must take what a trial returns; got {self.per_example!r}.")
        validate.positive_int(num_examples=self.num_examples)
        validate.positive(noise_multiplier=self.noise_multiplier)

    @property
    def event(self) -> dp_accounting.DpEvent:
        """What one score costs."""
        return Privacy((Query(self.noise_multiplier),)).step_event()

    @property
    def description(self) -> str:
        """Which data it reads."""
        return f"private: {self.num_examples} examples, noise multiplier {float(self.noise_multiplier)}"

    def __call__(self, value: Any, key: jax.Array) -> float:
        each = np.asarray(self.per_example(value), np.float64)
        if each.shape != (self.num_examples,):
            raise ValueError(f"per_example must return {self.num_examples} numbers; got the shape {each.shape}.")
        counts = np.rint(np.clip(np.nan_to_num(each, nan=0.0), 0.0, 1.0) * _UNITS).astype(np.int64)
        with jax.enable_x64(True):
            drawn = float(noise.standard_normal_like(key, jnp.zeros((), jnp.float64)))
        noisy = int(np.sum(counts)) + round(float(self.noise_multiplier) * drawn * _UNITS)
        return noisy / _UNITS / self.num_examples
