"""Truncated Poisson samples: their distribution, their cost, and that a run compiles one step."""

import itertools
import json
import math
import time
from collections import Counter

import dp_accounting as dp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical, paid, privacy_four
from runs import DATA, RDP, loss_fn, run, start
from scipy import stats

import dpopt
from dpopt import correlated, events, ledger
from dpopt.composition import step_events
from dpopt.privacy import Privacy, Query, Relation
from dpopt.run import statement
from dpopt.samplers.truncated import TruncatedPoisson, TruncatedPoissonSampler, ample_batch_size
from dpopt.tuning import _trials

DELTA = 1e-5


def truncated_plan(*, steps=12, noise=1.0, seed=0, most=12, rule=None, **more):
    """64 examples, 8 expected, truncated to ``most``."""
    builder = dpopt.Builder(
        num_examples=64, expected_batch_size=8, steps=steps, key=jax.random.key(seed), sampling="truncated_poisson",
        max_batch_size=most, **more,
    ).clip(1.0)  # fmt: skip
    return builder.noise(noise).then(rule or optax.adam(0.1)).build()


def law(n, q, most):
    """Probability of every subset of n examples, by definition: coin flips, then a random subset if too many."""
    found = np.zeros(2**n)
    for coins in range(2**n):
        drawn = [i for i in range(n) if coins >> i & 1]
        probability = q ** len(drawn) * (1 - q) ** (n - len(drawn))
        kept = list(itertools.combinations(drawn, min(len(drawn), most)))
        for subset in kept:
            found[sum(1 << i for i in subset)] += probability / len(kept)
    return found


def p_value(draw, probabilities, steps=6_000):
    codes = [int(np.sum(1 << draw(t))) for t in range(steps)]
    observed = np.bincount(codes, minlength=len(probabilities))
    possible = probabilities > 0
    assert observed[~possible].sum() == 0, "a subset that cannot be drawn was drawn"
    return stats.chisquare(observed[possible], steps * probabilities[possible]).pvalue


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("n", "size", "most"), [(5, 2, 2), (5, 2.5, 3), (4, 3, 3), (5, 1.5, 5), (6, 1, 1)])
def test_batches_follow_the_definition(n, size, most):
    sampler = TruncatedPoissonSampler(n, size, max_batch_size=most, seed=0)
    assert p_value(sampler.drawn, law(n, size / n, most)) > 1e-3


def first_ones(sampler):
    """Wrong: keeps the examples with the lowest indices."""
    plain = dpopt.PoissonSampler(5, 2, seed=0)
    return lambda t: np.sort(plain.drawn(t))[: sampler.scheme.max_batch_size]


def thrown_away(sampler):
    """Wrong: draws again until a sample fits."""
    plain = dpopt.PoissonSampler(5, 2, seed=0)
    fitting = (plain.drawn(t) for t in itertools.count() if len(plain.drawn(t)) <= sampler.scheme.max_batch_size)
    return lambda t: next(fitting)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wrong", [first_ones, thrown_away])
def test_other_ways_of_cutting_are_told_apart(wrong):
    sampler = TruncatedPoissonSampler(5, 2, max_batch_size=2, seed=0)
    assert p_value(wrong(sampler), law(5, 0.4, 2)) < 1e-12


def test_sizes_of_a_realistic_sampler():
    sampler = TruncatedPoissonSampler(2_000, 40, max_batch_size=44, seed=1)
    sizes = np.array([len(sampler.drawn(t)) for t in range(4_000)])
    expected = stats.binom.pmf(np.arange(45), 2_000, 0.02)
    expected[44] += stats.binom.sf(44, 2_000, 0.02)
    seen = np.bincount(sizes, minlength=45)
    bins = [slice(0, 30), *(slice(i, i + 1) for i in range(30, 45))]
    assert stats.chisquare([seen[b].sum() for b in bins], [4_000 * expected[b].sum() for b in bins]).pvalue > 1e-3


