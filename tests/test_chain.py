import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical, assert_near, dot_loss, mlp_batch, mlp_loss, mlp_params, paid, privacy_four

import dpopt
from dpopt.chain import NoiseAware
from dpopt.preconditioners.base import Diagonal

KEY = jax.random.key(0)
CLIP = dpopt.clip_and_sum(2.0)
NOISE = dpopt.add_gaussian_noise(3.0, KEY)
MEAN = dpopt.normalize_by(4)
SCALE = dpopt.precondition_by_side_information(2.0)
SGD = optax.sgd(0.1)
ADAM = optax.adam(0.1)

SAME = {
    "by name": dpopt.dp_adam(0.1, **privacy_four(l2_clip_norm=2.0, noise_multiplier=1.5)),
    "by hand": dpopt.chain(CLIP, NOISE, MEAN, ADAM),
    "by privatize": dpopt.chain(dpopt.privatize(**privacy_four(l2_clip_norm=2.0, noise_multiplier=1.5)), ADAM),
    "by optax": optax.chain(CLIP, NOISE, MEAN, ADAM),
    "by optax around privatize": optax.chain(
        dpopt.privatize(**privacy_four(l2_clip_norm=2.0, noise_multiplier=1.5)), ADAM
    ),
    "by optax in optax": optax.chain(optax.chain(CLIP, NOISE), optax.chain(MEAN, ADAM)),
}


@pytest.mark.parametrize("way", SAME)
def test_the_same_privacy_however_it_is_built(way):
    params = mlp_params()
    by_name = dpopt.dp_adam(0.1, **privacy_four(l2_clip_norm=2.0, noise_multiplier=1.5)).privacy
    assert dpopt.privacy_of(SAME[way], params) == by_name
    assert dpopt.make_train_step(mlp_loss, SAME[way]).privacy == by_name
    scheme = dpopt.PoissonSampler(100, 4, seed=0).scheme  # of a future run: other tests have used these optimizers
    events = [dpopt.privacy_event(o, sampling=scheme, steps=7) for o in (SAME[way], SAME["by name"])]
    assert events[0] == events[1]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("way", SAME)
def test_the_same_steps_however_it_is_built(way):
    params, batch = mlp_params(), mlp_batch(4)

    def train(opt):
        step = dpopt.make_train_step(mlp_loss, opt, engine="vmap")
        p, state = params, opt.init(params)
        for _ in range(3):
            p, state, _ = step(p, state, batch, mask=None)
        return p

    assert_identical(train(SAME[way]), train(SAME["by hand"]))


BAD_ORDERS = {
    "noise before clip": ((NOISE, CLIP), r"stage 0 \(add_gaussian_noise\) comes before any clip_and_sum"),
    "two clips": ((CLIP, CLIP, NOISE), r"stage 1 \(clip_and_sum\) repeats stage 0"),
    "clip after noise": ((CLIP, NOISE, CLIP), r"stage 2 \(clip_and_sum\) repeats stage 0"),
    "two noises": ((CLIP, NOISE, MEAN, NOISE), r"stage 3 \(add_gaussian_noise\) repeats stage 1"),
    "two divisions": ((CLIP, NOISE, MEAN, MEAN), r"stage 3 \(normalize_by\) repeats stage 2"),
    "mean before noise": ((CLIP, MEAN, NOISE), r"stage 1 \(normalize_by\) comes before the noise"),
    "diagonal after clip": ((CLIP, SCALE, NOISE), r"stage 1 \(precondition\) comes after clip_and_sum \(stage 0\)"),
    "diagonal after noise": ((CLIP, NOISE, SCALE), r"stage 2 \(precondition\) comes after clip_and_sum"),
    "rule before clip": ((SGD, CLIP, NOISE), r"stage 0 \(.*\) comes before the noise"),
    "rule before noise": ((CLIP, SGD, NOISE), r"stage 1 \(.*\) comes before the noise"),
    "late division": ((CLIP, NOISE, SGD, MEAN), r"stage 3 \(normalize_by\) comes after post-processing \(stage 2\)"),
    "no clip": ((SCALE,), "the chain has no clip_and_sum"),
    "nothing": ((), "the chain has no clip_and_sum"),
    "no noise": ((CLIP,), "the chain has no add_gaussian_noise"),
    "no private part": ((SGD,), r"stage 0 \(.*\) comes before the noise"),
    "optimizer second": ((CLIP, NOISE, SAME["by name"]), r"stage 2 \(private optimizer\) adds a second clip"),
    "optimizer twice": ((SAME["by name"], SAME["by name"]), r"stage 1 \(private optimizer\) follows an optimizer"),
    "noise after optimizer": ((SAME["by name"], SGD, NOISE), r"stage 2 \(add_gaussian_noise\) follows an optimizer"),
}


