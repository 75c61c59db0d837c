"""Faults of direct calls: forgotten masks, means taken for rows, keys by row."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import distance, dot_loss, mlp_batch, mlp_loss, mlp_params, norm, privacy_four

import dpopt
from dpopt.gradients import stacked_grads

OPT = dpopt.dp_sgd(1.0, **privacy_four(noise_multiplier=0.0))
W, X = jnp.zeros(4), np.ones((6, 4), np.float32)
TAKE_A_MASK = {
    "promise": lambda **mask: dpopt.per_example_grads(dot_loss)(W, X, **mask),
    "clients": lambda **mask: dpopt.federated.client_deltas(dot_loss, local_steps=1, local_learning_rate=1.0)(
        W, X[:, None], **mask
    ),
    "stacked": lambda **mask: stacked_grads(X, **mask),
    "step": lambda **mask: dpopt.make_train_step(dot_loss, OPT)(W, OPT.init(W), X, **mask),
    "jitted step": lambda **mask: jax.jit(dpopt.make_train_step(dot_loss, OPT))(W, OPT.init(W), X, **mask),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("take", TAKE_A_MASK.values(), ids=TAKE_A_MASK)
def test_forgotten_mask(take):
    with pytest.raises(TypeError, match=r"pass the batch's mask.*or mask=None if no row is padding"):
        take()
    take(mask=None)
    take(mask=np.ones(6, bool))


def test_the_mask_has_no_default():
    for function in (dpopt.per_example_grads(dot_loss), stacked_grads, dpopt.make_train_step(dot_loss, OPT)):
        assert inspect.signature(function).parameters["mask"].default is inspect.Parameter.empty


SAMPLERS = {
    "default padding": dpopt.PoissonSampler(1_000, 100, seed=0),
    "a lot": dpopt.PoissonSampler(2_000, 200, seed=0, pad_to=256),
    "almost all": dpopt.PoissonSampler(64, 60, seed=0, pad_to=64),
    "fixed size": dpopt.FixedSizeSampler(100, 13, seed=0, pad_to=50),
    "empty batches": dpopt.PoissonSampler(100, 0.1, seed=0, pad_to=8),
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_padding_repeats_nobody(sampler):
    for step in range(8):
        indices, mask = sampler.batch(step)
        np.testing.assert_array_equal(indices[mask], sampler.drawn(step))
        assert len(set(indices.tolist())) == len(indices), "also where the mask is dropped"
        np.testing.assert_array_equal(indices, sampler.batch(step).indices)


def test_a_batch_larger_than_the_data_repeats_as_little_as_it_can():
    indices, mask = dpopt.PoissonSampler(10, 5, seed=0, pad_to=32).batch(0)
    assert set(np.bincount(indices, minlength=10)) == {3, 4}
    assert len(set(indices[mask])) == mask.sum()


def test_samples_are_what_they_were_in_version_0_1():
    assert dpopt.PoissonSampler(50, 6, seed=5).drawn(3).tolist() == [12, 2, 44, 30, 1, 19, 18]
    assert dpopt.FixedSizeSampler(50, 6, seed=5).drawn(3).tolist() == [43, 32, 13, 2, 47, 31]


TAKE_ROWS = {
    "clip_and_sum": lambda: dpopt.clip_and_sum(1.0),
    "diagonal": lambda: dpopt.precondition_by_side_information(0.5),
    "dp_sgd": lambda: dpopt.dp_sgd(1.0, **privacy_four()),
    "dp_adam": lambda: dpopt.dp_adam(1.0, **privacy_four()),
    "adadps": lambda: dpopt.adadps(1.0, scale=1.0, **privacy_four()),
    "dp2": lambda: dpopt.dp2(1.0, adaptive_learning_rate=1.0, adaptive_l2_clip_norm=1.0, delay=2, **privacy_four()),
    "two queries": lambda: dpopt.baselines.dp2_extra_query(
        1.0, adaptive_learning_rate=1.0, adaptive_l2_clip_norm=1.0, delay=2, **privacy_four()
    ),
    "optax.chain": lambda: optax.chain(dpopt.clip_and_sum(1.0), dpopt.add_gaussian_noise(1.0, jax.random.key(0))),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", TAKE_ROWS.values(), ids=TAKE_ROWS)
def test_noparams(make):
    """The rows of an ordinary mean gradient are not examples, whatever the shape of the gradient."""
    opt, w = make(), jnp.zeros((6, 4))
    with pytest.raises(ValueError, match=r"parameters are missing: call update\(gradients, state, params\)"):
        opt.update(jnp.ones((6, 4)), opt.init(w))
    with pytest.raises(ValueError, match=r"has shape \(6, 4\) for a parameter of shape \(6, 4\)"):
        opt.update(jnp.ones((6, 4)), opt.init(w), w)
    opt.update(jnp.ones((3, 6, 4)), opt.init(w), w)


class MedianClip:
    """Uses the whole batch, if it is given one: weights an example by the median norm of the batch."""

    sensitivity = 1.0

    def coefficients(self, leaf_norms):
        norms = jnp.sqrt(sum(n**2 for n in jax.tree.leaves(leaf_norms)))
        c = 1 / jnp.maximum(jnp.median(norms), norms)
        return jax.tree.map(lambda _: c, leaf_norms)


class MedianFlatClip(dpopt.FlatClip):
    """A subclass of a built-in clip may also use the whole batch."""

    def coefficients(self, leaf_norms):
        return MedianClip().coefficients(leaf_norms)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "clip",
    [
        pytest.param(MedianClip(), id="foreign", marks=pytest.mark.slow),
        pytest.param(MedianFlatClip(1.0), id="subclass"),
    ],
)
@pytest.mark.parametrize("engine", ["vmap", "ghost", "stacked"])
def test_a_clip_sees_one_row(engine, clip):
    params, batch = mlp_params(), mlp_batch(5)
    batch["y"] = batch["y"] * np.array([[30.0], [20.0], [10.0], [1.0], [0.1]], np.float32)

    @jax.jit
    def total(mask):
        if engine == "stacked":
            made = stacked_grads(jax.vmap(jax.grad(mlp_loss), (None, 0))(params, batch), mask=mask)
        else:
            made = dpopt.per_example_grads(mlp_loss, engine=engine, microbatch_size=3)(params, batch, mask=mask)
        return made.clipped_sum(clip).sum

    alone = [norm(total(np.arange(5) == i)) for i in range(5)]
    np.testing.assert_allclose(alone, 1, rtol=1e-5)  # by its own median, every example has norm 1
    moved = distance(total(np.ones(5, bool)), total(np.arange(5) != 0))
    assert moved <= 1 + 1e-5


def test_a_clip_that_returns_rows_for_one_example_is_refused():
    class Wrong(MedianClip):
        def coefficients(self, leaf_norms):
            return jnp.ones(3)

    with pytest.raises(ValueError, match=r"Wrong.coefficients is given the norms of one example.*\(3,\)"):
        stacked_grads(np.ones((3, 2), np.float32), mask=None).clipped_sum(Wrong())


def dropout_loss(w, example):
    x, key = example
    return jnp.sum(w * jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0))


@pytest.mark.slow
def test_dropoutrow():
    """If examples are left out, reordered, padded or split into microbatches, no other example's mask changes."""
    x = np.random.default_rng(0).normal(size=(65, 8)).astype(np.float32)

    @functools.partial(jax.jit, static_argnames=("by_row", "microbatch_size"))
    def total(rows, mask=None, by_row=False, **options):
        key = jax.random.key(5)
        keys = jax.random.split(key, len(rows)) if by_row else dpopt.example_keys(key, 7, rows)
        promise = dpopt.per_example_grads(dropout_loss, **options)(
            jnp.zeros(8), (jnp.asarray(x)[rows], keys), mask=mask
        )
        return promise.clipped_sum(dpopt.FlatClip(1.0)).sum

    everybody = np.arange(65)
    whole = total(everybody)
    assert distance(total(everybody, by_row=True), total(everybody[1:], by_row=True)) > 2  # the old recipe
    for i in (0, 30, 64):
        assert distance(whole, total(np.delete(everybody, i))) <= 1 + 1e-5
    padded = np.concatenate([everybody[::-1], [3, 4, 5]])
    for same in (total(everybody[::-1]), total(padded, np.arange(68) < 65), total(everybody, microbatch_size=20)):
        np.testing.assert_allclose(whole, same, atol=1e-5)