def test_every_batch_has_one_shape_and_restarts_anywhere():
    sampler = TruncatedPoissonSampler(200, 10, max_batch_size=12, seed=3)
    whole = list(itertools.islice(sampler, 40))
    assert {b.indices.shape for b in whole} == {b.mask.shape for b in whole} == {(12,)}
    assert {int(b.mask.sum()) for b in whole} >= {10, 12} and sampler.batches(0, 40).mask.shape == (40, 12)
    again = TruncatedPoissonSampler(200, 10, max_batch_size=12, seed=3, start=20)
    for a, b in zip(whole[20:], again, strict=False):
        np.testing.assert_array_equal(a.indices, b.indices)
        assert len(set(b.indices.tolist())) == 12
    assert sampler.reseeded(4).scheme == sampler.scheme
    assert not np.array_equal(sampler.reseeded(4).batch(0).indices, whole[0].indices)


# Cost.


def direct(event, count, delta, interval=1e-4):
    accountant = dp.pld.PLDAccountant(value_discretization_interval=interval)
    return accountant.compose(event, count).get_epsilon(delta)


@pytest.mark.slow
def test_the_event_is_dp_accountings_and_so_is_epsilon():
    sampler = TruncatedPoissonSampler(5_000, 200, max_batch_size=230, seed=0)
    optimizer = dpopt.dp_adam(0.1, **privacy_four(noise_multiplier=1.3, expected_batch_size=200))
    event = dpopt.privacy_event(optimizer, sampling=sampler.scheme, steps=50)
    want = dp.TruncatedSubsampledGaussianDpEvent(5_000, 0.04, 230, paid(1.3))
    assert event == dp.SelfComposedDpEvent(want, 50)
    found = dpopt.epsilon_of_event(event, delta=1e-6)
    assert found == pytest.approx(max(direct(e, 50, 1e-6) for e in (want, events.with_one_more(want))), rel=2e-3)
    assert found <= dpopt.epsilon_of_event(event, delta=1e-6, accountant="rdp")


def random_schemes(count, seed):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n = int(10 ** rng.uniform(1, 4))
        q = min(1.0, 10 ** rng.uniform(-2, 0))
        spread = math.sqrt(n * q * (1 - q))
        most = max(1, round(n * q + rng.uniform(-1, 6) * spread))
        yield TruncatedPoisson(n, q, most), float(rng.uniform(0.7, 4)), int(rng.integers(1, 40))


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 12])
def test_epsilon_is_that_of_dp_accounting_or_less_by_renyi_and_poissons_at_least(count):
    for scheme, sigma, steps in random_schemes(count, seed=0):
        privacy = Privacy((Query(sigma),))
        event = events.compose(privacy, scheme, steps)
        plain = events.compose(privacy, dpopt.sampling.Poisson(scheme.sampling_prob), steps)
        found = dpopt.epsilon_of_event(event, delta=DELTA)
        # The grid of dpopt may be slightly coarser than this one.
        ways = event.event, events.with_one_more(event.event)
        assert found <= max(direct(e, steps, DELTA, 1e-3) for e in ways) * 1.005 + 2e-3, (scheme, sigma, steps)
        for accountant in ("pld", "rdp"):
            cut = dpopt.epsilon_of_event(event, delta=DELTA, accountant=accountant)
            assert cut >= dpopt.epsilon_of_event(plain, delta=DELTA, accountant=accountant) * (1 - 5e-3) - 1e-3


