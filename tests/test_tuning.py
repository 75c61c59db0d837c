"""Private search: its cost is the paper's, its number of trials has the stated law, and what is let out is covered."""

import json
import math
import re
import stat

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import dpopt
from dpopt import events, tuning
from dpopt.composition import bounds
from dpopt.privacy import Relation
from dpopt.run.journal import JournalError
from dpopt.run.statement import state
from dpopt.tuning import NumTrials, PrivateScore, PublicScore, _files, _trials, selection

SELECT = dp_accounting.dp_event.RepeatAndSelectDpEvent
GAUSSIAN = dp_accounting.GaussianDpEvent
SHAPES = (0.0, 0.5, 1.0, 3.0, math.inf)
NOTHING = PublicScore(lambda value: value, data="none: a test")


# --- The number of trials


def law(trials, k):
    """Of SciPy, where gamma is found by its own solver."""
    if trials.shape == math.inf:
        return stats.poisson.pmf(k, trials.mean)
    if trials.shape == 0:
        from scipy import optimize

        p = optimize.brentq(lambda p: stats.logser.mean(p) - trials.mean, 1e-9, 1 - 1e-9, xtol=1e-14)
        return stats.logser.pmf(k, p)
    if trials.shape == 1:
        return stats.geom.pmf(k, 1 / trials.mean)
    from scipy import optimize

    def nonzero(gamma):
        return -math.expm1(trials.shape * math.log(gamma))

    mean = lambda gamma: stats.nbinom.mean(trials.shape, gamma) / nonzero(gamma)  # noqa: E731
    gamma = optimize.brentq(lambda g: mean(g) - trials.mean, 1e-9, 1 - 1e-9, xtol=1e-14)
    return np.where(np.asarray(k) > 0, stats.nbinom.pmf(k, trials.shape, gamma) / nonzero(gamma), 0.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.5, 10.0, 60.0])
def test_the_law_is_that_of_scipy_and_its_mean_is_paid_for(shape, mean):
    trials = NumTrials(mean, shape)
    k = np.arange(60)
    np.testing.assert_allclose([trials.probability(int(i)) for i in k], law(trials, k), rtol=1e-6, atol=1e-300)
    if shape < math.inf:  # the accountant takes no larger a gamma than is drawn from
        rdp = dp_accounting.rdp.rdp_privacy_accountant
        assert rdp._gamma_truncated_negative_binomial(shape, mean) <= trials._gamma * (1 + 1e-15)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_drawn_numbers_have_the_law_and_another_law_is_seen(shape):
    rng, draws, edges = np.random.default_rng(3), 8_000, [0, 1, 2, 3, 5, 8, 12, 20, 10**6]
    found = np.histogram([NumTrials(8.0, shape).draw(rng) for _ in range(draws)], edges)[0]

    def p_value(trials):
        mass = np.cumsum([trials.probability(k) for k in range(20)])
        cells = np.diff([0.0, *(mass[np.array(edges[1:-1]) - 1]), 1.0])
        there = cells > 1e-9
        if found[~there].any():
            return 0.0
        return stats.chisquare(found[there], draws * cells[there] / cells[there].sum()).pvalue

    assert p_value(NumTrials(8.0, shape)) > 1e-3
    others = [NumTrials(9.0, shape), *(NumTrials(8.0, s) for s in SHAPES if s != shape)]
    assert max(map(p_value, others)) < 1e-4


def test_a_number_out_of_range_is_refused():
    for mean, shape in ((1.0, 1.0), (0.0, 1.0), (math.inf, 1.0), (math.nan, 1.0), (5.0, -1.0), (5.0, math.nan)):
        with pytest.raises(ValueError, match=r"mean|shape"):
            NumTrials(mean, shape)
    for mean, shape in ((1e4, math.inf), (2e4, 1e4)):
        with pytest.raises(ValueError, match="not supported: lower the mean"):
            NumTrials(mean, shape)


# --- What a selection costs


