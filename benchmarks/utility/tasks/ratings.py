"""Ratings of films as a task."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.data import ratings
from benchmarks.utility import closed_forms
from benchmarks.utility.tasks import Indexed
from dpopt.gradients import PerExampleGrads


class MovieLens(Indexed):
    """Ratings of films, by matrix factorisation; the score is the mean SQUARED error (not half of it).

    Args:
        where: data folder.
        dimension: of the factors.
        biases: add a mean and a bias for each user and film.
        mean_input: the input of the mean: below 1, the mean takes less of the clip norm.
        init: the standard deviation of the initial factors, which are normal.
        positive: take their absolute values. Ratings are positive, and without biases factors of mixed signs first
            have to turn towards each other, which takes most of the run under a tight clip.
        public_share, validate: as in `Imdb`.
    """

    metric, higher_is_better = "MSE", False

    def __init__(
        self,
        where: Path | None = None,
        *,
        dimension: int = 100,
        biases: bool = False,
        init: float = 0.1,
        positive: bool = False,
        mean_input: float = 1.0,
        public_share: float = 0.0,
        validate: bool = False,
    ):
        split = ratings.load(where)
        order = np.random.default_rng(0).permutation(len(split.train_y))
        held_out, train = np.split(order, [len(order) // 5]) if validate else (None, order)
        public, private = np.split(train, [round(public_share * len(train))])
        self.num_examples, self.dimension, self._biases, self._init = len(private), dimension, biases, init
        self._positive, self._mean_input = positive, mean_input
        self.has_public_data = len(public) > 0

        def batch(pairs, values):
            return closed_forms.Ratings(*jnp.asarray(pairs).T, jnp.asarray(values))

        x, y = split.train_x, split.train_y
        self._train, self._public = batch(x[private], y[private]), batch(x[public], y[public])
        self._final = functools.partial(batch, split.test_x, split.test_y)
        self._test = batch(x[held_out], y[held_out]) if validate else self._final()

    def init(self, seed: int) -> Any:
        rng = np.random.default_rng([seed, 1])
        shapes = {"users": (ratings.USERS, self.dimension), "items": (ratings.ITEMS, self.dimension)}
        factors = {n: rng.normal(0, self._init, s) for n, s in shapes.items()}
        params = {n: jnp.asarray(np.abs(f) if self._positive else f, jnp.float32) for n, f in factors.items()}
        if self._biases:
            # 3 is the middle of the scale, which is public.
            params |= {"mean": jnp.asarray(3.0 / self._mean_input), "user_bias": jnp.zeros(ratings.USERS)}
            params |= {"item_bias": jnp.zeros(ratings.ITEMS)}
        return params

    def grads(self, params: Any, batch: Any) -> PerExampleGrads:
        which, mask = batch
        return closed_forms.factorization(params, self.rows(which), mask, self._mean_input)

    def public_grads(self, params: Any) -> Any:
        def loss(p):
            return 0.5 * jnp.mean(
                (closed_forms.predict(p, *self._public[:2], self._mean_input) - self._public.ratings) ** 2
            )

        return jax.grad(loss)(params)

    def each_score(self, params: Any, rows: Any = None) -> jax.Array:
        rows = self._test if rows is None else rows
        # Ratings lie within 1 to 5, which is public, so predictions may be clipped.
        guess = closed_forms.predict(params, *rows[:2], self._mean_input)
        if self._biases:
            guess = jnp.clip(guess, 1, 5)
        return (guess - rows.ratings) ** 2

    def score(self, params: Any) -> jax.Array:
        return jnp.mean(self.each_score(params))

    def final_score(self, params: Any) -> jax.Array:
        return jnp.mean(self.each_score(params, self._final()))
