"""The attacker's view of runs whose noise is correlated over steps.

As in `benchmarks.audit.pipeline`, a coin decides for each of many small runs whether a canary has a gradient, and the
attacker sees what every step releases. The attacker knows the strategy C and undoes the correlation: with releases x
and a canary in the steps p, ``C x = C p + sigma z``. Where the sampler leaves p open, the attacker sums over its
possible values.
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
from scipy import linalg

import dpopt
from benchmarks.audit.runs import DELTAS, Mistakes, attack, audit_all, plant
from dpopt import correlated, events
from dpopt.correlated import strategies
from dpopt.run import entropy
from dpopt.samplers.parts import CyclicPoissonSampler, EpochSampler

EXAMPLES, BATCH, ROWS = 96, 12, 48
WIDTH = 8  # number of parameters; all entries of the canary's gradient are equal


@dataclasses.dataclass(frozen=True)
class Scene:
    """A kind of run."""

    strategy: Callable[[], correlated.Strategy]
    steps: int
    sigma: float
    parts: int | None = None  # of a cyclic Poisson sampler; None: whole epochs
    deaths: int = 0  # of the process, each after two thirds of the run; half of these steps are lost and repeated

    def sampler(self, seed: int) -> CyclicPoissonSampler | EpochSampler:
        if self.parts is None:
            return EpochSampler(EXAMPLES, BATCH, seed=seed, pad_to=ROWS)
        return CyclicPoissonSampler(EXAMPLES, BATCH, parts=self.parts, seed=seed, pad_to=ROWS)

    def optimizer(self, key: jax.Array) -> dpopt.PrivateOptimizer:
        four = dict(l2_clip_norm=1.0, noise_multiplier=self.sigma, expected_batch_size=1, key=key)
        return dpopt.privatize(**four, noise=self.strategy())

    @property
    def segments(self) -> list[tuple[int, int]]:
        """First and last step of every segment with its own noise key, in the order of release."""
        death, checkpoint = 2 * self.steps // 3, self.steps // 3
        firsts = [0] + [checkpoint] * self.deaths
        return list(zip(firsts, [death] * self.deaths + [self.steps], strict=True))


STEPS = 24
SCENES = {
    "cyclic samples": Scene(lambda: correlated.banded(4, steps=STEPS), STEPS, 1.0, parts=4),
    "epochs, banded": Scene(lambda: correlated.banded(8, steps=STEPS), STEPS, 0.8),
    "epochs, redrawn": Scene(lambda: correlated.banded_inverse(3, steps=STEPS), STEPS, 1.2),
    "epochs, resumed": Scene(lambda: correlated.lambda_cgd(0.9, steps=STEPS), STEPS, 2.0, deaths=12),
    "cyclic samples, resumed": Scene(lambda: correlated.banded(4, steps=STEPS), STEPS, 1.0, parts=4, deaths=1),
}


def _not_scaled(name: str, steps: int, coefficients: Any, stream: Any) -> correlated.Strategy:
    raw = np.asarray(coefficients, np.float64)[:steps] / coefficients[0]
    scaled = _STRATEGY(name, steps, coefficients, stream)
    return dataclasses.replace(scaled, stream=stream(raw))


def _from_all(self: CyclicPoissonSampler, step: int) -> np.ndarray:
    del step
    return np.arange(self.num_examples)


def _first_draws_again(key: Any, count: Any) -> Any:
    return _FOLD_IN(key, count % 4)


def _first_segment_only(privacy: Any, scheme: Any, step: int, origin: int = 0) -> Any:
    return dp_accounting.NoOpDpEvent() if origin else _STEP_EVENT(privacy, scheme, step, origin)


def _same_key(opt_state: Any, words: Any, queries: int) -> Any:
    del words, queries
    return opt_state


_STRATEGY, _FOLD_IN, _STEP_EVENT = strategies._strategy, dpopt.normals.threefry.fold_in, events.step_event

MISTAKES: Mistakes = {
    "bands not separated": ("cyclic samples", lambda: mock.patch.object(CyclicPoissonSampler, "part", _from_all)),
    "column norm forgotten": (
        "epochs, banded",
        lambda: mock.patch.object(strategies, "_strategy", _not_scaled),
    ),
    "restart uncharged": ("epochs, resumed", lambda: mock.patch.object(events, "step_event", _first_segment_only)),
    "draws reused across parts": (
        "epochs, banded",
        lambda: mock.patch.object(dpopt.normals.threefry, "fold_in", _first_draws_again),
    ),
    "resumed under the same key": (
        "cyclic samples, resumed",
        lambda: mock.patch.object(entropy, "with_fresh_noise", _same_key),
    ),
}


mistake = functools.partial(plant, MISTAKES)


@functools.cache
def _participations(scene: Scene, runs: int, seed: int, planted: str) -> np.ndarray:
    """Which released steps of each run have the canary, example 0, in their batch: ``(runs, releases)``."""
    del planted  # only a cache key
    rng = np.random.default_rng([seed, 2])
    found = []
    for run in range(runs):
        sampler, number, row = scene.sampler(1_000_000 * seed + run), 0, []
        for first, last in scene.segments:
            for _ in range(first, last):
                row.append(0 in sampler.drawn(number))
                number += 1
            sampler = sampler.reseeded(int(rng.integers(2**40)))
        found.append(row)
    return np.array(found)


def releases(scene: Scene, coins: np.ndarray, seed: int, planted: str) -> np.ndarray:
    """The released noisy sums, ``(runs, releases, WIDTH)``."""
    is_in = _participations(scene, len(coins), seed, planted) * coins[:, None]
    params, words = jnp.zeros(WIDTH), np.random.default_rng([seed, 1]).integers(2**32, size=10, dtype=np.uint32)

    def one_run(is_in, key):
        optimizer = scene.optimizer(key)
        state, seen, at, kept = optimizer.init(params), [], 0, None
        for i, (first, last) in enumerate(scene.segments):
            if i:
                state = entropy.with_fresh_noise(kept, words, 1)

            def step(state, present):
                canary = jnp.where(present, 1e6, 0.0) * jnp.ones((1, WIDTH))  # clipped to norm 1
                noisy, state = optimizer.update(canary, state, params)
                return state, noisy

            resumes = scene.segments[i + 1][0] if i + 1 < len(scene.segments) else last
            kept, before = jax.lax.scan(step, state, is_in[at : at + resumes - first])
            _, after = jax.lax.scan(step, kept, is_in[at + resumes - first : at + last - first])
            seen += [before, after]
            at += last - first
        return jnp.concatenate(seen)

    keys = jax.random.split(jax.random.key(seed), len(coins))
    return np.asarray(jax.jit(jax.vmap(one_run))(is_in.astype(np.float32), keys))


def scores(scene: Scene, seen: np.ndarray) -> dict[str, np.ndarray]:
    """The attacker's scores of each run: high where the canary is likely in the data."""
    strategy, sigma = scene.strategy(), scene.sigma
    C = linalg.toeplitz(strategy.column, np.zeros(STEPS))
    own_part, anywhere, matched, number = 0.0, 0.0, 0.0, 0
    whitened = []
    period = scene.parts or EXAMPLES // BATCH
    for first, last in scene.segments:
        length = last - first
        block, own = C[:length, :length], seen[:, number : number + length]
        white = np.einsum("ts,rsw->rtw", block, own)
        whitened.append(white)
        along = white.sum(axis=2) / WIDTH**0.5
        turns = (number + np.arange(length)) % period == 0
        signature = block @ turns
        matched = matched + along @ signature / sigma**2
        ratios = (along @ block - np.sum(np.square(block), axis=0) / 2) / sigma**2  # of a canary in one step
        q = scene.sampler(0).scheme.sampling_prob
        each = np.logaddexp(np.log1p(-min(q, 1 - 1e-9)), np.log(q) + ratios)
        own_part, anywhere = own_part + each[:, turns].sum(axis=1), anywhere + each.sum(axis=1)
        number += length
    both = [seen, np.concatenate(whitened, axis=1)]
    return {
        "matched": matched,
        "samples of its part": own_part,
        "samples of any step": anywhere,
        "two steps with one noise": np.max([_alike(x) for x in both], axis=0),
    }


