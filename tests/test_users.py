"""User-level privacy without local training: grouping, one clip per user, and whole runs."""

import functools
import itertools
import math
from pathlib import Path
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical, dot_loss, mlp_loss, mlp_params, paid, privacy_four
from runs import script
from scipy import stats

import dpopt
from dpopt import events, users
from dpopt.federated import client_deltas
from dpopt.run import entropy
from dpopt.users import Users, group, per_user_grads

DELTA = 1e-5


def ragged(seed, *, num_users=None, most=9):
    """Shuffled ids of users with one to ``most`` examples each; the ids have gaps."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, most + 1, num_users or rng.integers(1, 8))
    return rng.permutation(np.repeat(rng.choice(1_000, len(counts), replace=False), counts))


def mlp_data(size, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(size, 3)), "y": rng.normal(size=(size, 2))}


# Which examples are taken.


@pytest.mark.parametrize("how", ["first", "sample", "resample"])
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(seed=st.integers(0, 10**6), most=st.integers(1, 6), step=st.integers(0, 50))
def test_everyone_contributes_at_most_so_many_of_their_own(how, seed, most, step):
    ids = ragged(seed)
    groups = group(ids, max_examples=most, how=how, seed=None if how == "first" else seed)
    names = np.unique(ids)
    assert groups.num_users == len(names)
    order = np.random.default_rng(seed).integers(len(names), size=5)  # padding of a batch repeats users
    rows, mask = groups.rows(order, step)
    assert rows.shape == mask.shape == (5, most) and mask.dtype == bool
    for user, row, counted in zip(order, rows, mask, strict=True):
        own = np.flatnonzero(ids == names[user])
        taken = row[counted].tolist()
        assert len(set(taken)) == len(taken) == min(most, len(own)) and set(row.tolist()) <= set(own.tolist())
        if how == "first":
            assert taken == own[:most].tolist()
    again, _ = groups.rows(order, step)
    np.testing.assert_array_equal(rows, again)


@pytest.mark.parametrize("how", ["first", "sample", "resample"])
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(seed=st.integers(0, 10**6), step=st.integers(0, 50))
def test_a_user_more_changes_nobody_elses_row(how, seed, step):
    ids = ragged(seed, num_users=5)
    options = {"max_examples": 3, "how": how, "seed": None if how == "first" else seed}
    whole = group(ids, **options)
    for left_out in np.unique(ids):
        kept = np.flatnonzero(ids != left_out)
        fewer = group(ids[kept], **options)
        others = np.flatnonzero(np.unique(ids) != left_out)
        rows, mask = fewer.rows(np.arange(fewer.num_users), step)
        np.testing.assert_array_equal(kept[rows], whole.rows(others, step)[0])
        np.testing.assert_array_equal(mask, whole.rows(others, step)[1])


def test_what_is_drawn_anew_needs_the_step():
    groups = group(np.repeat([1, 2], 5), max_examples=2, how="resample", seed=0)
    for read in (groups.rows, groups.batches(np.arange(10))):
        with pytest.raises(ValueError, match="no step was given"):
            read(np.arange(2))


def subsets_p_value(draw, count=4_000):
    """Chi-square of the subsets, two of three examples, of two users, against nine equally likely outcomes."""
    seen = np.zeros((3, 3))
    for i in range(count):
        (a, b), mask = draw(i)
        assert mask.all()
        seen[3 - sum(a.tolist()), 9 - sum(b.tolist())] += 1  # which of {0, 1, 2} and of {3, 4, 5} is missing
    return stats.chisquare(seen.ravel()).pvalue


@pytest.mark.slow
def test_draws_are_uniform_and_apart_by_user():
    ids, both = np.repeat([10, 20], 3), np.arange(2)
    anew = group(ids, max_examples=2, how="resample", seed=0)
    assert subsets_p_value(lambda i: anew.rows(both, i)) > 1e-3
    assert subsets_p_value(lambda i: group(ids, max_examples=2, how="sample", seed=i).rows(both)) > 1e-3
    together = group(np.repeat([10], 3), max_examples=2, how="resample", seed=0)

    def alike(i):  # wrong: the same draw for both users
        (row,), _ = together.rows(np.zeros(1, int), i)
        return np.stack([row, row + 3]), np.ones(2, bool)

    assert subsets_p_value(alike) < 1e-12


def test_batches_are_read_from_any_kind_of_data():
    ids = np.array(["ann", "bob", "ann", "cid", "ann"])
    table = {"x": np.arange(10.0).reshape(5, 2), "y": np.arange(5)}
    for data in (table, lambda rows: jax.tree.map(lambda x: x[rows], table)):
        batches = group(ids, max_examples=2).batches(data)
        read = batches(np.array([0, 2]))
        assert len(batches) == 3 and batches.at_step is None
        assert read.data["y"].tolist() == [[0, 2], [3, 3]] and read.example_mask.tolist() == [
            [True, True],
            [True, False],
        ]
        assert read.data["x"].shape == (2, 2, 2)
    assert group(ids.astype(object), max_examples=2).num_users == 3


def test_draws_follow_the_step():
    ids = np.repeat(np.arange(8), 5)
    batches = group(ids, max_examples=2, how="resample", seed=1).batches(np.arange(40))
    steps = dpopt.Steps(dpopt.PoissonSampler(8, 8, seed=0, pad_to=8), 0, 6, batches)
    seen = [sorted(map(tuple, rows.data.tolist())) for rows, _ in steps]
    assert len({str(s) for s in seen}) == 6 and seen[2] == sorted(map(tuple, steps[2][0].data.tolist()))


# One gradient per user.

MLP_GRAD = jax.jit(jax.grad(mlp_loss))


def dense(params, ids, data, *, reduce, clip, scale=None):
    """Rows and clipped sum in float64 NumPy, one example's gradient at a time."""
    rows, total = [], 0
    for name in np.unique(ids):
        each = []
        for i in np.flatnonzero(ids == name):
            leaves = jax.tree.leaves(MLP_GRAD(params, jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), data)))
            each.append(np.concatenate([np.ravel(x) for x in leaves]))
        row = np.sum(each, axis=0) / (len(each) if reduce == "mean" else 1) * (1 if scale is None else scale)
        rows.append(row)
        total = total + row * min(1.0, clip / np.linalg.norm(row))
    return rows, total


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize(
    ("engine", "reduce", "microbatch_size"),
    [
        ("ghost", "sum", None),
        pytest.param("ghost", "mean", 2, marks=pytest.mark.slow),
        ("vmap", "sum", 2),
        ("vmap", "mean", None),
        ("auto", "mean", None),
    ],
)
@pytest.mark.one_in(4)
def test_rows_are_the_users_gradients(x64, engine, reduce, microbatch_size):
    ids = ragged(11, num_users=5)
    data = mlp_data(len(ids))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), mlp_params())
    batch = group(ids, max_examples=9).batches(data)(np.arange(5))
    grads = per_user_grads(mlp_loss, reduce=reduce, engine=engine, microbatch_size=microbatch_size)
    rows, _ = dense(params, ids, data, reduce=reduce, clip=math.inf)
    middle = float(np.median([np.linalg.norm(r) for r in rows])) * 1.01
    clip = dpopt.FlatClip(middle)
    rows, total = dense(params, ids, data, reduce=reduce, clip=middle)

    @jax.jit
    def computed(params, batch):
        promise = grads(params, batch, mask=None)
        found = promise.clipped_sum(clip)
        half = promise.scale(jax.tree.map(lambda x: jnp.full_like(x, 0.5), params)).clipped_sum(clip)
        return found.sum, found.sensitive.norms, found.sensitive.was_clipped, promise.materialize(), half.sum

    found, norms, was_clipped, materialized, half = computed(params, batch)
    np.testing.assert_allclose(flat(found), total, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(norms, [np.linalg.norm(r) for r in rows], rtol=1e-9)
    assert {bool(c) for c in np.asarray(was_clipped)} == {True, False}
    materialized = np.concatenate([np.reshape(x, (5, -1)) for x in jax.tree.leaves(materialized)], axis=1)
    np.testing.assert_allclose(materialized, rows, rtol=1e-9, atol=1e-12)
    _, scaled = dense(params, ids, data, reduce=reduce, clip=middle, scale=0.5)
    np.testing.assert_allclose(flat(half), scaled, rtol=1e-9, atol=1e-12)
    if reduce == "mean":  # the change of a client with one local step of learning rate 1
        local = functools.partial(client_deltas(mlp_loss, local_steps=1, local_learning_rate=1.0), mask=None)
        other = jax.jit(lambda p, b: local(p, b.data, example_mask=b.example_mask).clipped_sum(clip).sum)(params, batch)
        np.testing.assert_allclose(flat(found), flat(other), rtol=1e-9, atol=1e-12)


def log_loss(w, x):
    """NaN in value and gradient unless x > 0."""
    return jnp.sum(w * jnp.log(x)) + jnp.sum(jnp.sqrt(x) * jnp.square(w))


LOG_GRAD = jax.jit(jax.grad(log_loss))


@functools.cache
def logs_of_users(engine):
    """A clipped sum, which users count, and the rows."""
    grads = per_user_grads(log_loss, reduce="sum", engine=engine)

    @jax.jit
    def computed(batch, mask=None):
        promise = grads(jnp.array([0.3, -0.2]), batch, mask=mask)
        found = promise.clipped_sum(dpopt.FlatClip(1.0))
        return found.sum, found.sensitive.is_example, promise.materialize()

    return computed


@pytest.mark.parametrize(
    ("engine", "garbage"),
    [
        pytest.param("ghost", math.nan, marks=pytest.mark.slow),
        ("ghost", 0.0),
        ("vmap", math.nan),
        ("vmap", math.inf),
        ("vmap", -1.0),
        ("vmap", 1e30),
    ],
)
@pytest.mark.one_in(6)
def test_padding_adds_exactly_nothing(engine, garbage):
    rng = np.random.default_rng(0)
    data = rng.uniform(1, 2, (4, 3, 2)).astype(np.float32)
    counts = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0], [1, 0, 1]], bool)
    spoilt = np.where(counts[..., None], data, np.float32(garbage))
    computed = logs_of_users(engine)
    (want, _, clean), (got, is_example, rows) = (computed(Users(x, counts)) for x in (data, spoilt))
    assert_identical(got, want)
    assert_identical(rows, clean)
    np.testing.assert_array_equal(rows[2], 0)
    assert is_example.tolist() == [True, True, False, True]  # no examples, so nothing is added
    by_hand = [sum(np.asarray(LOG_GRAD(np.float32([0.3, -0.2]), x)) for x in data[u][counts[u]]) for u in (0, 1, 3)]
    np.testing.assert_allclose(np.asarray(rows)[[0, 1, 3]], by_hand, rtol=1e-5)
    # A padding user, with any examples.
    masked, *_ = computed(Users(spoilt, counts), np.array([True, True, True, False]))
    fewer, *_ = computed(Users(data[:3], counts[:3]))
    np.testing.assert_allclose(masked, fewer, rtol=1e-6)


