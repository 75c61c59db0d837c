"""Real training is audited: sound runs stay below their claim, and mistakes that people make are caught.

What one run cannot show (two thirds of the noise, an example that is there twice) many small runs can.
"""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import ROOT, script

pytest.importorskip("scipy")

import dpopt
from dpopt import audit
from dpopt.audit import small_runs
from dpopt.sampling import Poisson

CANARIES, DELTA = 240, 1e-5


def mlp_loss(params, example):
    x, y = example
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["w2"], y)


def start(width=16):
    rng = np.random.default_rng(0)
    shapes = {"w1": (64, width), "b1": (width,), "w2": (width, 10)}
    return {name: jnp.asarray(0.1 * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def digits():
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    return (x / 16).astype(np.float32)[:900], y[:900]


def draws(change):
    draw = dpopt.noise.standard_normal_like
    return mock.patch.object(
        dpopt.noise, "standard_normal_like", lambda key, tree: jax.tree.map(change, draw(key, tree))
    )


def last_row_twice():
    """A loader that hands out the last row twice."""

    def make_train_step(*args, **options):
        step = dpopt.make_train_step(*args, **options)

        def twice(params, state, rows, mask):
            rows, mask = jax.tree.map(lambda x: jnp.concatenate([x, x[-1:]]), (rows, mask))
            return step(params, state, rows, mask)

        return twice

    return mock.patch.object(small_runs, "make_train_step", make_train_step)


MISTAKES = {
    "none": contextlib.nullcontext,
    "noise forgotten": lambda: draws(lambda z: 0 * z),
    "two thirds of the noise": lambda: draws(lambda z: 2 / 3 * z),
    "clip forgotten": lambda: mock.patch.object(
        dpopt.FlatClip, "coefficients", lambda self, norms: jax.tree.map(jnp.ones_like, norms)
    ),
    "canary twice": last_row_twice,
}


def audited_run(digits, mistake, epsilon=1.5):
    """A run on digits with canaries on the weights of pixels that are dark in most digits."""
    params = start()
    usage = audit.coordinate_usage(mlp_loss, params, jax.tree.map(lambda a: a[:100], digits))
    canaries = audit.gradient_canaries(params, CANARIES, length=100.0, seed=1, usage=usage)
    planted = audit.plant(canaries, mlp_loss, digits, 900, seed=2)
    builder = dpopt.Builder(
        num_examples=planted.num_examples, expected_batch_size=100, steps=40, key=jax.random.key(3), pad_to=160
    )
    builder = builder.clip(1.0).budget(epsilon=epsilon, delta=DELTA).then(optax.sgd(1.0))
    plan = planted.plan(builder.build())
    with MISTAKES[mistake]():
        result = plan.run(planted.loss_fn, params, planted.data, replay=True)
    return result, planted, planted.scores(params, result.params)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["none", "noise forgotten", "clip forgotten"])
def test_one_run_on_digits(mistake, digits):
    result, planted, scores = audited_run(digits, mistake)
    report = audit.report(result, audit.one_run_bound(scores, planted.included, delta=DELTA))
    assert report.claim.epsilon == pytest.approx(1.5, abs=0.02)
    assert report.exceeds_claim == (mistake != "none"), str(report)
    if mistake == "none":  # and what the run is for still works
        logits = jnp.tanh(digits[0] @ result.params["w1"] + result.params["b1"][None]) @ result.params["w2"]
        assert jnp.mean(jnp.argmax(logits, axis=1) == digits[1]) > 0.5


@pytest.mark.slow
def test_one_run_shows_a_good_part_of_a_large_epsilon(digits):
    result, planted, scores = audited_run(digits, "none", epsilon=20.0)
    bound = audit.one_run_bound(scores, planted.included, delta=DELTA, guesses=[(20, 0)])
    assert 1 < bound.epsilon < result.epsilon(delta=DELTA)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["none", "noise forgotten"])
