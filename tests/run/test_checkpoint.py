"""Checkpoints hold the whole state of a run, are checked when loaded, and resume bit for bit."""

import os
import re
import stat

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical, paid
from runs import RDP, Died, die_at, fetch, run, start, tiny_plan

import dpopt

pytest.importorskip("orbax.checkpoint")

from dpopt import events
from dpopt.run.checkpoint import Checkpointer, CheckpointError
from dpopt.run.identity import run_identity, state_digest
from dpopt.run.journal import Entry, Journal, JournalError
from dpopt.run.state import Segment, TrainState


def lines(directory):
    return (directory / "ledger.jsonl").read_text().splitlines()


@pytest.mark.parametrize("at", [1, 5, 8, 10])
@pytest.mark.one_in(4)
def test_a_run_that_died_resumes_bit_for_bit(tmp_path, at):
    whole = run(tiny_plan(steps=10), replay=True)
    with Checkpointer(tmp_path, every=4) as c, pytest.raises(Died):
        run(tiny_plan(steps=10), checkpointer=c, on_step=die_at(at), replay=True)
    seen = []
    with Checkpointer(tmp_path, every=4) as c:
        result = run(tiny_plan(steps=10), checkpointer=c, on_step=lambda t, p: seen.append(t), replay=True)
    assert_identical(result.state[:3], whole.state[:3])
    assert result.ledger == whole.ledger and result.lost == 0
    # Steps that were certainly released are not released again; for the last step this cannot be known.
    assert seen == list(range(at, 11))


def test_a_run_that_died_goes_on_at_its_checkpoint_with_fresh_noise(tmp_path):
    with Checkpointer(tmp_path, every=4) as c, pytest.raises(Died):
        run(tiny_plan(steps=12), checkpointer=c, on_step=die_at(7))
    seen = []
    with Checkpointer(tmp_path, every=4) as c:
        # Another key, and so another seed: the run continues with those in the checkpoint, mixed with fresh bits.
        plan = tiny_plan(steps=12, seed=1)
        result = run(plan, checkpointer=c, on_step=lambda t, p: seen.append(t), steps=9)
    assert seen == [5, 6, 7, 8, 9]
    assert result.ledger.steps == 7 + 5 and result.lost == 3 and result.state.update == 9
    assert plan.spent(delta=1e-5) == result.epsilon(delta=1e-5) > plan.epsilon(9, delta=1e-5)


def test_a_segment_under_fresh_noise_can_be_repeated_too(tmp_path):
    """If you control the storage you may change to replay=True: the segment's key and seed are in the checkpoint."""
    with Checkpointer(tmp_path, every=4) as c, pytest.raises(Died):
        run(tiny_plan(steps=12), checkpointer=c, on_step=die_at(7))
    released = []
    with Checkpointer(tmp_path, every=4) as c:
        plan = tiny_plan(steps=12, seed=1)
        result = run(plan, checkpointer=c, on_step=lambda t, p: released.append(t), replay=True)
    assert result.ledger.steps == 12 and result.lost == 0 and released == [7, 8, 9, 10, 11, 12]


def test_a_finished_run_is_found_finished(tmp_path):
    for _ in range(2):
        with Checkpointer(tmp_path) as c:
            result = run(tiny_plan(steps=3), checkpointer=c)
    assert result.ledger.steps == 3 and len(lines(tmp_path)) == 2 + 3, "no second segment for nothing"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3), jax.random.key(3, impl="rbg")], ids=repr)
def test_keys_of_all_kinds_come_back(tmp_path, key):
    opt = dpopt.dp_adam(0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=key)
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": [jnp.zeros(()), jnp.float32(2)]}
    journal, state = Journal(), TrainState(params, opt.init(params), 7, Segment("a", 2**100 + 1))
    journal.attach(tmp_path / "ledger.jsonl", {})
    journal.append(Entry(None, state_digest(state), 7, "a", {}))
    with Checkpointer(tmp_path, asynchronous=False) as c:
        c.save(state, journal, {})
        blank = TrainState(jax.tree.map(jnp.zeros_like, params), opt.init(params))
        restored = c.restore(blank, journal, {})
    assert_identical(restored.state, state)
    assert restored.position == 1


def test_only_the_newest_are_kept(tmp_path):
    with Checkpointer(tmp_path, every=2, keep=2) as c:
        run(tiny_plan(steps=9), checkpointer=c)
        assert c.positions() == [9, 10]