def random_event(rng, depth=2):
    """Of all kinds that a run is made of, and of selections of selections."""
    kind = rng.integers(4 if depth else 2)
    if kind == 0:
        return GAUSSIAN(float(rng.uniform(1, 20)))
    if kind == 1:
        step = dp_accounting.PoissonSampledDpEvent(float(rng.uniform(1e-3, 0.5)), GAUSSIAN(float(rng.uniform(1, 5))))
        return dp_accounting.SelfComposedDpEvent(step, int(rng.integers(1, 200)))
    if kind == 2:
        return dp_accounting.ComposedDpEvent([random_event(rng, depth - 1) for _ in range(rng.integers(1, 4))])
    return SELECT(random_event(rng, depth - 1), float(rng.uniform(1, 50)), float(rng.choice(SHAPES)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=pytest.mark.slow) for n in range(5, 12))])
def test_the_cost_is_that_of_dp_accounting(seed):
    rng = np.random.default_rng(seed)
    event = SELECT(random_event(rng), float(rng.uniform(1, 100)), float(rng.choice(SHAPES)))
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(event)
    for delta in (1e-3, 1e-6):
        own, theirs = dpopt.epsilon_of_event(event, delta=delta, accountant="rdp"), accountant.get_epsilon(delta)
        assert theirs <= own * (1 + 1e-12) and own <= theirs * (1 + 1e-6)
    assert events.from_json(json.loads(json.dumps(events.to_json(event)))) == event


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_the_cost_is_that_of_corollary_4(shape, sigma):
    """In closed form, for a trial that is rho-zCDP; the accountant knows a few hundred orders, and comes near."""
    mean, rho = 20.0, 0.5 / sigma**2
    gamma = NumTrials(mean, shape)._gamma
    rho = min(rho, -math.log(gamma))
    orders, curve = bounds._renyi_curve(SELECT(GAUSSIAN(sigma), mean, shape), Relation.ADD_OR_REMOVE_ONE, None)
    far = 2 * (1 + shape) * math.sqrt(rho * math.log(1 / gamma)) - shape * rho
    least = 1 + math.sqrt(math.log(mean) / rho)
    paper = np.where(
        orders <= least,
        2 * math.sqrt(rho * math.log(mean)) + far,
        rho * (orders - 1) + math.log(mean) / (orders - 1) + far,
    )
    assert np.all(curve >= paper * (1 - 1e-9))
    np.testing.assert_allclose(curve, paper, rtol=2e-3)


@pytest.mark.slow
def test_a_schedule_is_selected_from_in_bounded_time():
    """More kinds of steps than an accountant can take are rounded, inside a selection as outside of one."""
    steps = [dp_accounting.PoissonSampledDpEvent(0.01, GAUSSIAN(1.0 + t / 30_000)) for t in range(3_000)]
    event = SELECT(dp_accounting.ComposedDpEvent(steps), 10.0, 1.0)
    alike = SELECT(dp_accounting.SelfComposedDpEvent(steps[0], 3_000), 10.0, 1.0)
    calmer = SELECT(dp_accounting.SelfComposedDpEvent(steps[-1], 3_000), 10.0, 1.0)
    found = [dpopt.epsilon_of_event(e, delta=1e-5, accountant="rdp") for e in (calmer, event, alike)]
    assert found == sorted(found) and found[1] < 0.99 * found[2]


