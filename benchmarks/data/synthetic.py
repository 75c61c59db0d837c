"""Synthetic data, named as such."""

from typing import NamedTuple

import numpy as np
from scipy import sparse

from benchmarks.data import Split


class ToyRegression(NamedTuple):
    """The synthetic regression of the AdaDPS paper's Figure 3."""

    x: np.ndarray  # (1000, 500) float32, 0 or 1: 50 features are common, 450 rare
    y: np.ndarray  # (1000,) float32
    weights: np.ndarray  # (500,) float32: generate y; the rare features dominate
    diagonal: np.ndarray  # (500,): A, 1 for common features and 0.01 for rare ones


def adadps_toy(seed: int = 0) -> ToyRegression:
    """1,000 examples; features 0 to 49 are 1 with probability 0.9, the other 450 with 0.01."""
    rng = np.random.default_rng(seed)
    common = np.arange(500) < 50
    x = (rng.random((1_000, 500)) < np.where(common, 0.9, 0.01)).astype(np.float32)
    weights = np.where(common, 0.01, 1.0).astype(np.float32)
    y = x @ weights + rng.normal(0, 0.1, 1_000).astype(np.float32)
    return ToyRegression(x, y.astype(np.float32), weights, np.where(common, 1.0, 0.01))


def stackoverflow_like_tags(num_examples: int = 10_000, *, features: int = 10_000, tags: int = 500, seed: int = 0):
    """A SYNTHETIC stand-in for StackOverflow tag prediction: no post of that site is in it.

    Sparse rows of ``features`` words whose frequencies follow Zipf's law; each of ``tags`` tags has some preferred
    words. A logistic regression on it has 5 million parameters.

    Returns:
        ``(x, y)``: a sparse matrix of term counts over length, and one int32 tag per example.
    """
    rng = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, tags + 1) ** 0.8
    y = rng.choice(tags, num_examples, p=popularity / popularity.sum()).astype(np.int32)
    own = rng.integers(0, features, (tags, 20))  # the words a tag prefers
    lengths = 5 + rng.geometric(1 / 30, num_examples)  # a heavy tail: 1 in 100 is five times the mean
    rows = np.repeat(np.arange(num_examples), lengths)
    words = np.minimum(rng.zipf(1.25, lengths.sum()) - 1, features - 1)
    preferred = rng.random(len(rows)) < 0.3
    words[preferred] = own[y[rows[preferred]], rng.integers(0, 20, preferred.sum())]
    x = sparse.coo_array((np.ones(len(rows), np.float32), (rows, words)), (num_examples, features)).tocsr()
    return x.multiply(1 / lengths[:, None]).tocsr().astype(np.float32), y


def split_tags(num_examples: int = 10_000, *, test_share: float = 0.2, seed: int = 0) -> Split:
    """`stackoverflow_like_tags`, with the last fifth for testing."""
    x, y = stackoverflow_like_tags(num_examples, seed=seed)
    cut = round((1 - test_share) * num_examples)
    return Split(x[:cut], y[:cut], x[cut:], y[cut:])
