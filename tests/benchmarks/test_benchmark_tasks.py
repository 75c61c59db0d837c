"""Tasks of the utility suite: they learn, epsilon is that of dp_accounting, and records list what it does not cover."""

import dataclasses
import json
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import pld, rdp
from helpers import paid
from test_utility import few_reviews, row  # noqa: F401 (few_reviews is a fixture)

from benchmarks.cost import imdb_speed
from benchmarks.report import command as report
from benchmarks.report import plots
from benchmarks.utility import runs, tasks
from benchmarks.utility.suites import epochs, networks, papers, synthetic
from benchmarks.utility.tasks import networks as network_tasks
from benchmarks.utility.tasks import synthetic as synthetic_tasks
from benchmarks.utility.tasks import text as text_task


@pytest.fixture(autouse=True)
def fresh_tasks():
    yield
    tasks._make.cache_clear()


def spent(accountant, noise_multiplier, sampling_prob, steps, delta):
    """Epsilon of the subsampled Gaussian, by dp_accounting alone."""
    event = dp_accounting.PoissonSampledDpEvent(sampling_prob, dp_accounting.GaussianDpEvent(noise_multiplier))
    accountant.compose(event, steps)
    return accountant.get_epsilon(delta)


def mean_loss(task, params):
    examples, _ = task.all_examples()
    return float(jnp.mean(jax.vmap(task._loss_of_one, (None, 0))(params, examples)))


def only(settings, label):
    """The setting of this label."""
    (found,) = [r.setting for r in settings if r.setting.label == label]
    return found


@pytest.mark.slow
def test_the_lstm_learns_from_reviews_and_says_that_its_vocabulary_was_free(few_reviews):  # noqa: F811
    setting = dataclasses.replace(
        only(networks.imdb_lstm(), "DP-SGD"), task_options={"length": 4}, expected_batch_size=8, steps=3
    )
    program = runs.Program(setting, where=few_reviews)
    (record,) = program.train([0])
    assert record["parameters"] == 706_690 and record["not_covered_by_epsilon"] == ["vocabulary"]
    by_hand = spent(pld.PLDAccountant(), record["noise_multiplier"], 8 / 40, 3, 4e-5)
    assert record["epsilon"]["pld"] == pytest.approx(by_hand, abs=0.01) and 2.7 < by_hand <= 2.8
    assert network_tasks.ImdbLSTM(few_reviews, length=4, vocabulary="shipped").not_covered_by_epsilon == ()

    quiet = dataclasses.replace(setting, epsilon=None, noise_multiplier=1e-3, steps=6, expected_batch_size=None)
    program = runs.Program(quiet, where=few_reviews)
    program.train([0])
    trained = jax.tree.map(lambda x: x[0], program.trained)
    assert mean_loss(program.task, trained) < mean_loss(program.task, program.task.init(0)) - 0.01


@pytest.mark.slow
def test_the_transformer_learns_from_reviews_by_the_vocabulary_that_was_published(few_reviews):  # noqa: F811
    contests = [c for c in epochs.contests() if c.task.startswith("Transformer") and c.is_correlated]
    setting = contests[0].candidates(8.0, validate=False)[0]
    setting = dataclasses.replace(
        setting, task_options={"length": 8}, noise={"bands": 2, "momentum": 0.9}, expected_batch_size=10, steps=4
    )
    (record,) = runs.Program(setting, where=few_reviews).train([0])
    assert record["not_covered_by_epsilon"] == () and record["sampling"]["kind"] == "cyclic Poisson in 2 parts"

    quiet = dataclasses.replace(
        setting, epsilon=None, noise=None, noise_multiplier=1e-3, steps=6, expected_batch_size=None
    )
    # These reviews come without a published vocabulary, so all of their words would be unknown.
    quiet = dataclasses.replace(quiet, task_options={"length": 8, "vocabulary": "train"})
    program = runs.Program(quiet, where=few_reviews)
    program.train([0])
    trained = jax.tree.map(lambda x: x[0], program.trained)
    assert mean_loss(program.task, trained) < mean_loss(program.task, program.task.init(0)) - 0.01


