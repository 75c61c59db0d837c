"""The contract of every private optimizer: one row per optimizer, many properties.

To add an optimizer, add a line to ROWS with `row`. ``make`` takes the privacy four as keywords; ``twin`` is the Optax
optimizer that it equals at every step without noise and clip, or None; ``extra`` are other arguments of `update`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical, assert_near, enable_x64, mlp_batch, paid, privacy_four, slow_unless

import dpopt
from dpopt import events, noise
from dpopt.optimizers import muon
from dpopt.run import identity


def loss_fn(params, example):
    """A small model, since these tests spend their time compiling."""
    return jnp.sum((jnp.tanh(example["x"] @ params["w"]) + params["b"] - example["y"]) ** 2)


def make_params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=(3, 2)), dtype), "b": jnp.asarray(rng.normal(size=2), dtype)}


class Row(NamedTuple):
    make: Callable[..., dpopt.PrivateOptimizer]  # from the privacy four
    twin: optax.GradientTransformation | None
    extra: dict[str, Any]  # keyword arguments of update


def row(make: Callable, rate: float, twin: Any = None, extra: dict | None = None, **settings: Any) -> Row:
    """``make(rate, **settings, **privacy_four)``, and its twin."""
    return Row(lambda **four: make(rate, **settings, **four), twin, extra or {})


def adaptive(*, l2_clip_norm: Any, by_leaf: bool = False, **three: Any) -> dict[str, Any]:
    """The privacy four with an adaptive clip norm."""
    initial = {"w": l2_clip_norm, "b": l2_clip_norm} if by_leaf else l2_clip_norm
    return {"l2_clip_norm": dpopt.adaptive.quantile_clip(initial, count_share=0.1), **three}


ROWS = {
    "sgd": row(dpopt.dp_sgd, 0.1, optax.sgd(0.1)),
    "sgd, schedule": row(
        dpopt.dp_sgd, optax.linear_schedule(0.1, 0.0, 10), optax.sgd(optax.linear_schedule(0.1, 0.0, 10))
    ),
    "momentum": row(dpopt.dp_sgd, 0.1, optax.sgd(0.1, momentum=0.9), momentum=0.9),
    "momentum, nesterov": row(dpopt.dp_sgd, 0.1, optax.sgd(0.1, 0.9, nesterov=True), momentum=0.9, nesterov=True),
    "adam": row(dpopt.dp_adam, 0.1, optax.adam(0.1)),
    "adam, settings": row(dpopt.dp_adam, 0.1, optax.adam(0.1, 0.8, 0.9, 1e-3), b1=0.8, b2=0.9, eps=1e-3),
    "adamw": row(dpopt.dp_adamw, 0.1, optax.adamw(0.1)),
    "adamw, settings": row(dpopt.dp_adamw, 0.1, optax.adamw(0.1, weight_decay=0.3), weight_decay=0.3),
    "rmsprop": row(dpopt.dp_rmsprop, 0.1, optax.rmsprop(0.1)),
    "rmsprop, settings": row(
        dpopt.dp_rmsprop, 0.1, optax.rmsprop(0.1, 0.5, 1e-3, eps_in_sqrt=False), decay=0.5, eps=1e-3, eps_in_sqrt=False
    ),
    "adagrad": row(dpopt.dp_adagrad, 0.1, optax.adagrad(0.1)),
    "yogi": row(dpopt.dp_yogi, 0.1, optax.yogi(0.1)),
    "adadps": row(dpopt.adadps, 0.1, scale={"w": 2.0, "b": 1.0}),
    "adadps, public": row(
        dpopt.adadps, 0.1, extra={"public_grads": {"w": np.full((3, 2), 0.1, np.float32), "b": np.ones(2, np.float32)}}
    ),
    "dp2": row(dpopt.dp2, 0.1, adaptive_learning_rate=0.01, adaptive_l2_clip_norm=1.0, delay=(2, 1), eps=0.1),
    "dp2, delay longer than the run": row(
        dpopt.dp2, 0.1, optax.sgd(0.1), adaptive_learning_rate=9.0, adaptive_l2_clip_norm=math.inf, delay=1_000
    ),
    "adam_bc": row(dpopt.dp_adam_bc, 0.1, gamma=1e-4),
    "micro_adam": row(dpopt.dp_micro_adam, 0.1, density=0.3, memory_size=3),
    "scale_then_privatize": row(dpopt.scale_then_privatize, 0.1),
    "kept noise": row(dpopt.dp_sgd, 0.1, optax.sgd(0.1), noise=dpopt.correlated.banded(3, steps=100)),
    "redrawn noise": row(dpopt.dp_adam_bc, 0.1, gamma=1e-4, noise=dpopt.correlated.banded_inverse(3, steps=100)),
    "recurrent noise": row(
        dpopt.scale_then_privatize, 0.1, noise=dpopt.correlated.blt([0.3, 0.1], [0.9, 0.5], steps=100)
    ),
    "adaptive clip": Row(lambda **four: dpopt.dp_adam_bc(0.1, gamma=1e-4, **adaptive(**four)), None, {}),
    "adaptive groups": Row(lambda **four: dpopt.dp_sgd(0.1, **adaptive(by_leaf=True, **four)), None, {}),
    "extra query": row(dpopt.baselines.dp2_extra_query, 0.1, adaptive_l2_clip_norm=1.0, delay=2, eps=0.1),
}
# Other settings of a row (with a comma) are only compared with their twin, to save time on compiling.
NAMED = [name for name in ROWS if "," not in name]
EVERY = pytest.mark.parametrize("name", NAMED)
# Properties that do not depend on the Optax rule after the noise: without slow tests one rule stands for the others.
ALIKE = ("momentum", "adamw", "rmsprop", "adagrad", "yogi")
STRUCTURES = pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ALIKE)) for n in NAMED])
# One for every way to keep a state and to draw noise.
KINDS = {"sgd", "dp2", "micro_adam", "redrawn noise", "adaptive clip"}
FEW = pytest.mark.parametrize("name", slow_unless(KINDS, NAMED))
TWINS = pytest.mark.parametrize("name", [name for name, r in ROWS.items() if r.twin is not None])
WITHOUT_PRIVACY = dict(noise_multiplier=0.0, l2_clip_norm=math.inf)


def step_of(name, opt, **kwargs):
    """The jitted train step of the row, of (params, state, batch, mask)."""
    # The engines agree (tests/ghost); this one compiles in half the time.
    made = dpopt.make_train_step(loss_fn, opt, **{"engine": "vmap"} | kwargs)
    return jax.jit(lambda params, state, batch, mask=None: made(params, state, batch, mask, **ROWS[name].extra))


@functools.cache
def standard(name):
    """The row's optimizer with standard settings and its step, compiled once for all tests that can share it."""
    opt = ROWS[name].make(**privacy_four())
    return opt, step_of(name, opt)


