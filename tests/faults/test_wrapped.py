"""What a wrapper must carry over from the loss or the data inside it: a search over wrappers within wrappers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import run, tiny_plan

import dpopt
from dpopt.audit.canaries import plant
from dpopt.augmentation import augmented
from dpopt.constants import constants_of, given, with_constants
from dpopt.engines import fallback
from dpopt.federated import client_deltas
from dpopt.optimizers.filters import look_ahead
from dpopt.run.data import check_parts, rows_of
from dpopt.run.loading import sharded_rows
from dpopt.run.sharding import make_mesh
from dpopt.samplers.parts import CyclicPoissonSampler, EpochSampler
from dpopt.users import Users, group, per_user_grads

PEOPLE = 6
IDS = np.repeat(np.arange(PEOPLE), 2)
ROWS = np.ones((2 * PEOPLE, 2), np.float32)


def loss(params, example, constant):
    x = example[0] if isinstance(example, tuple) else example
    return jnp.sum((params - x) ** 2) * constant


def with_canaries(data, count):
    canaries = Users(np.ones((2, 2, 2), np.float32), np.ones((2, 2), bool))
    planted = plant(canaries, with_constants(loss, 0.0), data, count)
    return planted.data, planted.num_examples


FETCHES = {
    "sharded": lambda data, count: (sharded_rows(data, count, make_mesh(1)), count),
    "with canaries": with_canaries,
}


@pytest.mark.parametrize("names", [*itertools.permutations(FETCHES, 1), *itertools.permutations(FETCHES, 2)])
@pytest.mark.parametrize("sampler", [EpochSampler, CyclicPoissonSampler])
def test_users_numbered_by_rank_are_refused_by_parts_however_they_are_read(names, sampler):
    data, count = group(IDS, max_examples=2, how="first").batches(ROWS), PEOPLE
    for name in names:
        data, count = FETCHES[name](data, count)
    parts = dict(parts=2) if sampler is CyclicPoissonSampler else {}
    with pytest.raises(ValueError, match="numbered in the order of their ids"):
        check_parts(rows_of(data, count), sampler(count, 2, seed=0, **parts))


@pytest.mark.parametrize("names", [*itertools.permutations(FETCHES, 1), *itertools.permutations(FETCHES, 2)])
@pytest.mark.parametrize("more", [-1, 1])
def test_a_plan_for_another_number_of_rows_is_refused_however_they_are_read(names, more):
    """JAX reads the last row again beyond the end of an array: that person moved the sum by 51 clip norms."""
    data, count = jnp.asarray(ROWS), len(ROWS)
    for name in names:
        fetch, own = FETCHES[name](data, count)
        with pytest.raises(ValueError, match=f"hold {own} examples, and the plan samples from {own + more}"):
            rows_of(fetch, own + more)
        data, count = fetch, own


def test_canaries_are_not_planted_in_data_that_are_drawn_anew():
    data = group(IDS, max_examples=1, how="resample", seed=0).batches(ROWS)
    with pytest.raises(TypeError, match="no rows to plant canaries in"):
        plant(Users(np.ones((2, 1, 2)), np.ones((2, 1), bool)), with_constants(loss, 0.0), data, PEOPLE)


def looking_ahead(inner):
    return look_ahead(inner, jnp.ones(2), kappa=0.5)


def augmented_twice(inner):
    return augmented(inner, lambda x, key: x, multiplicity=2)


LOSSES = {"ahead": looking_ahead, "augmented": augmented_twice}
UNITS = {
    "example": lambda loss_fn, keyed: loss_fn,
    "user": lambda loss_fn, keyed: per_user_grads(loss_fn),
    "client": lambda loss_fn, keyed: client_deltas(loss_fn, local_steps=1, local_learning_rate=0.5),
}


@pytest.mark.one_in(10)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("names", [(), *itertools.permutations(LOSSES, 1), *itertools.permutations(LOSSES, 2)])
def test_a_loss_within_a_loss_keeps_its_constants(names, unit):
    """So that training passes them as arguments, and a mesh can shard them: found by nobody, they would be copied."""
    inner = with_constants(loss, jnp.float32(3.0))
    for name in names:
        inner = LOSSES[name](inner)
    keyed = "augmented" in names
    if keyed and unit == "client":
        pytest.skip("local runs pass no keys")
    wrapped = UNITS[unit](inner, keyed)
    assert float(constants_of(wrapped)) == 3.0
    assert getattr(wrapped, "takes_key", False) is keyed
    x = jnp.ones((1, 2) if unit == "example" else (1, 1, 2))
    keys = jax.random.split(jax.random.key(0), x.shape[:-1])
    batch = (x, keys) if keyed else x

    def gradient(loss_fn):
        if unit == "example":
            loss_fn = dpopt.per_example_grads(loss_fn)
        return loss_fn(jnp.zeros(2), batch, mask=None).materialize()

    np.testing.assert_allclose(gradient(given(wrapped, jnp.float32(6.0))), 2 * gradient(wrapped), rtol=1e-6)


@pytest.mark.parametrize("unit", UNITS)
def test_another_function_of_the_same_rows_is_of_the_same_unit(unit):
    x = jnp.ones((3, 2) if unit == "example" else (3, 2, 2))
    plain = with_constants(loss, 1.0)
    options = {} if unit == "client" else dict(memory=2.0)
    rows = {
        "example": lambda: dpopt.per_example_grads(plain, engine="ghost", **options),
        "user": lambda: per_user_grads(plain, engine="ghost", **options),
        "client": lambda: client_deltas(plain, local_steps=1, local_learning_rate=0.5),
    }[unit]()(jnp.zeros(2), x, mask=None)
    other = rows.of_examples(lambda p, examples, mask: jnp.sum(p * examples.sum(0)), jnp.zeros(2))
    assert other.unit == rows.unit == unit
    source = other._source
    assert (source.engine, source.memory) == (("auto", 1.25) if unit == "client" else ("ghost", 2.0))


def test_a_second_loss_that_falls_back_says_so():
    fallback._warned.clear()
    for loss_fn in (lambda w, x: w, lambda w, x: x):
        with pytest.warns(UserWarning, match="cannot be followed"):
            fallback.to_vmap(loss_fn, "primitive", "it cannot be followed")
        fallback.to_vmap(loss_fn, "primitive", "it cannot be followed")  # an error if it warned again


def test_a_run_that_failed_before_its_first_step_leaves_its_key_free():
    def broken(w, x):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        tiny_plan(steps=2).run(broken, jnp.zeros(3), np.ones((64, 3), np.float32))
    plan = tiny_plan(steps=2)
    plan.run(lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(3), np.ones((64, 3), np.float32))
    with pytest.raises(ValueError, match="another run with the same key"):
        tiny_plan(steps=2).run(lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(3), np.ones((64, 3), np.float32))


def test_a_result_is_stated_at_the_delta_of_the_budget_in_force():
    result = run(tiny_plan(steps=2), budget=dpopt.Budget(50.0, 1e-6, accountant="rdp"))
    assert result.delta == 1e-6
    assert result.epsilon(accountant="rdp") == result.epsilon(delta=1e-6, accountant="rdp")


def test_epsilon_of_samples_of_fixed_size_needs_no_accountant():
    plan = tiny_plan(steps=2, sampling="fixed_size")
    result = run(plan)
    assert result.epsilon(delta=1e-5) == plan.epsilon(delta=1e-5) == result.ledger.epsilon(delta=1e-5)


def test_public_moments_survive_a_bad_public_batch():
    options = dict(l2_clip_norm=1.0, noise_multiplier=0.0, expected_batch_size=2, key=jax.random.key(0))
    optimizer = dpopt.baselines.dp_adam_pub(0.1, **options)
    params, public = jnp.zeros(2), jnp.ones(2)
    grads = dpopt.per_example_grads(lambda w, x: jnp.sum((w - x) ** 2))(params, jnp.ones((2, 2)), mask=None)
    state = optimizer.init(params)
    for bad in (jnp.nan, 1.0, jnp.inf, 1.0):  # the first batch may be the bad one
        updates, state = optimizer.update(grads, state, params, public_grads=bad * public)
        assert np.isfinite(np.asarray(optax.tree.norm(updates)))


def test_an_empty_batch_has_auxiliary_outputs_of_no_rows():
    def loss_fn(w, x):
        return jnp.sum(w * x), {"twice": 2 * x}

    grads = dpopt.per_example_grads(loss_fn, has_aux=True)(jnp.zeros(2), jnp.ones((0, 2)), mask=None)
    assert grads.clipped_sum(dpopt.FlatClip(1.0)).sensitive.aux["twice"].shape == (0, 2)


@pytest.mark.parametrize("value", [np.int64(100), 100])
def test_numbers_of_a_scheme_are_pythons(value):
    assert repr(dpopt.samplers.truncated.TruncatedPoisson(value, 0.1, 20)) == repr(
        dpopt.samplers.truncated.TruncatedPoisson(100, 0.1, 20)
    )
