"""What is learned: a task gives parameters, the promise of per-example gradients, and the score on held-out data.

Every option that decides what is private is named here: which reviews are public, where the vocabulary and the word
frequencies come from, and which data are scored.
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
    """What `benchmarks.utility.runs` asks of a task."""

    num_examples: int  # private ones
    unit: str  # what one of them is: "example" or "user"
    metric: str
    higher_is_better: bool
    release: dp_accounting.DpEvent | None  # what was spent before the first step
    has_public_data: bool
    taken_for_free: Sequence[str]  # what was read off private data without being paid for

    def init(self, seed: int) -> Any:
        """Parameters."""
        ...

    def side_information(self, seed: int) -> Any:
        """The diagonal, or None; the seed is for those that draw noise."""
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

    def promise(self, params: Any, batch: Any) -> PerExampleGrads:
        """Per-example gradients of one batch."""
        ...

    def public_grads(self, params: Any) -> Any:
        """The mean gradient on the public data."""
        ...

    def score(self, params: Any) -> jax.Array:
        """The metric on held-out data: the test's, or for tuning a fifth of the training's."""
        ...


def padded(drawn: list[np.ndarray], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and mask of several batches, ``(steps, size)`` each."""
    mask = np.arange(size) < np.array([len(d) for d in drawn])[:, None]
    indices = np.zeros((len(drawn), size), np.int32)
    indices[mask] = np.concatenate(drawn)
    return indices, mask


def round_up(size: int, multiple: int) -> int:
    """The least multiple, at least one, that is not below ``size``."""
    return max(1, -(-size // multiple)) * multiple


class Indexed:
    """What tasks share whose private data are arrays with a row an example: a batch is row numbers and a mask."""

    release: dp_accounting.DpEvent | None = None
    taken_for_free: Sequence[str] = ()
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
        """The examples of a batch: chosen by number, or all of them as `all_examples` has them."""
        return jax.tree.map(lambda x: x[which], self._train) if isinstance(which, jax.Array) else which


# Where each task lives; its module is imported when it is asked for, since networks need Flax.
TASKS = {
    "imdb": ("text_task", "Imdb"),
    "imdb-lstm": ("network_tasks", "ImdbLSTM"),
    "imdb-transformer": ("network_tasks", "ImdbTransformer"),
    "imdb-pretrained": ("pretrained.task", "PretrainedReviews"),
    "movielens": ("rating_task", "MovieLens"),
    "movielens-films": ("film_task", "Films"),
    "mnist": ("network_tasks", "MnistClassification"),
    "mnist-scattering": ("scattering_task", "MnistScattering"),
    "mnist-autoencoder": ("network_tasks", "MnistAutoencoder"),
    "digits": ("network_tasks", "Digits"),
    "synthetic-tags": ("synthetic_task", "SyntheticTags"),
    "synthetic-regression": ("synthetic_task", "SyntheticRegression"),
}


@functools.lru_cache(maxsize=4)
def _make(name: str, options: tuple, where: Path | None) -> Task:
    module, kind = TASKS[name]
    task = getattr(importlib.import_module(f"benchmarks.{module}"), kind)
    return task(where, **{k: dict(v) if isinstance(v, tuple) else v for k, v in options})


def make(name: str, options: dict[str, Any], where: Path | None = None) -> Task:
    """The task of this name, kept for the next run that wants it."""
    frozen = tuple(sorted((k, tuple(v.items()) if isinstance(v, dict) else v) for k, v in options.items()))
    return _make(name, frozen, where)
