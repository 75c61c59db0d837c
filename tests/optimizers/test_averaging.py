"""The average of the parameters: a NumPy transcription, its limits, and its place in the state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical
from runs import DATA, loss_fn, run, start

import dpopt


def numpy_average(trajectory, decay):
    average = trajectory[0].astype(np.float64)
    for t, params in enumerate(trajectory[1:], start=1):
        d = min(decay, (1 + t) / (10 + t))
        average = d * average + (1 - d) * params
    return average


@pytest.mark.one_in(2)
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_is_the_published_recursion(decay, dtype):
    rng = np.random.default_rng(0)
    rule = dpopt.average_params(decay)
    params = {"w": jnp.asarray(rng.normal(size=(3, 4)), dtype), "b": jnp.asarray(rng.normal(size=4), dtype)}
    state, seen = rule.init(params), [params]
    for _ in range(40):
        updates = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
        out, state = rule.update(updates, state, params)
        assert_identical(out, updates)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    found = dpopt.optimizers.averaging.averaged_params(state)
    for name, leaf in found.items():
        assert leaf.dtype == jnp.float32
        expected = numpy_average([np.asarray(p[name], np.float32) for p in seen], decay)
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-5)
    if decay == 0:
        assert_identical(dpopt.optimizers.averaging.averaged_params(state, params), params)


def builder(steps=6, decay=0.9):
    start = dpopt.Builder(num_examples=len(DATA), expected_batch_size=8, steps=steps, key=jax.random.key(3))
    return start.clip(1.0).noise(1.0).then(optax.adam(0.05)).average(decay)


@pytest.mark.slow
def test_a_run_keeps_it_and_its_noise_averages_out():
    plan, seen = builder(), [start()]
    result = run(plan.build(), on_step=lambda t, params: seen.append(jax.tree.map(np.asarray, params)))
    for i, leaf in enumerate(jax.tree.leaves(result.averaged_params)):
        expected = numpy_average([np.asarray(jax.tree.leaves(p)[i]) for p in seen], 0.9)
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)
    assert "average_params" in str(plan.build())


def test_costs_no_privacy():
    without = dpopt.Builder(num_examples=len(DATA), expected_batch_size=8, steps=6, key=jax.random.key(3))
    without = without.clip(1.0).noise(1.0).then(optax.adam(0.05)).build()
    assert builder().build().event == without.event


@pytest.mark.slow
def test_a_resumed_run_has_the_average_of_the_whole(tmp_path):
    from dpopt.run.checkpoint import Checkpointer

    whole = run(builder().build(), replay=True)
    first = run(builder().build(), steps=3, replay=True, checkpointer=Checkpointer(tmp_path, every=1))
    second = run(builder().build(), replay=True, checkpointer=Checkpointer(tmp_path, every=1))
    assert_identical(second.averaged_params, whole.averaged_params)
    assert first.state.update == 3


def test_in_a_loop_of_ones_own_whose_buffers_are_reused():
    opt = optax.chain(
        dpopt.dp_sgd(0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=jax.random.key(0)),
        dpopt.average_params(0.5),
    )
    step = jax.jit(dpopt.make_train_step(loss_fn, opt), donate_argnums=(0, 1))
    params = start()
    state = opt.init(params)
    for _ in range(2):
        params, state, _ = step(params, state, DATA[:4], mask=None)
    assert jax.tree.structure(dpopt.optimizers.averaging.averaged_params(state, params)) == jax.tree.structure(params)
    assert dpopt.privacy_of(opt) is not None


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"decay must lie in \[0, 1\); got 1.0"):
        dpopt.average_params(1.0)
    with pytest.raises(ValueError, match="call update\\(grads, state, params\\)"):
        dpopt.average_params().update(jnp.ones(2), dpopt.average_params().init(jnp.ones(2)))
    with pytest.raises(ValueError, match="holds no averages"):
        dpopt.optimizers.averaging.averaged_params(optax.sgd(0.1).init(jnp.ones(2)))
    with pytest.raises(ValueError, match="holds 2 averages"):
        dpopt.optimizers.averaging.averaged_params([dpopt.average_params().init(jnp.ones(2))] * 2)
    with pytest.raises(ValueError, match="a run keeps one average"):
        builder().average(0.5)