@pytest.mark.parametrize("name", BAD_ORDERS)
def test_a_wrong_order_is_refused_with_its_position(name):
    stages, message = BAD_ORDERS[name]
    with pytest.raises(ValueError, match=message):
        dpopt.chain(*stages)


# optax.chain cannot be empty, and does not report a late division, which is post-processing.
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [n for n in BAD_ORDERS if n not in ("nothing", "late division")])
def test_a_wrong_order_under_optax_chain_is_refused_too(name):
    stages, _ = BAD_ORDERS[name]
    opt = optax.chain(*stages)
    with pytest.raises((ValueError, TypeError)):
        dpopt.privacy_of(opt)
    params = mlp_params()
    with pytest.raises((ValueError, TypeError)):
        dpopt.make_train_step(mlp_loss, opt)(params, opt.init(params), mlp_batch(4), mask=None)


@pytest.mark.parametrize(
    "between",
    [optax.scale(2.0), optax.clip_by_global_norm(1.0), optax.trace(0.9), optax.masked(optax.scale(2.0), True)],
)
def test_a_transformation_between_clip_and_noise_is_refused(between):
    """optax.chain hides it from accounting, but not from the arrays that get the noise."""
    opt = optax.chain(CLIP, between, NOISE, MEAN, SGD)
    params = mlp_params()
    with pytest.raises(ValueError, match="changes the clipped sum"):
        dpopt.privacy_of(opt, params)
    with pytest.raises(ValueError, match=r"train step is not private.*changes the clipped sum"):
        jax.jit(dpopt.make_train_step(mlp_loss, opt))(params, opt.init(params), mlp_batch(4), mask=None)


def test_what_is_no_transformation_is_refused_with_its_position():
    for thing in (0.1, "sgd", (1, 2), lambda u: u):
        with pytest.raises(TypeError, match="stage 1 is not an Optax transformation"):
            dpopt.chain(CLIP, thing)


def test_the_update_follows_its_formula():
    opt = dpopt.chain(SCALE, dpopt.clip_and_sum(1.0), dpopt.add_gaussian_noise(0.5, KEY), MEAN, optax.sgd(1.0))
    params, grads = jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.2]])
    updates, _ = opt.update(grads, opt.init(params), params)
    draw = dpopt.noise.standard_normal_like(jax.random.fold_in(KEY, 0), params)
    assert_near(updates, -(jnp.array([0.6, 0.8 + 0.4]) + 0.5 * draw) / 4)


def test_a_promise_and_stacked_gradients_give_the_same_update():
    opt, params, batch = SAME["by name"], mlp_params(), mlp_batch(4)
    promise = dpopt.per_example_grads(mlp_loss)(params, batch, mask=None)
    stacked = jax.vmap(jax.grad(mlp_loss), (None, 0))(params, batch)
    for grads in (stacked, jax.tree.map(np.asarray, stacked)):
        got, expected = (opt.update(g, opt.init(params), params)[0] for g in (grads, promise))
        assert_near(got, expected)


def test_a_promise_brings_its_parameters():
    opt = dpopt.dp_sgd(1.0, **privacy_four(noise_multiplier=0.0))
    promise = dpopt.per_example_grads(dot_loss)(jnp.zeros(2), jnp.array([[3.0, 4.0]]), mask=None)
    updates, _ = opt.update(promise, opt.init(jnp.zeros(2)))
    assert_near(updates, -np.array([0.6, 0.8]) / 4)


def remember_noise():
    """A stage after the noise that stores the standard deviation that it gets."""

    def update(updates, state, params=None, *, noise_stddev, **extra_args):
        return updates, jax.tree.map(jnp.asarray, noise_stddev)

    return NoiseAware(lambda params: jnp.zeros(()), update)