def test_examples_that_are_learnt_by_heart(mistake, digits):
    """Wrong labels on digits that nobody else has, under an accountant that believes in the noise."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    held_out = ((x / 16).astype(np.float32)[900:1140], y[900:1140])
    params = start(width=64)
    canaries = audit.relabelled(held_out, 1, num_classes=10, seed=0)
    few = jax.tree.map(lambda a: a[:60], digits)
    planted = audit.plant(canaries, mlp_loss, few, 60, seed=2)
    builder = dpopt.Builder(num_examples=300, expected_batch_size=100, steps=400, key=jax.random.key(3), pad_to=160)
    plan = planted.plan(builder.clip(1.0).noise(24.0).then(optax.sgd(4.0)).build())
    with MISTAKES[mistake]():
        result = plan.run(planted.loss_fn, params, planted.data, replay=True)
    bound = audit.one_run_bound(planted.scores(params, result.params), planted.included, delta=DELTA)
    claimed = result.epsilon(delta=DELTA)
    assert bound.epsilon <= claimed if mistake == "none" else bound.epsilon > claimed, (bound, claimed)


def small(mistake, sampling_prob, steps):
    """A run for `audit.repeat` of a small network on a few rows, one of them the canary."""
    params = {"w1": jnp.full((4, 3), 0.1), "w2": jnp.full(3, 0.2)}

    def loss_fn(p, example):
        return (jnp.tanh(example[:4] @ p["w1"]) @ p["w2"] - example[4]) ** 2

    data = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    canaries = audit.gradient_canaries(params, 1, length=100.0, seed=0, kind="random")
    planted = audit.plant(canaries, loss_fn, data, 6, seed=0)
    rows = planted.data(np.arange(planted.num_examples))

    def optimizer(key):
        sigma = np.sqrt(steps) if sampling_prob == 1 else 0.8
        return dpopt.dp_sgd(0.01, l2_clip_norm=1.0, noise_multiplier=sigma, expected_batch_size=1, key=key)

    train = audit.small_run(planted.loss_fn, optimizer, params, rows, sampling_prob=sampling_prob, steps=steps)
    event = dpopt.privacy_event(optimizer(jax.random.key(0)), sampling=Poisson(sampling_prob), steps=steps)
    return event, lambda is_in, key: planted.scores(params, train(is_in, key))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    MISTAKES,
)
def test_many_small_runs(mistake):
    with MISTAKES[mistake]():
        claim, run = small(mistake, sampling_prob=1.0, steps=4)
        scores, included = audit.repeat(run, 4_000, key=jax.random.key(1), at_once=1_000)
    bound = audit.many_runs_bound(scores, included, delta=DELTA, significance=0.01, claim=claim)
    estimate = audit.gaussian_estimate(scores, included, delta=DELTA, resamples=50)
    report = audit.report(claim, bound, estimate)
    assert report.exceeds_claim == (mistake != "none"), str(report)
    truth = {"none": 1.0, "two thirds of the noise": 1.5, "canary twice": 2.0}.get(mistake)
    if truth is not None:
        assert estimate.mu == pytest.approx(truth, abs=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["none", "two thirds of the noise"])
def test_many_small_runs_on_samples(mistake):
    with MISTAKES[mistake]():
        claim, run = small(mistake, sampling_prob=0.3, steps=20)
        scores, included = audit.repeat(run, 20_000, key=jax.random.key(1), at_once=2_000)
    bound = audit.many_runs_bound(scores, included, delta=DELTA, significance=0.01, claim=claim)
    report = audit.report(claim, bound)
    assert report.exceeds_claim == (mistake != "none"), str(report)


@pytest.mark.slow
def test_eight_devices_and_a_run_that_is_resumed_give_the_same_scores(tmp_path):
    """Coins come from the seed that the audit keeps, so a process that goes on plants the same canaries."""
    program = ROOT / "tests" / "programs" / "audited_run.py"
    whole = script(program, tmp_path / "whole", 8)
    script(program, tmp_path / "parts", 3)
    resumed = script(program, tmp_path / "parts", 8)
    assert resumed == whole and whole["steps"] == 8
    sharded = script(program, tmp_path / "sharded", 8, devices=8)
    assert sharded["included"] == whole["included"]
    np.testing.assert_allclose(sharded["scores"], whole["scores"], atol=1e-3)
    scores, included = np.array(whole["scores"]), np.array(whole["included"])
    assert scores[included].mean() > scores[~included].mean()
