"""Injected faults: killed processes, damaged files, full disks, bad data, fewer devices."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_identical, assert_near, paid, privacy_four, slow_unless
from runs import ROOT, fetch, run, script, start, tiny_plan

import dpopt

pytest.importorskip("orbax.checkpoint")

from dpopt.run.checkpoint import Checkpointer, CheckpointError

# The full disk of one test leaves incomplete programs in the compilation cache that tests share.
pytestmark = pytest.mark.filterwarnings("ignore:Error (reading|writing) persistent compilation cache")

KILLED = ROOT / "tests" / "programs" / "killed_run.py"


class Victim:
    """Runs killed_run.py repeatedly in one directory; programs are compiled once."""

    def __init__(self, directory, programs, replay=True):
        self.directory = directory
        self.replay = replay
        self.released_file = directory / "released.txt"
        flags = {"JAX_COMPILATION_CACHE_DIR": str(programs), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        self.environment = {**os.environ, **flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        self.environment.pop("XLA_FLAGS", None)

    def start(self):
        self.directory.mkdir(exist_ok=True)
        command = [sys.executable, str(KILLED), str(self.directory / "run"), str(self.released_file), "replay"]
        command = command if self.replay else command[:-1]
        with open(self.directory / "stderr.txt", "a") as errors:
            return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=errors, text=True)

    def kill_at(self, rng):
        """Kills it at a random point; False if it finished before.

        One time in four at a random moment (importing, restoring, repeating, saving), otherwise near a random step.
        """
        now = self.journalled
        process = self.start()
        if process.stdout.readline() != "started\n":
            raise RuntimeError((self.directory / "stderr.txt").read_text())
        if rng.random() < 0.25:
            time.sleep(rng.uniform(0, 4))
        else:
            target = rng.randint(now, now + 25)
            while self.journalled < target and process.poll() is None:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.communicate()
        return process.returncode == -signal.SIGKILL

    def finish(self):
        process = self.start()
        out, _ = process.communicate(timeout=300)
        if process.returncode:
            raise RuntimeError((self.directory / "stderr.txt").read_text())
        return json.loads(out.splitlines()[-1])

    @property
    def journalled(self):
        path = self.directory / "run" / "ledger.jsonl"
        return sum('"event": {' in line for line in path.read_text().splitlines()[1:]) if path.exists() else 0

    def released(self):
        """All released values, as a dictionary from step to the set of values."""
        values = {}
        for line in self.released_file.read_text().splitlines():
            if len(line.split(" ")) == 2:
                step, value = line.split(" ")
                values.setdefault(int(step), set()).add(value)
        return values


def kill_and_resume(tmp_path, kills, seed, kills_a_run):
    """Kills runs at random points and resumes them to the end; returns the number of steps done at each kill."""
    programs = tmp_path / "programs"
    reference = Victim(tmp_path / "whole", programs)
    whole, expected = reference.finish(), reference.released()
    rng = random.Random(seed)
    points, runs = [], 0
    while len(points) < kills:
        runs += 1
        victim = Victim(tmp_path / f"killed-{runs}", programs)
        for _ in range(min(kills_a_run, kills - len(points))):
            if not victim.kill_at(rng):
                break
            points.append(victim.journalled)
            released = victim.released() if victim.released_file.exists() else {}
            assert victim.journalled >= max(released, default=0), "a step was released before it was entered"
        assert victim.finish() == whole
        for step, values in victim.released().items():
            assert values == expected[step], "two values were released for one step"
    return points


@pytest.mark.slow
def test_killed_runs_resume_bit_for_bit(tmp_path):
    points = kill_and_resume(tmp_path, kills=2, seed=0, kills_a_run=2)
    assert len(points) == 2


@pytest.mark.slow
def test_killed_runs_go_on_with_fresh_noise_and_count_every_step(tmp_path):
    victim, rng = Victim(tmp_path / "killed", tmp_path / "programs", replay=False), random.Random(2)
    for _ in range(3):
        victim.kill_at(rng)
    end = victim.finish()
    released = sum(len(values) for values in victim.released().values())
    lines = [line for line in victim.released_file.read_text().splitlines() if len(line.split(" ")) == 2]
    assert released == len(lines), "no result was released twice, not even for the same step"
    assert end["steps"] == victim.journalled >= released


@pytest.mark.slow
def test_fifty_killed_runs_resume_bit_for_bit(tmp_path):
    points = kill_and_resume(tmp_path, kills=50, seed=1, kills_a_run=3)
    print("steps in the journal at each kill:", points)
    assert len(set(points)) > 20, "the kills should fall at many different points"


def saved_run(directory, steps=6, **options):
    with Checkpointer(directory, every=2, keep=5) as c:
        return run(tiny_plan(steps=steps), checkpointer=c, replay=True, **options)


def arrays(directory, position):
    """The files of a checkpoint that hold arrays, largest first."""
    files = [p for p in (directory / "checkpoints" / str(position) / "state").rglob("*") if p.is_file()]
    return sorted(files, key=lambda p: -p.stat().st_size)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "damage", slow_unless({"truncated", "missing"}, ["truncated", "overwritten", "missing", "no description"])
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_resumes(tmp_path, damage, caplog):
    whole = run(tiny_plan(steps=8), replay=True)
    saved_run(tmp_path, 6)
    files = arrays(tmp_path, 7)
    for path in files if damage != "no description" else ():
        content = path.read_bytes()
        if damage == "truncated":
            path.write_bytes(content[: len(content) // 2])
        elif damage == "overwritten":
            path.write_bytes(bytes(b ^ 0xFF for b in content))
        else:
            path.unlink()
    if damage == "no description":
        (tmp_path / "checkpoints" / "7" / "run" / "metadata").write_text("{")
    result = saved_run(tmp_path, 8)
    assert_identical(result.state[:3], whole.state[:3])
    assert result.ledger == whole.ledger and result.lost == 0
    assert (tmp_path / "damaged-7").is_dir() and "damaged checkpoint set aside: 7" in caplog.text


def test_a_checkpoint_with_other_numbers_is_damaged(tmp_path, monkeypatch):
    """The loaded state is compared with the saved one."""
    from dpopt.run import _orbax

    saved_run(tmp_path, 2)
    monkeypatch.setattr(_orbax, "_restored", lambda raw, like: like if _orbax.is_key(like) else raw + 1)
    with pytest.raises(CheckpointError, match="its content has digest"):
        saved_run(tmp_path, 2)


def test_if_all_checkpoints_are_damaged_nothing_is_guessed(tmp_path):
    saved_run(tmp_path, 4)
    for position in (1, 3, 5):
        for path in arrays(tmp_path, position):
            path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* can be read .*holds 4 steps that are spent"):
        saved_run(tmp_path, 4)
    (tmp_path / "checkpoints").rename(tmp_path / "unreadable")
    whole = run(tiny_plan(steps=4), replay=True)
    assert_identical(saved_run(tmp_path, 4).state[:3], whole.state[:3])


@pytest.fixture
def small_disk():
    """Limits the size of every file that this process writes, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_while_a_step_is_entered(tmp_path, small_disk):
    whole = run(tiny_plan(steps=6), replay=True)
    saved_run(tmp_path, 2)
    path = tmp_path / "ledger.jsonl"
    before = path.read_bytes()
    small_disk(len(before) + 100)  # room for part of a line
    seen = []
    with pytest.raises(OSError, match=r"File too large|no space"):
        saved_run(tmp_path, 6, on_step=lambda t, p: seen.append(t))
    assert not seen and path.read_bytes() == before
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert_identical(saved_run(tmp_path, 6).state[:3], whole.state[:3])


