"""What the audits of many small runs share.

The best attack is chosen on half of the runs and counted on the other half.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

import dpopt
from dpopt.audit import epsilon_of_rates, many_runs
from dpopt.sampling import Poisson

DELTAS = (1e-5, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9)

# Each mistake, the scene in which it shows, and a context manager that plants it in the function that does the work.
Mistakes = Mapping[str, tuple[str, Callable[[], contextlib.AbstractContextManager[Any]]]]


def plant(mistakes: Mistakes, name: str) -> contextlib.AbstractContextManager[Any]:
    """Plants one of the mistakes while the block runs; ``"none"`` plants nothing."""
    return contextlib.nullcontext() if name == "none" else mistakes[name][1]()


def sampled_likelihood(log_ratio: np.ndarray, sampling_prob: float) -> np.ndarray:
    """Log likelihood ratio of each run under Poisson sampling, from ``(runs, steps)`` ratios of "in the sample"."""
    return np.logaddexp(math.log1p(-sampling_prob), math.log(sampling_prob) + log_ratio).sum(axis=1)


def attack(found: dict[str, np.ndarray], coins: np.ndarray, claims: dict[float, float], significance: float) -> dict:
    """Chooses score, threshold, direction and delta on half of the runs; bounds epsilon on the other half."""
    half = len(coins) // 2

    def seen(choice, runs):
        name, threshold, sign = choice
        present = coins[runs] if sign > 0 else ~coins[runs]
        return many_runs.counted(sign * found[name][runs], present, sign * threshold, significance)

    choices = [
        (name, threshold, sign)
        for name, score in found.items()
        for threshold in np.quantile(score[:half], many_runs.THRESHOLDS)
        for sign in (1, -1)
    ]
    first, second = slice(half), slice(half, None)
    measured = {choice: seen(choice, first) for choice in choices}
    expected = {(c, delta): epsilon_of_rates(*r, delta) for c, r in measured.items() for delta in claims}
    best = max(expected, key=lambda e: expected[e] - claims[e[1]])
    if expected[best] <= claims[best[1]]:  # nothing exceeds its claim: take what comes nearest
        best = max((e for e in expected if claims[e[1]] > 0), key=lambda e: expected[e] / claims[e[1]])
    choice, delta = best
    return {
        "attack": choice[0],
        "guesses": "in" if choice[2] > 0 else "out",
        "delta": delta,
        "claimed_epsilon": claims[delta],
        "lower_bound": epsilon_of_rates(*seen(choice, second), delta),
    }


def audit_sampled(
    scene: Any, found: Callable[[np.ndarray], dict[str, np.ndarray]], *, runs: int, significance: float, seed: int
) -> dict[str, Any]:
    """Audits runs of a scene with Poisson sampling; ``found`` maps the runs' coins to the attacker's scores."""
    coins = np.random.default_rng([seed, 0]).random(runs) < 0.5
    optimizer = scene.optimizer(jax.random.key(0))
    event = dpopt.privacy_event(optimizer, sampling=Poisson(scene.sampling_prob), steps=scene.steps)
    claims = {delta: dpopt.epsilon_of_event(event, delta=delta) for delta in DELTAS}
    row = attack(found(coins), coins, claims, significance)
    return row | dict(runs=runs, steps=scene.steps, sigma=scene.sigma, significance=significance, seed=seed)


def audit_all(
    audit: Callable[..., dict[str, Any]],
    scenes: Iterable[str],
    mistakes: Mistakes,
    runs: int,
    significance: float,
) -> list[dict[str, Any]]:
    """Audits every scene, sound and with each mistake; ``significance`` is for all of them together."""
    rows = []
    cases = [(scene, "none") for scene in scenes] + [(scene, name) for name, (scene, _) in mistakes.items()]
    print(f"\n{'mistake':<34}{'run':<25}{'attack':<28}{'delta':>8}{'claimed':>9}{'at least':>9}")
    for scene, name in cases:
        found = audit(scene, name, runs=runs, significance=significance / len(cases))
        exceeds = found["lower_bound"] > found["claimed_epsilon"]
        verdicts = {"exceeds_claim": exceeds, "as_expected": exceeds == (name != "none")}
        row = {"run": scene, "mistake": name, **found, **verdicts}
        rows.append(row)
        surprise = "" if row["as_expected"] else "  UNEXPECTED"
        verdict = "exceeds the claim" if row["exceeds_claim"] else ""
        print(
            f"{name:<34}{scene:<25}{row['attack']:<28}{row['delta']:>8g}{row['claimed_epsilon']:>9.2f}"
            f"{row['lower_bound']:>9.2f}   {verdict}{surprise}",
            flush=True,
        )
    return rows
