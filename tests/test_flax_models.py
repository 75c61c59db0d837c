"""Typical Flax models: dropout, batch normalisation, layers that update their own variables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers import assert_identical, assert_near, norm

import dpopt
import dpopt.flax
from dpopt.flax import linen_loss, nnx_loss
from dpopt.run import checkpoint

CROSS_ENTROPY = optax.softmax_cross_entropy_with_integer_labels
X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = (np.arange(40) % 3).astype(np.int32)


class Dropped(nnx.Module):
    def __init__(self, rngs, rate=0.5):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.hidden(x)))


class LinenDropped(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        h = linen.Dropout(0.5, deterministic=not train)(linen.Dense(8)(x))
        return linen.Dense(3)(h)


def nnx_batch_loss(model, batch):
    return CROSS_ENTROPY(model(batch[0]), batch[1]).mean()


def nnx_dropped():
    return nnx_loss(Dropped(nnx.Rngs(0)), nnx_batch_loss)


def linen_dropped():
    model = LinenDropped()
    params = model.init(jax.random.key(0), X[:1], train=False)["params"]
    return linen_loss(model, CROSS_ENTROPY, rngs=["dropout"], train=True), params


BOTH = pytest.mark.parametrize("make", [nnx_dropped, linen_dropped])


@pytest.mark.one_in(2)
@BOTH
def test_dropout_differs_between_examples_and_follows_the_example_not_the_row(make):
    loss, params = make()
    alike = np.tile(X[:1], (6, 1)), np.zeros(6, np.int32)
    numbers = np.array([4, 9, 2, 7, 30, 11])
    order = np.array([3, 0, 5, 1, 4, 2])

    @jax.jit
    def gradients(step, numbers):
        keys = dpopt.example_keys(jax.random.key(3), step, numbers)
        grads = dpopt.per_example_grads(loss, engine="vmap")(params, (alike, keys), mask=None).materialize()
        return jnp.concatenate([g.reshape(6, -1) for g in jax.tree.leaves(grads)], axis=1)

    first = gradients(0, numbers)
    assert len({row.tobytes() for row in np.asarray(first)}) == 6
    assert_near(gradients(0, numbers[order]), first[order], 1e-6)
    assert not np.allclose(gradients(1, numbers), first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine, make",
    [
        ("vmap", nnx_dropped),
        ("ghost", linen_dropped),
        ("vmap", linen_dropped),
        ("ghost", nnx_dropped),
    ],
)
def test_both_engines_clip_what_dropout_leaves(make, engine):
    loss, params = make()
    batch = (X[:6], Y[:6]), dpopt.example_keys(jax.random.key(3), 0, np.arange(6))
    found = jax.jit(
        lambda p: dpopt.per_example_grads(loss, engine=engine)(p, batch, mask=None).clipped_sum(dpopt.FlatClip(0.5)).sum
    )(params)
    gradient = jax.jit(lambda i: jax.grad(loss)(params, jax.tree.map(lambda x: jnp.asarray(x)[i], batch)))
    grads = [jax.device_get(gradient(i)) for i in range(6)]
    scaled = [jax.tree.map(lambda x, g=g: x * np.float32(min(1, 0.5 / norm(g))), g) for g in grads]
    assert_near(found, jax.tree.map(lambda *g: sum(g), *scaled), 1e-5)


@BOTH
def test_dropout_without_a_key_is_refused(make):
    loss, params = make()
    with pytest.raises(ValueError, match="all examples would share one draw") as refused:
        dpopt.per_example_grads(loss)(params, (X[:6], Y[:6]), mask=None)
    assert "dpopt.example_keys(key, step, indices)" in str(refused.value)


def test_linen_streams_that_were_not_named_are_asked_for():
    model = LinenDropped()
    params = model.init(jax.random.key(0), X[:1], train=False)["params"]
    loss = linen_loss(model, CROSS_ENTROPY, train=True)
    with pytest.raises(ValueError, match=r"linen_loss\(..., rngs=\['dropout'\]\)"):
        loss(params, (X[0], Y[0]))


def test_dropout_that_is_switched_off_takes_no_key():
    model = Dropped(nnx.Rngs(0))
    model.eval()
    for off in (model, Dropped(nnx.Rngs(0), rate=0.0)):
        loss, params = nnx_loss(off, nnx_batch_loss)
        assert not hasattr(loss, "takes_key") and np.isfinite(loss(params, (X[0], Y[0])))


def _plan(key):
    builder = dpopt.Builder(num_examples=40, expected_batch_size=8, steps=4, key=key, seed=7)
    return builder.clip(1.0).noise(1.0).then(optax.sgd(0.1)).build()


@pytest.mark.slow
@BOTH
def test_a_plan_trains_with_dropout_and_a_resumed_run_draws_the_same(make, tmp_path):
    loss, params = make()
    fetch = lambda rows: (X[rows], Y[rows])  # noqa: E731

    class Killed(Exception):
        pass

    def dies(step, _):
        if step == 3:
            raise Killed

    def run(directory, key, **options):
        with checkpoint.Checkpointer(directory, every=2) as keeper:
            return _plan(key).run(loss, params, fetch, checkpointer=keeper, replay=True, **options)

    key = dpopt.secure_key()
    with pytest.raises(Killed):
        run(tmp_path / "killed", key, on_step=dies)
    dpopt.run.entropy._runs.clear()  # as in another process
    resumed = run(tmp_path / "killed", key)
    dpopt.run.entropy._runs.clear()
    whole = run(tmp_path / "whole", key)
    assert resumed.lost == 0
    assert_identical(resumed.params, whole.params)


class Normed(nnx.Module):
    """Batch normalisation in a list, in a sequence, alone, and one layer in two places."""

    def __init__(self, rngs, **options):
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs, **options)
        self.again = self.norm
        self.blocks = nnx.List([nnx.Sequential(nnx.Linear(6, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs, **options))])
        self.out = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        x = self.again(self.norm(self.first(x)))
        return self.out(self.blocks[0](x))


class LinenNormed(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        return linen.Dense(3)(linen.BatchNorm(use_running_average=not train, name="norm")(linen.Dense(6)(x)))


def test_batch_normalisation_is_refused_layer_by_layer():
    with pytest.raises(ValueError) as refused:
        nnx_loss(Normed(nnx.Rngs(0)), nnx_batch_loss)
    message = str(refused.value)
    assert "Normed has layers that mix examples" in message and "blocks.0.layers.1 (BatchNorm)" in message
    assert "norm (BatchNorm)" in message or "again (BatchNorm)" in message
    assert "replace_batch_norm(model)" in message and "public data" in message

    model = LinenNormed()
    variables = model.init(jax.random.key(0), X[:1], train=False)
    stats = {"batch_stats": variables["batch_stats"]}
    for options in ({}, {"train": True}):
        with pytest.raises(ValueError, match=r"norm \(BatchNorm\)"):
            linen_loss(model, CROSS_ENTROPY, variables=stats, **options)(variables["params"], (X[0], Y[0]))
    with pytest.raises(ValueError, match="running statistics"):
        linen_loss(model, CROSS_ENTROPY, variables=stats, mutable=["batch_stats"])
    with pytest.raises(ValueError, match=r"norm \(BatchNorm\)"):
        dpopt.flax.check(model, X[:1])
    with pytest.raises(ValueError, match=r"norm \(BatchNorm\)"):
        dpopt.flax.check(model, jax.ShapeDtypeStruct((1, 4), "float32"), train=True)


@pytest.mark.slow
def test_frozen_statistics_pass():
    frozen = Normed(nnx.Rngs(0))
    frozen.eval()
    for model in (frozen, Normed(nnx.Rngs(0), use_running_average=True)):
        dpopt.flax.check(model)
        loss, params = nnx_loss(model, nnx_batch_loss)
        dpopt.verify(loss, params, (X[:6], Y[:6]))
    model = LinenNormed()
    dpopt.flax.check(model, X[:1], train=False)
    variables = model.init(jax.random.key(0), X[:1], train=False)
    loss = linen_loss(model, CROSS_ENTROPY, variables={"batch_stats": variables["batch_stats"]}, train=False)
    assert np.isfinite(loss(variables["params"], (X[0], Y[0])))


@pytest.mark.slow
def test_batch_normalisation_is_replaced_wherever_it_is():
    model = Normed(nnx.Rngs(0))
    model.norm.scale[...] = jnp.arange(6.0)
    new = dpopt.flax.replace_batch_norm(model)
    dpopt.flax.check(new)
    assert isinstance(new.norm, nnx.GroupNorm) and new.norm is new.again
    assert isinstance(new.blocks[0].layers[1], nnx.GroupNorm)
    np.testing.assert_array_equal(new.norm.scale[...], np.arange(6.0))
    assert isinstance(model.norm, nnx.BatchNorm) and isinstance(model.blocks[0].layers[1], nnx.BatchNorm)
    run = nnx.jit(lambda model, x: model(x))
    np.testing.assert_allclose(np.asarray(run(new, X[:5]))[:2], run(new, X[:2]), rtol=1e-5)  # examples are independent
    assert not np.allclose(np.asarray(run(model, X[:5]))[:2], run(model, X[:2]), rtol=1e-2)  # here they are not
    loss, params = nnx_loss(new, nnx_batch_loss)
    dpopt.verify(loss, params, (X[:6], Y[:6]))


def test_replacing_keeps_what_can_be_kept():
    bare = dpopt.flax.replace_batch_norm(nnx.BatchNorm(7, use_scale=False, use_bias=False, rngs=nnx.Rngs(0)))
    assert bare.num_groups == 7 and not bare.use_scale and not bare.use_bias
    wide = dpopt.flax.replace_batch_norm(nnx.BatchNorm(64, epsilon=1e-3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert (wide.num_groups, wide.epsilon, wide.dtype) == (32, 1e-3, jnp.bfloat16)


@pytest.mark.parametrize("function", [dpopt.flax.check, dpopt.flax.replace_batch_norm])
def test_what_is_no_model_is_refused(function):
    with pytest.raises(TypeError, match=r"model must be a .*; got list"):
        function([nnx.Linear])


class Counting(nnx.Module):
    """Updates its own variables while it runs."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 3, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return self.linear(x)


def test_what_a_model_updates_on_its_way_is_dropped():
    model = Counting(nnx.Rngs(0))
    loss, params = nnx_loss(model, nnx_batch_loss)
    dpopt.verify(loss, params, (X[:6], Y[:6]))
    assert model.calls[...] == 0