def test_held_out_and_public_examples_leave_the_private_ones():
    task = network_tasks.Digits()
    tuned = network_tasks.Digits(public_share=0.1, validate=True)
    assert task.num_examples == 1_437 and len(task._test[1]) == 360 and not task.has_public_data
    parts = [np.asarray(part[0]) for part in (tuned._train, tuned._public, tuned._test)]
    assert [len(p) for p in parts] == [1_035, 115, 287] and sum(map(len, parts)) == task.num_examples
    everything = np.concatenate(parts)
    order = np.lexsort(everything.T), np.lexsort(np.asarray(task._train[0]).T)
    np.testing.assert_array_equal(everything[order[0]], np.asarray(task._train[0])[order[1]])


@pytest.mark.slow
def test_digits_are_learned_in_whole_batches():
    fields = {"task": "digits", "method": "DP-SGD", "options": {"learning_rate": 2.0}, "delta": 1e-4}
    setting = runs.Setting(**fields, noise_multiplier=2.0, steps=40)
    (record,) = runs.Program(setting).train([0])
    assert record["score"] > 0.7 and record["sampling"]["sampling_prob"] == 1
    by_hand = spent(pld.PLDAccountant(), 2.0, 1.0, 40, 1e-4)
    assert record["epsilon"]["pld"] == pytest.approx(by_hand, rel=1e-3) and record["not_covered_by_epsilon"] == ()


@pytest.mark.slow
def test_the_toy_regression_has_the_papers_epsilon_and_side_information_helps():
    found = {}
    for label in ("DP-SGD", "AdaDPS, frequencies known"):
        program = runs.Program(only(synthetic.adadps_toy(), label))
        several = program.train([0, 1, 2])
        found[label] = several[0] | {"score": np.mean([run["score"] for run in several])}
    plain, adadps = found.values()
    by_hand = spent(rdp.RdpAccountant(), paid(0.7), 8 / 1_000, 2_250, 1e-3)
    assert plain["epsilon"]["rdp"] == pytest.approx(by_hand, rel=1e-3)
    assert round(spent(rdp.RdpAccountant(), 0.7, 8 / 1_000, 2_250, 1e-3), 2) == 4.13  # as the paper says
    start = float(program.task.score(program.task.init(0)))
    assert adadps["score"] < 0.6 * plain["score"] and plain["score"] < 0.9 * start
    assert len(plain["curve"]) == program.task.checkpoints and plain["curve"][-1][0] == 2_250


def test_tags_are_synthetic_sparse_and_paid_for():
    assert all("ynthetic" in r.table and r.setting.task.startswith("synthetic") for r in synthetic.rows())
    task = synthetic_tasks.SyntheticTags(num_examples=200, frequency={"release": 3.0})
    assert task.release == dp_accounting.GaussianDpEvent(3.0) and task.not_covered_by_epsilon == ()
    one, other = (task.side_information(seed)["Dense_0"]["kernel"] for seed in (0, 1))
    assert one.shape == (10_000, 1) and (one != other).any()
    _, values = task._train[0]
    unit = (values > 0) / np.sqrt(np.maximum((values > 0).sum(1, keepdims=True), 1))
    assert np.linalg.norm(unit, axis=1).max() <= 1 + 1e-6  # what the release's noise is for
    public = synthetic_tasks.SyntheticTags(num_examples=200, public_share=0.5, frequency="public")
    assert public.num_examples == 80 and public.release is None
    scale = public.side_information(0)["Dense_0"]["kernel"][:, 0]
    assert scale[np.argmax(public._counted)] == scale.min() < scale.max()
    with pytest.raises(ValueError, match="public_share"):
        synthetic_tasks.SyntheticTags(num_examples=50, frequency="public")


