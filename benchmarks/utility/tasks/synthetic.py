"""Tasks on synthetic data, as their names state: their figures are not figures on real data."""

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
    """A linear layer on a sparse example, given by its columns and values (0 for padding)."""

    features: int
    outputs: int

    @nn.compact
    def __call__(self, x: tuple[jax.Array, jax.Array]) -> jax.Array:
        columns, values = x
        row = jnp.zeros(self.features, values.dtype).at[columns].add(values)
        return nn.Dense(self.outputs)(row)


def padded_rows(rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Columns and values of sparse rows, padded with zeros to the length of the longest row."""
    lengths = np.diff(rows.indptr)
    shape = rows.shape[0], int(lengths.max())
    columns, values = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    there = np.arange(shape[1]) < lengths[:, None]
    columns[there], values[there] = rows.indices, rows.data
    return columns, values


class SyntheticTags(Classifier):
    """SYNTHETIC posts with one of 500 tags, by a logistic regression of 5,000,500 parameters on 10,000 words.

    A stand-in for StackOverflow's tags with the same sizes; it has no posts of that site. Every training seed gets the
    same data.

    Args:
        where: not used, since the data is generated.
        num_examples: number of posts; a fifth of them is the test set.
        frequency: where the word frequencies of the diagonal come from: None, ``"public"`` or ``{"release": sigma}``,
            as in `text.Imdb`.
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
            raise ValueError("word frequencies come from public posts: set public_share above 0.")
        if frequency is None:
            return
        columns, values = map(np.asarray, (self._public if frequency == "public" else self._train)[0])
        # Each post is a vector of norm 1, so the sum has sensitivity 1.
        unit = (values > 0) / np.sqrt(np.maximum((values > 0).sum(1, keepdims=True), 1))
        self._counted = np.bincount(columns.reshape(-1), unit.reshape(-1), minlength=features)
        if frequency != "public":
            self.release = dp_accounting.GaussianDpEvent(frequency["release"])

    def side_information(self, seed: int) -> Any:
        if self._frequency is None:
            return None
        f = self._counted
        if isinstance(self._frequency, dict):
            # A separate seed: the noise of training comes from another generator.
            noise = np.random.default_rng([seed, 0xF2E9]).normal(0, self._frequency["release"], f.shape)
            f = np.maximum(f + noise, 0)
        scale = 1 / ((f / f.max()) ** self._power + self._floor)
        return {"Dense_0": {"kernel": scale[:, None].astype(np.float32), "bias": np.float32(1)}}


class SyntheticRegression(Indexed):
    """AdaDPS's synthetic toy regression (its Figure 3); the score is the training loss, as in the figure.

    Args:
        where: not used, since the data is generated.
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
        self._grads = dpopt.per_example_grads(self._loss)

    @staticmethod
    def _loss(params: Any, example: tuple) -> jax.Array:
        x, y = example
        return 0.5 * (x @ params["weights"] - y) ** 2

    def init(self, seed: int) -> Any:
        del seed
        return {"weights": jnp.zeros(self._train[0].shape[1])}

    def side_information(self, seed: int) -> Any:
        """``1 / A``, which the paper assumes to be known."""
        del seed
        return {"weights": (1 / self._diagonal).astype(np.float32)}

    def grads(self, params: Any, batch: Any) -> dpopt.gradients.PerExampleGrads:
        which, mask = batch
        return self._grads(params, self.rows(which), mask=mask)

    def public_grads(self, params: Any) -> Any:
        raise NotImplementedError("the toy regression has no public data.")

    def score(self, params: Any) -> jax.Array:
        x, y = self._train
        return 0.5 * jnp.mean((x @ params["weights"] - y) ** 2)
