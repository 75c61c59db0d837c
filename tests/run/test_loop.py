"""The training loop charges every step, repeats only what is the same to the last bit, and stops at the budget."""

import json

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical, slow_unless
from runs import DATA, DELTA, RDP, fetch, loss_fn, run, start, tiny_plan

import dpopt
from dpopt import events
from dpopt.inspection import privacy_event
from dpopt.run import entropy, identity
from dpopt.run.journal import JournalError
from dpopt.run.state import TrainState


def test_the_loop_is_the_plain_loop():
    plan = tiny_plan(steps=4)
    step = plan.train_step(loss_fn)
    params, state = start(), plan.optimizer.init(start())
    for t in range(4):
        batch = plan.sampler.batch(t)
        params, state, _ = jax.jit(step)(params, state, fetch(batch.indices), batch.mask)
    result = run(plan, replay=True)
    assert_identical((result.params, result.state.opt_state), (params, state))
    assert result.stopped == "steps" and result.lost == 0 and result.state.update == 4


def test_the_callers_arrays_live_on():
    plan, params = tiny_plan(steps=1), start()
    state = TrainState(params, plan.optimizer.init(params))
    run(plan, params=state)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state[:2]))


def test_every_step_is_in_the_ledger_before_it_is_let_out():
    plan, seen = tiny_plan(steps=5), []
    run(plan, on_step=lambda t, params: seen.append((t, plan.journal.ledger.steps)))
    assert seen == [(t, t) for t in range(1, 6)]
    event = privacy_event(plan.optimizer, sampling=plan.sampler, steps=5)
    assert plan.journal.ledger.epsilon(delta=DELTA) == dpopt.epsilon_of_event(event, delta=DELTA)


def budgeted(budget, steps=6):
    builder = dpopt.Builder(num_examples=len(DATA), expected_batch_size=8, steps=steps, key=jax.random.key(0))
    return builder.clip(1.0).budget(**budget).then(optax.sgd(0.1)).build()


def composed(*events):
    return dp_accounting.ComposedDpEvent(list(events))


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_what_was_spent_earlier_counts_against_the_budget(accountant, share):
    """The costs of the first and the second run, composed by dp_accounting, equal the total budget."""
    allowed = dict(delta=DELTA, accountant=accountant)
    first = run(budgeted(dict(epsilon=4.0 * share, **allowed)), steps=6).ledger.event
    plan = budgeted(dict(epsilon=4.0, earlier=first, **allowed))
    alone = budgeted(dict(epsilon=4.0, **allowed))
    assert plan.noise_multiplier > alone.noise_multiplier
    result = run(plan, steps=6)
    both = composed(first, result.ledger.event)
    total = dpopt.epsilon_of_event(both, **allowed)
    assert 3.9 < total <= 4.0 < dpopt.epsilon_of_event(composed(first, alone.event), **allowed)
    assert plan.epsilon(0) == pytest.approx(dpopt.epsilon_of_event(first, **allowed))
    assert plan.epsilon() == pytest.approx(plan.spent()) == pytest.approx(total)
    assert result.epsilon(accountant=accountant) == pytest.approx(total) == pytest.approx(plan.statement().epsilon)
    assert result.statement(accountant=accountant).epsilon == pytest.approx(total)
    assert "spent earlier" in plan.summary() and "spent earlier" not in alone.summary()


@pytest.mark.slow
def test_steps_that_were_lost_and_what_was_spent_earlier_share_the_budget():
    """No step exceeds the budget of both together, also under a later budget that omits what was spent earlier."""
    first = events.poisson_event(noise_multiplier=1.0, sampling_prob=8 / len(DATA), steps=3)
    plan = budgeted(dict(epsilon=4.0, earlier=first, **RDP))
    state = run(plan, steps=2).state
    run(plan, params=state, steps=4)  # two more, which are lost
    result = run(plan, params=state, steps=6)
    assert result.stopped == "budget" and result.ledger.steps == 6
    assert result.epsilon(accountant="rdp") <= 4.0
    more = run(plan, params=result.state, steps=6, budget=dpopt.Budget(5.0, **RDP))
    assert dpopt.epsilon_of_event(composed(first, more.ledger.event), **RDP) <= 5.0
    assert more.earlier == first and more.epsilon(accountant="rdp") > more.ledger.epsilon(**RDP)
    bought = dpopt.run.allowance.steps_within(plan, dpopt.Budget(5.0, **RDP), most=1_000)
    assert bought == dpopt.run.allowance.steps_within(plan, dpopt.Budget(5.0, **RDP, earlier=first), most=1_000) < 1_000
    with pytest.raises(ValueError, match="pass it to the plan"):
        run(plan, params=result.state, budget=dpopt.Budget(9.0, **RDP, earlier=composed(first, first)))


