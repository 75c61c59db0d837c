"""AdaDPS against the authors' runs, its equations and its limits; helpers for side information."""

import math

import golden_runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_runs import MODELS, EpsClip, load, replay, tiny_batch, tiny_loss, tiny_params
from helpers import assert_identical, assert_near, paid, privacy_four

import dpopt
from dpopt.optimizers.adadps import adadps

RUNS = ["adadps_adagrad_S_sigma1", "adadps_rmsprop_S_sigma0", "adadps_rmsprop_logreg_sigma1"]
PER_EPOCH_RUNS = ["adadps_orig_torch_sigma0", "adadps_orig_torch_sigma1_mb"]
PRECISIONS = [(jnp.float64, golden_runs.RTOL64), (jnp.float32, golden_runs.RTOL32)]


def optimizer_of(run):
    m = run.meta
    return adadps(
        m["lr"],
        l2_clip_norm=m["clip1"],
        noise_multiplier=m["sigma"],
        expected_batch_size=m["B"],
        key=jax.random.key(0),
        rule="rmsprop" if "rmsprop" in m["algorithm"] else "adagrad",
        decay=m["rmsprop_gamma"],
        eps=m["epsilon"],
    )


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(("dtype", "rtol"), PRECISIONS, ids=["x64", "x32"])
@pytest.mark.one_in(6)
def test_golden(monkeypatch, name, dtype, rtol):
    run = load(name)
    with golden_runs.enable_x64(dtype == jnp.float64):
        public = lambda t, params: {"public_grads": run.at("public_grad", t)}  # noqa: E731
        params, _ = replay(monkeypatch, run, optimizer_of(run), dtype, extra=public)
    assert golden_runs.error(run, "param", params) <= rtol


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_golden_end_to_end_from_the_data(monkeypatch, x64, name):
    run = load(name)
    loss_fn = MODELS[run.meta["model"]]

    def public(t, params):
        batch = (run.arrays["public_x"], run.arrays["public_y"])
        mean_loss = lambda p: jnp.mean(jax.vmap(loss_fn, in_axes=(None, 0))(p, batch))  # noqa: E731
        return {"public_grads": jax.grad(mean_loss)(params)}

    params, _ = replay(monkeypatch, run, optimizer_of(run), jnp.float64, extra=public, loss_fn=loss_fn)
    assert golden_runs.error(run, "param", params) <= 1e-9


# The first repository divides by sqrt(v + eps), with v fixed for an epoch (`precond`), clips by C / (norm + 1e-6), and
# clips means of microbatches: here a microbatch is passed as one "example".
@pytest.mark.slow
@pytest.mark.parametrize("name", PER_EPOCH_RUNS)
@pytest.mark.parametrize(("dtype", "rtol"), PRECISIONS, ids=["x64", "x32"])
def test_golden_per_epoch_scale(monkeypatch, name, dtype, rtol):
    run = load(name)
    m, clip = run.meta, EpsClip(run.meta["clip"], 1e-6)
    epochs = {k: 1 / np.sqrt(v + m["epsilon"]) for k, v in run.tree("precond").items()}
    params, path = run.tree("init"), []
    with golden_runs.enable_x64(dtype == jnp.float64):
        for epoch in range(m["epochs"]):
            optimizer = adadps(
                m["lr"],
                l2_clip_norm=clip,
                noise_multiplier=m["sigma"],
                expected_batch_size=m["num_microbatches"],
                key=jax.random.key(0),
                scale={k: v[epoch] for k, v in epochs.items()},
            )
            part = slice(epoch * m["steps_per_epoch"], (epoch + 1) * m["steps_per_epoch"])
            arrays = {f"init__{k}": np.asarray(v) for k, v in params.items()}
            arrays |= {k: v[part] for k, v in run.arrays.items() if k.startswith("mg__")}
            for k, v in run.tree("noise").items():
                arrays[f"z__{k}"] = v[part] / (m["sigma"] * m["clip"])
            piece = golden_runs.Run({**m, "T": m["steps_per_epoch"]}, arrays)
            steps, _ = replay(monkeypatch, piece, optimizer, dtype, grads="mg")
            params, path = steps[-1], path + steps
    assert golden_runs.error(run, "param", path) <= rtol


