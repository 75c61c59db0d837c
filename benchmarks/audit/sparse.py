"""The attacker's view of runs with sparse noise: each step releases which rows of a table are kept, and their sums.

As in `benchmarks.audit.pipeline`, a coin decides for each of many small runs whether a canary is in the data. The
attacker knows all other examples; here there are none. The canary touches every row of a small table. A row is kept if
its noisy number of touches exceeds the threshold, and a canary in the sample adds to that number. The canary's gradient
lies on the kept rows only, and has norm C whichever they are.
"""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import dpopt
from benchmarks.audit.pipeline import MISTAKES as MISTAKES_OF_PIPELINES
from benchmarks.audit.pipeline import budget_spent_twice
from benchmarks.audit.runs import Mistakes, audit_all, audit_sampled, plant, sampled_likelihood
from dpopt import sparse

LENGTH = 1e6  # the canary's gradient at every row: only the clip bounds it


@dataclasses.dataclass(frozen=True)
class Scene:
    """A kind of run."""

    steps: int
    sigma: float
    touch_share: float
    rows: int  # of the table
    threshold: float
    sampling_prob: float = 0.5

    @property
    def clip(self) -> sparse.SparseRows:
        return sparse.sparse_rows(
            1.0,
            tables=lambda p: p,
            rows=lambda example: example,
            most_rows=self.rows,
            threshold=self.threshold,
            touch_share=self.touch_share,
        )

    def optimizer(self, key: jax.Array) -> dpopt.PrivateOptimizer:
        return dpopt.privatize(l2_clip_norm=self.clip, noise_multiplier=self.sigma, expected_batch_size=1, key=key)


SCENES = {
    "sparse, many touches": Scene(steps=10, sigma=1.0, touch_share=0.8, rows=4, threshold=0.25),
    "sparse, few touches": Scene(steps=10, sigma=1.2, touch_share=0.1, rows=2, threshold=0.5),
}


def _unnoised_touches() -> Any:
    """Removes the noise from vectors: numbers of touches are vectors, gradients of the table are not."""
    draw = dpopt.noise.standard_normal_like

    def without(key: Any, tree: Any) -> Any:
        return jax.tree.map(lambda z: jnp.zeros_like(z) if z.ndim == 1 else z, draw(key, tree))

    return mock.patch.object(dpopt.noise, "standard_normal_like", without)


MISTAKES: Mistakes = {
    "touches not noised": ("sparse, few touches", _unnoised_touches),
    "touches not charged": ("sparse, many touches", MISTAKES_OF_PIPELINES["second query unpaid"][1]),
    "budget of touches spent twice": ("sparse, many touches", lambda: budget_spent_twice(sparse.SparseRows)),
}


mistake = functools.partial(plant, MISTAKES)


def releases(scene: Scene, coins: np.ndarray, seed: int) -> np.ndarray:
    """The released noisy sums of the table's rows, ``(runs, steps, rows)``; exactly 0 where a row is not kept."""
    sampled = np.random.default_rng([seed, 1]).random((len(coins), scene.steps)) < scene.sampling_prob
    table, touched = jnp.zeros((scene.rows, 1)), jnp.arange(scene.rows)
    grads = dpopt.per_example_grads(lambda table, rows: LENGTH * jnp.sum(table[rows]), engine="vmap")

    def one_run(key, is_there):
        optimizer = scene.optimizer(key)

        def step(state, mask):
            noisy, state = optimizer.update(grads(table, touched[None], mask=mask[None]), state, table)
            return state, noisy[:, 0]

        return jax.lax.scan(step, optimizer.init(table), is_there)[1]

    keys = jax.random.split(jax.random.key(seed), len(coins))
    return np.asarray(jax.jit(jax.vmap(one_run))(keys, sampled & coins[:, None]), np.float64)


def scores(scene: Scene, seen: np.ndarray) -> dict[str, np.ndarray]:
    """The attacker's scores of each run: high where the canary is likely in the data."""
    multiplier, touch_stddev = scene.clip.split(scene.sigma)
    kept = seen != 0
    number = kept.sum(axis=2)
    touch = scene.rows**-0.5  # of norm 1 over all rows

    def of_rows(moved: float) -> np.ndarray:
        exceeds = stats.norm(scale=touch_stddev)
        log_p = np.where(kept, exceeds.logsf(scene.threshold - moved), exceeds.logcdf(scene.threshold - moved))
        return log_p.sum(axis=2)

    sums = seen.sum(axis=2) / np.sqrt(np.maximum(number, 1))  # along the gradient, which is 1 there
    of_sums = np.where(number > 0, (2 * sums - 1) / (2 * multiplier**2), 0.0)
    of_touches = of_rows(touch) - of_rows(0.0)

    return {
        "rows kept": number.sum(axis=1).astype(float),
        "steps with all rows": (number == scene.rows).sum(axis=1).astype(float),
        "sum": sums.sum(axis=1),
        "likelihood of the sums": sampled_likelihood(of_sums, scene.sampling_prob),
        "likelihood": sampled_likelihood(of_sums + of_touches, scene.sampling_prob),
    }


def audit(scene_name: str, planted: str, *, runs: int, significance: float, seed: int = 0) -> dict[str, Any]:
    """Audits one kind of run, sound (``"none"``) or with a mistake."""
    scene = SCENES[scene_name]
    with mistake(planted):
        return audit_sampled(
            scene,
            lambda coins: scores(scene, releases(scene, coins, seed)),
            runs=runs,
            significance=significance,
            seed=seed,
        )


def main(runs: int, significance: float) -> list[dict[str, Any]]:
    """Audits sparse noise."""
    return audit_all(audit, SCENES, MISTAKES, runs, significance)
