"""Mistakes of other libraries. Each test is named after one; its docstring states what went wrong, and where.

Those with more tests elsewhere are here in short form, so that the list is complete in one place, except for those of
the ghost engine (sequence biases, tied weights), which are in tests/ghost.
"""

import inspect

import dp_accounting as dp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical, assert_near, dot_loss, mlp_batch, mlp_loss, mlp_params, norm, paid, privacy_four

import dpopt
from dpopt import noise
from dpopt.privacy import Privacy, Query, Relation

W = jnp.zeros(2)


def private_sum(grads, c=1.0, mask=None, **kwargs):
    return dpopt.per_example_grads(dot_loss, **kwargs)(W, grads, mask=mask).clipped_sum(dpopt.FlatClip(c)).sum


def test_clipping_the_mean_of_a_microbatch():
    """A microbatch was averaged and clipped as one, so one example could move the sum twice as far (tf privacy 620)."""
    pair = jnp.array([[100.0, 0.0], [-100.0, 0.0], [0.0, 100.0], [0.0, 100.0]])
    total = private_sum(pair, microbatch_size=2)
    assert_near(total, np.array([0.0, 2.0]))  # clip of the two means would give (0, 1)


def test_clip_norm_ignored_by_an_engine():
    """A fast path ignored the clip norm (opacus 664)."""
    for engine in ("auto", "vmap"):
        for c in (0.1, 10.0):
            assert abs(norm(private_sum(jnp.array([[300.0, 400.0]]), c, engine=engine)) - c) <= 1e-6 * c


@pytest.mark.slow
def test_padding_dilutes_the_loss():
    """Means over padded rows made every gradient smaller (opacus 808)."""
    real, padded = mlp_batch(3), jax.tree.map(lambda x: jnp.concatenate([x, 0 * x]), mlp_batch(3))
    opt, params = dpopt.dp_sgd(1.0, **privacy_four(noise_multiplier=0.0)), mlp_params()
    step = dpopt.make_train_step(mlp_loss, opt)
    mask = np.arange(6) < 3
    new, _, metrics = step(params, opt.init(params), padded, mask)
    expected, _, expected_metrics = step(params, opt.init(params), real, mask=None)
    assert_near(new, expected)
    assert_near(metrics.loss, expected_metrics.loss)


def test_one_bad_example_poisons_the_parameters():
    """NaN, Inf or an empty batch turned parameters into NaN (optax contrib dpsgd)."""
    opt = dpopt.dp_adam(0.1, **privacy_four())
    step = dpopt.make_train_step(dot_loss, opt)
    for batch in ([[np.nan, 1.0], [1.0, 1.0]], [[np.inf, 1.0], [1.0, 1.0]], np.zeros((0, 2))):
        new, _, _ = step(W, opt.init(W), jnp.array(batch), mask=None)
        assert np.isfinite(new).all()
    assert int(step(W, opt.init(W), jnp.array([[np.nan, 1.0], [1.0, 1.0]]), mask=None)[2].num_nonfinite) == 1


def test_a_skipped_padding_microbatch_keeps_stale_values():
    """Microbatches of only padding kept the values of an earlier one (jax_privacy 223)."""
    batch = jnp.array([[3.0, 4.0], [0.3, 0.4], [9.0, 9.0], [9.0, 9.0], [9.0, 9.0], [9.0, 9.0]])
    made = dpopt.per_example_grads(dot_loss, microbatch_size=2)(W, batch, mask=np.arange(6) < 2)
    assert_near(made.clipped_sum(dpopt.FlatClip(1.0)).sum, np.array([0.9, 1.2]))
    assert made.sensitive.is_example.tolist() == [True, True] + [False] * 4


def test_zero_times_infinity_before_the_clip():
    """A diagonal of 1 / 0 met a gradient of 0 and made NaN (jax_privacy 396)."""
    for scale in (np.inf, 0.0, np.nan, -1.0):
        with pytest.raises(ValueError, match="scale must be positive and finite"):
            dpopt.precondition_by_side_information(scale)
    grads = dpopt.per_example_grads(dot_loss)(W, jnp.array([[0.0, 1.0], [0.3, 0.4]]), mask=None).scale(
        jnp.array([np.inf, 1.0])
    )
    assert_near(grads.clipped_sum(dpopt.FlatClip(1.0)).sum, np.zeros(2))  # dropped and counted, not NaN
    assert not grads.sensitive.is_finite.any()