def train(name, *, steps=3, batch=None, mask=None, params=None, **changes):
    """Parameters and state after some steps."""
    opt, step = standard(name)
    if changes:
        opt = ROWS[name].make(**privacy_four(**changes))
    if set(changes) - {"key"}:  # the key is in the state
        step = step_of(name, opt)
    params = make_params() if params is None else params
    batch = mlp_batch(4) if batch is None else batch
    mask = np.ones(len(batch["x"]), bool) if mask is None else mask
    state = opt.init(params)
    for _ in range(steps):
        params, state, _ = step(params, state, batch, mask)
    return params, state


@TWINS
@pytest.mark.one_in(15)
def test_without_noise_and_clip_it_follows_its_optax_twin(name):
    opt, twin = ROWS[name].make(**privacy_four(**WITHOUT_PRIVACY)), ROWS[name].twin
    params = twin_params = make_params()
    state, twin_state, step = opt.init(params), twin.init(params), step_of(name, opt)

    @jax.jit
    def twin_step(params, state, batch):
        grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
        mean = jax.tree.map(lambda g: jnp.sum(g, axis=0) / 4, grads)
        updates, state = twin.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    for t in range(20):
        params, state, _ = step(params, state, mlp_batch(4, seed=t), mask=None)
        twin_params, twin_state = twin_step(twin_params, twin_state, mlp_batch(4, seed=t))
        assert_near(params, twin_params)
    assert not np.allclose(params["w"], make_params()["w"])


def test_the_twin_check_has_power(name="adam"):
    """A little noise, or a clip, breaks the agreement."""
    exact, _ = train(name, **WITHOUT_PRIVACY)
    for change in (dict(noise_multiplier=1e-3, l2_clip_norm=1e6), dict(noise_multiplier=0.0, l2_clip_norm=0.1)):
        with pytest.raises(AssertionError):
            assert_near(train(name, **change)[0], exact)


@EVERY
def test_a_step_states_the_multiplier_it_was_given(name):
    opt = ROWS[name].make(**privacy_four(noise_multiplier=1.7))
    assert dpopt.make_train_step(loss_fn, opt).privacy == opt.privacy
    if opt.privacy.queries[0].strategy is not None:  # of a run, not of a step
        event = dpopt.privacy_event(opt, sampling=dpopt.samplers.parts.InParts(100), steps=100)
        assert event.noise_multiplier == pytest.approx(paid(1.7), rel=1e-12)
        return
    assert events.merged(opt.privacy.step_event()).noise_multiplier == pytest.approx(paid(1.7), rel=1e-12)


