"""Fine-tunes a pretrained Transformer on the sentiment of film reviews within a privacy budget.

    python examples/fine_tune_transformer.py --epsilon 8 --directory runs/reviews

Training has two stages within one budget: a head on the frozen encoder, then the head with the biases and
normalisations of the encoder (``--train lora`` or ``all``: with other parts; ``--train head``: the first stage only).
The same command resumes a run that was stopped. Needs dpopt[pretrained] and the data (a message prints where to get
them).

To train the same on several devices, or in several processes (each runs this program):

    python examples/fine_tune_transformer.py --mesh data=4,fsdp=2
    python examples/fine_tune_transformer.py --mesh data=2 --processes localhost:12355 2 0
"""

import argparse
import contextlib
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dpopt
import dpopt.flax
from benchmarks.data import DamagedData, MissingData
from benchmarks.pretrained import bert, head, tokens, weights
from benchmarks.utility import methods
from dpopt import correlated, sharding
from dpopt.run import meshes
from dpopt.run.checkpoint import Checkpointer

DELTA = 1e-5  # well below one over the number of training reviews
TOGETHER = head.TOGETHER  # reviews scored at a time
MOMENTUM = 0.9

# The rules after the noise, and their learning rates for each choice of trained parameters.
RULES = {
    "adam": lambda rate: [optax.adam(rate)],
    "adam_bc": lambda rate: [dpopt.scale_by_adam_bc(gamma=1e-7), optax.scale_by_learning_rate(rate)],
    "sgd": lambda rate: [optax.sgd(rate, momentum=MOMENTUM)],
    "dp2": lambda rate: [optax.sgd(rate, momentum=MOMENTUM)],  # with a delayed diagonal before the clip
}
RATES = {
    "bias": {"adam": 2e-3, "adam_bc": 2e-3, "sgd": 0.5, "dp2": 0.01},
    "lora": {"adam": 5e-4, "adam_bc": 5e-4, "sgd": 0.2, "dp2": 0.01},
    "all": {"adam": 2e-4, "adam_bc": 1e-4, "sgd": 0.1, "dp2": 1e-3},
}


def secret_key(options: argparse.Namespace, stage: int) -> jax.Array:
    """A secret key, unless a seed is given; a different one for each stage."""
    if options.seed is None:
        return dpopt.secure_key(shared=True)
    return jax.random.fold_in(jax.random.key(options.seed), stage)


