"""What stands before, between, after and around clip and noise: sound programs are taken, others refused with a reason.

Tests are named after the scripts that first showed a fault.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import paid, privacy_four

import dpopt
from dpopt.gradients import stacked_grads

KEY = jax.random.key(0)
FOUR = privacy_four()
PARAMS = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
LABELS = {"a": "x", "b": "y"}
STATIC = ("l2_clip_norm", "noise_multiplier", "expected_batch_size", "key")


def loss(w, e):
    return jnp.sum(w["a"]) * e[0] + jnp.sum(w["b"]) * e[1]


BATCH = jnp.array(np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32))


def opt():
    return dpopt.dp_sgd(0.1, **FOUR)


def by_hand(*between, before=(), after=()):
    noise = dpopt.add_gaussian_noise(1.0, KEY)
    return optax.chain(*before, dpopt.clip_and_sum(1.0), *between, noise, *after, optax.sgd(1.0))


def stage(change, init=lambda p: ()):
    """A foreign transformation: ``change(updates, params) -> updates``."""
    return optax.GradientTransformation(init, lambda u, s, p=None: (change(u, p), s))


def around(inner, change):
    """A foreign wrapper: ``change(inner.update, promise, state, params) -> (updates, state)``."""
    return optax.GradientTransformation(inner.init, lambda u, s, p=None: change(inner.update, u, s, p))


def norms(promise):
    rows = jax.tree.leaves(promise.materialize())
    return jnp.sqrt(sum(jnp.sum(r.reshape(r.shape[0], -1) ** 2, 1) for r in rows))


def by_median_norm(promise, params):
    return promise.scale(1 / (jnp.median(norms(promise)) + 1e-6))


def centred(promise, params):
    return stacked_grads(jax.tree.map(lambda r: r - r.mean(0, keepdims=True), promise.materialize()), mask=None)


def five_times(update, promise, state, params):
    def body(carry, _):
        up, state = update(promise, carry[1], params)
        return (jax.tree.map(jnp.add, carry[0], up), state), None

    return jax.lax.scan(body, (jax.tree.map(jnp.zeros_like, params), state), length=5)[0]


def raw_added(update, promise, state, params):
    up, state = update(promise, state, params)
    return jax.tree.map(lambda a, r: a - r.mean(0), up, promise.materialize()), state


def raw_stored(update, promise, state, params):
    up, (state, _) = update(promise, state[0], params), state
    return up[0], (up[1], promise.materialize()["a"][0])


def loss_scaled(update, promise, state, params):
    up, state = update(promise, state, params)
    return jax.tree.map(lambda a: a * promise.sensitive.losses.sum(), up), state


def steered_by_the_loss(update, promise, state, params):
    up, state = update(promise, state, params)
    is_better = promise.sensitive.losses.mean() > 0
    return jax.lax.cond(is_better, lambda: up, lambda: jax.tree.map(jnp.zeros_like, up)), state


def loops_by_the_loss(update, promise, state, params):
    up, state = update(promise, state, params)
    count = promise.sensitive.is_finite.sum()
    up = jax.lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 1, jax.tree.map(jnp.negative, c[1])), (0, up))
    return up[1], state


def printed(update, promise, state, params):
    jax.debug.callback(lambda x: None, promise.materialize()["a"])
    return update(promise, state, params)


def printed_if_private(update, promise, state, params):
    jax.lax.cond(norms(promise)[0] > 1, lambda: jax.debug.callback(lambda: None), lambda: None)
    return update(promise, state, params)


def on_some_steps(update, promise, state, params):
    zeros, count = jax.tree.map(jnp.zeros_like, params), optax.tree.get(state, "count")
    return jax.lax.cond(count > 2, lambda: update(promise, state, params), lambda: (zeros, state))


def with_stale_noise(update, promise, state, params):
    return update(promise, state, params)[0], state


def with_fixed_count(update, promise, state, params):
    return update(promise, jax.tree.map(jnp.zeros_like, state), params)


def own_clip(update, promise, state, params):
    return update(promise.clipped_sum(dpopt.FlatClip(1e6)).sum, state, params)


def another_loss(promise, params):
    rows = promise.materialize()["a"]
    grads = dpopt.per_example_grads(lambda w, x: jnp.sum(w["a"] * x) + 0 * jnp.sum(w["b"]))
    return grads(params, rows - rows.mean(0, keepdims=True), mask=None)


CLIPPED, NOISE = dpopt.clip_and_sum(1.0), dpopt.add_gaussian_noise(1.0, KEY)


def swapped_sum():
    """The stages are there and in order; what is noised is another sum, of no bound."""

    def update(u, s, p=None):
        CLIPPED.update(u, optax.EmptyState(), p)
        return NOISE.update(u.clipped_sum(dpopt.FlatClip(1e6)).sum, s, p)

    return optax.GradientTransformation(NOISE.init, update)


def half_released():
    """Noise on one leaf only."""

    def update(u, s, p=None):
        total, _ = CLIPPED.update(u, optax.EmptyState(), p)
        noisy, s = NOISE.update({"a": total["a"]}, s, p)
        return {**total, **noisy}, s

    return optax.GradientTransformation(NOISE.init, update)


def private_noise_level():
    def update(u, s, p=None):
        total, _ = CLIPPED.update(u, optax.EmptyState(), p)
        return dpopt.add_gaussian_noise(u.sensitive.norms.max(), KEY).update(total, s, p)

    return optax.GradientTransformation(NOISE.init, update)


def batch_size_divided(update, promise, state, params):
    up, state = update(promise, state, params)
    return jax.tree.map(lambda u: u / promise.sensitive.is_example.sum(), up), state


def in_jit(update, promise, state, params):
    return jax.jit(lambda s, p: update(promise, s, p))(state, params)


def remembered(update, promise, state, params):
    up, state = update(promise, state, params)
    return jax.lax.fori_loop(0, 3, lambda _, u: jax.tree.map(lambda x: 0.9 * x, u), up), state


BETWEEN, CHANGED = "changes the clipped sum", "scaled or shifted before the clip"
AROUND, MASKED, OWN_ROWS = "cannot be followed|cannot wrap", "masked out", "gradients that are not the caller's"
LEAKS, OFTEN, STALE = "depends on", "inside a loop or a branch", "count of noise draws|noise's count"

# name: the optimizer, and None where it is sound, or what the refusal says
CASES = {
    "multi_transform": (lambda: optax.multi_transform({"x": opt(), "y": optax.sgd(1.0)}, LABELS), MASKED),
    "partition": (lambda: optax.partition({"x": opt(), "y": optax.sgd(1.0)}, LABELS), MASKED),
    "partition, both private": (lambda: optax.partition({"x": opt(), "y": opt()}, LABELS), MASKED),
    "masked": (lambda: optax.masked(opt(), {"a": True, "b": False}), MASKED),
    "masked, all of it": (lambda: optax.masked(opt(), True), "cannot wrap it"),
    "masked, none of it": (lambda: optax.masked(opt(), False), MASKED),
    "named_chain": (lambda: optax.named_chain(("c", CLIPPED), ("n", NOISE), ("s", optax.sgd(1.0))), None),
    "named_chain, between": (lambda: optax.named_chain(("c", CLIPPED), ("x", optax.scale(2.0)), ("n", NOISE)), BETWEEN),
    "identity between": (lambda: by_hand(optax.identity()), None),
    "foreign stage between": (lambda: by_hand(stage(lambda u, p: jax.tree.map(lambda x: 2 * x, u))), BETWEEN),
    "inject_hyperparams": (lambda: optax.inject_hyperparams(dpopt.dp_sgd, static_args=STATIC)(0.1, **FOUR), None),
    "apply_if_finite": (lambda: optax.apply_if_finite(opt(), 3), AROUND),
    "apply_if_finite, after": (lambda: dpopt.chain(opt(), optax.apply_if_finite(optax.adam(1.0), 3)), None),
    "MultiSteps": (lambda: optax.MultiSteps(opt(), 2), AROUND),
    "MultiSteps, transformation": (lambda: optax.MultiSteps(opt(), 2).gradient_transformation(), AROUND),
    "MultiSteps, after": (
        lambda: dpopt.chain(opt(), optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()),
        None,
    ),
    "lookahead": (lambda: optax.lookahead(opt(), 2, 0.5), AROUND),  # parameters are not a pair; see the test below
    "conditionally_transform": (lambda: optax.conditionally_transform(opt(), lambda s: s > 2), AROUND),
    "conditionally_mask": (lambda: optax.conditionally_mask(opt(), lambda s: s > 2), AROUND),
    "schedule_free": (lambda: optax.contrib.schedule_free(opt(), 0.1), None),
    "mechanize": (lambda: optax.contrib.mechanize(opt()), AROUND),
    "mechanize, after": (lambda: dpopt.chain(opt(), optax.contrib.mechanize(optax.sgd(1.0))), None),
    "sam": (lambda: optax.contrib.sam(optax.sgd(1.0), opt()), AROUND + "|clip_and_sum first"),
    "flatten": (lambda: optax.flatten(opt()), AROUND),
    "one private optimizer after another": (lambda: optax.chain(opt(), opt()), "needs per-example gradients"),
    "median norm before": (lambda: by_hand(before=[stage(by_median_norm)]), CHANGED),
    "centred before": (lambda: by_hand(before=[stage(centred)]), OWN_ROWS),
    "another loss before": (lambda: by_hand(before=[stage(another_loss)]), OWN_ROWS),
    "shifted before": (lambda: by_hand(before=[stage(lambda u, p: u.shift(p))]), CHANGED),
    "scaled by a constant before": (lambda: by_hand(before=[stage(lambda u, p: u.scale(2.0))]), CHANGED),
    "declared diagonal before": (lambda: by_hand(before=[dpopt.precondition_by_side_information(2.0)]), None),
    "identity before": (lambda: by_hand(before=[stage(lambda u, p: u)]), None),
    "own clip": (lambda: around(dpopt.chain(CLIPPED, NOISE), own_clip), "needs per-example gradients"),
    "swapped sum": (swapped_sum, BETWEEN),
    "half released": (half_released, LEAKS),
    "private noise level": (private_noise_level, LEAKS),
    "five times in scan": (lambda: around(opt(), five_times), OFTEN),
    "on some steps": (lambda: around(opt(), on_some_steps), OFTEN),
    "raw added": (lambda: around(opt(), raw_added), LEAKS),
    "raw added to a chain by hand": (lambda: around(by_hand(), raw_added), LEAKS),
    "loss scaled": (lambda: around(opt(), loss_scaled), LEAKS),
    "steered by the loss": (lambda: around(opt(), steered_by_the_loss), LEAKS),
    "loops by the loss": (lambda: around(opt(), loops_by_the_loss), LEAKS),
    "divided by the batch's size": (lambda: around(opt(), batch_size_divided), LEAKS),
    "printed": (lambda: around(opt(), printed), "side effect"),
    "printed if": (lambda: around(opt(), printed_if_private), "side effect"),
    "stale noise": (lambda: around(opt(), with_stale_noise), STALE),
    "fixed count": (lambda: around(by_hand(), with_fixed_count), STALE),
    "inside jit": (lambda: around(opt(), in_jit), None),
    "loop after": (lambda: around(opt(), remembered), None),
    "extra query": (lambda: dpopt.baselines.dp2_extra_query(0.1, adaptive_l2_clip_norm=1.0, delay=2, **FOUR), None),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", CASES)
def test_optaxwrap(name):
    make, refusal = CASES[name]
    tx = make()
    if refusal is None:
        assert dpopt.privacy_of(tx, PARAMS).step_event().noise_multiplier == paid(1.0)
        if name == "inside jit":  # the step's metrics would have to get out of that jit
            return
        new, _, _ = dpopt.make_train_step(loss, tx, engine="vmap")(PARAMS, tx.init(PARAMS), BATCH, None)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(new))
        return
    with pytest.raises((ValueError, TypeError), match=refusal):
        dpopt.privacy_of(tx, PARAMS)
    with pytest.raises((ValueError, TypeError), match=refusal):
        dpopt.make_train_step(loss, tx)(PARAMS, tx.init(PARAMS), BATCH, None)


# --- random programs, sound or not by construction --------------------------------------------------------------------


def kept_in_state(inner, what):
    """Adds to the state what ``what(updates, promise)`` computes."""

    def update(u, s, p=None):
        up, state = inner.update(u, s[0], p)
        return up, (state, what(up, u))

    return optax.GradientTransformation(lambda p: (inner.init(p), jnp.zeros(())), update)


def twice(update, promise, state, params):
    first, state = update(promise, state, params)
    second, state = update(promise, state, params)
    return jax.tree.map(jnp.add, first, second), state


def halved_by_a_scan(update, promise, state, params):
    up, state = update(promise, state, params)
    return jax.lax.scan(lambda u, h: (jax.tree.map(lambda x: x * h, u), None), up, jnp.full(2, 0.5))[0], state


def where_negative(update, promise, state, params):
    up, state = update(promise, state, params)
    return jax.tree.map(lambda u: jax.lax.cond(u.sum() < 0, lambda: u, lambda: 0.5 * u), up), state


BEFORE = {
    True: [lambda u, p: u, lambda u, p: (norms(u), u)[1]],  # looked at, and not used
    False: [by_median_norm, centred, another_loss],
}
IN_BETWEEN = {
    True: [lambda u, p: u, lambda u, p: jax.jit(lambda x: x)(u)],
    False: [lambda u, p: jax.tree.map(lambda x: 2 * x, u), lambda u, p: jax.tree.map(jnp.add, u, p)],
}
WRAPPERS = {
    True: [
        lambda inner: around(inner, halved_by_a_scan),
        lambda inner: around(inner, where_negative),
        lambda inner: kept_in_state(inner, lambda up, promise: up["a"].sum()),
        lambda inner: optax.chain(optax.identity(), inner),
    ],
    False: [
        lambda inner: around(inner, raw_added),
        lambda inner: around(inner, loss_scaled),
        lambda inner: around(inner, steered_by_the_loss),
        lambda inner: around(inner, loops_by_the_loss),
        lambda inner: around(inner, batch_size_divided),
        lambda inner: around(inner, with_stale_noise),
        lambda inner: around(inner, twice),
        lambda inner: around(inner, five_times),
        lambda inner: kept_in_state(inner, lambda up, promise: promise.sensitive.losses[0]),
        lambda inner: kept_in_state(inner, lambda up, promise: promise.materialize()["a"].mean()),
    ],
}


def random_program(rng, is_sound):
    """A chain with up to two foreign stages and three wrappers; where it is not sound, one piece of it is not."""
    bad = None if is_sound else rng.integers(3)

    def pick(pieces, kind, most):
        count = rng.integers(kind == bad, most + 1)
        chosen = [pieces[True][rng.integers(len(pieces[True]))] for _ in range(count)]
        if kind == bad:
            chosen[rng.integers(count)] = pieces[False][rng.integers(len(pieces[False]))]
        return chosen

    before, between = pick(BEFORE, 0, 1), pick(IN_BETWEEN, 1, 1)
    tx = by_hand(*map(stage, between), before=map(stage, before))
    for wrap in pick(WRAPPERS, 2, 3):
        tx = wrap(tx)
    return tx


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(4))
def test_random_programs_are_judged_by_their_construction(seed):
    rng = np.random.default_rng(seed)
    for number in range(16):
        tx, is_sound = random_program(rng, number % 2 == 0), number % 2 == 0
        try:
            dpopt.privacy_of(tx, PARAMS)
        except ValueError:
            assert not is_sound, number
        else:
            assert is_sound, number


@pytest.mark.slow
@pytest.mark.parametrize("change", [raw_added, loss_scaled, halved_by_a_scan])
def test_what_is_refused_does_move_further_than_the_clip_norm(change):
    """One example less, the same noise: the judgement above agrees with the numbers."""
    tx = around(by_hand(), change)
    batch = jnp.concatenate([BATCH, jnp.full((1, 2), 100.0)])
    grads = dpopt.per_example_grads(loss, engine="vmap")
    with_it, without = (
        tx.update(grads({"a": PARAMS["a"] + 1, "b": PARAMS["b"] + 1}, b, mask=None), tx.init(PARAMS), PARAMS)[0]
        for b in (batch, batch[:4])
    )
    moved = np.sqrt(sum(np.sum((with_it[k] - without[k]) ** 2) for k in PARAMS))
    try:
        dpopt.privacy_of(tx, PARAMS)
    except ValueError:
        assert moved > 1.5
    else:
        assert moved <= 1 + 1e-5


# --- the scripts by their names ---------------------------------------------------------------------------------------


def test_scaledbefore():
    tx = by_hand(before=[stage(lambda u, p: u.scale(1 / jnp.median(norms(u))))])
    grads = dpopt.per_example_grads(loss)(PARAMS, BATCH, mask=None)
    for attempt in (
        lambda: dpopt.privacy_of(tx, PARAMS),
        lambda: dpopt.make_train_step(loss, tx)(PARAMS, tx.init(PARAMS), BATCH, None),
        lambda: tx.update(grads, tx.init(PARAMS), PARAMS),  # also where nobody inspects
        lambda: opt().update(grads.scale(2.0), opt().init(PARAMS), PARAMS),
    ):
        with pytest.raises(ValueError, match=CHANGED):
            attempt()
    assert grads.scale(2.0).clipped_sum(dpopt.FlatClip(1.0)).sum["a"].shape == (3,)  # for research, as before


RULES = {
    "polyak": lambda: optax.polyak_sgd(),
    "plateau": lambda: optax.contrib.reduce_on_plateau(),
    "momo": lambda: optax.contrib.momo(),
    "lbfgs": lambda: optax.lbfgs(),
    "backtracking": lambda: optax.scale_by_backtracking_linesearch(5),
}


@pytest.mark.parametrize("name", RULES)
def test_polyak(name):
    """Rules that read the loss: refused when a chain is built, and where Optax hides them, at the first update."""
    rule = RULES[name]()
    with pytest.raises(ValueError, match=r"requires the argument .*value.*loss of a private batch"):
        dpopt.chain(dpopt.privatize(**FOUR), rule)
    tx = optax.chain(dpopt.privatize(**FOUR), rule)
    told = {"value": jnp.float32(1.0), "grad": PARAMS, "value_fn": lambda p: 0.0}
    step = dpopt.make_train_step(loss, tx)
    with pytest.raises(ValueError, match="loss of a private batch"):
        step(PARAMS, tx.init(PARAMS), BATCH, None, **told)
    with pytest.raises(ValueError, match="loss of a private batch"):
        step(PARAMS, tx.init(PARAMS), BATCH, None)
    grads = dpopt.per_example_grads(loss)(PARAMS, BATCH, mask=None)
    with pytest.raises(ValueError, match="loss of a private batch"):
        tx.update(grads, tx.init(PARAMS), PARAMS, **told)


def test_a_public_value_may_steer():
    plateau = dpopt.optimizers.public.with_public_arguments(optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    tx = dpopt.chain(dpopt.privatize(**privacy_four(noise_multiplier=0.0)), plateau)
    step = dpopt.make_train_step(loss, tx, engine="vmap")
    ends, state = [], tx.init(PARAMS)
    for _ in range(2):
        new, state, _ = step(PARAMS, state, BATCH, None, public_value=1.0)
        ends.append(new["a"])
    np.testing.assert_allclose(ends[1], 0.5 * ends[0], rtol=1e-6)


def test_multisteps():
    stacked, w = jnp.ones((4, 3)), jnp.zeros(3)
    several = optax.MultiSteps(opt(), 2)
    with pytest.raises(ValueError, match="needs per-example gradients"):
        several.update(stacked, several.init(w), w)
    some = optax.masked(opt(), {"a": True, "b": False})
    with pytest.raises(ValueError, match=MASKED):
        some.init({"a": w, "b": w})
    state = optax.masked(optax.sgd(1.0), {"a": True, "b": False}).init({"a": w, "b": w})
    with pytest.raises(ValueError, match=MASKED):
        some.update({"a": stacked, "b": stacked}, state, {"a": w, "b": w})
    with pytest.raises(TypeError, match="client"):
        dpopt.federated.client_level(opt()).update(stacked, opt().init(w), w)


def test_lookahead_around_gradients_of_its_fast_parameters():
    tx, params = optax.lookahead(opt(), 2, 0.5), optax.LookaheadParams(PARAMS, PARAMS)
    grads = dpopt.per_example_grads(loss, engine="vmap")(PARAMS, BATCH, mask=None)
    updates, _ = tx.update(grads, tx.init(params), params)
    expected, _ = opt().update(grads, opt().init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates.fast["a"], expected["a"])


def test_an_optimizer_is_inspected_once_a_structure():
    calls = []

    def spy(update, promise, state, params):
        calls.append(type(promise._source).__name__)
        return update(promise, state, params)

    tx = around(opt(), spy)
    step = dpopt.make_train_step(loss, tx, engine="vmap")
    for _ in range(2):
        step(PARAMS, tx.init(PARAMS), BATCH, None)
    assert calls == ["StandIn", "ExampleRows", "ExampleRows"]


def test_a_hand_made_private_optimizer_is_inspected():
    """Whoever builds a PrivateOptimizer states its privacy: what it does is looked at."""
    core = dpopt.privatize(**FOUR)

    def run(grads, state, params=None, **extra):
        up, state, stddev = core.run(grads, state, params)
        return jax.tree.map(lambda u, r: u + r.mean(0), up, grads.materialize()), state, stddev

    made = dpopt.PrivateOptimizer(core.init, run, core.privacy)
    grads = dpopt.per_example_grads(loss)(PARAMS, BATCH, mask=None)
    for tx in (made, dpopt.chain(made, optax.sgd(1.0)), dpopt.chain(made)):
        with pytest.raises(ValueError, match=LEAKS):
            tx.update(grads, tx.init(PARAMS), PARAMS)


def test_an_update_is_inspected_for_each_value_of_a_flag():
    """A flag decides whether there is any noise; what was inspected without it does not hold with it."""
    clip, noise = dpopt.clip_and_sum(1.0), dpopt.add_gaussian_noise(1.0, KEY)

    def update(grads, state, params=None, *, public_warmup=False):
        total, first = clip.update(grads, state[0], params)
        if public_warmup:
            return total, (first, state[1])
        total, second = noise.update(total, state[1], params)
        return total, (first, second)

    tx = optax.GradientTransformationExtraArgs(lambda p: (clip.init(p), noise.init(p)), update)
    step = dpopt.make_train_step(loss, tx)
    for warmup in (False, np.False_):
        step(PARAMS, tx.init(PARAMS), BATCH, mask=None, public_warmup=warmup)
    with pytest.raises(ValueError, match="no add_gaussian_noise"):
        step(PARAMS, tx.init(PARAMS), BATCH, mask=None, public_warmup=True)
    with pytest.raises(ValueError, match="not private"):  # an array: whether there is noise may not depend on it
        step(PARAMS, tx.init(PARAMS), BATCH, mask=None, public_warmup=jnp.array(True))


def test_a_stage_may_be_jitted():
    """JAX would otherwise take what an inspection traced, marks and all, for the stage itself."""
    noise = dpopt.add_gaussian_noise(1.0, KEY)
    jitted = optax.GradientTransformation(noise.init, jax.jit(noise.update))
    tx = optax.chain(dpopt.clip_and_sum(1.0), jitted, optax.sgd(1.0))
    step = dpopt.make_train_step(loss, tx)
    expected = dpopt.make_train_step(loss, by_hand())(PARAMS, by_hand().init(PARAMS), BATCH, mask=None)[0]
    for _ in range(2):
        found = step(PARAMS, tx.init(PARAMS), BATCH, mask=None)[0]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
        assert dpopt.privacy_of(tx, PARAMS).queries[0].noise_multiplier == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", [lambda t: 1 + t**3 / 2.0**33, lambda t: 1 + (t * 1_000_003) % 7 / 8], ids=["cube", "cycle"]
)
def test_a_schedule_of_integers_is_accounted_for_as_it_is_drawn(schedule):
    """The step is counted in 32 bits, in which powers wrap around; Python's integers would not."""
    tx = dpopt.dp_sgd(1.0, **{**FOUR, "noise_multiplier": schedule, "expected_batch_size": 1})
    zeros, params = jnp.zeros((1, 50_000)), jnp.zeros(50_000)
    update = jax.jit(tx.update)
    for t in (100, 1290, 1291, 1626, 2500):
        drawn = update(zeros, optax.tree.set(tx.init(params), count=jnp.int32(t)), params)[0]
        assert abs(float(jnp.std(drawn)) / tx.privacy.queries[0].multiplier(t) - 1) < 0.02


