"""MovieLens with privacy for a user and for a rating: the price of one clip per person, with 943 people.

Both train the same film biases on the same ratings, in full batches. The learning rate is the best of three on ratings
held out from training, a choice that epsilon does not cover.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arguments, records
from benchmarks.data import ratings
from benchmarks.report import summaries
from benchmarks.utility import runs

EPSILONS = 1.0, 3.0, 8.0
RATES = 0.02, 0.1, 0.5
STEPS = 60
UNITS: dict[str, dict[str, Any]] = {
    "a rating": {},
    "a user, 20 ratings each": {"max_ratings": 20},
    "a user, 100 ratings each": {"max_ratings": 100},
}


def setting(unit: str, epsilon: float, rate: float) -> runs.Setting:
    """DP-Adam in full batches."""
    options = UNITS[unit]
    return runs.Setting(
        task="movielens-films",
        task_options=options,
        method="DP-Adam",
        options={"learning_rate": rate, "decay_to": 0.0},
        epsilon=epsilon,
        delta=1e-4 if options else 1e-6,  # below one over the number of users or ratings
        steps=STEPS,
        label=unit,
    )


def without_privacy(where: Path | None = None) -> dict[str, float]:
    """The errors of two predictions: every film's mean rating, as if it were public, and the middle of the scale."""
    split = ratings.load(where)
    films, y = split.train_x[:, 1], split.train_y
    counts = np.bincount(films, minlength=ratings.ITEMS)
    means = (np.bincount(films, y, ratings.ITEMS) + 3.0) / (counts + 1)  # near the middle for a rare film
    errors = {"means": means[split.test_x[:, 1]] - split.test_y, "middle": 3.0 - split.test_y}
    return {name: float(np.mean(np.square(e))) for name, e in errors.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.count(parser, "--seeds", 3, "seeds of every row (default 3)")
    arguments.data(parser)
    arguments.out(parser)


def run(options: argparse.Namespace) -> None:
    main(options.out, options.seeds, options.data)


def main(out: Path, seeds: int = 3, where: Path | None = None) -> dict[str, Any]:
    """Trains every unit at every epsilon; prints a table and writes ``users.json`` to ``out``."""
    rows = []
    for unit in UNITS:
        for epsilon in EPSILONS:
            tried = []
            for rate in RATES:
                plain = setting(unit, epsilon, rate)
                held_out = dataclasses.replace(plain, task_options=plain.task_options | {"validate": True})
                (found,) = runs.Program(held_out, where=where).train([100])
                tried.append((found["score"], rate))
            chosen = setting(unit, epsilon, min(tried)[1])
            found = runs.Program(chosen, where=where).train(range(seeds))
            row = summaries.summarize(found) | {"target_epsilon": epsilon, "unit": unit}
            rows.append(row)
            print(f"{unit:<26} epsilon {epsilon:g}: {summaries.spread(row)}", flush=True)
    content = {"environment": records.environment(), "rows": rows, "films_known": without_privacy(where)}
    records.write_json(out / "users.json", content)
    return content
