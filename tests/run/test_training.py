import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    assert_identical,
    assert_near,
    dot_loss,
    loop_clipped_sum,
    mlp_batch,
    mlp_loss,
    mlp_params,
    privacy_four,
)

import dpopt

OPT = dpopt.dp_adam(0.1, **privacy_four(l2_clip_norm=0.5))


def one_step(batch, mask=None, opt=OPT, **kwargs):
    params = mlp_params()
    # The engines agree (tests/ghost); this one compiles in half the time.
    step = jax.jit(dpopt.make_train_step(mlp_loss, opt, **{"engine": "vmap"} | kwargs))
    return step(params, opt.init(params), batch, mask)


@pytest.mark.slow
@pytest.mark.parametrize("opt", [OPT, dpopt.dp_sgd(0.1, **privacy_four(l2_clip_norm=0.5, noise_multiplier=0.0))])
@pytest.mark.parametrize("microbatch_size", [3, 1, 7, 50])
def test_microbatched_masked_and_whole_steps_agree(opt, microbatch_size):
    whole = mlp_batch(7)
    expected, _, metrics = one_step(whole, opt=opt)
    microbatched, _, same_metrics = one_step(whole, opt=opt, microbatch_size=microbatch_size)
    assert_near(microbatched, expected)
    assert_near(same_metrics, metrics)

    padded = jax.tree.map(lambda x: jnp.concatenate([x[:3], x[:2] * jnp.nan, x[3:], x[:1] + 1e30]), whole)
    mask = np.array([True] * 3 + [False] * 2 + [True] * 4 + [False])
    masked, _, masked_metrics = one_step(padded, mask, opt=opt, microbatch_size=microbatch_size)
    assert_near(masked, expected)
    assert_near(masked_metrics, metrics)


@pytest.mark.slow
def test_the_agreement_check_sees_a_clip_per_microbatch():
    """Wrong on purpose: clips the mean of a microbatch as if it were an example."""

    def pair_loss(params, pair):
        return jnp.mean(jax.vmap(mlp_loss, (None, 0))(params, pair))

    opt = dpopt.dp_sgd(0.1, **privacy_four(l2_clip_norm=0.5, noise_multiplier=0.0))
    batch, params = mlp_batch(6), mlp_params()
    pairs = jax.tree.map(lambda x: x.reshape(3, 2, -1), batch)
    wrong, _, _ = dpopt.make_train_step(pair_loss, opt)(params, opt.init(params), pairs, mask=None)
    with pytest.raises(AssertionError):
        assert_near(wrong, one_step(batch, opt=opt)[0])