@pytest.mark.slow
def test_epsilon_falls_to_poissons_as_batches_grow():
    privacy = Privacy((Query(1.0),))

    def cost(most, delta=DELTA):
        return dpopt.epsilon_of_event(events.compose(privacy, TruncatedPoisson(2_000, 0.05, most), 100), delta=delta)

    def poisson(delta):
        plain = events.compose(privacy, dpopt.sampling.Poisson(0.05), 100)
        return dpopt.epsilon_of_event(plain, delta=delta)

    costs = [cost(most) for most in (100, 110, 120, 130, 140, 150, 200, 2_000)]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(costs))
    assert costs[0] > 2 * costs[-1] and costs[-1] == pytest.approx(poisson(DELTA), rel=1e-6)
    for share in (0.01, 0.2):
        ample = ample_batch_size(2_000, 100, steps=100, delta=DELTA, share=share)
        assert cost(ample) <= poisson((1 - share) * DELTA) * (1 + 1e-4)
        beside = stats.binom.sf([ample - 2, ample - 1], 2_000, 0.05) * 100
        assert beside[1] <= share * DELTA < beside[0]  # the smallest that satisfies the bound


def divergences(n, q, most, sigma, values, epsilons):
    """Exact hockey-stick divergences of one step with and without the last example, both ways, by enumeration."""

    def sums(examples):
        found = {}
        for coins in itertools.product((0, 1), repeat=len(examples)):
            drawn = [v for v, c in zip(examples, coins, strict=True) if c]
            probability = q ** len(drawn) * (1 - q) ** (len(examples) - len(drawn))
            kept = list(itertools.combinations(drawn, min(len(drawn), most)))
            for subset in kept:
                place = round(sum(subset), 9)
                found[place] = found.get(place, 0) + probability / len(kept)
        return found

    grid = np.linspace(-n - 10 * sigma, n + 10 * sigma, 6_001)
    densities = []
    for examples in (values, values[:-1]):
        means, weights = np.array(list(sums(examples).items())).T
        densities.append(stats.norm.pdf(grid[:, None], means, sigma) @ weights)
    step = grid[1] - grid[0]
    return [
        [float(np.maximum(p - math.exp(e) * r, 0).sum() * step) for e in epsilons]
        for p, r in (densities, densities[::-1])
    ]


def small_worlds(count, seed):
    """Small data sets in which the last example stands out, in one dimension with clip norm 1."""
    yield 6, 0.8, 2, 1.0, [-1.0] * 5 + [1.0]
    yield 4, 0.9, 1, 0.7, [-1.0] * 3 + [1.0]
    rng = np.random.default_rng(seed)
    for i in range(count):
        n = int(rng.integers(2, 7))
        q, sigma, most = float(rng.uniform(0.1, 1)), float(rng.uniform(0.5, 2)), int(rng.integers(1, n + 1))
        others = -np.ones(n - 1) if i % 2 else rng.uniform(-1, 1, n - 1).round(2)
        yield n, q, most, sigma, [*others, 1.0]


@pytest.mark.parametrize("count", [4, pytest.param(120, marks=pytest.mark.slow)])
def test_no_small_world_tells_more_than_it_pays_for(count):
    """The exact privacy loss of one step, by brute force, against both accountants."""
    epsilons = np.array([0.0, 0.3, 1.0, 2.0, 4.0])
    tight = unpaid = 0
    for n, q, most, sigma, values in small_worlds(count, seed=5):
        event = dp.TruncatedSubsampledGaussianDpEvent(n, q, most, sigma)
        steps = events.flattened(event)
        truth = np.max(divergences(n, q, most, sigma, values, epsilons), axis=0)
        accountant = dp.pld.PLDAccountant(value_discretization_interval=1e-2).compose(event)
        by_pld = np.array([accountant.get_delta(e) for e in epsilons])
        own = dpopt.composition.bounds.privacy_loss_deltas(steps, epsilons, 1.0)
        by_renyi = dpopt.composition.bounds.renyi_deltas(steps, epsilons, Relation.ADD_OR_REMOVE_ONE)
        for claim in (by_pld, own, by_renyi):
            assert (truth <= claim + 1e-7).all(), (n, q, most, sigma, values, truth, claim)
        found = dpopt.epsilon_of_event(event, delta=0.05)  # the smallest of all bounds
        assert np.max(divergences(n, q, most, sigma, values, [found])) <= 0.05 + 1e-7
        plain = events.flattened(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)))
        without = dpopt.composition.bounds.privacy_loss_deltas(plain, epsilons, 1.0)
        tight += truth[2] > 0.5 * own[2]
        unpaid += (truth > without + 1e-4).any()
    assert tight >= 2 and unpaid >= 2  # some come close to the bound, and some exceed that of plain Poisson samples


