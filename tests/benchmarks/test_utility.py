"""Utility sweeps: closed forms agree with the engine, records are complete, and a killed sweep resumes."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import types

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import rdp
from scipy import sparse
from test_benchmark_data import mnist_files, ratings_file

pytest.importorskip("sklearn")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

import dpopt
from benchmarks import records
from benchmarks.cost import models, scaling
from benchmarks.report import command as report
from benchmarks.report import orderings, plots, summaries
from benchmarks.report import tables as utility_tables
from benchmarks.utility import closed_forms, methods, paid_tuning, runs, sweeps, tasks
from benchmarks.utility import command as utility
from benchmarks.utility.suites import epochs, frontier, papers
from benchmarks.utility.tasks import networks
from benchmarks.utility.tasks import text as text_task
from dpopt import events
from dpopt.engines import unit_clip

SETTING = runs.Setting(
    label="tiny",
    task="movielens",
    task_options={"dimension": 3, "biases": True},
    method="DP-Adam",
    options={"learning_rate": 0.02},
    noise_multiplier=1.0,
    delta=1e-3,
    expected_batch_size=16,
    steps=20,
)


@pytest.fixture
def few_ratings(tmp_path):
    where = tmp_path / "data"
    where.mkdir()
    rng = np.random.default_rng(0)
    columns = rng.integers(1, 944, 300), rng.integers(1, 1683, 300), rng.integers(1, 6, 300)
    ratings_file(where, [f"{u}\t{i}\t{r}\t0\n" for u, i, r in zip(*columns, strict=True)])
    yield where
    tasks._make.cache_clear()


def agree(grads, reference, clip, scale=None, offset=None):
    """Compares the clipped sum and norms of a closed form with the vmap engine on materialised gradients."""
    for diagonal, shift in ((None, None), (scale, None), (scale, offset)):
        if shift is None and diagonal is not None and scale is None:
            continue
        mine, theirs = grads, reference
        if diagonal is not None:
            mine, theirs = mine.scale(diagonal), theirs.scale(diagonal)
        if shift is not None:
            mine, theirs = mine.shift(shift), theirs.shift(shift)
        mine, theirs = mine.clipped_sum(clip), theirs.clipped_sum(clip)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), mine.sum, theirs.sum)
        np.testing.assert_allclose(mine.sensitive.norms, theirs.sensitive.norms, rtol=2e-5, atol=1e-6)


def logistic_problem():
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(9, 70)) * (rng.random((9, 70)) < 0.6)
    dense[3] = 0  # a review without a known word
    rows = closed_forms.cut(sparse.csr_array(dense.astype(np.float32)))
    labels = rng.integers(0, 2, 9).astype(np.float32)
    params = {"weights": jnp.asarray(rng.normal(size=70), jnp.float32), "bias": jnp.asarray(0.3)}
    return dense.astype(np.float32), rows, labels, params


CLIPS = (
    dpopt.FlatClip(0.7),
    dpopt.GroupClip({"weights": 0.5, "bias": 0.2}),
    dpopt.clipping.NormalizedClip(1.0),
    unit_clip.UnitClip({"weights": jnp.array(0.8), "bias": jnp.array(0.6)}),
)


@pytest.mark.slow
@pytest.mark.parametrize("clip", CLIPS)
def test_sparse_logistic_regression_agrees_with_the_engine(clip):
    dense, rows, labels, params = logistic_problem()
    batch = text_task.whole(rows, labels)
    mask = jnp.arange(9) != 5

    def loss(p, example):
        x, y = example
        z = x @ p["weights"] + p["bias"]
        return jax.nn.softplus(z) - y * z

    examples = (jnp.asarray(dense), jnp.asarray(labels))
    reference = dpopt.per_example_grads(loss, engine="vmap")(params, examples, mask=mask)
    grads = closed_forms.sparse_logistic(params, batch, mask)
    rng = np.random.default_rng(1)
    scale = {"weights": jnp.asarray(rng.uniform(0.5, 2, 70), jnp.float32), "bias": 0.5}
    offset = {"weights": jnp.asarray(rng.normal(size=70), jnp.float32), "bias": 0.1}
    agree(grads, reference, clip, scale, offset)
    agree(grads.scale(2.0), reference.scale(2.0), clip)
    for mine, theirs in zip(grads.materialize().values(), reference.materialize().values(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("biases", [False, True])
def test_factorization_agrees_with_the_engine(biases):
    rng = np.random.default_rng(0)
    params = {"users": rng.normal(size=(5, 3)), "items": rng.normal(size=(4, 3))}
    if biases:
        params |= {"mean": np.array(3.0), "user_bias": rng.normal(size=5), "item_bias": rng.normal(size=4)}
    params = {k: jnp.asarray(v, jnp.float32) for k, v in params.items()}
    users, items, ratings = (jnp.asarray(rng.integers(0, n, 8)) for n in (5, 4, 6))
    batch = closed_forms.Ratings(users, items, ratings.astype(jnp.float32))
    mask = jnp.arange(8) != 2

    def loss(p, example):
        return 0.5 * (closed_forms.predict(p, example.users, example.items) - example.ratings) ** 2

    reference = dpopt.per_example_grads(loss, engine="vmap")(params, batch, mask=mask)
    scale = {k: jnp.asarray(rng.uniform(0.5, 2, v.shape), jnp.float32) for k, v in params.items()}
    grads = closed_forms.factorization(params, batch, mask)
    for clip in (dpopt.FlatClip(1.0), dpopt.clipping.NormalizedClip(1.0)):
        agree(grads, reference, clip)
        agree(grads.scale(scale), reference.scale(scale), clip)
    with pytest.raises(ValueError, match="offset"):
        grads.shift(params).clipped_sum(dpopt.FlatClip(1.0))


def test_packed_batches_hold_the_rows_that_were_drawn():
    dense, rows, labels, params = logistic_problem()
    task = object.__new__(text_task.Imdb)
    task._rows, task._labels, task._one, task._engine = rows, jnp.asarray(labels), 1.0, None
    drawn = [np.array([2, 7], np.int32), np.array([], np.int32), np.array([3, 0, 8], np.int32)]
    packed = task.pack(drawn, task.sizes(drawn))
    clipped = jax.jit(lambda params, batch: task.grads(params, batch).clipped_sum(dpopt.FlatClip(math.inf)).sum)
    weights, bias = np.asarray(params["weights"]), np.asarray(params["bias"])
    for t, own in enumerate(drawn):
        got = clipped(params, jax.tree.map(lambda x, t=t: x[t], packed))["weights"]
        residual = 1 / (1 + np.exp(-dense[own] @ weights - bias)) - labels[own]
        np.testing.assert_allclose(got, residual @ dense[own], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_record_is_complete_and_its_epsilon_is_the_chains(few_ratings, tmp_path):
    (record,) = sweeps.sweep([SETTING], [3], out=tmp_path / "out", where=few_ratings)
    assert record["seed"] == 3 and record["parameters"] == 2625 * 4 + 1
    assert record["environment"]["versions"]["dpopt"] and record["environment"]["device"]
    assert record["relation"] == "add or remove one example" and record["sampling"]["kind"] == "Poisson"
    assert math.isfinite(record["score"]) and record["curve"][-1] == [20, record["score"]]
    spent = dpopt.epsilon(noise_multiplier=1.0, sampling_prob=16 / 240, steps=20, delta=1e-3)
    assert record["epsilon"]["pld"] == pytest.approx(spent) and record["epsilon"]["rdp"] >= record["epsilon"]["pld"]
    event = events.from_json(record["event"])
    assert dpopt.epsilon_of_event(event, delta=1e-3) == pytest.approx(spent)
    json.dumps(record)


@pytest.mark.slow
def test_a_contender_with_an_adaptive_clip_costs_what_its_noise_multiplier_says(few_ratings, tmp_path):
    clip = {"adaptive": 0.1, "quantile": 0.5}
    setting = dataclasses.replace(SETTING, l2_clip_norm=clip)
    (record,) = sweeps.sweep([setting], [3], out=tmp_path / "out", where=few_ratings)
    spent = dpopt.epsilon(noise_multiplier=1.0, sampling_prob=16 / 240, steps=20, delta=1e-3)
    assert record["epsilon"]["pld"] == pytest.approx(spent) and math.isfinite(record["score"])
    assert setting.name(3) != SETTING.name(3)
    adaptive = [s for c in frontier.contests() for s in c.candidates(3.04, validate=True) if "adaptive" in s.label]
    assert {s.task for s in adaptive} == {"imdb", "movielens", "digits"}
    assert all(s.l2_clip_norm == clip for s in adaptive)


@pytest.mark.slow
def test_seeds_together_or_apart_give_the_same_runs(few_ratings, tmp_path):
    apart = sweeps.sweep([SETTING], [0, 1], out=tmp_path / "a", where=few_ratings, together=1)
    together = sweeps.sweep([SETTING], [0, 1], out=tmp_path / "b", where=few_ratings, together=2)
    np.testing.assert_allclose([r["score"] for r in apart], [r["score"] for r in together], rtol=1e-4)
    assert apart[0]["score"] != apart[1]["score"]


@pytest.mark.slow
def test_finished_runs_are_not_repeated(few_ratings, tmp_path, monkeypatch):
    first = sweeps.sweep([SETTING], [0, 1], out=tmp_path, where=few_ratings)
    (tmp_path / SETTING.name(1)).write_text("{ cut short")
    trained = []
    real = runs.Program.train
    monkeypatch.setattr(runs.Program, "train", lambda self, seeds, *a: trained.extend(seeds) or real(self, seeds, *a))
    renamed = dataclasses.replace(SETTING, label="another name")
    again = sweeps.sweep([renamed], [0, 1, 2], out=tmp_path, where=few_ratings)
    assert trained == [1, 2]
    assert [r["score"] for r in again[:2]] == [r["score"] for r in first] and again[0]["label"] == "another name"


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
sys.path[:0] = [{tests!r}, {tests!r} + "/benchmarks"]
from test_utility import SETTING, SWEEP
from benchmarks import records
from benchmarks.utility import sweeps
real = records.write_json
def slow(path, content):
    real(path, content)
    print("wrote", flush=True)
    time.sleep({pause})
records.write_json = slow
sweeps.sweep(SWEEP, range(2), out=Path({out!r}), where=Path({where!r}))
"""
SWEEP = [SETTING, dataclasses.replace(SETTING, method="DP-SGD", options={"learning_rate": 0.1}, label="other")]