def test_something_else_than_an_event_was_not_spent_earlier():
    with pytest.raises(TypeError, match="event"):
        dpopt.Budget(3.0, DELTA, earlier=2.0)


def test_what_is_spent_already_leaves_no_budget():
    with pytest.raises(ValueError, match=r"9\.997 is spent already at delta 1e-05, and epsilon is 1"):
        budgeted(dict(epsilon=1.0, delta=DELTA, earlier=dp_accounting.GaussianDpEvent(0.5)))


@pytest.mark.slow
def test_the_journal_knows_what_was_spent_earlier(tmp_path, capsys):
    """A resumed run cannot omit it, and a statement made from the file alone includes it."""
    pytest.importorskip("orbax.checkpoint")
    from dpopt.__main__ import main
    from dpopt.run.checkpoint import Checkpointer

    first = dp_accounting.GaussianDpEvent(2.0)
    allowed = dict(epsilon=8.0, **RDP)
    with Checkpointer(tmp_path) as checkpointer:
        result = run(budgeted(dict(**allowed, earlier=first)), steps=6, checkpointer=checkpointer)
    main(["statement", str(tmp_path), "--delta", str(DELTA), "--accountant", "rdp", "--json"])
    found = json.loads(capsys.readouterr().out)["epsilon"]
    assert found == pytest.approx(result.epsilon(accountant="rdp")) and found > result.ledger.epsilon(**RDP)
    for forgetful in (dict(allowed), dict(**allowed, earlier=dp_accounting.GaussianDpEvent(3.0))):
        with Checkpointer(tmp_path) as checkpointer, pytest.raises(JournalError, match="earlier"):
            run(budgeted(forgetful), steps=6, checkpointer=checkpointer)


def test_a_step_that_cannot_be_entered_is_not_let_out(monkeypatch):
    plan, seen = tiny_plan(steps=5), []
    real = plan.journal.append

    def append(entry):
        if entry.update == 3:
            raise OSError("disk full")
        real(entry)

    monkeypatch.setattr(plan.journal, "append", append)
    with pytest.raises(OSError, match="disk full"):
        run(plan, on_step=lambda t, params: seen.append(t))
    assert seen == [1, 2] and plan.journal.ledger.steps == 2


def test_a_run_in_two_parts_is_the_run_in_one():
    whole = run(tiny_plan(steps=6), replay=True)
    plan = tiny_plan(steps=6)
    first = run(plan, steps=2, replay=True)
    second = run(plan, params=first.state, replay=True)
    assert_identical(second.state[:3], whole.state[:3])
    assert second.ledger == whole.ledger and first.ledger.steps == 2


def test_a_repeated_run_costs_nothing_more_and_is_the_same():
    plan, seen = tiny_plan(steps=5), []
    first = run(plan, replay=True)
    again = run(plan, on_step=lambda t, _: seen.append(t), replay=True)
    assert_identical(again.state, first.state)
    assert again.ledger == first.ledger and seen == [5], "only for the last step is it unknown whether on_step returned"


@pytest.mark.slow
def test_by_default_each_call_draws_noise_and_batches_of_its_own():
    """The same key, plan and call: neither noise nor batches can be predicted from the key."""
    seen = []
    for _ in range(2):
        seen.append([])
        plan = tiny_plan(steps=3)
        first = run(plan, data=lambda i: (seen[-1].append(i.tobytes()), fetch(i))[1])
        assert first.lost == 0 and plan.sampler.batch(0).indices.tobytes() not in seen[-1]
    assert not set(seen[0]) & set(seen[1])
    more = run(plan, params=first.state, steps=6, budget=dpopt.Budget(100.0, DELTA))
    assert more.ledger.steps == 6 and more.lost == 0, "continuing in memory costs nothing extra"
    segments = [e.segment for e in plan.journal.entries if not e.is_step]
    assert len(set(segments)) == 2 and not any(e.is_exact for e in plan.journal.entries)
    keys = [s.key for s in entropy.noise_states((first.state.opt_state, more.state.opt_state))]
    assert len({jax.random.key_data(k).tobytes() for k in (jax.random.key(0), *keys)}) == 3