@pytest.mark.one_in(3)
@EVERY
def test_it_draws_noise_once_a_step(name, count_draws):
    opt = ROWS[name].make(**privacy_four())
    step, params = dpopt.make_train_step(loss_fn, opt, microbatch_size=3), make_params()
    jax.eval_shape(lambda: step(params, opt.init(params), mlp_batch(8), mask=None, **ROWS[name].extra))
    strategies = [q.strategy for q in opt.privacy.queries]
    # A loop that repeats earlier draws has two.
    assert len(count_draws) == sum(1 if s is None else min(2, s.stream.draws) for s in strategies)


@pytest.mark.one_in(3)
@EVERY
def test_nothing_that_was_not_noised_reaches_state_or_parameters(name, monkeypatch):
    """With NaN as noise, all that depends on data through the noise is NaN; the rest must be equal for any data."""
    monkeypatch.setattr(
        noise, "standard_normal_like", lambda key, tree: jax.tree.map(lambda x: jnp.full(jnp.shape(x), jnp.nan), tree)
    )
    same = dict(steps=2, key=jax.random.key(0), expected_batch_size=4)  # built and traced with that noise
    assert_identical(train(name, batch=mlp_batch(4, seed=1), **same), train(name, batch=mlp_batch(4, seed=2), **same))


def _members():
    return jax.tree.map(lambda p: jnp.stack([p, p + 1]), make_params())


@EVERY
def test_members_of_an_ensemble_get_no_states_with_one_key(name):
    """All noise in them: of gradients, of counts and of other queries."""
    opt, _ = standard(name)
    with pytest.raises(ValueError, match="all runs would draw the same noise"):
        jax.eval_shape(jax.vmap(opt.init), _members())


@FEW
def test_members_of_an_ensemble_share_no_step(name):
    opt, step = standard(name)
    one = opt.init(make_params()), mlp_batch(4), np.ones(4, bool)
    with pytest.raises(ValueError, match="all runs would draw the same noise"):
        jax.eval_shape(jax.vmap(step, (0, None, None, None)), _members(), *one)


def test_the_check_for_leaks_has_power(monkeypatch):
    """An optimizer that stores the clipped sum itself is caught."""
    clip = dpopt.clip_and_sum(1.0)

    def remember(updates, state, params=None, **extra_args):
        total, _ = clip.update(updates, optax.EmptyState(), params)
        noisy = jax.tree.map(lambda x, z: x + z, total, noise.standard_normal_like(jax.random.key(0), total))
        return noisy, total

    leaky = optax.GradientTransformationExtraArgs(lambda p: p, remember)
    monkeypatch.setattr(
        noise, "standard_normal_like", lambda key, tree: jax.tree.map(lambda x: jnp.full(jnp.shape(x), jnp.nan), tree)
    )
    params = make_params()
    grads = [jax.vmap(jax.grad(loss_fn), (None, 0))(params, mlp_batch(4, seed=s)) for s in (1, 2)]
    with pytest.raises(AssertionError):
        assert_identical(*(leaky.update(g, params, params)[1] for g in grads))


@FEW
@pytest.mark.parametrize("dtype", slow_unless({"bfloat16"}, ["bfloat16", "float64"]))
@pytest.mark.one_in(6)
def test_it_keeps_shapes_and_dtypes_and_can_be_scanned(name, dtype):
    with enable_x64(dtype == "float64"):
        params = make_params(dtype)
        opt = ROWS[name].make(**privacy_four(l2_clip_norm=np.float64(1.0), noise_multiplier=np.float64(1.0)))
        step, state = step_of(name, opt), opt.init(params)
        (new, after), _ = jax.lax.scan(
            lambda carry, _: (step(*carry, mlp_batch(4), mask=None)[:2], None), (params, state), length=3
        )
        describe = lambda tree: jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)  # noqa: E731
        assert describe(new) == describe(params) and describe(after) == describe(state)
        assert all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in jax.tree.leaves(new))


def test_float32_parameters_stay_so_in_64_bits(x64, name="adam"):
    (new, _) = train(name, expected_batch_size=np.float64(4), l2_clip_norm=np.float64(1))
    assert jax.tree.map(jnp.result_type, new) == jax.tree.map(jnp.result_type, make_params())


