"""The attacker's view of the privacy unit, and of truncated batches.

As in `benchmarks.audit.pipeline`, a coin decides for each of many small runs whether the unit is in the data, and the
attacker sees what every step releases. In one scene the unit is an example whose gradient points against all the
others', and batches are truncated (`dpopt.samplers.truncated`): where it is in, it displaces one of the others. In the
other scene it is a user with several equal examples (`dpopt.users`): one clip bounds their sum.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import dpopt
from benchmarks.audit.pipeline import LENGTH
from benchmarks.audit.runs import DELTAS, Mistakes, attack, audit_all, plant
from dpopt import grouping, users
from dpopt.engines import promises
from dpopt.samplers.truncated import TruncatedPoisson, TruncatedPoissonSampler


@dataclasses.dataclass(frozen=True)
class Scene:
    """A kind of run: ``rows`` examples or users, of which ``batch`` are expected in a step."""

    steps: int
    sigma: float
    rows: int
    batch: int
    examples: int = 0  # of the user in question; 0: the unit is an example, and batches are truncated

    @property
    def q(self) -> float:
        return self.batch / self.rows

    def sampler(self, seed: int, rows: int) -> Any:
        if self.examples:
            return dpopt.PoissonSampler(rows, self.q * rows, seed=seed)
        return TruncatedPoissonSampler(rows, self.q * rows, max_batch_size=self.batch, seed=seed)

    def optimizer(self, key: jax.Array) -> dpopt.PrivateOptimizer:
        core = dpopt.privatize(l2_clip_norm=1.0, noise_multiplier=self.sigma, expected_batch_size=1, key=key)
        return users.user_level(core) if self.examples else core


SCENES = {
    "batches that are cut": Scene(steps=60, sigma=3.0, rows=20, batch=19),
    "a user of many examples": Scene(steps=10, sigma=0.7, rows=40, batch=10, examples=5),
}


def _example_by_example(self: Any, mask: Any, scale: Any, offset: Any, clip: Any) -> Any:
    data, counts = self.batch
    alone = jax.tree.map(lambda x: x.reshape((-1, 1) + x.shape[2:]), (data, counts))
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    rows = promises.ExampleRows(**(fields | dict(batch=alone, batch_size=len(alone[1]))))
    ran = rows.run((mask[:, None] & counts).reshape(-1), scale, offset, clip)

    def first(x):
        return x.reshape(counts.shape + x.shape[1:])[:, 0]

    norms, losses, ok = jax.tree.map(first, (ran.leaf_norms, ran.losses, ran.is_finite))
    return ran._replace(leaf_norms=norms, losses=losses, is_finite=ok)


def _by_session(user_ids: Any, **options: Any) -> Any:
    ids = np.asarray(user_ids)
    several = ids == ids.max()
    return _GROUP(np.where(several, ids.max() + np.cumsum(several), ids), **options)


_GROUP = grouping.group

MISTAKES: Mistakes = {
    "a cut that nobody pays for": (
        "batches that are cut",
        lambda: mock.patch.object(
            TruncatedPoisson,
            "event",
            lambda self, step: dp_accounting.PoissonSampledDpEvent(self.sampling_prob, step),
        ),
    ),
    "clipped example by example": (
        "a user of many examples",
        lambda: mock.patch.object(users._UserLoss, "run", _example_by_example),
    ),
    "grouped by session": ("a user of many examples", lambda: mock.patch.object(grouping, "group", _by_session)),
}


mistake = functools.partial(plant, MISTAKES)


def releases(scene: Scene, coins: np.ndarray, seed: int) -> np.ndarray:
    """The released noisy sums of one parameter, ``(runs, steps)``."""
    if scene.examples:
        draw, data = _user_batches(scene)
        loss: Any = users.per_user_grads(_loss, reduce="sum")
    else:
        draw, data = _cut_batches(scene)
        loss = dpopt.per_example_grads(_loss)
    batches = []
    for run, coin in enumerate(coins):
        batches.append([draw(bool(coin), 1_000_000 * seed + run, t) for t in range(scene.steps)])
    stacked = jax.tree.map(lambda *x: np.stack(x), *[jax.tree.map(lambda *x: np.stack(x), *run) for run in batches])

    def one_run(key, batches):
        optimizer = scene.optimizer(key)
        start = jnp.zeros(())

        def step(state, batch):
            rows, counted, mask = batch
            found = users.Users(data[rows], counted) if scene.examples else data[rows]
            noisy, state = optimizer.update(loss(start, found, mask=mask), state, start)
            return state, noisy

        return jax.lax.scan(step, optimizer.init(start), batches)[1]

    keys = jax.random.split(jax.random.key(seed), len(coins))
    return np.asarray(jax.jit(jax.vmap(one_run))(keys, stacked))


def _loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return w * x


def _cut_batches(scene: Scene) -> tuple[Callable[[bool, int, int], Any], jax.Array]:
    """The last example is the one in question; without it the others have the batch to themselves."""

    def draw(there: bool, seed: int, step: int):
        indices, mask = scene.sampler(seed, scene.rows - (not there)).batch(step)
        return indices, mask, mask

    return draw, jnp.full(scene.rows, -LENGTH).at[-1].set(LENGTH)


def _user_batches(scene: Scene) -> tuple[Callable[[bool, int, int], Any], jax.Array]:
    """The other users have one example each, with gradient 0; the last user has several."""
    ids = np.concatenate([np.arange(scene.rows - 1), np.full(scene.examples, scene.rows - 1)])
    groups = grouping.group(ids, max_examples=scene.examples)
    absent = grouping.group(ids[: scene.rows - 1], max_examples=scene.examples)

    def draw(there: bool, seed: int, step: int):
        owned = groups if there else absent
        indices, mask = scene.sampler(seed, owned.num_users).batch(step, size=32)
        return *owned.rows(indices), mask

    return draw, jnp.where(jnp.arange(len(ids)) >= scene.rows - 1, LENGTH, 0.0)


def scores(scene: Scene, seen: np.ndarray) -> dict[str, np.ndarray]:
    """The attacker's scores of each run: high where the unit is likely in the data."""
    log_ratio = np.log(_density(scene, seen, True)) - np.log(_density(scene, seen, False))
    return {"sum": seen.sum(axis=1), "loudest step": seen.max(axis=1), "likelihood": log_ratio.sum(axis=1)}