def test_nobody_else_can_read_it(tmp_path):
    directory = tmp_path / "run"
    with Checkpointer(directory) as c:
        run(tiny_plan(steps=1), checkpointer=c)
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(directory / "ledger.jsonl").st_mode) == 0o600


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(noise=2.0), f"event.event.noise_multiplier: stored {paid(1.0)}, now {paid(2.0)}"),
        (dict(clip=0.5), r"clip_and_sum\(sensitivity=1.0.*now.*clip_and_sum\(sensitivity=0.5"),
        (dict(rule=optax.sgd(1.0)), r'state.*mu.*: stored "float32\[3\]", now null'),
        (dict(num_examples=60), "num_examples: stored 64, now 60"),
        (dict(batch=16), r"sampling: stored \"Poisson\(sampling_prob=0.125\)\", now"),
        (dict(noise=lambda t: 1.0 + (t > 100_000)), "events: stored"),
        (dict(sampling="fixed_size"), "WithoutReplacement"),
    ],
    ids=["noise", "clip", "rule", "data set", "batch", "schedule", "sampling"],
)
def test_another_run_is_refused_with_the_difference(tmp_path, change, message):
    with Checkpointer(tmp_path) as c:
        run(tiny_plan(steps=1), checkpointer=c)
    before = lines(tmp_path)
    with Checkpointer(tmp_path) as c, pytest.raises(JournalError, match="belongs to another run") as refused:
        run(tiny_plan(steps=2, **change), checkpointer=c)
    assert re.search(message, str(refused.value))
    assert lines(tmp_path) == before


def test_another_model_is_refused(tmp_path):
    with Checkpointer(tmp_path) as c:
        run(tiny_plan(steps=1), checkpointer=c)
    with (
        Checkpointer(tmp_path) as c,
        pytest.raises(JournalError, match=r'params..: stored "float32\[3\]", now "float32\[1\]"'),
    ):
        run(tiny_plan(steps=1), checkpointer=c, params=jnp.zeros(1))


def test_steps_and_learning_rate_may_change(tmp_path):
    with Checkpointer(tmp_path) as c:
        run(tiny_plan(steps=2), checkpointer=c)
    with Checkpointer(tmp_path) as c:
        result = run(tiny_plan(steps=4, rule=optax.adam(0.2)), checkpointer=c)
    assert result.state.update == 4 and result.ledger.steps == 4


@pytest.mark.slow
def test_a_budget_is_extended_across_processes(tmp_path):
    with Checkpointer(tmp_path) as c:
        first = run(tiny_plan(steps=6, budget=2.0), checkpointer=c, steps=50)
    assert first.stopped == "budget"
    n = first.ledger.steps
    with Checkpointer(tmp_path) as c:
        plan = tiny_plan(steps=6, budget=2.0)
        more = run(plan, checkpointer=c, steps=50, budget=dpopt.Budget(2.5, **RDP))
        assert more.stopped == "budget" and more.ledger.steps > n
    event = dpopt.privacy_event(plan.optimizer, sampling=plan.sampler, steps=more.ledger.steps)
    assert more.epsilon(**RDP) == dpopt.epsilon_of_event(event, **RDP) <= 2.5


def test_one_writer_at_a_time(tmp_path):
    first, second = Journal(), Journal()
    first.attach(tmp_path / "ledger.jsonl", {})
    with pytest.raises(JournalError, match="in use by another process"):
        second.attach(tmp_path / "ledger.jsonl", {})
    first.close()
    second.attach(tmp_path / "ledger.jsonl", {})
    with pytest.raises(JournalError, match="is not open: pass the run's checkpointer"):
        first.append(Entry(None, "", 0, ""))


def test_a_plan_goes_on_where_its_journal_lies_and_nowhere_else(tmp_path):
    plan = tiny_plan(steps=6)
    with Checkpointer(tmp_path / "a") as c:
        run(plan, checkpointer=c, steps=2)
    with pytest.raises(JournalError, match="is not open: pass the run's checkpointer"):
        run(plan, steps=4)
    with (
        Checkpointer(tmp_path / "b") as c,
        pytest.raises(JournalError, match=r"has taken 2 steps, recorded .*a/ledger"),
    ):
        run(plan, checkpointer=c, steps=4)
    with Checkpointer(tmp_path / "a") as c:  # another plan, as in another process
        run(tiny_plan(steps=6), checkpointer=c, steps=3)
    with Checkpointer(tmp_path / "a") as c:
        result = run(plan, checkpointer=c)
    assert result.ledger.steps == 6 == plan.journal.ledger.steps
    (tmp_path / "a" / "ledger.jsonl").write_text("")
    with Checkpointer(tmp_path / "a") as c, pytest.raises(JournalError, match="lacks steps that this plan has taken"):
        run(plan, checkpointer=c)


def test_all_optimizer_states_are_arrays_that_survive(tmp_path):
    opt = dpopt.dp_yogi(0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=jax.random.key(0))
    params = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}
    state = TrainState(params, opt.init(params), segment=Segment("a", 1))
    journal = Journal()
    journal.attach(tmp_path / "ledger.jsonl", {})
    journal.append(Entry(None, state_digest(state), 0, "a", {}))
    with Checkpointer(tmp_path) as c:
        c.save(state, journal, {})
        c.wait()
        assert_identical(c.restore(state, journal, {}).state, state)