def test_a_broken_example_drops_its_user_and_nobody_else():
    data = np.ones((3, 2, 2), np.float32)
    data[1, 1, 0] = math.nan

    @jax.jit
    def computed(data):
        found = per_user_grads(log_loss)(jnp.ones(2), data, mask=None).clipped_sum(dpopt.FlatClip(1.0))
        return found.sum, found.sensitive.is_finite

    total, is_finite = computed(data)
    assert is_finite.tolist() == [True, False, True]
    np.testing.assert_allclose(total, computed(data[[0, 2]])[0], rtol=1e-6)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 10**6),
    clip=st.floats(0.01, 100),
    size=st.sampled_from([1e-3, 1.0, 1e3, 1e10]),
    reduce=st.sampled_from(["sum", "mean"]),
)
def test_removing_a_user_moves_the_sum_by_at_most_the_clip(seed, clip, size, reduce):
    """For any number of examples: all those of a user are equal, so that they add up."""
    rng = np.random.default_rng(seed)
    ids = ragged(seed, num_users=5)
    data = (rng.normal(size=(len(ids), 3)) * size).astype(np.float32)
    loud = ids == rng.choice(ids)
    data[loud] = data[loud][0] * 100
    batch = group(ids, max_examples=9).batches(data)(np.arange(5))

    everyone = np.ones(5, bool)
    without = np.concatenate([everyone[None], ~np.eye(5, dtype=bool)])
    sums = np.asarray(_sums(batch, without, clip, reduce), np.float64)
    assert np.linalg.norm(sums[0] - sums[1:], axis=1).max() <= clip * (1 + 1e-5)


