"""The gradient of max pooling, written out for CPUs: XLA's is the oracle, ties and what is not finite included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_unless
from jax import lax

import dpopt
from dpopt.ghost.binding import differentiated
from dpopt.ghost.max_pooling import max_pooling


def _drawn(seed):
    """A max pooling and an array: any rank, window, stride and padding; small integers, so that many tie."""
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, 4))
    window = tuple(map(int, rng.integers(1, 4, rank)))
    strides = tuple(map(int, rng.integers(1, 4, rank)))
    low, high = rng.integers(0, 3, (2, rank))
    sides = [k + int(rng.integers(0, 7)) for k in window]
    x = rng.integers(-2, 3, sides).astype(float)
    wild = rng.random(sides)
    if rng.random() < 0.3:
        x = np.where(wild < 0.2, -np.inf, np.where(wild < 0.25, np.nan, np.where(wild < 0.3, np.inf, x)))
    padding = [*zip(map(int, low), map(int, high), strict=True)]

    def pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)

    return pool, x


def _ours(pool, x):
    (eqn,) = jax.make_jaxpr(pool)(x).jaxpr.eqns
    run = differentiated(eqn, [0])
    return lambda x: run(x)[0]


@pytest.mark.parametrize("seed", slow_unless(range(40), range(80)))
@pytest.mark.one_in(15)
def test_gradients_go_where_xla_sends_them(seed):
    pool, x = _drawn(seed)
    x = jnp.asarray(x, jnp.float32)
    ours = _ours(pool, x)
    value, pull = jax.vjp(ours, x)
    expected, expected_pull = jax.vjp(pool, x)
    np.testing.assert_array_equal(value, expected)
    y = jnp.arange(1.0, 1 + value.size).reshape(value.shape)  # no two sums of few are alike
    np.testing.assert_array_equal(jax.jit(pull)(y)[0], jax.jit(expected_pull)(y)[0])


def test_only_on_cpus_and_for_small_windows(monkeypatch):
    def equation(window):
        pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (window,), (1,), "SAME")  # noqa: E731
        (eqn,) = jax.make_jaxpr(pool)(jnp.ones(50)).jaxpr.eqns
        return eqn

    assert max_pooling(equation(4)) is not None
    assert max_pooling(equation(40)) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert max_pooling(equation(4)) is None


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_a_network_with_pooling(engine, x64):
    """Norms and sum are those of plain gradients."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 3, 2, 3))), "head": jnp.asarray(rng.normal(size=(3, 2)))}
    batch = jnp.asarray(rng.normal(size=(4, 8, 8, 2)))

    def loss(params, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        h = lax.conv_general_dilated(x[None], params["w"], (1, 1), "SAME", dimension_numbers=numbers)[0]
        h = lax.reduce_window(jnp.tanh(h), -jnp.inf, lax.max, (3, 3, 1), (2, 2, 1), "SAME")
        return jnp.sum(jnp.sin(h @ params["head"]))

    grads = [jax.grad(loss)(params, x) for x in batch]
    norms = np.array([np.sqrt(sum(float(jnp.sum(g**2)) for g in tree.values())) for tree in grads])
    clip = float(np.median(norms)) / 2
    promise = dpopt.per_example_grads(loss, engine=engine)(params, batch, mask=None)
    found = promise.clipped_sum(dpopt.FlatClip(clip))
    np.testing.assert_allclose(found.sensitive.norms, norms, rtol=1e-9)
    for name in params:
        expected = sum(min(1, clip / n) * tree[name] for n, tree in zip(norms, grads, strict=True))
        np.testing.assert_allclose(found.sum[name], expected, rtol=1e-8, atol=1e-9 * clip)
