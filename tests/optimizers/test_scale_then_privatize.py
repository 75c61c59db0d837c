"""Scale-then-privatise against the recorded runs that follow its paper, its equations and its edge cases."""

import golden_runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_runs import EpsClip, load, replay, tiny_batch, tiny_loss, tiny_params
from helpers import assert_identical, assert_near, paid, privacy_four

import dpopt
from dpopt.chain import NoiseAware
from dpopt.optimizers.scale_then_privatize import scale_then_privatize
from dpopt.preconditioners.moments import last_moments

RUNS = ["adam_stp_intended_sigma0", "adam_stp_intended_sigma1"]


# The reference clips by C / (norm + 1e-6): EpsClip does the same, so that the rest is compared at full precision.
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(jnp.float64, golden_runs.RTOL64), (jnp.float32, golden_runs.RTOL32)], ids=["x64", "x32"]
)
@pytest.mark.one_in(6)
def test_golden(monkeypatch, name, dtype, rtol):
    run = load(name)
    m = run.meta
    optimizer = scale_then_privatize(
        m["lr"], l2_clip_norm=EpsClip(m["clip"], 1e-6), noise_multiplier=m["sigma"], expected_batch_size=m["B"],
        key=jax.random.key(0), b1=m["beta1"], b2=m["beta2"], eps=m["eps"], eps_scale=m["eps2"],
        weight_decay=m["weight_decay"],
    )  # fmt: skip
    with golden_runs.enable_x64(dtype == jnp.float64):
        params, states = replay(monkeypatch, run, optimizer, dtype)
        moments = [state[0][0] for state in states]  # of the diagonal, the first stage of the private core
        scales = [last_moments(b2=m["beta2"], eps_scale=m["eps2"]).diagonal(s, None)[0].scale for s in moments]
    assert golden_runs.error(run, "param", params) <= rtol
    assert golden_runs.error(run, "v_t", [s.v for s in moments]) <= rtol
    assert golden_runs.error(run, "s_t", scales) <= rtol


@pytest.mark.one_in(3)
@pytest.mark.parametrize("b2", [0.999, 0.9, 0.0])
def test_equals_its_equations(monkeypatch, either_precision, b2):
    rng = np.random.default_rng(0)
    grads, z = rng.normal(size=(12, 5, 4)) * [10, 1, 0.1, 0], rng.normal(size=(12, 4)) * [1, 1, 1, 0]
    drawn = {}
    monkeypatch.setattr(dpopt.noise, "standard_normal_like", lambda key, tree: drawn["z"].astype(tree.dtype))
    opt = scale_then_privatize(0.1, **privacy_four(noise_multiplier=0.7), b2=b2, eps=1e-3, weight_decay=0.1)
    w = np.ones(4)
    m, v, s = np.zeros(4), np.zeros(4), np.ones(4)
    params = jnp.ones(4)
    state = opt.init(params)

    @jax.jit
    def step(params, state, rows, z):
        drawn["z"] = z
        updates, state = opt.update(rows, state, params)
        return optax.apply_updates(params, updates), state

    for t in range(1, 13):
        scaled = s * grads[t - 1]
        scaled *= np.minimum(1, 1 / np.linalg.norm(scaled, axis=1, keepdims=True))
        g = (scaled.sum(axis=0) + 0.7 * z[t - 1]) / 4 / s
        m, v = 0.9 * m + 0.1 * g, b2 * v + (1 - b2) * g**2
        v_hat = v / (1 - b2**t)
        s = 1 / (np.sqrt(v_hat) + 1e-2)
        w = w * (1 - 0.1 * 0.1) - 0.1 * m / (1 - 0.9**t) / (np.sqrt(v_hat) + 1e-3)
        params, state = step(params, state, grads[t - 1], z[t - 1])
        tolerance = 1e-11 if either_precision else 1e-4
        np.testing.assert_allclose(params, w, rtol=tolerance, atol=tolerance)


def test_a_second_moment_of_zero_is_no_nan():
    opt = scale_then_privatize(0.1, **privacy_four(noise_multiplier=0.0), eps_scale=1e-2)
    params = jnp.zeros(2)
    state = opt.init(params)
    for g in (0.0, 0.0, 1.0):
        updates, state = opt.update(jnp.full((4, 2), g), state, params)
        assert np.isfinite(updates).all()
    assert np.all(updates != 0)


def test_the_next_stage_is_told_the_noise_of_each_coordinate():
    seen = []

    def listen(updates, state, params=None, *, noise_stddev, **extra):
        seen.append(np.broadcast_to(jax.tree.leaves(noise_stddev)[0], (40_000,)))
        return updates, state

    core = dpopt.privatize(**privacy_four(noise_multiplier=2.0), preconditioner=last_moments(b2=0.0, eps_scale=1.0))
    opt = dpopt.chain(core, NoiseAware(lambda p: (), listen))
    params = jnp.zeros(40_000)
    state = opt.init(params)
    first, state = opt.update(jnp.zeros((4, 40_000)), state, params)
    second, state = opt.update(jnp.zeros((4, 40_000)), state, params)
    np.testing.assert_allclose(seen[0], 0.5)
    np.testing.assert_allclose(seen[1], 0.5 * (np.abs(first) + 1), rtol=1e-5)
    np.testing.assert_allclose(np.std(second / seen[1]), 1.0, rtol=0.02)


def test_one_gaussian_a_step(count_draws):
    opt = scale_then_privatize(0.1, **privacy_four(noise_multiplier=1.7))
    assert opt.privacy.step_event(5) == dpopt.privacy.dp_accounting.GaussianDpEvent(paid(1.7))
    opt.update(jnp.ones((4, 2)), opt.init(jnp.zeros(2)), jnp.zeros(2))
    assert len(count_draws) == 1


def train(opt, mask=None, batch=None, dtype=jnp.float32):
    params = tiny_params(dtype)
    state = opt.init(params)
    step = jax.jit(dpopt.make_train_step(tiny_loss, opt))
    for _ in range(5):
        params, state, _ = step(params, state, tiny_batch() if batch is None else batch, mask)
    return params, state


@pytest.mark.slow
def test_scan_nan_examples_empty_batches_and_bfloat16():
    opt = scale_then_privatize(0.1, **privacy_four())
    step, params = dpopt.make_train_step(tiny_loss, opt), tiny_params()
    start = (params, opt.init(params))
    scanned, _ = jax.lax.scan(lambda c, _: (step(*c, tiny_batch(), mask=None)[:2], None), start, length=5)
    assert_near(scanned[0], train(opt)[0], rtol=1e-5)
    spoiled = jax.tree.map(lambda x: x.at[1].set(jnp.nan), tiny_batch())
    masked = jnp.array([True, False, True, True])
    assert_identical(train(opt, batch=spoiled)[0], train(opt, mask=masked)[0])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(train(opt, mask=jnp.zeros(4, bool))[0]))
    narrow, state = train(opt, dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {jnp.dtype(jnp.bfloat16)}
    floats = {x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert floats == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(eps_scale=0.0), "eps_scale must be positive and finite; got 0.0"),
        (dict(eps_scale=-1.0), "eps_scale must be positive"),
        (dict(b2=1.0), r"b2 must lie in \[0, 1\)"),
    ],
)
def test_bad_arguments_are_named(changes, match):
    with pytest.raises(ValueError, match=match):
        scale_then_privatize(0.1, **privacy_four(), **changes)
