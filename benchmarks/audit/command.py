"""The attacker's view: a lower bound on the epsilon that the optimizers spend, measured from what they release.

Canaries are examples with a gradient so long that only the clip bounds it. A coin decides for each whether it is in the
data. The attacker guesses from all released parameters which canaries are in, and the number of right guesses bounds
the privacy parameter from below, in two ways:

* one run with many canaries, each along its own coordinate (Mahloujifar, Melis and Chaudhuri 2024, Auditing
  f-Differential Privacy in One Run, https://arxiv.org/abs/2410.22235): published, general, and about half of the truth;
* many small runs with one canary each (Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning,
  https://arxiv.org/abs/2302.07956): independent trials, whose error rates have exact confidence bounds. Nearly tight.

Every example takes part in every step (sampling probability 1), so that a run of T steps is exactly Gaussian-DP with
mu = sqrt(T) / sigma, and the bound can be compared with the claim. The attacker picks hyperparameters under which
post-processing hides nothing (Adam with a large eps is linear): the claim holds for all hyperparameters. The canaries'
sign alternates, so that noise that repeats from step to step shows.

The bounds are those of `dpopt.audit`. The same audit must catch three broken builds: half the noise, no clip, one key
for all steps.

The other modules attack what lies outside one optimizer step: `benchmarks.audit.pipeline` the whole pipeline,
`benchmarks.audit.correlated` noise that is correlated over steps, `benchmarks.audit.adaptive` an adaptive clip norm,
`benchmarks.audit.sparse` sparse noise, `benchmarks.audit.rows` truncated batches and users as the unit, and
`benchmarks.audit.tuning` private search.
"""

import argparse
import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import dpopt
from benchmarks import arguments, records
from benchmarks.audit import adaptive, correlated, pipeline, sparse, tuning
from benchmarks.audit import rows as audit_rows
from dpopt.audit import epsilon_of_mu, many_runs_mu, one_run_mu, right_guesses
from dpopt.sampling import Poisson

MODULES = {
    "pipeline": pipeline,
    "correlated": correlated,
    "adaptive": adaptive,
    "sparse": sparse,
    "rows": audit_rows,
    "tuning": tuning,
}
PARTS = "optimizers", *MODULES
DELTA = 1e-5
SIGNIFICANCE = 0.001  # allowed probability that a sound optimizer's bound is wrong
GUESSED = (0.02, 0.1, 0.3)  # shares of the canaries that the attacker guesses; fixed before the run
L2_CLIP_NORM = 1.0
LENGTH = 1e6  # norm of a canary's gradient
BATCH = 1e4  # divides the noisy sum, so that updates stay small beside LINEAR
LINEAR = 1e3  # eps, far above the root of a second moment: the optimizer is linear

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "dp_sgd": functools.partial(dpopt.dp_sgd, 1.0),
    "dp_adam": functools.partial(dpopt.dp_adam, 1.0, b1=0.0, eps=LINEAR),
    "dp_adamw": functools.partial(dpopt.dp_adamw, 1.0, b1=0.0, eps=LINEAR, weight_decay=0.0),
    "dp_rmsprop": functools.partial(dpopt.dp_rmsprop, 1.0, eps=LINEAR**2),
    "dp_adagrad": functools.partial(dpopt.dp_adagrad, 1.0, initial_accumulator_value=LINEAR**2),
    "dp_yogi": functools.partial(dpopt.dp_yogi, 1.0, b1=0.0, eps=LINEAR),
    "dp_adam_bc": functools.partial(dpopt.dp_adam_bc, 1.0, b1=0.0, gamma=LINEAR**2),
    "dp_micro_adam": functools.partial(dpopt.dp_micro_adam, 1.0, b1=0.0, eps=LINEAR, density=1.0),
    "dp2": functools.partial(
        dpopt.dp2, 1.0, adaptive_learning_rate=1.0, adaptive_l2_clip_norm=L2_CLIP_NORM, delay=2, eps=LINEAR
    ),
    "dp2_noise_first": functools.partial(
        dpopt.optimizers.baselines.dp2_noise_first, 1.0, adaptive_learning_rate=LINEAR, delay=2, eps=LINEAR
    ),
    "dp2_extra_query": functools.partial(
        dpopt.optimizers.baselines.dp2_extra_query, 1.0, adaptive_l2_clip_norm=L2_CLIP_NORM, delay=1_000, eps=LINEAR
    ),
    "adadps, side information": functools.partial(dpopt.adadps, 1.0, scale=0.5),
    "adadps, public gradients": functools.partial(dpopt.adadps, 1.0, eps=LINEAR),
    "scale_then_privatize": functools.partial(dpopt.scale_then_privatize, 1.0, b1=0.0, eps=LINEAR**2, eps_scale=LINEAR),
    "dp_r_pub": functools.partial(dpopt.optimizers.baselines.dp_r_pub, 1.0, eps=LINEAR),
    "dp_adam_pub": functools.partial(dpopt.optimizers.baselines.dp_adam_pub, 1.0, b2=0.0, eps=LINEAR),
    "pda_dpmd": functools.partial(dpopt.optimizers.baselines.pda_dpmd, 1.0, total_steps=1_000),
}


