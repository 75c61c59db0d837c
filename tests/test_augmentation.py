"""Augmentation multiplicity: the mean over augmentations is clipped, for every engine, model, unit and run."""

import functools
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import (
    assert_identical,
    assert_near,
    distance,
    enable_x64,
    loop_clipped_sum,
    mlp_batch,
    mlp_loss,
    mlp_params,
    norm,
)
from runs import run, script, tiny_plan

import dpopt
from dpopt import keys, users
from dpopt.augmentation import augmented
from dpopt.flax import linen_loss, nnx_loss
from dpopt.run import checkpoint

CROSS_ENTROPY = optax.softmax_cross_entropy_with_integer_labels
ENGINES = ("ghost", "vmap", "auto")


def jitter(example, key):
    """Moves all leaves of an example by random amounts on a random scale."""
    leaves, structure = jax.tree.flatten(example)
    ends = np.cumsum([1] + [x.size for x in leaves])
    # A single draw for all, since XLA takes long to compile each.
    size, *draws = jnp.split(3 * jax.random.uniform(key, ends[-1:], leaves[0].dtype, minval=-1), ends[:-1])
    moved = [x + size * d.reshape(x.shape) for x, d in zip(leaves, draws, strict=True)]
    return jax.tree.unflatten(structure, moved)


def numbered(size, step=0):
    return dpopt.example_keys(jax.random.key(5), step, np.arange(size))


def one(batch, i):
    return jax.tree.map(lambda x: x[i], batch)


def mean_gradients(loss_fn, augment, params, examples, row_keys, multiplicity, dropout=False):
    """Gradients of single augmentations, one after the other, averaged by NumPy in float64: leaves ``(B, ...)``."""

    def of_one(example, key, k):
        own, left = jax.random.split(jax.random.fold_in(key, k))
        variant = augment(example, own)
        return jax.grad(loss_fn)(params, (variant, left) if dropout else variant)

    def of_row(row):
        return jax.lax.map(lambda k: of_one(*row, k), jnp.arange(multiplicity))

    grads = jax.jit(lambda *rows: jax.lax.map(of_row, rows))(examples, row_keys)
    return jax.tree.map(lambda g: np.asarray(g).astype(np.float64).mean(1), grads)


