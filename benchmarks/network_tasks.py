"""Tasks learned by a Flax network, through dpopt's own engines."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import dpopt
from benchmarks import idx, models
from benchmarks.tasks import padded, round_up


class Network:
    """A Flax model on dense arrays.

    Args:
        model: classifies or reproduces one example, with or without a batch axis.
        train, test: inputs and targets.
        loss: of an output and its target, a scalar.
        public_share: share of the training examples that count as public; they leave the private set.
    """

    release, taken_for_free = None, ()

    def __init__(self, model: nn.Module, train: tuple, test: tuple, loss: Any, public_share: float):
        order = np.random.default_rng(0).permutation(len(train[0]))
        public, private = np.split(order, [round(public_share * len(order))])
        self._model, self._loss = model, loss
        self._train = tuple(jnp.asarray(x[private]) for x in train)
        self._public = tuple(jnp.asarray(x[public]) for x in train)
        self._test = tuple(jnp.asarray(x) for x in test)
        self.num_examples, self.has_public_data = len(private), len(public) > 0
        self._promise = dpopt.per_example_grads(self._loss_of_one)

    def _loss_of_one(self, params: Any, example: tuple) -> jax.Array:
        x, y = example
        return self._loss(self._model.apply({"params": params}, x), y)

    def init(self, seed: int) -> Any:
        return self._model.init(jax.random.fold_in(jax.random.key(1_000), seed), self._train[0][0])["params"]

    def side_information(self, seed: int) -> Any:
        del seed
        return None

    def sizes(self, drawn: list[np.ndarray]) -> tuple[int, ...]:
        return (round_up(max(len(d) for d in drawn), 16),)

    def pack(self, drawn: list[np.ndarray], sizes: tuple[int, ...]) -> Any:
        return padded(drawn, sizes[0])

    def all_examples(self) -> Any:
        return self._train, jnp.ones(self.num_examples, bool)

    def promise(self, params: Any, batch: Any) -> dpopt.PerExampleGrads:
        rows, mask = batch
        examples = rows if isinstance(rows, tuple) else tuple(x[rows] for x in self._train)
        return self._promise(params, examples, mask=mask)

    def public_grads(self, params: Any) -> Any:
        def mean_loss(p):
            return jnp.mean(jax.vmap(self._loss_of_one, in_axes=(None, 0))(p, self._public))

        return jax.grad(mean_loss)(params)


class MnistClassification(Network):
    """Handwritten digits, as many as the training file holds, by a five-layer CNN."""

    metric, higher_is_better = "accuracy", True

    def __init__(self, where: Path | None = None, *, public_share: float = 0.0):
        split = idx.load(where)
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        train, test = (split.train_x, split.train_y), (split.test_x, split.test_y)
        super().__init__(models.FiveLayerCNN(), train, test, cross_entropy, public_share)

    def score(self, params: Any) -> jax.Array:
        images, labels = self._test
        return jnp.mean(jnp.argmax(self._model.apply({"params": params}, images), -1) == labels)


class MnistAutoencoder(Network):
    """The same digits, to be reproduced; the score is the mean squared error of a pixel, times 100."""

    metric, higher_is_better = "loss x 100", False

    def __init__(self, where: Path | None = None, *, public_share: float = 0.0):
        split = idx.load(where)
        train, test = (x.reshape(len(x), -1) for x in (split.train_x, split.test_x))

        def error(logits, image):
            return jnp.mean((jax.nn.sigmoid(logits) - image) ** 2)

        super().__init__(models.Autoencoder(), (train, train), (test, test), error, public_share)

    def score(self, params: Any) -> jax.Array:
        images, _ = self._test
        return 100 * jnp.mean((jax.nn.sigmoid(self._model.apply({"params": params}, images)) - images) ** 2)