@pytest.mark.slow
def test_a_sweep_killed_and_started_again_gives_the_same_table(few_ratings, tmp_path):
    root = str(records.ROOT)
    out, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"

    def start(pause):
        tests = os.path.join(root, "tests")
        code = KILLED.format(root=root, tests=tests, out=str(out), where=str(few_ratings), pause=pause)
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)

    process = start(pause=60)
    assert process.stdout.readline()  # one run is finished, the next has not begun
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(sweeps.missing(SWEEP, range(2), out)) == 2 and len(list(out.glob("*.json"))) == 1
    kept = {p.name: p.stat().st_mtime_ns for p in out.glob("*.json")}

    tables = []
    for folder in (out, undisturbed):
        found = sweeps.sweep(SWEEP, range(2), out=folder, where=few_ratings)
        groups = [[r for r in found if r["setting"] == s.content()] for s in SWEEP]
        tables.append([summaries.summarize(g) for g in groups])
    assert {p.name: p.stat().st_mtime_ns for p in out.glob("*.json") if p.name in kept} == kept
    assert [r["scores"] for r in tables[0]] == [r["scores"] for r in tables[1]]
    assert [r["epsilon"] for r in tables[0]] == [r["epsilon"] for r in tables[1]]
    for row in tables[0]:
        assert len(row["seeds"]) == 2 and row["std"] > 0