@functools.partial(jax.jit, static_argnums=0)
def clipped_sum(promise, params, batch, mask, clip_norm):
    """The clipped sum, and who was clipped."""
    found = promise(params, batch, mask=mask).clipped_sum(dpopt.FlatClip(clip_norm))
    return found.sum, found.sensitive.was_clipped


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("multiplicity", [1, 3, 8])
@pytest.mark.slow
def test_the_mean_gradient_is_what_is_clipped(engine, multiplicity):
    with enable_x64():
        params = mlp_params(dtype=jnp.float64)
        batch = jax.tree.map(lambda x: np.asarray(x, np.float64), mlp_batch(5))
        row_keys, mask = numbered(5), np.array([True, True, False, True, True])
        expected = mean_gradients(mlp_loss, jitter, params, batch, row_keys, multiplicity)
        clip_norm = float(np.median([norm(one(expected, i)) for i in range(5)]))
        loss_fn = augmented(mlp_loss, jitter, multiplicity=multiplicity)
        promises = [dpopt.per_example_grads(loss_fn, engine=engine, microbatch_size=parts) for parts in (None, 2)]

        @jax.jit
        def computed(batch):
            sums = [clipped_sum(promise, params, batch, mask, clip_norm) for promise in promises]
            return sums, [promise(params, batch, mask=None).materialize() for promise in promises[1:]]

        sums, (rows,) = computed((batch, row_keys))
        for found, was_clipped in sums:
            assert_near(found, loop_clipped_sum(expected, clip_norm, mask=mask), 1e-9)
            assert 0 < np.sum(was_clipped) < 4  # some are clipped and some are not
        assert_near(rows, expected, 1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_one_augmentation_that_changes_nothing_is_the_plain_loss(engine):
    params, batch = mlp_params(), mlp_batch(5)
    loss_fn = augmented(mlp_loss, lambda example, key: example, multiplicity=1)

    @functools.partial(jax.jit, static_argnums=0)
    def found(loss_fn, batch):
        promise = dpopt.per_example_grads(loss_fn, engine=engine)(params, batch, mask=None)
        return promise.clipped_sum(dpopt.FlatClip(0.5)).sum, promise.sensitive.losses

    assert_identical(found(loss_fn, (batch, numbered(5))), found(mlp_loss, batch))
    more = augmented(mlp_loss, lambda example, key: example, multiplicity=7)
    assert_near(found(more, (batch, numbered(5))), found(mlp_loss, batch), 1e-5)


@functools.cache
def wild_sum(engine, multiplicity):
    """A clipped sum under all kinds of augmentations: some make an example huge or NaN."""

    @jax.jit
    def clipped(rows, mask, largest, share_of_nan):
        def wild(example, key):
            how, own = jax.random.split(key)
            factor = 1 + largest * jax.random.normal(own)
            factor = jnp.where(jax.random.uniform(how) < share_of_nan, jnp.nan, factor)
            return jax.tree.map(lambda x: x * factor, example)

        loss_fn = augmented(mlp_loss, wild, multiplicity=multiplicity)
        promise = dpopt.per_example_grads(loss_fn, engine=engine)(mlp_params(), rows, mask=mask)
        found = promise.clipped_sum(dpopt.FlatClip(1.0))
        return found.sum, found.sensitive.norms

    return clipped


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(data=st.data())
def test_an_example_moves_the_sum_by_the_clip_norm_at_most_whatever_the_multiplicity(data):
    clipped = wild_sum(data.draw(st.sampled_from(["ghost", "vmap"])), data.draw(st.sampled_from([1, 5])))
    how = data.draw(st.sampled_from([0.0, 1.0, 1e4])), data.draw(st.sampled_from([0.0, 0.1]))
    left_out, size = data.draw(st.integers(0, 5), "left out"), 6
    batch = mlp_batch(size, seed=data.draw(st.integers(0, 99), "seed"))
    row_keys = dpopt.example_keys(jax.random.key(5), data.draw(st.integers(0, 99), "step"), np.arange(size))
    whole, norms = clipped((batch, row_keys), np.ones(size, bool), *how)
    # Without that example the others are in other rows, but draw the same.
    order = np.append(np.delete(np.arange(size), left_out), left_out)
    rows = jax.tree.map(lambda x: x[order].at[-1].set(jnp.nan), batch), row_keys[order]
    fewer, others = clipped(rows, np.arange(size) < size - 1, *how)
    assert distance(whole, fewer) <= 1.0001
    np.testing.assert_allclose(others[:-1], norms[order][:-1], rtol=1e-4)


@pytest.mark.slow
def test_more_augmentations_cost_no_privacy_and_bring_the_mean_closer():
    """The gradient of a mean of draws has less variance, and the event of a run does not depend on K."""
    spread, epsilons = [], []
    for multiplicity in (1, 16):
        loss_fn = augmented(mlp_loss, jitter, multiplicity=multiplicity)
        promise = functools.partial(dpopt.per_example_grads(loss_fn), mlp_params(), mask=None)
        same = jax.tree.map(lambda x: np.repeat(x, 64, axis=0), mlp_batch(1))
        grads = jax.jit(lambda rows, promise=promise: promise(rows).materialize())((same, numbered(64)))
        spread.append(np.mean([np.var(g, axis=0).mean() for g in jax.tree.leaves(grads)]))
        plan = tiny_plan(steps=2)
        result = run(plan, loss=augmented(squared, jitter, multiplicity=multiplicity))
        epsilons.append(result.epsilon(delta=1e-5))
    assert 8 < spread[0] / spread[1] < 32 and epsilons[0] == epsilons[1]


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3))(x[..., None]))
        return nn.Dense(3)(nn.avg_pool(x, (2, 2), (2, 2)).reshape(len(x), -1))


def cropped(example, key):
    x, y = example
    corner = jax.random.randint(key, (2,), 0, 3)
    return jax.lax.dynamic_slice(jnp.pad(x, 1), corner, x.shape), y


@pytest.mark.slow
def test_the_ghost_engine_follows_and_costs_about_as_many_ordinary_gradients():
    model = Convolutional()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8, 8)), jnp.float32)
    params = model.init(jax.random.key(0), x)["params"]
    loss_fn, example = linen_loss(model, CROSS_ENTROPY), (x[0], jnp.array(1))
    plain = dpopt.explain(loss_fn, params, example, batch_size=64).plan
    for multiplicity in (4, 16):
        found = dpopt.explain(
            augmented(loss_fn, cropped, multiplicity=multiplicity), params, (example, numbered(1)[0]), batch_size=64
        )
        assert "conv_general_dilated" in str(found) and "dot_general" in str(found)
        assert found.plan.ghost_cost < 1.5 * multiplicity * plain.ordinary_cost


