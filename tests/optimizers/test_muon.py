"""Muon with bias correction: its limit without noise, its equations in NumPy, and the bias that it removes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import privacy_four
from optax import contrib

import dpopt
from dpopt import correlated
from dpopt.optimizers.muon import scale_by_muon_bc

SHAPES = {"tall": (6, 4), "wide": (3, 5), "bias": (4,), "kernel": (2, 2, 3)}
PARAMS = {k: jnp.zeros(s) for k, s in SHAPES.items()}


def gradients(steps, seed=0):
    rng = np.random.default_rng(seed)
    return [{k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()} for _ in range(steps)]


def orthogonalised(m, steps=5):
    """Newton-Schulz with Jordan's coefficients, and the factor for the shape, in float64."""
    m = np.asarray(m, np.float64)
    x = m.T if m.shape[0] > m.shape[1] else m
    x = x / np.linalg.norm(x)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    x = x.T if m.shape[0] > m.shape[1] else x
    return x * max(1.0, m.shape[1] / m.shape[0]) ** 0.5


def test_without_noise_it_is_optax_muon():
    rule = scale_by_muon_bc(key=jax.random.key(0))
    other = contrib.muon(-1.0, nesterov=False)
    state, other_state = rule.init(PARAMS), other.init(PARAMS)
    for g in gradients(4):
        updates, state = rule.update(g, state, noise_stddev=0.0)
        want, other_state = other.update(g, other_state, PARAMS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), updates, want)


def test_the_equations_in_numpy_under_noise_that_differs_between_coordinates_and_steps():
    """With the added noise recorded: it has the variance of the noise in the momentum, as the docstring states."""
    beta, key = 0.8, jax.random.key(3)
    rule = scale_by_muon_bc(key=key, beta=beta, gamma=1e-3)
    rest = dpopt.scale_by_adam_bc(gamma=1e-3)
    state = rule.init(PARAMS)
    key, small = state.key, {k: v for k, v in PARAMS.items() if v.ndim != 2}
    rest_state = rest.init(small)
    m, v = {k: 0.0 for k in ("tall", "wide")}, {k: 0.0 for k in ("tall", "wide")}
    for t, g in enumerate(gradients(3)):
        rng = np.random.default_rng(t)
        s = {k: jnp.asarray(rng.uniform(0.1, 0.9, size=shape), jnp.float32) for k, shape in SHAPES.items()}
        updates, state = rule.update(g, state, noise_stddev=s)
        keys = dict(zip(("tall", "wide"), jax.random.split(jax.random.fold_in(key, t), 2), strict=True))
        for name in ("tall", "wide"):
            m[name] = beta * m[name] + (1 - beta) * np.asarray(g[name], np.float64)
            v[name] = beta**2 * v[name] + (1 - beta) ** 2 * np.asarray(s[name], np.float64) ** 2
            n = np.sqrt(v[name]) * np.asarray(jax.random.normal(keys[name], SHAPES[name]))
            hat = 1 - beta ** (t + 1)
            f = [orthogonalised(x / hat) for x in (m[name], m[name] + n, m[name] - n)]
            np.testing.assert_allclose(updates[name], 2 * f[0] - (f[1] + f[2]) / 2, atol=2e-4)
        others = {k: g[k] for k in small}
        want, rest_state = rest.update(others, rest_state, noise_stddev={k: s[k] for k in small})
        for k in small:
            np.testing.assert_allclose(updates[k], want[k], rtol=1e-5)


@jax.jit
def under_noise(m, stddev):
    """Over 20,000 draws of noise: the updates of this rule and of the plain one."""
    rule = scale_by_muon_bc(key=jax.random.key(0), beta=0.0)
    plain = contrib.muon(-1.0, beta=0.0, nesterov=False)
    state, plain_state = rule.init([m]), plain.init([m])

    def one(key):
        noise_key, key = jax.random.split(key)
        noisy = [m + stddev * jax.random.normal(noise_key, m.shape)]
        mine, _ = rule.update(noisy, state._replace(key=key), noise_stddev=stddev)
        return mine[0], plain.update(noisy, plain_state, [m])[0][0]

    return jax.vmap(one)(jax.random.split(jax.random.key(1), 20_000))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stddev", [0.5, 1.0])
