"""Faults of runs: noise shared by two results, steps missing from the ledger, secrets revealed."""

import dataclasses
import itertools
import json
import re
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import DATA, DELTA, ROOT, fetch, loss_fn, start, tiny_plan

import dpopt

pytest.importorskip("orbax.checkpoint")

from dpopt.run import entropy
from dpopt.run.checkpoint import Checkpointer
from dpopt.run.identity import run_identity
from dpopt.run.journal import Journal, JournalError
from dpopt.run.results import ReplayError
from dpopt.run.state import TrainState

# All examples lie along the first coordinate: in the others a step adds noise alone.
ALONG = np.zeros((64, 3), np.float32)
ALONG[:, 0] = 1e6


def toward(w, x):
    return jnp.sum((w - x) ** 2)


def away(w, x):
    return jnp.sum((w + x) ** 2)


class Killed(BaseException):
    pass


def go(directory, plan=None, loss=toward, dies=None, every=5, **options):
    """Trains in a directory as in a new process; returns the result and what was released, by step."""
    entropy._runs.clear()
    released, drawn = [], []

    def on_step(t, params):
        released.append((t, np.array(params), drawn[-1]))
        if t == dies:
            raise Killed

    def rows(indices):
        drawn.append(indices.tobytes())
        return ALONG[indices]

    plan = plan or tiny_plan(steps=20, rule=optax.sgd(1.0))
    with Checkpointer(directory, every=every, asynchronous=False) as c:
        try:
            result = dpopt.train(plan, loss, start(), rows, checkpointer=c, on_step=on_step, **options)
        except Killed:
            result = None
    return result, released


def noises(before, released):
    """The noise of every released step, rounded so that equal draws can be recognised."""
    path = [before, *(params for _, params, _ in released)]
    return [tuple(np.round(after[1:] - was[1:], 3) + 0.0) for was, after in itertools.pairwise(path)]


def assert_nothing_is_shared(before, first, second):
    a, b = noises(before, first), noises(before, second)
    assert len(set(a + b)) == len(a) + len(b), "two results share noise"
    batches = [batch for _, _, batch in first + second]
    assert len(set(batches)) == len(batches), "two results share a sample"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["put back", "copied"])
def test_restored(tmp_path, way):
    """A backup was restored (or a copy continued) after more steps; with another loss, the noise cancelled."""
    run, backup = tmp_path / "run", tmp_path / "backup"
    p5 = np.array(go(run, steps=5)[0].params)
    shutil.copytree(run, backup)
    _, first = go(run, steps=7)
    if way == "put back":
        shutil.rmtree(run)
        shutil.copytree(backup, run)
    result, second = go(run if way == "put back" else backup, loss=away, steps=7)
    assert [t for t, _, _ in first] == [t for t, _, _ in second] == [6, 7]
    assert_nothing_is_shared(p5, first, second)
    assert result.ledger.steps == 7, "a directory that was rolled back has no record of later steps"


def test_droppedline(tmp_path):
    """The journal's last lines were dropped after a kill; steps were released twice under one noise."""
    _, first = go(tmp_path, dies=8)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-3]))
    _, second = go(tmp_path, loss=away, steps=8)
    assert [t for t, _, _ in second] == [6, 7, 8]
    assert_nothing_is_shared(first[4][1], first[5:], second)


def test_a_second_plan_with_the_same_key(tmp_path):
    first, second = (go(tmp_path / name, loss=loss, steps=3)[1] for name, loss in (("a", toward), ("b", away)))
    assert_nothing_is_shared(np.array(start()), first, second)


