"""Fine-tunes a pretrained Transformer on the sentiment of film reviews within a privacy budget.

    python examples/fine_tune_transformer.py --epsilon 8 --directory runs/reviews

Training has three stages within one budget: a head on the frozen encoder, then adapters in its upper blocks
(``--train bias`` or ``all``: other parts), then a new head on what the encoder gives now (``--train head``: one head,
with the whole budget). The same command resumes a run that was stopped. Needs dpopt[pretrained] and the data (a message
prints where to get them).

To train the same on several devices, or in several processes (each runs this program):

    python examples/fine_tune_transformer.py --mesh data=4,fsdp=2
    python examples/fine_tune_transformer.py --mesh data=2 --processes localhost:12355 2 0
"""

import argparse
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dpopt
import dpopt.flax
from benchmarks.data import DamagedData, MissingData
from benchmarks.pretrained import bert, head, record, tokens, weights
from dpopt import correlated, sharding
from dpopt.run import meshes
from dpopt.run.checkpoint import Checkpointer

DELTA = 1e-5  # well below one over the number of training reviews
TOGETHER = head.TOGETHER  # reviews scored at a time
CLIP, MOMENTUM = 2.0, 0.9
CLASSES = 2

# The rules after the noise, and their learning rates for each choice of trained parameters.
RULES = {
    "adam": lambda rate: [optax.adam(rate)],
    "adam_bc": lambda rate: [dpopt.scale_by_adam_bc(gamma=1e-7), optax.scale_by_learning_rate(rate)],
    "sgd": lambda rate: [optax.sgd(rate, momentum=MOMENTUM)],
    "dp2": lambda rate: [optax.sgd(rate, momentum=MOMENTUM)],  # with a delayed diagonal before the clip
}
RATES = {
    "bias": {"adam": 3e-3, "adam_bc": 3e-3, "sgd": 0.2, "dp2": 0.01},
    "lora": {"adam": 5e-3, "adam_bc": 5e-3, "sgd": 0.3, "dp2": 0.01},
    "all": {"adam": 2e-4, "adam_bc": 1e-4, "sgd": 0.02, "dp2": 1e-3},
}
STAGES = ("first-head-mean", "first-head", "encoder", "last-head-mean", "last-head")


def secret_key(options: argparse.Namespace, stage: str) -> jax.Array:
    """A secret key, unless a seed is given; a different one for each stage."""
    if options.seed is None:
        return dpopt.secure_key(shared=True)
    return jax.random.fold_in(jax.random.key(options.seed), STAGES.index(stage))


def arguments(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=8.0, help="budget of the whole run (default 8)")
    parser.add_argument("--train", choices=("lora", "bias", "head", "all"), default="lora", help="what is trained")
    parser.add_argument(
        "--reads", choices=("every", "last"), default="every", help="blocks whose outputs the head reads"
    )
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default 8)")
    parser.add_argument("--clip", choices=("flat", "layerwise"), default="flat")
    parser.add_argument("--noise", choices=("independent", "correlated"), default="independent")
    parser.add_argument("--bands", type=int, default=4, help="of correlated noise (default 4)")
    parser.add_argument("--optimizer", choices=tuple(RULES), default="adam")
    parser.add_argument("--learning-rate", type=float, help="at first; it falls to 0")
    parser.add_argument("--steps", type=int, default=100, help="on the encoder (default 100)")
    parser.add_argument("--batch-size", type=int, default=1_000, help="expected size of a batch (default 1000)")
    parser.add_argument("--microbatch", type=int, help="reviews in memory at a time (default: left to the engine)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a review that are read (default 64)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the computation and of what is not trained",
    )
    parser.add_argument("--train-reviews", type=int, help="how many to train on (default: all)")
    parser.add_argument("--test-reviews", type=int, default=2_000, help="how many to test on (default 2000)")
    parser.add_argument("--data", type=Path, help="folder with the data (default: DPOPT_DATA, then ./data)")
    parser.add_argument("--directory", type=Path, help="where checkpoints and the journal of the budget are kept")
    parser.add_argument("--out", type=Path, help="folder for a record of the run, beside those of earlier runs")
    parser.add_argument("--seed", type=int, help="makes the run repeatable; without it the noise key is secret")
    parser.add_argument("--mesh", help="of devices, such as data=4,fsdp=2; fsdp splits the weights, all axes the batch")
    words = "ADDRESS", "COUNT", "INDEX"
    parser.add_argument("--processes", nargs=3, metavar=words, help="of the first one; how many; number of this one")
    return parser, parser.parse_args(argv)


