"""The recipes for larger machines, in small, as whole runs that are killed and resumed."""

import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from runs import ROOT
from test_cifar10 import batches, binary, pack
from test_recipes import example

from dpopt.run import entropy

pytestmark = pytest.mark.slow  # processes of their own, that compile for up to eight devices


def command(name, *options, devices=1):
    """Arguments of `subprocess`."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip(), "PYTHONPATH": str(ROOT)}
    return {"args": [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options], "env": env, "text": True}


def finished(name, *options, devices=1):
    """Its output."""
    done = subprocess.run(**command(name, *options, devices=devices), capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def journal(directory):
    path = directory / "ledger.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def killed(name, directory, *options, devices=1):
    """Starts a run and kills it after three steps in its journal; returns the number of lines there."""
    process = subprocess.Popen(**command(name, *options, devices=devices), stdout=subprocess.DEVNULL)
    until = time.monotonic() + 1200
    while len(journal(directory)) < 2 + 3:  # the run's own line, and that of its segment
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len(journal(directory))


def killed_and_resumed(name, directory, *options, devices=1):
    """The output of the second run. The steps of both runs stay charged and are within the budget."""
    options = (*options, "--directory", str(directory), "--save-every", "2")
    lines = killed(name, directory, *options, devices=devices)
    assert lines < 2 + 8, "it ended before it was killed"
    printed = finished(name, *options, devices=devices)
    assert len(journal(directory)) > lines
    assert 7 < float(re.search(r"\nepsilon ([\d.]+) at delta 0.001", printed)[1]) <= 8.0
    assert re.search(r"all 8 steps are done|stopped by the budget after step [5-7] of 8", printed)
    return printed


@jax.numpy_rank_promotion("allow")
def test_the_cifar_recipe_trains_is_stopped_and_resumes(tmp_path, monkeypatch, capsys):
    """In this process, where runs are not compared with plain gradients: the sign of a unit near 0, which rounding
    decides, is a larger part of the gradient in so narrow a network than that comparison allows."""
    pack(tmp_path / "cifar-10-binary.tar.gz", binary(batches(40)))
    small = ["--data", str(tmp_path), "--depth", "10", "--width", "1", "--multiplicity", "2", "--batch-size", "16"]
    small += ["--microbatch", "8", "--epsilon", "8", "--delta", "1e-3", "--steps", "8"]
    small += ["--directory", str(tmp_path / "run"), "--save-every", "2"]
    recipe = example("cifar10_wide_resnet")
    real, tests = recipe.accuracy_of, []

    def stops(*args):
        accuracy = real(*args)

        def until_the_fourth(params):
            tests.append(accuracy(params))
            if len(tests) == 4:  # at first, and after one, two and three steps
                raise KeyboardInterrupt
            return tests[-1]

        return until_the_fourth

    monkeypatch.setattr(recipe, "accuracy_of", stops)
    with pytest.raises(KeyboardInterrupt):
        recipe.main(small)
    assert len(journal(tmp_path / "run")) == 2 + 3
    monkeypatch.setattr(recipe, "accuracy_of", real)
    entropy._runs.clear()  # as in a process of its own
    capsys.readouterr()
    recipe.main(small)
    printed = capsys.readouterr().out
    assert "stopped by the budget after step 7 of 8" in printed  # the third was paid for and lost
    assert 7 < float(re.search(r"\nepsilon ([\d.]+) at delta 0.001", printed)[1]) <= 8.0
    assert 0 <= float(re.search(r"test accuracy ([\d.]+)\n", printed)[1]) <= 1
    assert "differentially private for adding or removing one example" in printed


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "text").mkdir()
    for i in range(48):
        words = rng.choice(["the", "cat", "sat", "on", "a", "mat"], rng.integers(4, 40))
        (tmp_path / "text" / f"{i}.txt").write_text(" ".join(words))
    return tmp_path / "text"


SMALL = ["--layers", "2", "--width", "128", "--length", "16", "--windows", "2", "--batch-size", "12", "--delta", "1e-3"]


@pytest.mark.parametrize(("clip", "copies"), [("layerwise", "2"), ("flat", "1")])
def test_the_decoder_predicts_trains_is_killed_and_resumes_on_eight_devices(clip, copies, corpus, tmp_path):
    small = ["--text", str(corpus), *SMALL, "--clip", clip, "--data", copies, "--steps", "8"]
    said = finished("train_decoder", *small, "--predict", devices=8)
    ratio = float(re.search(r": ([\d.]+) times as much", said)[1])
    assert "on 8 devices" in said and 0.5 < ratio < 5
    small += ["--held-out", str(corpus)]
    printed = killed_and_resumed("train_decoder", tmp_path / "run", *small, devices=8)
    assert 1 < float(re.search(r"held-out loss ([\d.]+) a token", printed)[1]) < 8
    assert "differentially private for adding or removing one user" in printed
    assert "Here a user is a document" in printed
