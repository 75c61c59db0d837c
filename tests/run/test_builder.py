"""The builder makes the same run as the named optimizers, checks every call, and is consistent with its accounting."""

import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import paid, slow_unless

import dpopt

KEY = jax.random.key(3)
PARAMS = {"w": jnp.array([[0.3, -0.2], [0.1, 0.5], [0.0, 1.0]]), "b": jnp.zeros(2)}
BATCH = {"x": jax.random.normal(jax.random.key(1), (6, 3)), "y": jnp.arange(6) % 2}
FOUR = dict(l2_clip_norm=0.7, noise_multiplier=0.9, expected_batch_size=6, key=KEY)


def loss_fn(params, example):
    logits = jnp.tanh(example["x"] @ params["w"] + params["b"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])


def builder(**changes):
    settings = dict(num_examples=60, expected_batch_size=6, steps=20, key=KEY)
    return dpopt.Builder(**{**settings, **changes})


def trajectory(optimizer, steps=9, **extra):
    step = jax.jit(dpopt.make_train_step(loss_fn, optimizer, engine="vmap"))
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(steps):
        params, state, _ = step(params, state, BATCH, mask=None, **extra)
    return params


SIDE = {"w": jnp.array([[0.5], [1.0], [2.0]]), "b": 1.0}
LR = optax.scale_by_learning_rate(0.1)
PUBLIC = {"w": 0.1 * jnp.ones((3, 2)), "b": jnp.array([0.2, -0.1])}
PAIR = dict(adaptive_learning_rate=0.3, delay=2)

# name: the named optimizer, the diagonals before the clip, the rule after the noise
NAMED = {
    "dp_sgd": (dpopt.dp_sgd(0.1, momentum=0.9, **FOUR), (), (optax.sgd(0.1, momentum=0.9),)),
    "dp_adam": (dpopt.dp_adam(0.1, **FOUR), (), (optax.adam(0.1),)),
    "dp_adamw": (dpopt.dp_adamw(0.1, weight_decay=0.2, **FOUR), (), (optax.adamw(0.1, weight_decay=0.2),)),
    "dp_rmsprop": (dpopt.dp_rmsprop(0.1, **FOUR), (), (optax.rmsprop(0.1),)),
    "dp_adagrad": (dpopt.dp_adagrad(0.1, **FOUR), (), (optax.adagrad(0.1),)),
    "dp_yogi": (dpopt.dp_yogi(0.1, **FOUR), (), (optax.yogi(0.1),)),
    "adadps, fixed": (dpopt.adadps(0.1, scale=SIDE, **FOUR), (dpopt.side_information(SIDE),), (LR,)),
    "adadps, public": (dpopt.adadps(0.1, rule="adam", **FOUR), (dpopt.public_moments(rule="adam"),), (LR,)),
    "dp2": (
        dpopt.dp2(0.1, adaptive_l2_clip_norm=1.4, **PAIR, **FOUR),
        (dpopt.delayed_moments(2, adaptive_clip_ratio=1.4 / 0.7),),
        (dpopt.optimizers.dp2.scale_by_phase_learning_rate(0.1, 0.3, 2),),
    ),
    "dp2_noise_first": (
        dpopt.baselines.dp2_noise_first(0.1, eps=1e-3, **PAIR, **FOUR),
        (),
        (
            dpopt.baselines.precondition_after_noise(dpopt.delayed_moments(2, eps=1e-3)),
            dpopt.optimizers.dp2.scale_by_phase_learning_rate(0.1, 0.3, 2),
        ),
    ),
    "scale_then_privatize": (
        dpopt.scale_then_privatize(0.1, **FOUR),
        (dpopt.last_moments(b2=0.999, eps_scale=1e-2),),
        (optax.adamw(0.1, weight_decay=0.0),),
    ),
    "dp_adam_bc": (dpopt.dp_adam_bc(0.1, gamma=1e-6, **FOUR), (), (dpopt.scale_by_adam_bc(gamma=1e-6), LR)),
    "dp_micro_adam": (dpopt.dp_micro_adam(0.1, density=0.3, **FOUR), (), (dpopt.scale_by_micro_adam(density=0.3), LR)),
    "dp_r_pub": (
        dpopt.baselines.dp_r_pub(0.1, **FOUR),
        (),
        (dpopt.baselines.precondition_after_noise(dpopt.public_moments()), LR),
    ),
    "dp_adam_pub": (dpopt.baselines.dp_adam_pub(0.1, **FOUR), (), (dpopt.baselines.scale_by_public_adam(), LR)),
    "pda_dpmd": (
        dpopt.baselines.pda_dpmd(0.1, total_steps=20, **FOUR),
        (),
        (dpopt.baselines.blend_public_gradients(20), LR),
    ),
}
SIMILAR = ("dp_adamw", "dp_rmsprop", "dp_adagrad", "dp_yogi", "dp_r_pub", "dp_adam_pub")
ASKS_FOR_PUBLIC_GRADIENTS = ("adadps, public", "dp_r_pub", "dp_adam_pub", "pda_dpmd")


