import math

import dp_accounting as dp
import jax
import numpy as np
import pytest
from helpers import privacy_four
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

import dpopt
from dpopt.accounting import calibrate_event, epsilon_of_event
from dpopt.engines import rounding
from dpopt.events import poisson_event

PAID = 1 + rounding.ROUNDING  # a sum may exceed its sensitivity by this factor, by rounding; accounting includes it
IMDB = dict(sampling_prob=64 / 25_000, steps=39_000, delta=1e-5)


@pytest.mark.parametrize(("accountant", "expected"), [("rdp", 3.03), ("pld", 2.81)])
def test_published_settings_give_their_published_epsilon(accountant, expected):
    assert round(dpopt.epsilon(noise_multiplier=1.0, **IMDB, accountant=accountant), 2) == expected


def gaussian_epsilon(sigma, delta):
    """Epsilon of one Gaussian query, by the exact formula of Balle and Wang (2018)."""

    def gap(eps):
        return (
            stats.norm.cdf(0.5 / sigma - eps * sigma)
            - math.exp(eps) * stats.norm.cdf(-0.5 / sigma - eps * sigma)
            - delta
        )

    return optimize.brentq(gap, 0, 200)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("steps", [1, 16])
def test_full_batches_follow_the_exact_formula(sigma, steps):
    exact = gaussian_epsilon(sigma / PAID / math.sqrt(steps), 1e-5)
    got = dpopt.epsilon(noise_multiplier=sigma, sampling_prob=1.0, steps=steps, delta=1e-5)
    assert exact <= got + 1e-9 <= exact + 2e-3 * steps  # an upper bound; the grid of the loss is 1e-3


@pytest.mark.slow
@given(st.floats(0.6, 5.0), st.sampled_from([1e-3, 0.02, 0.3]), st.sampled_from([1, 30, 200]))
@settings(max_examples=12)
def test_rdp_is_looser_and_epsilon_falls_with_noise(sigma, q, steps):
    run = dict(sampling_prob=q, steps=steps, delta=1e-5)
    pld, rdp = (dpopt.epsilon(noise_multiplier=sigma, **run, accountant=a) for a in ("pld", "rdp"))
    assert 0 <= pld <= rdp
    assert dpopt.epsilon(noise_multiplier=1.1 * sigma, **run) <= pld
    assert dpopt.epsilon(noise_multiplier=sigma, **{**run, "steps": 2 * steps}) >= pld
    assert dpopt.epsilon(noise_multiplier=sigma, **{**run, "sampling_prob": q / 2}) <= pld


