"""Common beginners' mistakes, and the error messages for them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from helpers import assert_near, privacy_four

import dpopt
import dpopt.flax

X = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
PARAMS = {"w": jnp.zeros(2), "b": jnp.zeros(())}
SAMPLER = dpopt.PoissonSampler(20, 4, seed=0)


LINEAR, LINEAR_LOSS = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), lambda m, x: jnp.mean(m(x) ** 2)


def loss(p, x):
    return jnp.sum((p["w"] * x + p["b"] - 1) ** 2)


def sgd():
    return dpopt.dp_sgd(0.1, **privacy_four())


def update(tx, **extra):
    return tx.update(dpopt.per_example_grads(loss)(PARAMS, X, mask=None), tx.init(PARAMS), PARAMS, **extra)


def plan():
    builder = dpopt.Builder(num_examples=20, expected_batch_size=4, steps=2, key=dpopt.secure_key())
    return builder.clip(1.0).noise(2.0).then(optax.sgd(0.1)).build()


NOISE = dpopt.add_gaussian_noise(1.0, jax.random.key(0))


def own_step(*stages):
    tx = optax.chain(*stages, optax.sgd(0.1))
    dpopt.make_train_step(loss, tx)(PARAMS, tx.init(PARAMS), X, mask=None)


class Frame:
    """Looks like a pandas DataFrame to duck typing."""

    iloc, shape, dtype = None, (20, 2), np.dtype("float32")


MISTAKES = {
    "a clip of Optax before the private one": (
        lambda: update(optax.chain(optax.clip_by_global_norm(1.0), sgd())),
        (TypeError, "[Pp]ut dpopt.clip_and_sum first, or the private optimizer"),
    ),
    "a part of the model masked out": (
        lambda: update(optax.masked(sgd(), {"w": True, "b": False})),
        (ValueError, "To train a part of a model, leave the rest out of params"),
    ),
    "several optimizers for parts of the model": (
        lambda: update(optax.multi_transform({"a": sgd(), "z": optax.set_to_zero()}, {"w": "a", "b": "z"})),
        (ValueError, "To train a part of a model, leave the rest out of params"),
    ),
    "MultiSteps around a private optimizer": (
        lambda: update(optax.MultiSteps(sgd(), 2)),
        (TypeError, "cannot wrap it"),
    ),
    "arithmetic with a promise": (
        lambda: 2 * dpopt.per_example_grads(loss)(PARAMS, X, mask=None),
        (TypeError, "[Pp]ut dpopt.clip_and_sum first"),
    ),
    "a promise made an array": (
        lambda: np.asarray(dpopt.per_example_grads(loss)(PARAMS, X, mask=None)),
        (TypeError, "[Pp]ut dpopt.clip_and_sum first"),
    ),
    "the mean gradient": (
        lambda: sgd().update(PARAMS, sgd().init(PARAMS), PARAMS),
        (ValueError, "Gradients that were already averaged .* cannot be clipped per example"),
    ),
    "a traced noise multiplier": (
        lambda: dpopt.privacy_event(
            optax.inject_hyperparams(dpopt.dp_sgd)(0.1, **privacy_four()), sampling=SAMPLER, steps=3
        ),
        (ValueError, "static_args="),
    ),
    "what is no optimizer": (
        lambda: dpopt.privacy_of({"learning_rate": 0.1}),
        (TypeError, "optimizer must be an Optax transformation"),
    ),
    "a linen module for parameters": (
        lambda: dpopt.per_example_grads(loss)(linen.Dense(2), X, mask=None),
        (TypeError, r"a Dense of flax.*model.init\(...\)\['params'\]"),
    ),
    "a function among the parameters, as Equinox has it": (
        lambda: dpopt.per_example_grads(loss)({"w": jnp.zeros(2), "activation": jax.nn.relu}, X, mask=None),
        (TypeError, r"\['activation'\] is not an array but relu .*equinox.partition"),
    ),
    "a forgotten mask": (
        lambda: dpopt.per_example_grads(loss)(PARAMS, X),
        (TypeError, "mask is missing"),
    ),
    "a forgotten mask of an NNX model": (
        lambda: dpopt.flax.nnx_grads(LINEAR_LOSS)(LINEAR, X),
        (TypeError, "mask is missing"),
    ),
    "an NNX model for parameters": (
        lambda: plan().run(dpopt.flax.nnx_loss(LINEAR, LINEAR_LOSS)[0], LINEAR, X),
        (Exception, "with params, a Linear, .*dpopt.flax.nnx_loss and linen_loss make the loss and its parameters"),
    ),
    "a misspelt option": (lambda: plan().run(loss, PARAMS, X, stepz=3), (TypeError, "stepz")),
    "a data frame": (lambda: plan().run(loss, PARAMS, {"x": Frame()}), (TypeError, "is a Frame of pandas")),
    "arrays of another length": (
        lambda: plan().run(loss, PARAMS, X[:7]),
        (ValueError, r"data has shape \(7, 2\), and the plan samples from 20 examples"),
    ),
    "a list of numbers for data": (lambda: plan().run(loss, PARAMS, [1.0] * 20), (TypeError, "a list: np.asarray")),
    "a list of arrays for data": (lambda: plan().run(loss, PARAMS, [*X]), (ValueError, "use np.stack")),
    "a file's name for data": (lambda: plan().run(loss, PARAMS, "data.csv"), (TypeError, "data is a str")),
    "no data": (lambda: plan().run(loss, PARAMS, {}), (TypeError, "hold no arrays")),
    "weight decay before the clip": (
        lambda: update(optax.chain(optax.add_decayed_weights(0.1), sgd())),
        (TypeError, "decays, scales or counts gradients goes after it"),
    ),
    "a promise given to nnx.Optimizer": (
        lambda: nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), sgd(), wrt=nnx.Param).update(
            nnx.Linear(2, 2, rngs=nnx.Rngs(0)), dpopt.per_example_grads(loss)(PARAMS, X, mask=None)
        ),
        (TypeError, "instead of nnx.Optimizer use dpopt.flax.NNXOptimizer"),
    ),
    "a promise made outside the step": (
        lambda: jax.jit(lambda g: sgd().update(g, sgd().init(PARAMS), PARAMS))(
            dpopt.per_example_grads(loss)(PARAMS, X, mask=None)
        ),
        (TypeError, "Make the promise in the same jax.jit as the update"),
    ),
    "a stage between clip and noise, in one's own loop": (
        lambda: own_step(dpopt.clip_and_sum(1.0), optax.trace(0.9), NOISE),
        (ValueError, "something stands between clip_and_sum and add_gaussian_noise"),
    ),
    "noise before the clip": (
        lambda: own_step(NOISE, dpopt.clip_and_sum(1.0)),
        (TypeError, "add_gaussian_noise got per-example gradients.*Put clip_and_sum first"),
    ),
    "no noise": (
        lambda: own_step(dpopt.clip_and_sum(1.0)),
        (ValueError, "no add_gaussian_noise, so nothing is private"),
    ),
    "a rule that reads the loss": (
        lambda: sgd().update(
            dpopt.per_example_grads(loss)(PARAMS, X, mask=None), sgd().init(PARAMS), PARAMS, value=1.0
        ),
        (ValueError, "The loss of a private batch is not"),
    ),
    "a loss of a batch": (
        lambda: dpopt.per_example_grads(lambda p, x: jnp.mean((x * p["w"]) ** 2, axis=1))(PARAMS, X, mask=None),
        (Exception, r"a single example without a batch axis: example float32\[2\]"),
    ),
    "a loss that is not reduced": (
        lambda: dpopt.per_example_grads(lambda p, x: (x * p["w"]) ** 2)(PARAMS, X, mask=None),
        (ValueError, r"must be a real scalar; got shape \(2,\)"),
    ),
    "batch normalisation": (
        lambda: dpopt.flax.nnx_loss(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), lambda m, x: jnp.mean(m(x))),
        (ValueError, "mixes the examples of a batch.*replace_batch_norm"),
    ),
    "a seed for a key": (
        lambda: dpopt.dp_sgd(0.1, **{**privacy_four(), "key": 0}),
        (TypeError, r"pass one key made by jax.random.key\(seed\)"),
    ),
    "a delta of one": (lambda: dpopt.epsilon_of_event(plan().event, delta=1.0), (ValueError, "delta must be below 1")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_says_what_to_do(name):
    make, (kind, message) = MISTAKES[name]
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.slow
def test_a_delta_that_is_too_large_for_the_data():
    result = plan().run(loss, PARAMS, X)
    for ask in (plan().epsilon, plan().spent, plan().statement, result.epsilon, result.statement):
        with pytest.warns(UserWarning, match=r"delta 0.1 is not below 1/n = 0.05") as said:
            ask(delta=0.1)
        assert said[0].filename == __file__
        with pytest.raises(ValueError, match="no delta is set"):
            ask()


@pytest.mark.slow
def test_a_run_within_a_budget_knows_its_delta():
    builder = dpopt.Builder(num_examples=20, expected_batch_size=4, steps=2, key=dpopt.secure_key())
    result = builder.clip(1.0).budget(epsilon=2.0, delta=1e-3).then(optax.sgd(0.1)).build().run(loss, PARAMS, X)
    assert result.epsilon() == result.epsilon(delta=1e-3) <= 2.0
    assert result.statement().delta == 1e-3


@pytest.mark.slow
def test_batches_of_an_nnx_loop_that_no_sampler_drew():
    optimizer = dpopt.flax.NNXOptimizer(LINEAR, sgd(), wrt=nnx.Param)
    optimizer.update(LINEAR, dpopt.flax.nnx_grads(LINEAR_LOSS)(LINEAR, X, mask=None))
    with pytest.warns(UserWarning, match="this sampler has drawn no batches"):
        dpopt.privacy_event(optimizer, sampling=dpopt.PoissonSampler(20, 4, seed=0), steps=1)


@pytest.mark.slow
def test_a_run_takes_arrays_as_they_are():
    data = {"x": X, "weight": jnp.ones(20)}
    weighted = lambda p, e: e["weight"] * loss(p, e["x"])  # noqa: E731
    ours, key = plan(), dpopt.secure_key()
    found = []
    for source in (data, lambda rows: jax.tree.map(lambda x: x[rows], data)):
        builder = dpopt.Builder(num_examples=20, expected_batch_size=4, steps=2, key=key, seed=3)
        made = builder.clip(1.0).noise(2.0).then(optax.sgd(0.1)).build()
        found.append(made.run(weighted, PARAMS, source, replay=True).params)
        dpopt.run.entropy._runs.clear()  # as in a process of its own
    assert_near(*found, 1e-7)
    assert ours.run(loss, PARAMS, X).ledger.steps == 2


@pytest.mark.slow
def test_aux_comes_back_with_the_metrics():
    step = jax.jit(dpopt.make_train_step(lambda p, x: (loss(p, x), {"twice": 2 * x}), sgd(), has_aux=True))
    params, _, metrics, aux = step(PARAMS, sgd().init(PARAMS), X, mask=None)
    np.testing.assert_allclose(aux["twice"], 2 * X)
    plain, _, same = jax.jit(dpopt.make_train_step(loss, sgd()))(PARAMS, sgd().init(PARAMS), X, mask=None)
    assert_near(params, plain, 1e-6)
    assert_near(metrics, same, 1e-6)


def test_the_event_of_what_holds_an_optimizer():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    state = TrainState.create(apply_fn=lambda: None, params=PARAMS, tx=sgd())
    want = dpopt.privacy_event(sgd(), sampling=SAMPLER.scheme, steps=3)
    for holder in (dpopt.flax.NNXOptimizer(model, sgd(), wrt=nnx.Param), state):
        assert dpopt.privacy_event(holder, sampling=SAMPLER.scheme, steps=3) == want


@pytest.mark.slow
def test_a_weight_decay_bound_to_the_model_needs_no_parameters_after_a_step():
    def made():
        return optax.chain(
            dpopt.clip_and_sum(1.0), NOISE, dpopt.normalize_by(4), optax.adamw(1e-3, mask={"w": True, "b": False})
        )

    with pytest.raises(ValueError, match=r"may depend on the tree of yours. Pass them, .* as params="):
        dpopt.privacy_event(made(), sampling=SAMPLER.scheme, steps=3)
    tx = made()
    want = dpopt.privacy_event(tx, sampling=SAMPLER.scheme, steps=3, params=PARAMS)
    dpopt.make_train_step(loss, tx)(PARAMS, tx.init(PARAMS), X, mask=None)
    assert dpopt.privacy_event(tx, sampling=SAMPLER.scheme, steps=3) == want