def test_events_of_selection_are_checked_stored_and_stated():
    for mean, shape in ((0.5, 1.0), (math.inf, 1.0), (math.nan, 1.0), (2.0, -1.0), (2.0, math.nan)):
        with pytest.raises(ValueError, match="a number in it is out of range"):
            events.check(SELECT(GAUSSIAN(1.0), mean, shape))
    event = SELECT(GAUSSIAN(4.0), 10.0, math.inf)
    ledger = dpopt.Ledger()
    ledger.record(event)
    ledger.record(GAUSSIAN(3.0), 2)
    assert dpopt.Ledger.from_json(ledger.to_json()) == ledger
    with pytest.raises(ValueError, match=r"the best of several runs has no privacy-loss.*accountant='rdp'"):
        ledger.epsilon(delta=1e-5, accountant="pld")
    assert ledger.epsilon(delta=1e-5) == ledger.epsilon(delta=1e-5, accountant="rdp")
    accountant = dp_accounting.rdp.RdpAccountant().compose(event).compose(GAUSSIAN(3.0), 2)
    assert ledger.epsilon(delta=1e-5, accountant="rdp") == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    stated = state(ledger.event, delta=1e-5)
    assert stated.accountant == "rdp" and "(Poisson, mean 10), of which each has 1 x Gaussian" in str(stated)
    assert "each trial is a run" not in str(stated) and "how many there were" in str(stated)
    assert dpopt.epsilon_of_event(SELECT(GAUSSIAN(0.0), 3.0, 1.0), delta=1e-5) == math.inf
    assert dpopt.epsilon_of_event(SELECT(GAUSSIAN(math.inf), 3.0, 1.0), delta=1e-5) == 0.0
    fixed = dp_accounting.SampledWithoutReplacementDpEvent(100, 10, GAUSSIAN(3.0))
    assert state(SELECT(fixed, 3.0, 1.0), delta=1e-3).relation is Relation.REPLACE_ONE
    with pytest.raises(ValueError, match="no accountant handles both"):
        sampled = dp_accounting.PoissonSampledDpEvent(0.1, GAUSSIAN(3.0))
        dpopt.epsilon_of_event(dp_accounting.ComposedDpEvent([sampled, SELECT(fixed, 3.0, 1.0)]), delta=1e-3)


# --- The theorem, by brute force: the exact law of what is let out, on two neighbouring data sets


def selected(run, better, trials):
    """The law of the best of K draws from ``run``, a law over outputs; the last entry is for none at all."""
    counts = np.arange(4_000)
    mass = np.array([p for _, (_, p) in zip(counts, trials._probabilities(), strict=False)])
    first = next(trials._probabilities())[0]

    def generating(z):
        return (
            mass @ np.power.outer(z, first + counts).T if np.ndim(z) == 0 else mass @ (z ** (first + counts)[:, None])
        )

    at_most = np.cumsum(run[better])
    whole = generating(np.minimum(at_most, 1.0))
    none = trials.probability(0)
    result = np.zeros(len(run) + 1)
    result[better] = np.diff([none, *whole])
    result[-1] = none
    return result


def divergence(p, q, order):
    both = (p > 0) & (q > 0)
    return float(np.log(np.sum(np.exp(order * np.log(p[both]) + (1 - order) * np.log(q[both])))) / (order - 1))


def binned(sigma, shift, bins=60):
    """A Gaussian query, rounded to bins: post-processing, and so no dearer than the query."""
    edges = np.linspace(-5 * sigma, 5 * sigma + 1, bins - 1)
    return np.diff([0.0, *stats.norm.cdf(edges, shift, sigma), 1.0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))])
@pytest.mark.one_in(6)
def test_no_selection_diverges_more_than_is_charged(shape, seed):
    """For random mechanisms, random orders of preference, both directions, many Renyi orders, and delta(epsilon)."""
    rng = np.random.default_rng([seed, int(10 * min(shape, 99))])
    closest = 0.0
    for _ in range(8):
        sigma, trials = float(rng.uniform(0.7, 5)), NumTrials(float(rng.uniform(1.1, 40)), shape)
        event = trials.event(GAUSSIAN(sigma))
        laws = [binned(sigma, shift) for shift in (0.0, 1.0)]
        preferences = [rng.permutation(60), np.arange(60), np.arange(60)[::-1], np.argsort(rng.normal(size=60))]
        orders, curve = bounds._renyi_curve(event, Relation.ADD_OR_REMOVE_ONE, None)
        for better in preferences:
            p, q = (np.maximum(selected(law, better, trials), 1e-300) for law in laws)
            assert p.sum() == pytest.approx(1, abs=1e-6)
            for order in (1.1, 1.5, 2.0, 4.0, 10.0, 32.0):
                charged = curve[np.argmin(np.abs(orders - order))]
                most = max(divergence(p, q, order), divergence(q, p, order))
                assert most <= charged
                closest = max(closest, most / charged)
            for delta in (1e-2, 1e-4):
                epsilon = dpopt.epsilon_of_event(event, delta=delta, accountant="rdp")
                for a, b in ((p, q), (q, p)):
                    assert np.sum(np.maximum(a - math.exp(epsilon) * b, 0)) <= delta
    assert closest > 0.3  # the search for a counterexample comes near