@functools.partial(jax.jit, static_argnums=3)
def _sums(batch, masks, clip, reduce):
    grads = per_user_grads(dot_loss, reduce=reduce, engine="vmap")
    return jax.lax.map(lambda m: grads(jnp.zeros(3), batch, mask=m).clipped_sum(dpopt.FlatClip(clip)).sum, masks)


@pytest.mark.slow
def test_the_same_examples_as_rows_of_their_own_move_further():
    """The bound above is not trivial: clipped one by one, five examples of a user move the sum by five clip norms."""
    data = np.full((8, 3), 10.0, np.float32)
    total, fewer = (
        dpopt.per_example_grads(dot_loss)(jnp.zeros(3), data, mask=m).clipped_sum(dpopt.FlatClip(1.0)).sum
        for m in (np.ones(8, bool), np.arange(8) >= 5)
    )
    assert np.linalg.norm(total - fewer) == pytest.approx(5)
    one = per_user_grads(dot_loss, reduce="sum")(jnp.zeros(3), data[None, :5], mask=None)
    assert np.linalg.norm(one.clipped_sum(dpopt.FlatClip(1.0)).sum) == pytest.approx(1)


# Runs.


def loss_fn(w, x):
    return 0.5 * jnp.sum((jnp.tanh(w) - x) ** 2)


