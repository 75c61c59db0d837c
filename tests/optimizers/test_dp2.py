"""DP2 and its ablations: limits, privacy, jit and scan, bad batches, bad input."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_runs import find_state, tiny_batch, tiny_loss, tiny_params
from helpers import assert_identical, assert_near, dot_loss, paid, privacy_four, slow_unless

import dpopt
from dpopt.chain import NoiseAware
from dpopt.optimizers.baselines.noise_first import dp2_noise_first
from dpopt.optimizers.baselines.two_queries import TwoQueriesState, dp2_extra_query
from dpopt.optimizers.dp2 import dp2, scale_by_phase_learning_rate
from dpopt.preconditioners.delayed import DelayedMomentsState, delayed_moments


def moments_in(state):
    return find_state(state, DelayedMomentsState, TwoQueriesState)


# --- limits -------------------------------------------------------------------------------------------------------

DP2 = dict(adaptive_learning_rate=0.02, adaptive_l2_clip_norm=4.0, delay=2, eps=1e-3)


def train(optimizer, steps, params=None, batch=None, mask=None, engine="auto"):
    params = tiny_params() if params is None else params
    step = jax.jit(dpopt.make_train_step(tiny_loss, optimizer, engine=engine))
    state = optimizer.init(params)
    for _ in range(steps):
        params, state, _ = step(params, state, tiny_batch() if batch is None else batch, mask)
    return params, state


@pytest.mark.slow
@pytest.mark.parametrize("make", [dp2, dp2_noise_first])
def test_delay_longer_than_the_run_is_dp_sgd(make):
    changes = {**DP2, "delay": (9, 1)}
    if make is dp2_noise_first:
        del changes["adaptive_l2_clip_norm"]
    slow, _ = train(make(0.1, **privacy_four(), **changes), 9)
    sgd, _ = train(dpopt.dp_sgd(0.1, **privacy_four()), 9)
    assert_identical(slow, sgd)
    adaptive, _ = train(make(0.1, **privacy_four(), **{**changes, "delay": (8, 1)}), 9)
    with pytest.raises(AssertionError):
        assert_identical(adaptive, sgd)


@pytest.mark.parametrize("norms", [(1.0, math.inf), (math.inf, 1.0)])
@pytest.mark.parametrize("make", [dp2, dp2_extra_query])
def test_clip_norms_are_both_finite_or_both_infinite(make, norms):
    settings = {**DP2, "adaptive_l2_clip_norm": norms[1]}
    with pytest.raises(ValueError, match="both be finite, or both infinite"):
        make(0.1, **privacy_four(l2_clip_norm=norms[0], noise_multiplier=0.0), **settings)


def test_extra_query_runs_without_clip_and_noise():
    four = privacy_four(l2_clip_norm=math.inf, noise_multiplier=0.0)
    params, _ = train(dp2_extra_query(0.01, **{**DP2, "adaptive_l2_clip_norm": math.inf}, **four), 5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


# --- privacy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dp2, dp2_noise_first])
def test_one_gaussian_a_step(count_draws, make):
    settings = {k: v for k, v in DP2.items() if make is dp2 or k != "adaptive_l2_clip_norm"}
    opt = make(0.1, **privacy_four(noise_multiplier=1.7), **settings)
    assert {opt.privacy.step_event(t) for t in range(8)} == {dpopt.privacy.dp_accounting.GaussianDpEvent(paid(1.7))}
    jax.eval_shape(lambda: train(opt, 1))
    assert len(count_draws) == 1


@pytest.mark.slow
def test_extra_query_asks_twice_except_when_it_refreshes(count_draws):
    opt = dp2_extra_query(0.1, **privacy_four(noise_multiplier=1.7), **{**DP2, "delay": 3})
    gaussian = dpopt.privacy.dp_accounting.GaussianDpEvent(paid(1.7))
    for t in range(7):
        event = opt.privacy.step_event(t)
        assert event == gaussian if t % 3 == 0 else event.events == [gaussian, gaussian]
    params = {"w": jnp.zeros(2)}
    opt.update({"w": jnp.ones((4, 2))}, opt.init(params), params)
    assert len(count_draws) == 2


def test_extra_query_costs_more_than_one_query_and_less_than_all_twice():
    spent = [
        dpopt.epsilon_of_event(dpopt.privacy_event(opt, sampling=dpopt.sampling.Poisson(0.1), steps=20), delta=1e-5)
        for opt in (
            dpopt.dp_sgd(0.1, **privacy_four()),
            dp2_extra_query(0.1, **privacy_four(), **{**DP2, "delay": 5}),
            dpopt.dp_sgd(0.1, **privacy_four(noise_multiplier=1 / math.sqrt(2))),  # equal to the two queries
        )
    ]
    assert spent[0] < spent[1] < spent[2]


def test_extra_query_draws_two_independent_noises():
    size = 40_000
    settings = {**DP2, "adaptive_l2_clip_norm": 1.0, "eps": 1.0}
    opt = dp2_extra_query(1.0, **privacy_four(), **{**settings, "adaptive_learning_rate": 1.0})
    params = {"w": jnp.zeros(size)}
    state = opt.init(params)
    nothing = {"w": jnp.zeros((4, size))}
    _, state = opt.update(nothing, state, params)
    updates, state = opt.update(nothing, state, params)
    plain, adaptive = moments_in(state).total["w"], -updates["w"]
    np.testing.assert_allclose([jnp.std(plain), jnp.std(adaptive)], 0.25, rtol=0.02)
    assert abs(np.corrcoef(plain, adaptive)[0, 1]) < 0.02


def test_noise_of_each_phase_is_in_proportion_to_its_clip_norm():
    opt = dp2(1.0, **privacy_four(noise_multiplier=2.0), **{**DP2, "adaptive_learning_rate": 1.0})
    params = {"w": jnp.zeros(40_000)}
    state = opt.init(params)
    for t in range(4):
        updates, state = opt.update({"w": jnp.zeros((4, 40_000))}, state, params)
        clip_norm = 1.0 if t < 2 else 4.0
        np.testing.assert_allclose(jnp.std(updates["w"]), 2.0 * clip_norm / 4, rtol=0.02)


def test_one_example_moves_an_adaptive_step_by_at_most_its_clip_norm():
    settings = {**DP2, "adaptive_learning_rate": 1.0}
    opt = dp2(1.0, **privacy_four(noise_multiplier=0.0, expected_batch_size=1), **settings)
    params = {"w": jnp.zeros(3)}
    state = opt.init(params)
    for _ in range(2):
        _, state = opt.update({"w": jnp.array([[0.3, 0.0, -1e-3]])}, state, params)
    with_it, _ = opt.update({"w": jnp.array([[0.1, 0.0, 0.0], [5.0, 7.0, -9.0]])}, state, params)
    without, _ = opt.update({"w": jnp.array([[0.1, 0.0, 0.0]])}, state, params)
    np.testing.assert_allclose(np.linalg.norm(with_it["w"] - without["w"]), 4.0, rtol=1e-5)


def test_the_next_stage_is_told_the_noise_of_its_phase():
    seen = []

    def listen(updates, state, params=None, *, noise_stddev, **extra):
        seen.append([float(x) for x in jax.tree.leaves(noise_stddev)])
        return updates, state

    core = dpopt.privatize(**privacy_four(), preconditioner=delayed_moments(1, adaptive_clip_ratio=3.0))
    opt = dpopt.chain(core, NoiseAware(lambda p: (), listen))
    params = {"w": jnp.zeros(2)}
    state = opt.init(params)
    for _ in range(2):
        _, state = opt.update({"w": jnp.ones((4, 2))}, state, params)
    np.testing.assert_allclose(seen, [[0.25], [0.75]])


# --- jit, scan, dtypes, bad batches -------------------------------------------------------------------------------


def named():
    return {
        "dp2": dp2(0.1, **privacy_four(), **DP2),
        "corrected": dp2(0.1, correct_noise=True, rule="yogi", **privacy_four(), **DP2),
        "noise_first": dp2_noise_first(0.1, adaptive_learning_rate=0.02, delay=2, eps=1e-3, **privacy_four()),
        "extra_query": dp2_extra_query(0.1, **privacy_four(), **DP2),
        "scheduled": dp2(
            optax.linear_schedule(0.1, 0.0, 9), **privacy_four(),
            **{**DP2, "adaptive_learning_rate": optax.linear_schedule(0.02, 0.0, 9)},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", named())
@pytest.mark.slow
def test_scan_equals_a_loop(either_precision, name):
    opt = named()[name]
    step = dpopt.make_train_step(tiny_loss, opt, engine="vmap")
    params = tiny_params()

    def body(carry, _):
        return step(*carry, tiny_batch(), mask=None)[:2], None

    scanned, _ = jax.lax.scan(body, (params, opt.init(params)), length=9)
    looped = train(opt, 9)
    assert_near(scanned[0], looped[0], rtol=1e-5)
    assert int(moments_in(scanned[1]).count) == 9
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype, scanned, (params, opt.init(params))))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", slow_unless({"dp2", "noise_first", "extra_query"}, named()))
def test_bfloat16_parameters_keep_float32_moments(name):
    opt = named()[name]
    params, state = train(opt, 5, params=tiny_params(dtype=jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    kept = jax.tree.leaves((moments_in(state).v, moments_in(state).total))
    assert {leaf.dtype for leaf in kept} == {jnp.dtype(jnp.float32)}
    assert all(np.isfinite(leaf.astype(jnp.float32)).all() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", named())
@pytest.mark.slow
def test_nan_examples_count_as_absent(name):
    batch = tiny_batch()
    spoiled = jax.tree.map(lambda x: x.at[1].set(jnp.nan), batch)
    mask = jnp.array([True, False, True, True])
    # On the engine that drops both in the same way: ghost repeats a batch with NaN, with sums in another order.
    spoiled_params, _ = train(named()[name], 6, batch=spoiled, engine="vmap")
    masked_params, _ = train(named()[name], 6, batch=batch, mask=mask, engine="vmap")
    assert_identical(spoiled_params, masked_params)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", named())
def test_empty_batches_still_step_and_stay_finite(name):
    params, state = train(named()[name], 6, mask=jnp.zeros(4, bool))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, moments_in(state).v)))
    with pytest.raises(AssertionError):
        assert_identical(params, tiny_params())


def test_promises_and_stacked_gradients_give_the_same_run():
    opt = dp2(0.1, **privacy_four(), **DP2)
    grads = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(5, 4, 3)), jnp.float32)}
    paths = []
    for promised in (False, True):
        params, path = {"w": jnp.zeros(3)}, []
        state = opt.init(params)
        for t in range(5):
            batch = jax.tree.map(lambda x, t=t: x[t], grads)
            g = dpopt.per_example_grads(dot_loss)(params, batch, mask=None) if promised else batch
            updates, state = opt.update(g, state, params)
            params = optax.apply_updates(params, updates)
            path.append(params)
        paths.append(path)
    assert_near(*paths)


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (dict(delay=0), ValueError, "delay must be at least 1; got 0"),
        (dict(delay=-3), ValueError, "delay must be at least 1; got -3"),
        (dict(delay=2.5), TypeError, "delay must be an integer; got 2.5"),
        (dict(delay=(2, 0)), ValueError, r"delay\[1\] must be at least 1; got 0"),
        (dict(delay=(1, 2, 3)), ValueError, "delay must be an integer, or two"),
        (dict(rule="adam"), ValueError, "rule must be one of 'rmsprop', 'adagrad', 'yogi'; got 'adam'"),
        (dict(decay=1.0), ValueError, r"decay must lie in \[0, 1\); got 1.0"),
        (dict(eps=0.0), ValueError, "eps must be positive and finite; got 0.0"),
        (dict(adaptive_l2_clip_norm=0.0), ValueError, "adaptive_l2_clip_norm must be positive; got 0.0"),
        (dict(adaptive_l2_clip_norm=math.nan), ValueError, "adaptive_l2_clip_norm must be positive; got nan"),
        (dict(weight_decay=-1.0), ValueError, "weight_decay must be non-negative and finite; got -1.0"),
    ],
)
def test_bad_arguments_are_named(changes, error, match):
    with pytest.raises(error, match=match):
        dp2(0.1, **privacy_four(), **{**DP2, **changes})


@pytest.mark.parametrize(
    "changes", [dict(delay=0), dict(delay=(2, 2)), dict(rule="adam"), dict(eps=0.0), dict(decay=1)]
)
def test_bad_arguments_of_the_extra_query(changes):
    with pytest.raises((ValueError, TypeError), match=next(iter(changes))):
        dp2_extra_query(0.1, **privacy_four(), **{**DP2, **changes})


def test_feedback_needs_a_chain_of_ours():
    by_hand = optax.chain(
        dpopt.precondition(delayed_moments(2)),
        dpopt.clip_and_sum(1.0),
        dpopt.add_gaussian_noise(1.0, jax.random.key(0)),
    )
    params = {"w": jnp.zeros(2)}
    with pytest.raises(ValueError, match=r"Build the optimizer with dpopt.chain"):
        by_hand.update({"w": jnp.ones((4, 2))}, by_hand.init(params), params)


def test_correcting_unknown_noise_is_refused():
    moments = delayed_moments(2, correct_noise=True)
    with pytest.raises(ValueError, match="correct_noise=True needs the standard deviation"):
        moments.observe(moments.init(jnp.zeros(2)), jnp.zeros(2), None)


def test_phase_rates_alternate():
    rates = scale_by_phase_learning_rate(1.0, lambda step: 10.0 * step, delay=(2, 1))
    state, seen = rates.init(None), []
    for _ in range(6):
        u, state = rates.update(jnp.ones(()), state)
        seen.append(float(u))
    assert seen == [-1, -1, -20, -1, -1, -50]
