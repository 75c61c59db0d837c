"""Diagnostics: values from the papers, the bound against simulation, quantiles, staleness."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical, enable_x64, privacy_four

import dpopt
import dpopt.optimizers.adam_bc
from dpopt import diagnostics
from dpopt.gradients import stacked_grads

SNLI = 0.4 * 0.1 / 256  # sigma C / B


# --- DP-Adam as DP-SGD with momentum ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma, clip, limit", [(0.4, 0.1, 0.64), (1.0, 1.0, 0.0256)])
def test_schedule_tends_to_the_papers_values(sigma, clip, limit):
    schedule = diagnostics.sgdm_learning_rate_schedule(1e-3, b1=0.9, noise_stddev=sigma * clip / 256)
    assert float(schedule(10_000)) == pytest.approx(limit, rel=1e-5)
    assert float(schedule(0)) == pytest.approx(10 * limit, rel=1e-5)  # t = 1: (1 - b1) / (1 - b1^1) = 1
    assert float(schedule(2)) == pytest.approx(limit / (1 - 0.9**3), rel=1e-5)


def test_schedule_of_schedules_under_jit():
    schedule = diagnostics.sgdm_learning_rate_schedule(
        optax.linear_schedule(1e-3, 0.0, 10), b1=0.5, noise_stddev=lambda step: 1.0 / (1 + step)
    )
    t = 4
    expected = (1e-3 * 0.6) * 0.5 / ((1 - 0.5**5) * (1 / 5))
    assert float(jax.jit(schedule)(t)) == pytest.approx(expected, rel=1e-5)


def test_dp_adam_follows_sgd_with_momentum_where_noise_dominates(x64):
    """The two trajectories stay together on zero gradients, where everything is noise."""
    sigma, steps, d = 1.0, 400, 3_000
    four = privacy_four(noise_multiplier=sigma, expected_batch_size=1)
    schedule = diagnostics.sgdm_learning_rate_schedule(1e-3, b1=0.9, noise_stddev=sigma)
    ends = []
    for opt in (dpopt.dp_adam(1e-3, **four), dpopt.dp_sgd(schedule, momentum=0.9, **four)):

        def step(carry, _, opt=opt):
            params, state = carry
            updates, state = opt.update(jnp.zeros((1, d)), state, params)
            return (optax.apply_updates(params, updates), state), updates

        _, updates = jax.jit(lambda p, s=step, o=opt: jax.lax.scan(s, (p, o.init(p)), length=steps))(jnp.zeros(d))
        ends.append(jnp.sum(updates[100:], axis=0))  # the first steps' second moments are still rough
    cosine = jnp.sum(ends[0] * ends[1]) / jnp.linalg.norm(ends[0]) / jnp.linalg.norm(ends[1])
    ratio = jnp.linalg.norm(ends[0]) / jnp.linalg.norm(ends[1])
    assert cosine > 0.99 and abs(ratio - 1) < 0.1


# --- Proposition 3 ----------------------------------------------------------------------------------------------------


def test_bound_has_the_papers_value():
    bound = diagnostics.second_moment_error_bound(noise_stddev=SNLI, b2=0.999, step=10_000, failure_prob=0.05)
    assert bound == pytest.approx(5.933e-9, rel=1e-4)
    # Table 3: t = 10, 100, 1000, 10000.
    table = [diagnostics.second_moment_error_bound(noise_stddev=SNLI, step=10**k) for k in (1, 2, 3, 4)]
    np.testing.assert_allclose(table, [8.388e-08, 2.654e-08, 8.725e-09, 5.933e-09], rtol=1e-3)


def test_bound_has_both_branches():
    """With one draw, or a small failure probability, the exponential tail dominates."""
    phi = 4.0
    bound = diagnostics.second_moment_error_bound(noise_stddev=2.0, b2=0.9, step=1, failure_prob=1e-6)
    assert bound == pytest.approx(2 * 4 * phi * np.log(2e6), rel=1e-9)
    traced = jax.jit(lambda t: diagnostics.second_moment_error_bound(noise_stddev=2.0, b2=0.9, step=t))(50.0)
    assert float(traced) == pytest.approx(diagnostics.second_moment_error_bound(noise_stddev=2.0, b2=0.9, step=50))


def test_bound_holds_in_simulation_and_is_not_vacuous():
    s, b2, t = 0.5, 0.99, 300
    z = s * np.random.default_rng(0).normal(size=(t, 4_000))
    weights = (1 - b2) * b2 ** np.arange(t - 1, -1, -1) / (1 - b2**t)
    error = np.abs(weights @ z**2 - s**2)
    bound = diagnostics.second_moment_error_bound(noise_stddev=s, b2=b2, step=t, failure_prob=0.05)
    assert np.mean(error >= bound) <= 0.05
    assert np.quantile(error, 0.95) > bound / 5


def test_suggested_gamma_is_the_bound_at_the_end_or_on_the_way():
    assert diagnostics.suggest_gamma(noise_stddev=SNLI, steps=10_000) == pytest.approx(5.933e-9, rel=1e-4)
    schedule = diagnostics.suggest_gamma(noise_stddev=SNLI)
    assert float(schedule(9_999)) == pytest.approx(5.933e-9, rel=1e-4)
    assert float(schedule(0)) > float(schedule(10)) > float(schedule(1_000))
    opt = dpopt.optimizers.adam_bc.dp_adam_bc(0.1, gamma=schedule, **privacy_four())
    updates, _ = jax.jit(opt.update)(jnp.ones((4, 2)), opt.init(jnp.zeros(2)), jnp.zeros(2))
    assert np.all(np.isfinite(updates))


# --- moments ----------------------------------------------------------------------------------------------------------


def test_recorder_shows_clean_private_and_corrected_moments(x64):
    rng = np.random.default_rng(0)
    recorder = diagnostics.SensitiveMomentRecorder(b1=0.8, b2=0.9)
    params = {"w": jnp.zeros((20, 30)), "b": jnp.zeros(50)}
    moments = recorder.init(params)
    update = jax.jit(recorder.update)
    m, v, mp, vp, phi = (np.zeros(650) for _ in range(5))
    for t in range(6):
        s = 1.0 + t
        clean = rng.normal(size=650)
        private = clean + s * rng.normal(size=650)
        m, v = 0.8 * m + 0.2 * clean, 0.9 * v + 0.1 * clean**2
        mp, vp, phi = 0.8 * mp + 0.2 * private, 0.9 * vp + 0.1 * private**2, 0.9 * phi + 0.1 * s**2

        def split(x):
            return {"b": jnp.asarray(x[:50]), "w": jnp.asarray(x[50:].reshape(20, 30))}

        moments = update(moments, split(clean), split(private), noise_stddev=s)
    got = recorder.quantiles(moments, (0.1, 0.5, 1.0))
    expected = {"m clean": m, "m private": mp, "v clean": v, "v private": vp, "v corrected": vp - phi}
    for name, values in expected.items():
        weight = 1 - (0.8 if name[0] == "m" else 0.9) ** 6
        np.testing.assert_allclose(got[name], np.quantile(values / weight, (0.1, 0.5, 1.0)), rtol=1e-9)


def test_quantiles_of_a_private_optimizers_moments():
    opt = dpopt.dp_adam(0.1, **privacy_four())
    state = opt.init({"a": jnp.zeros(3), "b": jnp.zeros((), jnp.bfloat16)})
    quantiles = diagnostics.tree_quantiles(optax.tree.get(state, "nu"))
    assert quantiles.shape == (len(diagnostics.QUANTILES),) and not quantiles.any()


def test_private_optimizer_states_hold_nothing_that_is_only_clean():
    """Two batches with the same clipped sum and noise give the same state: it is a function of released values."""
    opt = dpopt.optimizers.adam_bc.dp_adam_bc(0.1, **privacy_four(l2_clip_norm=1.0))
    params = jnp.zeros(2)
    batches = jnp.array([[3.0, 0.0], [0.0, 0.25]]), jnp.array([[0.5, 0.0], [0.5, 0.25]])
    states = [opt.update(b, opt.init(params), params)[1] for b in batches]
    assert_identical(*states)


# --- staleness and clip fraction --------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize("delay", [1, 2, 3, 6])
def test_staleness_step_by_step(x64, delay):
    rng = np.random.default_rng(0)
    clean, private = rng.normal(size=(13, 5)), rng.normal(size=(13, 5))
    ratios = []
    for t in range(delay, 13):
        end = t // delay * delay
        average = private[end - delay : end].mean(axis=0)
        ratios.append(np.abs(clean[t]).sum() / (np.abs(average).sum() + 5 * 0.1))

    def split(x):
        return {"a": jnp.asarray(x[:, 0]), "b": jnp.asarray(x[:, 1:].reshape(-1, 2, 2))}

    found = diagnostics.sensitive_staleness(split(clean), split(private), delay=delay, eps=0.1)
    assert float(found) == pytest.approx(max(ratios), rel=1e-9)


def test_clip_fraction_counts_real_finite_examples():
    grads = jnp.array([[3.0], [0.5], [2.0], [jnp.nan], [5.0]])
    promise = stacked_grads(grads, mask=jnp.array([True, True, True, True, False]))
    seen = promise.clipped_sum(dpopt.FlatClip(1.0)).sensitive
    assert float(diagnostics.sensitive_clip_fraction(seen)) == pytest.approx(2 / 3)
    empty = stacked_grads(jnp.zeros((0, 1)), mask=None).clipped_sum(dpopt.FlatClip(1.0)).sensitive
    assert float(diagnostics.sensitive_clip_fraction(empty)) == 0.0


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: diagnostics.sgdm_learning_rate_schedule(1e-3, noise_stddev=0.0), "noise_stddev"),
        (lambda: diagnostics.sgdm_learning_rate_schedule(0.0, noise_stddev=1.0), "learning_rate"),
        (lambda: diagnostics.sgdm_learning_rate_schedule(1e-3, b1=1.0, noise_stddev=1.0), "b1"),
        (lambda: diagnostics.second_moment_error_bound(noise_stddev=-1.0, step=1), "noise_stddev"),
        (lambda: diagnostics.second_moment_error_bound(noise_stddev=1.0, step=0), "step"),
        (lambda: diagnostics.second_moment_error_bound(noise_stddev=1.0, step=1, b2=1.0), "b2"),
        (lambda: diagnostics.second_moment_error_bound(noise_stddev=1.0, step=1, failure_prob=0.0), "failure_prob"),
        (lambda: diagnostics.suggest_gamma(noise_stddev=0.0, steps=5), "noise_stddev"),
        (lambda: diagnostics.suggest_gamma(noise_stddev=1.0, b2=1.0), "b2"),
        (lambda: diagnostics.SensitiveMomentRecorder(b1=1.0), "b1"),
        (lambda: diagnostics.sensitive_staleness(jnp.ones((4, 2)), jnp.ones((4, 2)), delay=4, eps=0.0), "delay=4"),
        (lambda: diagnostics.sensitive_staleness(jnp.ones((4, 2)), jnp.ones((4, 2)), delay=0, eps=0.0), "delay"),
        (lambda: diagnostics.sensitive_staleness(jnp.ones((4, 2)), jnp.ones((5, 2)), delay=1, eps=0.0), "match"),
        (lambda: diagnostics.sensitive_staleness(jnp.ones(()), jnp.ones((5, 2)), delay=1, eps=0.0), "clean_means"),
    ],
)
def test_bad_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_works_with_and_without_x64():
    for wide in (False, True):
        with enable_x64(wide):
            assert float(diagnostics.suggest_gamma(noise_stddev=SNLI)(9_999)) == pytest.approx(5.933e-9, rel=1e-4)
