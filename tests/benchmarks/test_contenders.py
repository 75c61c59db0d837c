"""A user's own optimizer among the shipped contenders: the same budget, its own event, and clear error messages."""

import argparse
import dataclasses
import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import assert_identical, privacy_four

pytest.importorskip("sklearn")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import dpopt
from benchmarks.utility import contenders, own_optimizer, runs
from benchmarks.utility.contenders import ContenderError
from benchmarks.utility.suites import epochs, frontier

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how_to" / "benchmark_your_optimizer.md"
HEAD = """
import jax, optax, dpopt

def core(l2_clip_norm, noise_multiplier, expected_batch_size, key, **more):
    return dpopt.privatize(
        l2_clip_norm=l2_clip_norm, noise_multiplier=noise_multiplier, expected_batch_size=expected_batch_size, key=key,
        **more)
"""
LION = """
def lion(learning_rate, **four):
    return dpopt.chain(core(**four), optax.scale_by_lion(), optax.scale_by_learning_rate(learning_rate))

lion.rates = 0.016
"""


@pytest.fixture
def written(tmp_path):
    def write(body, name="mine.py"):
        path = tmp_path / name
        path.write_text(HEAD + textwrap.dedent(body))
        return path

    yield write
    contenders.same.cache_clear()
    runs._CALIBRATED.clear()


def small(contest):
    """The same contest on digits, in a few steps, with two candidates."""

    of_epochs = isinstance(contest, epochs.Contest)
    few = {"compute": epochs.Compute(1, 256, 64)} if of_epochs else {}

    def make(*args):
        return contest.make(*args) | ({"task": "digits"} if of_epochs else {"steps": 3})

    return dataclasses.replace(contest, rates=contest.rates[:2], epsilons=(8.0,), make=make, **few)


@pytest.fixture
def small_suites(monkeypatch):
    digits = [small(c) for c in frontier.contests() if c.table == "Digits"]
    mnist = [small(c) for c in epochs.contests() if c.table == "MNIST, 10,000 digits, 1 epoch"]
    monkeypatch.setattr(epochs, "bands", lambda compute, epsilon, delta: 2)
    monkeypatch.setattr(own_optimizer, "SUITES", {"frontier": lambda: digits, "epochs": lambda: mnist})


def enter(source, out, **changes):
    given = dict(
        optimizer=str(source), out=out, suite=None, rates=[], only=None, epsilon=None, seeds=2, jobs=1, together=2,
        data=None,
    )  # fmt: skip
    own_optimizer.main(argparse.Namespace(**given | changes))


@pytest.mark.slow
def test_it_runs_resumes_and_stands_beside_the_recorded_rows(written, small_suites, tmp_path, capsys):
    recorded = ROOT / "benchmarks" / "results" / "utility-frontier.json"
    before, out = recorded.read_bytes(), tmp_path / "out"
    module = written(LION)
    enter(f"{module}:lion", out, seeds=1)
    (row,) = json.loads((out / "lion" / "utility-frontier.json").read_text())["rows"]
    assert (row["table"], row["contender"], row["target_epsilon"], row["tried"]) == ("Digits", "lion", 8.0, 2)
    assert len(row["scores"]) == 1 and 7.8 < row["epsilon"]["pld"] <= 8.0
    assert recorded.read_bytes() == before
    text = (out / "lion" / "frontier.md").read_text()
    assert "| lion |" in text and "| Lion |" in text and "| DP-Adam |" in text and "IMDB" not in text
    assert "(frontier-digits.svg)" in text and "</svg>" in (out / "lion" / "frontier-digits.svg").read_text()
    printed = capsys.readouterr().out
    assert "lion" in printed and "DP-Adam" in printed

    # Two candidates on held-out data and a seed of the best: 3 runs. The same text, even elsewhere, is done.
    done = {p.name: p.stat().st_mtime_ns for p in (out / "runs").iterdir()}
    assert len(done) == 3
    enter(f"{written(LION, 'moved.py')}:lion", out, seeds=1)
    assert {p.name: p.stat().st_mtime_ns for p in (out / "runs").iterdir()} == done


