"""Samplers that keep the steps of an example apart, and the cost of runs on them, interrupted or not."""

import itertools
import math
import tempfile
from pathlib import Path

import dp_accounting as dp
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical, paid, privacy_four
from runs import DATA, RDP, run, start
from scipy import stats

import dpopt
from dpopt import correlated, events
from dpopt.privacy import Privacy, Query
from dpopt.run import entropy
from dpopt.samplers.parts import BallsInBinsSampler, CyclicPoissonSampler, EpochSampler, InParts

STEPS = 24


def plan_of(sampling, strategy, *, seed=0, steps=STEPS, rule=None, noise=2.0, **more):
    """A plan for 64 examples, 8 per batch."""
    builder = dpopt.Builder(
        num_examples=64, expected_batch_size=8, steps=steps, key=jax.random.key(seed), sampling=sampling, pad_to=32,
        **more,
    ).clip(1.0)  # fmt: skip
    builder = builder if strategy is None else builder.correlate(strategy)
    return builder.noise(noise).then(rule or optax.adam(0.1)).build()


KINDS = {
    "cyclic, banded": lambda **o: plan_of("cyclic_poisson", correlated.banded(4, steps=STEPS), **o),
    "cyclic, more parts": lambda **o: plan_of("cyclic_poisson", correlated.banded(2, steps=STEPS), parts=5, **o),
    "cyclic, independent": lambda **o: plan_of("cyclic_poisson", None, parts=3, **o),
    "cyclic, all": lambda **o: plan_of("cyclic_poisson", correlated.lambda_cgd(0.9, steps=STEPS), parts=8, **o),
    "epochs, banded": lambda **o: plan_of("epochs", correlated.banded(12, steps=STEPS), **o),
    "epochs, redrawn": lambda **o: plan_of("epochs", correlated.banded_inverse(3, steps=STEPS), **o),
    "epochs, independent": lambda **o: plan_of("epochs", None, **o),
    "bins, recurrent": lambda **o: plan_of("balls_in_bins", correlated.blt([0.3], [0.9], steps=STEPS), **o),
}


def test_cyclic_samples_are_poisson_samples_of_one_part():
    sampler = CyclicPoissonSampler(103, 12, parts=4, seed=1)
    counts, runs = np.zeros((4, 103)), 600
    for step in range(4 * runs):
        drawn = sampler.drawn(step)
        assert len(set(drawn.tolist())) == len(drawn) and (drawn % 4 == step % 4).all()
        counts[step % 4, drawn] += 1
    q = sampler.scheme.sampling_prob
    assert q == 4 * 12 / 103 and dpopt.sampling.sampling_prob(sampler) == pytest.approx(12 / 103)
    own = counts[np.arange(103) % 4, np.arange(103)]
    tails = stats.binom.cdf(own, runs, q)
    assert 1e-5 < tails.min() and tails.max() < 1 - 1e-5
    assert stats.binomtest(int(own.sum()), 103 * runs, q).pvalue > 1e-6
    assert stats.binomtest(int(own.sum()), 103 * runs, 0.95 * q).pvalue < 1e-6  # the check has power


def test_epochs_take_everyone_once_in_one_order():
    for n, batch in ((10, 4), (64, 8), (7, 7), (9, 1)):
        sampler = EpochSampler(n, batch, seed=0)
        parts = sampler.scheme.parts
        first = [sampler.drawn(t).tolist() for t in range(parts)]
        assert sorted(itertools.chain(*first)) == list(range(n)) and max(map(len, first)) <= batch
        assert [sampler.drawn(t).tolist() for t in range(parts, 2 * parts)] == first