def test_the_brute_force_sees_the_price_of_one_run():
    """The same law against the charge of a single trial, which is what unpaid tuning states."""
    sigma, trials = 2.0, NumTrials(20.0)
    p, q = (selected(binned(sigma, shift), np.arange(60), trials) for shift in (0.0, 1.0))
    for order in (1.5, 2.0, 4.0):
        assert max(divergence(p, q, order), divergence(q, p, order)) > 1.2 * order / (2 * sigma**2)


@pytest.mark.parametrize("shape", [0.0, 1.0, math.inf])
@pytest.mark.slow
def test_what_is_let_out_has_the_exact_law(shape):
    """`repeat_and_select` itself, on two settings: outcome by outcome against the law of the best of K."""
    trials, levels = NumTrials(3.0, shape), 4
    laws = {"low": np.array([0.4, 0.3, 0.2, 0.1]), "high": np.array([0.1, 0.2, 0.3, 0.4])}
    rng = np.random.default_rng(7)
    counts = {}
    runs = 500
    for run in range(runs):
        found = tuning.repeat_and_select(
            lambda setting, key: int(rng.choice(levels, p=laws[setting])),
            list(laws),
            event=GAUSSIAN(1.0),
            score=NOTHING,
            num_trials=trials,
            key=jax.random.key(run),
            num_examples=100,
        )
        counts[found.setting, found.value] = counts.get((found.setting, found.value), 0) + 1
    mixture = (laws["low"] + laws["high"]) / 2
    by_value = selected(mixture, np.arange(levels), trials)
    outcomes = [(s, v) for s in laws for v in range(levels)]
    exact = {(s, v): by_value[v] * laws[s][v] / 2 / mixture[v] for s, v in outcomes} | {(None, None): by_value[-1]}
    cells = [c for c in exact if exact[c] > 0]
    assert set(counts) <= set(cells)
    observed = [counts.get(c, 0) for c in cells]
    assert stats.chisquare(observed, [runs * exact[c] for c in cells]).pvalue > 1e-3
    one_more = selected(mixture, np.arange(levels), NumTrials(9.0, shape))  # and another mean is seen
    wrong = [runs * one_more[-1 if v is None else v] * exact[s, v] / by_value[-1 if v is None else v] for s, v in cells]
    assert stats.chisquare(observed, wrong).pvalue < 1e-4


# --- The score


def test_a_private_score_moves_by_one_example_as_much_as_it_pays_for(monkeypatch):
    monkeypatch.setattr(dpopt.noise, "standard_normal_like", lambda key, tree: 0 * tree)
    data = np.array([0.2, -5.0, 7.0, np.nan, np.inf, 1.0])
    for i in range(len(data)):
        other = data.copy()
        for value in (0.0, 1.0, 1e9, -1e9, np.nan):
            other[i] = value
            sums = [
                6 * PrivateScore(per_example=lambda w, x=x: x, num_examples=6, noise_multiplier=1.0)(0, None)
                for x in (data, other)
            ]
            assert abs(sums[0] - sums[1]) <= 1 + 1e-12  # replaced; with or without it is within as well


def test_a_private_score_has_the_noise_that_it_states():
    score = PrivateScore(per_example=lambda w: np.full(100, 0.5), num_examples=100, noise_multiplier=8.0)
    drawn = (np.array([score(None, key) for key in jax.random.split(jax.random.key(1), 800)]) - 0.5) * 100
    assert stats.kstest(drawn / 8.0, "norm").pvalue > 1e-3
    assert stats.kstest(drawn / 8.0 * 3 / 2, "norm").pvalue < 1e-3
    assert 0.999 * 8 < score.event.noise_multiplier < 8.0