@pytest.mark.slow
def test_another_text_is_another_run(written, small_suites, tmp_path):
    rows = []
    for text, runs_so_far in ((LION, 3), (LION + "# changed", 6)):
        enter(f"{written(text)}:lion", tmp_path, seeds=1)
        (row,) = json.loads((tmp_path / "lion" / "utility-frontier.json").read_text())["rows"]
        rows.append(row)
        assert len(list((tmp_path / "runs").iterdir())) == runs_so_far
    assert rows[0]["scores"] == rows[1]["scores"]  # only a comment has changed
    assert rows[0]["setting"] != rows[1]["setting"]


@pytest.mark.slow
def test_over_few_epochs_it_enters_under_both_noises_if_it_takes_them(written, small_suites, tmp_path):
    both = """
    def adam(learning_rate, *, noise=None, steps, **four):
        assert steps in (3, 4, 10)  # of the runs, and of the check before
        return dpopt.chain(core(noise=noise, **four), optax.adam(learning_rate))
    """
    enter(f"{written(both)}:adam", tmp_path / "out", suite="all", rates=["digits=0.01"])
    rows = json.loads((tmp_path / "out" / "adam" / "utility-epochs.json").read_text())["rows"]
    assert [r["contender"] for r in rows] == ["adam", "adam, correlated noise"]
    assert [r["sampling"]["kind"] for r in rows] == ["Poisson", "cyclic Poisson in 2 parts"]
    assert all(7.8 < r["epsilon"]["pld"] <= 8.0 for r in rows)
    text = (tmp_path / "out" / "adam" / "epochs.md").read_text()
    assert "| adam |" in text and "| DP-AdamBC |" in text
    enter(f"{written(LION)}:lion", tmp_path / "out", suite="epochs")
    rows = json.loads((tmp_path / "out" / "lion" / "utility-epochs.json").read_text())["rows"]
    assert [r["contender"] for r in rows] == ["lion"]


def entered(source, rates=(), suite="frontier"):
    contender = contenders.load(str(source))
    contender.check()
    return own_optimizer.contests(suite, contender, "mine", rates, None)


@pytest.mark.slow
def test_a_copy_of_a_shipped_contender_trains_to_the_same_bits(written, small_suites):
    (shipped,) = (c for c in own_optimizer.SUITES["frontier"]() if c.label == "Lion")
    (mine,) = entered(f"{written(LION)}:lion")
    trained = []
    for contest in (shipped, mine):
        program = runs.Program(contest.candidates(8.0, validate=False)[1])
        (record,) = program.train([3])
        trained.append((program.trained, record["score"], record["event"], record["noise_multiplier"]))
    assert_identical(trained[0][0], trained[1][0])
    assert trained[0][1:] == trained[1][1:]


def test_it_gets_as_many_candidates_as_the_others_and_what_they_are_given():
    """In the real suites, everything but the optimizer is that of the shipped DP-SGD with momentum."""
    rates = ["0.5", "movielens=0.25"]
    for suite, of in own_optimizer.SUITES.items():
        mine = {(c.table, c.contender): c for c in entered("dpopt:dp_adamw", rates=rates, suite=suite)}
        shipped = [c for c in of() if c.label == "DP-SGD, momentum"]
        assert len(mine) == len(shipped) == {"frontier": 3, "epochs": 24, "others": 1, "pretrained": 3}[suite]
        for reference in shipped:
            contest = mine[reference.table, reference.contender.replace(reference.label, "mine")]
            start = 0.25 if "MovieLens" in reference.table else 0.5
            assert contest.epsilons == reference.epsilons
            assert contest.rates == [start * 2**i for i in range(len(reference.rates))]
            if getattr(reference, "is_correlated", False):
                continue  # bands take a minute to choose
            for validate in (True, False):
                theirs, own = (c.candidates(1.0, validate=validate) for c in (reference, contest))
                for a, b in zip(theirs, own, strict=True):
                    found = b.content() | {"method": a.method, "options": a.options}
                    assert found == a.content() and b.options["decay_to"] == a.options["decay_to"] == 0.0
                    ratio = a.options["learning_rate"] / b.options["learning_rate"]
                    assert ratio == pytest.approx(reference.rates[0] / start)