def test_replace_one_is_twice_add_or_remove():
    """Sensitivity and accountant were for different neighbouring relations (google differential-privacy 378)."""
    a, b = jnp.array([[5.0, 0.0]]), jnp.array([[-5.0, 0.0]])
    assert norm(private_sum(a) - private_sum(b)) == pytest.approx(2.0)
    privacy = Privacy((Query(1.0),))
    assert privacy.step_event(0, Relation.REPLACE_ONE).noise_multiplier == paid(0.5)
    assert dpopt.PoissonSampler(4, 2, seed=0).scheme.relation is Relation.ADD_OR_REMOVE_ONE
    assert dpopt.FixedSizeSampler(4, 2, seed=0).scheme.relation is Relation.REPLACE_ONE


def test_noise_for_the_sum_added_to_the_mean():
    """Noise for the sum was added to the mean, or the reverse: off by the batch size (jax_privacy 383)."""
    opt = dpopt.dp_sgd(1.0, **privacy_four(noise_multiplier=3.0, l2_clip_norm=2.0, expected_batch_size=50))
    params = jnp.zeros(20_000)
    updates, _ = opt.update(jnp.zeros((1, 20_000)), opt.init(params), params)
    assert float(updates.std()) == pytest.approx(3.0 * 2.0 / 50, rel=0.03)  # six standard errors
    with pytest.raises(ValueError, match="comes before the noise, which is calibrated to the sum"):
        dpopt.chain(dpopt.clip_and_sum(1.0), dpopt.normalize_by(4), dpopt.add_gaussian_noise(1.0, jax.random.key(0)))


def test_one_key_for_all_leaves():
    """Leaves of the same shape got the same noise (jax 3646)."""
    draw = noise.standard_normal_like(jax.random.key(0), {"a": jnp.zeros(9), "b": jnp.zeros(9)})
    assert not np.isclose(draw["a"], draw["b"]).any()


def test_the_same_key_twice():
    """Every step drew the same noise (optax 148)."""
    opt = dpopt.dp_sgd(1.0, **privacy_four())
    first, state = opt.update(jnp.zeros((1, 2)), opt.init(W), W)
    second, _ = opt.update(jnp.zeros((1, 2)), state, W)
    assert not np.isclose(first, second).any()


def test_noise_once_a_microbatch(count_draws):
    """Accumulating microbatches added noise for each of them (optax 527)."""
    opt = dpopt.dp_sgd(1.0, **privacy_four())
    dpopt.make_train_step(dot_loss, opt, microbatch_size=2)(W, opt.init(W), jnp.ones((8, 2)), mask=None)
    assert len(count_draws) == 1


def test_noise_depends_on_the_layout_of_devices():
    """Noise per device is too much or, with one key, the same on all devices; JAX must draw by position instead."""
    assert jax.config.jax_threefry_partitionable


def test_noise_of_one_sigma_accounted_for_as_another():
    """The optimizer was built before sigma was calibrated, and its noise stayed at the old value."""
    sigma = dpopt.calibrate(epsilon=2.0, delta=1e-5, sampling_prob=0.04, steps=50)
    opt = dpopt.dp_sgd(1.0, **privacy_four(noise_multiplier=sigma))
    event = dpopt.privacy_event(opt, sampling=dpopt.PoissonSampler(100, 4, seed=0), steps=50)
    assert 1.99 < dpopt.epsilon_of_event(event, delta=1e-5) <= 2.0
    params = jnp.zeros(20_000)
    updates, _ = opt.update(jnp.zeros((1, 20_000)), opt.init(params), params)
    assert float(updates.std()) == pytest.approx(sigma / 4, rel=0.03)  # six standard errors


def test_a_second_query_not_paid_for():
    """The count query of quantile clipping was not accounted for (tff 1080; opacus 807)."""
    two, one = Privacy((Query(1.0), Query(10.0))), Privacy((Query(1.0),))
    costs = [
        dpopt.epsilon_of_event(dpopt.events.compose(p, dpopt.PoissonSampler(100, 4, seed=0), 50), delta=1e-5)
        for p in (two, one)
    ]
    assert costs[0] > costs[1]
    clip = dpopt.adaptive.quantile_clip(1.0, count_share=0.1)
    queries = dpopt.dp_sgd(1.0, **privacy_four(l2_clip_norm=clip, noise_multiplier=2.0)).privacy.queries
    assert [q.multiplier(0) for q in queries] == pytest.approx([2.0 * 0.9**-0.5, 2.0 * 0.1**-0.5])


def test_sigma_adjusted_on_one_side_only():
    """The count query increased the noise but not the accounted sigma, or the reverse (opacus 807)."""
    clip = dpopt.adaptive.quantile_clip(1.0, count_share=0.19, learning_rate=0.0)
    opt = dpopt.dp_sgd(1.0, **privacy_four(noise_multiplier=3.0, l2_clip_norm=clip, expected_batch_size=50))
    params = jnp.zeros(20_000)
    updates, _ = opt.update(jnp.zeros((1, 20_000)), opt.init(params), params)
    assert float(updates.std()) == pytest.approx(3.0 / 0.9 / 50, rel=0.03)  # six standard errors
    assert dpopt.events.merged(opt.privacy.step_event()).noise_multiplier == pytest.approx(paid(3.0))