def test_bins_are_uniform_independent_and_stay():
    sampler = BallsInBinsSampler(4_000, 500, seed=3)
    parts = [sampler.drawn(t) for t in range(8)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(4_000))
    assert all(np.array_equal(sampler.drawn(8 + t), parts[t]) for t in range(8))
    assert stats.chisquare([len(p) for p in parts]).pvalue > 1e-4 and len({len(p) for p in parts}) > 1
    other = BallsInBinsSampler(4_000, 500, seed=4)
    overlap = len(set(parts[0].tolist()) & set(other.drawn(0).tolist()))
    assert abs(overlap - 62.5) < 5 * math.sqrt(62.5)


@pytest.mark.parametrize("make", [CyclicPoissonSampler, EpochSampler, BallsInBinsSampler])
def test_one_more_example_moves_nobody(make):
    """With one more example, all others stay in their parts (random parts: in distribution, one draw per example)."""
    more = {"parts": 4} if make is CyclicPoissonSampler else {}
    sampler = make(60, 15, seed=0, **more)
    part = {int(i): t for t in range(4) for i in sampler.part(t)}
    if make is BallsInBinsSampler:
        assert sorted(part) == list(range(60))
    else:
        assert all(part[i] == i % 4 for i in range(60))


def test_batches_are_padded_and_restart_anywhere():
    for sampler in (
        CyclicPoissonSampler(60, 10, parts=3, seed=0, pad_to=16),
        EpochSampler(60, 7, seed=0),
        BallsInBinsSampler(60, 10, seed=0, pad_to=16),
    ):
        stacked = sampler.batches(3, 9)
        for row, step in enumerate(range(3, 9)):
            indices, mask = stacked.indices[row], stacked.mask[row]
            assert sorted(indices[mask].tolist()) == sorted(sampler.drawn(step).tolist())
            assert len(set(indices.tolist())) == len(indices)
        other = sampler.reseeded(5)
        assert other.scheme == sampler.scheme


def visits(plan, entries):
    """For each segment, the dense matrix of its strategy and the part that each step read."""
    strategy, parts = plan.optimizer.privacy.queries[0].strategy, plan.sampler.scheme.parts
    segments, number = {}, 0
    for entry in entries:
        if not entry.is_step:
            begun = entry.update
            continue
        relative = entry.update - 1 - begun
        seen = segments.setdefault(entry.segment, {})
        assert relative not in seen, "a step of a segment is charged twice"
        seen[relative] = number % parts
        number += 1
    column = np.eye(STEPS)[0] if strategy is None else strategy.column
    return segments, column


def least_cost(plan, entries):
    """The true cost for the examples of the worst part: steps, or squared sensitivity, by brute force."""
    segments, column = visits(plan, entries)
    worst = 0.0
    for part in range(plan.sampler.scheme.parts):
        total = 0.0
        for seen in segments.values():
            steps = [t for t, p in seen.items() if p == part]
            if plan.sampler.scheme.sampling_prob < 1:
                total += len(steps)
                continue
            length = 1 + max(seen)
            sums = np.zeros(length)
            for t in steps:
                sums[t:] += column[: length - t]
            total += float(sums @ sums)
        worst = max(worst, total)
    return worst


def charged(plan, ledger):
    """The cost in the ledger, in the same units."""
    if plan.sampler.scheme.sampling_prob < 1:
        return sum(n for e, n in events.flattened(ledger.event).items() if e.sampling_probability > 0)
    (event,) = events.flattened(ledger.event)
    return (paid(2.0) / event.noise_multiplier) ** 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(8)
def test_an_uninterrupted_run_costs_what_its_plan_says(kind):
    plan = KINDS[kind]()
    result = run(plan)
    assert charged(plan, result.ledger) == pytest.approx(least_cost(plan, plan.journal.entries), rel=1e-9)
    for t in (1, 7, STEPS):
        first = events.compose(plan.optimizer.privacy, plan.sampler, t)
        parts = [events.step_event(plan.optimizer.privacy, plan.sampler.scheme, s) for s in range(t)]
        want = dpopt.epsilon_of_event(dp.ComposedDpEvent(parts), **RDP)
        assert dpopt.epsilon_of_event(first, **RDP) == pytest.approx(want, rel=1e-6)
    assert result.epsilon(delta=1e-5) == pytest.approx(plan.epsilon(delta=1e-5), rel=1e-6)
    assert "InParts" in str(plan)