class NNXDropped(nnx.Module):
    def __init__(self, rngs):
        self.dropout, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(x))


class LinenDropped(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


def nnx_model(dropout):
    model = NNXDropped(nnx.Rngs(0))
    if not dropout:
        model.eval()
    return nnx_loss(model, lambda m, batch: CROSS_ENTROPY(m(batch[0]), batch[1]).mean())


def linen_model(dropout):
    model = LinenDropped()
    params = model.init(jax.random.key(0), jnp.zeros((1, 4)), train=False)["params"]
    return linen_loss(model, CROSS_ENTROPY, rngs=["dropout"] if dropout else (), train=dropout), params


def blurred(example, key):
    return example[0] + 0.5 * jax.random.normal(key, example[0].shape), example[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dropout, make",
    [
        (True, nnx_model),
        (False, linen_model),
        (False, nnx_model),
        (True, linen_model),
    ],
)
@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_flax_models_and_their_dropout(make, dropout, engine):
    """Every augmentation has its own draws, of the augmentation and of the model."""
    loss_fn, params = make(dropout)
    rng = np.random.default_rng(0)
    batch = jnp.asarray(rng.normal(size=(5, 4)), jnp.float32), jnp.asarray(rng.integers(0, 3, 5))
    row_keys = numbered(5)
    expected = loop_clipped_sum(mean_gradients(loss_fn, blurred, params, batch, row_keys, 3, dropout), 0.4)
    promise = dpopt.per_example_grads(augmented(loss_fn, blurred, multiplicity=3), engine=engine)
    found, was_clipped = clipped_sum(promise, params, (batch, row_keys), None, 0.4)
    assert np.any(was_clipped)
    assert_near(found, expected, 1e-5)


def squared(w, x):
    return 0.5 * jnp.sum((jnp.tanh(w) - x) ** 2)


@pytest.mark.slow
def test_a_run_draws_by_the_step_and_the_example():
    """A run without noise, repeated by hand: keys follow from the sampler's seed, the step and the example."""
    loss_fn = augmented(squared, jitter, multiplicity=3)
    plan = tiny_plan(steps=4, noise=0.0, rule=optax.sgd(0.5))
    result = run(plan, loss=loss_fn, replay=True)
    data = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    w = jnp.zeros(3)
    for step in range(4):
        numbers = plan.sampler.drawn(step)
        row_keys = dpopt.example_keys(keys.seeded_key(plan.sampler.seed), step, numbers)
        grads = mean_gradients(squared, jitter, w, data[numbers], row_keys, 3)
        w = w - 0.5 * loop_clipped_sum(grads, 1.0) / 8
    assert_near(result.params, w, 1e-4)


@pytest.mark.slow
def test_a_run_that_was_killed_draws_the_same_augmentations_again(tmp_path):
    loss_fn = augmented(squared, jitter, multiplicity=3)

    class Killed(Exception):
        pass

    def dies(step, _):
        if step == 3:
            raise Killed

    def go(directory, **options):
        with checkpoint.Checkpointer(directory, every=2) as keeper:
            return run(tiny_plan(steps=6), loss=loss_fn, checkpointer=keeper, replay=True, **options)

    with pytest.raises(Killed):
        go(tmp_path / "killed", on_step=dies)
    resumed, undisturbed = go(tmp_path / "killed"), go(tmp_path / "undisturbed")
    assert_identical(resumed.params, undisturbed.params)
    assert resumed.ledger.steps == 6
    other = run(tiny_plan(steps=6), loss=augmented(squared, jitter, multiplicity=4), replay=True)
    assert distance(other.params, undisturbed.params) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_of_users_every_example_is_augmented(engine):
    params, examples = mlp_params(), jax.tree.map(np.asarray, mlp_batch(12))
    batch = jax.tree.map(lambda x: x.reshape((3, 4) + x.shape[1:]), examples)
    counts = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], bool)
    row_keys = numbered(3)
    own = jax.jit(lambda keys: jnp.concatenate([jax.random.split(keys[u], 4) for u in range(3)]))(row_keys)
    grads = mean_gradients(mlp_loss, jitter, params, examples, own, 2)
    spans = [slice(4 * u, 4 * u + n) for u, n in enumerate(counts.sum(1))]
    expected = loop_clipped_sum(jax.tree.map(lambda g: np.stack([g[s].mean(0) for s in spans]), grads), 1.0)
    promise = users.per_user_grads(augmented(mlp_loss, jitter, multiplicity=2), engine=engine)
    found, was_clipped = clipped_sum(promise, params, (users.Users(batch, counts), row_keys), None, 1.0)
    assert np.any(was_clipped)
    assert_near(found, expected, 1e-5)