def test_keys_follow_from_step_and_example():
    key = jax.random.key(5)
    data = [jax.random.key_data(dpopt.example_keys(key, step, np.arange(50))) for step in range(4)]
    assert len({tuple(k) for k in np.concatenate(data).tolist()}) == 200
    with pytest.raises(TypeError, match="indices must be a vector of integers"):
        dpopt.example_keys(key, 0, np.ones(3))


@pytest.mark.slow
def test_a_run_hands_the_loss_a_key_by_step_and_example():
    """Equals a loop written by hand; a run stopped half way continues as if it had not been stopped."""
    x, key, noise_key = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32), jax.random.key(5), 201

    def plan():
        builder = dpopt.Builder(
            num_examples=20, expected_batch_size=6, steps=4, key=jax.random.key(noise_key), seed=9, pad_to=16
        )
        return builder.clip(1.0).noise(0.0).then(optax.sgd(1.0)).build()

    run = functools.partial(plan().run, dropout_loss, fetch_batch=lambda rows: x[rows], example_key=key, replay=True)
    half = run(jnp.zeros(3), steps=2)
    end = run(half.state, steps=4)

    made, w = plan(), jnp.zeros(3)
    step, state = jax.jit(made.train_step(dropout_loss)), made.optimizer.init(w)
    for t in range(4):
        indices, mask = made.sampler.batch(t)
        w, state, _ = step(w, state, (x[indices], dpopt.example_keys(key, t, indices)), mask)
    np.testing.assert_allclose(end.params, w, atol=1e-6)


def test_multisteps():
    """Wrappers that would withhold gradients from the clip."""
    w, rows = {"a": jnp.zeros(3), "b": jnp.zeros(3)}, {"a": jnp.ones((4, 3)), "b": jnp.ones((4, 3))}
    masked = optax.masked(OPT, {"a": True, "b": False})
    with pytest.raises(ValueError, match="would bypass the clip and the noise"):
        masked.update(rows, masked.init(w), w)
    with pytest.raises(TypeError, match="not marked as clients"):
        dpopt.federated.client_level(OPT).update(rows["a"], OPT.init(w["a"]), w["a"])
    several = optax.MultiSteps(OPT, 2)
    with pytest.raises(ValueError, match="already averaged or clipped"):
        several.update(rows["a"], several.init(w["a"]), w["a"])
    with pytest.raises(ValueError, match="parameters are missing"):
        several.update(rows["a"], several.init(w["a"]))