IDS = np.random.default_rng(1).integers(48, size=400)
EXAMPLES = np.random.default_rng(2).normal(size=(400, 3)).astype(np.float32)
GROUPS = {
    how: group(IDS, max_examples=4, how=how, seed=seed)
    for how, seed in (("first", None), ("sample", 7), ("resample", 7))
}


def user_plan(*, steps=9, sampling="poisson", key=0, **more):
    builder = dpopt.Builder(
        num_examples=48, expected_batch_size=8, steps=steps, key=jax.random.key(key), unit="user", sampling=sampling,
        **({"pad_to": 24} if sampling == "poisson" else {}), **more,
    )  # fmt: skip
    return builder.clip(0.7).noise(1.3).then(optax.adam(0.1)).build()


def run(plan, how="first", **options):
    entropy._runs.clear()
    grads = options.pop("grads", per_user_grads(loss_fn))
    return dpopt.train(plan, grads, jnp.zeros(3), GROUPS[how].batches(EXAMPLES), **options)


def test_a_plan_samples_pays_for_and_says_users():
    plan = user_plan()
    result = run(plan)
    (event,) = events.flattened(result.ledger.event)
    assert event.sampling_probability == 8 / 48 and event.event.noise_multiplier == pytest.approx(paid(1.3))
    for text in (str(result.statement(delta=DELTA)), str(plan.statement(delta=DELTA))):
        assert "adding or removing one user" in text and "each user with probability" in text
    assert result.statement(delta=DELTA).to_json()["unit"] == result.unit == "user" and "one user" in str(plan)


@pytest.mark.slow
def test_users_in_batches_of_one_shape():
    plan = user_plan(sampling="truncated_poisson", max_batch_size=10)
    result = run(plan, "sample")
    assert "each user of 48" in str(result.statement(delta=DELTA))


