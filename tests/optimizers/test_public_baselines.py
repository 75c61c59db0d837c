"""The baselines with public data, and the plain DP baselines of the same recorded runs."""

import golden_runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_runs import MODELS, load, replay, tiny_batch, tiny_loss, tiny_params
from helpers import paid, privacy_four

import dpopt
from dpopt.optimizers.baselines.public import blend_public_gradients, dp_adam_pub, dp_r_pub, pda_dpmd
from dpopt.optimizers.public import warm_start

PRECISIONS = [(jnp.float64, golden_runs.RTOL64), (jnp.float32, golden_runs.RTOL32)]
both = pytest.mark.parametrize(("dtype", "rtol"), PRECISIONS, ids=["x64", "x32"])


def four_of(run):
    m = run.meta
    return dict(l2_clip_norm=m["clip1"], noise_multiplier=m["sigma"], expected_batch_size=m["B"], key=jax.random.key(0))


@pytest.mark.one_in(2)
@both
@pytest.mark.parametrize("name", ["pda_dpmd_S_sigma1", "pda_dpmd_logreg_sigma0"])
def test_golden_pda_dpmd(monkeypatch, name, dtype, rtol):
    run = load(name)
    optimizer = pda_dpmd(run.meta["lr"], total_steps=run.meta["total_iters"], **four_of(run))
    with golden_runs.enable_x64(dtype == jnp.float64):
        public = lambda t, params: {"public_grads": run.at("public_grad", t)}  # noqa: E731
        params, _ = replay(monkeypatch, run, optimizer, dtype, extra=public)
    assert golden_runs.error(run, "param", params) <= rtol


def test_golden_pda_dpmd_end_to_end_from_the_data(monkeypatch, x64):
    run = load("pda_dpmd_S_sigma1")
    loss_fn = MODELS["S"]
    optimizer = pda_dpmd(run.meta["lr"], total_steps=run.meta["total_iters"], **four_of(run))

    def public(t, params):
        batch = (run.arrays["public_x"], run.arrays["public_y"])
        mean_loss = lambda p: jnp.mean(jax.vmap(loss_fn, in_axes=(None, 0))(p, batch))  # noqa: E731
        return {"public_grads": jax.grad(mean_loss)(params)}

    params, _ = replay(monkeypatch, run, optimizer, jnp.float64, extra=public, loss_fn=loss_fn)
    assert golden_runs.error(run, "param", params) <= 1e-9


@both
@pytest.mark.parametrize("name", ["dp_rmsprop_L_sigma1", "dp_adagrad_L_sigma1", "dp_adam_L_sigma1"])
@pytest.mark.one_in(3)
def test_golden_plain_baselines(monkeypatch, name, dtype, rtol):
    run = load(name)
    m, four = run.meta, four_of(run)
    optimizer = {
        # eps outside the root; AdaGrad's sum starts at 0, so optax.adagrad's eps inside the root does not fit.
        "dp_rmsprop": lambda: dpopt.dp_rmsprop(
            m["lr"], decay=m["rmsprop_gamma"], eps=m["epsilon"], eps_in_sqrt=False, **four
        ),
        "dp_adagrad": lambda: dpopt.chain(
            dpopt.privatize(**four), golden_adagrad(m["epsilon"]), optax.scale_by_learning_rate(m["lr"])
        ),
        "dp_adam": lambda: dpopt.dp_adam(m["lr"], b1=m["beta1"], b2=m["beta2"], eps=m["epsilon"], **four),
    }[m["algorithm"]]()
    with golden_runs.enable_x64(dtype == jnp.float64):
        params, _ = replay(monkeypatch, run, optimizer, dtype)
    assert golden_runs.error(run, "param", params) <= rtol


def golden_adagrad(eps):
    """The reference's AdaGrad: ``g / (sqrt(v) + eps)`` with v from 0."""

    def update(g, v, params=None):
        v = jax.tree.map(lambda v, g: v + g**2, v, g)
        return jax.tree.map(lambda g, v: g / (jnp.sqrt(v) + eps), g, v), v

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)


def steps_of(optimizer, private, public, start):
    """Runs on private means (noise off, batch of one, no clip) and returns the path."""
    params, path = jnp.asarray(start), []
    state = optimizer.init(params)
    for g, p in zip(private, public, strict=True):
        updates, state = optimizer.update(jnp.asarray(g)[None], state, params, public_grads=jnp.asarray(p))
        params = optax.apply_updates(params, updates)
        path.append(params)
    return np.array(path)


