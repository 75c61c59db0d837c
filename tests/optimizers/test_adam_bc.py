"""scale_by_adam_bc and its relatives: the authors' trajectories, a NumPy transcription, schedules, limits."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import enable_x64, paid, privacy_four, slow_unless

import dpopt
from dpopt.common.averages import one_minus_power
from dpopt.optimizers.adam_bc import dp_adam_bc, scale_by_adagrad_bc, scale_by_adam_bc, scale_by_rms_bc

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
LEAVES = ("b", "u", "w")


def load(name, dtype):
    with np.load(GOLDEN / name) as d:
        meta = json.loads(str(d["meta"]))
        arrays = {k: np.asarray(d[k]).astype(dtype) for k in d.files if k != "meta"}
    trees: dict = {}
    for key, value in arrays.items():
        prefix, _, leaf = key.partition("__")
        if leaf:
            trees.setdefault(prefix, {})[leaf] = value
        else:
            trees[key] = value
    return meta.get("hyperparameters", meta), trees


def at(tree, t):
    return {leaf: jnp.asarray(tree[leaf][t]) for leaf in LEAVES}


def start(data):
    return {leaf: jnp.asarray(data["init"][leaf]) for leaf in LEAVES}


def assert_close(actual, expected, rtol):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.max(np.abs(actual - expected)) <= rtol * np.max(np.abs(expected))


FILES = ("adambc_sigma0", "adambc_sigma1", "adambc_lownoise")

# Measured: 6e-7 in float32, although v^ - Phi is a difference of nearly equal numbers.
PRECISIONS = {"x64": (True, 1e-10), "x32": (False, 1e-5)}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("precision", slow_unless({"x64"}, PRECISIONS))
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("reference", ["jax_param", "corr_param"])
def test_golden_from_per_example_gradients(monkeypatch, name, precision, reference):
    """The whole optimizer: the clip, the recorded noise, and Phi from the chain."""
    x64, rtol = PRECISIONS[precision]
    with enable_x64(x64):
        h, data = load(f"{name}.npz", np.float64 if x64 else np.float32)
        opt = dp_adam_bc(
            h["lr"], l2_clip_norm=h["clip"], noise_multiplier=h["sigma"], expected_batch_size=h["B"],
            key=jax.random.key(0), b1=h["beta1"], b2=h["beta2"], gamma=h["gamma"],
        )  # fmt: skip
        drawn = {}
        monkeypatch.setattr(dpopt.noise, "standard_normal_like", lambda key, tree: drawn["z"])

        @jax.jit
        def step(params, state, per_example, z):
            drawn["z"] = z
            updates, state = opt.update(per_example, state, params)
            return optax.apply_updates(params, updates), state

        params = start(data)
        state = opt.init(params)
        for t in range(h["T"]):
            z = None
            if h["sigma"] > 0:
                z = jax.tree.map(lambda n: n / (h["clip"] * h["sigma"]), at(data["noise"], t))
            params, state = step(params, state, at(data["eg"], t), z)
            for leaf in LEAVES:
                assert_close(params[leaf], data[reference][leaf][t], rtol)


@pytest.mark.parametrize("x64, rtol", [(True, 1e-10), (False, 1e-5)])
def test_golden_gamma_schedule_and_coupled_weight_decay(x64, rtol):
    """adam_corr: gamma' decays from its first value, and weight decay is part of the gradient, Phi unchanged."""
    with enable_x64(x64):
        h, data = load("adambc_lownoise_wd.npz", np.float64 if x64 else np.float32)
        assert h["gamma_decay"] < 1
        rule = scale_by_adam_bc(
            noise_stddev=h["sigma"] * h["clip"] / h["B"], b1=h["beta1"], b2=h["beta2"],
            gamma=lambda step: h["gamma"] * h["gamma_decay"] ** jnp.asarray(step, jnp.result_type(float)),
        )  # fmt: skip
        opt = optax.chain(optax.add_decayed_weights(h["weight_decay"]), rule, optax.scale_by_learning_rate(h["lr"]))
        step = jax.jit(lambda g, s, p: opt.update(g, s, p))
        params = start(data)
        state = opt.init(params)
        for t in range(h["T"]):
            updates, state = step(at(data["grad"], t), state, params)
            params = optax.apply_updates(params, updates)
            for leaf in LEAVES:
                assert_close(params[leaf], data["corr_param"][leaf][t], rtol)


