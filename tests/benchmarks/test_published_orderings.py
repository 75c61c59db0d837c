"""The tables' columns beside the score, verdicts on published orderings, and figures that others published."""

import dataclasses
import json
import math
import re

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from test_utility import SETTING, few_ratings, row  # noqa: F401 (few_ratings is a fixture)

pytest.importorskip("sklearn")
pytest.importorskip("rich")

from benchmarks import records
from benchmarks.report import columns, figures, orderings, plots, published, summaries, tables
from benchmarks.utility import lstm, runs, sweeps, tasks
from benchmarks.utility.suites import others
from dpopt import events

EVENT = dp_accounting.SelfComposedDpEvent(
    dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0)), 20
)


def test_tuning_is_priced_as_all_runs_one_after_the_other():
    tuned = row("a", 0.8, None, tried=3, event=events.to_json(EVENT))
    accountant = rdp.RdpAccountant()
    accountant.compose(EVENT, 4)  # three candidates, and the run that is reported
    assert columns.with_candidates(tuned) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    once = rdp.RdpAccountant()
    once.compose(EVENT)
    assert columns.with_candidates(tuned) > once.get_epsilon(1e-5)
    assert columns.with_candidates(row("a", 0.8, None)) is None
    assert columns.with_tuning(row("a", 0.8, None)) == "not known"
    assert columns.with_tuning(tuned, {**tuned, "tried": 30}).count(" / ") == 1
    assert columns.with_tuning({**tuned, "tuning_is_paid": True}) == "paid"


def test_a_line_says_seeds_memory_and_what_epsilon_leaves_out():
    old, new = row("a", 0.8, None, seeds=[0, 1, 2]), row("a", 0.8, None, step_bytes=2_500_000)
    assert columns.seeds(old, new) == "2 to 3" and columns.seeds(old) == "3"
    assert columns.step_memory(old) == "" and columns.step_memory(old, new) == "2.5"
    assert columns.not_covered(old) == "vocabulary"
    said = tables.papers([old])
    assert "step, MB" not in said and "| with tuning |" in said and "| not covered by epsilon |" in said
    assert "| 2.5 |" in tables.papers([new])


@pytest.mark.slow
def test_records_have_the_memory_of_a_run_however_many_run_together(few_ratings, tmp_path):  # noqa: F811
    (record,) = sweeps.sweep([SETTING], [0], out=tmp_path, where=few_ratings)
    assert record["step_bytes"] > 0
    together = {**record, "step_bytes": 3 * record["step_bytes"], "seeds_together": 3}
    old = {k: v for k, v in record.items() if k != "step_bytes"}
    found = [summaries.summarize(own)["step_bytes"] for own in ([record], [together], [old])]
    assert found == [record["step_bytes"], record["step_bytes"], None]


@pytest.mark.slow
def test_epsilon_is_met_by_the_accountant_that_is_asked_for_and_older_records_keep_their_names(few_ratings):  # noqa: F811
    setting = dataclasses.replace(SETTING, noise_multiplier=None, epsilon=1.0)
    by_rdp = dataclasses.replace(setting, accountant="rdp")
    assert "accountant" not in setting.content() and setting.name(0) != by_rdp.name(0)
    assert SETTING.name(3) == "movielens-d3be48fe4005-3.json"
    task = tasks.make("movielens", SETTING.task_options, few_ratings)
    for kind, own in ((pld.PLDAccountant(), setting), (rdp.RdpAccountant(), by_rdp)):
        kind.compose(runs.event_of(own, task, runs.noise_for(own, task)))
        assert kind.get_epsilon(own.delta) == pytest.approx(1.0, rel=0.01)
    assert runs.noise_for(by_rdp, task) > 1.01 * runs.noise_for(setting, task)


def test_the_orderings_of_the_pages_are_counted(tmp_path):
    content = [
        row("best", 0.8, 0.9), row("second", 0.85, 0.8), row("third", 0.7999, 0.7), row("no figure", 0.9, None),
        row("one", 0.7, 0.6, None, table="Another"), row("two", 0.8, 0.5, None, table="Another"),
        row("unranked", 0.8, None, table="A third"),
    ]  # fmt: skip
    records.write_json(tmp_path / "utility-papers.json", {"rows": content})
    said = published.summary(tmp_path)
    assert "| A table | 3 | 1 | 1 | 1 | 0 |" in said and "| Another | 1 | 0 | 0 | 0 | 1 |" in said
    assert "| **all** | 4 | 1 | 1 | 1 | 1 |" in said and "A third" not in said
    assert published.contradicted_tables(tmp_path) == ["A table"]
    assert "| A table | best | second | 0.9 against 0.8 | 0.800 ± 0.001 against 0.850 ± 0.001 |" in (
        published.contradicted(tmp_path)
    )
    assert "| best | third |" in published.undecided(tmp_path)
    empty = tmp_path / "empty"
    for section in ("summary", "beside_others", "lstm"):
        assert "python -m benchmarks" in getattr(published, section)(empty)
    assert published.contradicted(empty) == "None."