EVERY = {
    "dp_sgd": dpopt.dp_sgd,
    "dp_adam": dpopt.dp_adam,
    "dp_adam_bc": dpopt.dp_adam_bc,
    "dp2": dpopt.dp2,
    "dp2_noise_first": dpopt.baselines.dp2_noise_first,
    "dp2_extra_query": lambda rate, **four: dpopt.baselines.dp2_extra_query(rate, adaptive_l2_clip_norm=2.0, **four),
    "dp_micro_adam": lambda rate, **four: dpopt.dp_micro_adam(
        rate, density=0.5, rounding_key=jax.random.clone(ROUNDING), **four
    ),
}
ROUNDING = jax.random.key(1)
DELAYED = {"delay": 2, "adaptive_learning_rate": 0.1}
MORE = {
    "dp2": {**DELAYED, "adaptive_l2_clip_norm": 2.0},
    "dp2_noise_first": DELAYED,
    "dp2_extra_query": {"delay": 2},
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", EVERY)
def test_a_donated_state_holds_nothing_of_the_caller(name):
    """Nor anything twice: XLA takes no buffer for two arguments that are donated."""
    tx = EVERY[name](0.1, **FOUR, **MORE.get(name, {}))
    step = jax.jit(dpopt.make_train_step(loss, tx), donate_argnums=(0, 1))
    for _ in range(2):
        params = jax.tree.map(jnp.copy, PARAMS)
        params, state, _ = step(params, tx.init(params), BATCH, None)
        step(params, state, BATCH, None)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [n for n in EVERY if n not in ("dp2_extra_query", "dp_micro_adam")])
def test_hyperparameters_are_injected_into_every_optimizer(name):
    """A weight decay of 0 is a number for ``init`` and unknown to ``update``: both must have the same stages."""
    more = MORE.get(name, {})
    tx = optax.inject_hyperparams(EVERY[name], static_args=(*STATIC, *more))(0.1, **FOUR, **more)
    plain = EVERY[name](0.1, **FOUR, **more)
    found = dpopt.make_train_step(loss, tx)(PARAMS, tx.init(PARAMS), BATCH, None)[0]
    expected = dpopt.make_train_step(loss, plain)(PARAMS, plain.init(PARAMS), BATCH, None)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