def test_what_is_released_before_training_is_paid_for(few_ratings):
    task = tasks.make("movielens", {"dimension": 2}, few_ratings)
    setting = dataclasses.replace(SETTING, noise_multiplier=None, epsilon=1.0, expected_batch_size=None)
    plain = runs.noise_for(setting, task)
    task.release = dp_accounting.GaussianDpEvent(20.0)
    runs._CALIBRATED.clear()
    paid = runs.noise_for(setting, task)
    assert paid > plain
    total = dpopt.epsilon_of_event(runs.event_of(setting, task, paid), delta=setting.delta)
    assert 0.98 < total <= 1.0


@pytest.mark.slow
def test_every_method_of_the_tables_can_be_built():
    four = dict(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=8, key=jax.random.key(0))
    settings = [row.setting for row in papers.rows()]
    for contest in frontier.contests():
        for epsilon in contest.epsilons:
            tried = contest.candidates(epsilon, validate=True)
            assert len(tried) == frontier.BUDGET and len({s.name(0) for s in tried}) == len(tried)
            assert len(contest.candidates(epsilon, validate=False)) == len(tried)
            settings += tried
    for s in settings:
        built = methods.build(
            s.method, s.options, steps=s.steps, privacy_four=four, side_information={"weights": np.ones(3), "bias": 1.0}
        )
        assert built.privacy.queries[0].multiplier(0) == 1.0
        assert methods.state_bytes(built, {"weights": jnp.zeros(3), "bias": jnp.zeros(())}) >= 0