def test_a_call_with_nothing_to_do_starts_no_segment():
    plan = tiny_plan(steps=2)
    result = run(plan)
    before = plan.journal.entries
    assert run(plan, params=result.state).stopped == "steps"
    with pytest.raises(dpopt.BudgetExceeded):
        run(plan)
    assert plan.journal.entries == before


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "change",
    [
        dict(loss=lambda w, x: jnp.sum(jnp.abs(w - x))),
        dict(data=lambda indices: 2 * DATA[indices]),
        dict(extra=lambda t, params: {}, data=lambda indices: np.nextafter(DATA[indices], np.float32(9))),
    ],
    ids=["loss", "data", "last bit of the data"],
)
def test_noise_is_never_used_twice_for_two_results(change):
    plan = tiny_plan(steps=3)
    run(plan, replay=True)
    with pytest.raises(dpopt.run.results.ReplayError, match="came out differently"):
        run(plan, replay=True, **change)
    assert plan.journal.ledger.steps == 3
    other = run(plan, budget=dpopt.Budget(100.0, DELTA), **change)
    assert other.ledger.steps == 6 and other.lost == 3
    keys = [s.key for s in entropy.noise_states(other.state.opt_state)]
    assert keys and all(k != jax.random.key(0) for k in keys)


def test_an_old_state_gets_fresh_noise_and_new_batches(caplog):
    plan = tiny_plan(steps=20)
    early = run(plan, steps=2, replay=True)
    late = run(plan, params=early.state, steps=4, replay=True)
    assert run(plan, params=early.state, steps=4, replay=True).ledger.steps == 4, "the same steps again are free"
    drawn = []
    other = run(plan, params=early.state, steps=4, data=lambda i: (drawn.append(i.tobytes()), fetch(i))[1])
    assert other.ledger.steps == 6 and other.lost == 2 and "2 steps are spent" in caplog.text
    assert not {plan.sampler.batch(t).indices.tobytes() for t in range(6)} & set(drawn)
    assert not np.allclose(other.params, late.params)
    # From then on a state of the first segment cannot be repeated, and is not.
    third = run(plan, params=early.state, steps=3, replay=True)
    assert third.ledger.steps == 7 and "not in the journal's last segment" in caplog.text
    assert third.state.segment.id not in (early.state.segment.id, other.state.segment.id)


def test_another_machine_does_not_repeat_steps(monkeypatch, caplog):
    plan = tiny_plan(steps=6)
    first = run(plan, steps=3, replay=True)
    real = identity.environment
    monkeypatch.setattr(identity, "environment", lambda state: {**real(state), "devices": 8})
    result = run(plan, steps=3, replay=True)
    assert result.ledger.steps == 6 and result.lost == 3 and result.state.segment != first.state.segment
    assert "devices: 1, now 8" in caplog.text and "3 steps are spent" in caplog.text
    # A move from the journal's last state loses nothing.
    caplog.clear()
    monkeypatch.setattr(identity, "environment", lambda state: {**real(state), "devices": 4})
    moved = run(plan, params=result.state, steps=5, budget=dpopt.Budget(100.0, DELTA), replay=True)
    assert moved.ledger.steps == 8 and moved.lost == 3 and not caplog.text


def test_a_budget_is_a_limit():
    plan = tiny_plan(steps=8, budget=2.0)
    bought = dpopt.run.allowance.steps_within(plan, plan.budget)
    assert bought >= 8
    result = run(plan, steps=bought + 5)
    assert result.stopped == "budget" and result.state.update == bought == result.ledger.steps
    assert "one more step would exceed epsilon 2 at delta 1e-05" in result.message
    assert result.epsilon(**RDP) <= 2.0
    with pytest.raises(dpopt.BudgetExceeded, match=f"after step {bought} of {bought + 1}") as refused:
        run(plan, params=result.state, steps=bought + 1)
    assert refused.value.result.state.update == bought

    more = run(plan, params=result.state, steps=bought + 3, budget=dpopt.Budget(3.0, **RDP))
    assert more.stopped == "steps"
    event = privacy_event(plan.optimizer, sampling=plan.sampler, steps=bought + 3)
    assert more.epsilon(**RDP) == dpopt.epsilon_of_event(event, **RDP) <= 3.0


def test_one_more_step_would_exceed_the_budget():
    plan = tiny_plan(steps=8, budget=2.0)
    n = dpopt.run.allowance.steps_within(plan, plan.budget)
    event = privacy_event(plan.optimizer, sampling=plan.sampler, steps=n + 1)
    assert dpopt.epsilon_of_event(event, **RDP) > 2.0


