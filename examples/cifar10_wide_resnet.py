"""Trains a Wide-ResNet-16-4 on CIFAR-10 within a privacy budget, as in De et al. (2022).

    python examples/cifar10_wide_resnet.py --epsilon 1 --directory runs/cifar10

Batches of 4,096, sixteen augmentations of every image averaged before the clip, a moving average of the parameters; 875
steps at epsilon 1, 2,500 at 8. This needs an accelerator: ``--predict`` times one ordinary gradient and prints what the
run would take on this machine, without training. The same command resumes a run that was stopped. It runs on one
device. Needs dpopt[benchmarks,checkpoint] and the official archive (a message prints where to get it).
"""

import argparse
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpopt
from benchmarks import cifar10_recipe as recipe
from benchmarks.cost import predict
from benchmarks.data import DamagedData, MissingData, Split, cifar10

TESTED_TOGETHER = 500  # images


def padded_to(microbatch: int, batch_size: float) -> int:
    """Batches are padded to a multiple of this: whole microbatches, about an eighth of a batch, for few shapes."""
    return microbatch * max(1, round(batch_size / 8 / microbatch))


def make_plan(options: argparse.Namespace, num_examples: int) -> dpopt.Plan:
    """Clip, noise for the budget, gradient descent at a constant rate, averaging."""
    return (
        dpopt.Builder(
            num_examples=num_examples,
            expected_batch_size=options.batch_size,
            steps=options.steps,
            key=dpopt.secure_key() if options.seed is None else jax.random.key(options.seed),
            pad_to=padded_to(options.microbatch, options.batch_size),
        )
        .clip(recipe.CLIP_NORM)
        .budget(epsilon=options.epsilon, delta=options.delta)
        .then(optax.sgd(options.learning_rate))
        .average(recipe.AVERAGE)
        .build()
    )


def accuracy_of(model: Any, split: Split) -> Callable[[Any], float]:
    """Returns a function from parameters to test accuracy. `dpopt.train` calls it with the averaged parameters."""
    forward = jax.jit(lambda params, images: jnp.argmax(model.apply({"params": params}, recipe.scaled(images)), -1))
    parts = np.array_split(np.arange(len(split.test_y)), -(-len(split.test_y) // TESTED_TOGETHER))

    def accuracy(params: Any) -> float:
        right = [np.asarray(forward(params, split.test_x[part])) == split.test_y[part] for part in parts]
        return float(np.mean(np.concatenate(right)))

    return accuracy


def predicted(options: argparse.Namespace, num_examples: int, loss_fn: Callable[..., Any], params: Any) -> predict.Cost:
    """Predicts the cost of the run from an ordinary gradient of a microbatch, timed on this machine."""
    batch = recipe.noise_batch(options.microbatch)
    rows, pad = num_examples, padded_to(options.microbatch, options.batch_size)
    sizes = np.random.default_rng(0).binomial(rows, options.batch_size / rows, 1_000)
    microbatches = float(np.mean(np.maximum(1, -(-sizes // pad)))) * pad / options.microbatch
    return predict.cost(loss_fn, params, batch, microbatches=microbatches, steps=options.steps)


def recorded() -> str:
    """The recorded ratios for this network, to judge a prediction by."""
    rows = {row["family"]: row["ratio"] for row in json.loads(predict.SPEED.read_text())["runs"]}
    ratio = next(ratio for name, ratio in rows.items() if name.startswith("Wide-ResNet-16-4"))
    return (
        f"for comparison, the speed table has this network on two cores, 32 images and no augmentation: a clipped "
        f"gradient took {ratio['ghost whole']:.2f} times an ordinary one, {ratio['auto']:.2f} by the engine that is "
        "taken by default"
    )


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=1.0, help="budget of the whole run (default 1)")
    parser.add_argument("--delta", type=float, default=recipe.DELTA, help=f"(default {recipe.DELTA:g})")
    parser.add_argument("--steps", type=int, help="(default: 875 at epsilon 1 to 2,500 at 8)")
    parser.add_argument("--batch-size", type=int, default=recipe.BATCH_SIZE, help="expected images (default 4096)")
    parser.add_argument("--multiplicity", type=int, default=recipe.MULTIPLICITY, help="augmentations (default 16)")
    parser.add_argument("--learning-rate", type=float, default=recipe.LEARNING_RATE, help="constant (default 2)")
    parser.add_argument("--microbatch", type=int, default=64, help="images processed together (default 64)")
    parser.add_argument(
        "--depth", type=int, default=16, help="of the network: 4 more than a multiple of 6 (default 16)"
    )
    parser.add_argument("--width", type=int, default=4, help="of the network (default 4)")
    parser.add_argument("--data", type=Path, help="folder with the data (default: DPOPT_DATA, then ./data)")
    parser.add_argument("--directory", type=Path, help="where checkpoints and the journal of the budget are kept")
    parser.add_argument("--save-every", type=int, default=25, help="steps between two checkpoints (default 25)")
    parser.add_argument("--predict", action="store_true", help="print what the run would take, and stop")
    parser.add_argument("--seed", type=int, help="for tests; without it noise and batches are secret")
    options = parser.parse_args(argv)
    for name in ("steps", "batch_size", "multiplicity", "microbatch", "width", "save_every"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1; got {value}")
    if options.depth < 10 or options.depth % 6 != 4:
        parser.error(f"--depth must be 10, 16, 22, ...; got {options.depth}")
    if options.steps is None:
        try:
            options.steps = recipe.steps_for(options.epsilon)
        except ValueError as error:
            parser.error(str(error))
    return options


def main(argv: list[str] | None = None) -> None:
    options = parsed(argv)
    try:
        split = cifar10.load(options.data)
    except (MissingData, DamagedData) as error:
        raise SystemExit(str(error)) from None
    loss_fn, params = recipe.loss_and_params(options.depth, options.width, options.multiplicity)
    if options.predict:
        print(f"{predicted(options, len(split.train_y), loss_fn, params)}\n{recorded()}")
        return
    plan = make_plan(options, len(split.train_y))
    print(plan.summary(params))
    with contextlib.ExitStack() as stack:
        checkpointer = None
        if options.directory is not None:
            from dpopt.run.checkpoint import Checkpointer

            checkpointer = stack.enter_context(Checkpointer(options.directory, every=options.save_every))
        result = plan.run(
            loss_fn,
            params,
            (split.train_x, split.train_y),
            microbatch_size=options.microbatch,
            checkpointer=checkpointer,
            eval_fn=accuracy_of(recipe.network(options.depth, options.width), split),
            eval_every=max(1, options.steps // 10),
        )
    for step, value in result.history:
        print(f"after {step} steps: test accuracy {value:.3f}, by the averaged parameters")
    spent, accuracy = result.epsilon(delta=options.delta), result.history[-1][1]
    print(f"epsilon {spent:.2f} at delta {options.delta:g}, test accuracy {accuracy:.3f}")
    print(result.message)
    print(result.statement(delta=options.delta))


if __name__ == "__main__":
    main()