def test_no_noise_is_infinite_and_no_steps_are_free():
    for accountant in ("pld", "rdp"):
        assert dpopt.epsilon(noise_multiplier=0.0, **IMDB, accountant=accountant) == math.inf
        assert dpopt.epsilon(noise_multiplier=math.inf, **IMDB, accountant=accountant) == 0.0
        assert dpopt.epsilon(noise_multiplier=1.0, **{**IMDB, "steps": 0}, accountant=accountant) == 0.0


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("sigma", [0.02, 0.3, 100.0, 1e6])
def test_extreme_noise_gives_a_number_that_is_not_negative(sigma, accountant):
    eps = dpopt.epsilon(noise_multiplier=sigma, sampling_prob=0.01, steps=50, delta=1e-6, accountant=accountant)
    assert eps >= 0 and not math.isnan(eps)
    assert eps > 0 or sigma >= 100  # not zero unless the loss is negligible


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier must be non-negative; got -1.0"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier.*got nan"),
        ({"sampling_prob": 0.0}, ValueError, r"sampling_prob must lie in \(0, 1\]; got 0.0"),
        ({"sampling_prob": 1.5}, ValueError, r"sampling_prob must lie in \(0, 1\]; got 1.5"),
        ({"sampling_prob": -0.1}, ValueError, "sampling_prob.*got -0.1"),
        ({"sampling_prob": math.nan}, ValueError, "sampling_prob.*got nan"),
        ({"steps": -1}, ValueError, "steps must be at least 0; got -1"),
        ({"steps": 10.5}, TypeError, "steps must be an integer; got 10.5"),
        ({"delta": 0.0}, ValueError, "delta must be positive.*got 0.0"),
        ({"delta": 1.0}, ValueError, "delta must be below 1; got 1.0"),
        ({"delta": math.nan}, ValueError, "delta.*got nan"),
        ({"accountant": "gdp"}, ValueError, "accountant must be one of 'pld', 'rdp'; got 'gdp'"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        dpopt.epsilon(**{**dict(noise_multiplier=1.0, sampling_prob=0.01, steps=10, delta=1e-5), **change})


SETTINGS = [
    dict(epsilon=eps, delta=delta, sampling_prob=q, steps=steps)
    for eps, delta, q, steps in [
        (0.1, 1e-5, 0.01, 100),
        (0.5, 1e-6, 0.001, 1000),
        (1.0, 1e-5, 0.05, 300),
        (3.0, 1e-5, 0.01, 1000),
        (8.0, 1e-5, 0.1, 200),
        (8.0, 1e-5, 1.0, 1),
        (50.0, 1e-5, 0.2, 20),
    ]
]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("goal", SETTINGS, ids=str)
@pytest.mark.slow
def test_calibration_meets_the_target_with_hardly_more_noise_than_needed(goal, accountant):
    sigma = dpopt.calibrate(**goal, accountant=accountant)
    run = {k: v for k, v in goal.items() if k != "epsilon"}
    assert dpopt.epsilon(noise_multiplier=sigma, **run, accountant=accountant) <= goal["epsilon"]
    assert dpopt.epsilon(noise_multiplier=sigma - 1e-3, **run, accountant=accountant) > goal["epsilon"]


def test_a_calibrated_optimizer_does_not_exceed_the_target_either():
    """sigma C / C is not always sigma in floating point; the event of the optimizer counts."""
    for c in (0.1, 0.3, 1.7):
        sigma = dpopt.calibrate(epsilon=2.0, delta=1e-5, sampling_prob=0.04, steps=100)
        opt = dpopt.dp_sgd(0.1, **privacy_four(l2_clip_norm=c, noise_multiplier=sigma))
        event = dpopt.privacy_event(opt, sampling=dpopt.PoissonSampler(100, 4, seed=0), steps=100)
        assert dpopt.epsilon_of_event(event, delta=1e-5) <= 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be positive and finite; got 0.0"),
        ({"epsilon": math.inf}, "epsilon.*got inf"),
        ({"epsilon": -1.0}, "epsilon.*got -1.0"),
        ({"sampling_prob": 0.0}, "sampling_prob"),
        ({"sampling_prob": 2.0}, "sampling_prob"),
        ({"steps": 0}, "steps"),
        ({"delta": 2.0}, "delta"),
    ],
)
def test_calibration_names_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        dpopt.calibrate(**{**SETTINGS[0], **change})


def test_calibration_of_any_family_of_events():
    sigma = calibrate_event(lambda s: dp.ComposedDpEvent([dp.GaussianDpEvent(s)] * 4), epsilon=1.0, delta=1e-5)
    assert gaussian_epsilon(sigma / 2, 1e-5) == pytest.approx(1.0, abs=2e-3)


def test_the_accountant_of_an_optimizer_is_the_accountant_of_its_numbers():
    opt = dpopt.dp_sgd(0.1, **privacy_four(noise_multiplier=1.3))
    event = dpopt.privacy_event(opt, sampling=dpopt.PoissonSampler(200, 4, seed=0), steps=50)
    by_hand = dpopt.epsilon(noise_multiplier=1.3, sampling_prob=0.02, steps=50, delta=1e-5)
    assert dpopt.epsilon_of_event(event, delta=1e-5) == by_hand


def test_sampling_without_replacement_is_accounted_under_replace_one():
    opt = dpopt.dp_sgd(0.1, **privacy_four(noise_multiplier=4.0))
    event = dpopt.privacy_event(opt, sampling=dpopt.FixedSizeSampler(1000, 10, seed=0).scheme, steps=10)
    oracle = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    oracle.compose(dp.SampledWithoutReplacementDpEvent(1000, 10, dp.GaussianDpEvent(2.0 / PAID)), 10)
    got = epsilon_of_event(event, delta=1e-5, accountant="rdp")
    assert got == pytest.approx(oracle.get_epsilon(1e-5), rel=1e-9)
    with pytest.raises(ValueError, match="accountant='rdp'"):
        epsilon_of_event(event, delta=1e-5)


def filled_ledger():
    ledger = dpopt.Ledger()
    for sigma in (1.0, 1.0, 2.0):
        ledger.record(poisson_event(noise_multiplier=sigma, sampling_prob=0.1, steps=1))
    ledger.record(dp.GaussianDpEvent(5.0), count=np.int64(3))
    ledger.record(dp.SampledWithoutReplacementDpEvent(10, 2, dp.GaussianDpEvent(3.0)))
    ledger.record(dp.NoOpDpEvent())
    return ledger


def test_a_ledger_survives_json():
    ledger = filled_ledger()
    restored = dpopt.Ledger.from_json(ledger.to_json())
    assert restored == ledger and restored.steps == 8 and restored.to_json() == ledger.to_json()
    restored.record(dp.GaussianDpEvent(1.0))
    assert restored != ledger