@contextlib.contextmanager
def fault(name: str) -> Iterator[None]:
    """Breaks dpopt while the block runs: ``"half the noise"``, ``"no clip"``, ``"one key"``, or ``"none"``."""
    draw = dpopt.noise.standard_normal_like
    patches = {
        "none": contextlib.nullcontext,
        "half the noise": lambda: mock.patch.object(
            dpopt.noise, "standard_normal_like", lambda key, tree: jax.tree.map(lambda z: z / 2, draw(key, tree))
        ),
        "no clip": lambda: mock.patch.object(
            dpopt.clipping.FlatClip, "coefficients", lambda self, norms: jax.tree.map(jnp.ones_like, norms)
        ),
        "one key": lambda: mock.patch.object(
            dpopt.noise, "standard_normal_like", lambda key, tree: draw(jax.random.key(7), tree)
        ),
    }
    with patches[name]():
        yield


def released(
    make: Callable[..., Any], canaries: jax.Array, member: Any, *, steps: int, sigma: float, key: jax.Array
) -> Any:
    """Trains on the member canaries and returns the update of every step, ``(steps, coordinates)``."""
    optimizer = make(l2_clip_norm=L2_CLIP_NORM, noise_multiplier=sigma, expected_batch_size=BATCH, key=key)
    grads_fn = dpopt.per_example_grads(lambda w, example: example["sign"] * (w @ example["x"]), engine="vmap")
    params = jnp.zeros(canaries.shape[1])

    def step(carry, sign):
        params, state = carry
        batch = {"x": canaries, "sign": jnp.full(canaries.shape[0], sign)}
        grads = grads_fn(params, batch, mask=member)
        updates, state = optimizer.update(grads, state, params, public_grads=jnp.zeros_like(params))
        return (params + updates, state), updates

    return jax.lax.scan(step, (params, optimizer.init(params)), signs(steps))[1]


def signs(steps: int) -> np.ndarray:
    """The canaries' sign at each step."""
    return (-1.0) ** np.arange(steps, dtype=np.float32)


def scores(updates: np.ndarray) -> np.ndarray:
    """The attacker's score of each canary: high where it is likely a member."""
    return -signs(len(updates)) @ np.asarray(updates, np.float64)


