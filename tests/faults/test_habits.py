"""Habits from training without privacy that change what a run costs or computes: each is refused, or warned of."""

import inspect
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import DATA, loss_fn, tiny_plan

import dpopt
from dpopt.run import entropy
from dpopt.run.loading import Steps

PRIVACY = dict(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=8, key=jax.random.key(0))


def sampler():
    return dpopt.PoissonSampler(64, 8, seed=0, pad_to=32)


def test_a_second_epoch_is_warned_of():
    steps, batches = Steps(sampler(), 0, 3, DATA), sampler()
    for loop in (steps, batches):
        assert len(list(itertools.islice(loop, 3))) == 3
        with pytest.warns(UserWarning, match="iterated over before"):
            iter(loop)
    indices = Steps(sampler(), 0, 3)  # what a loader is given may be asked for its numbers again
    assert len([*indices, *indices]) == 6


@pytest.mark.parametrize("steps, warned", [(3, False), (2, True), (4, True)])
def test_steps_that_are_not_those_drawn(steps, warned):
    batches, optimizer = sampler(), dpopt.dp_sgd(0.1, **PRIVACY)
    list(itertools.islice(batches, 3))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dpopt.privacy_event(optimizer, sampling=batches, steps=steps)
    assert bool(said) is warned


def test_a_batch_size_that_is_not_the_samplers():
    optimizer = dpopt.dp_adam(0.1, **{**PRIVACY, "expected_batch_size": 4})
    with pytest.warns(UserWarning, match=r"batches of 8: every step is 2 times the mean"):
        dpopt.privacy_event(optimizer, sampling=sampler(), steps=1)
    dpopt.privacy_event(optimizer, sampling=sampler().scheme, steps=1)


def test_a_new_state_for_an_optimizer_that_was_used():
    optimizer, params = dpopt.dp_sgd(0.1, **PRIVACY), jnp.zeros(3)
    for _ in range(2):
        optimizer.init(params)
    grads = dpopt.per_example_grads(loss_fn)(params, DATA[:4], mask=None)
    optimizer.update(grads, optimizer.init(params), params)
    with pytest.warns(UserWarning, match="draws the noise of its first steps again"):
        optimizer.init(params)


def test_a_plan_that_runs_again_needs_no_warning():
    plan = tiny_plan(steps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.run(loss_fn, jnp.zeros(3), DATA, steps=2)
        plan.run(loss_fn, jnp.zeros(3), DATA, steps=2)
        with pytest.raises(dpopt.BudgetExceeded, match="make another plan"):
            plan.run(loss_fn, jnp.zeros(3), DATA)


LOST = {
    "other parameters": lambda w, x: jnp.sum((jnp.zeros(3) - x) ** 2),
    "a count": lambda w, x: jnp.sum((w > x).astype(jnp.float32)),
    "the largest": lambda w, x: (jnp.argmax(w) == jnp.argmax(x)).astype(jnp.float32),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LOST)
def test_a_run_that_can_learn_nothing_is_warned_of(name):
    with pytest.warns(UserWarning, match="depends neither on the example nor on the parameters"):
        tiny_plan(steps=1).run(LOST[name], jnp.zeros(3), DATA)


def test_a_folder_that_another_loss_began_says_so(tmp_path, caplog):
    pytest.importorskip("orbax.checkpoint")
    from dpopt.run.checkpoint import Checkpointer

    for loss, said in ((loss_fn, False), (loss_fn, False), (lambda w, x: 2 * loss_fn(w, x), True)):
        caplog.clear()
        entropy._runs.clear()
        with Checkpointer(tmp_path, every=1, asynchronous=False) as checkpointer:
            tiny_plan(steps=2).run(loss, jnp.zeros(3), DATA, checkpointer=checkpointer)
        assert ("continues with another program than its 2 steps" in caplog.text) is said


OPTIONS = {
    "checkpointer": ("folder", TypeError, "must be a dpopt.run.checkpoint.Checkpointer"),
    "budget": (3.0, TypeError, r"must be a dpopt.Budget\(epsilon, delta\)"),
    "extra": ({}, TypeError, "must be a function"),
    "place_batch": (1, TypeError, "must be a function"),
    "replay": ("no", TypeError, "must be True or False"),
    "verify": (1, TypeError, "must be True or False"),
    "example_key": (jax.random.key(0), ValueError, "is the key of the noise"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_run_that_are_none(name):
    value, error, message = OPTIONS[name]
    plan = tiny_plan(steps=2)
    with pytest.raises(error, match=message):
        plan.run(loss_fn, jnp.zeros(3), DATA, **{name: value})
    assert plan.journal.ledger.steps == 0


@pytest.mark.parametrize("data", [np.array(["a"] * 64), np.array([{}] * 64)], ids=["text", "objects"])
def test_data_that_are_no_numbers(data):
    with pytest.raises(TypeError, match="turn text and objects into numbers"):
        tiny_plan(steps=2).run(loss_fn, jnp.zeros(3), data)


OPTIMIZERS = {
    name: getattr(place, name)
    for place, names in (
        (dpopt, "dp_sgd dp_adam dp_adamw dp_rmsprop dp_adagrad dp_yogi adadps dp2 dp_adam_bc dp_micro_adam"),
        (dpopt, "scale_then_privatize"),
        (dpopt.baselines, "dp_adam_pub dp_r_pub pda_dpmd dp2_noise_first dp2_extra_query"),
    )
    for name in names.split()
}
MORE = {
    "dp2": dict(adaptive_learning_rate=0.1, adaptive_l2_clip_norm=1.0, delay=3),
    "pda_dpmd": dict(total_steps=3),
    "dp2_noise_first": dict(adaptive_learning_rate=0.1, delay=3),
    "dp2_extra_query": dict(adaptive_l2_clip_norm=1.0, delay=3),
}
WRONG = [None, "0.1", [0.1], float("nan"), float("inf"), -0.1, True, np.ones(2)]
CHECKED = {
    "learning_rate": WRONG, "adaptive_learning_rate": WRONG, "momentum": [*WRONG[1:], 1.0], "b1": [*WRONG, 1.0],
    "b2": [*WRONG, 1.0], "b3": [*WRONG, 1.0], "decay": [*WRONG, 1.0], "eps": WRONG, "weight_decay": WRONG,
    "initial_accumulator_value": WRONG, "nesterov": ["no", 1, None],
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrong_hyperparameters_are_named(name):
    """Every one of them in every optimizer, with everything that is no such number."""
    make, more = OPTIMIZERS[name], MORE.get(name, {})
    make(0.1, **PRIVACY, **more)
    for argument in CHECKED.keys() & inspect.signature(make).parameters.keys():
        for value in CHECKED[argument]:
            if argument == "adaptive_learning_rate" and value is None and name == "dp2_extra_query":
                continue
            given = {"learning_rate": 0.1, **PRIVACY, **more, argument: value}
            with pytest.raises((TypeError, ValueError), match=argument):
                make(**given)