@pytest.mark.slow
def test_a_step_follows_its_formula():
    opt = dpopt.dp_sgd(1.0, **privacy_four(l2_clip_norm=0.5, noise_multiplier=2.0, expected_batch_size=8))
    params, batch = mlp_params(), mlp_batch(5)
    new, _, _ = one_step(batch, opt=opt)
    total = loop_clipped_sum(jax.vmap(jax.grad(mlp_loss), (None, 0))(params, batch), 0.5)
    draw = dpopt.noise.standard_normal_like(jax.random.fold_in(jax.random.key(0), 0), params)
    expected = jax.tree.map(lambda p, s, z: p - (s + 0.5 * 2.0 * z) / 8, params, total, draw)
    assert_near(new, expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize("size", [0, 4])
def test_an_empty_batch_takes_a_noisy_step(size, microbatch_size):
    opt = dpopt.dp_sgd(1.0, **privacy_four(l2_clip_norm=0.5))
    new, state, metrics = one_step(mlp_batch(size), np.zeros(size, bool), opt=opt, microbatch_size=microbatch_size)
    draw = dpopt.noise.standard_normal_like(jax.random.fold_in(jax.random.key(0), 0), mlp_params())
    assert_near(new, jax.tree.map(lambda p, z: p - 0.5 * z / 4, mlp_params(), draw))
    assert int(metrics.num_examples) == 0 and all(np.isfinite(m) for m in metrics)
    assert int(optax.tree.get(state, "count")) == 1


def test_metrics_are_means_over_real_finite_examples():
    params = jnp.zeros(2)
    opt = dpopt.dp_sgd(1.0, **privacy_four(noise_multiplier=0.0))
    batch = jnp.array([[3.0, 4.0], [0.3, 0.4], [np.nan, 0.0], [100.0, 0.0]])
    step = dpopt.make_train_step(lambda w, x: jnp.sum(w * x) + jnp.sum(x), opt)
    _, _, metrics = step(params, opt.init(params), batch, np.array([True, True, True, False]))
    assert_near(
        metrics._asdict(),
        dict(
            loss=np.float32((7.0 + 0.7) / 2),
            mean_norm=np.float32((5 + 0.5) / 2),
            clip_fraction=np.float32(0.5),
            num_examples=np.int32(3),
            num_nonfinite=np.int32(1),
        ),
    )


def data(n=60):
    return jax.tree.map(np.asarray, mlp_batch(n, seed=3))


def loop(sampler, steps, opt=OPT, start=0, carry=None):
    params = mlp_params()
    params, state = (params, opt.init(params)) if carry is None else carry
    step = jax.jit(dpopt.make_train_step(mlp_loss, opt, microbatch_size=4))
    for t in range(start, steps):
        indices, mask = sampler.batch(t, size=32)
        params, state, _ = step(params, state, jax.tree.map(lambda x, i=indices: x[i], data()), mask)
    return params, state


@pytest.mark.slow
def test_steps_can_be_scanned_over_a_samplers_batches():
    sampler = dpopt.PoissonSampler(60, 8, seed=0, pad_to=32)
    step = dpopt.make_train_step(mlp_loss, OPT, microbatch_size=4)
    everything = jax.tree.map(jnp.asarray, data())

    @jax.jit
    def train(params, batches):
        def body(carry, batch):
            indices, mask = batch
            params, state, metrics = step(*carry, jax.tree.map(lambda x: x[indices], everything), mask)
            return (params, state), metrics

        return jax.lax.scan(body, (params, OPT.init(params)), batches)

    (params, state), metrics = train(mlp_params(), sampler.batches(0, 6))
    looped, looped_state = loop(sampler, 6)
    assert_near(params, looped)
    assert jax.tree.structure(state) == jax.tree.structure(looped_state)
    assert metrics.loss.shape == (6,)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one():
    sampler = dpopt.PoissonSampler(60, 8, seed=0)
    stored = jax.tree.map(np.asarray, jax.tree.map(lambda x: x, loop(sampler, 3, opt=LEGACY)))
    resumed = loop(dpopt.PoissonSampler(60, 8, seed=0), 6, opt=LEGACY, start=3, carry=stored)
    assert_identical(resumed, loop(sampler, 6, opt=LEGACY))


LEGACY = dpopt.dp_adam(0.1, **privacy_four(key=jax.random.PRNGKey(0)))  # plain arrays, which NumPy can save


@pytest.mark.slow
def test_steps_can_be_vmapped_over_seeds_and_learning_rates():
    batch, params = mlp_batch(4), mlp_params()

    def run(key, learning_rate):
        opt = dpopt.dp_adam(learning_rate, **privacy_four(key=key))
        return dpopt.make_train_step(mlp_loss, opt)(params, opt.init(params), batch, mask=None)[0]

    keys, rates = jax.random.split(jax.random.key(0), 3), jnp.array([0.1, 0.2, 0.3])
    together = jax.jit(jax.vmap(run))(keys, rates)
    for i in range(3):
        assert_near(jax.tree.map(lambda x, i=i: x[i], together), run(keys[i], rates[i]), 1e-5)  # Adam divides


@pytest.mark.slow
def test_arguments_may_be_donated():
    step = jax.jit(dpopt.make_train_step(mlp_loss, OPT), donate_argnums=(0, 1))
    for _ in range(2):
        params = mlp_params()
        step(params, OPT.init(params), mlp_batch(4), mask=None)


@pytest.mark.slow
def test_extra_arguments_reach_the_optimizer():
    seen = []

    def update(updates, state, params=None, **extra_args):
        seen.append(extra_args)
        return updates, state

    opt = dpopt.chain(dpopt.privatize(**privacy_four()), optax.GradientTransformationExtraArgs(lambda p: (), update))
    dpopt.make_train_step(dot_loss, opt)(
        jnp.zeros(2), opt.init(jnp.zeros(2)), jnp.ones((3, 2)), mask=None, public_value=2.0
    )
    assert [s["public_value"] for s in seen] == [2.0]


@pytest.mark.parametrize("opt", [optax.sgd(0.1), optax.adam(0.1)])
def test_an_optimizer_that_does_not_clip_is_refused(opt):
    with pytest.raises(TypeError, match="clip_and_sum first"):
        one_step(mlp_batch(4), opt=opt)


def test_an_optimizer_that_clips_without_noise_is_refused():
    with pytest.raises(ValueError, match=r"not private: the chain has no add_gaussian_noise"):
        one_step(mlp_batch(4), opt=optax.chain(dpopt.clip_and_sum(1.0), optax.sgd(0.1)))


def test_an_optimizer_that_ignores_the_gradients_is_refused():
    opt = optax.GradientTransformation(lambda p: (), lambda u, s, p=None: (jax.tree.map(jnp.zeros_like, p), s))
    with pytest.raises(ValueError, match="not private"):
        one_step(mlp_batch(4), opt=opt)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (dict(optimizer=0.1), TypeError, "optimizer must be"),
        (dict(loss_fn=None), TypeError, "loss_fn must be"),
        (dict(microbatch_size=0), ValueError, "microbatch_size must be at least 1"),
        (dict(engine="quick"), ValueError, "engine must be one of"),
    ],
)
def test_bad_arguments_are_named(kwargs, error, message):
    with pytest.raises(error, match=message):
        dpopt.make_train_step(**{**dict(loss_fn=mlp_loss, optimizer=OPT), **kwargs})


@pytest.mark.parametrize(
    ("batch", "mask", "message"),
    [
        ({**mlp_batch(4), "y": mlp_batch(3)["y"]}, None, "disagree on the batch size"),
        (mlp_batch(4), np.ones(3, bool), r"mask must have shape \(4,\)"),
    ],
)
def test_bad_batches_are_named_under_jit(batch, mask, message):
    with pytest.raises(ValueError, match=message):
        one_step(batch, mask)


def test_a_training_run_learns():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    batch = {"x": x, "y": np.stack([x[:, 0], -x[:, 1]], axis=1)}
    opt = dpopt.dp_adam(0.02, **privacy_four(expected_batch_size=100))
    step = jax.jit(dpopt.make_train_step(mlp_loss, opt))
    params = mlp_params()
    state = opt.init(params)
    losses = []
    for indices, mask in (dpopt.PoissonSampler(400, 100, seed=0, pad_to=256).batch(t) for t in range(60)):
        params, state, metrics = step(params, state, jax.tree.map(lambda a, i=indices: a[i], batch), mask)
        losses.append(float(metrics.loss))
    assert np.mean(losses[-5:]) < 0.3 * np.mean(losses[:5])
