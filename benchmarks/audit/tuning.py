"""The attacker's view of a private search: many searches, each of which releases the best of a random number of trials.

A trial is one noisy step on a row that a coin puts in or leaves out. Its score is its own output, so the best trial is
the most telling one. The attacker sees it and guesses the coin, as in `benchmarks.audit.pipeline`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import dpopt
from benchmarks.audit.runs import DELTAS, Mistakes, attack, audit_all, plant
from dpopt import tuning
from dpopt.sampling import Poisson


@dataclasses.dataclass(frozen=True)
class Scene:
    """A kind of search."""

    sigma: float
    num_trials: tuning.NumTrials
    score_noise: float | None = None  # None: the score is the trial's output

    def score(self, coin: float) -> tuning.PublicScore | tuning.PrivateScore:
        if self.score_noise is None:
            return tuning.PublicScore(lambda value: value, data="none")
        return tuning.PrivateScore(
            per_example=lambda value: np.array([coin]), num_examples=1, noise_multiplier=self.score_noise
        )

    def optimizer(self, key: jax.Array) -> dpopt.PrivateOptimizer:
        return dpopt.dp_sgd(1.0, l2_clip_norm=1.0, noise_multiplier=self.sigma, expected_batch_size=1, key=key)


SCENES = {
    "best of a geometric number": Scene(0.5, tuning.NumTrials(10.0)),
    "best of a Poisson number": Scene(1.0, tuning.NumTrials(30.0, math.inf)),
    "scored on private rows": Scene(20.0, tuning.NumTrials(4.0), score_noise=0.7),
}
MISTAKES: Mistakes = {
    "the best at the price of one run": (
        "best of a Poisson number",
        lambda: mock.patch.object(tuning.NumTrials, "event", lambda self, trial: trial),
    ),
    "the score unpaid": (
        "scored on private rows",
        lambda: mock.patch.object(tuning.PrivateScore, "event", tuning.PublicScore.event),
    ),
}


mistake = functools.partial(plant, MISTAKES)


@functools.cache
def _trial(scene: Scene) -> Callable[..., jax.Array]:
    """The output of one step on a row that is there or not."""
    grads_fn = dpopt.per_example_grads(lambda w, x: -1e6 * w * x)  # only the clip bounds it

    def release(coin: jax.Array, key: jax.Array) -> jax.Array:
        optimizer, w = scene.optimizer(key), jnp.zeros(())
        updates, _ = optimizer.update(grads_fn(w, coin[None], mask=None), optimizer.init(w), w)
        return updates

    return jax.jit(release)


def audit(scene_name: str, planted: str, *, runs: int, significance: float, seed: int = 0) -> dict[str, Any]:
    """Audits one kind of search, sound (``"none"``) or with a mistake."""
    scene = SCENES[scene_name]
    coins = np.random.default_rng([seed, 0]).random(runs) < 0.5
    event = dpopt.privacy_event(scene.optimizer(jax.random.key(0)), sampling=Poisson(1.0), steps=1)
    release, seen = _trial(scene), np.zeros(runs)
    with mistake(planted):
        for run, coin in enumerate(coins.astype(np.float32)):
            found = tuning.repeat_and_select(
                lambda setting, key, coin=coin: float(release(coin, key)),
                [0],
                event=event,
                score=scene.score(float(coin)),
                num_trials=scene.num_trials,
                key=jax.random.fold_in(jax.random.key(seed), run),
                num_examples=1,
            )
            seen[run] = -1e9 if found.score is None else found.score
    claims = {d: dpopt.epsilon_of_event(found.ledger.event, delta=d, accountant="rdp") for d in DELTAS}
    row = attack({"score of the best": seen}, coins, claims, significance)
    return row | dict(runs=runs, sigma=scene.sigma, trials=repr(scene.num_trials), seed=seed)


def main(runs: int, significance: float) -> list[dict[str, Any]]:
    """Audits searches."""
    return audit_all(audit, SCENES, MISTAKES, runs, significance)
