"""Runs whose files are touched while they are live, whose calls overlap, or that are called with nothing left to do."""

import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import DATA, RDP, Died, die_at, fetch, loss_fn, run, start, tiny_plan

import dpopt

pytest.importorskip("orbax.checkpoint")

from dpopt.chain import PrivateOptimizer
from dpopt.privacy import Privacy
from dpopt.run.checkpoint import Checkpointer
from dpopt.run.journal import JournalError
from dpopt.run.journal_file import Replaced


def resumed(directory, *, keep=1, plan=None, **options):
    with Checkpointer(directory, every=1, keep=keep, asynchronous=False) as checkpointer:
        return run(plan or tiny_plan(budget=3.0, steps=6), checkpointer=checkpointer, **options)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_calls_without_a_step_leave_the_run_as_it_was(tmp_path, seed):
    """Drawn histories: kills within a step, calls for fewer steps than there are, and calls with no budget left."""
    rng = np.random.default_rng(seed)
    for _ in range(4):
        call = rng.choice(["killed", "fewer", "more"])
        try:
            if call == "killed":
                resumed(tmp_path, on_step=die_at(int(rng.integers(1, 7))))
            elif call == "fewer":
                resumed(tmp_path, steps=int(rng.integers(1, 3)))
            else:
                resumed(tmp_path)
        except (Died, dpopt.BudgetExceeded):
            pass
    larger = dpopt.Budget(30.0, **RDP)
    result = resumed(tmp_path, budget=larger)
    assert result.state.update == 6
    assert result.ledger.steps >= 6
    assert resumed(tmp_path, budget=larger).state.update == 6


def copied(path):
    """What an editor or a tool that synchronises folders does: a new file with the same content."""
    shutil.copy(path, f"{path}.new")
    os.replace(f"{path}.new", path)


TAMPERINGS = {"replaced": copied, "removed": os.remove, "cut off": lambda path: os.truncate(path, 300)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", TAMPERINGS)
def test_a_journal_that_is_touched_while_the_run_is_live_stops_it(tmp_path, how):
    released = []

    def on_step(t, params):
        released.append(t)
        if t == 3:
            TAMPERINGS[how](tmp_path / "ledger.jsonl")

    with Checkpointer(tmp_path, every=100, asynchronous=False) as checkpointer:
        with pytest.raises(Replaced, match="removed, replaced or cut off"):
            run(tiny_plan(), checkpointer=checkpointer, on_step=on_step)
    assert released == [1, 2, 3]  # nothing is released that the file may lack


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", ["on_step", "a thread"])
def test_a_plan_is_trained_by_one_call_at_a_time(where):
    """What is left of a budget is computed when a call starts: two of them would spend it twice."""
    plan, refused = tiny_plan(budget=2.0), []

    def again():
        with pytest.raises(JournalError, match="another call"):
            plan.run(loss_fn, start(), fetch, progress=False)
        refused.append(True)

    def on_step(t, params):
        if t == 2:
            if where == "on_step":
                again()
            else:
                thread = threading.Thread(target=again)
                thread.start()
                thread.join()

    run(plan, on_step=on_step)
    assert refused and plan.spent() <= 2.0
    assert plan.run(loss_fn, start(), fetch, progress=False, budget=dpopt.Budget(9.0, **RDP)).ledger.steps > 12


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sampling", ["epochs", "cyclic_poisson", "balls_in_bins", "poisson"])
def test_users_numbered_by_rank_are_not_taken_in_parts_by_number(sampling):
    """Without one user the next would be in another part: the sums of a whole epoch would differ."""
    ids, data = np.repeat(np.arange(20), 2), np.ones((40, 3), np.float32)
    groups = dpopt.users.group(ids, max_examples=2)
    plan = tiny_plan(num_examples=20, batch=5, steps=2, unit="user", sampling=sampling)
    loss = dpopt.users.per_user_grads(loss_fn)
    if sampling in ("epochs", "cyclic_poisson"):
        with pytest.raises(ValueError, match="numbered in the order of their ids"):
            run(plan, loss=loss, data=groups.batches(data))
        with pytest.raises(ValueError, match="numbered in the order of their ids"):
            dpopt.Steps(plan.sampler, 0, 2, data=groups.batches(data))
    else:
        assert run(plan, loss=loss, data=groups.batches(data)).ledger.steps == 2


def test_queries_with_one_key_are_refused():
    """Both draw the same noise, and a combination of their results holds none."""

    def mechanism(*, l2_clip_norm, noise_multiplier, expected_batch_size, key, preconditioner=()):
        one, other = (
            dpopt.privatize(l2_clip_norm=c, noise_multiplier=noise_multiplier, expected_batch_size=8, key=key)
            for c in (1.0, 2.0)
        )

        def update(grads, state, params=None, **_):
            a, b = one.run(grads, state[0], params), other.run(grads, state[1], params)
            return jax.tree.map(jnp.add, a[0], b[0]), (a[1], b[1]), None

        queries = Privacy(one.privacy.queries + other.privacy.queries)
        return PrivateOptimizer(lambda p: (one.init(p), other.init(p)), update, queries)

    builder = dpopt.Builder(num_examples=64, expected_batch_size=8, steps=2, key=jax.random.key(0), pad_to=32)
    plan = builder.clip(1.0).mechanism(mechanism).budget(epsilon=9.0, **RDP).then(optax.sgd(0.1)).build()
    with pytest.raises(ValueError, match="same noise key"):
        run(plan, data=DATA)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [np.uint32, np.int8, np.int64, np.float16],
    ids=lambda kind: kind.__name__,
)
def test_numbers_of_numpy_are_numbers(tmp_path, kind):
    """Unsigned ones have no negative differences, small ones wrap around, and JSON takes none of them."""
    number = int if np.issubdtype(kind, np.integer) else float
    results = []
    for cast in (kind, number):
        whole = cast if number is int else int
        builder = dpopt.Builder(
            num_examples=64, expected_batch_size=cast(8), steps=whole(3), key=jax.random.key(0), seed=1
        )
        builder = builder.clip(cast(64)).noise(cast(4)).then(optax.sgd(0.1))
        plan = builder.build()
        with Checkpointer(tmp_path / cast.__name__, every=2) as checkpointer:
            results.append(run(plan, steps=whole(2), checkpointer=checkpointer, replay=True))
        apart = builder.build()
        state = run(apart, steps=whole(6), budget=dpopt.Budget(1e6, **RDP)).state  # twice the plan's own steps
        with pytest.raises(dpopt.BudgetExceeded):
            run(apart, params=state, steps=60)
        assert plan.noise_multiplier == 4
    np.testing.assert_array_equal(*(r.params for r in results))
    assert results[0].ledger.event == results[1].ledger.event
    budget = dpopt.Budget(np.float16(1), 1e-5)
    sigma = dpopt.calibrate(epsilon=np.float16(1), delta=1e-5, sampling_prob=0.01, steps=1_000)
    assert dpopt.epsilon(noise_multiplier=sigma, delta=1e-5, sampling_prob=0.01, steps=1_000) <= budget.epsilon