def test_the_score_is_part_of_each_trials_cost():
    private = PrivateScore(per_example=np.zeros, num_examples=9, noise_multiplier=4.0)
    found, trained = {}, GAUSSIAN(2.0)
    for score in (NOTHING, private):
        train = lambda s, key: 9  # noqa: E731
        found[score] = tuning.repeat_and_select(
            train, [1], event=trained, score=score, num_trials=NumTrials(4.0), key=jax.random.key(0), num_examples=9
        ).ledger.event
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(SELECT(dp_accounting.ComposedDpEvent([trained, GAUSSIAN(4.0)]), 4.0, 1.0))
    paid = [dpopt.epsilon_of_event(found[s], delta=1e-2, accountant="rdp") for s in (NOTHING, private)]
    assert paid[0] < 0.95 * paid[1] and paid[1] == pytest.approx(accountant.get_epsilon(1e-2), rel=1e-3)


# --- Going on after the end of a process


class Killed(BaseException):
    """What no code catches."""


@pytest.fixture(autouse=True)
def _same_bits(monkeypatch):
    """Fresh random bits as if they were the same in every search, so that searches can be compared."""
    monkeypatch.setattr(selection.entropy, "draw", lambda: np.arange(3, 13, dtype=np.uint32))


def search(directory=None, *, key=0, train=None, **changes):
    options = dict(
        event=GAUSSIAN(2.0), score=PublicScore(lambda v: v["score"], data="none"), num_trials=NumTrials(6.0, math.inf)
    )
    options |= dict(key=jax.random.key(key), num_examples=100, directory=directory, settings=[1, 2, 5]) | changes
    made = train or (lambda setting, key: {"score": (setting * 7) % 4, "weights": np.full(3, setting)})
    return tuning.repeat_and_select(made, options.pop("settings"), **options)


def test_whenever_it_is_killed_a_search_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    """At every place where something is written, and in every trial: the same trials, none of the done ones again."""
    ran = []

    def train(setting, key):
        ran.append(setting)
        step()
        return {"score": (3 * setting + len(ran)) % 4, "weights": np.full(3, setting)}

    places = {"seen": 0, "deadly": None}

    def step():
        places["seen"] += 1
        if places["seen"] == places["deadly"]:
            raise Killed

    for owner, name in ((_files.os, "fsync"), (_files.Path, "replace"), (_files.Path, "unlink")):
        real = getattr(owner, name)

        def counted(*args, real=real, **kwargs):
            step()
            done = real(*args, **kwargs)
            step()
            return done

        monkeypatch.setattr(owner, name, counted)
    whole = search(tmp_path / "whole", train=train)
    count, order = places["seen"], list(ran)
    assert count > 50 and len(order) > 3 and len(set(order)) > 1
    for deadly in range(1, count + 1):
        folder = tmp_path / str(deadly)
        ran.clear()
        places.update(seen=0, deadly=deadly)
        with pytest.raises(Killed):
            search(folder, train=train)
        began, stored = list(ran), folder / "search.json"
        done = json.loads(stored.read_text())["done"] if stored.exists() else 0
        assert done >= len(began) - 1
        places.update(seen=0, deadly=None)
        # The scores are functions of the trial's place, as if `train` were replayed.
        del ran[done:]
        found = search(folder, key=0 if done == 0 and not stored.exists() else 99, train=train)
        assert ran == order
        assert (found.setting, found.score, found.ledger) == (whole.setting, whole.score, whole.ledger)
        np.testing.assert_array_equal(found.value["weights"], whole.value["weights"])
        assert sorted(p.name for p in folder.iterdir()) == [
            next(folder.glob("best-*.pickle")).name,
            "ledger.jsonl",
            "search.json",
        ]