def _alike(x: np.ndarray) -> np.ndarray:
    """The largest difference along the canary's gradient between two steps with the same noise; 0 if there are none."""
    most = np.zeros(len(x))
    for t in range(x.shape[1]):
        difference = x[:, t + 1 :] - x[:, t : t + 1]
        mean = difference.mean(axis=2)
        is_same = np.abs(difference - mean[..., None]).max(axis=2) < 1e-3
        most = np.maximum(most, np.max(np.where(is_same, np.abs(mean), 0), axis=1, initial=0))
    return np.where(most > 1e-3, most, 0)


def charged(scene: Scene) -> Any:
    """The event in the run's journal: one for each released step, by segment."""
    privacy = scene.optimizer(jax.random.key(0)).privacy
    scheme = scene.sampler(0).scheme
    ledger = dpopt.Ledger()
    for first, last in scene.segments:
        for step in range(first, last):
            ledger.record(events.step_event(privacy, scheme, step, first))
    return ledger.event


def audit(scene_name: str, planted: str, *, runs: int, significance: float, seed: int = 0) -> dict[str, Any]:
    """Audits one kind of run, sound (``"none"``) or with a mistake."""
    scene = SCENES[scene_name]
    coins = np.random.default_rng([seed, 0]).random(runs) < 0.5
    with mistake(planted):
        event = charged(scene)
        seen = releases(scene, coins, seed, planted)
    claims = {delta: dpopt.epsilon_of_event(event, delta=delta) for delta in DELTAS}
    row = attack(scores(scene, seen), coins, claims, significance)
    return row | dict(runs=runs, steps=scene.steps, sigma=scene.sigma, significance=significance, seed=seed)


def main(runs: int, significance: float) -> list[dict[str, Any]]:
    """Audits correlated noise."""
    return audit_all(audit, SCENES, MISTAKES, runs, significance)