def test_a_third_of_the_bias_is_gone(stddev):
    """Over 20,000 draws of noise; the bias of the plain rule is asserted too, so that the test has power. (The mean
    square error grows, since the correction has a variance.)"""
    m = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
    mine, others = (np.asarray(x).mean(0) for x in under_noise(m, stddev))
    right = orthogonalised(m)
    bias, plain_bias = np.linalg.norm(mine - right), np.linalg.norm(others - right)
    assert plain_bias > 0.3 and bias < 0.75 * plain_bias


@pytest.mark.slow
def test_in_a_chain_it_is_told_the_noise_of_every_coordinate():
    core = dpopt.privatize(**privacy_four(), preconditioner=dpopt.last_moments())
    optimizer = dpopt.chain(core, scale_by_muon_bc(key=jax.random.key(0), beta=0.5))
    rng = np.random.default_rng(0)
    rows = {k: jnp.asarray(rng.normal(size=(4, *s)), jnp.float32) for k, s in SHAPES.items()}
    state = optimizer.init(PARAMS)
    step = jax.jit(optimizer.update)
    variances = []
    for _ in range(2):
        updates, state = step(rows, state, PARAMS)
        variances.append(state[1].variance[0])
    assert all(np.isfinite(u).all() for u in jax.tree.leaves(updates))
    stddev = privacy_four()["noise_multiplier"] * privacy_four()["l2_clip_norm"]
    stddev /= privacy_four()["expected_batch_size"]
    np.testing.assert_allclose(variances[0], 0.25 * stddev**2, rtol=1e-3)  # the diagonal has seen nothing yet
    assert np.ptp(variances[1]) > 0.01 * variances[1].max()  # then its release makes the noise differ


def test_what_it_cannot_do_is_refused():
    rule = scale_by_muon_bc(key=jax.random.key(0))
    with pytest.raises(ValueError, match="got no noise_stddev"):
        rule.update(PARAMS, rule.init(PARAMS))
    with pytest.raises(ValueError, match="needs the noise"):
        dpopt.chain(dpopt.privatize(**privacy_four()), optax.trace(0.9), rule)
    banded = correlated.banded(4, steps=8)
    with pytest.raises(ValueError, match="independent noise"):
        dpopt.chain(dpopt.privatize(**privacy_four(), noise=banded), rule)
    with pytest.raises(ValueError, match="beta"):
        scale_by_muon_bc(key=jax.random.key(0), beta=1.0)
    with pytest.raises(ValueError, match="ns_steps"):
        scale_by_muon_bc(key=jax.random.key(0), ns_steps=0)


def test_a_state_may_be_donated_and_the_key_stays_the_callers():
    optimizer = dpopt.chain(dpopt.privatize(**privacy_four()), scale_by_muon_bc(key=(key := jax.random.key(1))))
    update, rows = jax.jit(optimizer.update, donate_argnums=1), {"w": jnp.ones((4, 3, 2))}
    params = {"w": jnp.zeros((3, 2))}
    for _ in range(2):
        update(rows, optimizer.init(params), params)
    jax.random.key_data(key)


def test_the_noises_own_key_gives_other_draws(monkeypatch):
    drawn, key, shape = [], jax.random.key(5), (40, 50)
    real, privately = jax.random.normal, dpopt.noise.standard_normal_like

    def kept(found):
        drawn.extend(jnp.ravel(x) for x in jax.tree.leaves(found))
        return found

    monkeypatch.setattr(jax.random, "normal", lambda *a: kept(real(*a)))
    monkeypatch.setattr(dpopt.noise, "standard_normal_like", lambda *a: kept(privately(*a)))
    core = dpopt.privatize(**privacy_four(key=key))
    optimizer, params = dpopt.chain(core, scale_by_muon_bc(key=key)), {"w": jnp.zeros(shape)}

    @jax.jit
    def draws_of_a_step(rows):
        optimizer.update(rows, optimizer.init(params), params)
        return drawn

    draws = [np.asarray(x) for x in draws_of_a_step({"w": jnp.ones((4, *shape))}) if x.size == 2_000]
    assert len(draws) >= 2 and len({d.tobytes() for d in draws}) == len(draws)
    apart = np.abs(np.corrcoef(draws) - np.eye(len(draws)))
    assert apart.max() < 5 / np.sqrt(2_000)