def guesses(canaries: int) -> list[tuple[int, int]]:
    """For how many canaries the attacker guesses "in" and "out"."""
    numbers = [max(2, round(share * canaries)) for share in GUESSED]
    return [(number - number // 2, number // 2) for number in numbers]


def audit(
    name: str, broken: str, *, canaries: int, runs: int, steps: int = 10, mu: float = 1.0, seed: int = 0
) -> dict[str, Any]:
    """Audits one optimizer, sound (``"none"``) or broken; ``mu`` is the claim of one query a step over all steps."""
    make, sigma = OPTIMIZERS[name], math.sqrt(steps) / mu
    key = jax.random.key(10_000 + seed)
    optimizer = make(l2_clip_norm=L2_CLIP_NORM, noise_multiplier=sigma, expected_batch_size=BATCH, key=key)
    event = dpopt.privacy_event(optimizer, sampling=Poisson(1.0), steps=steps)
    claimed = dpopt.epsilon_of_event(event, delta=DELTA)

    rng = np.random.default_rng(seed)
    member, coins = rng.random(canaries) < 0.5, rng.random(runs) < 0.5
    train = functools.partial(released, make, steps=steps, sigma=sigma)
    single = jnp.array([[LENGTH, 0.0]])  # one canary, and a coordinate beside it
    with fault(broken):
        updates = jax.jit(lambda x, m, k: train(x, m, key=k))(LENGTH * jnp.eye(canaries), member, key)
        many = jax.jit(jax.vmap(lambda m, k: train(single, m[None], key=k)[:, 0], out_axes=1))
        many_updates = many(coins, jax.random.split(jax.random.fold_in(key, 1), runs))
    score, many_score = scores(updates), scores(many_updates)
    mus = {
        "one_run": one_run_mu(score, member, significance=SIGNIFICANCE, guesses=guesses(canaries)),
        "many_runs": many_runs_mu(many_score, coins, significance=SIGNIFICANCE),
    }
    bounds = {method: epsilon_of_mu(found, delta=DELTA) for method, found in mus.items()}
    exceeds = max(bounds.values()) > claimed
    return {
        "optimizer": name,
        "fault": broken,
        "claimed_epsilon": claimed,
        "lower_bounds": bounds,
        "lower_bounds_mu": mus,
        "exceeds_claim": exceeds,
        "as_expected": exceeds == (broken != "none"),
        "sigma": sigma,
        "steps": steps,
        "canaries": canaries,
        "members": int(member.sum()),
        "runs": runs,
        "seed": seed,
        "right_guesses": {
            share: right_guesses(score, member, *pair) for share, pair in zip(GUESSED, guesses(canaries), strict=True)
        },
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="part of an optimizer's name")
    parser.add_argument("--part", action="append", choices=PARTS, help="(repeatable)")
    arguments.count(parser, "--canaries", 2_000, "canaries of the one large run (default 2000)")
    arguments.count(parser, "--runs", 8_000, "small runs with one canary each (default 8000)")
    parser.add_argument("--pipeline-runs", type=int, default=6_000, help="runs of the whole pipeline (default 6000)")
    arguments.out(parser)


def run(options: argparse.Namespace) -> None:
    main(options.out, options.canaries, options.runs, options.pipeline_runs, options.only, options.part or PARTS)


def main(
    out: Path, canaries: int, runs: int, pipeline_runs: int, only: str | None = None, parts: Sequence[str] = PARTS
) -> dict[str, Any]:
    """Audits every optimizer, sound and broken in three ways; the pipeline with eleven mistakes, correlated noise with
    five, adaptive clip norms and sparse noise with three each, rows with three, private search with two.

    Prints tables and writes ``audit.json`` to ``out``; parts of it that are not in ``parts`` stay.
    """
    path = out / "audit.json"
    settings = {"delta": DELTA, "significance": SIGNIFICANCE, "guessed": GUESSED, "relation": "add or remove one"}
    record = json.loads(path.read_text()) if path.exists() and set(parts) != set(PARTS) else {}
    record |= {"environment": records.environment(), "settings": settings}
    if "optimizers" in parts:
        record["audits"] = optimizers(canaries, runs, only)
    for name, module in MODULES.items():
        if name in parts:
            record[name] = module.main(pipeline_runs, SIGNIFICANCE)
    records.write_json(path, record)
    print(f"Wrote {path}.")
    return record


def optimizers(canaries: int, runs: int, only: str | None = None) -> list[dict[str, Any]]:
    """Audits every optimizer, sound and broken in three ways."""
    rows = []
    print(
        f"{'optimizer':<26}{'fault':<16}{'claimed':>8}{'one run':>10}{'many runs':>11}   (epsilon at delta {DELTA:g})"
    )
    for seed, name in enumerate(n for n in OPTIMIZERS if only is None or only in n):
        for broken in ("none", "half the noise", "no clip", "one key"):
            row = audit(name, broken, canaries=canaries, runs=runs, seed=seed)
            rows.append(row)
            one, many = row["lower_bounds"]["one_run"], row["lower_bounds"]["many_runs"]
            verdict = "exceeds the claim" if row["exceeds_claim"] else ""
            surprise = "" if row["as_expected"] else "  UNEXPECTED"
            print(
                f"{name:<26}{broken:<16}{row['claimed_epsilon']:>8.2f}{one:>10.2f}{many:>11.2f}   {verdict}{surprise}",
                flush=True,
            )
    return rows