def test_jitted_and_eager_steps_agree(name="adam"):
    opt, params = ROWS[name].make(**privacy_four()), make_params()
    eager = dpopt.make_train_step(loss_fn, opt)(params, opt.init(params), mlp_batch(4), mask=None, **ROWS[name].extra)
    assert_near(train(name, steps=1)[0], eager[0], 1e-5)  # fused arithmetic rounds differently before a division


@pytest.mark.one_in(5)
@FEW
def test_it_compiles_once(name):
    opt, step = standard(name)
    params = make_params()
    state = opt.init(params)
    sizes = []
    for seed in range(3):
        params, state, _ = step(params, state, mlp_batch(4, seed), np.array([True, True, seed > 0, False]))
        sizes.append(step._cache_size())
    assert sizes[1] == sizes[2] == sizes[0]


@pytest.mark.one_in(3)
@STRUCTURES
def test_poisoned_examples_count_for_nothing(name):
    poisoned = jax.tree.map(np.array, mlp_batch(4))
    poisoned["x"][1], poisoned["y"][2, 0] = np.nan, np.inf
    masked = np.array([True, False, False, True])
    without, _ = train(name, mask=masked)
    assert_near(train(name, batch=poisoned)[0], without)
    assert_near(train(name, batch=poisoned, mask=masked)[0], without)


@pytest.mark.one_in(5)
@FEW
def test_an_empty_batch_takes_a_noisy_step(name):
    masked = train(name, steps=2, mask=np.zeros(4, bool))
    empty = train(name, steps=2, batch=mlp_batch(0), mask=np.zeros(0, bool))
    assert_near(masked[0], empty[0], 1e-5)  # compiled for other shapes
    other = train(name, steps=2, mask=np.zeros(4, bool), key=jax.random.key(1))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(masked[0]))
    assert not np.allclose(masked[0]["w"], other[0]["w"])  # noise moved them


@pytest.mark.one_in(5)
@FEW
def test_typed_and_legacy_keys_give_the_same_steps(name):
    typed, legacy = (train(name, key=make(7))[0] for make in (jax.random.key, jax.random.PRNGKey))
    assert_identical(typed, legacy)


@pytest.mark.one_in(5)
@FEW
def test_a_promise_and_stacked_gradients_give_the_same_update(name):
    opt, params, batch = ROWS[name].make(**privacy_four()), make_params(), mlp_batch(4)
    promise = dpopt.per_example_grads(loss_fn)(params, batch, mask=None)
    stacked = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
    updates = [opt.update(g, opt.init(params), params, **ROWS[name].extra)[0] for g in (promise, stacked)]
    assert_near(*updates, 1e-5)


@EVERY
def test_a_digest_of_its_state_tells_nothing_of_its_key(name):
    """A run's ledger holds digests, from which a key that they contain can be computed."""
    states = [ROWS[name].make(**privacy_four(key=jax.random.PRNGKey(i))).init(make_params()) for i in range(2)]
    assert_identical(*map(identity.digest, states))


def test_nor_of_the_keys_of_stages():
    for make in (lambda key: dpopt.scale_by_micro_adam(rounding_key=key), lambda key: muon.scale_by_muon_bc(key=key)):
        states = [make(jax.random.PRNGKey(i)).init(make_params()) for i in range(2)]
        assert_identical(*map(identity.digest, states))


@EVERY
def test_init_depends_on_shapes_only_and_can_be_jitted(name):
    opt, params = ROWS[name].make(**privacy_four()), make_params()
    assert_identical(jax.jit(opt.init)(params), opt.init(params))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(opt.init(params)))


@pytest.mark.one_in(3)
@FEW
def test_numpy_parameters_train(name):
    numpy_params = jax.tree.map(np.asarray, make_params())
    assert_identical(train(name, params=numpy_params)[0], train(name)[0])


@EVERY
@pytest.mark.parametrize(
    "change",
    [{"l2_clip_norm": -1.0}, {"l2_clip_norm": math.nan}, {"noise_multiplier": -1.0}, {"expected_batch_size": 0}],
    ids=str,
)
def test_bad_privacy_settings_are_named(name, change):
    (argument,) = change
    with pytest.raises(ValueError, match=argument):
        ROWS[name].make(**privacy_four(**change))


@EVERY
@pytest.mark.parametrize("missing", ["l2_clip_norm", "noise_multiplier", "expected_batch_size", "key"])
def test_what_moves_epsilon_has_no_default(name, missing):
    four = privacy_four()
    del four[missing]
    with pytest.raises(TypeError, match=missing):
        ROWS[name].make(**four)