class Died(Exception):
    pass


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["first", "resample"])
def test_a_run_that_dies_goes_on(tmp_path, how):
    pytest.importorskip("orbax.checkpoint")
    from dpopt.run.checkpoint import Checkpointer

    def die(t, params):
        if t == 6:
            raise Died

    whole = run(user_plan(), how, replay=True)
    with Checkpointer(tmp_path, every=4) as c, pytest.raises(Died):
        run(user_plan(), how, checkpointer=c, on_step=die, replay=True)
    with Checkpointer(tmp_path, every=4) as c:
        result = run(user_plan(), how, checkpointer=c, replay=True)
    assert_identical(result.state[:3], whole.state[:3])
    assert result.ledger == whole.ledger and result.lost == 0
    other = dpopt.Builder(num_examples=48, expected_batch_size=8, steps=9, key=jax.random.key(0), pad_to=24)
    other = other.clip(0.7).noise(1.3).then(optax.adam(0.1)).build()
    with Checkpointer(tmp_path, every=4) as c, pytest.raises(dpopt.run.journal.JournalError, match="unit"):
        run(other, how, checkpointer=c)


@pytest.mark.slow
def test_losses_that_draw_get_keys_of_their_own():
    """By step, user and example: the draws of a user do not depend on other users."""

    def noisy(w, row):
        x, key = row
        return jnp.sum(w * (x + jax.random.normal(key, (3,))))

    keys = dpopt.example_keys(jax.random.key(5), 0, np.arange(4))
    batch = Users(np.zeros((4, 2, 3), np.float32), np.ones((4, 2), bool))
    rows = per_user_grads(noisy)(jnp.ones(3), (batch, keys), mask=None).materialize()
    fewer = per_user_grads(noisy)(jnp.ones(3), (jax.tree.map(lambda x: x[1:], batch), keys[1:]), mask=None)
    np.testing.assert_array_equal(rows[1:], fewer.materialize())
    draws = jax.vmap(lambda k: jax.vmap(lambda k: jax.random.normal(k, (3,)))(jax.random.split(k, 2)))(keys)
    np.testing.assert_allclose(rows, draws.mean(1), rtol=1e-6)
    result = run(user_plan(steps=2), grads=per_user_grads(noisy), example_key=jax.random.key(3))
    assert np.isfinite(result.params).all()


def test_the_engine_is_verified_on_users(monkeypatch):
    from dpopt import ghost, verification

    monkeypatch.setattr(verification, "verify_once", verification.verify)  # other tests skip it

    true_sum = ghost.clipped_sum

    def wrong(*args, **options):
        ran = true_sum(*args, **options)
        return ran._replace(sum=jax.tree.map(lambda x: 1.1 * x, ran.sum))

    with mock.patch.object(ghost, "clipped_sum", wrong), pytest.raises(dpopt.verification.VerificationError):
        run(user_plan(steps=1), grads=per_user_grads(loss_fn, engine="ghost"))


@pytest.mark.slow
def test_the_step_is_computed_the_same_on_eight_devices():
    here = Path(__file__).parent / "programs" / "users_run.py"
    eight, one = script(here, 8, devices=8), script(here, 1)
    assert (eight["devices"], one["devices"]) == (8, 1)
    assert eight["unit"] == "user" and eight["steps"] == 5
    np.testing.assert_allclose(eight["params"], one["params"], rtol=2e-4, atol=2e-5)


def test_single_examples_do_not_pass_for_users():
    plan = user_plan()
    with pytest.raises(TypeError, match=r"(?s)states its privacy for users.*per_user_grads"):
        entropy._runs.clear()
        dpopt.train(plan, loss_fn, jnp.zeros(3), EXAMPLES[:48])
    deltas = client_deltas(loss_fn, local_steps=1, local_learning_rate=1.0)
    with pytest.raises(TypeError, match="states its privacy for users"):
        plan.optimizer.update(
            deltas(jnp.zeros(3), jnp.ones((2, 2, 3)), mask=None), plan.optimizer.init(jnp.zeros(3)), jnp.zeros(3)
        )
    stated = users.user_level(dpopt.dp_sgd(0.1, **privacy_four()))
    assert dpopt.chain(stated, optax.ema(0.9)).privacy.unit == "user"
    opt = dpopt.dp_sgd(0.1, **privacy_four())
    promise = per_user_grads(loss_fn)(jnp.zeros(3), jnp.ones((2, 2, 3)), mask=None)
    assert promise.unit == "user"
    with pytest.warns(FutureWarning, match=r"whole users, .*dpopt.users.user_level"):
        opt.update(promise, opt.init(jnp.zeros(3)), jnp.zeros(3))