@pytest.mark.parametrize("name", ["adambc_lownoise_wd", "adambc_lownoise_bigeps", "adambc_sigma1"])
def test_golden_variant_with_eps_outside_and_decoupled_decay(name):
    with enable_x64(True):
        h, data = load(f"{name}.npz", np.float64)
        rule = scale_by_adam_bc(
            noise_stddev=h["sigma"] * h["clip"] / h["B"], b1=h["beta1"], b2=h["beta2"], gamma=h["gamma"], eps=h["eps"]
        )
        opt = optax.chain(rule, optax.add_decayed_weights(h["weight_decay"]), optax.scale_by_learning_rate(h["lr"]))
        step = jax.jit(lambda g, s, p: opt.update(g, s, p))
        params = start(data)
        state = opt.init(params)
        for t in range(h["T"]):
            updates, state = step(at(data["grad"], t), state, params)
            params = optax.apply_updates(params, updates)
        # The state holds the authors' moments: m unchanged, v minus the noise in it.
        weight = 1 - h["beta2"] ** h["T"]
        for leaf in LEAVES:
            assert_close(params[leaf], data["ma_param"][leaf][-1], 1e-10)
            assert_close(state[0].mu[leaf], data["m"][leaf][-1], 1e-10)
            noise = weight * (h["sigma"] * h["clip"] / h["B"]) ** 2
            assert_close(state[0].nu[leaf] + noise, data["v"][leaf][-1], 1e-10)


# --- transcriptions ---------------------------------------------------------------------------------------------------


def numpy_bc(rule, grads, stddevs, gammas, *, b1=0.9, b2=0.999, eps=0.0, correct=True):
    """Updates over time, with the weight of the noise in v written as a sum over the draws."""
    m = np.zeros_like(grads[0])
    v = np.zeros_like(grads[0])
    updates = []
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        if rule == "adagrad":
            v = v + g**2
            phi = sum(s**2 for s in stddevs[:t])
        else:
            v = b2 * v + (1 - b2) * g**2
            phi = (1 - b2) * sum(b2 ** (t - tau) * stddevs[tau - 1] ** 2 for tau in range(1, t + 1))
            if correct:
                v_hat, phi = v / (1 - b2**t), phi / (1 - b2**t)
        clean = v_hat if rule != "adagrad" and correct else v
        numerator = m / (1 - b1**t) if rule == "adam" else g
        updates.append(numerator / (np.sqrt(np.maximum(clean - phi, gammas[t - 1])) + eps))
    return updates


RULES = {
    "adam": (lambda **k: scale_by_adam_bc(b1=0.8, b2=0.9, **k), dict(b1=0.8, b2=0.9)),
    "rmsprop": (lambda **k: scale_by_rms_bc(decay=0.9, **k), dict(b2=0.9, correct=False)),
    "rmsprop corrected": (lambda **k: scale_by_rms_bc(decay=0.9, bias_correction=True, **k), dict(b2=0.9)),
    "adagrad": (scale_by_adagrad_bc, {}),
}