NAMED = ["dp_sgd", "dp_adam", "dp_adamw", "dp_rmsprop", "dp_adagrad", "dp_yogi", "dp_adam_bc", "dp_micro_adam"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*NAMED, "scale_then_privatize"])
def test_named_optimizers_fit_as_they_are(name):
    contender = contenders.load(f"dpopt:{name}")
    contender.check()
    assert contender.takes("noise") and contender.start("Digits", ["0.1"]) == 0.1
    defining = sys.modules[getattr(dpopt, name).__module__].__file__
    assert contender.sha256 != contenders._text(dpopt) and defining != dpopt.__file__  # its own file counts


def setting(source, **changes):
    contender = contenders.load(str(source))
    fields = {"task": "digits", "method": contenders.METHOD, "options": contender.options(0.1), "delta": 1e-4}
    fields |= {"steps": 3, "epsilon": 2.0, "source": str(source), "label": "mine"}
    return runs.Setting(**fields | changes)


def test_noise_is_calibrated_by_what_it_spends(written):
    """An optimizer that draws half the noise gets twice the noise multiplier, and the output mentions it."""
    body = """
    def {name}(learning_rate, *, noise_multiplier, **four):
        return dpopt.chain(core(noise_multiplier={noise}, **four), optax.sgd(learning_rate))
    """
    multipliers = {}
    for name, noise in (("honest", "noise_multiplier"), ("half", "noise_multiplier / 2")):
        s = setting(f"{written(body.format(name=name, noise=noise), f'{name}.py')}:{name}")
        program = runs.Program(s)
        multipliers[name] = program.noise_multiplier
        spent = dpopt.epsilon_of_event(runs.event_of(s, program.task, program.noise_multiplier), delta=1e-4)
        assert 1.95 < spent <= 2.0
    assert multipliers["half"] == pytest.approx(2 * multipliers["honest"], rel=2e-3)
    place = {"table": "Digits", "target_epsilon": 2.0}
    rows = [place | {"contender": n, "noise_multiplier": m} for n, m in multipliers.items()]
    shipped = [place | {"contender": "DP-SGD, momentum", "noise_multiplier": multipliers["honest"]}]
    (said,) = own_optimizer.about_noise(rows, shipped)
    assert "spends more than DP-SGD" in said


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("noise", "message"),
    [
        ("1.0", "spends the same at noise multipliers of 7 and 14"),
        ("min(noise_multiplier, 0.5)", "spends the same"),
        ("noise_multiplier if noise_multiplier > 6 else 0.3", r"spends epsilon [\d.]+ at .*; the target is 2"),
        ("noise_multiplier * (4 if float(learning_rate(0)) > 0.15 else 1)", "such as the learning rate"),
    ],
)
def test_one_that_cannot_meet_the_target_is_refused(written, noise, message):
    body = f"""
    def mine(learning_rate, *, noise_multiplier, **four):
        if isinstance(learning_rate(0), jax.core.Tracer):
            return dpopt.chain(core(noise_multiplier=noise_multiplier, **four), optax.sgd(learning_rate))
        return dpopt.chain(core(noise_multiplier={noise}, **four), optax.sgd(learning_rate))
    """
    source = f"{written(body)}:mine"
    first, other = setting(source), setting(source, options=contenders.load(source).options(0.2))
    with pytest.raises(ContenderError, match=message):
        program = runs.Program(first)
        program.train([0], setting=other)