@pytest.mark.slow
def test_tags_are_learned_by_five_million_parameters():
    fields = {"method": "DP-SGD", "options": {"learning_rate": 5.0}, "l2_clip_norm": 1.0, "delta": 1e-3}
    setting = runs.Setting(
        task="synthetic-tags", task_options={"num_examples": 100}, noise_multiplier=1e-3, steps=3, **fields
    )
    program = runs.Program(setting)
    (record,) = program.train([0])
    assert record["parameters"] == 5_000_500
    trained = jax.tree.map(lambda x: x[0], program.trained)
    assert mean_loss(program.task, trained) < math.log(500) - 0.05
    # The gradient of a sparse row is the outer product that a dense one has.
    x, y = jax.tree.map(lambda x: x[:4], program.task._train)
    rows = np.zeros((4, 10_000), np.float32)
    for i in range(4):
        np.add.at(rows[i], np.asarray(x[0][i]), np.asarray(x[1][i]))
    assert (np.count_nonzero(rows, axis=1) > 3).all()
    params = program.task.init(0)
    got = program.task.grads(params, ((x, y), jnp.ones(4, bool))).clipped_sum(network_tasks.dpopt.FlatClip(math.inf))
    residual = jax.nn.softmax(rows @ params["Dense_0"]["kernel"]) - jax.nn.one_hot(y, 500)
    np.testing.assert_allclose(got.sum["Dense_0"]["kernel"], rows.T @ residual, atol=1e-5)


def test_the_state_of_micro_adam_grows_with_density_and_memory():
    params = {"weights": jnp.zeros(10_000), "bias": jnp.zeros(())}
    size = {}
    for r in papers.micro_adam_density():
        s = r.setting
        four = dict(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=8, key=jax.random.key(0))
        built = runs.methods.build(s.method, s.options, steps=s.steps, privacy_four=four)
        size[s.label] = runs.methods.state_bytes(built, params) / 10_001
    assert size["density 0.001, 10 rows"] < size["density 0.01, 10 rows"] < 1.5 < size["density 0.1, 10 rows"]
    assert size["density 0.01, 5 rows"] < size["density 0.01, 10 rows"] < size["density 0.01, 20 rows"]
    assert size["density 0.1, 10 rows"] < 8 <= size["DP-Adam"]  # two numbers of every coordinate


@pytest.fixture
def small_batches(monkeypatch):
    real = imdb_speed.setting

    def small(engine, steps):
        return dataclasses.replace(real(engine, steps), expected_batch_size=8)

    monkeypatch.setattr(imdb_speed, "setting", small)


@pytest.mark.slow
def test_speed_on_imdb_is_recorded_after_all_engines_agree(few_reviews, small_batches, tmp_path):  # noqa: F811
    imdb_speed.main(tmp_path / "tables", steps=4, engine_steps=3, checked_steps=3, where=few_reviews)
    content = json.loads((tmp_path / "tables" / "imdb-speed.json").read_text())
    assert [r["engine"] for r in content["runs"]] == ["closed form", "auto", "vmap"]
    assert all(0 <= d < 1e-4 for d in content["differences"].values()) and len(content["differences"]) == 2
    for run, steps in zip(content["runs"], (4, 3, 3), strict=True):
        assert run["steps"] == steps and run["is_scaled"]
        assert run["full_run_seconds"] == pytest.approx(39_000 * run["seconds"] / steps)
    text = report.write(tmp_path / "tables", tmp_path / "to").read_text()
    assert "`python -m benchmarks imdb-speed`" in text
    assert "## A full private run on IMDB" in text and "| vmap | 3 |" in text and "(scaled up)" in text


@pytest.mark.slow
def test_engines_that_differ_are_not_timed(few_reviews, small_batches, monkeypatch):  # noqa: F811
    right = text_task.Imdb._loss
    monkeypatch.setattr(text_task.Imdb, "_loss", lambda self, params, example: 1.01 * right(self, params, example))
    with pytest.raises(AssertionError, match="differ from the closed form"):
        imdb_speed.check(3, few_reviews)


def test_runs_scored_often_are_drawn_as_curves(tmp_path):
    often = [[step, 1 / step] for step in range(1, 20)]
    rows = [row("a", 0.1, None, curve=often), row("b", 0.2, None, curve=often)]
    few = [row("c", 0.1, None, curve=often[:3], table="Another")]
    drawn = [p.name for p in plots.papers(rows + few, tmp_path)]
    assert drawn == ["papers-a-table.svg", "papers-a-table-curve.svg", "papers-another.svg"]
