"""Trains a small Flax model on real digits under a stated (epsilon, delta), and beside it the same without privacy."""

import argparse
import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import dpopt
from benchmarks import arguments, data, records
from benchmarks.cost import models
from dpopt.flax import nnx_loss

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EPSILONS = (1.0, 3.0, 8.0)
DELTA = 1e-4  # below 1 / 1437, the number of training images
EXPECTED_BATCH_SIZE = 256
STEPS = 120
STEPS_PER_CALL = 20  # between two moves of the progress bar
L2_CLIP_NORM = 1.0
LEARNING_RATES = {"DP-SGD": 0.4, "DP-Adam": 5e-3}
# Without clipping, gradients are larger, so the twins have rates of their own.
LEARNING_RATES_NOT_PRIVATE = {"DP-SGD": 0.1, "DP-Adam": 5e-3}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table."""

    method: str
    epsilon: float  # the target; infinity for a twin without privacy

    def optimizer(self, noise_multiplier: float, key: jax.Array) -> dpopt.PrivateOptimizer:
        private = math.isfinite(self.epsilon)
        rates = LEARNING_RATES if private else LEARNING_RATES_NOT_PRIVATE
        decay = optax.linear_schedule(rates[self.method], 0.0, STEPS)
        common = dict(
            l2_clip_norm=L2_CLIP_NORM if private else math.inf,
            noise_multiplier=noise_multiplier,
            expected_batch_size=EXPECTED_BATCH_SIZE,
            key=key,
        )
        if self.method == "DP-SGD":
            return dpopt.dp_sgd(decay, momentum=0.9, **common)
        return dpopt.dp_adam(decay, **common)


def train(setting: Setting, split: data.Split, seeds: int, advance: Any) -> dict[str, Any]:
    """Trains one setting for all seeds at once and returns its record."""
    samplers = [dpopt.PoissonSampler(len(split.train_x), EXPECTED_BATCH_SIZE, seed=s, pad_to=64) for s in range(seeds)]
    scheme = samplers[0].scheme
    noise_multiplier = 0.0
    if math.isfinite(setting.epsilon):
        noise_multiplier = dpopt.calibrate(
            epsilon=setting.epsilon, delta=DELTA, sampling_prob=scheme.sampling_prob, steps=STEPS
        )

    model = models.SmallCNN(rngs=nnx.Rngs(0))
    loss_fn, _ = nnx_loss(model, lambda m, b: optax.softmax_cross_entropy_with_integer_labels(m(b["x"]), b["y"]).mean())
    fresh = [nnx.as_pure(nnx.state(models.SmallCNN(rngs=nnx.Rngs(s)), nnx.Param)) for s in range(seeds)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *fresh)
    keys = jax.random.split(jax.random.key(2_000), seeds)  # a noise key for each seed, used for nothing else
    images, labels = jnp.asarray(split.train_x), jnp.asarray(split.train_y)

    def run_one(params, state, key, batches):
        step = dpopt.make_train_step(loss_fn, setting.optimizer(noise_multiplier, key))

        def one(carry, batch):
            rows = {"x": images[batch.indices], "y": labels[batch.indices]}
            params, state, _ = step(*carry, rows, batch.mask)  # metrics are not private and not used
            return (params, state), None

        return jax.lax.scan(one, (params, state), batches)[0]

    state = jax.vmap(lambda p, k: setting.optimizer(noise_multiplier, k).init(p))(params, keys)
    # Seeds run one after another: under vmap, convolutions become grouped ones, which are four times as slow.
    run = jax.jit(lambda *args: jax.lax.map(lambda seed: run_one(*seed), args), donate_argnums=(0, 1))
    batches = [s.batches(0, STEPS) for s in samplers]
    size = max(b.mask.shape[1] for b in batches)  # all seeds have the same shape
    batches = [dpopt.sampling.Batch(*(np.pad(x, ((0, 0), (0, size - x.shape[1]))) for x in b)) for b in batches]
    batches = jax.tree.map(lambda *x: np.stack(x), *batches)

    started = time.perf_counter()
    for t in range(0, STEPS, STEPS_PER_CALL):
        now = jax.tree.map(lambda x, t=t: x[:, t : t + STEPS_PER_CALL], batches)
        params, state = jax.block_until_ready(run(params, state, keys, now))
        advance()
    seconds = time.perf_counter() - started

    @jax.jit
    def accuracy(params):
        logits = nnx.merge(nnx.graphdef(model), params)(jnp.asarray(split.test_x))
        return jnp.mean(jnp.argmax(logits, -1) == jnp.asarray(split.test_y))

    accuracies = [float(accuracy(jax.tree.map(lambda x, s=s: x[s], params))) for s in range(seeds)]
    optimizer = setting.optimizer(noise_multiplier, jax.random.key(0))
    event = dpopt.privacy_event(optimizer, sampling=scheme, steps=STEPS)
    return {
        "method": setting.method if math.isfinite(setting.epsilon) else setting.method.removeprefix("DP-"),
        "target_epsilon": setting.epsilon if math.isfinite(setting.epsilon) else None,
        "epsilon": dpopt.epsilon_of_event(event, delta=DELTA) if noise_multiplier else None,
        "delta": DELTA,
        "relation": "add or remove one example",
        "noise_multiplier": noise_multiplier,
        "l2_clip_norm": L2_CLIP_NORM if noise_multiplier else None,
        "steps": STEPS,
        "expected_batch_size": EXPECTED_BATCH_SIZE,
        "num_examples": len(split.train_x),
        "test_accuracies": accuracies,
        "mean": float(np.mean(accuracies)),
        "std": float(np.std(accuracies, ddof=1)) if seeds > 1 else None,
        "seconds": seconds,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """The records as a table for the terminal."""
    view = Table(title=f"scikit-learn digits, small CNN, {rows[0]['steps']} steps, Poisson batches of about 256")
    for column in ("method", "epsilon spent", "delta", "noise multiplier", "test accuracy"):
        view.add_column(column, justify="left" if column == "method" else "right")
    for r in rows:
        spread = f" ± {100 * r['std']:.1f}" if r["std"] is not None else ""
        private = r["epsilon"] is not None
        view.add_row(
            r["method"],
            f"{r['epsilon']:.3f}" if private else "not private",
            f"{r['delta']:g}" if private else "",
            f"{r['noise_multiplier']:.3f}" if private else "",
            f"{100 * r['mean']:.1f} %{spread}",
        )
    return view


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy against epsilon, with the twins as dashed lines."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for method, color, marker in (("DP-SGD", "#0072B2", "o"), ("DP-Adam", "#D55E00", "s")):  # colour-blind safe
        private = [r for r in rows if r["method"] == method]
        axes.errorbar(
            [r["epsilon"] for r in private],
            [100 * r["mean"] for r in private],
            [100 * (r["std"] or 0) for r in private],
            label=method,
            color=color,
            marker=marker,
            capsize=3,
        )
        (twin,) = (r for r in rows if r["method"] == method.removeprefix("DP-"))
        label = f"{twin['method']} (not private)"
        axes.axhline(100 * twin["mean"], color=color, linestyle="--", linewidth=1, label=label)
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
    axes.minorticks_off()
    axes.set_xlabel(f"epsilon spent (delta = {DELTA:g}, add or remove one image)")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title("Digits: accuracy bought by privacy budget")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.count(parser, "--seeds", 3, "runs per setting (default 3)")
    arguments.out(parser, "folder for JSON and plot")


def run(options: argparse.Namespace) -> None:
    main(options.out, options.seeds)


def main(out: Path, seeds: int) -> list[dict[str, Any]]:
    """Runs everything, prints the table, writes ``quickstart.json`` and ``quickstart.png`` to ``out``."""
    console = Console()
    split = data.digits()
    settings = [Setting(m, e) for m in ("DP-SGD", "DP-Adam") for e in (*EPSILONS, math.inf)]
    columns = TextColumn("{task.description:<26}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    rows = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(settings) * STEPS // STEPS_PER_CALL)
        for s in settings:
            target = f"epsilon {s.epsilon:g}" if math.isfinite(s.epsilon) else "not private"
            progress.update(task, description=f"{s.method} ({target})")
            rows.append(train(s, split, seeds, lambda: progress.advance(task)))
    console.print(table(rows))
    records.write_json(out / "quickstart.json", {"environment": records.environment(), "runs": rows})
    plot(rows, out / "quickstart.png")
    console.print(f"Wrote {out / 'quickstart.json'} and {out / 'quickstart.png'}.")
    return rows
