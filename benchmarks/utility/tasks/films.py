"""Ratings of films predicted from the film alone, with privacy for a rating or for a user with all their ratings."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpopt
from benchmarks.data import ratings
from benchmarks.utility.tasks import Indexed
from dpopt import users


class Films(Indexed):
    """A mean and a bias for every film; the score is the mean squared error.

    There are no parameters per user: with one clip per user, each would be trained on one row, under noise as large as
    that row's whole contribution.

    Args:
        where: data folder.
        max_ratings: how many ratings of a user are used; the privacy unit is the user. None: the unit is the rating.
        mean_input: the input of the mean: below 1, the mean takes less of the clip norm.
        validate: scores ratings held out from training instead of the test set.
    """

    metric, higher_is_better, has_public_data = "MSE", False, False

    def __init__(
        self,
        where: Path | None = None,
        *,
        max_ratings: int | None = None,
        mean_input: float = 0.1,
        validate: bool = False,
    ):
        split = ratings.load(where)
        order = np.random.default_rng(0).permutation(len(split.train_y))
        held_out, train = np.split(order, [len(order) // 5]) if validate else (order[:0], order)
        self._mean_input = mean_input
        self._test = (split.train_x[held_out], split.train_y[held_out]) if validate else (split.test_x, split.test_y)
        x, y = split.train_x[train], split.train_y[train]
        examples = {"film": x[:, 1], "rating": y}
        self.unit = "example" if max_ratings is None else "user"
        if max_ratings is None:
            self.num_examples, self._train = len(y), jax.tree.map(jnp.asarray, examples)
            self._grads = dpopt.per_example_grads(self._loss)
        else:  # the order is random, so the first ratings are a random sample
            groups = users.group(x[:, 0], max_examples=max_ratings)
            self.num_examples = groups.num_users
            self._train = jax.tree.map(jnp.asarray, groups.batches(examples)(np.arange(groups.num_users)))
            self._grads = users.per_user_grads(self._loss, engine="vmap")

    def _predict(self, params: Any, film: jax.Array) -> jax.Array:
        return self._mean_input * params["mean"] + params["films"][film]

    def _loss(self, params: Any, example: Any) -> jax.Array:
        return 0.5 * (self._predict(params, example["film"]) - example["rating"]) ** 2

    def init(self, seed: int) -> Any:
        del seed
        # 3 is the middle of the scale, which is public.
        return {"mean": jnp.asarray(3.0 / self._mean_input), "films": jnp.zeros(ratings.ITEMS)}

    def grads(self, params: Any, batch: Any) -> dpopt.gradients.PerExampleGrads:
        which, mask = batch
        return self._grads(params, self.rows(which), mask=mask)

    def public_grads(self, params: Any) -> Any:
        raise NotImplementedError("no rating is public here.")

    def score(self, params: Any) -> jax.Array:
        (pairs, rating) = self._test
        guess = jnp.clip(self._predict(params, jnp.asarray(pairs[:, 1])), 1, 5)  # no rating lies outside
        return jnp.mean((guess - jnp.asarray(rating)) ** 2)