@pytest.mark.slow
def test_a_plan_for_users_puts_the_keys_there():
    rng = np.random.default_rng(0)
    groups = users.group(rng.integers(20, size=100), max_examples=3)
    builder = dpopt.Builder(
        num_examples=groups.num_users, expected_batch_size=8, steps=3, key=jax.random.key(0), unit="user"
    )
    plan = builder.clip(1.0).noise(1.0).then(optax.sgd(0.1)).build()
    data = rng.normal(size=(100, 3)).astype(np.float32)
    loss_fn = users.per_user_grads(augmented(squared, jitter, multiplicity=3))
    result = run(plan, loss=loss_fn, data=groups.batches(data))
    assert result.ledger.steps == 3 and result.unit == "user"


@pytest.mark.slow
def test_eight_devices_compute_the_same():
    here = Path(__file__).parent / "programs" / "augmented_run.py"
    eight, alone = script(here, 8, devices=8), script(here, 1)
    assert (eight["devices"], alone["devices"]) == (8, 1)
    np.testing.assert_allclose(eight["params"], alone["params"], rtol=2e-4, atol=2e-5)


def test_what_a_loss_returns_beside_its_value_has_an_axis_of_augmentations():
    def with_aux(w, x):
        return squared(w, x), x

    for multiplicity in (1, 3):
        loss_fn = augmented(with_aux, jitter, multiplicity=multiplicity)
        promise = functools.partial(dpopt.per_example_grads(loss_fn, has_aux=True), jnp.zeros(3), mask=None)
        aux = jax.jit(lambda rows, promise=promise: promise(rows).clipped_sum(dpopt.FlatClip(1.0)).sensitive.aux)(
            (np.ones((4, 3), np.float32), numbered(4))
        )
        assert aux.shape == (4, multiplicity, 3) and len(np.unique(np.asarray(aux))) == aux.size


def per_user():
    return users.per_user_grads(squared)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"loss_fn": None}, TypeError, r"loss_fn must be a function of \(params, example\)"),
        ({"augment": "flip"}, TypeError, r"augment must be a function of \(example, key\)"),
        ({"loss_fn": per_user()}, TypeError, "single one instead: per_user_grads"),
        ({"multiplicity": 0}, ValueError, "multiplicity"),
        ({"multiplicity": 2.5}, TypeError, "multiplicity"),
        ({"multiplicity": True}, TypeError, "multiplicity"),
        ({"multiplicity": jnp.ones(3)}, TypeError, "multiplicity"),
    ],
)
def test_what_is_refused(changes, error, message):
    arguments = {"loss_fn": squared, "augment": jitter, "multiplicity": 2} | changes
    with pytest.raises(error, match=message):
        augmented(arguments.pop("loss_fn"), arguments.pop("augment"), **arguments)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_loss_refuses(engine):
    def promised(augment, batch, loss=mlp_loss):
        loss_fn = augmented(loss, augment, multiplicity=2)
        return dpopt.per_example_grads(loss_fn, engine=engine)(mlp_params(), batch, mask=None)

    batch, row_keys = mlp_batch(4), numbered(4)
    with pytest.raises(ValueError, match=r"has no key.*dpopt\.example_keys\(key, step, indices\)"):
        promised(jitter, batch)
    with pytest.raises(ValueError, match="augment must return the tree structure"):
        promised(lambda example, key: example["x"], (batch, row_keys))
    with pytest.raises(ValueError, match="augment must return the tree structure"):
        promised(lambda example, key: None, (batch, row_keys))
    with pytest.raises(ValueError, match="must be a real scalar"):
        promised(jitter, (batch, row_keys), lambda p, example: example["x"] * p["out"]["b"][0])
    streams = jax.random.split(jax.random.key(0, impl="rbg"), 4)  # rows would share it under vmap
    with pytest.raises(TypeError, match="threefry"):
        promised(jitter, (batch, streams)).clipped_sum(dpopt.FlatClip(1.0))