def test_a_search_that_is_done_trains_nothing_and_finds_the_same(tmp_path):
    first = search(tmp_path)
    again = search(tmp_path, key=5, train=lambda setting, key: pytest.fail("trained again"))
    assert (again.setting, again.score, again.ledger) == (first.setting, first.score, first.ledger)


def test_another_search_cannot_go_on_in_its_place(tmp_path):
    search(tmp_path, identity={"model": "linear"})
    for changes, said in (
        ({"settings": [1, 2]}, "settings: stored"),
        ({"settings": [5, 2, 1]}, "settings: stored"),
        ({"num_trials": NumTrials(6.5, math.inf)}, "num_trials.mean: stored 6.0, now 6.5"),
        ({"event": GAUSSIAN(3.0)}, "trial.noise_multiplier: stored 2.0, now 3.0"),
        ({"score": PublicScore(len, data="other")}, "score: stored"),
        ({"score": PrivateScore(per_example=len, num_examples=9, noise_multiplier=2.0)}, "score: stored"),
        ({"num_examples": 101}, "num_examples: stored 100, now 101"),
        ({"identity": {"model": "deep"}}, 'identity.model: stored "linear", now "deep"'),
        ({"identity": None}, "identity: stored"),
    ):
        with pytest.raises(ValueError, match=rf"holds another search, or a run:\n  {said}") as error:
            search(tmp_path, **{"identity": {"model": "linear"}} | changes)
        assert "one search on one data set" in str(error.value) and "another directory" in str(error.value)
    (tmp_path / "search.json").unlink()
    with pytest.raises(JournalError, match="what was drawn for it"):
        search(tmp_path, identity={"model": "linear"})


def test_noises_of_a_score_that_differ_in_a_late_digit_are_not_the_same(tmp_path):
    scores = [PrivateScore(per_example=lambda v: [0.5], num_examples=1, noise_multiplier=n) for n in (2.0, 2.0000001)]
    search(tmp_path, score=scores[0])
    with pytest.raises(ValueError, match=r"noise multiplier 2.0000001"):
        search(tmp_path, score=scores[1])


def test_of_the_other_trials_nothing_is_kept(tmp_path):
    """Neither in what is returned nor on disk; and what is there is for its owner alone."""
    trials = []

    def train(setting, key):
        trials.append(f"only trial {len(trials)} says this")
        return {"score": -abs(len(trials) - 3), "text": trials[-1]}

    found = search(tmp_path, train=train)
    assert len(trials) > 5 and found.value["text"] == trials[2]
    stored = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert trials[2].encode() in stored
    for text in (stored, repr(found).encode()):
        assert not any(t.encode() in text for t in trials if t != trials[2])
        assert b'"score": -1' not in text and b"[0, -1" not in text
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in tmp_path.iterdir())
    search(tmp_path / "new")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    for mode in (0o750, 0o701, 0o720):
        (tmp_path / "new").chmod(mode)
        with pytest.warns(UserWarning, match=rf"other users may enter .* \(mode {mode:o}\).*chmod 700"):
            search(tmp_path / "new")
    kept = json.loads((tmp_path / "search.json").read_text())
    assert set(kept) == {"order", "done", "best", "score", "result", "checksum"}
    assert str(len(trials)) not in repr(_files.Progress([0] * len(trials)))


def test_the_cost_is_on_disk_before_the_first_trial(tmp_path, capsys):
    from dpopt.__main__ import main

    with pytest.raises(ZeroDivisionError):
        search(tmp_path, train=lambda setting, key: 1 / 0)
    main(["statement", str(tmp_path), "--delta", "1e-3"])
    told = capsys.readouterr().out
    paid = dpopt.epsilon_of_event(SELECT(GAUSSIAN(2.0), 6.0, math.inf), delta=1e-3, accountant="rdp")
    stated = float(re.search(r"epsilon = ([0-9.]+),", told).group(1))
    assert paid <= stated <= 1.01 * paid and "mean 6" in told