def _density(scene: Scene, seen: np.ndarray, there: bool) -> np.ndarray:
    q, sigma = scene.q, scene.sigma

    def around(mean):
        return stats.norm.pdf(seen, mean, sigma)

    if scene.examples:
        return (1 - q * there) * around(0) + q * there * around(1)
    total = np.zeros_like(seen)
    for others in range(scene.rows):
        kept = min(others, scene.batch)
        stays = q * min(1.0, scene.batch / (others + 1)) * there
        beside = min(others, scene.batch - 1)
        weight = stats.binom.pmf(others, scene.rows - 1, q)
        total += weight * ((1 - stays) * around(-kept) + stays * around(1 - beside))
    return total


def audit(scene_name: str, planted: str, *, runs: int, significance: float, seed: int = 0) -> dict[str, Any]:
    """Audits one kind of run, sound (``"none"``) or with a mistake."""
    scene = SCENES[scene_name]
    coins = np.random.default_rng([seed, 0]).random(runs) < 0.5
    with mistake(planted):
        scheme = scene.sampler(0, scene.rows).scheme
        event = dpopt.privacy_event(scene.optimizer(jax.random.key(0)), sampling=scheme, steps=scene.steps)
        seen = releases(scene, coins, seed)
    claims = {delta: dpopt.epsilon_of_event(event, delta=delta) for delta in DELTAS}
    row = attack(scores(scene, seen), coins, claims, significance)
    return row | dict(runs=runs, steps=scene.steps, sigma=scene.sigma, significance=significance, seed=seed)


def main(runs: int, significance: float) -> list[dict[str, Any]]:
    """Audits truncated batches and users."""
    return audit_all(audit, SCENES, MISTAKES, runs, significance)
