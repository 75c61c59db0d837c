import math

import dp_accounting as dp
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import mlp_batch, mlp_loss, mlp_params, paid, privacy_four

import dpopt
from dpopt.privacy import Privacy, Query, Relation

STATIC = ("l2_clip_norm", "noise_multiplier", "expected_batch_size", "key")


def test_the_event_of_a_step_is_a_gaussian_of_the_multiplier():
    opt = dpopt.dp_adam(0.1, **privacy_four(l2_clip_norm=0.3, noise_multiplier=1.7))
    assert opt.privacy.step_event().noise_multiplier == pytest.approx(paid(1.7), rel=1e-15)


def test_no_noise_is_not_private():
    for clip_norm in (1.0, math.inf):
        opt = dpopt.dp_adam(0.1, **privacy_four(l2_clip_norm=clip_norm, noise_multiplier=0.0))
        assert opt.privacy.step_event() == dp.NonPrivateDpEvent()


def test_replacing_a_record_moves_a_sum_twice_as_far():
    privacy = Privacy((Query(3.0),))
    assert privacy.step_event(relation=Relation.REPLACE_ONE).noise_multiplier == paid(1.5)


def test_a_query_counts_on_its_active_steps_only():
    privacy = Privacy((Query(1.0), Query(2.0, active=lambda t: t % 2 == 1)))
    assert privacy.step_event(0) == dp.GaussianDpEvent(paid(1.0))
    assert privacy.step_event(1) == dp.ComposedDpEvent([dp.GaussianDpEvent(paid(s)) for s in (1.0, 2.0)])
    assert privacy.varies and not Privacy((Query(1.0),)).varies


@pytest.mark.parametrize("wrap", [optax.with_extra_args_support, lambda o: optax.chain(o, optax.ema(0.9))])
def test_wrapping_does_not_change_the_privacy(wrap):
    opt = dpopt.dp_sgd(0.1, **privacy_four())
    assert dpopt.privacy_of(wrap(opt), mlp_params()) == opt.privacy


def test_inject_hyperparams_with_static_privacy_is_accounted():
    opt = optax.inject_hyperparams(dpopt.dp_sgd, static_args=STATIC)(0.1, **privacy_four(noise_multiplier=1.5))
    assert dpopt.privacy_of(opt).step_event().noise_multiplier == paid(1.5)


def test_inject_hyperparams_with_traced_privacy_says_what_to_do():
    opt = optax.inject_hyperparams(dpopt.dp_sgd)(0.1, **privacy_four(noise_multiplier=1.5))
    with pytest.raises(ValueError, match="static_args"):
        dpopt.privacy_of(opt).step_event()


@pytest.mark.parametrize("opt", [optax.sgd(0.1), optax.adam(0.1), optax.chain(optax.clip(1.0), optax.sgd(0.1))])
def test_an_optimizer_without_privacy_is_refused(opt):
    with pytest.raises((TypeError, ValueError), match=r"clip_and_sum|PerExampleGrads"):
        dpopt.privacy_of(opt)


def test_two_private_optimizers_in_one_are_refused():
    class Twice:
        """An optimizer that queries the same batch twice and reports one query."""

        def __init__(self):
            self.parts = [dpopt.privatize(**privacy_four(key=jax.random.key(i))) for i in range(2)]

        def init(self, params):
            return tuple(p.init(params) for p in self.parts)

        def update(self, grads, state, params=None, **extra_args):
            ran = [p.update(grads, s, params) for p, s in zip(self.parts, state, strict=True)]
            return jax.tree.map(jnp.add, ran[0][0], ran[1][0]), tuple(s for _, s in ran)

    twice = Twice()
    opt = optax.GradientTransformationExtraArgs(twice.init, twice.update)
    with pytest.raises(ValueError, match="more than once per step"):
        dpopt.privacy_of(opt)
    params = mlp_params()
    with pytest.raises(ValueError, match="more than once per step"):
        dpopt.make_train_step(mlp_loss, opt)(params, opt.init(params), mlp_batch(4), mask=None)


def test_asking_reads_no_data_and_keeps_no_state():
    opt = optax.chain(dpopt.clip_and_sum(2.0), dpopt.add_gaussian_noise(3.0, jax.random.key(0)))
    assert dpopt.privacy_of(opt, mlp_params()) == dpopt.privacy_of(opt, mlp_params())
    # Inside a jitted function as well: the result contains no tracers.
    assert jax.jit(lambda x: x + dpopt.privacy_of(opt).step_event().noise_multiplier)(0.0) == pytest.approx(paid(1.5))