def test_a_ledger_gives_the_same_epsilon_after_json():
    ledger = dpopt.Ledger()
    for sigma in (1.0, 1.0, 1.1):
        ledger.record(poisson_event(noise_multiplier=sigma, sampling_prob=1 / 3, steps=1))
    restored = dpopt.Ledger.from_json(ledger.to_json())
    for accountant in ("pld", "rdp"):
        assert restored.epsilon(delta=1e-5, accountant=accountant) == ledger.epsilon(delta=1e-5, accountant=accountant)


def test_neighbouring_relations_do_not_mix():
    for accountant in ("pld", "rdp"):
        with pytest.raises(ValueError, match=r"replacement|replace-one"):
            filled_ledger().epsilon(delta=1e-5, accountant=accountant)


def test_a_ledger_adds_up_to_the_event_of_the_run():
    ledger = dpopt.Ledger()
    for _ in range(20):
        ledger.record(poisson_event(noise_multiplier=1.0, sampling_prob=0.1, steps=1))
    expected = dpopt.epsilon(noise_multiplier=1.0, sampling_prob=0.1, steps=20, delta=1e-5)
    assert ledger.epsilon(delta=1e-5) == pytest.approx(expected, rel=1e-12)


def test_asking_a_ledger_changes_nothing():
    ledger = dpopt.Ledger()
    ledger.record(poisson_event(noise_multiplier=1.0, sampling_prob=0.1, steps=1), count=10)
    before = ledger.to_json()
    answers = {ledger.epsilon(delta=1e-5) for _ in range(3)}
    _ = ledger.event, ledger.steps, repr(ledger), ledger == dpopt.Ledger()
    assert len(answers) == 1 and ledger.to_json() == before


def test_an_empty_ledger_is_free():
    ledger = dpopt.Ledger()
    assert ledger.epsilon(delta=1e-5) == 0.0 and ledger.steps == 0
    assert epsilon_of_event(ledger.event, delta=1e-5) == 0.0
    assert dpopt.Ledger.from_json(ledger.to_json()) == ledger


def test_a_ledger_with_a_step_without_noise_is_infinite():
    ledger = dpopt.Ledger()
    ledger.record(dp.GaussianDpEvent(1.0))
    ledger.record(dp.GaussianDpEvent(0.0))
    assert ledger.epsilon(delta=1e-5, accountant="rdp") == math.inf
    assert dpopt.Ledger.from_json(ledger.to_json()) == ledger


def test_a_ledger_only_grows():
    ledger = dpopt.Ledger()
    with pytest.raises(ValueError, match="count must be at least 1; got -1"):
        ledger.record(dp.GaussianDpEvent(1.0), count=-1)
    with pytest.raises(ValueError, match="count"):
        ledger.record(dp.GaussianDpEvent(1.0), count=0)
    assert ledger.steps == 0


@pytest.mark.parametrize(
    "thing", [5, None, {"kind": "GaussianDpEvent"}, [dp.GaussianDpEvent(1.0)], dp.LaplaceDpEvent(1.0)]
)
def test_a_ledger_refuses_what_it_cannot_store(thing):
    ledger = dpopt.Ledger()
    with pytest.raises(TypeError, match="ledger"):
        ledger.record(thing)
    assert ledger.steps == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "5",
        '{"event": 1}',
        '[{"event": {"kind": "GaussianDpEvent", "noise_multiplier": 1.0}}]',
        '[{"event": {"kind": "SpecialDpEvent"}, "count": 1}]',
        '[{"event": {"kind": "GaussianDpEvent"}, "count": 1}]',
        '[{"event": {"kind": "GaussianDpEvent", "noise_multiplier": 1.0}, "count": 0}]',
        '[{"event": {"kind": "GaussianDpEvent", "noise_multiplier": 1.0}, "count": Infinity}]',
        '[{"event": {"kind": "SelfComposedDpEvent", "event": null, "count": 2}, "count": 1}]',
        '[{"event": {"kind": "SelfComposedDpEvent", "event": {"kind": "NoOpDpEvent"}, "count": Infinity}, "count": 1}]',
    ],
)
def test_a_damaged_ledger_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        dpopt.Ledger.from_json(text)


def test_accounting_accepts_jax_and_numpy_numbers():
    plain = dpopt.epsilon(noise_multiplier=1.0, sampling_prob=0.5, steps=3, delta=1e-5)
    for one in (np.float32(1.0), jax.numpy.float32(1.0), 1):
        assert dpopt.epsilon(noise_multiplier=one, sampling_prob=0.5, steps=np.int32(3), delta=1e-5) == plain