def test_every_contender_of_the_epochs_has_both_noises_and_the_same_candidates(monkeypatch):
    monkeypatch.setattr(epochs, "bands", lambda compute, epsilon, delta: 4)
    four = dict(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=8, key=jax.random.key(0))
    contests = epochs.contests()
    named = {(c.table, c.label): {} for c in contests}
    for c in contests:
        assert {
            s.steps * s.expected_batch_size // c.compute.num_examples for s in c.candidates(3.0, validate=True)
        } <= {
            c.compute.epochs - 1,
            c.compute.epochs,
        }
        named[c.table, c.label][c.is_correlated] = [s.options for s in c.candidates(3.0, validate=False)]
        s = c.candidates(3.0, validate=True)[0]
        assert (s.noise is not None) == c.is_correlated
        more = {"noise": s.strategy()} if c.is_correlated else {}
        side = {"weights": np.ones(3), "bias": 1.0}
        built = methods.build(s.method, s.options, steps=s.steps, privacy_four=four | more, side_information=side)
        assert (built.privacy.correlation is not None) == c.is_correlated
    assert all(set(both) == {False, True} and both[False] == both[True] for both in named.values())
    assert {c.compute.epochs for c in contests} == {1, 3, 10}


@pytest.mark.slow
def test_bands_are_chosen_by_public_numbers_alone(monkeypatch):
    monkeypatch.setattr(epochs, "MOST_BANDS", 4)
    few, many = epochs.Compute(1, 5_000, 250), epochs.Compute(60, 5_000, 5_000)
    assert epochs.bands(few, 8.0, 1e-5) > 2 and epochs.bands(many, 1.0, 1e-5) == 1


@pytest.mark.slow
def test_a_run_with_correlated_noise_samples_and_pays_by_parts():
    fields = dict(task="digits", method="DP-SGD", options={"learning_rate": 0.1}, epsilon=3.0, delta=1e-4)
    plain = runs.Setting(**fields, expected_batch_size=64, steps=8)
    assert "noise" not in plain.content()  # records that are older are found under their names
    setting = dataclasses.replace(plain, noise={"bands": 4, "momentum": 0.9})
    assert setting.name(0) != plain.name(0)
    program = runs.Program(setting)
    first, second = program.train([0, 1])
    assert first["sampling"]["kind"] == "cyclic Poisson in 4 parts" and first["score"] != second["score"]
    assert first["event"]["count"] == 2 and 2.9 < first["epsilon"]["pld"] <= 3.0
    assert first["event"]["event"]["sampling_probability"] == pytest.approx(4 * 64 / program.task.num_examples)
    drawn = runs._drawn(program.task.num_examples, 64.0, 4, 0, 8)
    assert all((rows % 4 == t % 4).all() for t, rows in enumerate(drawn))