def known_choice_delta(parts, epsilon):
    """Exact hockey-stick divergence, the worse direction, of an observed choice of sampled Gaussian queries."""

    def directions(q, sigma):
        def normal(q):  # of N(1, sigma^2) sampled with probability q, which at q = 1 is a Gaussian query
            excess = math.log1p(math.expm1(epsilon) / q)
            return q * (stats.norm.cdf(0.5 / sigma - excess * sigma)
                        - math.exp(excess) * stats.norm.cdf(-0.5 / sigma - excess * sigma))  # fmt: skip

        ratio = (math.exp(-epsilon) - (1 - q)) / q  # likelihood ratio at which the test decides
        if ratio <= 0:
            return normal(q), 0.0
        edge = sigma**2 * math.log(ratio) + 0.5
        other = (1 - math.exp(epsilon) * (1 - q)) * stats.norm.cdf(edge / sigma)
        return normal(q), other - math.exp(epsilon) * q * stats.norm.cdf((edge - 1) / sigma)

    return max(np.sum([weight * np.array(directions(q, sigma)) for weight, q, sigma in parts], axis=0))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("n", "delta"), [(10, 1e-5), (10, 1e-6), (8, 1e-7)])
def test_what_is_ever_sampled_does_not_lean_on_which_samples_were_full(n, delta):
    """The mean sampling probability is too low for a bound if it is known which samples were full."""
    event = dp.TruncatedSubsampledGaussianDpEvent(n, 0.5, 1, 20.0)
    steps, parts = events.flattened(event), step_events.alternatives(event)
    assert known_choice_delta(parts, dpopt.composition.bounds.ever_sampled(steps, delta)) <= delta
    assert known_choice_delta(parts, dpopt.epsilon_of_event(event, delta=delta)) <= delta
    assert known_choice_delta(parts, 0.6 * dpopt.epsilon_of_event(event, delta=delta)) > delta  # the check has power


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, 150])
def test_no_bound_is_below_a_small_world_or_what_it_is_taken_of(count):
    """Each bound separately, at its own epsilons, so that the smallest does not hide the others."""
    rng = np.random.default_rng(7)
    for i in range(count):
        n = int(rng.integers(2, 6))
        q, most, sigma = float(rng.uniform(0.1, 1)), int(rng.integers(1, n)), float(10 ** rng.uniform(-0.3, 1.5))
        delta = float(10 ** rng.uniform(-7, -1))
        event = dp.TruncatedSubsampledGaussianDpEvent(n, q, most, sigma)
        steps = events.flattened(event)
        renyi = dpopt.composition.bounds.renyi(steps, Relation.ADD_OR_REMOVE_ONE)(delta)
        claims = [
            renyi,
            dpopt.composition.bounds.ever_sampled(steps, delta),
            dpopt.composition.bounds.privacy_loss(steps, delta, renyi),
        ]
        others = -np.ones(n - 1) if i % 2 else rng.uniform(-1, 1, n - 1).round(2)
        for claim in (c for c in claims if 0 < c < 100):
            world = n, q, most, sigma, delta, claim
            assert known_choice_delta(step_events.alternatives(event), claim) <= delta * (1 + 1e-6) + 1e-12, world
            assert np.max(divergences(n, q, most, sigma, [*others, 1.0], [claim])) <= delta * (1 + 1e-5), world