@pytest.mark.parametrize("name", slow_unless({*NAMED} - {*SIMILAR}, NAMED))
@pytest.mark.one_in(12)
def test_builder_gives_the_trajectory_of_the_named_optimizer(name):
    named, diagonals, rule = NAMED[name]
    b = builder()
    for diagonal in diagonals:
        b = b.precondition(diagonal)
    plan = b.clip(0.7).noise(0.9).then(*rule).build()
    extra = {"public_grads": PUBLIC} if name in ASKS_FOR_PUBLIC_GRADIENTS else {}
    jax.tree.map(np.testing.assert_array_equal, trajectory(plan.optimizer, **extra), trajectory(named, **extra))
    assert plan.optimizer.privacy == named.privacy


@pytest.mark.parametrize("name", dpopt.baselines.__all__)
def test_baselines_are_still_found_where_they_were(name):
    with pytest.warns(DeprecationWarning, match=f"dpopt.baselines.{name}"):
        assert getattr(dpopt, name) is getattr(dpopt.baselines, name)


@pytest.mark.slow
def test_a_plan_says_that_its_steps_differ():
    """It showed the first step's event as that of each, though most steps made two queries."""
    builder = dpopt.Builder(num_examples=1_000, expected_batch_size=50, steps=60, key=jax.random.key(0))
    mechanism = dpopt.baselines.extra_query(adaptive_l2_clip_norm=2.0, delay=7)
    extra = str(builder.mechanism(mechanism).clip(1.0).noise(2.5).then(optax.sgd(0.1)).build())
    schedule = str(builder.clip(1.0).noise(optax.linear_schedule(2.0, 1.0, 60)).then(optax.sgd(0.1)).build())
    same = str(builder.clip(1.0).noise(2.5).then(optax.sgd(0.1)).build())
    assert "up to 2, and not the same at every step" in extra
    assert [("the first: " in text) for text in (extra, schedule, same)] == [True, True, False]


def test_builder_covers_the_extra_query_with_its_budget():
    mechanism = dpopt.baselines.extra_query(adaptive_l2_clip_norm=2.0, delay=3)
    base = builder(num_examples=5_000, steps=300).mechanism(mechanism).clip(0.7)
    named = dpopt.baselines.dp2_extra_query(0.1, adaptive_l2_clip_norm=2.0, delay=3, **FOUR)
    plan = base.noise(0.9).then(LR).build()
    jax.tree.map(np.testing.assert_array_equal, trajectory(plan.optimizer), trajectory(named))
    assert plan.optimizer.privacy == named.privacy
    one = builder(num_examples=5_000, steps=300).clip(0.7)
    two, one = (b.budget(epsilon=2.0, delta=1e-5).then(LR).build() for b in (base, one))
    assert 1.98 < two.epsilon() <= 2.0
    assert two.noise_multiplier > 1.2 * one.noise_multiplier  # two queries on two of three steps need more noise


