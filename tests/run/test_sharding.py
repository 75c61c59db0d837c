"""The same training on 1, 2, 4 and 8 (simulated) devices, sharded or replicated, and in two processes."""

import json
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from runs import ROOT, script

from dpopt.run import sharding

pytestmark = pytest.mark.slow  # many processes, each of which compiles for up to eight devices

EXAMPLES = ROOT / "examples"
# Float32 sums in another order, divided by Adam's root of a second moment, over 6 steps of size 0.01.
ATOL = 2e-5


def assert_trained_alike(got, whole):
    np.testing.assert_allclose(got, whole, rtol=0, atol=ATOL)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return script(ROOT / "tests" / "programs" / "sharded_run.py", devices=8)


@pytest.fixture(scope="module")
def whole(seen):
    return np.array(seen["trajectories"]["1"])


# More than a block of 86 rows: sums over devices are added in floats, in pairs of floats, or each device has blocks.
@pytest.mark.parametrize("size, meshes", [(176, 3), (512, 1), (704, 1)])
def test_meshes_of_one_to_three_axes_automatic_and_explicit(size, meshes):
    found = script(ROOT / "tests" / "programs" / "meshes_run.py", size, meshes, devices=8)
    assert len(found) == 4 * meshes * 2
    assert [case for case in found if not case[-1] < ATOL] == []


def test_noise_is_the_same_on_any_number_of_devices(seen):
    assert len(seen["draws"]) == 6 and len(set(seen["draws"])) == 1
    assert seen["sent for draws"] == []


def test_correlated_noise_lies_and_travels_like_the_parameters():
    """The same steps as on one device, buffers sharded like the parameters, and no communication for the noise."""
    found = script(ROOT / "tests" / "programs" / "correlated_run.py", devices=8)
    assert len(found) == 8
    for name, _, off, sends_no_more, parts in found:
        assert off < 2e-6 and sends_no_more
        assert (parts != []) == (name in ("banded", "blt")) and all(p in ([16], [32], [32, 16]) for p in parts)


def test_devices_that_share_rows_read_them_once(seen):
    asked, right, stays = seen["rows read"]
    assert asked == [24] * 4 and right and stays


def test_more_devices_train_the_same(seen, whole):
    assert np.abs(whole).max() > 0.1
    for count in ("2", "4"):
        assert_trained_alike(seen["trajectories"][count], whole)


def test_data_parallel_example_on_eight_devices(whole):
    got = script(EXAMPLES / "data_parallel.py", "--replay", devices=8)
    assert got["devices"] == 8 and got["steps"] == 6 and 2.9 < got["epsilon"] <= 3.0
    assert_trained_alike(got["params"], whole)


def test_fully_sharded_example_on_eight_devices(whole):
    got = script(EXAMPLES / "fully_sharded.py", "--replay", devices=8)
    assert got["devices"] == 8 and got["steps"] == 6
    assert_trained_alike(got["params"], whole)


def _start(port, number, directory):
    # One device per process.
    environment = {
        "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "HOME": str(directory),
    }  # fmt: skip
    command = [sys.executable, str(EXAMPLES / "multi_process.py"), f"localhost:{port}", "2", str(number)]
    run = [*command, str(directory / "run"), "--replay"]
    return subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_train_the_same_and_keep_one_journal(whole, tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = [_start(port, number, tmp_path) for number in (0, 1)]
    outputs = [p.communicate(timeout=300) for p in processes]
    assert all(p.returncode == 0 for p in processes), [e[-3000:] for _, e in outputs]
    got = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert got[0] == got[1] and got[0]["processes"] == 2 and got[0]["lost"] == 0
    assert_trained_alike(got[0]["params"], whole)
    lines = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    assert len(lines) == 2 + 6, "the run's own line, the start of its segment, and six steps, once each"


def _sizes(shape):
    """Shapes of the arrays in HLO's words: ``(f32[96,16]{1,0}, pred[])`` -> [(96, 16), ()]."""
    return [tuple(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\w+\[([\d,]*)\]", shape)]


def _beyond_scalars(collectives, batch=96):
    """Collectives that gather per-example arrays with more than one number per example."""
    gathers = [shape for op, shape in collectives if op.startswith(("all-gather", "all-to-all", "collective-permute"))]
    return [s for shape in gathers for s in _sizes(shape) if batch in s and len(s) > 1]


def test_the_sharded_step_gathers_no_batch(seen):
    found = seen["data_parallel"]["vmap"]
    assert any(op == "all-reduce" and (16, 32) in _sizes(shape) for op, shape in found), "the sum over devices"
    assert not _beyond_scalars(found)
    assert not [op for op, _ in found if not op.startswith("all-reduce")], "parameters and noise stay where they are"
    assert not _beyond_scalars(seen["fully_sharded"]["vmap"])


def test_the_fast_engines_sharded_step_gathers_no_batch(seen):
    assert not _beyond_scalars(seen["data_parallel"]["ghost"])


def test_microbatches_of_a_sharded_batch_stay_on_their_devices(seen):
    for engine in ("vmap", "ghost"):
        found = seen["in microbatches"][engine]
        assert any(op.startswith("all-reduce") for op, _ in found)
        assert not [op for op, _ in found if not op.startswith("all-reduce")]


def test_the_check_of_collectives_can_fail():
    assert _beyond_scalars([("all-gather", "f32[96,16]{1,0}")]) == [(96, 16)]
    assert _beyond_scalars([("all-gather", "(f32[96]{0}, pred[2,96]{1,0})")]) == [(2, 96)]


def test_placing_says_what_does_not_fit():
    with pytest.raises(ValueError, match="there are 1 devices; got num_devices=3"):
        sharding.make_mesh(3)
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    with pytest.raises(ValueError, match=r"shape \(6, 2\) cannot be split over 4 devices: make pad_to"):
        sharding.shard_batch(np.ones((6, 2)), mesh)
    specs = {s: sharding.fully_sharded(np.ones(s), mesh).spec for s in [(8, 16), (16, 8), (3, 2), (), (12,)]}
    parts = jax.sharding.PartitionSpec
    assert specs == {
        (8, 16): parts(None, "data"),
        (16, 8): parts("data"),
        (3, 2): parts(),
        (): parts(),
        (12,): parts("data"),
    }