@pytest.mark.slow
def test_disk_asks_for_the_gradient_further_on():
    options = {"after": {"kind": "kalman", "kappa": 0.8, "momentum": 0.0}, "learning_rate": 0.1}
    assert methods.look_ahead("combination", options) == pytest.approx(0.25)
    assert methods.look_ahead("combination", {"after": {"kind": "sgd"}}) == 0 == methods.look_ahead("DP-SGD", {})
    fields = dict(task="digits", method="combination", noise_multiplier=0.0, delta=1e-4, steps=3)
    with_filter = runs.Program(runs.Setting(options=options, **fields)).train([0])[0]["score_of_last"]
    no_filter = {"after": {"kind": "sgd"}, "learning_rate": 0.1}
    assert with_filter != runs.Program(runs.Setting(options=no_filter, **fields)).train([0])[0]["score_of_last"]


@pytest.mark.slow
def test_paid_tuning_stays_within_its_epsilon_and_resumes(tmp_path):
    (contest,) = (c for c in frontier.contests() if c.table == "Digits" and c.label == "DP-Adam, tuning paid")
    (record,) = paid_tuning.sweep(contest, 8.0, range(1), out=tmp_path, where=None)
    whole = dpopt.events.from_json(record["event"])
    search = whole.events[0].event
    assert isinstance(search, dp_accounting.dp_event.RepeatAndSelectDpEvent)
    assert (search.mean, search.shape) == (4.0, 0.0) and len(whole.events) == whole.events[0].count == 1
    accountant = rdp.RdpAccountant()
    accountant.compose(whole)
    assert record["epsilon"]["rdp"] == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-2)
    assert 7.9 < record["epsilon"]["rdp"] <= 8.0 and record["trials"] >= 1 and record["score"] > 0.7
    # A trial: the training at the noise that is stated, and a score that costs a tenth of it.
    _, score = search.event.events
    sigma = record["noise_multiplier"]
    assert score.noise_multiplier == pytest.approx(sigma / math.sqrt(frontier.STEPS / 9), rel=1e-3)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps(record | {"score": 0.25}))
    assert paid_tuning.sweep(contest, 8.0, range(1), out=tmp_path, where=None)[0]["score"] == 0.25


@pytest.mark.slow
def test_help_names_the_subcommands():
    out = subprocess.run([sys.executable, "-m", "benchmarks", "utility", "--help"], capture_output=True, text=True)
    assert out.returncode == 0
    for option in ("--suite", "--seeds", "--jobs", "--data", "--out"):
        assert option in out.stdout


def row(label, mean, published, std=0.001, **more):
    return {
        "label": label, "mean": mean, "std": std, "published": published,
        "metric": "accuracy", "higher_is_better": True,
        "epsilon": {"pld": 2.8, "rdp": 3.0}, "delta": 1e-5, "noise_multiplier": 1.0, "seeds": [0, 1], "seconds": 12.3,
        "not_covered_by_epsilon": ["vocabulary"], "table": "A table", "scores": [mean, mean],
        "state_bytes": 800, "parameters": 100,
        "environment": {"device": "cpu: cpu", "cores": 2, "versions": {"jax": "0"}},
    } | more  # fmt: skip


