"""Tasks: a task has initial parameters, per-example gradients, and a score on held-out data.

The options of tasks decide what is private: which examples are public, where the vocabulary and the word frequencies
come from, and which data are scored.
"""

import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from dpopt.gradients import PerExampleGrads


class Task(Protocol):
    """The interface of a task that `benchmarks.utility.runs` needs."""

    num_examples: int  # that are private
    unit: str  # of privacy: "example" or "user"
    metric: str
    higher_is_better: bool
    release: dp_accounting.DpEvent | None  # the privacy spent before the first step
    has_public_data: bool
    not_covered_by_epsilon: Sequence[str]  # what was read from private data and is not covered by epsilon

    def init(self, seed: int) -> Any:
        """Initial parameters."""
        ...

    def side_information(self, seed: int) -> Any:
        """The diagonal, or None; the seed is for diagonals with noise."""
        ...

    def sizes(self, drawn: list[np.ndarray]) -> tuple[int, ...]:
        """The padded sizes that these batches need."""
        ...

    def pack(self, drawn: list[np.ndarray], sizes: tuple[int, ...]) -> Any:
        """The batches of consecutive steps, stacked."""
        ...

    def all_examples(self) -> Any:
        """The whole data set as one batch, on the device."""
        ...

    def grads(self, params: Any, batch: Any) -> PerExampleGrads:
        """The per-example gradients of one batch."""
        ...

    def public_grads(self, params: Any) -> Any:
        """The mean gradient on the public data."""
        ...

    def score(self, params: Any) -> jax.Array:
        """The metric on the test data, or for tuning on a held-out fifth of the training data."""
        ...


def padded(drawn: list[np.ndarray], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and mask of several batches, ``(steps, size)`` each."""
    mask = np.arange(size) < np.array([len(d) for d in drawn])[:, None]
    indices = np.zeros((len(drawn), size), np.int32)
    indices[mask] = np.concatenate(drawn)
    return indices, mask


def round_up(size: int, multiple: int) -> int:
    """The smallest positive multiple that is at least ``size``."""
    return max(1, -(-size // multiple)) * multiple


class Indexed:
    """Base of tasks whose private data are arrays with one row per example: a batch is row numbers and a mask."""

    release: dp_accounting.DpEvent | None = None
    not_covered_by_epsilon: Sequence[str] = ()
    unit = "example"
    num_examples: int
    _train: Any  # arrays

    def side_information(self, seed: int) -> Any:
        del seed

    def sizes(self, drawn: list[np.ndarray]) -> tuple[int, ...]:
        return (round_up(max(len(d) for d in drawn), 16),)

    def pack(self, drawn: list[np.ndarray], sizes: tuple[int, ...]) -> Any:
        return padded(drawn, sizes[0])

    def all_examples(self) -> Any:
        return self._train, jnp.ones(self.num_examples, bool)

    def rows(self, which: Any) -> Any:
        """The examples of a batch: chosen by number, or passed through if they are those of `all_examples`."""
        return jax.tree.map(lambda x: x[which], self._train) if isinstance(which, jax.Array) else which


# Module and class of each task; the module is imported on use, since networks need Flax.
TASKS = {
    "imdb": ("utility.tasks.text", "Imdb"),
    "imdb-lstm": ("utility.tasks.networks", "ImdbLSTM"),
    "imdb-transformer": ("utility.tasks.networks", "ImdbTransformer"),
    "imdb-pretrained": ("pretrained.task", "PretrainedReviews"),
    "movielens": ("utility.tasks.ratings", "MovieLens"),
    "movielens-films": ("utility.tasks.films", "Films"),
    "mnist": ("utility.tasks.networks", "MnistClassification"),
    "mnist-scattering": ("utility.tasks.scattering", "MnistScattering"),
    "mnist-autoencoder": ("utility.tasks.networks", "MnistAutoencoder"),
    "digits": ("utility.tasks.networks", "Digits"),
    "synthetic-tags": ("utility.tasks.synthetic", "SyntheticTags"),
    "synthetic-regression": ("utility.tasks.synthetic", "SyntheticRegression"),
}


@functools.lru_cache(maxsize=4)
def _make(name: str, options: tuple, where: Path | None) -> Task:
    module, kind = TASKS[name]
    task = getattr(importlib.import_module(f"benchmarks.{module}"), kind)
    return task(where, **{k: dict(v) if isinstance(v, tuple) else v for k, v in options})


def make(name: str, options: dict[str, Any], where: Path | None = None) -> Task:
    """The task with this name and these options, cached for the next run."""
    frozen = tuple(sorted((k, tuple(v.items()) if isinstance(v, dict) else v) for k, v in options.items()))
    return _make(name, frozen, where)