def test_one_process_refuses_a_key_in_two_plans(tmp_path):
    plan = tiny_plan(steps=2)
    dpopt.train(plan, loss_fn, start(), fetch)
    again = [tiny_plan(steps=2), tiny_plan(steps=2, noise=2.0), dataclasses.replace(plan, journal=Journal())]
    for other in again:
        with pytest.raises(ValueError, match=r"another run with the same key.*secure_key"):
            dpopt.train(other, loss_fn, start(), fetch)
        assert other.journal.ledger.steps == 0
    for steps in (1, 2):  # a resumed run is the same run, whichever plan resumes it
        with Checkpointer(tmp_path) as c:
            dpopt.train(tiny_plan(steps=2, seed=5), loss_fn, start(), fetch, steps=steps, checkpointer=c)
    with Checkpointer(tmp_path / "other") as c, pytest.raises(ValueError, match="another run with the same key"):
        dpopt.train(tiny_plan(steps=2, seed=5), loss_fn, start(), fetch, checkpointer=c)
    assert not any(bytes(jax.random.key_data(jax.random.key(5))) in entry for entry in entropy._runs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("replay", [False, True])
def test_otherplan(tmp_path, replay):
    """The state of an earlier result, passed to another plan: the first steps vanished from the ledger."""
    earlier = dpopt.train(tiny_plan(steps=3), loss_fn, start(), fetch, replay=replay)
    plan = tiny_plan(steps=3, seed=1)
    unknown = "3 steps, which are not in this plan's journal.*pass them alone"
    with pytest.raises(ValueError, match=unknown):
        dpopt.train(plan, loss_fn, earlier.state, fetch, steps=6, replay=replay)
    with Checkpointer(tmp_path) as c, pytest.raises(ValueError, match=unknown):
        dpopt.train(tiny_plan(steps=3, seed=2), loss_fn, earlier.state, fetch, steps=6, checkpointer=c, replay=replay)
    own = dpopt.train(plan, loss_fn, start(), fetch, replay=replay)  # with its own journal
    for state in (earlier.state, earlier.state._replace(segment=None)):
        with pytest.raises(ValueError, match=unknown):
            dpopt.train(plan, loss_fn, state, fetch, steps=6, replay=replay)
    with pytest.raises(ValueError, match=r"drawn noise|same key"):
        dpopt.train(plan, loss_fn, TrainState(*earlier.state[:2]), fetch, steps=6, replay=replay)
    # Parameters alone start a run, and the ledgers of both add up.
    second = dpopt.train(tiny_plan(steps=3, seed=3), loss_fn, earlier.params, fetch, replay=replay)
    total = earlier.ledger.copy()
    total.record(second.ledger.event)
    both = dpopt.events.compose(plan.optimizer.privacy, plan.sampler, 6)
    assert total.epsilon(delta=DELTA) == pytest.approx(dpopt.epsilon_of_event(both, delta=DELTA), rel=1e-6)
    assert own.ledger.steps == second.ledger.steps == 3


@pytest.mark.one_in(2)
@pytest.mark.parametrize("replay", [False, True])
def test_secure_key_no_resume(tmp_path, replay):
    """A run with the key that SECURITY.md recommends could not be resumed from its own checkpoint."""

    def secure_plan():
        builder = dpopt.Builder(num_examples=64, expected_batch_size=8, steps=6, key=dpopt.secure_key(), pad_to=32)
        return builder.clip(1.0).noise(1.3).then(optax.sgd(0.05)).build()

    go(tmp_path, secure_plan(), dies=4, every=3, replay=replay)
    result, _ = go(tmp_path, secure_plan(), steps=5, every=3, replay=replay)
    assert (result.ledger.steps, result.lost) == ((5, 0) if replay else (6, 1))


@pytest.mark.slow
def test_planepsilon(tmp_path):
    """`plan.epsilon(step)` was taken for what a run with lost steps had spent."""
    make = lambda: tiny_plan(steps=8, budget=8.0)  # noqa: E731
    go(tmp_path, make(), dies=3)
    plan, shown = make(), []
    with Checkpointer(tmp_path) as c:
        result = dpopt.train(
            plan, toward, start(), lambda i: ALONG[i], checkpointer=c, steps=4,
            on_step=lambda t, _: shown.append((plan.epsilon(t), plan.spent())),
        )  # fmt: skip
    assert result.lost == 3 and shown[-1] == (plan.epsilon(4), result.epsilon(delta=DELTA, accountant="rdp"))
    assert plan.spent() == plan.epsilon(7) > plan.epsilon(4)
    assert "planned epsilon" in str(plan)
    with pytest.raises(ValueError, match="no delta is set"):
        tiny_plan().spent()


def test_looking_kills_the_run(tmp_path):
    """A second Checkpointer, opened only to look, deleted what the run was writing."""
    half = tmp_path / "run" / "checkpoints" / "3.orbax-checkpoint-tmp-7"
    seen = []

    def look(t, params):
        half.mkdir(parents=True, exist_ok=True)  # as if the run were writing there now
        with Checkpointer(tmp_path / "run") as other:
            seen.append(other.positions())
            with pytest.raises(JournalError, match="in use by another process"):
                dpopt.train(tiny_plan(seed=9), loss_fn, start(), fetch, checkpointer=other)
        assert half.is_dir()

    with Checkpointer(tmp_path / "run", every=2, asynchronous=False) as c:
        dpopt.train(tiny_plan(steps=4), loss_fn, start(), fetch, checkpointer=c, on_step=look)
    assert seen == [[1], [1], [1, 3], [1, 3]]
    assert Checkpointer(tmp_path / "nothing").positions() == [] and not (tmp_path / "nothing").exists()
    with Checkpointer(tmp_path / "run") as c:  # the writer cleans up
        dpopt.train(tiny_plan(steps=5), loss_fn, start(), fetch, checkpointer=c)
    assert not half.exists()


def test_seedhash(tmp_path):
    """The sampler's seed was found by brute force from a hash in the journal, where nothing may derive from secrets."""
    texts = []
    for name, seed in (("a", 271828), ("b", 3)):
        plan = tiny_plan(steps=2, seed=seed)
        builder = dpopt.Builder(
            num_examples=64, expected_batch_size=64, steps=2, key=jax.random.key(seed), seed=seed, pad_to=64
        )
        plan = builder.clip(1.0).noise(0.0).then(optax.sgd(0.1)).build()  # without noise both runs release the same
        go(tmp_path / name, plan, replay=True)
        text = (tmp_path / name / "ledger.jsonl").read_text()
        texts.append(re.sub(r'"(run|segment)": "[0-9a-f]{16}"|^[0-9a-f]{16} ', "", text, flags=re.MULTILINE))
    assert texts[0] == texts[1] and "271828" not in texts[0]
    identities = [run_identity(tiny_plan(seed=seed), start()) for seed in (1, 2)]
    assert identities[0] == identities[1]


def test_repr_shows_no_secret():
    """`repr(result)` printed the noise key."""
    key = jax.random.wrap_key_data(jnp.array([123456789, 987654321], jnp.uint32))
    builder = dpopt.Builder(num_examples=64, expected_batch_size=8, steps=2, key=key, seed=555777999, pad_to=32)
    builder = builder.clip(1.0).noise(1.0).then(optax.adam(0.1))
    plan = builder.build()
    for replay in (True, False):
        result = dpopt.train(plan, loss_fn, start(), fetch, steps=2, budget=dpopt.Budget(90, DELTA), replay=replay)
        held = [result.state.segment.seed, *jax.random.key_data(entropy.noise_states(result.state.opt_state)[0].key)]
        secrets = ["123456789", "987654321", "555777999", *map(str, held)]
        shown = [
            builder,
            plan,
            plan.optimizer,
            plan.sampler,
            result,
            result.state,
            result.state.opt_state,
            plan.journal,
        ]
        for text in [f(x) for f in (repr, str) for x in shown]:
            assert not [s for s in secrets if s in text], text
        assert "lost=0" in repr(result) or replay is False
        assert "update=2" in repr(result.state) and "adam" not in repr(result.state)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("replay", [False, True])
def test_on_step_lost(tmp_path, monkeypatch, replay):
    """Killed between a step's journal line and its callback: it was charged, and `on_step` was never called."""
    real = Journal.append

    def dies(self, entry):
        real(self, entry)
        if entry.update == 8:
            raise Killed

    monkeypatch.setattr(Journal, "append", dies)
    _, first = go(tmp_path, replay=replay)
    monkeypatch.setattr(Journal, "append", real)
    result, second = go(tmp_path, steps=10, replay=replay)
    assert [t for t, _, _ in first] == list(range(1, 8))
    assert [t for t, _, _ in second] == ([8, 9, 10] if replay else [6, 7, 8, 9, 10])
    assert result.ledger.steps == (10 if replay else 13)


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(rule=optax.adam(0.2)), r"scale\.step_size: -0\.1, now -0\.2"),
        (dict(rule=optax.adam(0.1, b1=0.5)), r"scale_by_adam\.b1: 0\.9, now 0\.5"),
        (dict(loss=away), r"loss: loss_fn [0-9a-f]{8}, now away [0-9a-f]{8}"),
        (dict(data=lambda i: DATA[i] + 1), r"fetch_batch: fetch .*, now .*<lambda>"),
        (dict(microbatch_size=8), None),
    ],
    ids=["learning rate", "moment", "loss", "data source", "microbatches"],
)
@pytest.mark.one_in(6)
def test_a_replay_error_names_what_changed(change, named):
    plan = tiny_plan(steps=2)
    dpopt.train(plan, loss_fn, start(), fetch, replay=True)
    other = dataclasses.replace(tiny_plan(steps=2, rule=change.pop("rule", None)), journal=plan.journal)
    data, loss = change.pop("data", fetch), change.pop("loss", loss_fn)
    try:
        dpopt.train(other, loss, start(), data, replay=True, **change)
    except ReplayError as error:
        assert re.search(named or "microbatch_size: None, now 8", str(error)), str(error)
    else:
        assert named is None, "microbatches may add up to the same bits"


