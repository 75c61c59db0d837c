"""The attacker's view of runs with an adaptive clip norm: each step releases a noisy count besides the gradient.

As in `benchmarks.audit.pipeline`, a coin decides for each of many small runs whether a canary is in the data. The
attacker knows all other examples and could subtract their contributions, so here there are none. The attacker sees
every update and every clip norm, and recovers each count from two consecutive clip norms. A canary in the sample moves
the sum by a vector of norm C and the count by -1/2.
"""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpopt
from benchmarks.audit.pipeline import MISTAKES as MISTAKES_OF_PIPELINES
from benchmarks.audit.pipeline import budget_spent_twice
from benchmarks.audit.runs import Mistakes, audit_all, audit_sampled, plant, sampled_likelihood
from dpopt import adaptive

WIDTH = 8  # number of parameters; all entries of the canary's gradient are equal
LENGTH = 1e6  # norm of the canary's gradient: only the clip bounds it
BATCH = 4.0  # divides sums and counts
RATE = 0.1  # learning rate of the clip norm


@dataclasses.dataclass(frozen=True)
class Scene:
    """A kind of run."""

    steps: int
    sigma: float
    count_share: float
    sampling_prob: float

    @property
    def clip(self) -> adaptive.QuantileClip:
        return adaptive.quantile_clip(1.0, learning_rate=RATE, count_share=self.count_share)

    def optimizer(self, key: jax.Array) -> dpopt.PrivateOptimizer:
        return dpopt.privatize(l2_clip_norm=self.clip, noise_multiplier=self.sigma, expected_batch_size=BATCH, key=key)


SCENES = {
    "adaptive clip": Scene(steps=10, sigma=1.0, count_share=0.5, sampling_prob=0.5),
    "adaptive, few counts": Scene(steps=20, sigma=1.5, count_share=0.05, sampling_prob=0.3),
}


def _unnoised_counts() -> Any:
    """Removes the noise from scalars, which is what counts are."""
    draw = dpopt.noise.standard_normal_like

    def without(key: Any, tree: Any) -> Any:
        drawn = draw(key, tree)
        return jnp.zeros_like(drawn) if jnp.shape(drawn) == () else drawn

    return mock.patch.object(dpopt.noise, "standard_normal_like", without)


MISTAKES: Mistakes = {
    "count not noised": ("adaptive, few counts", _unnoised_counts),
    "count not charged": ("adaptive clip", MISTAKES_OF_PIPELINES["second query unpaid"][1]),
    "budget spent twice": ("adaptive clip", lambda: budget_spent_twice(adaptive.QuantileClip)),
}


mistake = functools.partial(plant, MISTAKES)


def releases(scene: Scene, coins: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The released sums along the canary's gradient, in units of the clip norm, and counts: ``(runs, steps)`` each."""
    sampled = np.random.default_rng([seed, 1]).random((len(coins), scene.steps)) < scene.sampling_prob
    direction = jnp.full(WIDTH, WIDTH**-0.5)
    params, clip = jnp.zeros(WIDTH), scene.clip

    def one_run(key, is_there):
        optimizer = scene.optimizer(key)

        def step(state, mask):
            rows = dpopt.gradients.stacked_grads(LENGTH * direction[None], mask=mask[None])
            before = optax.tree.get(state, "clip_norms")
            mean, state = optimizer.update(rows, state, params)
            share = clip.quantile - jnp.log(optax.tree.get(state, "clip_norms") / before) / RATE
            return state, (mean @ direction * BATCH / before, (share - 0.5) * BATCH)

        return jax.lax.scan(step, optimizer.init(params), is_there)[1]

    keys = jax.random.split(jax.random.key(seed), len(coins))
    sums, counts = jax.jit(jax.vmap(one_run))(keys, sampled & coins[:, None])
    return np.asarray(sums, np.float64), np.asarray(counts, np.float64)


def scores(scene: Scene, sums: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """The attacker's scores of each run: high where the canary is likely in the data."""
    multiplier, count_stddev = scene.clip.split(scene.sigma)

    of_sums = (2 * sums - 1) / (2 * multiplier**2)
    of_counts = (-counts - 0.25) / (2 * count_stddev**2)
    return {
        "sum": sums.sum(axis=1),
        "sum and count": (sums / multiplier**2 - counts / (2 * count_stddev**2)).sum(axis=1),
        "likelihood of the sums": sampled_likelihood(of_sums, scene.sampling_prob),
        "likelihood": sampled_likelihood(of_sums + of_counts, scene.sampling_prob),
        "a count without noise": -np.abs(counts + 0.5).min(axis=1),
    }


def audit(scene_name: str, planted: str, *, runs: int, significance: float, seed: int = 0) -> dict[str, Any]:
    """Audits one kind of run, sound (``"none"``) or with a mistake."""
    scene = SCENES[scene_name]
    with mistake(planted):
        return audit_sampled(
            scene,
            lambda coins: scores(scene, *releases(scene, coins, seed)),
            runs=runs,
            significance=significance,
            seed=seed,
        )


def main(runs: int, significance: float) -> list[dict[str, Any]]:
    """Audits adaptive clipping."""
    return audit_all(audit, SCENES, MISTAKES, runs, significance)
