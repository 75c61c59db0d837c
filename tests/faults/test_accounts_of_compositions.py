"""Faults of accounts: what scores show, relations and units that were mixed, steps that cost nothing."""

import secrets

import dp_accounting as dp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import gaussian_mechanism

import dpopt
from dpopt.events import compose
from dpopt.privacy import Privacy, Query
from dpopt.private_mean import noise_stddev
from dpopt.samplers.parts import CyclicPoissonSampler, EpochSampler
from dpopt.tuning import PrivateScore


def test_a_score_does_not_show_which_sums_are_possible():
    """With a float32 draw added to a float64 total it did: for a wrong sum, the draw would be no float32."""
    n, sigma, right, trials = 10_000, 20.0, 0, 400
    for _ in range(trials):
        true = 7000 + secrets.randbelow(2)
        score = PrivateScore(per_example=lambda _, k=true: np.arange(n) < k, num_examples=n, noise_multiplier=sigma)
        released = score(None, dpopt.secure_key())
        assert released * n * 2**20 == pytest.approx(round(released * n * 2**20), abs=1e-3)  # a number of units
        draws = (released * n - np.array([7000, 7001])) / sigma
        fits = abs(draws - draws.astype(np.float32).astype(np.float64)) < 2e-13
        right += (7000 + int(np.argmax(fits)) if fits.sum() == 1 else 7000) == true
    assert abs(right - trials / 2) < 4.5 * np.sqrt(trials) / 2


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.5, 20.0])
def test_the_noise_of_a_score_is_what_its_event_says(sigma):
    score = PrivateScore(per_example=lambda _: np.full(10, 0.5), num_examples=10, noise_multiplier=sigma)
    drawn = np.array([score(None, key) * 10 - 5 for key in jax.random.split(jax.random.key(0), 1500)]) / sigma
    assert abs(drawn.mean()) < 4.5 / np.sqrt(1500)
    assert abs(drawn.std() - 1) < 4.5 / np.sqrt(3000)  # two thirds of the noise is 18 deviations away


def test_full_batches_beside_samples_of_fixed_size_are_charged_for_replacing():
    """Replacing an example moves a sum by twice as much as adding one does."""
    full, sample = (
        dp.GaussianDpEvent(4 / 10**0.5),
        dp.SampledWithoutReplacementDpEvent(1000, 10, dp.GaussianDpEvent(1e5)),
    )
    exact = gaussian_mechanism.get_epsilon_gaussian(4 / 10**0.5 / 2, 1e-5)
    for event in (
        dp.ComposedDpEvent([full, sample]),
        dp.ComposedDpEvent([dp.PoissonSampledDpEvent(1.0, full), sample]),
        dp.ComposedDpEvent([dp.ComposedDpEvent([dp.SelfComposedDpEvent(dp.GaussianDpEvent(4.0), 10)]), sample]),
    ):
        assert dpopt.epsilon_of_event(event, delta=1e-5, accountant="rdp") >= exact
    alone = dpopt.epsilon_of_event(full, delta=1e-5, accountant="rdp")
    assert alone < exact


def test_queries_inside_a_selection_are_charged_for_replacing_once():
    """The steps of a selection are flattened when the whole is, and again when its cost is computed."""
    sample = dp.SampledWithoutReplacementDpEvent(1000, 10, dp.GaussianDpEvent(1e5))

    def cost(*events):
        runs = dp.ComposedDpEvent([*events])
        return dpopt.epsilon_of_event(dp.dp_event.RepeatAndSelectDpEvent(runs, 5, 1), delta=1e-5, accountant="rdp")

    halved = cost(dp.GaussianDpEvent(4.0))
    assert cost(dp.GaussianDpEvent(8.0), sample) == pytest.approx(halved, rel=0.01)