def test_a_noise_aware_stage_is_told_the_noise_of_the_mean():
    for core in ((CLIP, NOISE, MEAN), (dpopt.privatize(**privacy_four(l2_clip_norm=2.0, noise_multiplier=1.5)),)):
        opt = dpopt.chain(*core, remember_noise(), SGD)
        _, state = opt.update(jnp.ones((2, 3)), opt.init(jnp.zeros(3)), jnp.zeros(3))
        assert float(state[len(core)]) == 3.0 / 4


def test_a_noise_aware_stage_is_told_the_noise_of_the_sum_without_a_division():
    opt = dpopt.chain(CLIP, NOISE, remember_noise())
    _, state = opt.update(jnp.ones((2, 3)), opt.init(jnp.zeros(3)), jnp.zeros(3))
    assert float(state[2]) == 3.0


def test_a_noise_aware_stage_after_another_is_refused():
    for stages in ((CLIP, NOISE, MEAN, optax.scale(2.0), remember_noise()), (SAME["by name"], remember_noise())):
        with pytest.raises(ValueError, match="needs the noise in its input"):
            dpopt.chain(*stages)


def test_a_noise_aware_stage_hidden_after_a_scale_is_not_told_a_wrong_level():
    opt = dpopt.chain(CLIP, NOISE, MEAN, optax.chain(optax.scale(2.0), remember_noise()))
    with pytest.raises(TypeError, match="noise_stddev"):
        opt.update(jnp.ones((2, 3)), opt.init(jnp.zeros(3)), jnp.zeros(3))


class Learner:
    """A preconditioner that counts feedback, scales by 2 and undoes it after the noise."""

    needs_feedback = True

    def init(self, params):
        return jax.tree.map(jnp.zeros_like, params)

    def diagonal(self, state, params, **extra_args):
        return Diagonal(scale=2.0, release=0.5), state

    def observe(self, state, private_mean, *_):
        return jax.tree.map(jnp.add, state, private_mean)


def test_a_learning_preconditioner_sees_what_was_released_and_nothing_else():
    opt = dpopt.chain(
        dpopt.precondition(Learner()),
        dpopt.clip_and_sum(1.0),
        dpopt.add_gaussian_noise(3.0, KEY),
        MEAN,
        remember_noise(),
    )
    params, grads = jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.2]])
    updates, state = opt.update(grads, opt.init(params), params)
    draw = dpopt.noise.standard_normal_like(jax.random.fold_in(KEY, 0), params)
    assert_near(updates, (jnp.array([0.6, 0.8 + 0.4]) + 3.0 * draw) / 4 / 2)
    assert_identical(state[0], updates)
    np.testing.assert_allclose(state[4], 3.0 / 4 / 2)


def test_a_learning_preconditioner_refuses_optax_chain():
    opt = optax.chain(dpopt.precondition(Learner()), CLIP, NOISE, MEAN)
    with pytest.raises(ValueError, match=r"dpopt\.chain"):
        opt.update(jnp.ones((2, 3)), opt.init(jnp.zeros(3)), jnp.zeros(3))


def test_extra_arguments_reach_the_stages():
    seen = []

    def update(updates, state, params=None, **extra_args):
        seen.append(extra_args)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    opt = dpopt.chain(CLIP, NOISE, MEAN, optax.identity(), spy)
    opt.update(jnp.ones((2, 3)), opt.init(jnp.zeros(3)), jnp.zeros(3), public_value=1.0)
    assert seen == [{"public_value": 1.0}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier must be non-negative and finite; got -1.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier.*got nan"),
        ({"noise_multiplier": math.inf}, "noise_multiplier.*got inf"),
        ({"l2_clip_norm": -2.0}, "l2_clip_norm must be non-negative; got -2.0"),
        ({"l2_clip_norm": math.nan}, "l2_clip_norm.*got nan"),
        ({"l2_clip_norm": math.inf}, "needs a finite l2_clip_norm"),
        ({"expected_batch_size": 0}, "expected_batch_size must be positive and finite; got 0"),
        ({"expected_batch_size": -4}, "expected_batch_size.*got -4"),
        ({"expected_batch_size": math.inf}, "expected_batch_size.*got inf"),
    ],
)
@pytest.mark.parametrize("make", [lambda **k: dpopt.privatize(**k), lambda **k: dpopt.dp_adam(0.1, **k)])
def test_bad_privacy_settings_are_named(make, change, message):
    with pytest.raises(ValueError, match=message):
        make(**privacy_four(**change))