@pytest.mark.slow
def test_queries_of_a_step_are_paid_for_together():
    """Two queries on one truncated sample are one with less noise, also in schedules and with second queries."""
    scheme = TruncatedPoisson(100, 0.1, 12)
    two = events.compose(Privacy((Query(3.0), Query(4.0))), scheme, 5)
    one = events.compose(Privacy((Query(12 / 5),)), scheme, 5)
    assert two.event.noise_multiplier == pytest.approx(one.event.noise_multiplier)
    varying = Privacy((Query(lambda t: 1.0 + t % 2), Query(4.0, active=lambda t: t == 2)))
    whole = events.compose(varying, scheme, 6)
    parts = [events.step_event(varying, scheme, t) for t in range(6)]
    assert {type(p) for p in parts} == {dp.TruncatedSubsampledGaussianDpEvent}
    assert events.flattened(whole) == events.flattened(dp.ComposedDpEvent(parts))
    extra = dpopt.baselines.dp2_extra_query(0.1, adaptive_l2_clip_norm=1.0, delay=2, **privacy_four())
    assert np.isfinite(dpopt.epsilon_of_event(dpopt.privacy_event(extra, sampling=scheme, steps=4), delta=DELTA))
    free = events.compose(Privacy((Query(0.0),)), scheme, 3)
    assert dpopt.epsilon_of_event(free, delta=DELTA) == math.inf
    silent = events.step_event(Privacy((Query(math.inf),)), scheme, 0)
    assert dpopt.epsilon_of_event(silent, delta=DELTA) == 0


def test_correlated_noise_is_refused():
    noise = correlated.banded(4, steps=12)
    with pytest.raises(ValueError, match=r"CyclicPoissonSampler .*EpochSampler"):
        dpopt.privacy_event(
            dpopt.dp_sgd(0.1, **privacy_four(noise=noise)), sampling=TruncatedPoisson(64, 0.1, 12), steps=3
        )


@pytest.mark.slow
def test_extremes_are_accounted_for():
    step = dp.TruncatedSubsampledGaussianDpEvent
    for event in (step(10, 0.0, 3, 1.0), step(10, 0.5, 0, 1.0)):
        assert dpopt.epsilon_of_event(event, delta=DELTA) == 0
    poisson = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.0)), 50)
    want = dpopt.epsilon_of_event(poisson, delta=DELTA)
    # Never cut; cut with a probability close to underflow; with one too small to affect any bound.
    full = stats.binom.sf(np.arange(2_000) - 1, 999, 0.01)
    hardly = int(np.flatnonzero(full > 0)[-1])
    assert 0 < full[hardly] < 1e-200 and 1e-60 < full[90] < 1e-50
    for most in (1_500, hardly, 90):
        never = dp.SelfComposedDpEvent(step(1_000, 0.01, most, 1.0), 50)
        assert dpopt.epsilon_of_event(never, delta=DELTA) == pytest.approx(want, rel=1e-3)
    always = dp.SelfComposedDpEvent(step(50, 1.0, 10, 1.0), 5)
    assert (
        want
        < dpopt.epsilon_of_event(always, delta=DELTA)
        < dpopt.epsilon_of_event(dp.GaussianDpEvent(0.5 / math.sqrt(5)), delta=DELTA)
    )
    schedule = dp.ComposedDpEvent([step(1_000, 0.05, 60, 1 + t / 100) for t in range(40)])
    steady = dp.SelfComposedDpEvent(step(1_000, 0.05, 60, 1.0), 40)
    assert 0 < dpopt.epsilon_of_event(schedule, **RDP) < dpopt.epsilon_of_event(steady, **RDP)
    for bad in (step(10, 1.5, 3, 1.0), step(10, 0.5, -1, 1.0), step(10.5, 0.5, 3, 1.0), step(10, 0.5, 3, -1.0)):
        with pytest.raises(ValueError, match="out of range"):
            dpopt.epsilon_of_event(bad, delta=DELTA)
    fixed = dp.SampledWithoutReplacementDpEvent(10, 2, dp.GaussianDpEvent(1.0))
    with pytest.raises(ValueError, match="mixes Poisson samples"):
        dpopt.epsilon_of_event(dp.ComposedDpEvent([fixed, step(10, 0.5, 3, 1.0)]), delta=DELTA)


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, 100])
def test_who_comes_is_promised_as_much_as_who_leaves(count):
    """Exact divergences against data with one example fewer and with one more: the bound holds for both."""
    rng = np.random.default_rng(11)
    worlds = [(n, q, n, 1.0, 1e-3) for n in (2, 4) for q in (0.8, 1.0)]  # nothing is cut until one example is added
    worlds += [(3, 1.0, 1, 2.0, 1e-3), (5, 0.9, 1, 5.0, 1e-4)]  # always cut: here removing costs more
    for _ in range(count):
        n = int(rng.integers(2, 6))
        worlds.append((n, *(float(rng.uniform(0.3, 1)), int(rng.integers(1, n + 1)), float(rng.uniform(0.5, 4)), 1e-3)))
    dearer = Counter()
    for n, q, most, sigma, delta in worlds:
        event = dp.TruncatedSubsampledGaussianDpEvent(n, q, most, sigma)
        truths = []
        claim = dpopt.epsilon_of_event(event, delta=delta)
        for larger in (n, n + 1):
            values = [-1.0] * (larger - 1) + [1.0]
            exact = divergences(larger, q, most, sigma, values, [claim, claim / 2])
            truths.append(np.max(exact, axis=0))
            assert truths[-1][0] <= delta * (1 + 1e-5), (n, larger, q, most, sigma)
        dearer["comes" if truths[1][1] > truths[0][1] else "leaves"] += 1
    assert dearer["comes"] and dearer["leaves"]  # so neither direction alone is enough


