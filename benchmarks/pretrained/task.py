"""Sentiment of film reviews by a pretrained Transformer, of which the head, adapters or everything is trained."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import dpopt
import dpopt.flax
from benchmarks import data
from benchmarks.data import imdb
from benchmarks.pretrained import bert, head, tokens, weights
from benchmarks.pretrained.head import mean_loss
from benchmarks.utility.tasks import Indexed

TOGETHER = head.TOGETHER
CLASSES = 2


class PretrainedReviews(Indexed):
    """IMDB by MiniLM (Wang et al. 2020), whose encoder of six layers was trained on other texts.

    Args:
        where: data folder.
        trained: ``"head"``, on means of the encoder's outputs that are computed once; or another option of
            `bert.trained`, starting from a head that was trained like this with ``head_epsilon`` of the budget.
        reads: what the head reads (`bert.Classifier`).
        head_epsilon: the budget of the head's own stage, if more than the head is trained.
        delta: of that stage.
        rank: of the adapters.
        length: number of tokens read of each review.
        dtype: of the computation and of frozen parameters, ``"float32"`` or ``"bfloat16"``. Trained parameters are in
            float32.
        public_share: the share of the training reviews that are declared public; they leave the private set.
        test: the maximal number of reviews that are scored; None: all 25,000.
        validate: score a held-out fifth of the training reviews instead of the test reviews, for tuning.
    """

    metric, higher_is_better = "accuracy", True
    checkpoints = 1  # scoring takes as long as a few steps

    def __init__(
        self,
        where: Path | None = None,
        *,
        trained: str = "lora",
        reads: str = "every",
        head_epsilon: float = 1.0,
        delta: float = 1e-5,
        rank: int = 8,
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

        self._trained, self._rank, self._reads = trained, rank, reads
        kept = "float32" if trained in ("all", "bias") else dtype
        self._body, self._config = weights.load(model, dtype=dtype, param_dtype=kept)
        source = data.find(where, imdb.NAMES, what="IMDB", address="")
        test_texts = tokens.Texts(*(x[tested] for x in split.test))
        inputs, tests = tuple(split.train), tuple(test_texts)
        of_train = functools.partial(self._features, split.train, source, f"imdb-train-{length}-{dtype}")
        self._head = bert.Classifier(self._body, self._config.hidden_size, CLASSES, reads=reads, rngs=nnx.Rngs(0)).head
        if trained == "head":
            inputs = (of_train(),)
            tests = (self._features(test_texts, source, f"imdb-test-{len(tested)}-{length}-{dtype}"),)
        elif head_epsilon > 0:
            examples = (of_train()[private],), split.train_labels[private]
            self.release = self._learn_head(examples, head_epsilon, delta)

        def take(inputs: tuple, labels: np.ndarray, rows: np.ndarray) -> Any:
            return jax.tree.map(lambda x: jnp.asarray(x[rows]), (inputs, labels))

        self._train, self._public = (take(inputs, split.train_labels, rows) for rows in (private, public))
        self._test = (
            take(inputs, split.train_labels, held_out[:test])
            if validate
            else take(tests, split.test_labels[tested], np.arange(len(tested)))
        )
        self.num_examples, self.has_public_data = len(private), len(public) > 0
        self._graph, _, self._frozen = nnx.split(self._model(0), self._which(), ...)
        self._grads = dpopt.per_example_grads(self._loss_and_params(0)[0])

    def _features(self, texts: tokens.Texts, source: Path, name: str) -> np.ndarray:
        """The head's input for each text; cached, since it takes minutes to compute."""

        def build() -> dict[str, np.ndarray]:
            return {"every": head.features(self._body, texts, "every")}

        every = data.cached(source, f"{name}-{weights.NAME}-ends-outputs", build)["every"]
        return every if self._reads == "every" else every[:, -self._config.hidden_size :]

    def _learn_head(self, examples: Any, epsilon: float, delta: float) -> Any:
        """Trains the head from a fixed key, so that all seeds share it; returns the privacy event."""
        loss_fn, params = head.loss_and_params(self._head)
        (features,), labels = examples
        count = len(labels)
        plan = head.plan(count, epsilon=epsilon, delta=delta, key=jax.random.key(2_000), pad_to=max(1, count // 10))
        step, state = jax.jit(plan.train_step(loss_fn)), plan.optimizer.init(params)
        for t in range(plan.steps):
            batch = plan.sampler.batch(t)
            rows = (features[batch.indices],), labels[batch.indices]
            params, state, _ = step(params, state, rows, batch.mask)
        nnx.update(self._head, params)
        return plan.event

    def _model(self, seed: int) -> nnx.Module:
        """The network with its trained head and, for ``"lora"``, new adapters."""
        rngs = nnx.Rngs(jax.random.fold_in(jax.random.key(1_000), seed))
        if self._trained == "head":
            return nnx.clone(self._head)
        body, width = nnx.clone(self._body), self._config.hidden_size
        model = bert.Classifier(body, width, CLASSES, reads=self._reads, rngs=rngs)
        model.head = nnx.clone(self._head)
        if self._trained == "lora":
            bert.adapt(model.body, self._rank, rngs=rngs)
        return model

    def _loss_and_params(self, seed: int) -> tuple[Any, Any]:
        return dpopt.flax.nnx_loss(self._model(seed), mean_loss, wrt=self._which())

    def _which(self) -> Any:
        return bert.trained(self._trained, self._config.num_hidden_layers)

    def init(self, seed: int) -> Any:
        return self._loss_and_params(seed)[1]

    def grads(self, params: Any, batch: Any) -> dpopt.gradients.PerExampleGrads:
        which, mask = batch
        return self._grads(params, self.rows(which), mask=mask)

    def public_grads(self, params: Any) -> Any:
        def loss_on(params, group):
            return mean_loss(nnx.merge(self._graph, params, self._frozen), group)

        whole = len(self._public[1]) // TOGETHER * TOGETHER  # an incomplete group is not used
        groups = jax.tree.map(lambda x: x[:whole].reshape(-1, TOGETHER, *x.shape[1:]), self._public)
        return jax.tree.map(lambda g: g.mean(0), jax.lax.map(lambda group: jax.grad(loss_on)(params, group), groups))

    def score(self, params: Any) -> jax.Array:
        model = nnx.merge(self._graph, params, self._frozen)

        def is_right(example: Any) -> jax.Array:
            inputs, label = example
            return jnp.argmax(model(*(x[None] for x in inputs))[0]) == label

        return jnp.mean(jax.lax.map(is_right, self._test, batch_size=TOGETHER))
