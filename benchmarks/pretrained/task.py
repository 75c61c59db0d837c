"""Sentiment of film reviews by a pretrained Transformer, of which the head, adapters or everything is trained."""

import functools
from pathlib import Path
from typing import Any

import dp_accounting
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
from benchmarks.utility.tasks import Indexed, padded

TOGETHER = head.TOGETHER
CLASSES = 2


class PretrainedReviews(Indexed):
    """IMDB by MiniLM (Wang et al. 2020), whose encoder of six layers was trained on other texts.

    Args:
        where: data folder.
        trained: ``"head"``, on means of the encoder's outputs that are computed once; or another option of
            `bert.trained`, behind a head that was trained before; scored with a new head, trained afterwards.
        reads: what the head reads (`bert.Classifier`).
        epsilon: of the whole run; the two heads get shares of it if more than the head is trained. 0: none is trained.
        delta: of the whole run.
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
        epsilon: float = 8.0,
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
        model = bert.Classifier(self._body, self._config.hidden_size, CLASSES, reads=reads, rngs=nnx.Rngs(0))
        self._head, self._last = model.head, None
        if trained == "head":
            inputs = (of_train(),)
            if epsilon > 0:
                features = inputs[0][private]
                plan = head.mean_plan(*features.shape, epsilon=epsilon, delta=delta, key=jax.random.key(2_000))
                self._head.mean[...], self.release = _mean(plan, jnp.asarray(features)), plan.event
            tests = (self._features(test_texts, source, f"imdb-test-{len(tested)}-{length}-{dtype}"),)
        elif epsilon > 0:
            features, labels = of_train()[private], split.train_labels[private]
            first, self._last = (
                _HeadPlans(features.shape, epsilon, delta, share, number)
                for number, share in enumerate((head.FIRST_SHARE, head.LAST_SHARE))
            )
            nnx.update(self._head, jax.jit(first.learn)(features, labels))
            head.soften(self._head)
            self.release = dp_accounting.ComposedDpEvent([first.event, self._last.event])

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
            every = bert.Classifier(self._body, self._config.hidden_size, CLASSES, reads="every", rngs=nnx.Rngs(0))
            return {"every": head.in_groups(bert.Classifier.features, every, texts)}

        every = data.cached(source, f"{name}-{weights.NAME}-ends-outputs", build)["every"]
        return every if self._reads == "every" else every[:, -self._config.hidden_size :]

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
        return bert.trained(self._trained, bert.first_trained(self._config.num_hidden_layers))

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
        model = predict = nnx.merge(self._graph, params, self._frozen)
        if self._last is not None:
            inputs, labels = self._train
            features = jax.lax.map(lambda x: model.features(*(v[None] for v in x))[0], inputs, batch_size=TOGETHER)
            own = nnx.merge(nnx.graphdef(self._head), self._last.learn(features, labels))

            def predict(ids: jax.Array, mask: jax.Array) -> jax.Array:
                return own(model.features(ids, mask))

        def is_right(example: Any) -> jax.Array:
            inputs, label = example
            return jnp.argmax(predict(*(x[None] for x in inputs))[0]) == label

        return jnp.mean(jax.lax.map(is_right, self._test, batch_size=TOGETHER))


def _mean(plan: dpopt.Plan, features: jax.Array) -> jax.Array:
    """The noisy mean of features ``(n, features)``, by a `head.mean_plan`."""
    params, step = jnp.zeros(features.shape[1]), plan.train_step(head.distance)
    return step(params, plan.optimizer.init(params), features, jnp.ones(len(features), bool))[0]


class _HeadPlans:
    """How a head is trained on features of shape ``(n, features)``, from keys of its ``number``.

    All seeds of a run share these keys.
    """

    def __init__(self, shape: tuple[int, int], epsilon: float, delta: float, share: float, number: int):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(2_000), number))
        self._mean = head.mean_plan(*shape, epsilon=epsilon, delta=delta, key=keys[0])
        budget = {"epsilon": share * epsilon, "delta": delta, "earlier": self._mean.event}
        self._plan = head.plan(shape[0], key=keys[1], **budget)
        self.event = dp_accounting.ComposedDpEvent([self._mean.event, self._plan.event])

    def learn(self, features: jax.Array, labels: jax.Array) -> Any:
        """The state of a `bert.Head` trained on them."""
        own = bert.Head(features.shape[1], CLASSES, rngs=nnx.Rngs(0))
        own.mean[...] = _mean(self._mean, features)
        loss_fn, params = head.loss_and_params(own)
        step, drawn = self._plan.train_step(loss_fn), [self._plan.sampler.drawn(t) for t in range(self._plan.steps)]

        def one(carry: Any, batch: Any) -> tuple[Any, None]:
            rows, mask = batch
            return step(*carry, ((features[rows],), labels[rows]), mask)[:2], None

        batches = jax.tree.map(jnp.asarray, padded(drawn, max(len(rows) for rows in drawn)))
        (params, _), _ = jax.lax.scan(one, (params, self._plan.optimizer.init(params)), batches)
        nnx.update(own, params)
        return nnx.state(own)