@pytest.mark.slow
def test_the_report_says_in_words_what_a_papers_ordering_became(tmp_path, monkeypatch):
    rows = [row("worst", 0.75, 0.6), row("best", 0.85, 0.8), row("second", 0.70, 0.7)]
    said = "\n".join(map(str, orderings.pairs(rows)))
    assert "best better than worst: shown" in said
    assert "second better than worst: **contradicted**" in said
    (close,) = orderings.pairs([row("a", 0.7, 0.6), row("b", 0.7001, 0.7)])
    assert "neither shown nor contradicted" in str(close)
    assert orderings.against_published(rows) == "3 of 3 rows reach the published figure, by the mean of 2 seeds."
    assert "short one (0.500" in orderings.against_published([row("short one", 0.5, 0.6)])
    single = [row("a", 0.7, 0.6, None, seeds=[0]), row("b", 0.5, 0.6, None, seeds=[0]), row("c", 0.7, None)]
    assert orderings.against_published(single) == (
        "1 of 2 rows reach the published figure, by one seed each; short of it: b (0.500, published 0.6)."
    )
    several = [row("a", 0.7, 0.6, seeds=[0, 1, 2]), row("b", 0.7, 0.6)]
    assert "by the mean of 2 to 3 seeds" in orderings.against_published(several)
    assert orderings.against_published([row("c", 0.7, None)]) == ""
    lower = [row("a", 2.0, 3.0, metric="MSE", higher_is_better=False)]
    assert "1 of 1" in orderings.against_published(lower)

    event = dp_accounting.GaussianDpEvent(2.0)
    more = {"tried": 4, "event": dpopt.events.to_json(event)}
    contested = [
        row(n, m, None, target_epsilon=e, contender=n, **more)
        for n, m, e in (("x", 0.8, 1.0), ("y", 0.9, 1.0), ("x", 0.95, 2.0))
    ]
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(event, mean=4.0, shape=0.0))
    with_tuning = accountant.get_epsilon(1e-5)
    said = utility_tables.frontier(contested)
    assert "|  | epsilon 1 | epsilon 2 |" in said and f"2 (3.00; 1; {with_tuning:.2f})" in said
    assert "| x | 0.800 ± 0.001 | **0.950 ± 0.001** |" in said and "| y | **0.900 ± 0.001** |  |" in said
    assert "published" not in utility_tables.papers([row("c", 0.7, None)])
    kinds = (("Poisson", ""), ("cyclic Poisson in 8 parts", ", correlated noise"))
    both = [
        row(f"x{e}", 0.8 + len(e) / 100, None, target_epsilon=3.0, contender=f"x{e}", table="A task, 3 epochs", tried=2)
        | {"sampling": {"kind": kind}, "event": more["event"]}
        for kind, e in kinds
    ]
    said = utility_tables.epochs(both)
    assert "| x | 0.800 ± 0.001 | **0.980 ± 0.001** |" in said and "3: 8 parts" in said
    (drawn,) = plots.epochs(both, tmp_path)
    assert drawn.name == "epochs-a-task.svg" and drawn.exists()
    for suite, content in (("papers", rows), ("frontier", contested)):
        (tmp_path / f"utility-{suite}.json").write_text(json.dumps({"rows": content}))
    tiny = {"batch": ("tiny MLP", (2, 4), lambda n: (models.MLP((), 2), np.ones((n, 3), np.float32)))}
    monkeypatch.setattr(scaling, "AXES", tiny)
    grown = {"environment": row("", 0, 0)["environment"], "runs": scaling.growth(repeats=2)}
    (tmp_path / "scaling.json").write_text(json.dumps(grown))
    path = report.write(tmp_path, tmp_path / "to")
    text = path.read_text()
    for part in ("A table", "not counted", "vocabulary", "| best | 2.80 | 3.00 | not known |", "## Scaling", "MLP"):
        assert part in text
    first = {p.name: p.read_bytes() for p in (tmp_path / "to" / "results").iterdir()}
    assert set(first) == {
        "utility-papers.json", "utility-frontier.json", "scaling.json", "papers-a-table.svg", "frontier-a-table.svg"
    }  # fmt: skip
    report.write(tmp_path, tmp_path / "to")
    assert {p.name: p.read_bytes() for p in (tmp_path / "to" / "results").iterdir()} == first


def test_exponents_are_fitted():
    assert scaling.exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