def test_two_queries_and_clients_beside():
    twice = users.user_level(dpopt.baselines.dp2_extra_query(0.1, adaptive_l2_clip_norm=1.0, delay=2, **privacy_four()))
    params = jnp.zeros(3)
    promise = per_user_grads(loss_fn)(params, jnp.ones((4, 2, 3)), mask=None)
    updates, _ = twice.update(promise, twice.init(params), params)
    assert np.isfinite(updates).all() and twice.privacy.unit == "user"
    with pytest.raises(TypeError, match="user_level needs an optimizer made by dpopt"):
        users.user_level(optax.sgd(0.1))


IDS_2D = np.zeros((4, 2), int)


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (lambda: group(IDS_2D, max_examples=2), ValueError, "one user per example"),
        (lambda: group([1.0, math.nan], max_examples=2), TypeError, "integers or strings"),
        (lambda: group([["a", "b"], ["c", "d"]], max_examples=2), ValueError, "assign it to one of them"),
        (lambda: group(np.array([None, "b"], object), max_examples=2), TypeError, "integers or strings"),
        (lambda: group(np.zeros(0, int), max_examples=2), ValueError, "no users"),
        (lambda: group([1, 2], max_examples=0), ValueError, "max_examples"),
        (lambda: group([1, 2], max_examples=1, how="last"), ValueError, "how"),
        (lambda: group([1, 2], max_examples=1, how="sample"), ValueError, "pass a seed"),
        (lambda: group([1, 2], max_examples=1, seed=3), ValueError, "leave out seed"),
        (lambda: group([1, 2], max_examples=1).batches(np.zeros((3, 2))), ValueError, "3"),
        (lambda: per_user_grads("loss"), TypeError, "loss_fn"),
        (lambda: per_user_grads(loss_fn, reduce="max"), ValueError, "reduce"),
        (lambda: per_user_grads(loss_fn)(jnp.zeros(3), jnp.ones((2, 2, 3))), TypeError, "mask is missing"),
        (lambda: per_user_grads(loss_fn)(jnp.zeros(3), jnp.ones(2), mask=None), ValueError, r"\(users, examples\)"),
        (lambda: per_user_grads(loss_fn)(jnp.zeros(3), jnp.ones((2, 0, 3)), mask=None), ValueError, "no example"),
        (
            lambda: per_user_grads(loss_fn)(
                jnp.zeros(3), jnp.ones((2, 2, 3)), mask=None, example_mask=np.ones((2, 3), bool)
            ),
            ValueError,
            "example_mask must have shape",
        ),
        (
            lambda: per_user_grads(loss_fn)(
                jnp.zeros(3), Users(jnp.ones((2, 2, 3)), np.ones((2, 2))), mask=None
            ),
            TypeError,
            "boolean",
        ),
        (lambda: run(user_plan(), "first", microbatch_size=2), ValueError, "per_user_grads"),
        (
            lambda: dpopt.train(
                user_plan(), per_user_grads(loss_fn), jnp.zeros(3), group([1, 2], max_examples=1).batches(EXAMPLES[:2])
            ),
            ValueError,
            "hold 2 examples, and the plan samples from 48",
        ),
        (
            lambda: dpopt.loading.sharded_rows(GROUPS["resample"].batches(EXAMPLES), 48, dpopt.sharding.make_mesh(1)),
            TypeError,
            "draw a whole batch anew",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(mistake, error, message):
    with pytest.raises(error, match=message):
        mistake()


def test_groups_do_not_tell_who_has_how_many():
    shown = repr(GROUPS["resample"])
    assert shown == "Groups(num_users=48, max_examples=4, resample=True)"
    assert not any(str(n) in shown for n in itertools.islice(np.bincount(IDS), 5) if n > 9)
