"""A promise traces its loss once, and every promise traces it anew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpopt

BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


def clipped(loss, engine, params, has_aux=False):
    promise = dpopt.per_example_grads(loss, engine=engine, has_aux=has_aux)(params, BATCH, mask=None)
    return promise.clipped_sum(dpopt.FlatClip(100.0)).sum


@pytest.mark.parametrize("engine", ["auto", "ghost", "vmap"])
@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_is_traced_once(engine, has_aux):
    traced = []

    def loss(w, x):
        traced.append(None)
        value = jnp.sum(jnp.tanh(x @ w))
        return (value, x) if has_aux else value

    def run(w):
        return clipped(loss, engine, w, has_aux)

    jax.jit(run)(jnp.ones((3, 2)))
    assert len(traced) == 1


def test_outside_jit_promises_compile_nothing_anew():
    """There JAX runs one operation after the other, and has compiled each of them before."""
    compiled = []

    def listen(name, *_, **__):
        compiled.append(name)

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    counts = []
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(3):
            clipped(loss, "vmap", jnp.ones((3, 2)))
            counts.append(sum("backend_compile" in name for name in compiled))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert 0 < counts[0] and counts[1] == counts[2]


@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_the_next_promise_reads_python_anew(engine):
    """As everywhere in JAX outside `jax.jit`."""
    factor = 1.0

    def loss(w, x):
        return factor * jnp.sum(x @ w)

    before = clipped(loss, engine, jnp.ones((3, 2)))
    factor = 2.0
    after = clipped(loss, engine, jnp.ones((3, 2)))
    np.testing.assert_allclose(after, 2 * before, rtol=1e-6)


@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_a_loss_may_close_over_what_an_outer_function_computes(engine):
    def step(scale):
        outer = scale * jnp.arange(3.0)

        def loss(w, x):
            return jnp.sum((outer * x) @ w)

        return clipped(loss, engine, jnp.ones((3, 2)))

    expected = np.broadcast_to(np.sum(3 * np.arange(3.0) * np.asarray(BATCH), axis=0)[:, None], (3, 2))
    np.testing.assert_allclose(jax.jit(step)(3.0), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(step)(jnp.full(2, 3.0))[1], expected, rtol=1e-5)
