"""What tuning costs: the same settings on IMDB, tuned unpaid, paid, and not at all, at the same stated epsilon.

DP-SGD with momentum on `frontier`'s features and steps; the learning rate and the clip norm are tuned. Scores are on
the test reviews, over seeds. The table shows the epsilon that a way states beside what it spent, by Renyi divergences.
"""

import argparse
import dataclasses
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import arguments, records
from benchmarks.report import figures
from benchmarks.utility import closed_forms, runs
from benchmarks.utility.suites import frontier
from dpopt import accounting, tuning
from dpopt.privacy import Privacy, Query

EPSILONS = (1.0, 3.04)
DELTA = 1e-5
RATES = tuple(0.5 * 4.0**n for n in range(6))
CLIPS = (0.05, 0.5)  # rows have norm 1: the first clips nearly all, the second nearly none
SETTINGS = [{"learning_rate": rate, "l2_clip_norm": clip} for rate in RATES for clip in CLIPS]
TRIALS = tuning.NumTrials(mean=12.0, shape=0.0)
SCORE_NOISE = 60.0  # in reviews: a quarter of a percent of the private ones


@functools.lru_cache(maxsize=4)
def _program(noise_multiplier: float, clip: float, where: Path | None) -> runs.Program:
    setting = runs.Setting(
        task="imdb",
        task_options=frontier.REVIEWS,
        method="combination",
        options={"after": {"kind": "sgd", "momentum": 0.9}, "learning_rate": 1.0, "decay_to": 0.0},
        l2_clip_norm=clip,
        noise_multiplier=noise_multiplier,
        delta=DELTA,
        steps=frontier.STEPS,
    )
    return runs.Program(setting, where=where)


class Trials:
    """Runs at one noise multiplier, each of which returns its parameters."""

    def __init__(self, noise_multiplier: float, where: Path | None):
        self.noise_multiplier, self._where = noise_multiplier, where
        self.task: Any = _program(noise_multiplier, CLIPS[-1], where).task

    def train(self, setting: dict[str, float], key: jax.Array) -> Any:
        """The parameters of one run."""
        program = _program(self.noise_multiplier, setting["l2_clip_norm"], self._where)
        options = program.setting.options | {"learning_rate": setting["learning_rate"]}
        seed = int(jax.random.bits(key, dtype=jnp.uint32)) >> 1
        program.train([seed], setting=dataclasses.replace(program.setting, options=options))
        return jax.tree.map(lambda x: x[0], program.trained)

    def right(self, params: Any) -> np.ndarray:
        """Whether each private review is classified correctly."""
        rows, _ = self.task.all_examples()
        return np.asarray((closed_forms.logits(params, rows, frontier.REVIEWS["one"]) > 0) == (rows.labels > 0.5))

    def test_score(self, params: Any) -> float:
        """Accuracy on the test reviews."""
        return float(self.task.score(params))


def _event(noise_multiplier: float) -> dp_accounting.DpEvent:
    """The event of one run: every step uses all reviews."""
    step = Privacy((Query(noise_multiplier),)).step_event()
    return dp_accounting.SelfComposedDpEvent(step, frontier.STEPS)


def _times(event: dp_accounting.DpEvent, count: int) -> dp_accounting.DpEvent:
    return dp_accounting.SelfComposedDpEvent(event, count)


def _alone(epsilon: float, count: int = 1) -> float:
    """The noise multiplier of ``count`` runs that together spend epsilon."""
    return accounting.calibrate_event(
        lambda sigma: _times(_event(sigma), count), epsilon=epsilon, delta=DELTA, accountant="rdp"
    )


def blind(epsilon: float, where: Path | None, key: jax.Array) -> tuple[float, dp_accounting.DpEvent]:
    """One run with a random setting."""
    trials = Trials(_alone(epsilon), where)
    setting = SETTINGS[int(jax.random.randint(key, (), 0, len(SETTINGS)))]
    return trials.test_score(trials.train(setting, key)), _event(trials.noise_multiplier)


def _best_of_all(trials: Trials, key: jax.Array) -> float:
    found = [trials.train(setting, jax.random.fold_in(key, n)) for n, setting in enumerate(SETTINGS)]
    return trials.test_score(max(found, key=lambda params: trials.right(params).mean()))


def unpaid(epsilon: float, where: Path | None, key: jax.Array) -> tuple[float, dp_accounting.DpEvent]:
    """Every setting at the full epsilon each; the best on the private reviews, by scores without noise.

    The scores are not in the event: without noise, no event describes them.
    """
    trials = Trials(_alone(epsilon), where)
    return _best_of_all(trials, key), _times(_event(trials.noise_multiplier), len(SETTINGS))