@pytest.mark.slow
def test_every_rule_equals_its_equations(either_precision):
    rtol = 1e-11 if either_precision else 2e-5
    rng = np.random.default_rng(0)
    grads, public = rng.normal(size=(9, 5, 6)) * [10, 1, 1, 0.1, 0.1, 0.1], rng.normal(size=(9, 6))
    for rule in ("rmsprop", "adagrad", "adam"):
        for inside in (False, True):
            optimizer = adadps(
                0.1, **privacy_four(noise_multiplier=0.0, l2_clip_norm=3.0), rule=rule, decay=0.8, eps=0.05, b1=0.7,
                eps_in_sqrt=inside,
            )  # fmt: skip
            clipped = []
            w, v, m = np.zeros(6), np.zeros(6), np.zeros(6)
            params = jnp.zeros(6)
            state = optimizer.init(params)
            for g, p in zip(grads, public, strict=True):
                v = v + p**2 if rule == "adagrad" else 0.8 * v + 0.2 * p**2
                m = 0.7 * m + 0.3 * p
                a = np.sqrt(v + 0.05) if inside else np.sqrt(v) + 0.05
                mapped = (0.7 * g + 0.3 * m) / a if rule == "adam" else g / a
                norms = np.linalg.norm(mapped, axis=1, keepdims=True)
                clipped.append(np.mean(norms > 3.0))
                w = w - 0.1 * np.sum(mapped * np.minimum(1, 3.0 / norms), axis=0) / 4
                updates, state = optimizer.update(jnp.asarray(g), state, params, public_grads=jnp.asarray(p))
                params = optax.apply_updates(params, updates)
                np.testing.assert_allclose(params, w, rtol=rtol, atol=rtol)
            assert 0 < np.mean(clipped) < 1


# --- limits -------------------------------------------------------------------------------------------------------


def train(optimizer, steps=5, params=None, batch=None, mask=None, public=True, engine="auto"):
    params = tiny_params() if params is None else params
    state = optimizer.init(params)
    step = jax.jit(dpopt.make_train_step(tiny_loss, optimizer, engine=engine))
    mean_loss = lambda p: jnp.mean(jax.vmap(tiny_loss, in_axes=(None, 0))(p, tiny_batch(seed=7)))  # noqa: E731
    for _ in range(steps):
        extra = {"public_grads": jax.grad(mean_loss)(params)} if public else {}
        params, state, _ = step(params, state, tiny_batch() if batch is None else batch, mask, **extra)
    return params, state


@pytest.mark.slow
def test_side_information_of_ones_is_dp_sgd():
    assert_identical(
        train(adadps(0.1, scale=1.0, **privacy_four()), public=False)[0],
        train(dpopt.dp_sgd(0.1, **privacy_four()), public=False)[0],
    )


@pytest.mark.slow
def test_public_gradient_of_the_training_batch_is_rmsprop(x64):
    four = privacy_four(noise_multiplier=0.0, l2_clip_norm=math.inf)
    ours, rule = adadps(0.1, **four, decay=0.8, eps=1e-3), optax.rmsprop(0.1, decay=0.8, eps=1e-3, eps_in_sqrt=False)
    params = twin = jnp.zeros(6)
    state, twin_state = ours.init(params), rule.init(params)
    for g in np.random.default_rng(0).normal(size=(9, 4, 6)):
        updates, state = ours.update(jnp.asarray(g), state, params, public_grads=jnp.asarray(g.mean(axis=0)))
        params = optax.apply_updates(params, updates)
        updates, twin_state = rule.update(jnp.asarray(g.mean(axis=0)), twin_state, twin)
        twin = optax.apply_updates(twin, updates)
        np.testing.assert_allclose(params, twin, rtol=1e-12)


def test_adas_is_the_scale_without_clip_and_noise():
    opt = adadps(1.0, scale=jnp.array([2.0, 0.5]), **privacy_four(noise_multiplier=0.0, l2_clip_norm=math.inf))
    params = jnp.zeros(2)
    updates, _ = opt.update(jnp.full((4, 2), 100.0), opt.init(params), params)
    np.testing.assert_allclose(updates, [-200.0, -50.0])
    assert isinstance(opt.privacy.step_event(), dpopt.privacy.dp_accounting.NonPrivateDpEvent)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rule", ["rmsprop", "adagrad", "adam"])
def test_one_gaussian_a_step(count_draws, rule):
    opt = adadps(0.1, rule=rule, **privacy_four(noise_multiplier=1.7))
    assert opt.privacy.step_event() == dpopt.privacy.dp_accounting.GaussianDpEvent(paid(1.7))
    train(opt, 1)
    assert len(count_draws) == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rule", ["rmsprop", "adagrad", "adam"])
def test_one_example_moves_the_sum_by_at_most_the_clip_norm(rule):
    opt = adadps(1.0, rule=rule, **privacy_four(noise_multiplier=0.0, expected_batch_size=1))
    params, public = jnp.zeros(3), jnp.array([1e-4, 1.0, 30.0])
    some, one_more = jnp.array([[0.1, 0.2, 0.3]]), jnp.array([[0.1, 0.2, 0.3], [50.0, -9.0, 1.0]])
    a, _ = opt.update(some, opt.init(params), params, public_grads=public)
    b, _ = opt.update(one_more, opt.init(params), params, public_grads=public)
    np.testing.assert_allclose(np.linalg.norm(a - b), 1.0, rtol=1e-5)


