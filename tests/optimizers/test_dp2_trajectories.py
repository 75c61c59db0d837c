"""DP2 and its ablations, step by step: the authors' runs, and a NumPy transcription of the equations."""

import math

import golden_runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_runs import MODELS, find_state, load, replay
from helpers import slow_unless

import dpopt
from dpopt.optimizers.baselines.noise_first import dp2_noise_first
from dpopt.optimizers.baselines.two_queries import TwoQueriesState, dp2_extra_query
from dpopt.optimizers.dp2 import dp2
from dpopt.preconditioners.delayed import DelayedMomentsState, delayed_moments

DP2_RUNS = [
    "dp2_adagrad_L_sigma0",
    "dp2_adagrad_S_sigma1",
    "dp2_rmsprop_L_sigma0",
    "dp2_rmsprop_L_sigma1",
    "dp2_rmsprop_matfac_sigma0",
    "dp2_rmsprop_matfac_sigma05",
]
EXTRA_QUERY_RUNS = [
    "dp2_adagrad_ablation1_L_sigma1",
    "dp2_rmsprop_ablation1_L_sigma0",
    "dp2_rmsprop_ablation1_L_sigma1",
]
NOISE_FIRST_RUNS = [
    "dp2_adagrad_ablation2_L_sigma1",
    "dp2_rmsprop_ablation2_L_sigma1",
    "dp2_rmsprop_ablation2_S_sigma0",
]
RUNS = DP2_RUNS + EXTRA_QUERY_RUNS + NOISE_FIRST_RUNS


def optimizer_of(run):
    m = run.meta
    kind = m["algorithm"]
    settings = dict(
        delay=m["interval"],
        l2_clip_norm=m["clip1"],
        noise_multiplier=m["sigma"],
        expected_batch_size=m["B"],
        key=jax.random.key(0),
        rule="rmsprop" if "rmsprop" in kind else "adagrad",
        decay=m["rmsprop_gamma"],
        eps=m["epsilon"],
        weight_decay=m["reg_lambda"],
    )
    if kind.endswith("ablation1"):
        return dp2_extra_query(m["lr"], adaptive_l2_clip_norm=m["clip2"], **settings)
    settings["adaptive_learning_rate"] = m["lr2"]
    if kind.endswith("noise_then_precond"):
        return dp2_noise_first(m["lr"], **settings)
    return dp2(m["lr"], adaptive_l2_clip_norm=m["clip2"], **settings)


def moments_in(state):
    return find_state(state, DelayedMomentsState, TwoQueriesState)


def check_golden(monkeypatch, name, dtype, rtol, **options):
    run = load(name)
    noise_names = ("z1", "z2") if "ablation1" in name else ("z",)
    params, states = replay(monkeypatch, run, optimizer_of(run), dtype, noise_names=noise_names, **options)
    assert golden_runs.error(run, "param", params) <= rtol
    moments = [moments_in(s) for s in states]
    assert golden_runs.error(run, "v", [m.v for m in moments]) <= rtol
    assert golden_runs.error(run, "G", [m.total for m in moments]) <= rtol


# The reference programs clip by C / (norm + 1e-15), which is C / norm at this tolerance.
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.one_in(12)
def test_golden_x64(monkeypatch, x64, name):
    check_golden(monkeypatch, name, jnp.float64, golden_runs.RTOL64)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", slow_unless(RUNS[::3], RUNS))
def test_golden_float32(monkeypatch, name):
    check_golden(monkeypatch, name, jnp.float32, golden_runs.RTOL32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp2_rmsprop_L_sigma1", "dp2_rmsprop_ablation1_L_sigma1"])
def test_golden_without_jit(monkeypatch, x64, name):
    check_golden(monkeypatch, name, jnp.float64, golden_runs.RTOL64, jit=lambda step: step)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", ["dp2_adagrad_S_sigma1", "dp2_rmsprop_ablation2_S_sigma0", "dp2_rmsprop_matfac_sigma05"]
)
def test_golden_end_to_end_from_the_data(monkeypatch, x64, name):
    check_golden(monkeypatch, name, jnp.float64, 1e-9, loss_fn=MODELS[load(name).meta["model"]])


# --- a transcription of the equations -----------------------------------------------------------------------------


def clipped_mean(grads, scale, clip_norm, sigma, z, batch_size):
    """The private mean of section 0 of the equations, example by example; one flat vector per example."""
    total = np.zeros_like(grads[0])
    for g in grads:
        g = scale * g
        total += g * min(1.0, clip_norm / max(np.linalg.norm(g), 1e-300))
    return (total + sigma * clip_norm * z) / batch_size


def next_v(rule, v, square, beta):
    if rule == "rmsprop":
        return beta * v + (1 - beta) * square
    if rule == "adagrad":
        return v + square
    return v + (1 - beta) * np.sign(square - v) * square


def transcribed(kind, grads, z, w, *, s1, s2, rule, c1, c2, sigma, batch_size, beta, eps, lr1, lr2, correct=False):
    v, total = np.zeros_like(w), np.zeros_like(w)
    path = []
    for t in range(len(grads)):
        if kind == "extra_query":
            g = clipped_mean(grads[t], 1.0, c1, sigma, z[t][0], batch_size)
            total = total + g
            rate = lr1
            if t % s1 == 0:
                v, total = next_v(rule, v, (total / (1 if t == 0 else s1)) ** 2, beta), np.zeros_like(w)
            else:
                g = clipped_mean(grads[t], 1 / (np.sqrt(v) + eps), c2, sigma, z[t][1], batch_size)
                rate = lr2
        elif t % (s1 + s2) < s1:
            g = clipped_mean(grads[t], 1.0, c1, sigma, z[t][0], batch_size)
            total, rate = total + g, lr1
        else:
            if t % (s1 + s2) == s1:
                square = (total / s1) ** 2
                if correct:
                    square = np.maximum(square - sigma**2 * c1**2 / (s1 * batch_size**2), 0)
                v, total = next_v(rule, v, square, beta), np.zeros_like(w)
            d = np.sqrt(v) + eps
            if kind == "dp2":
                g = clipped_mean(grads[t], 1 / d, c2, sigma, z[t][0], batch_size)
            else:
                g = clipped_mean(grads[t], 1.0, c1, sigma, z[t][0], batch_size) / d
            rate = lr2
        w = w - rate * g
        path.append(w)
    return np.array(path)