def test_identity_reads_no_values():
    plan = tiny_plan()
    shapes = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert run_identity(plan, shapes) == run_identity(plan, start())
    side = dpopt.side_information(np.array([1.0, 2.0, 3.0]))
    builder = dpopt.Builder(num_examples=64, expected_batch_size=8, steps=2, key=jax.random.key(0))
    chain = run_identity(builder.precondition(side).clip(1.0).noise(1.0).then(optax.sgd(1.0)).build(), shapes)["chain"]
    assert chain[0].startswith("precondition(preconditioner=SideInformation(scale=arrays of 3 numbers, sha256 ")


def test_another_mechanism_of_two_queries_is_another_run():
    """Nothing of its queries was in its identity: a run went on with another clip norm, and the moments of this one."""
    given = dict(clip=1.0, noise=1.5, adaptive_l2_clip_norm=2.0, delay=3, rule="rmsprop", decay=0.9, eps=1e-7, size=8)
    others = dict(clip=3.0, noise=1.6, adaptive_l2_clip_norm=5.0, delay=4, rule="yogi", decay=0.8, eps=1e-6, size=9)

    def identity(clip, noise, size, **options):
        builder = dpopt.Builder(num_examples=64, expected_batch_size=size, steps=9, key=jax.random.key(0))
        mechanism = dpopt.baselines.extra_query(**options)
        plan = builder.mechanism(mechanism).clip(clip).noise(noise).then(optax.sgd(1.0)).build()
        return run_identity(plan, start())

    found = [identity(**given), *(identity(**given | {name: value}) for name, value in others.items())]
    assert len({str(each["chain"]) for each in found}) == 1 + len(others)


def event(sigma=1.0):
    return events.poisson_event(noise_multiplier=sigma, sampling_prob=0.1, steps=1)


def written(path, count=3):
    journal = Journal()
    journal.attach(path, {"run": 1})
    for i in range(count):
        journal.append(Entry(event(), str(i), i + 1, "a"))
    journal.close()
    return journal


def test_a_journal_reads_what_it_wrote(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = written(path)
    second = Journal()
    second.attach(path, {"run": 1})
    assert second.entries == first.entries and second.ledger == first.ledger
    first.ledger.record(event())
    assert first.ledger.steps == 3, "a journal hands out copies"


def test_an_append_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "ledger.jsonl"
    written(path)
    whole = path.read_bytes()
    start_of_last = whole[:-1].rfind(b"\n") + 1
    for length in range(start_of_last + 1, len(whole)):
        path.write_bytes(whole[:length])
        journal = Journal()
        journal.attach(path, {"run": 1})
        assert journal.ledger.steps == 2
        journal.append(Entry(event(), "new", 3, "a"))
        journal.close()
        again = Journal()
        again.attach(path, {"run": 1})
        assert again.ledger.steps == 3 and again.entries[-1].digest == "new"
        again.close()


def test_every_change_to_a_journal_is_found(tmp_path):
    path = tmp_path / "ledger.jsonl"
    written(path)
    rows = path.read_text().splitlines(keepends=True)
    tampered = [
        rows[:1] + rows[2:],  # a step dropped
        rows[:2] + [rows[3], rows[2]],  # two steps swapped
        rows[:3] + [rows[3].replace('"noise_multiplier": 0.', '"noise_multiplier": 9.')],
        ["x" + rows[0][1:], *rows[1:]],
        rows[:2] + ["\n"] + rows[2:],
        rows[1:],
    ]
    for number, changed in enumerate(tampered):
        path.write_text("".join(changed))
        with pytest.raises(JournalError, match="is damaged or was changed"):
            Journal().attach(path, {"run": 1})
        assert path.read_text() == "".join(changed), number


def test_a_journal_that_lost_its_end_is_noticed(tmp_path):
    with Checkpointer(tmp_path, every=2) as c:
        run(tiny_plan(steps=4), checkpointer=c)
    path = tmp_path / "ledger.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    for keep in (0, 3):
        path.write_text("".join(rows[:keep]))
        with (
            Checkpointer(tmp_path) as c,
            pytest.raises(CheckpointError, match="What was spent since then is not known"),
        ):
            run(tiny_plan(steps=4), checkpointer=c)


def test_checkpoint_and_journal_of_two_runs_do_not_mix(tmp_path):
    for name, data in (("a", fetch), ("b", lambda i: 2 * fetch(i))):
        with Checkpointer(tmp_path / name, every=2) as c:
            run(tiny_plan(steps=2), checkpointer=c, data=data)
    os.replace(tmp_path / "a" / "ledger.jsonl", tmp_path / "b" / "ledger.jsonl")
    with Checkpointer(tmp_path / "b") as c, pytest.raises(CheckpointError, match="disagree on the first 3 entries"):
        run(tiny_plan(steps=3), checkpointer=c)