@pytest.mark.parametrize("x64, rtol", [(True, 1e-10), (False, 2e-4)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("noise", ["constant", "schedule", "per coordinate", "schedule per coordinate"])
@pytest.mark.one_in(6)
def test_numpy_transcription(rule, noise, x64, rtol):
    rng = np.random.default_rng(0)
    steps, d = 15, 6
    table = {
        "constant": np.full((steps, 1), 0.7),
        "schedule": np.linspace(2.0, 0.3, steps)[:, None],
        "per coordinate": np.tile(np.linspace(0.1, 2.0, d), (steps, 1)),
        "schedule per coordinate": rng.uniform(0.1, 2.0, size=(steps, d)),
    }[noise]
    grads = list(rng.normal(size=(steps, d)) * (0.5 + table))
    gammas = 0.01 * 0.9 ** np.arange(steps)
    make, options = RULES[rule]
    with enable_x64(x64):
        rows, floors = jnp.asarray(table, jnp.result_type(float)), jnp.asarray(gammas, jnp.result_type(float))
        stddev = {
            "constant": 0.7,
            "schedule": lambda t: rows[t, 0],
            "per coordinate": {"w": rows[0]},
            "schedule per coordinate": lambda t: {"w": rows[t]},
        }[noise]
        t = make(noise_stddev=stddev, gamma=lambda step: floors[step])
        state = t.init({"w": jnp.zeros(d)})
        update = jax.jit(t.update)
        for g, expected in zip(grads, numpy_bc(rule.split()[0], grads, table, gammas, **options), strict=True):
            updates, state = update({"w": jnp.asarray(g, jnp.result_type(float))}, state)
            np.testing.assert_allclose(updates["w"], expected, rtol=rtol)


def test_constant_noise_is_the_papers_phi():
    """For constant s: m^ / sqrt(max(v^ - Phi, gamma)), written as in the paper."""
    rng = np.random.default_rng(3)
    with enable_x64(True):
        rule = scale_by_adam_bc(noise_stddev=0.5, gamma=1e-3)
        state = rule.init(jnp.zeros(20))
        m = v = np.zeros(20)
        floored = 0
        for t in range(1, 12):
            g = rng.normal(size=20)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            corrected = v / (1 - 0.999**t) - 0.5**2
            floored += np.sum(corrected < 1e-3)
            updates, state = rule.update(jnp.asarray(g), state)
            expected = m / (1 - 0.9**t) / np.sqrt(np.maximum(corrected, 1e-3))
            np.testing.assert_allclose(updates, expected, rtol=1e-11)
        assert 0 < floored < 11 * 20  # both branches were taken


def test_correction_removes_the_noise_on_average():
    """Gradients of 0.1 with noise of 1: the corrected second moment is that of the gradients."""
    g = 0.1 + jax.random.normal(jax.random.key(0), (4_000, 500))
    rule = scale_by_adam_bc(noise_stddev=1.0, b2=0.999)
    state = jax.lax.scan(lambda s, x: (rule.update(x, s)[1], None), rule.init(jnp.zeros(500)), g)[0]
    assert float(jnp.mean(state.nu)) / (1 - 0.999**4_000) == pytest.approx(0.01, abs=0.01)


# --- where the noise comes from ---------------------------------------------------------------------------------------


def second_moment_error(opt, batch, steps=4):
    """nu of a chain on zero gradients, against minus the variance of the noise that the chain should pass."""
    params = {"w": jnp.zeros(3)}
    state, update = opt.init(params), jax.jit(opt.update)
    for _ in range(steps):
        _, state = update({"w": np.zeros((batch, 3), np.float32)}, state, params)
    return next(s for s in state if hasattr(s, "nu")).nu["w"]


def ema_of_squares(stddevs, b2):
    total = 0.0
    for s in stddevs:
        total = b2 * total + (1 - b2) * np.square(s)
    return total


def test_chain_tells_the_noise_and_its_schedule(monkeypatch):
    monkeypatch.setattr(dpopt.noise, "standard_normal_like", lambda key, tree: jax.tree.map(jnp.zeros_like, tree))
    four = privacy_four(l2_clip_norm=2.0, noise_multiplier=lambda t: 1.0 / (t + 1), expected_batch_size=8)
    opt = dp_adam_bc(0.1, b2=0.9, **four)
    expected = ema_of_squares([2.0 / (t + 1) / 8 for t in range(4)], 0.9)
    np.testing.assert_allclose(second_moment_error(opt, 8), -expected, rtol=1e-5)
    assert opt.privacy.step_event(3).noise_multiplier == paid(0.25)


def test_chain_without_normalize_tells_the_noise_of_the_sum(monkeypatch):
    monkeypatch.setattr(dpopt.noise, "standard_normal_like", lambda key, tree: jax.tree.map(jnp.zeros_like, tree))
    key = jax.random.key(0)
    opt = dpopt.chain(dpopt.clip_and_sum(1.0), dpopt.add_gaussian_noise(3.0, key), scale_by_adam_bc(b2=0.9))
    np.testing.assert_allclose(second_moment_error(opt, 4), -ema_of_squares([3.0] * 4, 0.9), rtol=1e-5)


class Undo:
    """Scales by S before the clip and by 1 / S after the noise: the noise becomes anisotropic."""

    needs_feedback = True

    def __init__(self, scale):
        self.scale = scale

    def init(self, params):
        return optax.EmptyState()

    def diagonal(self, state, params, **extra):
        return dpopt.preconditioners.base.Diagonal(self.scale, None, jax.tree.map(lambda s: 1 / s, self.scale)), state

    def observe(self, state, mean, *noise):
        return state


def test_chain_tells_anisotropic_noise(monkeypatch):
    monkeypatch.setattr(dpopt.noise, "standard_normal_like", lambda key, tree: jax.tree.map(jnp.zeros_like, tree))
    scale = jnp.array([0.5, 1.0, 4.0])
    core = dpopt.privatize(**privacy_four(expected_batch_size=2), preconditioner=Undo({"w": scale}))
    opt = dpopt.chain(core, scale_by_adam_bc(b2=0.9))
    expected = ema_of_squares([1.0 / 2 / np.asarray(scale)] * 4, 0.9)
    np.testing.assert_allclose(second_moment_error(opt, 4), -expected, rtol=1e-5)


def test_noise_that_nobody_tells():
    rule = scale_by_adam_bc()
    key = jax.random.key(0)
    opt = optax.chain(dpopt.clip_and_sum(1.0), dpopt.add_gaussian_noise(1.0, key), dpopt.normalize_by(2), rule)
    with pytest.raises(ValueError, match="scale_by_adam_bc got no noise_stddev"):
        jax.jit(opt.update)(jnp.zeros((2, 3)), opt.init(jnp.zeros(3)), jnp.zeros(3))
    told = optax.chain(
        dpopt.clip_and_sum(1.0), dpopt.add_gaussian_noise(1.0, key), dpopt.normalize_by(2),
        scale_by_adam_bc(noise_stddev=0.5),
    )  # fmt: skip
    own = dp_adam_bc(1.0, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=2, key=key)
    a, b = (jax.jit(o.update)(np.ones((2, 3)), o.init(jnp.zeros(3)), jnp.zeros(3))[0] for o in (told, own))
    np.testing.assert_array_equal(a, -b)


@pytest.mark.parametrize("make", [scale_by_adam_bc, scale_by_rms_bc, scale_by_adagrad_bc])
def test_chain_refuses_a_stage_in_between(make):
    core = dpopt.privatize(**privacy_four())
    with pytest.raises(ValueError, match=rf"stage 2 \({make.__name__}\) needs the noise in its input"):
        dpopt.chain(core, optax.trace(0.9), make())
    dpopt.chain(core, optax.trace(0.9), make(noise_stddev=0.1))  # accepted, since the caller states the noise


# --- limits -----------------------------------------------------------------------------------------------------------


def run(opt, params, grads):
    def step(carry, g):
        params, state = carry
        updates, state = opt.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.jit(lambda p: jax.lax.scan(step, (p, opt.init(p)), grads)[1])(params)


@pytest.mark.parametrize("x64, rtol", [(True, 1e-12), (False, 1e-4)])  # optax rounds 1 - b2^t in float32
def test_no_noise_and_a_tiny_floor_is_adam(x64, rtol):
    with enable_x64(x64):
        grads = jax.random.normal(jax.random.key(0), (20, 2, 5), jnp.result_type(float))
        four = privacy_four(l2_clip_norm=jnp.inf, noise_multiplier=0.0, expected_batch_size=2)
        ours = run(dp_adam_bc(0.01, gamma=1e-30, **four), jnp.zeros(5), grads)
        theirs = run(optax.adam(0.01, eps=0.0), jnp.zeros(5), jnp.mean(grads, axis=1))
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol)


def test_no_noise_is_rmsprop_and_adagrad():
    with enable_x64(True):
        grads = jax.random.normal(jax.random.key(0), (20, 5), jnp.float64)
        pairs = [
            (scale_by_rms_bc(noise_stddev=0.0, gamma=1e-30, eps=1e-3), optax.scale_by_rms(eps=1e-3, eps_in_sqrt=False)),
            (scale_by_adagrad_bc(noise_stddev=0.0, gamma=1e-30), optax.scale_by_rss(0.0, eps=1e-30)),
        ]
        for ours, theirs in pairs:
            np.testing.assert_allclose(run(ours, jnp.zeros(5), grads), run(theirs, jnp.zeros(5), grads), rtol=1e-10)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_types_under_jit_and_scan(either_precision, dtype):
    params = {"w": jnp.ones((2, 3), dtype), "s": jnp.ones((), dtype)}
    grads = jax.tree.map(lambda p: jnp.ones((7, 4, *p.shape), dtype), params)
    opt = dp_adam_bc(0.1, gamma=optax.exponential_decay(1e-4, 5, 0.5), **privacy_four())
    end = run(opt, params, grads)
    bc = next(s for s in opt.init(params) if hasattr(s, "nu"))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((bc.mu, bc.nu)))
    for k, p in params.items():
        assert end[k].dtype == dtype and end[k].shape == (7, *p.shape)
        assert np.all(np.isfinite(np.asarray(end[k], np.float32)))