def test_without_a_budget_the_plan_is_the_limit():
    plan = tiny_plan(steps=3)
    result = run(plan, steps=5)
    assert result.stopped == "budget" and result.state.update == 3 and "the plan covers 3 steps" in result.message


def test_lost_steps_count_against_the_budget():
    plan = tiny_plan(steps=8, budget=2.0)
    run(plan, steps=4)
    result = run(plan)
    assert result.stopped == "budget" and result.ledger.steps <= dpopt.run.allowance.steps_within(
        tiny_plan(steps=8, budget=2.0), plan.budget
    )
    assert result.lost == 4 and result.state.update == result.ledger.steps - 4
    assert result.epsilon(**RDP) <= 2.0


@pytest.mark.slow
def test_steps_whose_cost_depends_on_the_step():
    plan = tiny_plan(steps=6, noise=lambda t: 1.0 + t)
    result = run(plan)
    event = privacy_event(plan.optimizer, sampling=plan.sampler, steps=6)
    assert result.epsilon(delta=DELTA) == pytest.approx(dpopt.epsilon_of_event(event, delta=DELTA), rel=1e-9)
    stale = TrainState(start(), result.state.opt_state, segment=result.state.segment)
    with pytest.raises(ValueError, match=r"drawn noise \[6\] times, and the run is at step 0"):
        run(plan, params=stale)


def test_an_optimizer_without_a_noise_state_cannot_get_fresh_noise():
    with pytest.raises(ValueError, match="0 noise keys for 1 queries"):
        entropy.with_fresh_noise((jnp.zeros(2),), entropy.draw(), 1)


def test_the_same_plan_in_memory_and_on_disk_is_refused(tmp_path):
    plan = tiny_plan(steps=2)
    run(plan)
    with pytest.raises(JournalError, match="has taken 2 steps, recorded in memory only"):
        plan.journal.attach(tmp_path / "ledger.jsonl", {})


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "dtype",
    slow_unless(
        {jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_},
        [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint32, jnp.bool_],
    ),
)
def test_a_digest_sees_every_bit_and_every_place(dtype):
    x = (jnp.arange(7) % 4).astype(dtype)
    digests = {identity.hex_digest(identity.digest(x))}
    for i in range(7):
        digests.add(identity.hex_digest(identity.digest(x.at[i].set(~x[i] if dtype == jnp.bool_ else x[i] + 1))))
    digests.add(identity.hex_digest(identity.digest(x[::-1])))
    digests.add(identity.hex_digest(identity.digest((x[:3], x[3:]))))
    assert len(digests) == 10


def test_a_digest_tells_nan_from_nan_and_leaves_keys_out(x64):
    assert jnp.any(identity.digest(jnp.array(0.0)) != identity.digest(jnp.array(-0.0)))
    assert jnp.any(identity.digest(jnp.array(1.0)) != identity.digest(jnp.array(1.0 + 2**-52)))
    states = [dpopt.add_gaussian_noise(1.0, k).init(None) for k in (jax.random.key(1), jax.random.PRNGKey(2))]
    assert jnp.all(identity.digest(states[0]) == identity.digest(states[1]))
    assert jnp.all(identity.digest((jax.random.key(3), 1)) == identity.digest((jax.random.key(4), 1)))


def test_optimizers_with_two_noises_get_two_fresh_ones():
    from dpopt.optimizers.baselines.two_queries import dp2_extra_query

    opt = dp2_extra_query(
        0.1, adaptive_l2_clip_norm=1.0, delay=2, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4,
        key=jax.random.key(0),
    )  # fmt: skip
    old = opt.init(start())
    words = np.arange(10, dtype=np.uint32)
    new = entropy.with_fresh_noise(old, words, 2)
    keys = [jax.random.key_data(s.key).tolist() for s in entropy.noise_states((old, new))]
    assert len(keys) == 4 and len(set(map(tuple, keys))) == 4
    for place in range(2, 6):  # every word counts
        words[place] += 1
        again = entropy.with_fresh_noise(old, words, 2)
        keys.append(jax.random.key_data(entropy.noise_states(again)[0].key).tolist())
    assert len(set(map(tuple, keys))) == 8
    one = np.eye(10, dtype=np.uint32)
    seeds = {entropy.new_segment(3, words + one[at]).seed for at in (0, 6, 7, 8, 9)}
    assert len(seeds) == 5 and entropy.new_segment(4, words).seed not in seeds


def test_the_plan_runs_itself():
    plan = tiny_plan(steps=2, rule=optax.sgd(0.1))
    assert plan.run(loss_fn, start(), fetch).ledger == plan.journal.ledger
