"""Lower bounds on epsilon: the papers' formulas in exact arithmetic, other implementations, and how often they err.

A bound that is too high accuses a sound run. So its error rate is computed without sampling where the mechanism allows
that, and measured with many repetitions where not.
"""

import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest

pytest.importorskip("scipy")

from scipy import optimize, stats

import dpopt
from dpopt import audit
from dpopt.audit import one_run
from dpopt.audit.bound import roc

SEEDS = range(40)


def exact_p_value(m, r, v, q, delta):
    """Theorem 5.2 in exact arithmetic, for an accuracy q and a delta that are fractions."""
    pmf = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    steepest = max((sum(pmf[max(v - i, 0) : v]) / Fraction(i) for i in range(1, m + 1)), default=0)
    return min(Fraction(1), sum(pmf[v:]) + 2 * m * delta * steepest)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_p_value_is_that_of_the_theorem_in_exact_arithmetic(seed):
    rng = np.random.default_rng(seed)
    m = int(rng.integers(1, 40))
    r = int(rng.integers(0, m + 1))
    v = int(rng.integers(0, r + 1))
    odds, delta = int(rng.integers(1, 50)), Fraction(int(rng.integers(0, 4)), 10 ** int(rng.integers(1, 7)))
    expected = float(exact_p_value(m, r, v, Fraction(odds, odds + 1), delta))
    found = audit.one_run_p_value(right=v, guesses=r, canaries=m, epsilon=math.log(odds), delta=float(delta))
    assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