def test_an_error_in_a_trial_is_neither_swallowed_nor_a_way_out(tmp_path):
    ran = []

    def train(setting, key):
        ran.append(setting)
        if len(ran) == 4:
            raise FloatingPointError("loss is NaN")
        return {"score": setting}

    with pytest.raises(FloatingPointError, match="loss is NaN") as error:
        search(tmp_path, train=train)
    assert "catch the error in `train` and let the score be -inf" in error.value.__notes__[0]
    assert json.loads((tmp_path / "search.json").read_text())["done"] == 3
    search(tmp_path, train=train)
    assert ran[3] == ran[4]  # the same setting, not another one in its place


def test_a_score_that_is_no_number_loses_to_every_number():
    scores = iter([math.nan, -math.inf, -3.0, math.nan, *[-4.0] * 100])
    found = search(train=lambda setting, key: {"score": next(scores)})
    assert found.score == -3.0
    found = search(train=lambda setting, key: {"score": math.nan, "n": setting})
    assert found.score == -math.inf and found.setting in (1, 2, 5)


def test_no_trial_at_all_finds_nothing_and_costs_the_same():
    seen = {}
    for key in range(60):
        found = search(num_trials=NumTrials(1.2, math.inf), key=key)
        seen.setdefault(found.setting, found)
    none = seen[None]
    assert none.value is None and none.score is None and none.ledger == seen[2].ledger


# --- With a plan


DATA = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)


def plan_of(rate, sigma, key, **changes):
    builder = dpopt.Builder(**dict(num_examples=200, expected_batch_size=100, steps=6, key=key) | changes)
    return builder.clip(1.0).noise(sigma).then(optax.sgd(rate)).build()


def run(rate, sigma, key, **changes):
    return plan_of(rate, sigma, key, **changes).run(lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(3), DATA)


def searched(train, **changes):
    options = dict(
        event=lambda rate: plan_of(rate, 4.0, jax.random.key(0)).event,
        score=PublicScore(lambda w: -float(np.abs(w).sum()), data="none"),
        num_trials=NumTrials(3.0),
        key=dpopt.secure_key(),
        num_examples=200,
    )
    return tuning.repeat_and_select(train, [0.01, 0.1], **options | changes)


@pytest.mark.slow
def test_runs_of_a_plan_within_a_budget():
    public = PublicScore(lambda w: -float(np.abs(w).sum()), data="none")
    sigma = tuning.calibrate(
        lambda s: plan_of(0.1, s, jax.random.key(0)).event,
        num_trials=NumTrials(3.0),
        score=public,
        epsilon=3.0,
        delta=1e-3,
    )
    found = searched(
        lambda rate, key: run(rate, sigma, key),
        event=lambda rate: plan_of(rate, sigma, jax.random.key(0)).event,
        score=public,
    )
    assert 2.97 < found.epsilon(delta=1e-3) <= 3.0
    assert found.statement(delta=1e-3).epsilon == found.epsilon(delta=1e-3)
    assert isinstance(found.value, np.ndarray) and found.value.shape == (3,)
    one = plan_of(0.1, sigma, jax.random.key(0)).epsilon(delta=1e-3)
    assert 1.3 * one < 3.0
    with pytest.warns(UserWarning, match="is not below 1/n"):
        found.epsilon(delta=0.5)


@pytest.mark.slow
def test_a_trial_that_spends_more_than_is_stated_is_refused():
    for changes in ({"steps": 7}, {"expected_batch_size": 101}, {"sigma": 3.9}):
        sigma = changes.pop("sigma", 4.0)
        with pytest.raises(ValueError, match="a trial spent more than the event that is stated"):
            searched(lambda rate, key, s=sigma, c=changes: run(rate, s, key, **c))
    for changes in ({"num_examples": 199}, {"unit": "client"}):
        with pytest.raises(ValueError, match="pass the trials' own num_examples and unit"):
            searched(lambda rate, key: run(rate, 4.0, key), **changes)
    searched(lambda rate, key: run(rate, 4.1, key, steps=5))  # less is within


