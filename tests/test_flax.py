import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from helpers import assert_identical, assert_near, privacy_four

import dpopt
from dpopt.flax import NNXOptimizer, example_loss, linen_loss, nnx_loss

CROSS_ENTROPY = optax.softmax_cross_entropy_with_integer_labels
STATIC = ("l2_clip_norm", "noise_multiplier", "expected_batch_size", "key")
X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
Y = np.arange(6) % 3


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        return linen.Dense(3)(x)  # small, since these tests mostly compile


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 2, rngs=rngs)
        self.out = nnx.Linear(2, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def nnx_batch_loss(model, batch):
    x, y = batch
    return CROSS_ENTROPY(model(x), y).mean()


MODEL = LinenNet()
PARAMS = jax.jit(MODEL.init)(jax.random.key(0), X[:1])["params"]
LOSS = linen_loss(MODEL, CROSS_ENTROPY, train=False)


def adam(**changes):
    return dpopt.dp_adam(0.1, **privacy_four(**changes))


OPTIMIZERS = {
    "by name": adam,
    "optax.chain": lambda **c: optax.chain(adam(**c), optax.scale(0.5)),
    "optax stages": lambda **c: optax.chain(
        dpopt.clip_and_sum(1.0),
        dpopt.add_gaussian_noise(1.0, jax.random.key(0)),
        dpopt.normalize_by(4),
        optax.adam(0.1),
    ),
    "inject_hyperparams": lambda **c: optax.inject_hyperparams(dpopt.dp_adam)(0.1, **privacy_four(**c)),
    "inject_hyperparams, legacy key": lambda **c: optax.inject_hyperparams(dpopt.dp_adam)(
        0.1, **privacy_four(key=jax.random.PRNGKey(0), **c)
    ),
    "inject_hyperparams, static": lambda **c: optax.inject_hyperparams(dpopt.dp_adam, static_args=STATIC)(
        0.1, **privacy_four(**c)
    ),
    "inject_hyperparams, schedule": lambda **c: optax.inject_hyperparams(dpopt.dp_adam, static_args=STATIC)(
        optax.constant_schedule(0.1), **privacy_four(**c)
    ),
}


def by_hand(opt, steps=2):
    @jax.jit
    def step(params, state):
        grads = dpopt.per_example_grads(LOSS)(params, (X, Y), mask=None)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, opt.init(PARAMS)
    for _ in range(steps):
        params, state = step(params, state)
    return params


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.slow
def test_a_promise_passes_through_train_state(name):
    tx = OPTIMIZERS[name]()
    state = TrainState.create(apply_fn=MODEL.apply, params=PARAMS, tx=tx)

    @jax.jit
    def step(state):
        grads = dpopt.per_example_grads(LOSS)(state.params, (X, Y), mask=None)
        return state.apply_gradients(grads=grads)

    for _ in range(2):
        state = step(state)
    assert int(state.step) == 2
    assert_near(state.params, by_hand(tx))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n.startswith("inject")])