class Died(Exception):
    pass


HISTORY = st.lists(
    st.tuples(st.integers(1, 9), st.none() | st.integers(1, 9), st.booleans()), min_size=1, max_size=5
)  # steps to take, the step at which the process dies, replay


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(max_examples=6, deadline=None, phases=[hypothesis.Phase.generate])
@hypothesis.given(history=HISTORY)
def test_whatever_happens_to_a_run_everyone_is_paid_for(kind, history):
    """Crashes and resumes: the steps of an example, in all segments, cost no more than the ledger records."""
    pytest.importorskip("orbax.checkpoint")
    from dpopt.run.checkpoint import Checkpointer

    target = 0
    with tempfile.TemporaryDirectory() as folder:
        for steps, death, replay in history:
            target = min(STEPS, target + steps)
            done = itertools.count(1)

            def on_step(t, params, done=done, death=death):
                if next(done) == death:
                    raise Died

            plan = KINDS[kind]()
            with Checkpointer(Path(folder), every=3, asynchronous=False) as checkpointer:
                try:
                    budget = dpopt.Budget(1e4, 1e-5, "rdp")
                    run(plan, checkpointer=checkpointer, steps=target, on_step=on_step, replay=replay, budget=budget)
                except Died:
                    pass
            entries, ledger = plan.journal.entries, plan.journal.ledger
            if ledger.steps:
                assert charged(plan, ledger) >= least_cost(plan, entries) * (1 - 1e-9)


