"""Filters after the noise against scipy, and DiSK against its equations in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.signal
from helpers import privacy_four

import dpopt
from dpopt import correlated
from dpopt.optimizers import filters

TREE = {"a": (3, 2), "b": (2,)}


def gradients(steps, seed=0):
    rng = np.random.default_rng(seed)
    return [{k: rng.normal(size=s).astype(np.float32) for k, s in TREE.items()} for _ in range(steps)]


def filtered(rule, given):
    state, out = rule.init(given[0]), []
    for g in given:
        updates, state = rule.update(g, state)
        out.append(updates)
    return out


@pytest.mark.parametrize(
    "coefficients",
    [((-0.9,), (0.1,)), ((), (0.25, 0.25, 0.5)), scipy.signal.butter(2, 0.2)[::-1], ((-0.5, 0.1), (0.3, 0.2, 0.1))],
    ids=["first order", "average", "butter", "second order"],
)
def test_the_filter_is_scipys_over_what_it_makes_of_ones(coefficients):
    a, b = coefficients
    a = a[1:] if len(a) and a[0] == 1 else a
    given = gradients(12)
    found = filtered(filters.low_pass(a, b), given)
    for leaf in TREE:
        g = np.stack([x[leaf] for x in given]).astype(np.float64)
        want = scipy.signal.lfilter(b, [1, *a], g, axis=0)
        ones = scipy.signal.lfilter(b, [1, *a], np.ones(12))
        want = want / ones.reshape(-1, *[1] * (g.ndim - 1))
        np.testing.assert_allclose(np.stack([x[leaf] for x in found]), want, atol=1e-5)


def test_a_gradient_that_stays_comes_through():
    rule = filters.low_pass((-0.5, 0.1), (0.3, 0.2))
    for out in filtered(rule, [jnp.full(3, 2.5)] * 6):
        np.testing.assert_allclose(out, 2.5, rtol=1e-6)


def test_noise_is_made_less_and_slow_signals_are_kept():
    rng = np.random.default_rng(0)
    out = filtered(filters.low_pass(), list(rng.normal(size=(200, 1_000)).astype(np.float32)))
    spread = np.std(np.stack(out[100:]))
    assert spread == pytest.approx(0.1 / np.sqrt(1 - 0.81), rel=0.02)


@pytest.mark.parametrize("make", [filters.low_pass, lambda: filters.simplified_kalman(np.float64(0.7))])
def test_float32_stays_so_in_64_bits(make, x64):
    rule, given = make(), jnp.ones(3, jnp.float32)
    state = rule.init(given)
    updates, after = rule.update(given, state)
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert updates.dtype == jnp.float32 and describe(after) == describe(state)


def test_disk_is_its_equations():
    """On a loss with a gradient that is not linear, against the paper's three lines in NumPy."""
    kappa, gamma, rate = 0.7, 0.5, 0.1
    x = np.random.default_rng(0).normal(size=(4, 3))
    gradient = lambda w, x: np.tanh(w - x)  # noqa: E731
    loss = lambda w, x: jnp.sum(jnp.log(jnp.cosh(w - x)))  # noqa: E731
    opt = dpopt.chain(
        dpopt.privatize(**privacy_four(noise_multiplier=0.0, l2_clip_norm=0.8)),
        filters.simplified_kalman(kappa),
        optax.sgd(rate),
    )
    w = move = jnp.zeros(3)
    state = opt.init(w)
    ours, before, estimate = np.zeros(3), np.zeros(3), np.zeros(3)
    share = (1 - kappa) / (kappa * gamma)
    for _ in range(8):
        grads = dpopt.per_example_grads(filters.look_ahead(loss, move, kappa=kappa, gamma=gamma))(
            w, jnp.asarray(x, jnp.float32), mask=None
        )
        move, state = opt.update(grads, state, w)
        w = optax.apply_updates(w, move)

        each = [share * gradient(ours + gamma * (ours - before), xi) + (1 - share) * gradient(ours, xi) for xi in x]
        total = sum(g * min(1, 0.8 / np.linalg.norm(g)) for g in each) / 4
        estimate = (1 - kappa) * estimate + kappa * total
        before, ours = ours, ours - rate * estimate
        np.testing.assert_allclose(w, ours, atol=1e-5)


def test_one_gradient_does_where_it_can():
    loss = lambda w, x: jnp.sum(jnp.tanh(w - x) ** 2)  # noqa: E731
    w, d, x = jnp.arange(3.0), jnp.ones(3), jnp.full(3, 0.3)
    alone = jax.grad(filters.look_ahead(loss, d, kappa=0.8))(w, x)
    np.testing.assert_allclose(alone, jax.grad(loss)(w + 0.25 * d, x), rtol=1e-6)
    text = str(jax.make_jaxpr(jax.grad(filters.look_ahead(loss, d, kappa=0.8)))(w, x))
    assert text.count("tanh") == 1
    np.testing.assert_allclose(jax.grad(filters.look_ahead(loss, d, kappa=1.0))(w, x), jax.grad(loss)(w, x))


@pytest.mark.slow
def test_they_stand_in_any_chain():
    for noise in (None, correlated.banded(3, steps=9)):
        core = dpopt.privatize(**privacy_four(noise=noise))
        for rule in (filters.low_pass(), filters.simplified_kalman()):
            opt = dpopt.chain(core, rule, optax.adam(0.1))
            params = jnp.zeros(3)
            updates, _ = jax.jit(opt.update)(jnp.ones((4, 3)), opt.init(params), params)
            assert np.isfinite(updates).all()


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda: filters.low_pass((-1.0,), (0.1,)), "stable"),
        (lambda: filters.low_pass((0.5,), (0.5, -0.5)), "adds up to 0"),
        (lambda: filters.low_pass((), ()), "finite"),
        (lambda: filters.low_pass((np.nan,), (1.0,)), "finite"),
        (lambda: filters.simplified_kalman(0.0), "kappa"),
        (lambda: filters.look_ahead(lambda w, x: w, 0.0, kappa=1.5), "kappa"),
        (lambda: filters.look_ahead(lambda w, x: w, 0.0, gamma=0.0), "gamma"),
    ],
)
def test_mistakes_are_named(mistake, error):
    with pytest.raises((ValueError, TypeError), match=error):
        mistake()


@pytest.mark.parametrize("filter", [((-0.9,), (0.0, 0.1)), ((), (1.0, -1.0, 0.5)), ((), (0.0, 1.0))], ids=str)
def test_a_filter_that_maps_a_constant_to_nothing_is_refused(filter):
    """Its output is divided by what it makes of a constant."""
    with pytest.raises(ValueError, match="would multiply noise"):
        filters.low_pass(*filter)


def test_slow_averages_are_filters():
    for decay in (0.9, 0.999, 0.99999):
        filters.low_pass((-decay,), (1 - decay,))
