"""Attacks on dpopt's own optimizers and runs: sound ones stay below their claims, broken ones are caught.

The bounds themselves: tests/audit/test_audit_bounds.py.
"""

import json
import math

import pytest

import dpopt

pytest.importorskip("scipy")

from runs import ROOT

from benchmarks.audit import adaptive, correlated, pipeline, sparse, tuning
from benchmarks.audit import command as audit
from benchmarks.audit import rows as audit_rows

FAULTS = ("half the noise", "no clip", "one key")


@pytest.mark.slow
def test_the_claim_holds_and_three_broken_builds_are_caught():
    rows = {f: audit.audit("dp_adam_bc", f, canaries=200, runs=2_000, seed=3) for f in ("none", *FAULTS)}
    assert all(r["as_expected"] for r in rows.values()), rows
    sound = rows["none"]
    assert 0.5 < max(sound["lower_bounds"].values()) <= sound["claimed_epsilon"]
    for f in FAULTS:
        assert max(rows[f]["lower_bounds"].values()) > rows[f]["claimed_epsilon"] == sound["claimed_epsilon"]


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
    assert set(pipeline.MISTAKES) == ELEVEN


@pytest.mark.slow
@pytest.mark.parametrize("name", pipeline.MISTAKES)
def test_a_mistake_in_the_pipeline_is_caught(name):
    scene, _ = pipeline.MISTAKES[name]
    row = pipeline.audit(scene, name, runs=4_000 if name in FAINT else RUNS[scene], significance=1e-3, seed=5)
    assert row["lower_bound"] > row["claimed_epsilon"], row


@pytest.mark.slow
@pytest.mark.parametrize("scene", pipeline.SCENES)
def test_a_sound_pipeline_is_not_accused(scene):
    row = pipeline.audit(scene, "none", runs=RUNS[scene], significance=1e-3, seed=5)
    assert row["lower_bound"] <= row["claimed_epsilon"], row


@pytest.mark.slow
@pytest.mark.parametrize("name", correlated.MISTAKES)
def test_a_mistake_in_correlated_noise_is_caught(name):
    scene, _ = correlated.MISTAKES[name]
    row = correlated.audit(scene, name, runs=3_000, significance=1e-3, seed=5)
    assert row["lower_bound"] > row["claimed_epsilon"], row


@pytest.mark.slow
@pytest.mark.parametrize("scene", correlated.SCENES)
def test_sound_correlated_noise_is_not_accused(scene):
    row = correlated.audit(scene, "none", runs=3_000, significance=1e-3, seed=5)
    assert 0.3 * row["claimed_epsilon"] < row["lower_bound"] <= row["claimed_epsilon"], row


@pytest.mark.slow
@pytest.mark.parametrize("name", adaptive.MISTAKES)
def test_a_mistake_in_adaptive_clipping_is_caught(name):
    scene, _ = adaptive.MISTAKES[name]
    row = adaptive.audit(scene, name, runs=6_000, significance=1e-3, seed=5)
    assert row["lower_bound"] > row["claimed_epsilon"], row


@pytest.mark.slow
@pytest.mark.parametrize("scene", adaptive.SCENES)
def test_sound_adaptive_clipping_is_not_accused(scene):
    row = adaptive.audit(scene, "none", runs=6_000, significance=1e-3, seed=5)
    assert 0.3 * row["claimed_epsilon"] < row["lower_bound"] <= row["claimed_epsilon"], row


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    sparse.MISTAKES,
)
def test_a_mistake_in_sparse_noise_is_caught(name):
    scene, _ = sparse.MISTAKES[name]
    row = sparse.audit(scene, name, runs=6_000, significance=1e-3, seed=5)
    assert row["lower_bound"] > row["claimed_epsilon"], row


@pytest.mark.slow
@pytest.mark.parametrize("scene", sparse.SCENES)
def test_sound_sparse_noise_is_not_accused(scene):
    row = sparse.audit(scene, "none", runs=6_000, significance=1e-3, seed=5)
    assert 0.2 * row["claimed_epsilon"] < row["lower_bound"] <= row["claimed_epsilon"], row


@pytest.mark.slow
@pytest.mark.parametrize("name", audit_rows.MISTAKES)
def test_a_mistake_about_rows_is_caught(name):
    scene, _ = audit_rows.MISTAKES[name]
    row = audit_rows.audit(scene, name, runs=4_000, significance=1e-3, seed=5)
    assert row["lower_bound"] > row["claimed_epsilon"], row


@pytest.mark.slow
@pytest.mark.parametrize("scene", audit_rows.SCENES)
def test_sound_rows_are_not_accused(scene):
    row = audit_rows.audit(scene, "none", runs=2_000, significance=1e-3, seed=5)
    assert 0 < row["lower_bound"] <= row["claimed_epsilon"], row


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", *tuning.MISTAKES])
def test_a_private_search_keeps_its_claim_and_a_mistake_in_one_does_not(name):
    scenes = tuning.SCENES if name == "none" else [tuning.MISTAKES[name][0]]
    for scene in scenes:
        row = tuning.audit(scene, name, runs=1_500, significance=1e-3, seed=5)
        assert (row["lower_bound"] > row["claimed_epsilon"]) == (name != "none"), row


def test_mistakes_are_undone():
    import dpopt.run.entropy

    def in_place():
        return (
            dpopt.noise.standard_normal_like,
            dpopt.common.trees.next_count,
            dpopt.clipping.FlatClip.coefficients,
            dpopt.gradients.PerExampleGrads.clipped_sum,
            dpopt.engines.batches.checked_mask,
            dpopt.sampling.PoissonSampler._rng,
            dpopt.sampling.PoissonSampler.batch,
            dpopt.privacy.Privacy.step_event,
            dpopt.run.entropy.with_fresh_noise,
            dpopt.samplers.parts.CyclicPoissonSampler.part,
            dpopt.correlated.strategies._strategy,
            dpopt.normals.threefry.fold_in,
            dpopt.events.step_event,
            dpopt.adaptive.QuantileClip.split,
            dpopt.sparse.SparseRows.split,
            dpopt.truncated.TruncatedPoisson.event,
            dpopt.users._UserLoss.run,
            dpopt.grouping.group,
            dpopt.tuning.NumTrials.event,
            dpopt.tuning.PrivateScore.event,
        )

    before = in_place()
    for module in audit.MODULES.values():
        for name in module.MISTAKES:
            with module.mistake(name):
                assert in_place() != before, name
            assert in_place() == before, name


def test_the_recorded_audit_covers_all_and_holds():
    record = json.loads((ROOT / "benchmarks" / "results" / "audit.json").read_text())
    for part, module in audit.MODULES.items():
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
