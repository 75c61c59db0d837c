"""Contenders of the frontier that pay for their tuning: epsilon covers everything that led to the released parameters.

A random number of candidates is trained on four fifths of the training examples. Each is scored on the last fifth with
noise, and the best is released (`dpopt.tuning.repeat_and_select`). The noise of a trial is so large that the whole
search costs what the other contenders may spend on their last run alone.
"""

import dataclasses
from pathlib import Path
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.utility import runs, sweeps
from benchmarks.utility.suites import frontier
from dpopt import accounting, events, tuning

TRIALS = tuning.NumTrials(mean=float(frontier.BUDGET), shape=0.0)
SCORE_SHARE = 0.1  # the score's share of a trial's total 1 / noise_multiplier**2
WORST_ERROR = 2.0  # stars: errors are clipped to this, so that scores lie between 0 and 1


def sweep(
    contest: frontier.Contest, epsilon: float, seeds: range, *, out: Path, where: Path | None
) -> list[dict[str, Any]]:
    """A record for each seed; seeds with a record in ``out`` are not run again."""
    found, search = [], None
    for seed in seeds:
        path = out / f"paid-{contest.candidates(epsilon, validate=True)[0].name(seed)}"
        record = sweeps.stored(path)
        if record is None:
            search = search or Search(contest, epsilon, where)
            record = search.run(seed)
            records.write_json(path, record)
        found.append(record)
    return found


class Search:
    """The candidates of a contender, their noise, and how they are scored."""

    def __init__(self, contest: frontier.Contest, epsilon: float, where: Path | None):
        self._where = where
        candidates = contest.candidates(epsilon, validate=True)
        probe = dataclasses.replace(candidates[0], epsilon=None, noise_multiplier=1.0)
        self._task: Any = runs.Program(probe, where=where).task

        def event_of(sigma: float) -> dp_accounting.DpEvent:
            return runs.event_of(probe, self._task, sigma)

        self._steps = probe.steps
        self._held_out = len(self._quality(self._task.init(0)))

        def whole(sigma: float) -> dp_accounting.DpEvent:
            return TRIALS.event(dp_accounting.ComposedDpEvent([event_of(sigma), self._score(sigma).event]))

        sigma = accounting.calibrate_event(whole, epsilon=epsilon, delta=probe.delta, accountant="rdp")
        self._event, self._scored = event_of(sigma), self._score(sigma)
        self._candidates = [dataclasses.replace(c, epsilon=None, noise_multiplier=sigma) for c in candidates]

    def _score(self, sigma: float) -> tuning.PrivateScore:
        """The score of trials whose steps, each on all examples, have noise multiplier ``sigma``."""
        noise = sigma / (self._steps * SCORE_SHARE / (1 - SCORE_SHARE)) ** 0.5
        return tuning.PrivateScore(per_example=self._quality, num_examples=self._held_out, noise_multiplier=noise)

    def _quality(self, params: Any) -> np.ndarray:
        each = np.asarray(self._task.each_score(params), np.float64)
        return each if self._task.higher_is_better else 1 - np.minimum(each / WORST_ERROR**2, 1)

    def run(self, seed: int) -> dict[str, Any]:
        """The record of one search, like those of `runs.Program`."""
        seconds = []

        def train(candidate: int, key: jax.Array) -> Any:
            setting = self._candidates[candidate]
            program = sweeps.program(setting, self._where)
            (record,) = program.train([int(jax.random.bits(key, dtype=jnp.uint32)) >> 1], setting=setting)
            seconds.append(record["seconds"])
            return jax.tree.map(lambda x: x[0], program.trained)

        found = tuning.repeat_and_select(
            train,
            range(len(self._candidates)),
            event=self._event,
            score=self._scored,
            num_trials=TRIALS,
            key=jax.random.fold_in(jax.random.key(3_000), seed),
            num_examples=self._task.num_examples,
        )
        event = found.ledger.event
        score = float(self._task.final_score(found.value))
        spent = accounting.epsilon_of_event(event, delta=self._candidates[0].delta, accountant="rdp")
        return sweeps.program(self._candidates[0], self._where).common() | {
            "event": events.to_json(event),
            "epsilon": {"pld": None, "rdp": spent},
            "num_examples": self._task.num_examples,
            "seed": seed,
            "score": score,
            "score_of_last": score,
            "curve": [[self._steps, score]],
            "trials": len(seconds),
            "seconds": sum(seconds),
            "seeds_together": 1,
        }
