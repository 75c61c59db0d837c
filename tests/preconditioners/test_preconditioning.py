"""The protocol of diagonals: composition with each other, with the clip, and with ``optax.chain``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_runs import tiny_batch, tiny_loss, tiny_params
from helpers import assert_near, paid, privacy_four

import dpopt
from dpopt.optimizers.baselines.after_noise import precondition_after_noise
from dpopt.preconditioners.base import Diagonal, precondition, scheduled_clip_norm, side_information
from dpopt.preconditioners.delayed import delayed_moments
from dpopt.preconditioners.moments import last_moments, next_second_moment, public_moments

GRADS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)) * 3, jnp.float32)


def mean_of(*preconditioners, steps=1, grads=GRADS, **four):
    core = dpopt.privatize(**privacy_four(**{"noise_multiplier": 0.0, **four}), preconditioner=preconditioners)
    params, means = jnp.zeros(grads.shape[1]), []
    state = core.init(params)
    for _ in range(steps):
        mean, state = core.update(grads, state, params, public_grads=jnp.array([1.0, 2.0, 3.0]))
        means.append(mean)
    return np.array(means)


# --- a scheduled clip norm ----------------------------------------------------------------------------------------


def test_scheduled_clip_norm_clips_at_the_schedule(x64):
    schedule = optax.linear_schedule(1.0, 0.25, 3)
    means = mean_of(scheduled_clip_norm(schedule), steps=5)
    for t, mean in enumerate(means):
        expected = mean_of(l2_clip_norm=float(schedule(t)))[0]
        np.testing.assert_allclose(mean, expected, rtol=1e-6)
    assert not np.allclose(means[0], means[1])


def test_scheduled_clip_norm_moves_the_noise_and_not_the_event():
    core = dpopt.privatize(
        **privacy_four(noise_multiplier=2.0), preconditioner=scheduled_clip_norm(lambda t: 1 + 2 * t)
    )
    assert core.privacy.step_event(7) == dpopt.privacy.dp_accounting.GaussianDpEvent(paid(2.0))
    params = jnp.zeros(40_000)
    state = core.init(params)
    for t in range(3):
        mean, state = core.update(jnp.zeros((4, 40_000)), state, params)
        np.testing.assert_allclose(jnp.std(mean), 2.0 * (1 + 2 * t) / 4, rtol=0.02)


def test_scheduled_clip_norm_jits_and_scans():
    opt = dpopt.chain(
        dpopt.privatize(**privacy_four(), preconditioner=scheduled_clip_norm(optax.linear_schedule(1.0, 0.1, 5))),
        optax.sgd(0.1),
    )
    step, params = dpopt.make_train_step(tiny_loss, opt), tiny_params()
    carry, _ = jax.lax.scan(
        lambda c, _: (step(*c, tiny_batch(), mask=None)[:2], None), (params, opt.init(params)), length=6
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(carry[0]))


@pytest.mark.parametrize(
    ("schedule", "error"), [(2.0, TypeError), (lambda t: 0.0, ValueError), (lambda t: -1.0, ValueError)]
)
def test_scheduled_clip_norm_refuses(schedule, error):
    with pytest.raises(error, match="relative_norm"):
        scheduled_clip_norm(schedule)


# --- several diagonals --------------------------------------------------------------------------------------------


def test_diagonals_multiply():
    both = mean_of(side_information(jnp.array([1.0, 2.0, 0.5])), side_information(3.0))
    np.testing.assert_allclose(both, mean_of(side_information(jnp.array([3.0, 6.0, 1.5]))), rtol=1e-6)


def test_a_schedule_after_an_affine_diagonal(x64):
    adam = lambda: public_moments(rule="adam", eps=0.1)  # noqa: E731
    mean = mean_of(adam(), scheduled_clip_norm(lambda t: 0.5))
    np.testing.assert_allclose(mean, mean_of(adam(), l2_clip_norm=0.5), rtol=1e-6)


def test_an_offset_after_a_diagonal_that_is_undone_is_refused():
    with pytest.raises(ValueError, match=r"stage 1 \(precondition\) adds an offset.*put the one that is undone last"):
        mean_of(scheduled_clip_norm(lambda t: 0.5), public_moments(rule="adam"))


def test_every_diagonal_learns_from_the_private_mean_and_never_from_gradients():
    heard = []

    class Listener:
        needs_feedback = True

        def init(self, params):
            return jnp.zeros([])

        def diagonal(self, state, params, **extra):
            return Diagonal(scale=2.0, release=0.5), state

        def observe(self, state, private_mean, noise_stddev):
            heard.append((private_mean, noise_stddev))
            return state + 1

    mean = mean_of(Listener(), noise_multiplier=3.0)
    np.testing.assert_array_equal(heard[0][0], mean[0])
    np.testing.assert_allclose(jax.tree.leaves(heard[0][1]), 3.0 / 4 / 2)


# --- the protocol and Optax's chain -------------------------------------------------------------------------------


def by_hand(preconditioner, noise_stddev=1.0):
    return optax.chain(
        precondition(preconditioner),
        dpopt.clip_and_sum(1.0),
        dpopt.add_gaussian_noise(noise_stddev, jax.random.key(0)),
        dpopt.normalize_by(4),
    )


def test_public_moments_work_in_optax_chain_and_are_accounted_for():
    hand = by_hand(public_moments(rule="adam"))
    four = privacy_four()
    ours = dpopt.privatize(**four, preconditioner=public_moments(rule="adam"))
    params, public = jnp.zeros(3), jnp.array([1.0, 2.0, 3.0])
    a, _ = hand.update(GRADS, hand.init(params), params, public_grads=public)
    b, _ = ours.update(GRADS, ours.init(params), params, public_grads=public)
    assert_near(a, b)
    assert dpopt.privacy_of(hand).step_event() == ours.privacy.step_event()


@pytest.mark.parametrize("moments", [delayed_moments(2), last_moments(), scheduled_clip_norm(lambda t: 1.0)])
def test_diagonals_that_need_the_release_are_refused_in_optax_chain(moments):
    hand = by_hand(moments)
    with pytest.raises(ValueError, match=r"Build the optimizer with dpopt.chain"):
        hand.update(GRADS, hand.init(jnp.zeros(3)), jnp.zeros(3))


@pytest.mark.parametrize("wrap", [precondition, precondition_after_noise])
def test_what_is_no_preconditioner_is_refused(wrap):
    with pytest.raises(TypeError, match="is not a preconditioner: it has no method 'init'"):
        wrap(lambda g: g)


def test_after_noise_applies_scale_and_offset():
    part = precondition_after_noise(public_moments(rule="adam", decay=0.5, eps=1.0, b1=0.5))
    u, _ = part.update(jnp.array([4.0]), part.init(jnp.zeros(1)), None, public_grads=jnp.array([2.0]))
    np.testing.assert_allclose(u, (0.5 * 4 + 0.5 * 1) / (np.sqrt(2) + 1), rtol=1e-6)


def test_after_noise_a_folded_clip_norm_has_no_effect():
    part = precondition_after_noise(delayed_moments(1, adaptive_clip_ratio=5.0, eps=1.0, decay=0.0))
    state = part.init(jnp.zeros(1))
    first, state = part.update(jnp.array([3.0]), state)
    second, _ = part.update(jnp.array([8.0]), state)
    np.testing.assert_allclose([first[0], second[0]], [3.0, 2.0], rtol=1e-6)


def test_second_moments_of_every_rule():
    v, x = jnp.array([1.0, 4.0]), jnp.array([2.0, 1.0])
    np.testing.assert_allclose(next_second_moment("rmsprop", v, x, 0.75), [1.25, 3.25])
    np.testing.assert_allclose(next_second_moment("adagrad", v, x, 0.75), [3.0, 5.0])
    np.testing.assert_allclose(next_second_moment("yogi", v, x, 0.75), [1.5, 3.75])


def test_side_information_accepts_a_prefix_and_casts_to_the_moments_dtype(x64):
    moments = side_information({"w": np.array([1.0, 2.0])})
    diagonal, _ = moments.diagonal(moments.init(None), {"w": jnp.zeros((3, 2), jnp.bfloat16)})
    assert diagonal.scale["w"].dtype == jnp.float32