OFF = dict(l2_clip_norm=np.inf, noise_multiplier=0.0, expected_batch_size=1, key=jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rmsprop", "adagrad"])
def test_dp_r_pub_equals_its_equations(x64, rule):
    private, public = np.random.default_rng(0).normal(size=(2, 9, 5))
    v, w, expected = np.zeros(5), np.ones(5), []
    for g, p in zip(private, public, strict=True):
        v = v + p**2 if rule == "adagrad" else 0.8 * v + 0.2 * p**2
        w = w - 0.1 * g / (np.sqrt(v) + 0.05)
        expected.append(w)
    ours = steps_of(dp_r_pub(0.1, rule=rule, decay=0.8, eps=0.05, **OFF), private, public, np.ones(5))
    np.testing.assert_allclose(ours, expected, rtol=1e-12)


def test_dp_r_pub_clips_before_it_divides():
    opt = dp_r_pub(1.0, rule="adagrad", eps=1.0, **privacy_four(noise_multiplier=0.0, expected_batch_size=1))
    updates, _ = opt.update(
        jnp.array([[30.0, 40.0]]), opt.init(jnp.zeros(2)), jnp.zeros(2), public_grads=jnp.array([0.0, 3.0])
    )
    np.testing.assert_allclose(updates, [-0.6, -0.2], rtol=1e-6)


def test_dp_adam_pub_equals_its_equations(x64):
    private, public = np.random.default_rng(0).normal(size=(2, 9, 5))
    m, v, w, expected = np.zeros(5), np.zeros(5), np.ones(5), []
    for t, (g, p) in enumerate(zip(private, public, strict=True), start=1):
        m = 0.8 * m + 0.2 * (0.7 * g + 0.3 * p)
        v = 0.95 * v + 0.05 * p**2
        w = w - 0.1 * m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3)
        expected.append(w)
    ours = steps_of(dp_adam_pub(0.1, b1=0.7, b2=0.8, b3=0.95, eps=1e-3, **OFF), private, public, np.ones(5))
    np.testing.assert_allclose(ours, expected, rtol=1e-12)


def test_pda_dpmd_ends_with_public_gradients_alone():
    blend = blend_public_gradients(3)
    state, seen = blend.init(None), []
    for _ in range(6):
        u, state = blend.update(jnp.ones(()), state, public_grads=jnp.zeros(()))
        seen.append(float(u))
    np.testing.assert_allclose(seen, [1.0, np.cos(np.pi / 6), 0.5, 0.0, 0.0, 0.0], atol=1e-6)


MAKERS = {
    "dp_r_pub": dp_r_pub,
    "dp_adam_pub": dp_adam_pub,
    "pda_dpmd": lambda lr, **four: pda_dpmd(lr, total_steps=5, **four),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MAKERS)
def test_event_scan_dtype_and_bad_batches(count_draws, name):
    opt = MAKERS[name](0.1, **privacy_four(noise_multiplier=1.7))
    assert opt.privacy.step_event(3) == dpopt.privacy.dp_accounting.GaussianDpEvent(paid(1.7))
    step, params = dpopt.make_train_step(tiny_loss, opt), tiny_params(jnp.bfloat16)
    public = jax.tree.map(jnp.ones_like, params)
    batch = jax.tree.map(lambda x: x.at[0].set(jnp.nan), tiny_batch())

    def body(carry, mask):
        return step(*carry, batch, mask, public_grads=public)[:2], None

    masks = jnp.array([[True] * 4, [False] * 4, [False, True, True, False]])
    (end, state), _ = jax.lax.scan(body, (params, opt.init(params)), masks)
    assert len(count_draws) == 1
    assert all(x.dtype == jnp.bfloat16 and np.isfinite(x.astype(jnp.float32)).all() for x in jax.tree.leaves(end))
    floats = {x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert floats <= {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("name", MAKERS)
def test_missing_public_gradients(name):
    opt = MAKERS[name](0.1, **privacy_four())
    with pytest.raises(ValueError, match="needs public gradients, and got none"):
        opt.update(jnp.ones((4, 2)), opt.init(jnp.zeros(2)), jnp.zeros(2))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: dp_r_pub(0.1, rule="yogi", **privacy_four()), "rule must be one of"),
        (lambda: dp_adam_pub(0.1, b1=1.0, **privacy_four()), r"b1 must lie in \[0, 1\)"),
        (lambda: dp_adam_pub(0.1, eps=0.0, **privacy_four()), "eps must be positive"),
        (lambda: pda_dpmd(0.1, total_steps=0, **privacy_four()), "total_steps must be at least 1; got 0"),
    ],
)
def test_bad_arguments_are_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_warm_start_is_ordinary_training():
    batches = [tiny_batch(seed) for seed in range(4)]
    start = tiny_params()
    expected = start
    for batch in batches:
        mean_loss = lambda p, b=batch: jnp.mean(jax.vmap(tiny_loss, in_axes=(None, 0))(p, b))  # noqa: E731
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, jax.grad(mean_loss)(expected))
    ours = warm_start(tiny_loss, start, batches, optimizer=optax.sgd(0.1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, expected)


def test_warm_start_refuses_a_private_optimizer():
    with pytest.raises(TypeError, match="ordinary Optax optimizer"):
        warm_start(tiny_loss, tiny_params(), [], optimizer=dpopt.dp_sgd(0.1, **privacy_four()))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [0, 3])
def test_a_blend_survives_public_gradients_that_are_not_finite(bad, count):
    """At step 0 the public gradient has the weight 0, and 0 times infinity is NaN."""
    blend = blend_public_gradients(9)
    state = blend.init(jnp.zeros(2))._replace(count=jnp.asarray(count, jnp.int32))
    private, public = jnp.array([4.0, 4.0]), jnp.array([bad, 2.0])
    found, _ = blend.update(private, state, public_grads=public)
    expected, _ = blend.update(private, state, public_grads=jnp.array([0.0, 2.0]))
    np.testing.assert_array_equal(found, expected)