def make_plan(options: argparse.Namespace, num_examples: int, earlier: Any) -> dpopt.Plan:
    """Clip, noise for the budget that the earlier stage left, and the rule."""
    clip = 1.0 if options.clip == "flat" else dpopt.LayerwiseClip(1.0)  # each matrix and vector gets a share
    correlate = options.noise == "correlated"
    builder = dpopt.Builder(
        num_examples=num_examples,
        expected_batch_size=options.batch_size,
        steps=options.steps,
        key=secret_key(options, 1),
        sampling="cyclic_poisson" if correlate else "poisson",
        parts=options.bands if correlate else None,
        pad_to=options.microbatch or TOGETHER,
    )
    if correlate:  # later noise partly cancels earlier noise; batches come from parts of the data in turn
        falling = correlated.workload(options.steps, momentum=MOMENTUM, learning_rate=lambda t: 1 - t / options.steps)
        builder = builder.correlate(correlated.optimized_banded(options.bands, steps=options.steps, workload=falling))
    if options.optimizer == "dp2":
        builder = builder.precondition(dpopt.delayed_moments(delay=max(1, options.steps // 8), eps=1e-3))
    rate = optax.linear_schedule(options.learning_rate or RATES[options.train][options.optimizer], 0.0, options.steps)
    stages = RULES[options.optimizer](rate) + methods.faster({"head": head.FASTER[options.train]})
    return builder.clip(clip).budget(epsilon=options.epsilon, delta=DELTA, earlier=earlier).then(*stages).build()


def train(options: argparse.Namespace, mesh: Any, stage: str, plan: dpopt.Plan, *args: Any, **watch: Any) -> Any:
    """Runs one stage, with its own subdirectory if a directory is given."""
    with contextlib.ExitStack() as stack:
        checkpointer = None
        if options.directory is not None:
            checkpointer = stack.enter_context(Checkpointer(options.directory / stage, every=5))
        run = plan.run if mesh is None else functools.partial(meshes.train_on, mesh, plan)
        return run(*args, microbatch_size=options.microbatch, checkpointer=checkpointer, **watch)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=8.0, help="budget of the whole run (default 8)")
    parser.add_argument("--train", choices=("bias", "lora", "head", "all"), default="bias", help="what is trained")
    parser.add_argument(
        "--reads", choices=("every", "last"), default="every", help="blocks whose outputs the head reads"
    )
    parser.add_argument("--head-epsilon", type=float, help="of the budget, for the first stage (default: 3/8 of it)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default 8)")
    parser.add_argument("--clip", choices=("flat", "layerwise"), default="flat")
    parser.add_argument("--noise", choices=("independent", "correlated"), default="independent")
    parser.add_argument("--bands", type=int, default=4, help="of correlated noise (default 4)")
    parser.add_argument("--optimizer", choices=tuple(RULES), default="adam")
    parser.add_argument("--learning-rate", type=float, help="at first; it falls to 0")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=1_600, help="expected size of a batch (default 1600)")
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
    parser.add_argument("--seed", type=int, help="makes the run repeatable; without it the noise key is secret")
    parser.add_argument("--mesh", help="of devices, such as data=4,fsdp=2; fsdp splits the weights, all axes the batch")
    words = "ADDRESS", "COUNT", "INDEX"
    parser.add_argument("--processes", nargs=3, metavar=words, help="of the first one; how many; number of this one")
    options = parser.parse_args(argv)
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
    model = bert.Classifier(body, config.hidden_size, 2, reads=options.reads, rngs=nnx.Rngs(0))

    predict = nnx.jit(lambda model, ids, mask: jnp.argmax(model(ids, mask), -1))

    def accuracy(part: nnx.Module, params: Any) -> float:
        nnx.update(part, sharding.whole(params))
        groups = np.array_split(tested, -(-len(tested) // TOGETHER))
        right = [predict(model, reviews.test.ids[g], reviews.test.mask[g]) == reviews.test_labels[g] for g in groups]
        found = float(np.mean(np.concatenate(right)))
        print(f"test accuracy {found:.3f}", flush=True)
        return found

    # First the head alone. The outputs of the frozen encoder are computed once, and only if they are needed.
    outputs = functools.cache(lambda: head.features(body, tokens.Texts(ids, mask), options.reads, progress=True))
    share = head.BUDGET_SHARE * options.epsilon if options.head_epsilon is None else options.head_epsilon
    share = options.epsilon if options.train == "head" else share
    plan = head.plan(len(labels), epsilon=share, delta=DELTA, key=secret_key(options, 0), pad_to=TOGETHER)
    loss_fn, params = head.loss_and_params(model.head)
    result = train(options, mesh, "head", plan, loss_fn, params, lambda rows: ((outputs()[rows],), labels[rows]))
    reached = accuracy(model.head, result.params)

    if options.train != "head":
        if options.train == "lora":
            bert.adapt(model.body, options.rank, rngs=nnx.Rngs(1))

        which = bert.trained(options.train, config.num_hidden_layers)
        loss_fn, params = dpopt.flax.nnx_loss(model, head.mean_loss, wrt=which)
        plan = make_plan(options, len(labels), earlier=result.ledger.event)
        print(plan.summary(params))
        watch = dict(eval_fn=functools.partial(accuracy, model), eval_every=max(5, options.steps // 4))
        result = train(options, mesh, options.train, plan, loss_fn, params, ((ids, mask), labels), **watch)
        scores = dict(result.history)
        is_scored = scores and max(scores) == options.steps
        reached = scores[options.steps] if is_scored else accuracy(model, result.params)

    print(f"epsilon {result.epsilon(delta=DELTA):.2f} at delta {DELTA:g}, test accuracy {reached:.3f}")
    print(result.statement(delta=DELTA))


if __name__ == "__main__":
    main()