@pytest.mark.parametrize("z", [1e-3, 1.0, 1e3])
def test_the_counts_leave_nothing_for_the_gradients(z):
    """A count noise that was too small for the budget gave a complex standard deviation (opacus 757)."""
    multiplier, count_stddev = dpopt.adaptive.quantile_clip({"a": 1.0, "b": 1.0}, count_share=0.999).split(z)
    assert z < multiplier < np.inf and z / np.sqrt(2) < count_stddev < np.inf
    for share in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match="count_share"):
            dpopt.adaptive.quantile_clip(1.0, count_share=share)


def test_a_poisson_sample_of_a_fixed_size():
    """A sampler called Poisson drew batches of the wrong size distribution, without replacement (jax_privacy 121)."""
    sizes = np.array([len(dpopt.PoissonSampler(400, 20, seed=0).drawn(t)) for t in range(2000)])
    assert sizes.var() == pytest.approx(400 * 0.05 * 0.95, rel=0.13)  # four standard errors


def test_poisson_epsilon_for_batches_that_are_not_poisson():
    """Shuffled or fixed-size batches were reported with the epsilon of Poisson sampling (jax_privacy 272)."""
    opt = dpopt.dp_sgd(1.0, **privacy_four())
    event = dpopt.privacy_event(opt, sampling=dpopt.FixedSizeSampler(100, 4, seed=0), steps=5)
    assert isinstance(event.event, dp.SampledWithoutReplacementDpEvent)
    with pytest.raises(ValueError, match="sampling without replacement"):
        dpopt.epsilon_of_event(event, delta=1e-5)


@pytest.mark.slow
def test_a_sample_cut_to_fit_is_reported_as_poisson():
    """Samples were truncated to a fixed size, with the epsilon of Poisson samples (jax_privacy 121)."""
    with pytest.raises(ValueError, match=r"privacy guarantee: .*dpopt\.samplers\.truncated"):
        dpopt.PoissonSampler(20, 19, seed=0).batch(0, size=10)
    cut = dpopt.truncated.TruncatedPoissonSampler(20, 10, max_batch_size=10, seed=0)
    costs = [
        dpopt.epsilon_of_event(
            dpopt.privacy_event(dpopt.dp_sgd(1.0, **privacy_four()), sampling=scheme, steps=5), delta=1e-5
        )
        for scheme in (cut.scheme, dpopt.sampling.Poisson(0.5))
    ]
    assert costs[0] > 1.2 * costs[1]


def test_a_clip_of_examples_passes_for_one_of_users():
    """User-level epsilon was stated for examples clipped one by one (seen in published research code)."""
    server = dpopt.users.user_level(dpopt.dp_sgd(1.0, **privacy_four()))
    single = dpopt.per_example_grads(dot_loss)(W, jnp.ones((4, 2)), mask=None)
    with pytest.raises(TypeError, match="states its privacy for users"):
        server.update(single, server.init(W), W)


def test_an_empty_batch_crashes_or_is_free():
    """An empty Poisson batch crashed, or was skipped and not accounted for (opacus 161)."""
    opt = dpopt.dp_sgd(1.0, **privacy_four())
    step = dpopt.make_train_step(dot_loss, opt)
    for batch, mask in ((jnp.zeros((0, 2)), None), (jnp.ones((4, 2)), np.zeros(4, bool))):
        new, state, _ = step(W, opt.init(W), batch, mask)
        assert np.isfinite(new).all() and (np.abs(new) > 0).all()
        assert int(optax.tree.get(state, "count")) == 1


def test_dividing_by_the_realised_batch_size():
    """The realised size of a Poisson batch is private; dividing by it also breaks the bound on sensitivity."""
    opt = dpopt.dp_sgd(1.0, **privacy_four(noise_multiplier=0.0, expected_batch_size=4))
    for size in (1, 2, 8):
        updates, _ = opt.update(jnp.ones((size, 2)) * 0.1, opt.init(W), W)
        assert_near(updates, -0.1 * size / 4 * np.ones(2))


def test_step_units_off_by_the_accumulation_factor():
    """Microbatches were counted as steps, or steps as microbatches (jax_privacy 288, 234)."""
    opt = dpopt.dp_sgd(1.0, **privacy_four())
    counts = {}
    for microbatch_size in (None, 1, 4):
        step = dpopt.make_train_step(dot_loss, opt, microbatch_size=microbatch_size)
        _, state, _ = step(W, opt.init(W), jnp.ones((8, 2)), mask=None)
        counts[microbatch_size] = int(optax.tree.get(state, "count"))
    assert set(counts.values()) == {1}


