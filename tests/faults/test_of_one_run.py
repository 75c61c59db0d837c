"""A key and a sampler stand for one run, a search for all that its trials cost: what takes them for less is found."""

import warnings

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import DATA, loss_fn, run, tiny_plan

import dpopt
from dpopt import correlated
from dpopt.noise import standard_normal_like
from dpopt.tuning import NumTrials, PublicScore, repeat_and_select

PRIVACY = dict(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=8)
BATCH = DATA[:8], np.ones(8, bool)
MEMBERS = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)), jnp.float32)
NOISES = {"independent": None, "correlated": correlated.banded(2, steps=4)}


def _step(key, noise):
    optimizer = dpopt.dp_sgd(0.1, **PRIVACY, key=key, **({} if noise is None else {"noise": noise}))
    return optimizer, dpopt.make_train_step(loss_fn, optimizer)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("jit", ["nowhere", "outside", "within"])
@pytest.mark.parametrize("noise", NOISES)
def test_members_of_an_ensemble_do_not_share_noise(noise, jit):
    optimizer, step = _step(jax.random.key(0), NOISES[noise])
    within, outside = (jax.jit if jit == here else lambda f: f for here in ("within", "outside"))
    with pytest.raises(ValueError, match="all runs would draw the same noise"):
        outside(jax.vmap(within(optimizer.init)))(MEMBERS)
    with pytest.raises(ValueError, match="all runs would draw the same noise"):
        outside(jax.vmap(within(step), (0, None, None, None)))(MEMBERS, optimizer.init(MEMBERS[0]), *BATCH)


def test_the_draw_itself_sees_several_runs():
    key = jax.random.key(0)
    for tree in (MEMBERS, {"fixed": 1.0, "w": MEMBERS}):
        axes = {"fixed": None, "w": 0} if isinstance(tree, dict) else 0
        with pytest.raises(ValueError, match="all runs would draw the same noise"):
            jax.vmap(lambda x: standard_normal_like(key, x), (axes,))(tree)
    two = jnp.stack([MEMBERS, MEMBERS])  # an inner vmap over keys does not hide an outer one without
    with pytest.raises(ValueError, match="all runs would draw the same noise"):
        jax.vmap(lambda x: jax.vmap(standard_normal_like)(jax.random.split(key, 3), x))(two)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
def test_members_with_keys_of_their_own_train_together(noise):
    keys = jax.random.split(jax.random.key(0), 3)

    def trained(key, w):
        optimizer, step = _step(key, NOISES[noise])
        return step(w, optimizer.init(w), *BATCH)[0]

    together = jax.jit(jax.vmap(trained))(keys, MEMBERS)
    alone = [trained(k, w) for k, w in zip(keys, MEMBERS, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-5)


def _trained_on(sampler, optimizer, steps=3):
    step, w, state = dpopt.make_train_step(loss_fn, optimizer), jnp.zeros(3), optimizer.init(jnp.zeros(3))
    for t in range(steps):
        indices, mask = sampler.batch(t)
        w, state, _ = step(w, state, DATA[indices], mask)
    return dpopt.privacy_event(optimizer, sampling=sampler, steps=steps)


@pytest.mark.slow
def test_a_sampler_that_feeds_a_second_run_is_warned_of():
    """Two queries of one sample cost more than their epsilons added up."""
    sampler = dpopt.PoissonSampler(64, 8, seed=0, pad_to=32)
    first, second = (dpopt.dp_sgd(0.1, **PRIVACY, key=jax.random.key(n)) for n in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dpopt.privacy_event(second, sampling=sampler, steps=3)  # of a plan
        _trained_on(sampler, first)
        dpopt.privacy_event(first, sampling=sampler, steps=3)
    with pytest.warns(UserWarning, match="have been accounted for with another optimizer"):
        _trained_on(sampler.reseeded(0), second)


def _search(trial, event, **options):
    score = PublicScore(lambda w: 0.0, data="none")
    key = jax.random.key(1)
    found = NumTrials(mean=2)
    return repeat_and_select(
        trial, [0.1], event=event, score=score, num_trials=found, key=key, num_examples=64, **options
    )


@pytest.mark.slow
def test_a_search_covers_what_its_trials_start_from():
    first = run(tiny_plan(steps=4, noise=3.0))

    def plan(rate):
        builder = dpopt.Builder(num_examples=64, expected_batch_size=8, steps=2, key=jax.random.key(2), pad_to=32)
        budget = builder.clip(1.0).budget(epsilon=20.0, delta=1e-3, accountant="rdp", earlier=first)
        return budget.then(optax.sgd(rate)).build()

    def trial(rate, key):
        return run(plan(rate), params=first.params, progress=False)

    event = plan(0.1).event
    with pytest.raises(ValueError, match="Pass the same earlier to repeat_and_select"):
        _search(trial, event)
    found = _search(trial, event, earlier=first)
    whole = dp_accounting.ComposedDpEvent([first.ledger.event, found.ledger.event])
    epsilon = dpopt.epsilon_of_event(whole, delta=1e-3, accountant="rdp")
    assert found.epsilon(delta=1e-3) == found.statement(delta=1e-3).epsilon == pytest.approx(epsilon, rel=1e-9)
    following = dpopt.Builder(num_examples=64, expected_batch_size=8, steps=1, key=jax.random.key(3)).clip(1.0)
    with pytest.raises(ValueError, match="is spent already"):
        following.budget(epsilon=0.9 * epsilon, delta=1e-3, accountant="rdp", earlier=found)
    with pytest.raises(ValueError, match="records are examples, and these are clients"):
        _search(trial, event, earlier=first, unit="client")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "transform", [jax.grad, lambda f: jax.jit(jax.grad(f)), jax.jacfwd], ids=["grad", "jit", "jvp"]
)
@pytest.mark.parametrize("noise", NOISES)
def test_a_derivative_through_an_update_is_refused(noise, transform):
    """It holds no noise: a hypergradient, or a learning rate that is learned, was computed from the examples as is."""
    optimizer, step = _step(jax.random.key(0), NOISES[noise])

    def trained(params):
        return jnp.sum(step(params, optimizer.init(params), *BATCH)[0])

    with pytest.raises(ValueError, match="would contain no noise"):
        transform(trained)(MEMBERS[0])


def test_what_follows_from_an_update_has_a_derivative():
    def scaled(learning_rate, params):
        optimizer = dpopt.dp_sgd(1.0, **PRIVACY, key=jax.random.key(0))
        stopped = jax.lax.stop_gradient(params)
        gradients = dpopt.per_example_grads(loss_fn)(stopped, BATCH[0], mask=BATCH[1])
        updates, _ = optimizer.update(gradients, optimizer.init(stopped), stopped)
        return jnp.sum((params + learning_rate * updates) ** 2)

    updated = lambda rate: jax.jit(jax.grad(scaled))(rate, MEMBERS[0])  # noqa: E731
    assert np.isfinite(updated(0.1)) and updated(0.1) != updated(0.2)