@pytest.mark.slow  # two processes
def test_processes_that_differ_refuse_to_start(tmp_path):
    """Each process called `secure_key()`: replicas drifted apart, and examples were in a batch twice."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    command = [sys.executable, str(ROOT / "tests" / "programs" / "differing_run.py"), str(port), str(tmp_path)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen([*command, str(number)], env=environment, **pipes) for number in (0, 1)]
    outputs = [p.communicate(timeout=300) for p in processes]
    assert all(p.returncode == 0 for p in processes), [e[-3000:] for _, e in outputs]
    got = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    for name, differing in {
        "own keys": "key, seed",
        "own seeds": "seed",
        "own example keys": "example key",
        "own plans": "plan",
        "own parameters": "parameters",
        "own steps": "steps, replay, budget, checkpoints and evaluations",
        "own intervals": "steps, replay, budget, checkpoints and evaluations",
        "own data": "rows of the data",
        "own order": "rows of the data",
        "own data, later": "the result of this step (the data, or the loss)",
        "own copies": "checkpoint directory",
        "own directories": "checkpoint directory",
    }.items():
        assert all(f"differ in: {differing}. " in g[name] for g in got), (name, got)
    assert got[0]["damaged"] == got[1]["damaged"] == ["checkpoints", "damaged", "ledger.jsonl"]
    # By default each call draws fresh bits, and both processes the same.
    assert got[0]["shared key"] == got[1]["shared key"] and got[0]["twice"] == got[1]["twice"] != got[0]["shared key"]