def test_the_page_has_a_reason_for_every_table_that_is_contradicted():
    page = (figures.ROOT / "docs" / "published_orderings.md").read_text()
    reasons = re.findall(r"^\*\*(.+?)\.\*\*", page.split("### Why")[1].split("\n## ")[0], re.MULTILINE)
    missing = set(published.contradicted_tables(figures.RESULTS)) - set(reasons)
    assert not missing, f"docs/published_orderings.md gives no reason for {missing}"


def test_contenders_beside_others_figures_get_the_same_epsilon_and_candidates():
    contests = others.contests()
    assert len({(c.table, c.contender) for c in contests}) == len(contests)
    for contest in contests:
        for epsilon in contest.epsilons:
            tried = contest.candidates(epsilon, validate=True)
            assert len({s.name(0) for s in tried}) == others.BUDGET and epsilon in contest.reference.scores
            assert all(s.epsilon == epsilon and s.task_options["validate"] for s in tried)
    imdb = [c.candidates(2.8, validate=False)[0] for c in others.imdb()]
    assert all(s.accountant == "rdp" and s.delta == 1 / 25_000 for s in imdb)
    as_published = [s for s in imdb if s.expected_batch_size]
    assert all((s.expected_batch_size, s.steps) == (256, 32 * 97) for s in as_published) and len(as_published) == 3
    assert others.DP_KFC.scores == {0.5: 0.835, 1.0: 0.851, 2.8: 0.859, 8.0: 0.860}
    digits = [c.candidates(1.2, validate=False)[0] for c in others.digits()]
    assert all(s.accountant is None and s.delta == 1e-5 for s in digits)
    assert others.SCATTERING.scores == {1.2: 0.981, 3.0: 0.987} and "10,000" in contests[0].table


def test_a_table_beside_others_figures_says_who_reaches_them(tmp_path):
    more = {"tried": 4, "event": events.to_json(EVENT), "num_examples": 10_000, "table": "Beside"}
    reference = {1.0: {"name": "Somebody", "score": 0.85}, 3.0: {"name": "Somebody", "score": 0.9}}
    rows = [
        row(n, m, None, target_epsilon=e, contender=n, reference=reference[e], **more)
        for n, m, e in (("x", 0.8, 1.0), ("y", 0.86, 1.0), ("x", 0.89, 3.0))
    ]
    said = tables.TABLES["others"](rows)
    assert "1: 1 of 2; 3: 0 of 1" in said and "| Somebody | 0.85 | 0.9 |" in said and "not run here" in said
    assert "10,000 private examples" in said and "**0.860 ± 0.001**" in said
    (drawn,) = plots.DRAW["others"](rows, tmp_path)
    assert drawn.name == "others-beside.svg" and "Somebody" in drawn.read_text()
    records.write_json(tmp_path / "utility-others.json", {"rows": rows})
    found = published.beside_others(tmp_path)
    assert "| Beside | 1 | Somebody | 0.85 | y | 0.860 ± 0.001 | +0.010 |" in found and "-0.010 |" in found


def test_tries_with_the_lstm_are_written_down_one_by_one(tmp_path, monkeypatch):
    trained = []

    class Program:
        def __init__(self, setting, where):
            self.setting = setting

        def train(self, seeds):
            trained.append(self.setting)
            epsilon = 2.8 if self.setting.epsilon else math.inf
            kept = {"curve": [], "parameters": 1, "not_covered_by_epsilon": [], "noise_multiplier": 0.7}
            return [kept | {"score": 0.6, "seconds": 1.0, "epsilon": {"pld": epsilon, "rdp": epsilon}}]

    monkeypatch.setattr(runs, "Program", Program)
    both = [lstm.Try(length=8, epochs=2, batch=100, clip=1.0, rate=r, is_private=r == 1) for r in (1, 2)]
    lstm.main(tmp_path, tries=both[:1])
    content = lstm.main(tmp_path, tries=both)
    assert len(trained) == 2 and [s.steps for s in trained] == [400, 400]  # the first was there
    assert trained[1].noise_multiplier == 0.0 and trained[0].epsilon == 2.8 and trained[0].task_options["validate"]
    assert json.loads((tmp_path / "lstm.json").read_text()) == content and content["runs"][1]["epsilon"]["pld"] is None
    said = lstm.markdown(content)
    assert "| 8 | 2 | 400 of 100 | SGD | 1 | 2 | no noise | 0.600 | 1 |" in said and "| 2.8 (0.70) |" in said
    assert orderings.VERDICTS[0] == "held"