@pytest.mark.slow
def test_a_fresh_segment_restarts_the_strategy(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    from dpopt.run.checkpoint import Checkpointer

    def die(t, params):
        if t == 6:
            raise Died

    for kind in ("epochs, banded", "epochs, redrawn", "bins, recurrent"):
        where = tmp_path / kind
        with Checkpointer(where, every=4) as c, pytest.raises(Died):
            run(KINDS[kind](), checkpointer=c, on_step=die)
        plan = KINDS[kind]()
        with Checkpointer(where, every=4) as c:
            result = run(plan, checkpointer=c, steps=10)
        (state,) = entropy.noise_states(result.state.opt_state)
        assert (int(state.start), int(state.count)) == (4, 10)
        cost = plan.optimizer.privacy.queries[0].strategy.cost(8)
        assert charged(plan, result.ledger) == pytest.approx(cost[6] + cost[6])  # not that of 10 consecutive steps
        assert result.lost == 2


@pytest.mark.parametrize("kind", ["cyclic, banded", "epochs, redrawn", "bins, recurrent"])
@pytest.mark.slow
def test_a_run_that_is_replayed_is_the_same_to_the_bit(kind, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    from dpopt.run.checkpoint import Checkpointer

    def die(t, params):
        if t == 7:
            raise Died

    whole = run(KINDS[kind](), replay=True)
    with Checkpointer(tmp_path, every=4) as c, pytest.raises(Died):
        run(KINDS[kind](), checkpointer=c, on_step=die, replay=True)
    with Checkpointer(tmp_path, every=4) as c:
        result = run(KINDS[kind](), checkpointer=c, replay=True)
    assert_identical(result.state[:3], whole.state[:3])
    assert result.ledger == whole.ledger and result.lost == 0


@pytest.mark.slow
def test_a_statement_says_that_noise_is_correlated(tmp_path, capsys):
    pytest.importorskip("orbax.checkpoint")
    from dpopt.__main__ import main
    from dpopt.run.checkpoint import Checkpointer

    plan = KINDS["epochs, redrawn"]()
    with Checkpointer(tmp_path) as checkpointer:
        result = run(plan, checkpointer=checkpointer)
    main(["statement", str(tmp_path), "--delta", "1e-5"])
    for text in (str(plan.statement(delta=1e-5)), str(result.statement(delta=1e-5)), capsys.readouterr().out):
        assert "noise that is correlated over steps, banded_inverse(3), on parts of the data in turn" in text
    assert "correlated" not in str(KINDS["epochs, independent"]().statement(delta=1e-5))


def test_a_budget_stops_before_it_is_spent():
    plan = KINDS["epochs, redrawn"]()
    limit = plan.epsilon(11, delta=1e-5) * (1 + 1e-6)
    result = run(plan, budget=dpopt.Budget(limit, 1e-5))
    assert result.stopped == "budget" and result.state.update == 11 and result.epsilon(delta=1e-5) <= limit
    assert dpopt.run.allowance.steps_within(plan, dpopt.Budget(limit, 1e-5)) == 11


@pytest.mark.slow
def test_a_budget_is_met_from_below():
    for sampling, strategy in (
        ("cyclic_poisson", correlated.banded(4, steps=STEPS)),
        ("epochs", correlated.banded_inverse(4, steps=STEPS)),
    ):
        builder = dpopt.Builder(
            num_examples=6_400, expected_batch_size=400, steps=STEPS, key=jax.random.key(0), sampling=sampling
        )
        plan = builder.clip(1.0).correlate(strategy).budget(epsilon=2.0, delta=1e-5).then(optax.sgd(0.1)).build()
        assert 1.99 < plan.epsilon() <= 2.0


def test_strategies_and_samplers_without_a_theorem_are_refused():
    banded, whole = correlated.banded(4, steps=STEPS), correlated.lambda_cgd(0.5, steps=STEPS)
    for sampling in ("poisson", "fixed_size"):
        with pytest.raises(ValueError, match=r"CyclicPoissonSampler .*EpochSampler"):
            plan_of(sampling, banded)
    with pytest.raises(ValueError, match=r"at most 3 bands .*EpochSampler"):
        plan_of("cyclic_poisson", banded, parts=3)
    with pytest.raises(ValueError, match=r"at most 4 bands .*EpochSampler"):
        plan_of("cyclic_poisson", whole, parts=4)
    opt = dpopt.dp_sgd(0.1, **privacy_four(noise=banded))
    for sampler in (dpopt.PoissonSampler(64, 8, seed=0), dpopt.FixedSizeSampler(64, 8, seed=0)):
        with pytest.raises(ValueError, match=r"CyclicPoissonSampler .*EpochSampler"):
            dpopt.privacy_event(opt, sampling=sampler, steps=3)
    with pytest.raises(ValueError, match="covers 24 steps"):
        dpopt.privacy_event(opt, sampling=InParts(8), steps=25)
    with pytest.raises(ValueError, match="covers 24 steps"):
        plan_of("epochs", banded, steps=25)
    for queries in ((Query(1.0), Query(1.0)), (Query(lambda t: 1.0 + t),), (Query(1.0, active=lambda t: t > 1),)):
        with pytest.raises(ValueError, match="one query per step"):
            events.compose(Privacy(queries), InParts(3), 4)


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda: CyclicPoissonSampler(60, 20, parts=4, seed=0), "fewer parts"),
        (lambda: CyclicPoissonSampler(60, 20, parts=0, seed=0), "parts"),
        (lambda: EpochSampler(60, 61, seed=0), "exceeds"),
        (lambda: EpochSampler(60, 7.5, seed=0), "expected_batch_size"),
        (lambda: BallsInBinsSampler(60, 7, seed=0), "divide"),
        (lambda: InParts(4, 0.0), "sampling_prob"),
        (lambda: plan_of("poisson", None, parts=4), "parts=4"),
        (lambda: plan_of("epochs", "banded"), "dpopt.correlated"),
        (lambda: plan_of("every", None), "sampling"),
        (lambda: plan_of("epochs", None, noise=lambda step: 1.0 + step), "one query per step"),
    ],
)
def test_mistakes_are_named(mistake, error):
    with pytest.raises((ValueError, TypeError), match=error):
        mistake()