def test_asking_for_epsilon_changes_the_history():
    """A call that should only read changed the history of the accountant (opacus 535)."""
    ledger = dpopt.Ledger()
    ledger.record(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.0)), count=5)
    before = ledger.to_json()
    assert ledger.epsilon(delta=1e-5) == ledger.epsilon(delta=1e-5) and ledger.to_json() == before


@pytest.mark.one_in(3)
@pytest.mark.parametrize("target", [0.3, 2.0, 8.0])
def test_calibration_overshoots(target):
    """Calibration returned a sigma whose epsilon was above the target (opacus 346; private-transformers 8)."""
    run = dict(sampling_prob=0.02, steps=300, delta=1e-5)
    sigma = dpopt.calibrate(epsilon=target, **run)
    assert 0.98 * target < dpopt.epsilon(noise_multiplier=sigma, **run) <= target


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_is_negative_or_zero_at_extreme_orders(accountant):
    """Cancellation at extreme orders gave an epsilon of zero or below (opacus 844, tf privacy 166)."""
    for sigma, q in ((0.1, 1e-4), (0.4, 1e-6), (20.0, 0.5)):
        run = dict(noise_multiplier=sigma, sampling_prob=q, steps=100, delta=1e-8)
        assert dpopt.epsilon(**run, accountant=accountant) > 0


def test_the_best_of_several_runs_at_the_price_of_one():
    """Settings were chosen by trials on private data, and the last run's epsilon was reported (most research code)."""
    run = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(2.0)), 50)
    found = dpopt.tuning.repeat_and_select(
        lambda setting, key: setting,
        [1, 2],
        event=run,
        score=dpopt.tuning.PublicScore(float, data="none"),
        num_trials=dpopt.tuning.NumTrials(4.0),
        key=jax.random.key(0),
        num_examples=1_000,
    )
    one = dpopt.epsilon_of_event(run, delta=1e-4, accountant="rdp")
    assert 1.3 * one < found.epsilon(delta=1e-4) < 4 * one


def test_no_noise_crashes_the_accountant():
    """Without noise the accountant divided by zero instead of reporting infinity (jax_privacy 255)."""
    for accountant in ("pld", "rdp"):
        run = dict(noise_multiplier=0.0, sampling_prob=0.1, steps=3, delta=1e-5)
        assert dpopt.epsilon(**run, accountant=accountant) == np.inf


def test_state_is_lost_by_save_and_load():
    """Accountants and algorithms lost their position on saving (opacus 778, pfl-research 114)."""
    ledger = dpopt.Ledger()
    ledger.record(dp.GaussianDpEvent(1.0), count=3)
    assert dpopt.Ledger.from_json(ledger.to_json()) == ledger
    opt = dpopt.dp_adam(0.1, **privacy_four(key=jax.random.PRNGKey(0)))
    _, state = opt.update(jnp.ones((2, 2)), opt.init(W), W)
    leaves, structure = jax.tree.flatten(state)
    stored = jax.tree.unflatten(structure, [np.array(leaf) for leaf in leaves])
    again, there = (opt.update(jnp.ones((2, 2)), s, W) for s in (stored, state))
    assert_identical(again, there)


def test_raw_gradients_in_the_state():
    """A checkpoint held un-noised gradients or moments; test_optimizers checks every optimizer for it."""
    from test_optimizers import EVERY, ROWS, test_nothing_that_was_not_noised_reaches_state_or_parameters

    assert test_nothing_that_was_not_noised_reaches_state_or_parameters and len(EVERY.args[1]) >= 7
    assert set(EVERY.args[1]) <= set(ROWS)


def test_private_statistics_as_side_information_say_so():
    """Token counts of the private data were used as a diagonal and not accounted for: the documentation warns."""
    for function in (dpopt.side_information, dpopt.precondition_by_side_information):
        assert "*Privacy*" in function.__doc__
    assert "private training set are not public" in " ".join(inspect.getdoc(dpopt.side_information).split())


def test_per_example_losses_pass_for_private():
    """Raw losses and norms were logged as if they were private: here the names of their types warn."""
    opt = dpopt.dp_sgd(1.0, **privacy_four())
    _, state, metrics = dpopt.make_train_step(dot_loss, opt)(W, opt.init(W), jnp.ones((3, 2)), mask=None)
    assert type(metrics).__name__.startswith("Sensitive")
    made = dpopt.per_example_grads(dot_loss)(W, jnp.ones((3, 2)), mask=None)
    made.clipped_sum(dpopt.FlatClip(1.0))
    assert type(made.sensitive).__name__.startswith("Sensitive")
    assert {leaf.shape for leaf in jax.tree.leaves(state)} <= {(), (2,)}  # nothing per example is kept