def random_problem(steps, batch_size=5, dim=6, seed=0):
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.uniform(-2, 1, size=dim)
    return rng.normal(size=(steps, batch_size, dim)) * size, rng.normal(size=(steps, 2, dim)), rng.normal(size=dim)


def ours(monkeypatch, optimizer, grads, z, w):
    queue = []
    monkeypatch.setattr(dpopt.noise, "standard_normal_like", lambda key, tree: {"w": jnp.asarray(queue.pop(0))})
    params = {"w": jnp.asarray(w)}
    state, path = optimizer.init(params), []

    @jax.jit
    def step(params, state, g, draws):
        queue[:] = list(draws)
        updates, state = optimizer.update({"w": g}, state, params)
        return optax.apply_updates(params, updates), state

    for g, draws in zip(grads, z, strict=True):
        params, state = step(params, state, g, draws)
        path.append(np.asarray(params["w"]))
    return np.array(path)


KINDS = [(kind, delay) for kind in ("dp2", "corrected", "noise_first") for delay in (3, (2, 4))] + [("extra_query", 3)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("kind", "delay", "rule"),
    [
        pytest.param(kind, delay, rule, marks=[pytest.mark.slow] * ((i + j) % 3 != 0))
        for i, (kind, delay) in enumerate(KINDS)
        for j, rule in enumerate(("rmsprop", "adagrad", "yogi"))
    ],
    ids=str,
)
def test_equals_its_equations_over_three_cycles(monkeypatch, x64, kind, rule, delay):
    s1, s2 = delay if isinstance(delay, tuple) else (delay, delay)
    grads, z, w = random_problem(3 * (s1 + s2) + 1)
    equations = dict(rule=rule, c1=1.3, c2=7.0, sigma=0.8, batch_size=4, beta=0.7, eps=1e-2, lr1=0.3, lr2=0.05)
    settings = dict(
        rule=rule, delay=delay, decay=0.7, eps=1e-2, adaptive_learning_rate=0.05, l2_clip_norm=1.3,
        noise_multiplier=0.8, expected_batch_size=4, key=jax.random.key(0),
    )  # fmt: skip
    if kind == "noise_first":
        optimizer = dp2_noise_first(0.3, **settings)
    elif kind == "extra_query":
        optimizer = dp2_extra_query(0.3, adaptive_l2_clip_norm=7.0, **settings)
    else:
        optimizer = dp2(0.3, adaptive_l2_clip_norm=7.0, correct_noise=kind == "corrected", **settings)
    name = {"corrected": "dp2"}.get(kind, kind)
    expected = transcribed(name, grads, z, w, s1=s1, s2=s2, correct=kind == "corrected", **equations)
    np.testing.assert_allclose(ours(monkeypatch, optimizer, grads, z, w), expected, rtol=1e-11, atol=1e-12)


def test_noise_correction_changes_the_moment_and_follows_a_noise_schedule(monkeypatch, x64):
    schedule = lambda step: 0.5 + 0.25 * step  # noqa: E731
    core = dpopt.privatize(
        l2_clip_norm=2.0, noise_multiplier=schedule, expected_batch_size=4, key=jax.random.key(0),
        preconditioner=delayed_moments(3, decay=0.0, eps=1.0, correct_noise=True),
    )  # fmt: skip
    w, update = {"w": np.full(2, 10.0)}, jax.jit(core.update)
    state, means = core.init(w), []
    for _ in range(3):
        mean, state = update({"w": np.ones((4, 2))}, state, w)
        means.append(np.asarray(mean["w"]))
    variance = sum((2.0 * schedule(t) / 4) ** 2 for t in range(3)) / 9
    expected = np.maximum(np.mean(means, axis=0) ** 2 - variance, 0)
    np.testing.assert_allclose(moments_in(state).v["w"], expected, rtol=1e-12)
    assert np.any(expected > 0)


def test_without_noise_and_clip_is_the_delayed_rmsprop_of_the_paper(x64):
    grads, _, w = random_problem(13)
    optimizer = dp2(
        0.3, adaptive_learning_rate=0.05, adaptive_l2_clip_norm=math.inf, delay=3, decay=0.7, eps=1e-2,
        l2_clip_norm=math.inf, noise_multiplier=0.0, expected_batch_size=5, key=jax.random.key(0),
    )  # fmt: skip
    v = total = np.zeros_like(w)
    expected, params = w, {"w": w}
    state = optimizer.init(params)

    @jax.jit
    def moved(grads, state, params):
        updates, state = optimizer.update({"w": grads}, state, params)
        return optax.apply_updates(params, updates), state

    for t, g in enumerate(grads.mean(axis=1)):
        if t % 6 < 3:
            total, step = total + g, 0.3 * g
        else:
            if t % 6 == 3:
                v, total = 0.7 * v + 0.3 * (total / 3) ** 2, np.zeros_like(w)
            step = 0.05 * g / (np.sqrt(v) + 1e-2)
        expected = expected - step
        params, state = moved(grads[t], state, params)
        np.testing.assert_allclose(params["w"], expected, rtol=1e-12)
