"""The audit's bounds are right on noise of known size, hold for sound optimizers, and break for broken ones."""

import json
import math

import numpy as np
import pytest

import dpopt

pytest.importorskip("scipy")

from runs import ROOT

from benchmarks import audit, audit_correlated, audit_pipeline

FAULTS = ("half the noise", "no clip", "one key")


def guesses_at(mu, count, seed=0):
    """Scores of canaries under exactly mu-Gaussian-DP."""
    rng = np.random.default_rng(seed)
    member = rng.random(count) < 0.5
    return mu * member + rng.normal(size=count), member


@pytest.mark.parametrize("mu", [0.0, 0.5, 1.0, 2.0])
def test_bounds_stay_below_the_truth_and_come_near(mu):
    score, member = guesses_at(mu, 4_000)
    many, one = audit.many_runs_bound(score, member), audit.one_run_bound(score, member)
    assert max(one, many) <= mu
    if mu >= 1:
        assert many > 0.6 * mu and one > 0.2 * mu


def test_bounds_are_seldom_wrong():
    """At a significance of 0.1, at most about one bound in ten may exceed the truth."""
    wrong = [audit.many_runs_bound(*guesses_at(1.0, 400, seed), significance=0.1) > 1.0 for seed in range(100)]
    assert sum(wrong) <= 20  # far beyond chance if the rate were 0.1


def test_the_one_run_bound_is_that_of_jax_privacy():
    auditing = pytest.importorskip("jax_privacy.auditing")
    for guesses, right in [(100, 90), (30, 30), (300, 200)]:
        low, high = 0.0, 5.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if audit.refutes(middle, 1_000, guesses, right, 0.01) else (low, middle)
        theirs = auditing._epsilon_one_run_fdp(0.0, 1_000, guesses, right, 0.01, audit.DELTA)
        assert audit.epsilon_of_mu(low) == pytest.approx(theirs, abs=0.02)


@pytest.mark.slow
def test_the_claim_holds_and_three_broken_builds_are_caught():
    rows = {f: audit.audit("dp_adam_bc", f, canaries=200, runs=2_000, seed=3) for f in ("none", *FAULTS)}
    assert all(r["as_expected"] for r in rows.values()), rows
    sound = rows["none"]
    assert 0.5 < max(sound["lower_bounds"].values()) <= sound["claimed_epsilon"]
    for f in FAULTS:
        assert max(rows[f]["lower_bounds"].values()) > rows[f]["claimed_epsilon"] == sound["claimed_epsilon"]


def test_the_claim_is_the_gaussian_one():
    assert audit.epsilon_of_mu(1.0) == pytest.approx(4.377, abs=0.01)  # Dong, Roth and Su's formula at delta 1e-5
    assert audit.epsilon_of_mu(0.0) == 0.0


def test_faults_are_undone():
    before = dpopt.noise.standard_normal_like, dpopt.clipping.FlatClip.coefficients
    for name in FAULTS:
        with audit.fault(name):
            assert (dpopt.noise.standard_normal_like, dpopt.clipping.FlatClip.coefficients) != before
    assert (dpopt.noise.standard_normal_like, dpopt.clipping.FlatClip.coefficients) == before


def test_every_named_optimizer_is_audited():
    names = {*vars(dpopt), *dpopt.baselines.__all__}
    named = {n for n in names if n.startswith(("dp_", "dp2", "pda_")) or n in ("adadps", "scale_then_privatize")}
    assert {name.split(",")[0] for name in audit.OPTIMIZERS} == named


# The mistakes that the audit was asked to catch.
ELEVEN = {
    "noise divided by the batch",
    "same key each step",
    "clip after the mean",
    "per-leaf clip passed off as flat",
    "one leaf without noise",
    "fixed batches",
    "shuffled epochs",
    "padding unmasked",
    "second query unpaid",
    "stale state replayed",
    "one device's noise repeated",
}
FAINT = {"fixed batches", "second query unpaid"}  # it takes more runs to see them
LOUD = {"noise divided by the batch", "clip after the mean"}  # and these, like the optimizers' faults, stand out
RUNS = {"few loud steps": 2_000, "many steps": 800, "a resumed run": 1_000, "two queries": 800}


