"""The benchmarks run, in a small setting, and record what they claim."""

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dpopt

pytest.importorskip("sklearn")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks import __main__ as command_line
from benchmarks import arguments, data, records
from benchmarks.cost import gradients, speed
from benchmarks.cost.families import Family

ROOT = Path(__file__).parents[2]


SHORT_QUICKSTART = """
import sys
from pathlib import Path
from benchmarks import quickstart

quickstart.STEPS, quickstart.STEPS_PER_CALL, quickstart.EPSILONS = 10, 5, (8.0,)
quickstart.main(Path(sys.argv[1]), seeds=2)
"""


def test_the_help_imports_no_command():
    code = "import sys, benchmarks.__main__ as m\ntry: m.main()\nfinally: assert 'jax' not in sys.modules"
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert all(f" {name} " in done.stdout for name in command_line.COMMANDS)


@pytest.mark.parametrize("name", [n for n in command_line.COMMANDS if n != "zoo"])  # which needs more packages
def test_a_command_brings_its_arguments(name):
    module = importlib.import_module(f"benchmarks.{command_line.COMMANDS[name][0]}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    assert callable(module.run) and vars(parser.parse_args([]))


def test_counts_are_at_least_1(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "quickstart", "--seeds", "0"])
    with pytest.raises(SystemExit) as stopped:
        command_line.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith("error: --seeds must be at least 1; got 0\n")
    with pytest.raises(arguments.UsageError, match="--rates are those of an --optimizer"):
        importlib.import_module("benchmarks.utility.command").run(argparse.Namespace(rates=["0.1"], optimizer=None))


@pytest.mark.slow
def test_quickstart_writes_table_json_and_plot(tmp_path):
    # In a process of its own, since convolutions that are not optimised take longer than optimising them.
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    command = [sys.executable, "-c", SHORT_QUICKSTART, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "quickstart.json").read_text())
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000
    assert "DP-Adam" in done.stdout
    assert [r["method"] for r in written["runs"]] == ["DP-SGD", "SGD", "DP-Adam", "Adam"]
    assert set(written["environment"]["versions"]) == set(records.PACKAGES)
    for run in written["runs"]:
        assert len(run["test_accuracies"]) == 2
        if run["epsilon"] is not None:
            spent = dpopt.epsilon(
                noise_multiplier=run["noise_multiplier"],
                sampling_prob=run["expected_batch_size"] / run["num_examples"],
                steps=run["steps"],
                delta=run["delta"],
            )
            assert run["epsilon"] == spent <= run["target_epsilon"]
    private, twin = written["runs"][0], written["runs"][1]
    assert twin["noise_multiplier"] == 0.0 and twin["epsilon"] is None
    assert private["mean"] > 0.2 and twin["mean"] > 0.5  # ten steps; chance is 0.1


def test_digits_are_all_there_and_disjoint():
    split = data.digits()
    assert len(split.train_x) + len(split.test_x) == 1_797
    assert split.train_x.shape[1:] == (8, 8, 1) and split.train_x.max() == 1.0
    assert np.bincount(split.test_y).min() >= 30


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "record.json"
    records.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        records.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]


@pytest.mark.slow
def test_speed_checks_results_before_timing(monkeypatch):
    import jax.numpy as jnp

    family = Family(
        lambda w, x: jnp.sum(jnp.tanh(x @ w["kernel"]) ** 2),
        {"kernel": jnp.ones((3, 2))},
        jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32),
    )
    monkeypatch.setitem(speed.FAMILIES, "tiny", lambda: family)
    row = speed.measure("tiny", others=False, budget_s=0.01)
    assert row["ratio"]["ordinary"] == 1.0 and all(math.isfinite(r) for r in row["ratio"].values())
    (view,) = speed.tables([row])
    assert view.row_count == 1
    assert row["parts"] == 1 and gradients.IN_PARTS not in row["ratio"]

    with monkeypatch.context() as m:
        m.setattr(dpopt.ghost.Plan, "parts", 4)
        row = speed.measure("tiny", others=False, budget_s=0.01)
        assert row["largest_relative_error"][gradients.IN_PARTS] < 1e-6 and gradients.IN_PARTS in row["ratio"]
        assert "(4 parts)" in speed.markdown({"environment": {"device": "d", "cores": 2}, "runs": [row]})

    right = gradients.clipped

    def wrong(family, engine, scaled, clip, microbatch_size=None):
        return right(family, engine, scaled, clip if engine == "vmap" else 1.01 * clip, microbatch_size)

    monkeypatch.setattr(gradients, "clipped", wrong)
    with pytest.raises(AssertionError, match="differ from the vmap engine"):
        speed.measure("tiny", others=False, budget_s=0.01)