def test_budget_is_met_and_hardly_undercut():
    plan = builder(num_examples=5_000, steps=300).clip(1.0).budget(epsilon=2.0, delta=1e-5).then(optax.sgd(1.0)).build()
    assert 1.98 < plan.epsilon() <= 2.0
    assert plan.epsilon(0) == 0.0
    assert plan.epsilon(10) < plan.epsilon(100) < plan.epsilon(300) == plan.epsilon()
    direct = dpopt.epsilon(noise_multiplier=plan.noise_multiplier, sampling_prob=6 / 5_000, steps=300, delta=1e-5)
    assert plan.epsilon() == direct


def test_plan_accounts_for_the_noise_that_is_drawn(monkeypatch):
    drawn = []

    def ones(key, tree):
        drawn.append(key)
        return jax.tree.map(jnp.ones_like, tree)

    monkeypatch.setattr(dpopt.noise, "standard_normal_like", ones)
    plan = builder().clip(0.5).budget(epsilon=4.0, delta=1e-3).then(optax.sgd(1.0)).build()
    grads = dpopt.per_example_grads(lambda p, e: 0.0 * jnp.sum(p["b"]) * jnp.sum(e["x"]))(PARAMS, BATCH, mask=None)
    updates, _ = plan.optimizer.update(grads, plan.optimizer.init(PARAMS), PARAMS)
    (query,) = plan.optimizer.privacy.queries
    np.testing.assert_allclose(updates["b"], -query.noise_multiplier * 0.5 / 6, rtol=1e-6)
    assert len(drawn) == 1