def test_one_more_is_counted_at_any_depth():
    cut = dp.TruncatedSubsampledGaussianDpEvent(8, 1.0, 8, 2.0)  # of 8 examples none is cut, of 9 one is
    run = dp.ComposedDpEvent([dp.SelfComposedDpEvent(cut, 3), dp.GaussianDpEvent(4.0)])
    best = dp.dp_event.RepeatAndSelectDpEvent(run, 5.0, 1.0)
    more = events.with_one_more(best)
    assert more.event.events[0].event.dataset_size == 9 and more.event.events[1] == dp.GaussianDpEvent(4.0)
    plain = dp.GaussianDpEvent((3 / 4 + 1 / 16) ** -0.5)
    selected = dp.dp_event.RepeatAndSelectDpEvent(plain, 5.0, 1.0)
    assert dpopt.epsilon_of_event(run, delta=DELTA) > 1.5 * dpopt.epsilon_of_event(plain, delta=DELTA)
    assert dpopt.epsilon_of_event(best, **RDP) > 1.5 * dpopt.epsilon_of_event(selected, **RDP)
    rates = [dpopt.trade_off.true_positive_rates(e, [0.01])[0] for e in (run, plain)]
    assert rates[0] > 1.5 * rates[1]
    assert _trials._covers(run, plain) and not _trials._covers(plain, run)


@pytest.mark.slow
def test_schedules_of_truncated_samples_take_seconds_and_are_rounded_upwards():
    def schedule(kinds):
        step = dp.TruncatedSubsampledGaussianDpEvent
        return dp.ComposedDpEvent([step(10_000, 0.02, 240, 2 ** (t / kinds)) for t in range(kinds)])

    for kinds in (33, 100, 2_000):
        exact = events.flattened(schedule(kinds))
        rounded = step_events.rounded(exact)
        assert len(rounded) <= 64 and sum(rounded.values()) == kinds
        assert min(map(step_events.noise, rounded)) >= 0.97 * min(map(step_events.noise, exact))
    started = time.process_time()
    found, by_renyi = (dpopt.epsilon_of_event(schedule(300), delta=DELTA, accountant=a) for a in ("pld", "rdp"))
    assert time.process_time() - started < 60  # it takes about 8 seconds
    few = step_events.rounded(events.flattened(schedule(100)))
    orders = dpopt.composition.bounds._orders(few)
    curves = [dpopt.composition.bounds._curve_of_all(s, Relation.ADD_OR_REMOVE_ONE, orders)[1]
              for s in (events.flattened(schedule(100)), few)]  # fmt: skip
    assert (curves[0] <= curves[1] * (1 + 1e-9)).all() and found <= by_renyi