def test_weight_decay_is_decoupled():
    four = privacy_four(noise_multiplier=0.0, l2_clip_norm=jnp.inf)
    plain, decayed = dp_adam_bc(0.1, **four), dp_adam_bc(0.1, weight_decay=0.5, **four)
    w = jnp.array([2.0, -4.0])
    g = jnp.ones((4, 2))
    a, _ = plain.update(g, plain.init(w), w)
    b, _ = decayed.update(g, decayed.init(w), w)
    np.testing.assert_allclose(b - a, -0.1 * 0.5 * w, rtol=1e-6)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [scale_by_adam_bc, scale_by_rms_bc, scale_by_adagrad_bc])
@pytest.mark.parametrize(
    "options, named",
    [
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": -1e-8}, "gamma"),
        ({"eps": -1.0}, "eps"),
        ({"noise_stddev": -1.0}, "noise_stddev"),
        ({"noise_stddev": float("nan")}, "noise_stddev"),
        ({"noise_stddev": {"w": jnp.array([1.0, -1.0])}}, r"noise_stddev\['w'\]"),
        ({"noise_stddev": {}}, "noise_stddev"),
    ],
)
def test_bad_arguments_are_named(make, options, named):
    with pytest.raises(ValueError, match=named):
        make(**options)


@pytest.mark.parametrize("options", [{"b1": 1.0}, {"b2": -0.5}, {"weight_decay": -1.0}, {"gamma": 0.0}])
def test_bad_arguments_of_the_optimizer(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        dp_adam_bc(0.1, **options, **privacy_four())


def test_noise_of_the_wrong_tree():
    rule = scale_by_adam_bc(noise_stddev={"w": 1.0})
    with pytest.raises(ValueError, match="noise_stddev"):
        rule.update({"v": jnp.ones(2)}, rule.init({"v": jnp.ones(2)}))


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999, 0.99999])
def test_bias_correction_keeps_its_digits_in_float32(decay):
    for t in (1, 2, 10, 1_000, 100_000):
        found = one_minus_power(decay, jnp.asarray(t, jnp.int32), jnp.float32)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, 1 - decay**t, rtol=1e-6)
    traced = jax.jit(lambda b: one_minus_power(b, jnp.asarray(3), jnp.float32))(0.5)  # under inject_hyperparams
    np.testing.assert_allclose(traced, 1 - 0.5**3, rtol=1e-6)
