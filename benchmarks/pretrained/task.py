"""Sentiment of film reviews by a pretrained Transformer: a new head, adapters, or everything is trained."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dpopt
import dpopt.flax
from benchmarks import data, imdb
from benchmarks.pretrained import bert, tokens, weights
from benchmarks.tasks import Indexed

TOGETHER = 16  # reviews of a forward pass; on CPUs a few that fit the caches are faster than many
CLASSES = 2


class PretrainedReviews(Indexed):
    """IMDB by MiniLM (Wang et al. 2020), whose encoder of six layers was trained on other texts.

    Args:
        where: data folder.
        trained: ``"head"``, on the mean of the encoder's outputs, which are computed once; ``"lora"``, the head and
            adapters of queries and values; ``"all"``, the head and the whole encoder.
        rank: of the adapters.
        length: tokens of a review that are read.
        dtype: ``"float32"`` or ``"bfloat16"``: of the computation and of what is not trained. What is trained is in
            float32.
        public_share: share of the training reviews that count as public; they leave the private set.
        test: how many reviews are scored at most; None: all 25,000.
        validate: score a fifth of the training reviews, held out, instead of the test: for tuning.
    """

    metric, higher_is_better = "accuracy", True
    checkpoints = 1  # a score takes as long as a few steps

    def __init__(
        self,
        where: Path | None = None,
        *,
        trained: str = "lora",
        rank: int = 4,
        length: int = 128,
        dtype: str = "float32",
        public_share: float = 0.0,
        test: int | None = None,
        validate: bool = False,
    ):
        model = weights.folder(where)
        split = tokens.reviews(where, model, length)
        order = np.random.default_rng(0).permutation(len(split.train_labels))
        held_out, own = np.split(order, [len(order) // 5]) if validate else (order[:0], order)
        public, private = np.split(own, [round(public_share * len(own))])
        tested = np.random.default_rng(1).permutation(len(split.test_labels))[:test]

        self._trained, self._rank = trained, rank
        kept = "float32" if trained == "all" else dtype
        self._body, self._config = weights.load(model, dtype=dtype, param_dtype=kept)
        inputs, tests = tuple(split.train), tuple(split.test)
        if trained == "head":
            inputs, tests = _features(self._body, split, data.find(where, imdb.NAMES, what="IMDB", address=""), dtype)

        def take(inputs: tuple, labels: np.ndarray, rows: np.ndarray) -> Any:
            return jax.tree.map(lambda x: jnp.asarray(x[rows]), (inputs, labels))

        self._train, self._public = (take(inputs, split.train_labels, rows) for rows in (private, public))
        self._test = (
            take(inputs, split.train_labels, held_out[:test]) if validate else take(tests, split.test_labels, tested)
        )
        self.num_examples, self.has_public_data = len(private), len(public) > 0
        self._graph, _, self._frozen = nnx.split(self._model(0), bert.trained(trained), ...)
        self._promise = dpopt.per_example_grads(self._loss_and_params(0)[0])

    def _model(self, seed: int) -> nnx.Module:
        """The network with a new head and, if they are asked for, new adapters."""
        rngs = nnx.Rngs(jax.random.fold_in(jax.random.key(1_000), seed))
        if self._trained == "head":
            return bert.head(self._config.hidden_size, CLASSES, rngs=rngs)
        model = bert.Classifier(nnx.clone(self._body), self._config.hidden_size, CLASSES, rngs=rngs)
        if self._trained == "lora":
            bert.adapt(model.body, self._rank, rngs=rngs)
        return model

    def _loss_and_params(self, seed: int) -> tuple[Any, Any]:
        return dpopt.flax.nnx_loss(self._model(seed), mean_loss, wrt=bert.trained(self._trained))

    def init(self, seed: int) -> Any:
        return self._loss_and_params(seed)[1]

    def promise(self, params: Any, batch: Any) -> dpopt.PerExampleGrads:
        which, mask = batch
        return self._promise(params, self.rows(which), mask=mask)

    def public_grads(self, params: Any) -> Any:
        def loss_on(params, group):
            return mean_loss(nnx.merge(self._graph, params, self._frozen), group)

        whole = len(self._public[1]) // TOGETHER * TOGETHER  # what is left over is not read
        groups = jax.tree.map(lambda x: x[:whole].reshape(-1, TOGETHER, *x.shape[1:]), self._public)
        return jax.tree.map(lambda g: g.mean(0), jax.lax.map(lambda group: jax.grad(loss_on)(params, group), groups))

    def score(self, params: Any) -> jax.Array:
        model = nnx.merge(self._graph, params, self._frozen)

        def is_right(example: Any) -> jax.Array:
            inputs, label = example
            return jnp.argmax(model(*(x[None] for x in inputs))[0]) == label

        return jnp.mean(jax.lax.map(is_right, self._test, batch_size=TOGETHER))


def mean_loss(model: nnx.Module, batch: Any) -> jax.Array:
    """The mean cross entropy of a batch ``(inputs, labels)``."""
    inputs, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(*inputs), labels).mean()


def _features(body: bert.Bert, split: tokens.Split, source: Path, dtype: str) -> tuple[tuple, tuple]:
    """The means of the encoder's outputs, ``(n, width)`` of each part; cached, since they take minutes."""
    mean = nnx.jit(lambda body, ids, mask: bert.mean(body(ids, mask), mask))

    def build() -> dict[str, np.ndarray]:
        return {
            part: np.concatenate(
                [
                    np.asarray(mean(body, texts.ids[i : i + TOGETHER], texts.mask[i : i + TOGETHER]))
                    for i in range(0, len(texts.ids), TOGETHER)
                ]
            )
            for part, texts in (("train", split.train), ("test", split.test))
        }

    arrays = data.cached(source, f"imdb-{weights.NAME}-{split.train.ids.shape[1]}-{dtype}-means", build)
    return (arrays["train"],), (arrays["test"],)