def test_a_builder_has_one_strategy():
    builder = dpopt.Builder(
        num_examples=64, expected_batch_size=8, steps=4, key=jax.random.key(0), sampling="epochs"
    ).clip(1.0)
    with pytest.raises(ValueError, match="already"):
        builder.correlate(correlated.banded(2, steps=4)).correlate(correlated.banded(2, steps=4))


@pytest.mark.slow
def test_clients_and_diagonals_go_with_it():
    """A diagonal before the clip, correlated noise, and a rule that uses the noise level, in one run."""
    builder = dpopt.Builder(num_examples=64, expected_batch_size=8, steps=6, key=jax.random.key(0), sampling="epochs")
    plan = (
        builder.precondition(dpopt.last_moments(eps_scale=0.1))
        .clip(1.0)
        .correlate(correlated.banded(3, steps=6))
        .noise(1.0)
        .then(dpopt.scale_by_adam_bc(gamma=1e-4), optax.scale_by_learning_rate(0.1))
        .average(0.9)
        .build()
    )
    result = run(plan)
    assert np.isfinite(result.state.params).all() and result.averaged_params is not None
    client = dpopt.federated.client_level(dpopt.dp_sgd(0.1, **privacy_four(noise=correlated.banded(3, steps=6))))
    assert client.privacy.unit == "client" and client.privacy.queries[0].strategy is not None


def test_who_uses_the_samplers_by_hand_is_accounted_for():
    opt = dpopt.dp_sgd(0.1, **privacy_four(noise=correlated.banded(4, steps=8), expected_batch_size=8))
    sampler = CyclicPoissonSampler(64, 8, parts=4, seed=0)
    params = start()
    state, step = opt.init(params), jax.jit(dpopt.make_train_step(lambda w, x: jnp.sum((w - x) ** 2), opt))
    for t in range(8):
        indices, mask = sampler.batch(t, size=32)
        params, state, _ = step(params, state, DATA[indices], mask)
    event = dpopt.privacy_event(opt, sampling=sampler, steps=8)
    assert event.count == 2 and event.event.sampling_probability == 0.5
    assert np.isfinite(params).all()


@pytest.mark.slow
def test_choices_keep_what_they_say():
    """Every choice, built as described, has the requested epsilon, and the error computed from dense matrices."""
    settings = dict(num_examples=2_000, expected_batch_size=100, steps=40)
    found = correlated.choices(epsilon=4.0, delta=1e-5, most_bands=20, **settings)
    assert {c.sampling for c in found} == {"poisson", "cyclic_poisson", "epochs"}
    assert [c.error for c in found] == sorted(c.error for c in found)
    (plain,) = [c for c in found if c.sampling == "poisson"]
    assert plain.error == 1.0
    sums = np.tril(np.ones((40, 40)))
    for c in found:
        builder = dpopt.Builder(**settings, key=jax.random.key(0), sampling=c.sampling).clip(1.0)
        plan = builder.correlate(c.strategy).noise(c.noise_multiplier).then(optax.sgd(0.1)).build()
        assert 3.97 < plan.epsilon(delta=1e-5) <= 4.0
        lag = np.arange(40)[:, None] - np.arange(40)
        C = np.where(lag >= 0, c.strategy.column[np.maximum(lag, 0)], 0)
        own = c.noise_multiplier * np.linalg.norm(sums @ np.linalg.inv(C))
        assert c.error == pytest.approx(own / (plain.noise_multiplier * np.linalg.norm(sums)), rel=1e-9)
    with pytest.raises(ValueError, match="exceeds"):
        correlated.choices(epsilon=1.0, delta=1e-5, num_examples=10, expected_batch_size=20, steps=3)