@dataclasses.dataclass
class Training:
    """The stages of one run, within one budget.

    Attributes:
        options: of the command.
        mesh: of devices, or None.
        model: all of it.
        part: the model, or what of it is computed in each step.
        inputs: returns the inputs of ``part`` for all reviews.
        labels: of all reviews.
        spent: the events of the stages so far.
    """

    options: argparse.Namespace
    mesh: Any
    model: bert.Classifier
    part: bert.Classifier | bert.Upper
    inputs: Callable[[], tuple[np.ndarray, ...]]
    labels: np.ndarray
    spent: list[dp_accounting.DpEvent] = dataclasses.field(default_factory=list)

    def fit_head(self, stage: str, epsilon: float) -> Any:
        """Trains a new head on what the encoder gives now; first, the mean of that is released and subtracted."""
        width = self.model.head.mean[...].size
        own = self.model.head = self.part.head = bert.Head(width, CLASSES, rngs=nnx.Rngs(0))

        @functools.cache
        def features() -> np.ndarray:
            return head.in_groups(type(self.part).features, self.part, self.inputs(), progress="features")

        fixed = {"delta": DELTA, "key": secret_key(self.options, f"{stage}-mean")}
        plan = head.mean_plan(len(self.labels), width, epsilon=self.options.epsilon, **fixed)
        mean = self._run(f"{stage}-mean", plan, head.distance, jnp.zeros(width), lambda rows: features()[rows])
        own.mean[...] = sharding.whole(mean.params)

        fixed = {"delta": DELTA, "key": secret_key(self.options, stage), "pad_to": TOGETHER}
        plan = head.plan(len(self.labels), epsilon=epsilon, earlier=self._event(), **fixed)
        loss_fn, params = head.loss_and_params(own)
        result = self._run(stage, plan, loss_fn, params, lambda rows: ((features()[rows],), self.labels[rows]))
        nnx.update(own, sharding.whole(result.params))
        return result

    def fit_encoder(self, accuracy: Callable[[], float]) -> Any:
        """Trains what the options say, and prints the accuracy on the way."""
        loss_fn, params = dpopt.flax.nnx_loss(self.part, head.mean_loss, wrt=bert.trained(self.options.train, 0))
        plan = self._plan()
        print(plan.summary(params))

        def score(params: Any) -> float:
            nnx.update(self.part, sharding.whole(params))
            return accuracy()

        def rows(which: np.ndarray) -> Any:
            return tuple(x[which] for x in self.inputs()), self.labels[which]

        watch = {"eval_fn": score, "eval_every": max(5, self.options.steps // 3)}
        result = self._run("encoder", plan, loss_fn, params, rows, **watch)
        nnx.update(self.part, sharding.whole(result.params))
        return result

    def _plan(self) -> dpopt.Plan:
        """Of the encoder's training: clip, noise for the budget that the first head left, and the rule."""
        options = self.options
        clip = CLIP if options.clip == "flat" else dpopt.LayerwiseClip(CLIP)  # each matrix and vector gets a share
        correlate = options.noise == "correlated"
        builder = dpopt.Builder(
            num_examples=len(self.labels),
            expected_batch_size=options.batch_size,
            steps=options.steps,
            key=secret_key(options, "encoder"),
            sampling="cyclic_poisson" if correlate else "poisson",
            parts=options.bands if correlate else None,
            pad_to=options.microbatch or TOGETHER,
        )
        if correlate:  # later noise partly cancels earlier noise; batches come from parts of the data in turn
            falling = correlated.workload(
                options.steps, momentum=MOMENTUM, learning_rate=lambda t: 1 - t / options.steps
            )
            strategy = correlated.optimized_banded(options.bands, steps=options.steps, workload=falling)
            builder = builder.correlate(strategy)
        if options.optimizer == "dp2":
            builder = builder.precondition(dpopt.delayed_moments(delay=max(1, options.steps // 8), eps=1e-3))
        rate = options.learning_rate or RATES[options.train][options.optimizer]
        rule = RULES[options.optimizer](optax.linear_schedule(rate, 0.0, options.steps))
        budget = {"epsilon": head.ENCODER_SHARE * options.epsilon, "delta": DELTA, "earlier": self._event()}
        return builder.clip(clip).budget(**budget).then(*rule).build()

    def _event(self) -> dp_accounting.DpEvent:
        return dp_accounting.ComposedDpEvent(list(self.spent))

    def _run(self, stage: str, plan: dpopt.Plan, *args: Any, **watch: Any) -> Any:
        """Runs one stage, with its own subdirectory if a directory is given."""
        with contextlib.ExitStack() as stack:
            checkpointer = None
            if self.options.directory is not None:
                checkpointer = stack.enter_context(Checkpointer(self.options.directory / stage, every=5))
            run = plan.run if self.mesh is None else functools.partial(meshes.train_on, self.mesh, plan)
            result = run(*args, microbatch_size=self.options.microbatch, checkpointer=checkpointer, **watch)
        self.spent.append(result.ledger.event)
        return result


def main(argv: list[str] | None = None) -> None:
    parser, options = arguments(argv)
    try:
        mesh = meshes.start(options.mesh, options.processes)
    except ValueError as error:
        parser.error(str(error))

    try:
        files = weights.folder(options.data)
        reviews = tokens.reviews(options.data, files, options.length)
    except (MissingData, DamagedData) as error:
        parser.exit(2, f"{error}\n")
    order = np.random.default_rng(0).permutation(len(reviews.train_labels))[: options.train_reviews]
    ids, mask, labels = reviews.train.ids[order], reviews.train.mask[order], reviews.train_labels[order]
    tested = np.random.default_rng(1).permutation(len(reviews.test_labels))[: options.test_reviews]

    # Trained parameters stay in float32: private updates are small, and a coarser type would round them away.
    kept = "float32" if options.train in ("all", "bias") else options.dtype
    body, config = weights.load(files, dtype=options.dtype, param_dtype=kept)
    model = bert.Classifier(body, config.hidden_size, CLASSES, reads=options.reads, rngs=nnx.Rngs(0))
    if options.train == "lora":
        bert.adapt(model.body, options.rank, rngs=nnx.Rngs(1))
    # Outputs of frozen blocks are computed once, and only if they are needed.
    part, inputs = model, lambda: (ids, mask)
    if options.train in ("lora", "bias"):
        part = bert.Upper(model)
        below = functools.cache(lambda: head.in_groups(bert.below, body, (ids, mask), progress="frozen blocks"))
        inputs = lambda: (*below(), mask)  # noqa: E731

    began, scores = time.monotonic(), []
    predict = nnx.jit(lambda model, ids, mask: jnp.argmax(model(ids, mask), -1))

    def accuracy() -> float:
        groups = np.array_split(tested, -(-len(tested) // TOGETHER))
        right = [predict(model, reviews.test.ids[g], reviews.test.mask[g]) == reviews.test_labels[g] for g in groups]
        scores.append(float(np.mean(np.concatenate(right))))
        print(f"test accuracy {scores[-1]:.3f}", flush=True)
        return scores[-1]

    training = Training(options, mesh, model, part, inputs, labels)
    if options.train == "head":
        result = training.fit_head("first-head", options.epsilon)
    else:
        training.fit_head("first-head", head.FIRST_SHARE * options.epsilon)
        accuracy()
        head.soften(model.head)
        training.fit_encoder(accuracy)
        result = training.fit_head("last-head", options.epsilon)
    reached = accuracy()
    if options.out is not None and jax.process_index() == 0:
        seconds = time.monotonic() - began
        record.add(options.out, vars(options), scores, result.epsilon(delta=DELTA), DELTA, seconds)
    print(f"epsilon {result.epsilon(delta=DELTA):.2f} at delta {DELTA:g}, test accuracy {reached:.3f}")
    print(result.statement(delta=DELTA))


if __name__ == "__main__":
    main()
