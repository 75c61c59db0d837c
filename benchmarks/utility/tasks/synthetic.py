"""Tasks on data that is made up. Their names say so: no figure of theirs is a figure on real data."""

from pathlib import Path
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import dpopt
from benchmarks.data import synthetic
from benchmarks.utility.tasks import Indexed
from benchmarks.utility.tasks.networks import Classifier


class SparseLinear(nn.Module):
    """A linear layer on a sparse example, given by its columns and their values (0 where a column is padding)."""

    features: int
    outputs: int

    @nn.compact
    def __call__(self, x: tuple[jax.Array, jax.Array]) -> jax.Array:
        columns, values = x
        row = jnp.zeros(self.features, values.dtype).at[columns].add(values)
        return nn.Dense(self.outputs)(row)


def padded_rows(rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Columns and values of sparse rows, each row filled up with zeros to the length of the longest."""
    lengths = np.diff(rows.indptr)
    shape = rows.shape[0], int(lengths.max())
    columns, values = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    there = np.arange(shape[1]) < lengths[:, None]
    columns[there], values[there] = rows.indices, rows.data
    return columns, values


class SyntheticTags(Classifier):
    """SYNTHETIC posts with one of 500 tags, by a logistic regression of 5,000,500 parameters on 10,000 words.

    A stand-in for StackOverflow's tags, whose sizes it has; no post of that site is in it. Every seed of training sees
    the same data.

    Args:
        where: not used: the data is made.
        num_examples: posts, a fifth of which are the test.
        frequency: for the diagonal, where word frequencies come from: None, ``"public"`` or ``{"release": sigma}``, as
            in `text_task.Imdb`.
        power, floor: the diagonal of a word is ``1 / ((f / max f)^power + floor)``.
        options: as for `Network`.
    """

    def __init__(
        self,
        where: Path | None = None,
        *,
        num_examples: int = 50_000,
        frequency: Any = None,
        power: float = 0.5,
        floor: float = 1e-2,
        **options: Any,
    ):
        del where
        split = synthetic.split_tags(num_examples)
        features = split.train_x.shape[1]
        as_rows = {f"{part}_x": padded_rows(getattr(split, f"{part}_x")) for part in ("train", "test")}
        super().__init__(SparseLinear(features, 500), split._replace(**as_rows), **options)
        self._frequency, self._power, self._floor = frequency, power, floor
        if frequency == "public" and not self.has_public_data:
            raise ValueError("word frequencies are to come from public posts: set public_share above 0.")
        if frequency is None:
            return
        columns, values = map(np.asarray, (self._public if frequency == "public" else self._train)[0])
        # Each post is a vector of length 1, so that one post more or less moves the sum by 1.
        unit = (values > 0) / np.sqrt(np.maximum((values > 0).sum(1, keepdims=True), 1))
        self._counted = np.bincount(columns.reshape(-1), unit.reshape(-1), minlength=features)
        if frequency != "public":
            self.release = dp_accounting.GaussianDpEvent(frequency["release"])

    def side_information(self, seed: int) -> Any:
        if self._frequency is None:
            return None
        f = self._counted
        if isinstance(self._frequency, dict):
            # A seed of its own: the noise of training comes from another generator.
            noise = np.random.default_rng([seed, 0xF2E9]).normal(0, self._frequency["release"], f.shape)
            f = np.maximum(f + noise, 0)
        scale = 1 / ((f / f.max()) ** self._power + self._floor)
        return {"Dense_0": {"kernel": scale[:, None].astype(np.float32), "bias": np.float32(1)}}


class SyntheticRegression(Indexed):
    """AdaDPS's toy regression (its Figure 3), which is synthetic; the score is the training loss, as in the figure.

    Args:
        where: not used: the data is made.
        seed: of the data.
    """

    metric, higher_is_better = "training loss", False
    has_public_data = False
    checkpoints = 45  # the figure is a curve

    def __init__(self, where: Path | None = None, *, seed: int = 0):
        del where
        toy = synthetic.adadps_toy(seed)
        self._train = jnp.asarray(toy.x), jnp.asarray(toy.y)
        self._diagonal = toy.diagonal
        self.num_examples = len(toy.y)
        self._promise = dpopt.per_example_grads(self._loss)

    @staticmethod
    def _loss(params: Any, example: tuple) -> jax.Array:
        x, y = example
        return 0.5 * (x @ params["weights"] - y) ** 2

    def init(self, seed: int) -> Any:
        del seed
        return {"weights": jnp.zeros(self._train[0].shape[1])}

    def side_information(self, seed: int) -> Any:
        """``1 / A``, which the paper takes as known."""
        del seed
        return {"weights": (1 / self._diagonal).astype(np.float32)}

    def promise(self, params: Any, batch: Any) -> dpopt.gradients.PerExampleGrads:
        which, mask = batch
        return self._promise(params, self.rows(which), mask=mask)

    def public_grads(self, params: Any) -> Any:
        raise NotImplementedError("the toy regression has no public data.")

    def score(self, params: Any) -> jax.Array:
        x, y = self._train
        return 0.5 * jnp.mean((x @ params["weights"] - y) ** 2)