# A write that fails late reaches Orbax's threads when their loop is closed; Python then reports results never awaited.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_while_saving(tmp_path, small_disk):
    whole = run(tiny_plan(steps=6), replay=True)
    saved_run(tmp_path, 2)
    small_disk(len((tmp_path / "ledger.jsonl").read_bytes()) + 10_000)  # the journal fits, a padded checkpoint does not
    wide = lambda w, x: jnp.sum((w - x[0]) ** 2)  # noqa: E731
    big = tmp_path / "big"
    with Checkpointer(big, every=2) as c, pytest.raises(CheckpointError, match="could not be written"):
        run(tiny_plan(steps=6), checkpointer=c, params=jnp.zeros(20_000), loss=wide, replay=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with Checkpointer(big, every=2) as c:
        result = run(tiny_plan(steps=6), checkpointer=c, params=jnp.zeros(20_000), loss=wide, replay=True)
    assert result.state.update == 6 and result.lost == 0 and result.ledger == whole.ledger
    assert result.ledger.steps == 6


@pytest.mark.slow
def test_a_restart_with_fewer_devices(tmp_path):
    command = ROOT / "tests" / "programs" / "moved_run.py"
    first = script(command, tmp_path, 4, 7, devices=4)  # dies after step 7; the latest checkpoint is of step 6
    assert first == {"died": True, "journal": 7}
    second = script(command, tmp_path, 2, 0, devices=2)
    assert second["lost"] == 1 and second["segments"] == 2 and second["steps"] == second["update"] + 1
    assert second["epsilon"] <= second["budget"] and second["stopped"] == "budget"


BAD = [np.nan, np.inf, -np.inf, 1e30, -1e38]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("engine", ["vmap", "ghost"])
@pytest.mark.parametrize("value", [*BAD, 1e-30])
def test_one_bad_example_moves_the_sum_by_the_clip_norm_at_most(engine, value):
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    bad = x.copy()
    bad[2] = value
    loss = lambda w, e: jnp.sum(w * e)  # noqa: E731

    def total(batch, mask):
        grads = dpopt.per_example_grads(loss, engine=engine)(jnp.ones(3), batch, mask=jnp.array(mask))
        return dpopt.clip_and_sum(0.5).update(grads, None, jnp.ones(3))[0], grads.sensitive

    without, _ = total(x, [True, True, False, True, True, True])
    with_bad, seen = total(bad, [True] * 6)
    assert np.isfinite(with_bad).all()
    assert np.linalg.norm(np.float64(with_bad) - np.float64(without)) <= 0.5 * (1 + 1e-5)
    assert seen.is_finite.tolist() == [True, True, bool(np.isfinite(value)), True, True, True]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("engine", ["vmap", "ghost"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_dropped_and_counted(engine, value):
    def loss(w, e):
        return jnp.sum(w * e["x"]) * jnp.where(e["bad"], value, 1.0)

    opt = dpopt.dp_sgd(0.1, **privacy_four(noise_multiplier=0.0))
    step = dpopt.make_train_step(loss, opt, engine=engine)
    batch = {"x": jnp.ones((4, 3)), "bad": jnp.array([False, True, False, True])}
    params, _, metrics = step(jnp.ones(3), opt.init(jnp.ones(3)), batch, mask=None)
    assert int(metrics.num_nonfinite) == 2 and int(metrics.num_examples) == 4
    kept = {"x": batch["x"], "bad": jnp.zeros(4, bool)}
    expected, _, _ = step(jnp.ones(3), opt.init(jnp.ones(3)), kept, ~batch["bad"])
    assert_near(params, expected)


@pytest.mark.parametrize("engine", ["vmap", "ghost"])
def test_a_batch_of_padding_adds_noise_alone(engine):
    opt = dpopt.dp_sgd(1.0, **privacy_four())
    step = dpopt.make_train_step(lambda w, x: jnp.sum((w - x) ** 2), opt, engine=engine)
    batch = jnp.full((4, 3), jnp.nan)
    params, _, metrics = step(jnp.zeros(3), opt.init(jnp.zeros(3)), batch, jnp.zeros(4, bool))
    draw = dpopt.noise.standard_normal_like(jax.random.fold_in(jax.random.key(0), 0), jnp.zeros(3))
    np.testing.assert_allclose(params, -draw / 4, rtol=1e-6)
    assert int(metrics.num_examples) == 0 and int(metrics.num_nonfinite) == 0 and float(metrics.loss) == 0.0


def test_samplers_draw_no_example_twice():
    for sampler in (dpopt.PoissonSampler(50, 40, seed=0), dpopt.FixedSizeSampler(50, 40, seed=0)):
        for t in range(200):
            indices, mask = sampler.batch(t)
            drawn = indices[mask]
            assert len(set(drawn.tolist())) == len(drawn)


def test_an_example_that_is_twice_in_a_batch_counts_twice():
    """Clipping is per row: if you repeat rows you must account for it. The samplers never repeat any."""
    grads = jnp.array([[10.0, 0.0]] * 2)
    total, _ = dpopt.clip_and_sum(1.0).update(grads, None, jnp.zeros(2))
    assert float(total[0]) == pytest.approx(2.0)


def test_wrong_dtypes_are_refused_by_name():
    plan = tiny_plan(steps=1)
    with pytest.raises(TypeError, match="parameter params has dtype int32"):
        run(plan, params=jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"real scalar.*complex"):
        run(tiny_plan(steps=1), loss=lambda w, x: jnp.sum(w * x) * 1j)
    with pytest.raises(TypeError, match="mask must be boolean"):
        dpopt.per_example_grads(lambda w, x: jnp.sum(w * x))(start(), fetch(np.arange(4)), mask=jnp.ones(4))
    with pytest.raises(ValueError, match="disagree on the batch size"):
        run(tiny_plan(steps=1), data=lambda i: (fetch(i), fetch(i)[1:]), loss=lambda w, x: jnp.sum(w * x[0]))
    assert plan.journal.ledger.steps == 0, "what was refused costs nothing"


def test_no_assert_guards_a_promise():
    """``python -O`` removes assert statements: dpopt must not rely on any."""
    import ast

    for path in (ROOT / "dpopt").rglob("*.py"):
        found = [n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Assert)]
        assert not found, f"{path}: lines {found}"


def test_keys_of_the_operating_system_differ_and_are_keys():
    from dpopt.keys import secure_key

    words = {tuple(jax.random.key_data(secure_key()).tolist()) for _ in range(20)}
    assert len(words) == 20
    assert jax.random.key_impl(secure_key("rbg")) == "rbg" and jax.random.key_data(secure_key("rbg")).shape == (4,)
    tiny = dpopt.dp_sgd(1.0, **privacy_four(key=secure_key()))
    assert tiny.privacy.step_event().noise_multiplier == paid(1.0)
    with pytest.raises(ValueError):
        secure_key("dice")
