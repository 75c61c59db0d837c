"""A whole run on a mesh, and losses that say which arrays they read, on one device. (More: test_sharding.)"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dpopt
import dpopt.flax
from dpopt import verification
from dpopt.constants import constants_of, given, with_constants
from dpopt.engines.blocks import Blocks
from dpopt.run import entropy, loop, meshes, sharding

X = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
FROZEN = np.random.default_rng(1).normal(size=(64, 6)).astype(np.float32)
EXPLICIT = "data=1,fsdp=1"


def make_plan():
    entropy._runs.clear()
    builder = dpopt.Builder(num_examples=64, expected_batch_size=8, steps=3, key=jax.random.key(0), pad_to=32)
    return builder.clip(1.0).noise(1.0).then(optax.adam(0.1)).build()


def distance(w, x, frozen):
    return jnp.sum(jnp.square(jnp.tanh(frozen @ x) @ w))


def adapted():
    """A frozen layer with an adapter, whose base has a table that is looked up."""

    class Model(nnx.Module):
        def __init__(self):
            self.table = nnx.Embed(8, 6, rngs=nnx.Rngs(0))
            base = nnx.Linear(6, 4, rngs=nnx.Rngs(1))
            self.layer = nnx.LoRA(6, 2, 4, base_module=base, rngs=nnx.Rngs(2))

        def __call__(self, x):
            return self.layer(x + self.table((x > 0).astype(jnp.int32)).mean(1))

    return dpopt.flax.nnx_loss(Model(), lambda model, x: jnp.mean(jnp.square(model(x) - 1)), wrt=nnx.LoRAParam)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_frozen_weights_on_a_mesh_with_explicit_axes(engine):
    loss_fn, params = adapted()
    alone = make_plan().run(loss_fn, params, X, replay=True, engine=engine)
    meshed = meshes.train_on(meshes.mesh_of(EXPLICIT), make_plan(), loss_fn, params, X, replay=True, engine=engine)
    assert all(isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(meshed.params))
    for a, b in zip(jax.tree.leaves(sharding.whole(meshed.params)), jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.slow
def test_frozen_weights_that_lie_elsewhere_go_where_the_parameters_are():
    loss_fn, params = adapted()
    plan, mesh = make_plan(), meshes.mesh_of(EXPLICIT)
    assert not any(isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(constants_of(loss_fn)))
    result = plan.run(
        loss_fn,
        sharding.place_state(plan.optimizer, params, mesh),
        X,
        place_batch=lambda rows: sharding.shard_batch(rows, mesh),
    )
    assert result.ledger.steps == 3


def test_what_is_not_trained_is_no_part_of_the_program():
    def text(loss_fn, constants):
        plan = make_plan()
        compiled = loop._compiled(lambda loss: dpopt.make_train_step(loss, plan.optimizer), loss_fn)
        w = jnp.ones((64, 2))
        return compiled.lower(w, plan.optimizer.init(w), X[:8], np.ones(8, bool), {}, constants).as_text()

    closed = text(lambda w, x: distance(w, x, jnp.asarray(FROZEN)), None)
    told = text(with_constants(distance, FROZEN), FROZEN)
    assert len(closed) - len(told) > 2 * FROZEN.nbytes * 0.9  # two hexadecimal digits a byte


@pytest.mark.slow
def test_training_uses_the_constants_that_it_was_given():
    loss_fn = with_constants(distance, FROZEN)
    w = jnp.ones((64, 2))
    closed = make_plan().run(lambda w, x: distance(w, x, FROZEN), w, X, replay=True)
    np.testing.assert_allclose(make_plan().run(loss_fn, w, X, replay=True).params, closed.params, atol=1e-6)
    other = make_plan().run(given(loss_fn, 2 * FROZEN), w, X, replay=True)
    assert np.abs(other.params - closed.params).max() > 1e-3


def test_a_batch_with_explicit_axes_is_verified():
    loss_fn = with_constants(distance, FROZEN)
    mesh = meshes.mesh_of(EXPLICIT)
    placed = sharding.place_constants(loss_fn, mesh, sharding.fully_sharded)
    w = jax.device_put(np.ones((64, 2), np.float32), NamedSharding(mesh, P("fsdp")))
    batch = sharding.shard_batch(X[:8], mesh, ("data", "fsdp"))
    verification.verify(placed, w, batch)

    calls = []

    def changing(w, x, frozen):  # another value at every trace
        calls.append(1)
        return distance(w, x, frozen) * len(calls)

    with pytest.raises(verification.VerificationError):
        verification.verify(with_constants(changing, placed.constants), w, batch)


@pytest.mark.parametrize("apart", [False, True])
def test_blocks_are_joined_as_they_were_split(apart):
    blocks = Blocks(10, 4, apart)
    rows, mask = blocks.split(jnp.arange(10), jnp.ones(10, bool))
    assert rows.shape == (3, 4) and int(mask.sum()) == 10
    np.testing.assert_array_equal(blocks.join(rows), np.arange(10))
    if apart:  # four devices with three rows each have one of every block
        assert [set((np.asarray(block) // 3).tolist()) for block in rows] == 3 * [{0, 1, 2, 3}]


@pytest.mark.parametrize(
    "text", ["", "data", "data=", "data=0", "data=-1", "=2", "data=2,data=2", "data=two", "1a=2", "a=1=1"]
)
def test_a_mesh_that_is_no_mesh_is_refused(text):
    with pytest.raises(ValueError, match="axes and their sizes, such as data=4,fsdp=2; got"):
        meshes.mesh_of(text)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"needs 4096 devices, and there are 1\..*device_count=4096"):
        meshes.mesh_of("data=4096")
    with pytest.raises(ValueError, match="need a mesh"):
        meshes.start(None, ["localhost:1", "2", "0"])
    for wrong in (["localhost:1", "2", "2"], ["localhost:1", "two", "0"], ["localhost:1", "2"]):
        with pytest.raises(ValueError, match="an address, their count, and a number below it; got localhost:1"):
            meshes.start("data=2", wrong)
    with pytest.raises(TypeError, match=r"loss must be a function of \(params, example, constants\)"):
        with_constants(3, 4)
    with pytest.raises(TypeError, match="no constants that could be placed"):
        sharding.place_constants(lambda w, x: 0.0, sharding.make_mesh(1))
    plan, w, mesh = make_plan(), jnp.ones((64, 2)), meshes.mesh_of("data=1")
    state = sharding.place_state(plan.optimizer, w, mesh)
    with pytest.raises(TypeError, match="places initial parameters; got a TrainState"):
        meshes.train_on(mesh, plan, with_constants(distance, FROZEN), state, X)
    with pytest.raises(ValueError, match="omit place_batch"):
        meshes.train_on(mesh, plan, with_constants(distance, FROZEN), w, X, place_batch=lambda rows: rows)
    with pytest.raises(ValueError, match="the mesh has the axes"):
        meshes.train_on(mesh, plan, with_constants(distance, FROZEN), w, X, batch_axes="rows")