def test_much_noise_in_a_sample_of_fixed_size_costs_next_to_nothing():
    event = dp.SampledWithoutReplacementDpEvent(1000, 10, dp.GaussianDpEvent(1e10))
    assert 0 <= dpopt.epsilon_of_event(event, delta=1e-5, accountant="rdp") < 0.01


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize(
    "sampler",
    [CyclicPoissonSampler(1000, 100, parts=4, seed=0), EpochSampler(1000, 250, seed=0)],
    ids=["cyclic", "all"],
)
@pytest.mark.one_in(6)
def test_steps_cost_as_much_wherever_they_start(sampler, start):
    """An event of later steps alone cost nothing if another step of the same part had come before."""
    privacy = Privacy((Query(0.5),))
    for steps in (1, 3, 9):
        cost = dpopt.epsilon_of_event(compose(privacy, sampler, steps, start=start), delta=1e-5)
        assert cost == dpopt.epsilon_of_event(compose(privacy, sampler, steps), delta=1e-5) > 5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_multipliers_of_16_bits_are_not_rounded_again(dtype):
    for norm in np.arange(1.0, 2.0, 0.07):
        for multiplier in np.arange(1.0, 2.0, 0.07):
            sigma, bound = jnp.asarray(multiplier, dtype), jnp.asarray(norm, dtype)
            assert float(noise_stddev(sigma, bound)) == pytest.approx(float(sigma) * float(bound), rel=1e-6)
    optimizer = dpopt.privatize(
        l2_clip_norm=1.3, noise_multiplier=jnp.asarray(1.1, dtype), expected_batch_size=1, key=jax.random.key(0)
    )
    stddev = next(t.stage.noise_stddev for t in optimizer.stages if t.stage.name == "add_gaussian_noise")
    assert optimizer.privacy.queries[0].multiplier(0) <= float(stddev) / 1.3 * (1 + 1e-6)


@pytest.mark.parametrize("count", [2, 3, 5, 7, 13])
@pytest.mark.slow
def test_shares_of_a_clip_norm_of_16_bits_are_not_rounded_up(count):
    clip = dpopt.LayerwiseClip(jnp.asarray(1.0, jnp.bfloat16))
    params = {str(i): jnp.zeros(1) for i in range(count)}

    def loss(params, x):
        return sum(jnp.sum(p * x[i]) for i, p in enumerate(params.values()))

    for engine in ("ghost", "vmap"):
        promise = dpopt.per_example_grads(loss, engine=engine)(params, jnp.full((1, count), 5.0), mask=None)
        total = promise.clipped_sum(clip).sum
        assert np.sqrt(sum(float(v[0]) ** 2 for v in total.values())) <= float(clip.sensitivity) * (1 + 2.0**-12)


@pytest.mark.slow
def test_what_was_spent_for_examples_is_not_counted_for_users():
    def builder(**options):
        given = {"num_examples": 100, "expected_batch_size": 10, "steps": 1, "key": dpopt.secure_key()}
        return dpopt.Builder(**given, **options).clip(1.0)

    first = builder().noise(10.0).then(optax.sgd(0.1)).build()
    result = first.run(lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(2), np.ones((100, 2), np.float32), progress=False)
    with pytest.raises(ValueError, match="records are examples, and these are users"):
        builder(unit="user").budget(epsilon=2.0, delta=1e-4, earlier=result)
    event = builder().budget(epsilon=2.0, delta=1e-4, earlier=result)._budget.earlier
    assert event == result.ledger.event
    second = builder().budget(epsilon=2.0, delta=1e-4, earlier=result).then(optax.sgd(0.1)).build()
    ran = second.run(lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(2), np.ones((100, 2), np.float32), progress=False)
    third = builder().budget(epsilon=3.0, delta=1e-4, earlier=ran)._budget.earlier
    assert third.events == [event, ran.ledger.event]  # what the second counted as earlier, too


def test_a_secure_seed_has_128_bits():
    seeds = [dpopt.secure_seed() for _ in range(64)]
    assert len({*seeds}) == 64 and 120 < max(seeds).bit_length() <= 128
    sampler = dpopt.PoissonSampler(100, 10, seed=seeds[0])
    np.testing.assert_array_equal(sampler.drawn(3), dpopt.PoissonSampler(100, 10, seed=seeds[0]).drawn(3))