# --- jit, scan, dtypes, bad batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rmsprop", "adam"])
@pytest.mark.one_in(6)
def test_scan_equals_a_loop(either_precision, rule):
    opt = adadps(0.1, rule=rule, **privacy_four())
    step = dpopt.make_train_step(tiny_loss, opt, engine="vmap")
    mean_loss = lambda p: jnp.mean(jax.vmap(tiny_loss, in_axes=(None, 0))(p, tiny_batch(seed=7)))  # noqa: E731

    def body(carry, _):
        return step(*carry, tiny_batch(), public_grads=jax.grad(mean_loss)(carry[0]), mask=None)[:2], None

    params = tiny_params()
    scanned, _ = jax.lax.scan(body, (params, opt.init(params)), length=5)
    assert_near(scanned[0], train(opt)[0], rtol=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", ["rmsprop", "adam"])
def test_bfloat16_parameters_keep_float32_moments(rule):
    params, state = train(adadps(0.1, rule=rule, **privacy_four()), params=tiny_params(dtype=jnp.bfloat16))
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floats and {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}
    assert all(np.isfinite(x.astype(jnp.float32)).all() and x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))


@pytest.mark.slow
def test_nan_examples_and_empty_batches():
    opt = adadps(0.1, rule="adam", **privacy_four())
    spoiled = jax.tree.map(lambda x: x.at[1].set(jnp.nan), tiny_batch())
    # On the engine that drops both in the same way: ghost repeats a batch with NaN, with sums in another order.
    nan_params, _ = train(opt, batch=spoiled, mask=jnp.ones(4, bool), engine="vmap")
    masked_params, _ = train(opt, mask=jnp.array([True, False, True, True]), engine="vmap")
    assert_identical(nan_params, masked_params)
    empty, _ = train(opt, mask=jnp.zeros(4, bool))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(empty))


def test_a_public_gradient_that_is_not_finite_is_passed_over():
    opt = adadps(0.1, rule="adam", **privacy_four())
    params = jnp.zeros(2)
    _, before = opt.update(jnp.ones((4, 2)), opt.init(params), params, public_grads=jnp.array([1.0, 2.0]))
    updates, after = opt.update(jnp.ones((4, 2)), before, params, public_grads=jnp.array([1.0, jnp.nan]))
    moments = lambda state: jax.tree.leaves(state)[:2]  # noqa: E731
    assert_identical(moments(after), moments(before))
    assert np.isfinite(updates).all()


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("public", "error", "match"),
    [
        (
            {},
            ValueError,
            r"needs public gradients, and got none: call update\(grads, state, params, public_grads",
        ),
        ({"public_grads": {"v": jnp.zeros(2)}}, ValueError, "public_grads must have the parameters' tree structure"),
        ({"public_grads": {"w": jnp.zeros((4, 2))}}, ValueError, r"public_grads\['w'\] has shape \(4, 2\) for a param"),
    ],
)
def test_missing_or_wrong_public_gradients(public, error, match):
    opt = adadps(0.1, **privacy_four())
    params = {"w": jnp.zeros(2)}
    with pytest.raises(error, match=match):
        opt.update({"w": jnp.ones((4, 2))}, opt.init(params), params, **public)


def test_a_promise_is_no_public_gradient():
    opt = adadps(0.1, **privacy_four())
    params = tiny_params()
    promise = dpopt.per_example_grads(tiny_loss)(params, tiny_batch(), mask=None)
    with pytest.raises(TypeError, match="public_grads must be one mean gradient"):
        opt.update(promise, opt.init(params), params, public_grads=promise)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(rule="yogi"), "rule must be one of 'rmsprop', 'adagrad', 'adam'; got 'yogi'"),
        (dict(eps=0.0), "eps must be positive"),
        (dict(decay=1.5), "decay must lie in"),
        (dict(b1=-0.1), "b1 must lie in"),
        (
            dict(scale={"w": jnp.array([1.0, 0.0])}),
            r"scale\['w'\] must be positive and finite everywhere; it holds 0.0",
        ),
        (dict(scale={"w": jnp.array([1.0, -2.0])}), "it holds -2.0"),
        (dict(scale={"w": jnp.array([1.0, jnp.nan])}), "it holds nan"),
        (dict(scale={"w": jnp.array([1.0, jnp.inf])}), "it holds inf"),
        (dict(scale={}), "scale has no entries"),
    ],
)
def test_bad_arguments_are_named(changes, match):
    with pytest.raises(ValueError, match=match):
        adadps(0.1, **privacy_four(), **changes)


@pytest.mark.parametrize("scale", [{"v": 1.0}, {"w": jnp.ones(3)}])
def test_a_scale_of_another_tree_or_shape(scale):
    opt = adadps(0.1, scale=scale, **privacy_four())
    params = {"w": jnp.zeros(2)}
    with pytest.raises(ValueError, match="scale"):
        opt.update({"w": jnp.ones((4, 2))}, opt.init(params), params)
