"""The attacker's view of a whole run: sampler, padding, gradients of several leaves, noise, a second query, a resume.

`benchmarks.audit.command` attacks optimizers at sampling probability 1, where the claim is exactly Gaussian. Most
mistakes are made elsewhere. Here many small runs go through the same pipeline as a user's run, and a coin decides for
each whether one example, the canary, has a gradient (as if it were in the data) or not. The attacker sees what every
step releases, scores each run in several ways, and chooses a score, a threshold and a delta on half of the runs. On the
other half, the rates of right and wrong guesses get exact bounds (Clopper and Pearson), and

    epsilon >= log((rate of right guesses - delta) / rate of wrong guesses).

The claim is the epsilon by dpopt's own accounting at that delta. Eleven mistakes are planted one at a time in the
functions that do the work; each must push the bound above the claim, and no sound run may.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import special

import dpopt
from benchmarks.audit.runs import DELTAS, Mistakes, attack, audit_all, plant
from dpopt.clipping import FlatClip
from dpopt.gradients import PerExampleGrads
from dpopt.privacy import Privacy, Relation
from dpopt.run import entropy
from dpopt.sampling import Batch, PoissonSampler

EXAMPLES, BATCH, ROWS = 100, 10, 40  # sampling probability 0.1; a padded batch has 40 rows
Q = BATCH / EXAMPLES
LEAVES = 16  # of two entries each, on which the canary's gradient points up and down
CLIP_NORM, LENGTH = 1.0, 1e6  # only the clip bounds the canary's gradient


@dataclasses.dataclass(frozen=True)
class Scene:
    """A kind of run."""

    steps: int
    sigma: float
    resumed_at: int | None = None  # this step is released, lost with the process, and taken again
    queries: int = 1

    @property
    def releases(self) -> int:
        return self.steps + (self.resumed_at is not None)

    def optimizer(self, key: jax.Array) -> Any:
        common = dict(l2_clip_norm=CLIP_NORM, noise_multiplier=self.sigma, expected_batch_size=BATCH, key=key)
        if self.queries == 1:
            return dpopt.dp_sgd(1.0, **common)
        return dpopt.optimizers.baselines.dp2_extra_query(
            1.0, adaptive_l2_clip_norm=CLIP_NORM, delay=10_000, eps=1e3, **common
        )


SCENES = {
    "few loud steps": Scene(steps=10, sigma=0.3),
    "many steps": Scene(steps=40, sigma=1.5),
    "a resumed run": Scene(steps=8, sigma=4.0, resumed_at=4),
    "two queries": Scene(steps=20, sigma=0.7, queries=2),
}


def _draws(change: Callable[[Any, Any, Callable], Any]) -> Any:
    draw = dpopt.noise.standard_normal_like
    return mock.patch.object(dpopt.noise, "standard_normal_like", lambda key, tree: change(key, tree, draw))


def _clip_after_the_mean() -> Any:
    true_sum = PerExampleGrads.clipped_sum

    def clipped_sum(self, clip):
        found = true_sum(self, FlatClip(math.inf))
        shrinking = jnp.minimum(1.0, CLIP_NORM / (optax.tree.norm(found.sum) / BATCH))
        return found._replace(sum=jax.tree.map(lambda x: x * shrinking, found.sum), remainder=None)

    return mock.patch.object(PerExampleGrads, "clipped_sum", clipped_sum)


def _per_leaf() -> Any:
    def coefficients(self, leaf_norms):
        return jax.tree.map(lambda n: jnp.minimum(1.0, CLIP_NORM / jnp.maximum(n, 1e-6)), leaf_norms)

    return mock.patch.object(FlatClip, "coefficients", coefficients)


def _without_last(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([*leaves[:-1], jnp.zeros_like(leaves[-1])])


def _shuffled(self: PoissonSampler, step: int, *, size: int) -> Batch:
    epoch, place = divmod(step, EXAMPLES // BATCH)
    order = np.random.default_rng([self.seed, epoch]).permutation(EXAMPLES)
    rows = np.roll(order, -place * BATCH)[:size]
    return Batch(rows, np.arange(size) < BATCH)


def _without_second_query(self: Privacy, step: int = 0, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> Any:
    return _STEP_EVENT(dataclasses.replace(self, queries=self.queries[:1]), step, relation)


_STEP_EVENT = Privacy.step_event


@contextlib.contextmanager
def budget_spent_twice(clip: Any) -> Iterator[None]:
    """For a clip with a second query: it is not charged, and the first query keeps the noise it would have alone."""
    split = clip.split

    def unsplit(self: Any, noise_multiplier: Any) -> tuple[Any, Any]:
        return noise_multiplier, split(self, noise_multiplier)[1]

    with mock.patch.object(clip, "split", unsplit), MISTAKES["second query unpaid"][1]():
        yield


MISTAKES: Mistakes = {
    "noise divided by the batch": (
        "many steps",
        lambda: _draws(lambda key, tree, draw: jax.tree.map(lambda z: z / BATCH, draw(key, tree))),
    ),
    "same key each step": (  # the step number, which is folded into the key, stands still
        "a resumed run",
        lambda: mock.patch.object(dpopt.common.trees, "next_count", lambda count: count),
    ),
    "clip after the mean": ("many steps", _clip_after_the_mean),
    "per-leaf clip passed off as flat": ("many steps", _per_leaf),
    "one leaf without noise": (
        "a resumed run",
        lambda: _draws(lambda key, tree, draw: _without_last(draw(key, tree))),
    ),
    "fixed batches": (
        "many steps",
        lambda: mock.patch.object(PoissonSampler, "_rng", lambda self, step: np.random.default_rng(self.seed)),
    ),
    "shuffled epochs": ("few loud steps", lambda: mock.patch.object(PoissonSampler, "batch", _shuffled)),
    "padding unmasked": (
        "many steps",
        lambda: mock.patch.object(dpopt.engines.batches, "checked_mask", lambda mask, rows: jnp.ones(rows, bool)),
    ),
    "second query unpaid": ("two queries", lambda: mock.patch.object(Privacy, "step_event", _without_second_query)),
    "stale state replayed": (
        "a resumed run",
        lambda: mock.patch.object(entropy, "with_fresh_noise", lambda opt_state, words, queries: opt_state),
    ),
    "one device's noise repeated": (
        "a resumed run",
        lambda: _draws(
            lambda key, tree, draw: jax.tree.map(lambda z: jnp.concatenate([z[: len(z) // 2]] * 2), draw(key, tree))
        ),
    ),
}


mistake = functools.partial(plant, MISTAKES)


@functools.cache
def _batches(scene: Scene, runs: int, seed: int, planted: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Padded indices and masks of every step of every run, and the random bits that a resume draws."""
    del planted  # only a cache key
    words = np.random.default_rng([seed, 1]).integers(2**32, size=(runs, 10), dtype=np.uint32)
    indices = np.zeros((runs, scene.releases, ROWS), np.uint8)
    mask = np.zeros((runs, scene.releases, ROWS), bool)
    for run in range(runs):
        sampler = PoissonSampler(EXAMPLES, BATCH, seed=1_000_000 * seed + run)
        for place in range(scene.releases):
            if scene.resumed_at is not None and place == scene.resumed_at + 1:
                sampler = sampler.reseeded(entropy.new_segment(sampler.seed, words[run]).seed)
            indices[run, place], mask[run, place] = sampler.batch(place, size=ROWS)
    return indices, mask, words