@pytest.mark.parametrize("missing", ["l2_clip_norm", "noise_multiplier", "expected_batch_size", "key"])
def test_what_moves_epsilon_has_no_default(missing):
    four = privacy_four()
    del four[missing]
    with pytest.raises(TypeError, match=missing):
        dpopt.privatize(**four)


def test_noise_is_calibrated_to_the_sensitivity_of_the_clip_function():
    clip = dpopt.GroupClip({"a": 3.0, "b": 4.0})
    opt = dpopt.privatize(**privacy_four(l2_clip_norm=clip, noise_multiplier=2.0))
    assert opt.stages[1].stage.noise_stddev == 10.0
    assert opt.privacy.step_event().noise_multiplier == paid(2.0)


def test_a_noise_schedule_is_drawn_and_accounted_alike():
    opt = dpopt.privatize(**privacy_four(l2_clip_norm=2.0, noise_multiplier=lambda step: jnp.where(step < 1, 1.0, 4.0)))
    assert [opt.privacy.step_event(t).noise_multiplier for t in (0, 1)] == [paid(1.0), paid(4.0)]
    state, params = opt.init(jnp.zeros(5000)), jnp.zeros(5000)
    for expected in (2.0 / 4, 8.0 / 4):
        mean, state = opt.update(jnp.zeros((1, 5000)), state, params)
        assert abs(float(mean.std()) / expected - 1) < 0.05  # five standard errors of a standard deviation


def test_a_chain_cannot_be_pickled_and_says_so():
    import pickle

    with pytest.raises(TypeError, match="save its state instead"):
        pickle.dumps(SAME["by name"])


def test_a_promise_at_other_parameters_than_the_state_is_still_one_step():
    """A promise has the loss, parameters and batch; `update` needs the parameters only for decay."""
    opt = dpopt.dp_sgd(1.0, **privacy_four(noise_multiplier=0.0))
    grads = dpopt.per_example_grads(dot_loss)(jnp.ones(2), jnp.array([[0.3, 0.4]]), mask=None)
    updates, _ = opt.update(grads, opt.init(jnp.zeros(2)), jnp.zeros(2))
    assert_near(updates, -np.array([0.3, 0.4]) / 4)


def normalize_by():
    """A function of another package with the same name."""

    def update(updates, state, params=None):
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def test_a_namesake_of_a_stage_is_no_stage():
    for stages in ((CLIP, normalize_by(), NOISE), (normalize_by(), CLIP, NOISE)):
        with pytest.raises(ValueError, match="another normalize_by"):
            dpopt.chain(*stages)


_NEEDED = {
    "constant_schedule": (1e-3,), "cosine_decay_schedule": (1e-3, 10), "cosine_onecycle_schedule": (10, 1e-3),
    "exponential_decay": (1e-3, 10, 0.9), "join_schedules": ([optax.constant_schedule(1e-3)] * 2, [5]),
    "linear_onecycle_schedule": (10, 1e-3), "linear_schedule": (1e-3, 0.0, 10),
    "piecewise_constant_schedule": (1e-3,), "piecewise_interpolate_schedule": ("linear", 1e-3),
    "polynomial_schedule": (1e-3, 0.0, 1.0, 10), "warmup_constant_schedule": (0.0, 1e-3, 5),
    "warmup_cosine_decay_schedule": (0.0, 1e-3, 5, 10), "warmup_exponential_decay_schedule": (0.0, 1e-3, 5, 10, 0.9),
}  # fmt: skip


@pytest.mark.parametrize("name", _NEEDED)
def test_every_schedule_of_optax_may_be_the_learning_rate(name):
    """`exponential_decay` leaves a variable that its function closes over unset, which made chains fail."""
    schedule = getattr(optax.schedules, name)(*_NEEDED[name])
    privacy = dict(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=jax.random.key(0))
    for optimizer in (dpopt.dp_sgd(schedule, **privacy), dpopt.dp_adam(schedule, **privacy)):
        assert dpopt.privacy_of(optimizer).queries
    assert dpopt.chain(dpopt.privatize(**privacy), optax.adamax(schedule)).init(jnp.zeros(2))