@pytest.mark.slow
def test_one_more_example_costs_about_the_same():
    """Adding an example costs about as much as removing one."""
    for n, most in ((1_000, 130), (50_000, 5_150)):
        costs = [
            dpopt.epsilon_of_event(
                dp.SelfComposedDpEvent(dp.TruncatedSubsampledGaussianDpEvent(m, 0.1, most, 2.0), 100), delta=DELTA
            )
            for m in (n, n + 1)
        ]
        assert costs[1] == pytest.approx(costs[0], rel=2e-3)


# Whole runs.


@pytest.mark.slow
def test_a_run_compiles_one_step():
    def shapes(sampler):
        optimizer = dpopt.dp_sgd(0.1, **privacy_four(expected_batch_size=8))
        step, traced = dpopt.make_train_step(loss_fn, optimizer), set()

        @jax.jit
        def counted(*args):  # JAX evicts programs from its cache, so the size of the cache is not a count
            traced.add(jax.tree.map(jnp.shape, args[2]))
            return step(*args)

        params, state = start(), optimizer.init(start())
        for indices, mask in itertools.islice(sampler, 40):
            params, state, _ = counted(params, state, DATA[indices], mask)
        return len(traced)

    assert shapes(TruncatedPoissonSampler(64, 8, max_batch_size=12, seed=0)) == 1
    assert shapes(dpopt.PoissonSampler(64, 8, seed=0, pad_to=4)) > 2  # the check has power


@pytest.mark.slow
def test_a_plan_pays_says_and_stops(tmp_path):
    plan = truncated_plan()
    result = run(plan)
    want = dp.TruncatedSubsampledGaussianDpEvent(64, 1 / 8, 12, paid(1.0))
    assert events.flattened(result.ledger.event) == {want: 12}
    assert result.epsilon(delta=DELTA) == pytest.approx(plan.epsilon(delta=DELTA))
    assert result.epsilon(delta=DELTA) > 1.05 * dpopt.epsilon(
        noise_multiplier=1.0, sampling_prob=1 / 8, steps=12, delta=DELTA
    )
    text = str(result.statement(delta=DELTA))
    assert "each example of 64 (or one less or more) with probability 0.125, of which a random 12 are kept" in text
    assert "adding or removing one example" in text and "TruncatedPoisson" in str(plan)
    stored = json.loads(json.dumps(result.statement(delta=DELTA).to_json()))
    back = statement.state(events.from_json(stored["event"]), delta=DELTA)
    assert back.epsilon == pytest.approx(stored["epsilon"]) and stored["relation"] == "add_or_remove_one"
    assert ledger.Ledger.from_json(result.ledger.to_json()) == result.ledger
    rates = back.true_positive_rates([0.01, 0.1])
    assert 0.01 < rates[0] < rates[1] < 1
    limit = plan.epsilon(5, delta=DELTA)
    short = run(truncated_plan(), budget=dpopt.Budget(limit * (1 + 1e-6), DELTA))
    assert short.stopped == "budget" and short.state.update == 5


@pytest.mark.slow
def test_a_budget_is_met_from_below():
    builder = dpopt.Builder(
        num_examples=6_400, expected_batch_size=400, steps=50, key=jax.random.key(0), sampling="truncated_poisson",
        max_batch_size=440,
    )  # fmt: skip
    plan = builder.clip(1.0).budget(epsilon=2.0, delta=DELTA, accountant="rdp").then(optax.sgd(0.1)).build()
    assert 1.98 < plan.epsilon() <= 2.0
    plain = dpopt.calibrate(epsilon=2.0, delta=DELTA, sampling_prob=1 / 16, steps=50, accountant="rdp")
    assert plan.noise_multiplier > 1.02 * plain