def directions() -> dict[str, np.ndarray]:
    """The canary's gradient, of length 1."""
    return {f"leaf {i:02d}": np.array([1.0, -1.0], np.float32) / math.sqrt(2 * LEAVES) for i in range(LEAVES)}


def releases(scene: Scene, coins: np.ndarray, seed: int, planted: str) -> np.ndarray:
    """The released noisy sums in units of the clip norm, ``(runs, releases, queries, leaves, 2)``."""
    sampled = planted if planted in ("fixed batches", "shuffled epochs") else "none"
    indices, mask, words = _batches(scene, len(coins), seed, sampled)
    params = jax.tree.map(jnp.zeros_like, directions())
    grads_fn = dpopt.per_example_grads(lambda p, x: x * sum(jax.tree.leaves(jax.tree.map(jnp.vdot, p, directions()))))

    def one_run(coin, key, indices, mask, words):
        optimizer = scene.optimizer(key)
        data = jnp.zeros(EXAMPLES).at[0].set(coin * LENGTH)

        def step(carry, rows):
            params, state = carry
            indices, mask = rows
            grads = grads_fn(params, data[indices.astype(int)], mask=mask)
            updates, new_state = optimizer.update(grads, state, params)
            seen = [jax.tree.map(jnp.negative, updates)]
            if scene.queries == 2:  # the first is released in the state, as a running total
                total, before = (optax.tree.get(s, "total") for s in (new_state, state))
                seen.insert(0, jax.tree.map(jnp.subtract, total, before))
            flat = jnp.stack([jnp.stack(jax.tree.leaves(x)) for x in seen])
            return (optax.apply_updates(params, updates), new_state), flat * BATCH / CLIP_NORM

        split = scene.releases if scene.resumed_at is None else scene.resumed_at + 1
        start = (params, optimizer.init(params))
        end, first = jax.lax.scan(step, start, (indices[:split], mask[:split]))
        if split == scene.releases:
            return first
        # The process died after releasing this step: the run resumes from the state before it.
        stale, _ = jax.lax.scan(step, start, (indices[: split - 1], mask[: split - 1]))
        del end
        renewed = entropy.with_fresh_noise(stale[1], words, scene.queries)
        _, second = jax.lax.scan(step, (stale[0], renewed), (indices[split:], mask[split:]))
        return jnp.concatenate([first, second])

    keys = jax.random.split(jax.random.key(seed), len(coins))
    return np.asarray(jax.jit(jax.vmap(one_run))(coins.astype(np.float32), keys, indices, mask, words))


