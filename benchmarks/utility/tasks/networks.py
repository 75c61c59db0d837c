"""Tasks for Flax networks, through dpopt's own engines."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import dpopt
from benchmarks import data
from benchmarks.cost import models
from benchmarks.data import idx, imdb
from benchmarks.utility.tasks import Indexed
from benchmarks.utility.tasks.text import loaded

SCORED_TOGETHER = 500  # test examples: an LSTM's states for all of them at once would take gigabytes


class Network(Indexed):
    """A Flax model on arrays.

    Args:
        model: maps an example to its output, with or without a batch axis.
        split: inputs and targets for training and test.
        loss: a scalar, from an output and its target.
        public_share: the share of the training examples that are declared public; they leave the private set.
        validate: score a held-out fifth of the training examples instead of the test set, for tuning.
    """

    def __init__(
        self, model: nn.Module, split: data.Split, loss: Any, *, public_share: float = 0.0, validate: bool = False
    ):
        train, test = (split.train_x, split.train_y), (split.test_x, split.test_y)
        order = np.random.default_rng(0).permutation(len(split.train_y))
        held_out, own = np.split(order, [len(order) // 5]) if validate else (None, order)
        public, private = np.split(own, [round(public_share * len(own))])

        def take(which):
            return jax.tree.map(lambda x: jnp.asarray(x[which]), train)

        self._model, self._loss = model, loss
        self._train, self._public = take(private), take(public)
        self._final = lambda: jax.tree.map(jnp.asarray, test)
        self._test = take(held_out) if validate else self._final()
        self.num_examples, self.has_public_data = len(private), len(public) > 0
        self._grads = dpopt.per_example_grads(self._loss_of_one)

    def _output(self, params: Any, x: Any) -> jax.Array:
        return self._model.apply({"params": params}, x)

    def _loss_of_one(self, params: Any, example: tuple) -> jax.Array:
        x, y = example
        return self._loss(self._output(params, x), y)

    def init(self, seed: int) -> Any:
        first = jax.tree.map(lambda x: x[0], self._train[0])
        return self._model.init(jax.random.fold_in(jax.random.key(1_000), seed), first)["params"]

    def grads(self, params: Any, batch: Any) -> dpopt.gradients.PerExampleGrads:
        which, mask = batch
        return self._grads(params, self.rows(which), mask=mask)

    def public_grads(self, params: Any) -> Any:
        def mean_loss(p):
            return jnp.mean(jax.vmap(self._loss_of_one, in_axes=(None, 0))(p, self._public))

        return jax.grad(mean_loss)(params)


class Classifier(Network):
    """A network that classifies; the score is its accuracy."""

    metric, higher_is_better = "accuracy", True

    def __init__(self, model: nn.Module, split: data.Split, **options: Any):
        super().__init__(model, split, optax.softmax_cross_entropy_with_integer_labels, **options)

    def each_score(self, params: Any, rows: Any = None) -> jax.Array:
        def is_right(example):
            x, y = example
            return jnp.argmax(self._output(params, x), -1) == y

        return jax.lax.map(is_right, self._test if rows is None else rows, batch_size=SCORED_TOGETHER)

    def score(self, params: Any) -> jax.Array:
        return jnp.mean(self.each_score(params))

    def final_score(self, params: Any) -> jax.Array:
        return jnp.mean(self.each_score(params, self._final()))


class MnistClassification(Classifier):
    """Handwritten digits (all in the training file), by a five-layer CNN."""

    def __init__(self, where: Path | None = None, **options: Any):
        super().__init__(models.FiveLayerCNN(), idx.load(where), **options)


class Digits(Classifier):
    """scikit-learn's 1,797 digits of 8 x 8 pixels, 1,437 for training, by a network with a hidden layer of width 64.

    Args:
        where: not used: the digits come with scikit-learn.
        options: as for `Network`.
    """

    def __init__(self, where: Path | None = None, **options: Any):
        del where
        split = data.digits()
        flat = split._replace(train_x=split.train_x.reshape(-1, 64), test_x=split.test_x.reshape(-1, 64))
        super().__init__(models.MLP((64,), 10), flat, **options)


class _ReviewReader(Classifier):
    """Sentiment of film reviews by a network that reads the first words of each.

    Args:
        model: takes ``(length,)`` word numbers below its ``vocabulary``.
        where: data folder.
        length: number of words read of each review.
        vocabulary: ``"train"`` (the most frequent words of the training reviews, which is not private) or ``"shipped"``
            (``imdb.vocab``, published with the data).
        options: as for `Network`.
    """

    def __init__(self, model: Any, where: Path | None, *, length: int, vocabulary: str, **options: Any):
        source = loaded(where)
        words = model.vocabulary - 2  # two numbers are reserved, for padding and for all other words
        chosen = source.shipped[:words]
        if vocabulary == "train":
            chosen = imdb.most_frequent(source.train, len(source.words), words)
            self.not_covered_by_epsilon = ["vocabulary"]

        def read(reviews):
            return imdb.sequences(reviews, chosen, length, len(source.words)), reviews.labels

        super().__init__(model, data.Split(*read(source.train), *read(source.test)), **options)


class ImdbLSTM(_ReviewReader):
    """A two-layer LSTM of 706,690 parameters; as in the paper, the vocabulary is that of the training reviews."""

    def __init__(self, where: Path | None = None, *, length: int = 64, vocabulary: str = "train", **options: Any):
        super().__init__(models.TwoLayerLSTM(), where, length=length, vocabulary=vocabulary, **options)


class ImdbTransformer(_ReviewReader):
    """A Transformer with one layer of width 32 on the 1,998 most frequent words of the published vocabulary."""

    def __init__(self, where: Path | None = None, *, length: int = 64, vocabulary: str = "shipped", **options: Any):
        model = models.Transformer(vocabulary=2_000, width=32, layers=1, heads=2)
        super().__init__(model, where, length=length, vocabulary=vocabulary, **options)


class MnistAutoencoder(Network):
    """An autoencoder of the same digits; the score is the mean squared error of a pixel, times 100."""

    metric, higher_is_better = "loss x 100", False

    def __init__(self, where: Path | None = None, **options: Any):
        split = idx.load(where)
        train, test = (x.reshape(len(x), -1) for x in (split.train_x, split.test_x))

        def error(logits, image):
            return jnp.mean((jax.nn.sigmoid(logits) - image) ** 2)

        super().__init__(models.Autoencoder(), data.Split(train, train, test, test), error, **options)

    def score(self, params: Any) -> jax.Array:
        images, _ = self._test
        return 100 * jnp.mean((jax.nn.sigmoid(self._output(params, images)) - images) ** 2)