class Died(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("replay", [False, True])
def test_a_run_that_dies_goes_on_and_pays(tmp_path, replay):
    pytest.importorskip("orbax.checkpoint")
    from dpopt.run.checkpoint import Checkpointer

    def die(t, params):
        if t == 7:
            raise Died

    with Checkpointer(tmp_path, every=4) as c, pytest.raises(Died):
        run(truncated_plan(), checkpointer=c, on_step=die, replay=replay)
    with Checkpointer(tmp_path, every=4) as c:
        result = run(truncated_plan(), checkpointer=c, replay=replay, budget=dpopt.Budget(1e4, DELTA, "rdp"))
    lost = 0 if replay else 3
    (count,) = events.flattened(result.ledger.event).values()
    assert result.lost == lost and count == 12 + lost
    if replay:
        assert_identical(result.state[:3], run(truncated_plan(), replay=True).state[:3])
    with Checkpointer(tmp_path, every=4) as c, pytest.raises(dpopt.run.journal.JournalError, match="TruncatedPoisson"):
        run(truncated_plan(most=13), checkpointer=c)


@pytest.mark.slow
def test_clients_are_sampled_alike():
    plan = truncated_plan(unit="client", rule=optax.sgd(1.0))
    deltas = dpopt.federated.client_deltas(lambda w, x: jnp.sum((w - x) ** 2), local_steps=2, local_learning_rate=0.1)
    result = run(plan, loss=deltas, data=np.repeat(DATA[:, None], 3, axis=1))
    assert "each client of 64" in str(result.statement(delta=DELTA)) and np.isfinite(result.params).all()


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (lambda: TruncatedPoissonSampler(10, 4, max_batch_size=3, seed=0), ValueError, "samples would be truncated"),
        (lambda: TruncatedPoissonSampler(10, 11, max_batch_size=12, seed=0), ValueError, "11 exceeds num_examples 10"),
        (lambda: TruncatedPoissonSampler(10, 4, max_batch_size=4.5, seed=0), TypeError, "max_batch_size"),
        (lambda: TruncatedPoisson(10, 0.0, 3), ValueError, "sampling_prob"),
        (lambda: TruncatedPoisson(10, 0.5, 0), ValueError, "max_batch_size"),
        (lambda: truncated_plan(pad_to=4), ValueError, "pad_to=4"),
        (lambda: truncated_plan(most=None), ValueError, "go together"),
        (
            lambda: dpopt.Builder(
                num_examples=64, expected_batch_size=8, steps=1, key=jax.random.key(0), max_batch_size=9
            ),
            ValueError,
            "go together",
        ),
        (lambda: ample_batch_size(10, 11, steps=5, delta=0.1), ValueError, "exceeds"),
        (lambda: ample_batch_size(10, 5, steps=5, delta=1.0), ValueError, "below 1"),
        (lambda: ample_batch_size(10, 5, steps=5, delta=0.1, share=0), ValueError, "share"),
    ],
)
def test_mistakes_are_named(mistake, error, message):
    with pytest.raises(error, match=message):
        mistake()


def test_rounding_ends_though_sizes_of_samples_are_many():
    """Only noise and probabilities are rounded, so more different samples than the limit are kept."""
    cut = [dp.TruncatedSubsampledGaussianDpEvent(10_000, 0.01, 120 + i, 2.0) for i in range(500)]
    fixed = [dp.SampledWithoutReplacementDpEvent(10_000, 50 + i, dp.GaussianDpEvent(2.0)) for i in range(500)]
    assert [len(step_events.rounded(Counter(steps))) for steps in (cut, fixed)] == [500, 500]
