"""Fine-tuning of the pretrained model on meshes and in several processes agrees with one device, also when resumed.

On another mesh bits differ, so steps that were charged but not saved are repeated with fresh noise, never with the same
noise. Here the fresh noise comes from a fixed seed, so that a run moved to another mesh must end like a run on one
device that died at the same steps.
"""

import concurrent.futures
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pretrained_run
import pytest
from runs import ROOT, script

from dpopt.run import entropy

pytest.importorskip("safetensors.numpy")
RUN = ROOT / "tests" / "programs" / "pretrained_run.py"
# Float32 sums in another order (2^-24 of gradients of size 1, over 48 rows), which Adam divides by the root of a second
# moment, over up to 6 steps of size 0.01. Noise or a batch that differed would move a parameter by about 0.01.
ATOL = 2e-6
EIGHT = "data=8", "data=4,fsdp=2", "data=2,fsdp=4", "fsdp=8", "data=2,fsdp=2,tensor=2"
WAYS = [{"train": train, "clip": clip} for train in ("lora", "all") for clip in ("flat", "layerwise")]
STEPS = 6


def on(devices, *cases):
    return script(RUN, json.dumps(cases), devices=devices, timeout=1_200)


def assert_alike(got, expected):
    assert expected["moved"] > 100 * ATOL
    np.testing.assert_allclose(got["params"], expected["params"], rtol=0, atol=ATOL)
    for name in ("update", "steps", "lost", "epsilon", "segments"):
        assert got[name] == expected[name], name


@pytest.mark.slow
def test_two_devices_train_what_one_does(monkeypatch):
    monkeypatch.setattr(entropy, "draw", entropy.draw)  # restored when this ends
    (got,) = on(2, {"steps": 2, "mesh": "data=1,fsdp=2"})
    assert any("fsdp" in spec for spec in got["parts"])
    assert_alike(got, pretrained_run.run(steps=2))


@pytest.fixture(scope="module")
def alone():
    return on(1, *({**way, "steps": STEPS} for way in WAYS))


@pytest.mark.slow
def test_eight_devices_train_what_one_does(alone):
    rng = np.random.default_rng(18)
    cases = [{**way, "steps": STEPS, "mesh": mesh} for way, mesh in zip(WAYS, rng.permutation(EIGHT), strict=False)]
    cases[0]["microbatch_size"] = 16  # of a batch of 48
    cases[1]["verify"] = True
    for case, got, expected in zip(cases, on(8, *cases), alone, strict=True):
        assert ("fsdp" in str(got["parts"])) == ("fsdp" in case["mesh"]), case
        assert_alike(got, expected)


@pytest.mark.slow
def test_two_processes_train_what_one_does(alone):
    rng = np.random.default_rng(19)
    meshes = rng.choice(["data=2", "fsdp=2", "data=1,fsdp=2"], len(WAYS))
    cases = json.dumps([{**way, "steps": STEPS, "mesh": str(mesh)} for way, mesh in zip(WAYS, meshes, strict=True)])
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, str(RUN), cases, f"localhost:{port}", "2", str(number)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in (0, 1)
    ]  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor(2) as readers:  # both at once: each waits for the other when it ends
        outputs = list(readers.map(lambda process: process.communicate(timeout=1_200), started))
    assert all(process.returncode == 0 for process in started), [error[-3000:] for _, error in outputs]
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert first == second
    for got, expected in zip(first, alone, strict=True):
        assert_alike(got, expected)


def chain(rng):
    """Three meshes, and the steps at which a run dies on the first two."""
    first = int(rng.integers(2, STEPS - 1))
    second = int(rng.integers(saved(first) + 1, STEPS))
    places = [str(rng.choice(EIGHT)), str(rng.choice(["data=2,fsdp=2", "fsdp=4", "data=4"])), None]
    return places, (first, second)


def saved(step):
    """The step of the newest checkpoint when a run dies after ``step``: every second one is saved, afterwards."""
    return (step - 1) // 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [20, 21])
def test_a_killed_run_goes_on_with_another_mesh(tmp_path, seed):
    rng = np.random.default_rng(seed)
    way = {**WAYS[seed % len(WAYS)], "steps": STEPS, "planned": STEPS + 4}  # each death loses two steps at most
    places, dies = chain(rng)
    lives = [{**way, "life": i, "dies": t} for i, t in enumerate([*dies, None])]
    *_, expected = on(1, *({**life, "directory": str(tmp_path / "one"), "replay": not life["life"]} for life in lives))
    for life, place in zip(lives, places, strict=True):
        (got,) = on(8 if place else 1, {**life, "mesh": place, "directory": str(tmp_path / "moved"), "exits": True})
    paid = dies[0] + dies[1] - saved(dies[0])
    newest = max(saved(dies[0]), saved(dies[1]))
    assert got["steps"] == paid + got["update"] - newest and got["segments"] == 3
    assert got["update"] == STEPS and got["epsilon"] <= pretrained_run.BUDGET
    assert_alike(got, expected)


@pytest.mark.slow
def test_a_killed_run_on_the_same_mesh_repeats_its_steps_to_the_bit(tmp_path):
    case = {"steps": STEPS, "mesh": "data=2,fsdp=2"}
    (whole,) = on(4, case)
    kept = {**case, "directory": str(tmp_path)}
    assert on(4, {**kept, "dies": 4, "exits": True}) == [{"died": 4, "journal": 4}]
    (resumed,) = on(4, {**kept, "life": 1})
    assert resumed["params"] == whole["params"] and resumed["lost"] == 0 and resumed["segments"] == 1
    assert resumed["steps"] == STEPS and resumed["epsilon"] == whole["epsilon"]