def test_p_value_and_epsilon_are_those_of_jax_privacy(seed):
    auditing = pytest.importorskip("jax_privacy.auditing")
    rng = np.random.default_rng(seed)
    m = int(rng.integers(1, 3_000))
    r = int(rng.integers(1, m + 1))
    v = int(rng.integers(r // 2, r + 1))
    delta, significance = 10.0 ** -rng.uniform(2, 8), rng.uniform(0.001, 0.4)
    counts = dict(right=v, guesses=r, canaries=m, delta=delta)
    epsilon = rng.uniform(0, 6)
    theirs = auditing._one_run_p_value(m, r, v, epsilon, delta)
    assert audit.one_run_p_value(**counts, epsilon=epsilon) == pytest.approx(theirs, rel=1e-6, abs=1e-12)
    theirs = auditing._epsilon_one_run(0.0, m, r, v, significance, delta)
    assert audit.one_run_epsilon(**counts, significance=significance) == pytest.approx(theirs, abs=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("delta", [0.0, 1e-6, 1e-4, 1e-2])
def test_p_values_grow_with_epsilon_and_fall_with_right_guesses(delta):
    """Else bisection would stop at the wrong place. (At 1e-2 the delta term is beyond 1 for most of these.)"""
    rng = np.random.default_rng(0)
    for _ in range(20):
        m = int(rng.integers(1, 400))
        r = int(rng.integers(1, m + 1))
        v = int(rng.integers(1, r + 1))

        def p(epsilon, v, m=m, r=r):
            return audit.one_run_p_value(right=v, guesses=r, canaries=m, epsilon=epsilon, delta=delta)

        at = np.array([p(e, v) for e in np.linspace(0, 12, 100)])
        is_of_use = at[1:] < 0.5  # of p-values that large no bound is made
        assert np.all((np.diff(at) >= -1e-12)[is_of_use])
        assert p(1.0, v) <= p(1.0, v - 1) + 1e-12


def test_p_values_keep_their_digits_where_a_wrong_guess_is_all_but_impossible():
    # One wrong guess of 10 at epsilon 45: the probability of none is 1 - 10 e^-45, which floats cannot tell from 1.
    counts = dict(guesses=10, canaries=10, delta=0.0)
    assert audit.one_run_p_value(**counts, right=10, epsilon=45.0) == pytest.approx(1.0)
    counts = dict(right=99, guesses=100, canaries=100, delta=1e-12)
    at = [audit.one_run_p_value(**counts, epsilon=e) for e in (20.0, 45.0, 800.0)]
    assert np.all(np.isfinite(at)) and np.allclose(at, 1)
    bound = audit.one_run_epsilon(right=100, guesses=100, canaries=100, delta=0.0, significance=1e-300)
    assert bound == 0.0  # 2^-100 is more than that
    bound = audit.one_run_epsilon(right=10**6, guesses=10**6, canaries=10**6, delta=0.0, significance=0.01)
    assert bound == pytest.approx(-math.log(math.expm1(-math.log(0.01) / 1e6)), rel=1e-6)


# Mechanisms whose number of right guesses has a known distribution


def all_right_guesses(m, epsilon, delta, kind):
    """The probability of every number of right guesses about m coins, by the best attacker, ``(m + 1,)``."""
    q = 1 / (1 + math.exp(-epsilon))
    flipped = stats.binom.pmf(np.arange(m + 1), m, q)  # randomised response on every coin
    if kind == "randomised response":
        return flipped
    if kind == "all revealed at times":
        return (1 - delta) * flipped + delta * (np.arange(m + 1) == m)
    total = np.zeros(m + 1)  # some revealed: each with probability delta
    for revealed in range(m + 1):
        rest = stats.binom.pmf(np.arange(m + 1 - revealed), m - revealed, q)
        total[revealed:] += stats.binom.pmf(revealed, m, delta) * rest
    return total


KINDS = ("randomised response", "all revealed at times", "some revealed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("m", "epsilon", "delta"), [(1, 0.3, 1e-2), (20, 1.0, 1e-3), (200, 1.0, 1e-4), (300, 3.0, 1e-5)]
)
@pytest.mark.parametrize("significance", [0.01, 0.2])
@pytest.mark.one_in(15)
def test_the_bound_is_wrong_as_seldom_as_it_says_computed_exactly(kind, m, epsilon, delta, significance):
    """Each of these is (epsilon, delta)-private and no better, so a bound above epsilon is an error."""
    delta = 0.0 if kind == "randomised response" else delta
    probabilities = all_right_guesses(m, epsilon, delta, kind)
    counts = dict(guesses=m, canaries=m, delta=delta, significance=significance)
    bounds = np.array([0.0 if v < m / 2 else audit.one_run_epsilon(right=v, **counts) for v in range(m + 1)])
    wrong = probabilities[bounds > epsilon].sum()
    assert wrong <= significance
    if kind == "randomised response" and m >= 200:
        assert wrong > 0.3 * significance  # no slack but that of whole numbers
    # Twice as leaky, and as many canaries as that takes: caught
    leaky = all_right_guesses(m, 2 * epsilon, delta, kind)
    if m == 200:
        assert leaky[bounds > epsilon].sum() > 0.95


def coins_and_response(count, epsilon, seed):
    """Scores that are a randomised response to the coin."""
    rng = np.random.default_rng(seed)
    included = rng.random(count) < 0.5
    return np.where(rng.random(count) < 1 / (1 + math.exp(-epsilon)), included, ~included) * 1.0, included


def coins_and_gaussian(count, mu, seed):
    rng = np.random.default_rng(seed)
    included = rng.random(count) < 0.5
    return mu * included + rng.normal(size=count), included


def gaussian_epsilon(mu, delta):
    """Corollary 2.13 of Dong, Roth and Su, solved for epsilon."""
    phi = stats.norm.cdf
    return optimize.brentq(lambda e: phi(mu / 2 - e / mu) - math.exp(e) * phi(-mu / 2 - e / mu) - delta, 0, 60)


REPETITIONS, ALLOWED = 100, 12  # at a significance of 0.05, more wrong bounds than this have a probability of 0.002


def wrong_bounds(bound_of, truth):
    return sum(bound_of(seed) > truth for seed in range(REPETITIONS))


def test_bounds_from_many_runs_of_randomised_response():
    """Its scores are ties all over."""
    bound = lambda e, seed: audit.many_runs_bound(*coins_and_response(800, e, seed), delta=0.0).epsilon  # noqa: E731
    assert wrong_bounds(lambda seed: bound(1.0, seed), 1.0) <= ALLOWED
    assert wrong_bounds(lambda seed: bound(2.0, seed), 1.0) > 0.95 * REPETITIONS


def test_bounds_from_many_runs_of_a_gaussian_mechanism():
    delta, mu = 0.1, 1.0
    truth = gaussian_epsilon(mu, delta)

    def bound(mu, seed):
        return audit.many_runs_bound(*coins_and_gaussian(1_000, mu, seed), delta=delta).epsilon

    assert wrong_bounds(lambda seed: bound(mu, seed), truth) <= ALLOWED
    assert wrong_bounds(lambda seed: bound(2 * mu, seed), truth) > 0.95 * REPETITIONS


@pytest.mark.slow
def test_bounds_from_one_run_of_independent_gaussian_scores():
    delta, mu = 1e-5, 1.0
    truth = gaussian_epsilon(mu, delta)

    def bound(mu, seed):
        return audit.one_run_bound(*coins_and_gaussian(1_000, mu, seed), delta=delta).epsilon

    assert sum(bound(mu, seed) > truth for seed in range(20)) == 0  # it is loose for such a mechanism
    assert np.median([bound(mu, seed) for seed in range(20)]) > 0.3 * truth


@pytest.mark.parametrize("bound", [lambda *a: audit.many_runs_bound(*a, delta=0.0).epsilon, audit.many_runs_mu])
def test_runs_that_chose_the_threshold_are_not_counted(bound):
    """Else the best of many thresholds would look better than it is."""
    rng = np.random.default_rng(0)
    included = rng.random(400) < 0.5
    scores = np.where(np.arange(400) < 200, 1.0 * included, rng.random(400))  # told apart in the first half alone
    assert bound(scores, included) == 0
    assert bound(scores[::-1], included[::-1]) > 1


def test_bounds_on_mu():
    for bound in (audit.many_runs_mu, audit.one_run_mu):
        assert sum(bound(*coins_and_gaussian(800, 1.0, seed)) > 1.0 for seed in range(40)) <= 7
    score, included = coins_and_gaussian(4_000, 2.0, 0)
    assert audit.many_runs_mu(score, included) > 1.5 and audit.one_run_mu(score, included) > 0.6


@pytest.mark.parametrize("mu", [0.0, 0.5, 1.0, 2.0])
def test_bounds_on_mu_stay_below_the_truth_and_come_near(mu):
    score, included = coins_and_gaussian(4_000, mu, 0)
    many = audit.many_runs_mu(score, included, significance=0.001)
    one = audit.one_run_mu(score, included, significance=0.001)
    assert max(one, many) <= mu
    if mu >= 1:
        assert many > 0.6 * mu and one > 0.2 * mu


def test_the_refutation_of_mu_is_that_of_jax_privacy():
    auditing = pytest.importorskip("jax_privacy.auditing")
    for guesses, right in [(100, 90), (30, 30), (300, 200)]:
        low, high = 0.0, 5.0
        counts = dict(right=right, guesses=guesses, canaries=1_000, significance=0.01)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if audit.refutes_mu(middle, **counts) else (low, middle)
        theirs = auditing._epsilon_one_run_fdp(0.0, 1_000, guesses, right, 0.01, 1e-5)
        assert audit.epsilon_of_mu(low, delta=1e-5) == pytest.approx(theirs, abs=0.02)


@pytest.mark.parametrize(("mu", "delta"), [(0.3, 1e-6), (1.0, 1e-5), (3.0, 1e-3)])
def test_epsilon_of_mu_is_the_closed_form(mu, delta):
    truth = gaussian_epsilon(mu, delta)
    assert truth <= audit.epsilon_of_mu(mu, delta=delta) <= truth + 2e-3
    assert audit.epsilon_of_mu(0.0, delta=delta) == 0.0


@pytest.mark.parametrize(("right", "wrong", "delta"), [(90, 10, 0.0), (500, 20, 0.1), (0, 0, 0.0), (1000, 0, 0.5)])
def test_the_bound_on_rates_is_that_of_clopper_and_pearson(right, wrong, delta):
    """At its bounds, counts as extreme as these have the probability that is allowed, by the binomial itself."""
    found = audit.epsilon_of_rates(*audit.clopper_pearson(right, 1_000, wrong, 1_000, 0.01), delta)
    rates = np.linspace(0, 1, 100_001)
    least = rates[stats.binom.sf(right - 1, 1_000, rates) <= 0.005].max() if right else 0.0
    most = rates[stats.binom.cdf(wrong, 1_000, rates) >= 0.005].max()
    assert found == pytest.approx(max(0.0, math.log((least - delta) / most)) if least > delta else 0.0, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("mu", [0.0, 1.0, 2.0])
def test_the_gaussian_estimate_is_near_the_truth_and_its_interval_mostly_holds_it(mu):
    truth, hits = audit.epsilon_of_mu(mu, delta=1e-2), 0
    for seed in range(20):
        scores, included = coins_and_gaussian(500, mu, seed)
        found = audit.gaussian_estimate(np.exp(scores), included, delta=1e-2, resamples=100)  # any increasing function
        assert abs(found.mu - mu) < 0.35
        hits += found.interval[0] <= truth <= found.interval[1]
    assert hits >= 15  # of 20 at a nominal 0.95; fewer have a probability of 0.0003


def test_an_estimate_of_runs_that_are_told_apart_without_fail_is_finite():
    scores, included = np.repeat([0.0, 1.0], 50), np.repeat([False, True], 50)
    found = audit.gaussian_estimate(scores, included, delta=1e-5, resamples=20)
    assert 4 < found.mu < 6 and found.interval[1] < 100
    opposite = audit.gaussian_estimate(-scores, included, delta=1e-5, resamples=20)
    assert opposite.mu == opposite.epsilon == 0.0
    with pytest.raises(ValueError, match="at least two runs"):
        audit.gaussian_estimate(scores, np.ones(100, bool), delta=1e-5)


# Scores and coins


@pytest.mark.parametrize("seed", range(10))
def test_guesses_are_counted_as_by_hand(seed):
    rng = np.random.default_rng(seed)
    m = int(rng.integers(1, 30))
    scores, included = rng.permutation(m) * 1.0, rng.random(m) < 0.5
    k_in = int(rng.integers(0, m + 1))
    k_out = int(rng.integers(0, m - k_in + 1))
    right = sum(included[i] for i in range(m) if np.sum(scores > scores[i]) < k_in)
    right += sum(not included[i] for i in range(m) if np.sum(scores < scores[i]) < k_out)
    assert audit.right_guesses(scores, included, k_in, k_out) == right


def test_runs_that_diverged_may_score_infinity():
    scores, included = coins_and_gaussian(400, 3.0, 0)
    worst = np.where(scores < np.quantile(scores, 0.3), -np.inf, scores)
    for bound in (audit.many_runs_bound, audit.one_run_bound):
        found = bound(worst, included, delta=1e-5)
        assert found.epsilon > 0 and np.isfinite(found.roc).all()


@pytest.mark.parametrize("order", ["members first", "members last"])
def test_equal_scores_say_nothing_in_whatever_order_they_come(order):
    included = np.arange(1_000) < 500
    included = included if order == "members first" else ~included
    for scores in (np.zeros(1_000), np.where(np.arange(1_000) % 2, np.inf, -np.inf)):
        assert audit.one_run_bound(scores, included, delta=1e-5).epsilon < 0.3


def test_one_canary_or_none_right_or_no_guess_shows_little():
    def bound(right, m, **more):
        included = np.arange(m) < right
        return audit.one_run_bound(np.arange(m) * -1.0, included, delta=0.0, guesses=[(m, 0)], **more)

    assert bound(1, 1).epsilon == 0.0  # right by luck every other time
    assert bound(1, 1, significance=0.49).epsilon == 0.0
    assert bound(0, 50).epsilon == 0.0
    assert bound(50, 50).epsilon == pytest.approx(math.log(1 / (0.05 ** (-1 / 50) - 1)))
    none = audit.one_run_bound([1.0, 2.0], np.array([True, False]), delta=0.0, guesses=[(0, 0)])
    assert (none.epsilon, none.guesses, none.right) == (0.0, 0, 0)
    assert one_run.default_guesses(1) == [(1, 0)]


def test_several_numbers_of_guesses_are_paid_for():
    scores, included = coins_and_gaussian(500, 3.0, 0)
    single = audit.one_run_bound(scores, included, delta=1e-5, guesses=[(25, 25)]).epsilon
    twice = audit.one_run_bound(scores, included, delta=1e-5, guesses=[(25, 25), (25, 25)]).epsilon
    half = audit.one_run_bound(scores, included, delta=1e-5, guesses=[(25, 25)], significance=0.025).epsilon
    assert twice == half < single


@pytest.mark.parametrize("seed", range(5))
def test_empirical_rates_are_those_of_scikit_learn(seed):
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(seed)
    scores, included = rng.integers(0, 9, 60) * 1.0, rng.random(60) < 0.5
    false, true, _ = metrics.roc_curve(included, scores, drop_intermediate=False)
    np.testing.assert_allclose(roc(scores, included), (false, true))


@pytest.mark.parametrize("bound", [audit.one_run_bound, audit.many_runs_bound, audit.gaussian_estimate])
def test_bad_scores_and_coins_are_refused(bound):
    coins = np.arange(8) % 2 == 0
    with pytest.raises(ValueError, match="1 of 8 scores are NaN"):
        bound(np.append(np.zeros(7), np.nan), coins, delta=1e-5)
    with pytest.raises(ValueError, match="same length"):
        bound(np.zeros(7), coins, delta=1e-5)
    with pytest.raises(ValueError, match="same length"):
        bound([], np.zeros(0, bool), delta=1e-5)
    with pytest.raises(TypeError, match="boolean"):
        bound(np.zeros(8), coins * 1, delta=1e-5)
    with pytest.raises(ValueError, match="significance"):
        bound(np.zeros(8), coins, delta=1e-5, significance=0.95)  # a confidence


def test_bad_numbers_are_refused():
    scores, coins = np.zeros(8), np.arange(8) % 2 == 0
    with pytest.raises(ValueError, match="delta"):
        audit.one_run_bound(scores, coins, delta=1.0)
    with pytest.raises(ValueError, match="5 and 4 guesses do not fit 8"):
        audit.one_run_bound(scores, coins, delta=0.0, guesses=[(5, 4)])
    with pytest.raises(ValueError, match="guesses is empty"):
        audit.one_run_bound(scores, coins, delta=0.0, guesses=[])
    with pytest.raises(ValueError, match="cannot be"):
        audit.one_run_p_value(right=3, guesses=2, canaries=4, epsilon=1.0, delta=0.0)
    with pytest.raises(ValueError, match="epsilon"):
        audit.one_run_p_value(right=1, guesses=2, canaries=4, epsilon=math.nan, delta=0.0)
    with pytest.raises(ValueError, match="order in which coins were tossed"):
        audit.many_runs_bound(scores, np.arange(8) < 4, delta=0.0)


# Reports


@pytest.mark.slow
def test_a_report_holds_a_bound_against_every_kind_of_claim():
    import jax
    import optax

    builder = dpopt.Builder(num_examples=100, expected_batch_size=10, steps=3, key=jax.random.key(0))
    plan = builder.clip(1.0).noise(1.0).then(optax.sgd(0.1)).build()
    bound = audit.one_run_bound(np.arange(99.0), np.arange(99) >= 50, delta=1e-3)
    ledger = dpopt.Ledger()
    ledger.record(plan.event.event, 3)
    for claim in (plan, plan.event, ledger, plan.statement(delta=1e-4)):
        assert audit.report(claim, bound).claim.epsilon == pytest.approx(plan.epsilon(delta=1e-3))
    result = plan.run(lambda w, x: w @ x, np.zeros(2, np.float32), np.ones((100, 2), np.float32))
    assert audit.report(result, bound).claim.event == result.ledger.event
    for wrong in (3.0, None, "3"):
        with pytest.raises(TypeError, match="claim must be a plan"):
            audit.report(wrong, bound)
    with pytest.raises(ValueError, match="delta 0"):
        audit.report(plan, audit.one_run_bound(np.arange(99.0), np.arange(99) >= 50, delta=0.0))


def test_a_report_says_what_was_found_and_no_more():
    claim = dp_accounting.GaussianDpEvent(1.0)
    scores, included = coins_and_gaussian(3_000, 1.0, 1)
    bound = audit.many_runs_bound(scores, included, delta=1e-5, claim=claim)
    sound = audit.report(claim, bound, audit.gaussian_estimate(scores, included, delta=1e-5, resamples=50))
    assert (
        not sound.exceeds_claim and "does not exceed the claim" in sound.verdict and "proves nothing" in sound.verdict
    )
    assert "estimate, no bound" in str(sound) and sound.bound.true_positive_rate < sound.allowed
    assert sound.to_json()["bound"]["right"] == bound.right
    never = audit.report(dp_accounting.NonPrivateDpEvent(), bound)
    assert not never.exceeds_claim and never.claim.epsilon == math.inf
    for report in (sound, never):
        assert "is private" not in str(report) and "prove" not in str(report).replace("proves nothing", "")


@pytest.mark.slow
def test_a_test_above_the_curve_is_a_violation_even_if_epsilon_at_delta_is_not():
    """At a delta of 1e-5 counts of four thousand runs show little; where the curve bends they show enough."""
    claim = dp_accounting.GaussianDpEvent(1.0)
    accused = caught = 0
    for seed in range(6):
        for mu in (1.0, 1.5):  # as claimed, and with two thirds of the noise
            bound = audit.many_runs_bound(*coins_and_gaussian(4_000, mu, seed), delta=1e-5, claim=claim)
            report = audit.report(claim, bound)
            assert bound.epsilon < report.claim.epsilon
            accused, caught = accused + (report.exceeds_claim and mu == 1), caught + (report.exceeds_claim and mu > 1)
            assert report.exceeds_claim == ("VIOLATION" in report.verdict and "the claim allows" in report.verdict)
    assert accused <= 2 and caught >= 5  # of 6 each; the first at a significance of 0.05


def test_a_plot_shows_the_claim_the_attack_and_the_bound():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    claim = dp_accounting.GaussianDpEvent(1.0)
    scores, included = coins_and_gaussian(2_000, 3.0, 0)
    many = audit.report(claim, audit.many_runs_bound(scores, included, delta=1e-5, claim=claim))
    one = audit.report(claim, audit.one_run_bound(scores, included, delta=1e-5))
    for report, lines in ((many, 5), (one, 4)):
        axes = report.plot()
        assert len(axes.lines) == lines
        curve = axes.lines[0].get_xydata()
        np.testing.assert_allclose(curve[:, 1], stats.norm.cdf(stats.norm.ppf(curve[:, 0]) + 1), atol=0.01)
        pyplot.close("all")
    point = (many.bound.false_positive_rate, many.bound.true_positive_rate)
    assert point[1] > many.allowed and np.interp(*point[:1], *curve.T) < point[1]


@pytest.mark.parametrize(("canaries", "ceiling"), [(100, 2.05), (1_000, 4.35), (10_000, 5.94)])
def test_one_run_has_a_ceiling_and_its_report_says_so(canaries, ceiling):
    """A recipe audited a claim of 8 with a thousand canaries, which cannot show more than 4.35 even without noise."""
    coins = np.random.default_rng(0).random(canaries) < 0.5
    perfect = audit.one_run_bound(coins.astype(float), coins, delta=1e-5)
    assert perfect.epsilon == perfect.ceiling == pytest.approx(ceiling, abs=0.01)
    lucky = audit.one_run_bound(np.random.default_rng(1).random(canaries), coins, delta=1e-5)
    assert lucky.ceiling == perfect.ceiling > lucky.epsilon
    sigma = {epsilon: dp_accounting.GaussianDpEvent(sigma) for epsilon, sigma in ((8, 0.6), (1.0, 3.9))}
    assert "could not have refuted" in audit.report(sigma[8], perfect).verdict
    assert "VIOLATION" in audit.report(sigma[1.0], perfect).verdict
    assert "found no mistake" in audit.report(sigma[1.0], lucky).verdict