@pytest.mark.slow
def test_of_events_that_differ_the_dearest_is_charged_or_none_is():
    sigmas = {0.01: 4.0, 0.1: 3.0}
    key = jax.random.key(0)
    found = searched(
        lambda rate, key: run(rate, sigmas[rate], key), event=lambda rate: plan_of(rate, sigmas[rate], key).event
    )
    assert found.ledger.event == NumTrials(3.0).event(plan_of(0.1, 3.0, key).event) or (
        found.epsilon(delta=1e-3)
        == dpopt.epsilon_of_event(NumTrials(3.0).event(plan_of(0.1, 3.0, key).event), delta=1e-3, accountant="rdp")
    )
    apart = {0.01: plan_of(1, 0.9, key, expected_batch_size=2).event, 0.1: plan_of(1, 6.0, key).event}
    with pytest.raises(ValueError, match="none of their 2 events covers all others"):
        searched(run, event=lambda rate: apart[rate])


@pytest.mark.parametrize("steps", [3, 100])
def test_full_batches_cover_samples(steps):
    """At orders below 2 the divergence of a sample is unknown to dp_accounting, which does not make it larger."""
    full, half = (events.poisson_event(noise_multiplier=1.0, sampling_prob=q, steps=steps) for q in (1.0, 0.5))
    assert _trials._covers(full, half)
    assert not _trials._covers(half, full)


def test_a_bad_argument_is_refused_before_the_first_trial():
    train = lambda rate, key: pytest.fail("trained")  # noqa: E731
    for changes, error, said in (
        ({"score": lambda w: 0.0}, TypeError, "score must be a PublicScore or a PrivateScore"),
        ({"num_trials": 10}, TypeError, "a fixed number of trials costs more"),
        ({"key": 3}, TypeError, "key must be a JAX PRNG key"),
        ({"event": 3.0}, TypeError, "event of dp_accounting"),
        ({"num_examples": 0}, ValueError, "num_examples must be at least 1"),
    ):
        with pytest.raises(error, match=said):
            searched(train, **changes)
    for settings, error in (([], ValueError), ([object()], TypeError), ([np.float32(1)], TypeError)):
        with pytest.raises(error, match="settings"):
            search(settings=settings)
    with pytest.raises(TypeError, match="train must be a function"):
        searched(3)
    with pytest.raises(ValueError, match="data must say in words"):
        PublicScore(len, data=" ")
    with pytest.raises(TypeError, match="function must take"):
        PublicScore(3, data="none")
    with pytest.raises(ValueError, match="must return 4 numbers"):
        PrivateScore(per_example=lambda w: np.zeros(3), num_examples=4, noise_multiplier=1.0)(0, jax.random.key(0))
    with pytest.raises(ValueError, match="noise_multiplier must be positive"):
        PrivateScore(per_example=np.zeros, num_examples=4, noise_multiplier=0.0)


@pytest.mark.parametrize("change", [{"done": 0}, {"score": 99.0}, {"best": None}, {"order": [0] * 50}], ids=str)
def test_what_a_search_keeps_is_as_it_was_written(tmp_path, change):
    """More trials than were drawn, or another best one, would not be paid for."""
    search(tmp_path)
    stored = tmp_path / "search.json"
    stored.write_text(json.dumps(json.loads(stored.read_text()) | change))
    with pytest.raises(JournalError, match="is damaged or was changed"):
        search(tmp_path)


@pytest.mark.parametrize("name", ["search.json", "best-*.pickle"])
def test_a_search_whose_file_is_cut_off_does_not_go_on(tmp_path, name):
    search(tmp_path)
    (path,) = tmp_path.glob(name)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(JournalError, match="is damaged or was changed"):
        search(tmp_path)


def test_two_searches_with_one_key_share_no_noise(monkeypatch):
    """Nor do copies of a directory: the difference of two scores was the exact count of a private score."""
    monkeypatch.undo()
    drawn = []

    def train(setting, key):
        drawn.append(jax.random.key_data(key).tolist())
        return {"weights": jnp.zeros(2), "score": 0}

    for _ in range(2):
        search(train=train)
    assert len(drawn) > 1 and len({tuple(d) for d in drawn}) == len(drawn)