def test_the_pipeline_is_attacked_with_all_eleven_mistakes():
    assert set(audit_pipeline.MISTAKES) == ELEVEN


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in FAINT | LOUD else n for n in audit_pipeline.MISTAKES]
)
def test_a_mistake_in_the_pipeline_is_caught(name):
    scene, _ = audit_pipeline.MISTAKES[name]
    row = audit_pipeline.audit(scene, name, runs=4_000 if name in FAINT else RUNS[scene], significance=1e-3, seed=5)
    assert row["lower_bound"] > row["claimed_epsilon"], row


@pytest.mark.slow
@pytest.mark.parametrize(
    "scene", [pytest.param(s, marks=pytest.mark.slow) if s == "two queries" else s for s in audit_pipeline.SCENES]
)
def test_a_sound_pipeline_is_not_accused(scene):
    row = audit_pipeline.audit(scene, "none", runs=RUNS[scene], significance=1e-3, seed=5)
    assert row["lower_bound"] <= row["claimed_epsilon"], row


@pytest.mark.slow
@pytest.mark.parametrize("name", audit_correlated.MISTAKES)
def test_a_mistake_in_correlated_noise_is_caught(name):
    scene, _ = audit_correlated.MISTAKES[name]
    row = audit_correlated.audit(scene, name, runs=3_000, significance=1e-3, seed=5)
    assert row["lower_bound"] > row["claimed_epsilon"], row


@pytest.mark.slow
@pytest.mark.parametrize("scene", audit_correlated.SCENES)
def test_sound_correlated_noise_is_not_accused(scene):
    row = audit_correlated.audit(scene, "none", runs=3_000, significance=1e-3, seed=5)
    assert 0.3 * row["claimed_epsilon"] < row["lower_bound"] <= row["claimed_epsilon"], row


def test_mistakes_are_undone():
    import dpopt.entropy

    def in_place():
        return (
            dpopt.noise.standard_normal_like,
            dpopt._trees.next_count,
            dpopt.clipping.FlatClip.coefficients,
            dpopt.gradients.PerExampleGrads.clipped_sum,
            dpopt._batches.checked_mask,
            dpopt.sampling.PoissonSampler._rng,
            dpopt.sampling.PoissonSampler.batch,
            dpopt.privacy.Privacy.step_event,
            dpopt.entropy.with_fresh_noise,
            dpopt.parts.CyclicPoissonSampler.part,
            dpopt.correlated.strategies._strategy,
            dpopt._threefry.fold_in,
            dpopt.events.step_event,
        )

    before = in_place()
    for module in (audit_pipeline, audit_correlated):
        for name in module.MISTAKES:
            with module.mistake(name):
                assert in_place() != before, name
            assert in_place() == before, name


@pytest.mark.parametrize(("right", "wrong", "delta"), [(90, 10, 0.0), (500, 20, 0.1), (0, 0, 0.0), (1000, 0, 0.5)])
def test_the_bound_on_rates_is_that_of_clopper_and_pearson(right, wrong, delta):
    """At its bounds, counts as extreme as these have the probability that is allowed, by the binomial itself."""
    from scipy import stats

    found = audit_pipeline.lower_bound(*audit_pipeline.rates(right, 1_000, wrong, 1_000, 0.01), delta)
    rates = np.linspace(0, 1, 100_001)
    least = rates[stats.binom.sf(right - 1, 1_000, rates) <= 0.005].max() if right else 0.0
    most = rates[stats.binom.cdf(wrong, 1_000, rates) >= 0.005].max()
    assert found == pytest.approx(max(0.0, math.log((least - delta) / most)) if least > delta else 0.0, abs=0.01)


def test_the_recorded_audit_covers_all_and_holds():
    record = json.loads((ROOT / "benchmarks" / "results" / "audit.json").read_text())
    for part, module in (("pipeline", audit_pipeline), ("correlated", audit_correlated)):
        seen = {(r["run"], r["mistake"]) for r in record[part]}
        planted = {(scene, name) for name, (scene, _) in module.MISTAKES.items()}
        assert seen == planted | {(scene, "none") for scene in module.SCENES}
        for r in record[part]:
            assert (r["lower_bound"] > r["claimed_epsilon"]) == (r["mistake"] != "none"), r
    seen = {(r["optimizer"], r["fault"]) for r in record["audits"]}
    assert seen == {(name, f) for name in audit.OPTIMIZERS for f in ("none", *FAULTS)}
    for r in record["audits"]:
        least = max(r["lower_bounds"].values())
        assert math.isfinite(r["claimed_epsilon"])
        assert (least > r["claimed_epsilon"]) == (r["fault"] != "none"), r
