"""Runs: a setting and a seed give a record. Seeds of one setting run together, under ``vmap``."""

import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpopt
from benchmarks import records
from benchmarks.utility import contenders, methods, tasks
from benchmarks.utility.settings import Row as Row
from benchmarks.utility.settings import Setting as Setting
from dpopt import events, users
from dpopt.accounting import calibrate_event

STEPS_PER_CALL = 1_000
CHECKPOINTS = 5  # scores along the way, for the curve


def _with_release(task: tasks.Task, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    return event if task.release is None else dp_accounting.ComposedDpEvent([task.release, event])


def _optimizer(
    setting: Setting, task: tasks.Task, noise_multiplier: float, key: jax.Array, side: Any, rate: Any = None
) -> dpopt.PrivateOptimizer:
    four = {
        "l2_clip_norm": setting.l2_clip_norm,
        "noise_multiplier": noise_multiplier,
        "expected_batch_size": setting.batch_size(task),
        "key": key,
    }
    if setting.noise is not None:
        four["noise"] = setting.strategy()
    options = setting.options if rate is None else setting.options | {"learning_rate": rate}
    steps = setting.steps
    if setting.source is not None:
        optimizer = contenders.same(setting.source, options["sha256"]).build(options, steps=steps, privacy_four=four)
    else:
        optimizer = methods.build(setting.method, options, steps=steps, privacy_four=four, side_information=side)
    return users.user_level(optimizer) if task.unit == "user" else optimizer


def event_of(setting: Setting, task: tasks.Task, noise_multiplier: float) -> dp_accounting.DpEvent:
    """The event of a whole run, from the optimizer itself, with what the task released before it."""
    optimizer = _optimizer(setting, task, noise_multiplier, jax.random.key(0), task.side_information(0))
    scheme = setting.sampler(task, 0).scheme
    return _with_release(task, dpopt.privacy_event(optimizer, sampling=scheme, steps=setting.steps))


@functools.lru_cache(maxsize=256)
def _epsilons(event: str, delta: float) -> dict[str, float]:
    event = events.from_json(json.loads(event))
    return {kind: dpopt.epsilon_of_event(event, delta=delta, accountant=kind) for kind in ("pld", "rdp")}


_CALIBRATED: dict[str, float] = {}


def noise_for(setting: Setting, task: tasks.Task) -> float:
    """The noise multiplier: the given one, or the least that meets the target epsilon."""
    if setting.noise_multiplier is not None:
        return setting.noise_multiplier
    # Runs with the same event need the same noise, whatever their preconditioner and rule.
    accountant = setting.accountant or "pld"
    alike = json.dumps(events.to_json(event_of(setting, task, 7.0)))
    alike += f"{setting.epsilon} {setting.delta} {accountant}"
    if setting.source is not None:  # its event may depend on the multiplier in any way
        alike += setting.program()
        contenders.check_noise(setting.label, lambda sigma: event_of(setting, task, sigma))
    if alike not in _CALIBRATED:
        _CALIBRATED[alike] = calibrate_event(
            lambda sigma: event_of(setting, task, sigma),
            epsilon=setting.epsilon,
            delta=setting.delta,
            accountant=accountant,
        )
    return _CALIBRATED[alike]


def _check_spent(setting: Setting, task: tasks.Task, noise_multiplier: float) -> None:
    """Rejects a contender that misses the target epsilon: its noise is calibrated at one learning rate."""
    if setting.source is not None and setting.epsilon is not None:
        event = json.dumps(events.to_json(event_of(setting, task, noise_multiplier)))
        spent = _epsilons(event, setting.delta)[setting.accountant or "pld"]
        contenders.check_spent(setting.label, spent, setting.epsilon, noise_multiplier)


@functools.lru_cache(maxsize=16)
def _drawn(num_examples: int, batch_size: float, parts: int, seed: int, steps: int) -> list[np.ndarray]:
    sampler: Any = dpopt.PoissonSampler(num_examples, batch_size, seed=seed)
    if parts > 1:
        sampler = dpopt.samplers.parts.CyclicPoissonSampler(num_examples, batch_size, parts=parts, seed=seed)
    return [sampler.drawn(t).astype(np.int32) for t in range(steps)]


def step_bytes(compiled: Any) -> int | None:
    """The bytes of scratch memory that XLA plans for a compiled program; None if the backend does not report them.

    Arguments and results (parameters, state, examples) are not counted.
    """
    memory = compiled.memory_analysis()
    return None if memory is None else int(memory.temp_size_in_bytes)


class Program:
    """A setting ready to run: its task, its noise, and its steps compiled once for all seeds and learning rates.

    Args:
        setting: what to run.
        where: data folder.
    """

    def __init__(self, setting: Setting, *, where: Path | None = None):
        self.setting = setting
        self.task = task = tasks.make(setting.task, setting.task_options, where)
        if methods.needs_public_gradients(setting.method, setting.options) and not task.has_public_data:
            raise ValueError(f"{setting.method} learns from public gradients: set the task's public_share above 0.")
        self.noise_multiplier = noise_for(setting, task)
        self.batch_size = setting.batch_size(task)
        self.is_whole = self.batch_size == task.num_examples
        self._compiled: dict[Any, Any] = {}
        self._sizes: tuple[int, ...] = ()
        self._stated: Any = None  # the noise of a contender, as it is accounted for
        self.compile_seconds = 0.0
        self.step_bytes: int | None = None  # of the compiled steps, for all seeds that run together
        self._step = jax.jit(self._scan_seeds, donate_argnums=0)
        # Passed as an argument: XLA would fold computations on a constant while compiling.
        self._whole = task.all_examples() if self.is_whole else None
        self.trained: Any = None  # parameters at the end of the last `train`, stacked over seeds
        self._score_one = jax.jit(task.score)
        self._scoring_seconds = 0.0

    def _optimizer(self, key: jax.Array, side: Any, rate: Any = None) -> dpopt.PrivateOptimizer:
        return _optimizer(self.setting, self.task, self.noise_multiplier, key, side, rate)

    def _scan_seeds(self, *args: Any) -> Any:
        """Many steps of every seed: under ``vmap``, or without it for a single seed, which is faster."""
        axes = (0, 0, 0, None, 0, None, None)
        if len(args[1]) > 1:
            return jax.vmap(self._scan, in_axes=axes)(*args)
        one = [arg if axis is None else jax.tree.map(lambda x: x[0], arg) for arg, axis in zip(args, axes, strict=True)]
        return jax.tree.map(lambda x: x[None], self._scan(*one))

    def _scan(
        self, carry: Any, key: jax.Array, side: Any, rate: jax.Array, batches: Any, times: jax.Array, whole: Any
    ) -> Any:
        """Many steps of one seed."""
        s, task = self.setting, self.task
        optimizer = self._optimizer(key, side, rate)
        if s.source is not None:
            contenders.check_trained(s.label, optimizer.privacy, self._stated, s.steps)
        needs_public = methods.needs_public_gradients(s.method, s.options)
        average_from = s.steps if s.average_from is None else round(s.average_from * s.steps)
        ahead = methods.look_ahead(s.method, s.options)

        def one(carry, step_and_batch):
            (params, state, average, last), (t, batch) = carry, step_and_batch
            extra = {"public_grads": task.public_grads(params)} if needs_public else {}
            at = jax.tree.map(lambda p, before: p + ahead * (p - before), params, last) if ahead else params
            grads = task.grads(at, whole if self.is_whole else batch)
            updates, state = optimizer.update(grads, state, params, **extra)
            last = params if ahead else ()
            params = optax.apply_updates(params, updates)
            weight = 1 / jnp.maximum(t - average_from + 1, 1)
            average = jax.tree.map(lambda a, p: a + weight * (p - a), average, params)
            scored = methods.to_be_scored(state, params)
            average = average if scored is None else scored
            return (params, state, average, last), None

        return jax.lax.scan(one, carry, (times, batches))[0]

    def _call(self, *args: Any) -> Any:
        """Runs the program compiled for these shapes; the time of compilation is kept apart."""
        shapes = str(jax.tree.map(jnp.shape, args[4:6]))
        if shapes not in self._compiled:
            began = time.perf_counter()
            self._compiled[shapes] = self._step.lower(*args).compile()
            self.compile_seconds += time.perf_counter() - began
            self.step_bytes = step_bytes(self._compiled[shapes])
        return jax.block_until_ready(self._compiled[shapes](*args))

    def _score(self, params: Any) -> np.ndarray:
        """The score of every seed. Its time is kept apart from that of training."""
        began = time.perf_counter()
        seeds = range(len(jax.tree.leaves(params)[0]))
        scores = [float(self._score_one(jax.tree.map(lambda x, i=i: x[i], params))) for i in seeds]
        self._scoring_seconds += time.perf_counter() - began
        return np.array(scores)

    def train(
        self,
        seeds: Sequence[int],
        advance: Callable[[int], None] = lambda steps: None,
        setting: Setting | None = None,
    ) -> list[dict[str, Any]]:
        """Trains these seeds together, under ``vmap``, and returns a record for each.

        Args:
            seeds: the seeds.
            advance: called with the number of steps just done.
            setting: None, or one that differs from the program's only in its learning rate or label.

        Raises:
            ValueError: if the setting differs in more.
        """
        s, task = setting or self.setting, self.task
        if s.program() != self.setting.program():
            raise ValueError("this program was compiled for another setting.")
        _check_spent(s, task, self.noise_multiplier)
        if s.source is not None:
            accounted = _optimizer(s, task, self.noise_multiplier, jax.random.key(0), None)
            self._stated = contenders.noise_of(accounted.privacy, s.steps)
        rate = jnp.asarray(s.options["learning_rate"], jnp.float32)
        began = time.perf_counter()
        drawn = [] if self.is_whole else self._draw(s, seeds)
        sampling_seconds = time.perf_counter() - began
        sides, keys, carry = self._start(s, seeds)
        points = getattr(task, "checkpoints", CHECKPOINTS)
        per_call = min(STEPS_PER_CALL, s.steps if points <= CHECKPOINTS else -(-s.steps // points))
        apart = self.compile_seconds + self._scoring_seconds
        began, curve = time.perf_counter(), []
        for start in range(0, s.steps, per_call):
            stop = min(start + per_call, s.steps)
            batches = None
            if not self.is_whole:
                packed = [task.pack(d[start:stop], self._sizes) for d in drawn]
                batches = jax.tree.map(lambda *x: np.stack(x), *packed)
            carry = self._call(carry, keys, sides, rate, batches, jnp.arange(start, stop), self._whole)
            if stop * points // s.steps > start * points // s.steps:
                curve.append((stop, self._score(carry[2])))
            advance((stop - start) * len(seeds))
        seconds = time.perf_counter() - began - (self.compile_seconds + self._scoring_seconds - apart)
        timing = {"seconds": seconds, "seeds_together": len(seeds), "sampling_seconds": sampling_seconds}
        if self.step_bytes is not None:
            timing["step_bytes"] = self.step_bytes
        self.trained = carry[0]
        # Not scored again if the scored point is the last one: scoring a Transformer takes as long as training it.
        is_other = s.average_from is not None or methods.to_be_scored(carry[1], carry[0]) is not None
        last = self._score(carry[0]) if is_other else curve[-1][1]
        return [
            self.common(s)
            | timing
            | {
                "seed": seed,
                "score": float(curve[-1][1][i]),
                "score_of_last": float(last[i]),
                "curve": [[step, float(values[i])] for step, values in curve],
            }
            for i, seed in enumerate(seeds)
        ]

    def _draw(self, s: Setting, seeds: Sequence[int]) -> list[list[np.ndarray]]:
        """The batches of every seed; the padded sizes grow to hold them."""
        parts = 1 if s.noise is None else s.noise["bands"]
        drawn = [_drawn(self.task.num_examples, self.batch_size, parts, seed, s.steps) for seed in seeds]
        sizes = [self.task.sizes(d) for d in drawn] + ([self._sizes] if self._sizes else [])
        self._sizes = tuple(max(x) for x in zip(*sizes, strict=True))
        return drawn

    def _start(self, s: Setting, seeds: Sequence[int]) -> tuple[Any, jax.Array, tuple]:
        """Diagonals, noise keys, and the carry of `_scan` before the first step, all stacked over seeds."""
        sides = [self.task.side_information(seed) for seed in seeds]
        sides = None if sides[0] is None else jax.tree.map(lambda *x: jnp.stack([jnp.asarray(v) for v in x]), *sides)
        params = jax.tree.map(lambda *x: jnp.stack(x), *[self.task.init(seed) for seed in seeds])
        keys = jnp.stack([jax.random.fold_in(jax.random.key(2_000), seed) for seed in seeds])
        state = jax.vmap(lambda p, k, side: self._optimizer(k, side).init(p))(params, keys, sides)
        # Copies, since a donated array may appear only once. The last part: the previous parameters, where needed.
        last = jax.tree.map(jnp.copy, params) if methods.look_ahead(s.method, s.options) else ()
        return sides, keys, (params, state, jax.tree.map(jnp.copy, params), last)

    def common(self, setting: Setting | None = None) -> dict[str, Any]:
        """The part of the records that all seeds share."""
        s, task = setting or self.setting, self.task
        event = events.to_json(event_of(s, task, self.noise_multiplier))
        params = task.init(0)
        optimizer = self._optimizer(jax.random.key(0), task.side_information(0))
        return {
            "label": s.label,
            "setting": s.content(),
            "metric": task.metric,
            "higher_is_better": task.higher_is_better,
            "num_examples": task.num_examples,
            "noise_multiplier": self.noise_multiplier,
            "sampling": {
                "kind": "Poisson" if s.noise is None else f"cyclic Poisson in {s.noise['bands']} parts",
                "sampling_prob": self.batch_size / task.num_examples,
            },
            "event": event,
            "epsilon": _epsilons(json.dumps(event), s.delta),
            "delta": s.delta,
            "relation": f"add or remove one {task.unit}",
            "not_covered_by_epsilon": task.not_covered_by_epsilon,
            "parameters": sum(p.size for p in jax.tree.leaves(params)),
            "state_bytes": methods.state_bytes(optimizer, params),
            "compile_seconds": self.compile_seconds,
            "environment": records.environment(),
        }