GOOD = "return dpopt.chain(core(**four), optax.sgd(learning_rate))"
MISTAKES = {
    "no file": ("/no/such/file.py:mine", "", r"there is no file /no/such/file\.py"),
    "no module": ("no_such_package.mine:mine", "", "no_such_package.mine cannot be imported: ModuleNotFoundError"),
    "no function": (
        "{}:yours",
        f"def mine(learning_rate, **four): {GOOD}",
        "has no yours; its functions are: core, mine",
    ),
    "no name": ("{}", "", r"named path/to/module\.py:function"),
    "no identifier": ("{}:", "", r"named path/to/module\.py:function"),
    "import fails": ("{}:mine", "import no_such_module", "cannot be imported: ModuleNotFoundError: No module named"),
    "syntax": ("{}:mine", "def mine(:", "cannot be imported: SyntaxError"),
    "no callable": ("{}:mine", "mine = 3", "must be a function .*; it is a int"),
    "Optax": ("{}:mine", "def mine(learning_rate, **four): return optax.sgd(learning_rate)", "an Optax transformation"),
    "None": ("{}:mine", "def mine(learning_rate, **four): pass", "it returned None"),
    "one argument": (
        "{}:mine",
        "def mine(learning_rate): pass",
        r"cannot be called as mine\(learning_rate, \*, l2_clip",
    ),
    "one more": (
        "{}:mine",
        f"def mine(learning_rate, *, beta, **four): {GOOD}",
        "missing a required (keyword-only )?argument: 'beta'",
    ),
    "raises": (
        "{}:mine",
        "def mine(learning_rate, **four): raise OSError('gone')",
        r"OSError: gone \(line 8 of mine.py\)",
    ),
    "schedule": ("{}:mine", "def mine(learning_rate, **four): return 2 * learning_rate", "mine raised TypeError"),
    "key": (
        "{}:mine",
        "def mine(learning_rate, *, key, **four):\n"
        "    return dpopt.chain(core(key=jax.random.key(7), **four), optax.sgd(learning_rate))",
        "does not use its key",
    ),
    "a key that is only kept": (
        "{}:mine",
        "def mine(learning_rate, *, key, **four):\n"
        "    kept = optax.GradientTransformation(lambda p: key, lambda u, s, p=None: (u, s))\n"
        "    return dpopt.chain(core(key=jax.random.key(7), **four), kept, optax.sgd(learning_rate))",
        "does not use its key",
    ),
    "branches on its rate": (
        "{}:mine",
        "def mine(learning_rate, **four):\n"
        "    rate = learning_rate if learning_rate < 1 else 1.0\n"
        "    return dpopt.chain(core(**four), optax.sgd(rate))\nmine.decay_to = None",
        "TracerBoolConversionError",
    ),
    "ends the program": ("{}:mine", "raise SystemExit(0)", "cannot be imported"),
    "unit": (
        "{}:mine",
        f"def mine(learning_rate, **four):\n    return dpopt.users.user_level(optax_sgd(learning_rate, four))\n"
        f"def optax_sgd(learning_rate, four): {GOOD}",
        "states its privacy for one user",
    ),
    "correlated": (
        "{}:mine",
        "def mine(learning_rate, **four):\n"
        "    noise = dpopt.correlated.banded(4, steps=10)\n"
        "    return dpopt.chain(core(noise=noise, **four), optax.sgd(learning_rate))",
        "cannot be accounted for",
    ),
    "decay": ("{}:mine", f"def mine(learning_rate, **four): {GOOD}\nmine.decay_to = -1", "must be the final share"),
    "no rate": ("{}:mine", f"def mine(learning_rate, **four): {GOOD}", "at which learning rate should mine start on"),
    "rate 0": (
        "{}:mine",
        f"def mine(learning_rate, **four): {GOOD}\nmine.rates = 0",
        "must be a positive number; got 0",
    ),
    "rate of text": (
        "{}:mine",
        f"def mine(learning_rate, **four): {GOOD}\nmine.rates = {{'imdb': 'large'}}",
        "must be a positive number; got 'large'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_before_anything_runs(mistake, written, tmp_path, monkeypatch):
    monkeypatch.setattr(own_optimizer.utility, "tuned", lambda *_: pytest.fail("it ran"))
    source, body, message = MISTAKES[mistake]
    with pytest.raises(ContenderError, match=message):
        enter(source.format(written(body)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_noise_that_training_leaves_out_is_noticed(written, small_suites, tmp_path):
    source = written(
        "def mine(learning_rate, *, noise_multiplier, **four):\n"
        "    own = 0.0 if isinstance(learning_rate(0), jax.core.Tracer) else noise_multiplier\n"
        "    return dpopt.chain(core(noise_multiplier=own, **four), optax.sgd(learning_rate))\nmine.rates = 0.1"
    )
    with pytest.raises(ContenderError, match="in training, and states"):
        enter(f"{source}:mine", tmp_path)


def test_other_arguments_are_refused_by_name(written, tmp_path, small_suites):
    source = f"{written(LION)}:lion"
    for changes, message in (
        ({"rates": ["fast"]}, "--rates takes numbers"),
        ({"suite": "papers"}, "papers repeats"),
        ({"only": "no such table"}, "no table is called 'no such table'; there are: Digits"),
    ):
        with pytest.raises(ContenderError, match=message):
            enter(source, tmp_path / "out", **changes)


def test_a_text_that_changes_under_way_is_noticed(written):
    source = f"{written(LION)}:lion"
    first = contenders.load(source)
    assert contenders.same(source, first.sha256).sha256 == first.sha256
    contenders.same.cache_clear()
    written(LION + "# changed")
    with pytest.raises(ContenderError, match="has changed since these runs began"):
        contenders.same(source, first.sha256)


def test_a_rate_that_stays_is_a_number(written):
    contender = contenders.load(f"{written(LION + 'lion.decay_to = None')}:lion")
    seen = []
    found = dataclasses.replace(contender, make=lambda rate, **four: seen.append(rate) or dpopt.dp_sgd(rate, **four))
    found.build(contender.options(0.5), steps=10, privacy_four=privacy_four())
    found.build(contender.options(0.5) | {"decay_to": 0.0}, steps=10, privacy_four=privacy_four())
    assert seen[0] == 0.5 and float(seen[1](5)) == pytest.approx(0.25) and float(seen[1](10)) == 0


def test_a_name_that_a_shipped_contender_has_is_told_apart(written):
    contender = contenders.load(f"{written(LION.replace('lion', 'Lion').replace('by_Lion', 'by_lion'))}:Lion")
    assert own_optimizer._label(contender) == "Lion (yours)"


@pytest.mark.slow
def test_the_page_does_what_it_says(tmp_path):
    """Runs the module and the command of the page on the real digits."""
    text = PAGE.read_text()
    (command,) = re.findall(r"^python -m (benchmarks utility .*)$", text, re.MULTILINE)
    (source,) = re.findall(r"--optimizer (\S+):", command)
    (tmp_path / source).write_text(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[0])
    command = command.replace(source, str(tmp_path / source))
    arguments = [sys.executable, "-m", *shlex.split(command), "--seeds", "2", "--out", str(tmp_path / "out")]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "out" / "quiet_lion" / "utility-frontier.json").read_text())["rows"]
    assert row["mean"] > 0.8 and 0.98 < row["epsilon"]["pld"] <= 1.0 and row["tried"] == 4
    assert all(name in done.stdout for name in ("quiet_lion", "DP-Adam", "frontier-digits.svg"))
    wrong = [sys.executable, "-m", "benchmarks", "utility", "--optimizer", f"{tmp_path / source}:loud_lion"]
    done = subprocess.run(wrong, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "has no loud_lion" in done.stderr and "Traceback" not in done.stderr