def composed(epsilon: float, where: Path | None, key: jax.Array) -> tuple[float, dp_accounting.DpEvent]:
    """Every setting, with enough noise for all of them together, and the best by noisy scores."""
    score = dp_accounting.GaussianDpEvent(SCORE_NOISE)

    def event(sigma: float) -> dp_accounting.DpEvent:
        return _times(dp_accounting.ComposedDpEvent([_event(sigma), score]), len(SETTINGS))

    sigma = accounting.calibrate_event(event, epsilon=epsilon, delta=DELTA, accountant="rdp")
    trials = Trials(sigma, where)
    private = _private_score(trials)
    found = [trials.train(setting, jax.random.fold_in(key, n)) for n, setting in enumerate(SETTINGS)]
    scores = [private(params, jax.random.fold_in(key, 1_000 + n)) for n, params in enumerate(found)]
    return trials.test_score(found[int(np.argmax(scores))]), event(sigma)


def selected(epsilon: float, where: Path | None, key: jax.Array) -> tuple[float, dp_accounting.DpEvent]:
    """The best of a random number of runs, by noisy scores (`dpopt.tuning`)."""
    rough = tuning.PrivateScore(per_example=np.zeros, num_examples=1, noise_multiplier=SCORE_NOISE)
    sigma = tuning.calibrate(_event, num_trials=TRIALS, score=rough, epsilon=epsilon, delta=DELTA)
    trials = Trials(sigma, where)
    found = tuning.repeat_and_select(
        trials.train,
        SETTINGS,
        event=_event(sigma),
        score=_private_score(trials),
        num_trials=TRIALS,
        key=key,
        num_examples=trials.task.num_examples,
    )
    return trials.test_score(found.value), found.ledger.event


def _private_score(trials: Trials) -> tuning.PrivateScore:
    return tuning.PrivateScore(
        per_example=trials.right, num_examples=trials.task.num_examples, noise_multiplier=SCORE_NOISE
    )


WAYS: dict[str, Callable[..., tuple[float, dp_accounting.DpEvent]]] = {
    "one run, setting drawn blindly": blind,
    "all settings, unpaid": unpaid,
    "all settings, each with its share of the budget": composed,
    "repeat and select": selected,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.count(parser, "--seeds", 5, "of every way and epsilon (default 5)")
    arguments.data(parser)
    arguments.out(parser)


def run(options: argparse.Namespace) -> None:
    main(options.out, options.seeds, options.data)


def main(out: Path, seeds: int, where: Path | None = None) -> dict[str, Any]:
    """Compares the ways at every epsilon and writes ``tuning.json``, whose rows are kept if the settings match."""
    path = out / "tuning.json"
    content = {
        "environment": records.environment(),
        "settings": SETTINGS,
        "num_trials": dataclasses.asdict(TRIALS),
        "score_noise": SCORE_NOISE,
        "delta": DELTA,
        "steps": frontier.STEPS,
    }
    stored = json.loads(path.read_text()) if path.exists() else {}
    is_same = {k: v for k, v in stored.items() if k != "rows"} == content
    rows: list[dict[str, Any]] = stored["rows"] if is_same else []
    done = {(row["way"], row["stated_epsilon"], len(row["scores"])) for row in rows}
    for epsilon in EPSILONS:
        for way in WAYS:
            if (way, epsilon, seeds) in done:
                continue
            row = _row(way, epsilon, seeds, where)
            rows = [r for r in rows if (r["way"], r["stated_epsilon"]) != (way, epsilon)] + [row]
            records.write_json(path, content | {"rows": rows})
            print(f"{way:<50}{epsilon:>6g}{row['spent_epsilon']:>8.2f}{row['mean']:>8.3f}", flush=True)
    print(f"Wrote {path}.")
    return content | {"rows": rows}


def _row(way: str, epsilon: float, seeds: int, where: Path | None) -> dict[str, Any]:
    keys = [jax.random.fold_in(jax.random.key(4_000), seed) for seed in range(seeds)]
    found = [WAYS[way](epsilon, where, key) for key in keys]
    scores = [score for score, _ in found]
    return {
        "way": way,
        "stated_epsilon": epsilon,
        "spent_epsilon": accounting.epsilon_of_event(found[0][1], delta=DELTA, accountant="rdp"),
        "scores": scores,
        "mean": statistics.mean(scores),
        "std": statistics.stdev(scores) if seeds > 1 else None,
    }


def markdown(content: dict[str, Any]) -> str:
    """The table for RESULTS.md."""
    return figures.tuning_table(content)