def scores(seen: np.ndarray, sigma: float) -> dict[str, np.ndarray]:
    """The attacker's scores of each run: high where the canary is likely in the data."""
    direction = np.stack(list(directions().values()))
    along = np.einsum("rtqlc,lc->rtq", seen, direction)
    ratio = np.sum(2 * along - 1, axis=2) / (2 * sigma**2)  # log likelihood ratio of a step with the canary
    loudest = along.sum(axis=2)
    between = [np.abs(np.abs(seen[:, lag:] - seen[:, :-lag]) - np.abs(direction)) for lag in (1, 2)]
    halves = np.abs((seen[..., 0] - seen[..., 1]) / 2 - direction[:, 0])
    return {
        "sum": along.sum(axis=(1, 2)),
        "loudest step": loudest.max(axis=1),
        "likelihood": np.logaddexp(math.log1p(-Q), math.log(Q) + ratio).sum(axis=1),
        "one release of every epoch": special.logsumexp(ratio, axis=1),
        # Broken noise cancels: a leaf has none, or two steps or two halves of a leaf have the same.
        "a leaf without noise": -np.abs(seen - direction).max(axis=4).min(axis=(1, 2, 3)),
        "two steps with one noise": -np.minimum(*(x.max(axis=(2, 3, 4)).min(axis=1) for x in between)),
        "two halves with one noise": -halves.max(axis=3).min(axis=(1, 2)),
    }


def audit(scene_name: str, planted: str, *, runs: int, significance: float, seed: int = 0) -> dict[str, Any]:
    """Audits one kind of run, sound (``"none"``) or with a mistake."""
    scene = SCENES[scene_name]
    coins = np.random.default_rng([seed, 0]).random(runs) < 0.5
    with mistake(planted):
        scheme = PoissonSampler(EXAMPLES, BATCH, seed=0).scheme
        event = dpopt.privacy_event(scene.optimizer(jax.random.key(0)), sampling=scheme, steps=scene.releases)
        seen = releases(scene, coins, seed, planted)
    claims = {delta: dpopt.epsilon_of_event(event, delta=delta) for delta in DELTAS}
    row = attack(scores(seen, scene.sigma), coins, claims, significance)
    return row | dict(runs=runs, steps=scene.steps, sigma=scene.sigma, significance=significance, seed=seed)


def main(runs: int, significance: float) -> list[dict[str, Any]]:
    """Audits the pipeline."""
    return audit_all(audit, SCENES, MISTAKES, runs, significance)