def test_injected_hyperparameters_do_not_change_the_step(name):
    # Adam divides by a root that is near zero for some weights, where traced rates round differently.
    assert_near(by_hand(OPTIMIZERS[name]()), by_hand(adam()), 1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("static_args", [(), STATIC])
def test_injected_no_noise_and_infinite_clip_is_plain_adam(static_args):
    four = privacy_four(noise_multiplier=0.0, l2_clip_norm=np.inf, expected_batch_size=len(X))
    opt = optax.inject_hyperparams(dpopt.dp_adam, static_args=static_args)(0.1, **four)
    mean_loss = lambda p: jnp.mean(jax.vmap(LOSS, (None, 0))(p, (X, Y)))  # noqa: E731
    plain = optax.adam(0.1)

    @jax.jit
    def step(params):
        updates, _ = plain.update(jax.grad(mean_loss)(params), plain.init(params), params)
        return optax.apply_updates(params, updates)

    assert_near(by_hand(opt, steps=1), step(PARAMS), 1e-5)  # as above


def test_a_learning_rate_can_be_changed_in_an_injected_state():
    opt = optax.inject_hyperparams(dpopt.dp_sgd, static_args=STATIC)(0.1, **privacy_four())
    state = opt.init(PARAMS)
    update = jax.jit(lambda p, state: opt.update(dpopt.per_example_grads(LOSS)(p, (X, Y), mask=None), state, p)[0])
    one = update(PARAMS, state)
    state.hyperparams["learning_rate"] = jnp.float32(0.2)
    assert_near(update(PARAMS, state), jax.tree.map(lambda u: 2 * np.asarray(u), one))


def test_a_linen_loss_is_that_of_the_example():
    found = jax.jit(jax.vmap(LOSS, (None, 0)))(PARAMS, (X, Y))
    expected = jax.jit(lambda p: CROSS_ENTROPY(MODEL.apply({"params": p}, X), Y))(PARAMS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # batched products add in another order


def test_linen_collections_that_are_not_trained_are_read_only():
    class Normed(linen.Module):
        @linen.compact
        def __call__(self, x, train=False):
            return linen.Dense(3)(linen.BatchNorm(use_running_average=not train)(x))

    model, x = Normed(), X
    variables = model.init(jax.random.key(0), x)
    loss = linen_loss(model, CROSS_ENTROPY, variables={"batch_stats": variables["batch_stats"]}, train=False)
    assert jnp.shape(loss(variables["params"], (x[0], Y[0]))) == ()


def nnx_make_model(seed=0):
    return NNXNet(nnx.Rngs(seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "jit"),
    [
        ("by name", nnx.jit),
        ("by name", lambda f: f),
        ("optax stages", nnx.jit),
        ("inject_hyperparams, static", nnx.jit),
    ],
    ids=["jit", "eager", "stages", "inject"],
)
def test_nnx_optimizer_trains_as_the_plain_loop_does(name, jit):
    model, tx = nnx_make_model(), OPTIMIZERS[name]()
    optimizer = NNXOptimizer(model, tx, wrt=nnx.Param)
    loss_fn, params = nnx_loss(model, nnx_batch_loss)

    @jit
    def step(model, optimizer, batch):
        now = nnx.as_pure(nnx.state(model, nnx.Param))
        optimizer.update(model, dpopt.per_example_grads(loss_fn)(now, batch, mask=None))

    for _ in range(2):
        step(model, optimizer, (X, Y))
    assert int(optimizer.step[...]) == 2

    plain = jax.jit(dpopt.make_train_step(loss_fn, tx))
    state = tx.init(params)
    for _ in range(2):
        params, state, _ = plain(params, state, (X, Y), mask=None)
    trained = nnx.as_pure(nnx.state(model, nnx.Param))
    assert_near(jax.tree.leaves(trained), jax.tree.leaves(params), 1e-5)  # Adam divides; compiled differently


def test_make_train_step_trains_an_nnx_model():
    model = nnx_make_model()
    loss_fn, params = nnx_loss(model, nnx_batch_loss)
    before = nnx.as_pure(nnx.state(model, nnx.Param))
    step = jax.jit(dpopt.make_train_step(loss_fn, adam(), microbatch_size=4))
    new, _, metrics = step(params, adam().init(params), (X, Y), mask=None)
    assert_identical(nnx.as_pure(nnx.state(model, nnx.Param)), before)  # the model was read, not changed
    nnx.update(model, new)
    assert_identical(jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Param))), jax.tree.leaves(new))
    assert np.isfinite(metrics.loss)


@pytest.mark.slow
def test_nnx_filter_freezes_the_rest():
    model = nnx_make_model()
    loss_fn, params = nnx_loss(model, nnx_batch_loss, wrt=nnx.PathContains("out"))
    assert len(jax.tree.leaves(params)) == 2
    grads = dpopt.per_example_grads(loss_fn)(params, (X, Y), mask=None).materialize()
    assert all(leaf.shape[0] == 6 for leaf in jax.tree.leaves(grads))


def test_a_trained_nnx_optimizer_still_takes_ordinary_gradients():
    model = nnx_make_model()
    optimizer = NNXOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(nnx_batch_loss)(model, (X, Y)))

    step(model, optimizer)
    assert int(optimizer.step[...]) == 1


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"flax\.linen module.*nnx_loss"):
        linen_loss(nnx_make_model(), CROSS_ENTROPY)
    with pytest.raises(TypeError, match=r"flax\.nnx module.*linen_loss"):
        nnx_loss(MODEL, nnx_batch_loss)
    with pytest.raises(ValueError, match="selects no parameters"):
        nnx_loss(nnx_make_model(), nnx_batch_loss, wrt=nnx.BatchStat)
    with pytest.raises(TypeError, match="batch_loss"):
        example_loss(3)


@pytest.mark.slow
def test_flax_and_the_accountants_are_imported_on_request_only():
    """dp_accounting imports SciPy, which takes twice as long as everything else."""
    import subprocess
    import sys

    code = "import sys, dpopt; print([m for m in ('flax', 'dp_accounting', 'scipy', 'jax.extend') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.slow
def test_the_engine_may_be_imported_while_a_program_is_traced():
    """An array that a module makes on import during tracing would belong to the traced program."""
    import subprocess
    import sys

    code = """
import sys, jax, jax.numpy as jnp, dpopt
promise = dpopt.per_example_grads(lambda w, x: jnp.tanh(w @ x), engine="ghost")
clipped = jax.jit(lambda w, x: promise(w, x, mask=None).clipped_sum(dpopt.FlatClip(1.0)).sum)
assert "dpopt.ghost" not in sys.modules
with jax.checking_leaks():
    clipped(jnp.ones(3), jnp.ones((4, 3)))
assert "dpopt.ghost" in sys.modules
clipped(jnp.ones(3), jnp.ones((5, 3)))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_gradients_of_other_parameters_than_the_optimizer_trains_are_named():
    model = NNXNet(nnx.Rngs(0))
    optimizer = NNXOptimizer(model, adam(), wrt=nnx.PathContains("hidden"))
    promise = dpopt.flax.nnx_grads(nnx_batch_loss)(model, (X, Y), mask=None)
    with pytest.raises(ValueError, match=r"same wrt"):
        optimizer.update(model, promise)