def test_builder_is_immutable():
    base = builder().clip(1.0)
    private = base.noise(2.0)
    other = base.noise(3.0)
    assert private.then(optax.sgd(1.0)).build().noise_multiplier == 2.0
    assert other.then(optax.sgd(1.0)).build().noise_multiplier == 3.0
    with pytest.raises(ValueError, match="missing noise"):
        base.build()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: builder().build(), r"missing clip\(l2_clip_norm\); noise\(multiplier\) or budget.*; then"),
        (lambda: builder().noise(1.0), "must come after clip"),
        (lambda: builder().budget(epsilon=1.0, delta=1e-5), "must come after clip"),
        (lambda: builder().clip(1.0).precondition(dpopt.side_information(2.0)), "must come before clip"),
        (lambda: builder().clip(1.0).clip(1.0), "clips once"),
        (lambda: builder().clip(1.0).noise(1.0).noise(1.0), "a second time"),
        (lambda: builder().clip(1.0).noise(1.0).budget(epsilon=1.0, delta=1e-5), "a second time"),
        (lambda: builder().clip(1.0).then(optax.sgd(1.0)), "comes after the noise"),
        (lambda: builder().clip(1.0).noise(1.0).build(), r"missing then"),
        (lambda: builder().clip(1.0).noise(1.0).then(dpopt.clip_and_sum(1.0)), "only post-processing"),
        (lambda: builder().clip(math.inf).noise(1.0), "finite l2_clip_norm"),
        (lambda: builder().clip(-1.0), "l2_clip_norm must be non-negative; got -1"),
        (lambda: builder().clip(1.0).noise(-1.0), "noise_multiplier must be non-negative"),
        (lambda: builder().clip(1.0).budget(epsilon=0.0, delta=1e-5), "epsilon must be positive"),
        (lambda: builder().clip(1.0).budget(epsilon=1.0, delta=1.0), "delta must be below 1"),
        (lambda: builder().clip(1.0).budget(epsilon=1.0, delta=1e-5, accountant="moments"), "accountant must be one"),
        (lambda: builder(steps=0), "steps must be at least 1"),
        (lambda: builder(expected_batch_size=61), "exceeds num_examples"),
        (lambda: builder(sampling="shuffle"), "sampling must be one of"),
        (
            lambda: builder(sampling="fixed_size").clip(1.0).budget(epsilon=1.0, delta=1e-5),
            "accountant='rdp'",
        ),
    ],
)
def test_a_bad_call_is_refused_at_once(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_types_are_refused_at_once():
    with pytest.raises(TypeError, match="key must be a JAX PRNG key"):
        builder(key=0)
    with pytest.raises(TypeError, match="not a preconditioner"):
        builder().precondition(2.0)
    with pytest.raises(TypeError, match="not an Optax transformation"):
        builder().clip(1.0).noise(1.0).then(lambda g: g)


def test_plan_refuses_steps_it_does_not_cover():
    plan = builder().clip(1.0).noise(1.0).then(optax.sgd(1.0)).build()
    with pytest.raises(ValueError, match="covers 20 steps"):
        plan.epsilon(21, delta=1e-5)
    with pytest.raises(ValueError, match="no delta is set"):
        plan.epsilon()


def test_fixed_size_batches_are_accounted_for_under_replace_one():
    plan = builder(sampling="fixed_size").clip(1.0).noise(2.0).then(optax.sgd(1.0)).build()
    inner = plan.event.event
    assert isinstance(inner, dp_accounting.SampledWithoutReplacementDpEvent)
    assert inner.event.noise_multiplier == paid(1.0)  # replacing an example moves the sum twice as far as removing it
    assert plan.sampler.batch(0).mask.all()


def test_sampler_follows_the_key_and_differs_from_the_noise():
    def indices(key):
        plan = builder(key=key).clip(1.0).noise(1.0).then(optax.sgd(1.0)).build()
        return [plan.sampler.drawn(t).tolist() for t in range(20)]

    assert indices(KEY) == indices(KEY)
    assert indices(KEY) != indices(jax.random.key(4))


def test_summary_reads_as_the_plan():
    plan = (
        builder()
        .precondition(dpopt.side_information({"w": 2.0, "b": 1.0}))
        .clip(0.5)
        .budget(epsilon=3.0, delta=1e-4)
        .then(optax.adam(0.1))
        .build()
    )
    text = plan.summary(PARAMS)
    for expected in (
        "precondition(SideInformation) > clip_and_sum > add_gaussian_noise > normalize_by",
        "0.5 (L2, add or remove one example)",
        "Poisson(sampling_prob=0.1)",
        "GaussianDpEvent",
        "delta 0.0001",
        "bytes per parameter",
        f"20: {plan.epsilon():.3f}",
    ):
        assert expected in text
    assert "bound to the model's tree" in str(plan) or "bytes per parameter" in str(plan)


@pytest.mark.slow
def test_plan_trains_end_to_end():
    plan = builder(steps=5).clip(1.0).budget(epsilon=8.0, delta=1e-3).then(optax.sgd(0.1)).build()
    data = {"x": jax.random.normal(jax.random.key(0), (60, 3)), "y": jnp.arange(60) % 2}
    step = jax.jit(plan.train_step(loss_fn, microbatch_size=2))
    params, state = PARAMS, plan.optimizer.init(PARAMS)
    for t in range(plan.steps):
        batch = plan.sampler.batch(t)
        params, state, _ = step(params, state, jax.tree.map(lambda x, i=batch.indices: x[i], data), batch.mask)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "then, names",
    [
        (optax.adam(1e-3), "scale_by_adam > scale"),
        (optax.chain(optax.scale_by_rms(), optax.scale(-1.0)), "scale_by_rms > scale"),
        (optax.masked(optax.scale_by_adam(), True), "masked(scale_by_adam)"),
        (optax.inject_hyperparams(optax.sgd)(0.1), "inject_hyperparams(sgd)"),
        (optax.scale(0.5), "scale"),
        (optax.GradientTransformation(lambda p: (), lambda u, s, p=None: (u, s)), "<lambda>"),
    ],
)
def test_a_printed_plan_names_the_parts_of_optax(then, names):
    builder = dpopt.Builder(num_examples=100, expected_batch_size=10, steps=3, key=dpopt.secure_key())
    plan = builder.clip(1.0).noise(2.0).then(then).build()
    first = str(plan).splitlines()[0]
    assert first.split(maxsplit=1) == ["stages", f"clip_and_sum > add_gaussian_noise > normalize_by > {names}"]
    assert names in repr(plan.optimizer)