def test_a_part_of_a_suite_leaves_the_other_rows_alone():
    old = [row("a", 0.1, None), row("b", 0.2, None), row("c", 0.3, None, table="Other")]
    new = [row("b", 0.9, None), row("d", 0.4, None)]
    assert [(r["label"], r["mean"]) for r in summaries.merged(old, new)] == [
        ("a", 0.1), ("b", 0.9), ("d", 0.4), ("c", 0.3)
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_that_two_tables_show_is_counted_once(tmp_path, monkeypatch):
    fields = dict(task="digits", method="DP-SGD", options={"learning_rate": 0.1}, delta=1e-4, noise_multiplier=1.0)
    setting = runs.Setting(**fields, expected_batch_size=64, steps=1)
    rows = [runs.Row(table, setting, None) for table in ("one", "other")]
    monkeypatch.setattr(papers, "rows", lambda: rows)
    options = types.SimpleNamespace(only=None, seeds=2, out=tmp_path, data=None, jobs=1, together=2)
    found = utility.published(options, Console(quiet=True))
    assert [(r["table"], r["seeds"]) for r in found] == [("one", [0, 1]), ("other", [0, 1])]


@pytest.fixture
def few_reviews(tmp_path):
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for i in range(40):
            file = tmp_path / "aclImdb" / part / ("pos" if i % 2 else "neg") / f"{i}_5.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(" ".join(f"w{w}" for w in rng.zipf(1.5, 30) if w < 50))
    text_task.loaded.cache_clear()
    yield tmp_path
    text_task.loaded.cache_clear()


@pytest.mark.slow
def test_imdb_says_what_is_public_what_is_paid_for_and_what_is_neither(few_reviews):
    free = text_task.Imdb(few_reviews, frequency="train")
    assert free.not_covered_by_epsilon == ["vocabulary", "word frequencies"] and free.num_examples == 40
    assert free.release is None and not free.has_public_data

    paid = text_task.Imdb(few_reviews, public_share=0.25, vocabulary="public", frequency={"release": 3.0})
    assert paid.not_covered_by_epsilon == [] and paid.num_examples == 30
    assert paid.release == dp_accounting.GaussianDpEvent(3.0)
    one, other = (paid.side_information(seed)["weights"] for seed in (0, 1))
    assert (one > 0).all() and (one != other).any()  # every seed releases afresh

    public = text_task.Imdb(
        few_reviews, kind="log-idf", public_share=0.25, vocabulary="public", frequency="public", pairs=True
    )
    assert public.not_covered_by_epsilon == [] and public.release is None
    assert public.dimension > paid.dimension  # pairs beside words
    params = public.init(0)
    grads = public.public_grads(params)
    mine = closed_forms.sparse_logistic(params, public._public, jnp.ones(10, bool)).clipped_sum(
        dpopt.FlatClip(math.inf)
    )
    np.testing.assert_allclose(grads["weights"], mine.sum["weights"] / 10, rtol=1e-5, atol=1e-7)
    assert 0 <= float(public.score(params)) <= 1
    tuned = text_task.Imdb(few_reviews, validate=True)
    assert tuned.num_examples == 32 and len(tuned._test.labels) == 8
    with pytest.raises(ValueError, match="public_share"):
        text_task.Imdb(few_reviews, vocabulary="public")


def test_the_lstm_has_the_parameters_that_the_paper_counts():
    model = models.TwoLayerLSTM()
    tokens = jnp.zeros((3, 5), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == 706_690


@pytest.mark.slow
def test_a_network_learns_mnist_in_the_same_runner(tmp_path, monkeypatch):
    mnist_files(tmp_path, train=40, test=8)
    small = models.Autoencoder(widths=(), code=2)
    monkeypatch.setattr(networks.models, "Autoencoder", lambda: small)
    setting = dataclasses.replace(
        SETTING,
        task="mnist-autoencoder",
        task_options={"public_share": 0.1},
        method="DP-SGD",
        options={"learning_rate": 0.01},
        expected_batch_size=8,
        steps=2,
    )
    (record,) = runs.Program(setting, where=tmp_path).train([0])
    assert record["num_examples"] == 36 and 0 < record["score"] < 100
    task = networks.MnistClassification(tmp_path)

    def total(p):
        return task.grads(p, task.all_examples()).clipped_sum(dpopt.FlatClip(1.0)).sum

    params = jax.eval_shape(task.init, 0)
    assert jax.tree.map(jnp.shape, jax.eval_shape(total, params)) == jax.tree.map(jnp.shape, params)
    assert jax.eval_shape(task.score, params).shape == ()
