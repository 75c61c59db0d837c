import math

import dp_accounting as dp
import jax
import numpy as np
import optax
import pytest
from helpers import privacy_four

import dpopt
from dpopt import events
from dpopt.engines import rounding
from dpopt.privacy import Privacy, Query
from dpopt.sampling import Poisson, WithoutReplacement

PAID = 1 + rounding.ROUNDING  # a sum may exceed its sensitivity by this factor, by rounding; accounting includes it


def test_the_event_of_a_run():
    event = events.poisson_event(noise_multiplier=1.5, sampling_prob=0.25, steps=7)
    assert event == dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.25, dp.GaussianDpEvent(1.5 / PAID)), 7)


@pytest.mark.parametrize("change", [{"noise_multiplier": -1.0}, {"sampling_prob": 0.0}, {"steps": -1}])
def test_bad_arguments_are_named(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        events.poisson_event(**{**dict(noise_multiplier=1.0, sampling_prob=0.5, steps=2), **change})


def test_a_sampler_and_its_scheme_give_the_same_event():
    opt = dpopt.dp_sgd(0.1, **privacy_four())
    for sampler, scheme in [
        (dpopt.PoissonSampler(100, 4, seed=0), Poisson(0.04)),
        (dpopt.FixedSizeSampler(100, 4, seed=0), WithoutReplacement(100, 4)),
    ]:
        by_sampler, by_scheme = (dpopt.privacy_event(opt, sampling=s, steps=3) for s in (sampler, scheme))
        assert by_sampler == by_scheme


@pytest.mark.parametrize("sampling", [0.04, None, "poisson"])
def test_what_is_no_sampling_scheme_is_refused(sampling):
    with pytest.raises(TypeError, match="sampling"):
        dpopt.privacy_event(dpopt.dp_sgd(0.1, **privacy_four()), sampling=sampling, steps=3)


def test_a_schedule_is_counted_step_by_step():
    privacy = Privacy((Query(lambda t: 1.0 if t < 3 else 2.0),))
    event = events.compose(privacy, Poisson(0.5), 5)
    sampled = [dp.PoissonSampledDpEvent(0.5, dp.GaussianDpEvent(s / PAID)) for s in (1.0, 2.0)]
    assert event.events == [dp.SelfComposedDpEvent(sampled[0], 3), dp.SelfComposedDpEvent(sampled[1], 2)]
    later = events.compose(privacy, Poisson(0.5), 5, start=3)
    assert later == dp.SelfComposedDpEvent(sampled[1], 5)


def test_an_optax_schedule_works():
    privacy = dpopt.dp_sgd(0.1, **privacy_four(noise_multiplier=optax.linear_schedule(1.0, 2.0, 2))).privacy
    counts = [e.count for e in events.compose(privacy, Poisson(0.5), 5).events]
    assert counts == [1, 1, 3]


def test_queries_on_one_sample_are_one_query():
    privacy = Privacy((Query(1.0), Query(2.0, active=lambda t: t % 2 == 0)))
    event = events.compose(privacy, Poisson(0.5), 4)
    both = (1.0 + 0.25) ** -0.5
    assert sorted(e.event.event.noise_multiplier for e in event.events) == pytest.approx([both / PAID, 1.0 / PAID])


def test_several_queries_cost_what_their_merger_costs():
    several = Privacy((Query(3.0),) * 4)
    one = Privacy((Query(1.5),))
    costs = [
        dpopt.epsilon_of_event(events.compose(p, Poisson(0.1), 10), delta=1e-5, accountant=a)
        for p in (several, one)
        for a in ("pld", "rdp")
    ]
    assert costs[:2] == pytest.approx(costs[2:], rel=1e-12)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (dp.ComposedDpEvent([]), dp.NoOpDpEvent()),
        (dp.ComposedDpEvent([dp.NoOpDpEvent(), dp.GaussianDpEvent(2.0)]), dp.GaussianDpEvent(2.0)),
        (dp.ComposedDpEvent([dp.GaussianDpEvent(2.0), dp.GaussianDpEvent(0.0)]), dp.NonPrivateDpEvent()),
        (dp.ComposedDpEvent([dp.GaussianDpEvent(math.inf)] * 2), dp.NoOpDpEvent()),
        (dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(0.0)), dp.NonPrivateDpEvent()),
        (dp.PoissonSampledDpEvent(0.1, dp.ComposedDpEvent([])), dp.NoOpDpEvent()),
        (dp.SelfComposedDpEvent(dp.NonPrivateDpEvent(), 3), dp.NonPrivateDpEvent()),
    ],
)
def test_merging_trivial_events(event, expected):
    assert events.merged(event) == expected


def test_a_step_on_which_nothing_is_asked_is_free():
    privacy = Privacy((Query(1.0, active=lambda t: t == 0),))
    once = dpopt.epsilon_of_event(events.compose(privacy, Poisson(0.5), 1), delta=1e-5)
    often = dpopt.epsilon_of_event(events.compose(privacy, Poisson(0.5), 9), delta=1e-5)
    assert once == pytest.approx(often, rel=1e-9)


def test_every_event_survives_json():
    gaussian = dp.GaussianDpEvent(1.5)
    for event in (
        dp.NoOpDpEvent(),
        dp.NonPrivateDpEvent(),
        gaussian,
        dp.ComposedDpEvent([gaussian, dp.NoOpDpEvent()]),
        dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, gaussian), 12),
        dp.SampledWithoutReplacementDpEvent(10, 2, gaussian),
    ):
        assert events.from_json(events.to_json(event)) == event


def test_numbers_of_numpy_and_jax_are_stored_as_plain_ones():
    import json

    for sigma in (np.float32(1.5), jax.numpy.float32(1.5), np.float64(1.5)):
        assert json.loads(json.dumps(events.to_json(dp.GaussianDpEvent(sigma))))["noise_multiplier"] == 1.5


def test_a_ledger_keeps_a_composition_of_a_tuple():
    """It was recorded, and every later use of the ledger failed."""
    ledger = dpopt.Ledger()
    ledger.record(dp.ComposedDpEvent((dp.GaussianDpEvent(4.0),) * 2))
    assert dpopt.Ledger.from_json(ledger.to_json()) == ledger
    alone = dpopt.epsilon_of_event(dp.GaussianDpEvent(4 / 2**0.5), delta=1e-5)
    assert abs(ledger.epsilon(delta=1e-5) - alone) < 1e-3
