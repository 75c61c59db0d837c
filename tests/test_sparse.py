"""Noise on touched rows: the algorithm in NumPy, privacy cost, sensitivity, and all engines."""

import math

import dp_accounting as dp
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical, privacy_four, slow_unless
from hypothesis import strategies as st
from runs import ROOT, run, script

import dpopt
from dpopt import events, noise, sparse, users
from dpopt.chain import NoiseAware
from dpopt.sparse import sparse_rows

ROWS, WIDTH = 9, 3


def start(seed=0):
    rng = np.random.default_rng(seed)
    sizes = {"table": (ROWS, WIDTH), "w": (WIDTH, 2)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in sizes.items()}


def loss(params, example):
    return jnp.sum((params["table"][example["tokens"]].mean(0) @ params["w"] - example["y"]) ** 2)


def batch_of(size, seed=0, words=ROWS, length=4):
    rng = np.random.default_rng(seed)
    return {"tokens": rng.integers(0, words, (size, length)), "y": rng.normal(size=(size, 2)).astype(np.float32)}


def rule(l2_clip_norm=1.0, **changes):
    options = dict(tables=lambda p: p["table"], rows=lambda example: example["tokens"], most_rows=4, threshold=1.0)
    return sparse_rows(l2_clip_norm, **options | changes)


def step_of(optimizer, **how):
    grads = dpopt.per_example_grads(loss, **how)
    return jax.jit(lambda p, s, batch, mask: optimizer.update(grads(p, batch, mask=mask), s, p))


# The algorithm in float64 NumPy.


def algorithm(grads, tokens, mask, *, clip, clip1, sigma, sigma1, threshold, most_rows, size, normals, dense):
    """The private mean from raw gradients ``{name: (B, ...)}``, and the rows that are kept."""
    touches = np.zeros(ROWS)
    for row, real in zip(tokens, mask, strict=True):
        if real:
            v = np.zeros(ROWS)
            v[row[row >= 0]] = 1
            touches += v * min(1, clip1 / max(np.linalg.norm(v), 1e-300))
    touches += sigma1 * clip1 * normals["touches"]
    order = np.argsort(-touches, kind="stable")[:most_rows]
    kept = [r for r in order if touches[r] >= threshold]
    on = np.isin(np.arange(ROWS), kept)
    total = {k: np.zeros(g.shape[1:]) for k, g in grads.items()}
    for i in np.flatnonzero(mask):
        g = {k: np.asarray(x[i], np.float64) for k, x in grads.items()}
        g["table"] = g["table"] * on[:, None]
        length = math.sqrt(sum((x**2).sum() for x in g.values()))
        for k in total:
            total[k] += g[k] * min(1, clip / length)
    out = {k: (x + sigma * clip * dense[k](on, order)) / size for k, x in total.items()}
    out["table"] = out["table"] * on[:, None]
    return out, set(kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    "threshold, most_rows",
    [(1.0, 4), (100.0, 2), (-100.0, 4), (1.5, ROWS)],
)
def test_it_is_the_algorithm(threshold, most_rows, monkeypatch):
    recorded = []

    def recording(key, tree):
        drawn = real(key, tree)
        jax.debug.callback(lambda x: recorded.append(x), drawn, ordered=True)
        return drawn

    real = noise.standard_normal_like
    monkeypatch.setattr(noise, "standard_normal_like", recording)
    z, share, c, c1 = 1.3, 0.3, 0.7, 1.6
    clip = rule(c, threshold=threshold, most_rows=most_rows, touch_share=share, l2_touch_norm=c1)
    optimizer = dpopt.privatize(**privacy_four(l2_clip_norm=clip, noise_multiplier=z))
    step = step_of(optimizer)
    params, mask = start(), np.arange(6) < 5
    state = optimizer.init(params)
    for t in range(3):
        batch = batch_of(6, seed=t)
        batch["tokens"][0] = [2, 2, -1, 5]  # a repeated row, and an index that is no row
        recorded.clear()
        mean, state = step(params, state, batch, mask)
        jax.effects_barrier()
        (touched,), few = recorded
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        names = list(params)  # leaves in order

        def table_noise(on, order, few=few, names=names):
            full = np.zeros((ROWS, WIDTH))
            for place, r in enumerate(order):
                if on[r]:
                    full[r] = few[names.index("table")][place]
            return full

        want, kept = algorithm(
            grads, batch["tokens"], mask, clip=c, clip1=c1, sigma=z / math.sqrt(1 - share), sigma1=z / math.sqrt(share),
            threshold=threshold, most_rows=most_rows, size=4, normals={"touches": touched},
            dense={"table": table_noise, "w": lambda on, order, few=few, names=names: few[names.index("w")]},
        )  # fmt: skip
        for k in params:
            np.testing.assert_allclose(mean[k], want[k], atol=2e-5)
        assert set(np.flatnonzero(np.abs(mean["table"]).sum(1))) == kept


@pytest.mark.slow
def test_with_every_row_kept_and_no_noise_it_is_an_ordinary_optimizer():
    every = rule(0.5, most_rows=ROWS, threshold=-1.0)
    four = dict(noise_multiplier=0.0)
    mine, plain = (
        dpopt.dp_adam(0.1, **privacy_four(l2_clip_norm=clip, **four)) for clip in (every, dpopt.FlatClip(0.5))
    )
    params, batch, mask = start(), batch_of(5), np.ones(5, bool)
    got, want = (step_of(o)(params, o.init(params), batch, mask)[0] for o in (mine, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


# Privacy cost.


@pytest.mark.parametrize("setting", slow_unless([(1.0, 0.1)], [(1.0, 0.1), (0.6, 0.5), (3.0, 0.9)]))
def test_the_event_is_that_of_both_queries_and_of_one_gaussian(setting):
    z, share = setting
    optimizer = dpopt.dp_sgd(0.1, **privacy_four(l2_clip_norm=rule(0.3, touch_share=share), noise_multiplier=z))
    of_gradients, of_touches = (q.multiplier(0) for q in optimizer.privacy.queries)
    assert of_gradients == pytest.approx(z / math.sqrt(1 - share)) and of_touches == pytest.approx(z / share**0.5)
    both = events.merged(optimizer.privacy.step_event())
    assert both.noise_multiplier == pytest.approx(z, rel=2e-3)  # plus rounding
    accountant = dp.pld.PLDAccountant()
    accountant.compose(dp.PoissonSampledDpEvent(0.01, both), 100)
    mine = events.compose(optimizer.privacy, dpopt.sampling.Poisson(0.01), 100)
    assert dpopt.epsilon_of_event(mine, delta=1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


def test_a_schedule_of_noise_goes_to_both():
    clip = rule(touch_share=0.36)
    optimizer = dpopt.dp_sgd(0.1, **privacy_four(l2_clip_norm=clip, noise_multiplier=lambda t: 2.4 + t))
    assert [q.multiplier(0) for q in optimizer.privacy.queries] == pytest.approx([3.0, 4.0])
    assert [q.multiplier(2) for q in optimizer.privacy.queries] == pytest.approx([5.5, 4.4 / 0.6])


@pytest.mark.parametrize("seed", slow_unless([0], range(6)))
def test_one_example_moves_touches_and_sum_by_no_more_than_their_norms(seed):
    """Over random examples, some of which touch no row, or indices out of range, or one row many times."""
    rng = np.random.default_rng(seed)
    c, c1 = float(rng.uniform(0.1, 2)), float(rng.uniform(0.3, 3))
    clip = rule(c, l2_touch_norm=c1)
    params, size = jax.tree.map(np.asarray, start(seed)), 5
    batch = batch_of(size, seed=seed)
    batch["tokens"] = rng.integers(-2, ROWS + 2, batch["tokens"].shape)
    batch["tokens"][rng.integers(size)] = rng.integers(-1, 2)
    batch["y"][rng.integers(size)] = rng.choice([1e4, np.inf, np.nan])
    zeros = [jnp.zeros(ROWS)]

    @jax.jit
    def found(mask):
        grads = dpopt.per_example_grads(loss)(params, batch, mask=mask)
        touches = grads.of_examples(clip._touches, zeros).clipped_sum(dpopt.FlatClip(c1)).sum[0]
        kept = sparse.KeptRows(sparse._is_kept({0: jnp.array([1, 4, ROWS])}, params), clip)
        total = dpopt.preconditioners.base.apply_diagonal(grads, kept.diagonal((), params)[0]).clipped_sum(clip.clip)
        return touches, total.sum

    def seen(mask):
        return jax.tree.map(lambda x: np.asarray(x, np.float64), found(mask))

    touches, total = seen(np.ones(size, bool))
    moved = []
    for i in range(size):
        others, less = seen(np.arange(size) != i)
        moved.append(np.linalg.norm(touches - others))
        assert moved[-1] <= c1 * (1 + 1e-5)
        gap = math.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (total, less)), strict=True)))
        assert gap <= c * (1 + 1e-5)
        assert not less["table"][[0, 2, 3, 5, 6, 7, 8]].any()  # rows that are not kept get no noise
    assert max(moved) > 0.9 * min(c1, 1.0)  # the bound is nearly attained


def test_the_noise_is_as_large_as_stated_where_there_is_any():
    z, share, draws = 1.0, 0.36, 4_000
    clip = rule(0.5, most_rows=4, threshold=-100.0, touch_share=share)
    optimizer = dpopt.privatize(**privacy_four(l2_clip_norm=clip, noise_multiplier=z))
    params = start()
    batch, nobody = batch_of(2), np.zeros(2, bool)

    def one(key):
        state = jax.tree.map(lambda x: x, optimizer.init(params))
        renewed = state._replace(
            core=(state.core[0], state.core[1], state.core[2].renewed(key), *state.core[3:]),
            touches=(*state.touches[:1], state.touches[1].renewed(jax.random.fold_in(key, 1)), *state.touches[2:]),
        )
        grads = dpopt.per_example_grads(loss)(params, batch, mask=nobody)
        return optimizer.run(grads, renewed, params)[0]

    drawn = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(5), draws))
    table = np.asarray(drawn["table"])
    on = (table != 0).any(-1)
    assert (on.sum(1) == 4).all()  # as many rows as may be kept, others untouched
    np.testing.assert_allclose(on.mean(0), 4 / ROWS, atol=0.05)  # without a batch, noise alone chooses
    values = table[np.broadcast_to(on[..., None], table.shape)]
    stated = z / math.sqrt(1 - share) * 0.5 / 4
    for found in (values, np.asarray(drawn["w"]).ravel()):
        off = abs(found.std() / stated - 1) * math.sqrt(2 * len(found))  # in standard errors of the standard deviation
        assert off < 5 < abs(2 / 3 - 1) * math.sqrt(2 * len(found))  # 2/3 of the noise would be detected


# Engines, later stages, runs.


@pytest.mark.slow
def test_every_engine_keeps_the_same_rows():
    optimizer = dpopt.privatize(**privacy_four(l2_clip_norm=rule(0.5), noise_multiplier=0.3))
    params, batch, mask = start(), batch_of(8), np.arange(8) < 7
    ways = [dict(engine="vmap"), dict(engine="ghost"), dict(engine="ghost", microbatch_size=2), dict(memory=1)]
    means = [step_of(optimizer, **way)(params, optimizer.init(params), batch, mask)[0] for way in ways]
    for other in means[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), means[0], other)
    assert np.asarray(means[0]["table"]).any(1).sum() in range(1, 5)


@pytest.mark.slow
def test_later_stages_know_where_there_is_noise():
    seen = []

    def update(updates, state, params=None, *, noise_stddev, **_):
        seen.append(noise_stddev)
        return updates, state

    core = dpopt.privatize(**privacy_four(l2_clip_norm=rule(0.5, touch_share=0.36)))
    optimizer = dpopt.chain(core, NoiseAware(lambda p: (), update))
    params, batch = start(), batch_of(8)
    grads = dpopt.per_example_grads(loss)(params, batch, mask=None)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    is_kept = np.asarray(updates["table"]).any(1)
    stddev = np.broadcast_to(np.asarray(seen[-1]["table"]), (ROWS, 1))[:, 0]
    np.testing.assert_allclose(stddev, np.where(is_kept, 1 / 0.8 * 0.5 / 4, 0.0), rtol=1e-6)
    np.testing.assert_allclose(seen[-1]["w"], 1 / 0.8 * 0.5 / 4, rtol=1e-6)


def plan_of(**changes):
    key = jax.random.key(7)
    builder = dpopt.Builder(num_examples=40, expected_batch_size=8, steps=8, key=key)
    return (
        builder.clip(rule(0.5, **changes))
        .noise(1.0)
        .then(dpopt.scale_by_adam_bc(gamma=1e-3), optax.scale(-0.1))
        .build()
    )


@pytest.mark.slow
def test_a_run_that_died_resumes_bit_for_bit(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    from dpopt.run.checkpoint import Checkpointer
    from dpopt.run.journal import JournalError

    class Died(Exception):
        pass

    def die(t, params):
        if t == 5:
            raise Died

    options = dict(loss=loss, params=start(), data=batch_of(40), replay=True, progress=False)
    whole = run(plan_of(), **options)
    assert whole.ledger.epsilon(delta=1e-3) > 0
    with Checkpointer(tmp_path, every=3) as c, pytest.raises(Died):
        run(plan_of(), checkpointer=c, on_step=die, **options)
    with Checkpointer(tmp_path, every=3) as c:
        again = run(plan_of(), checkpointer=c, **options)
    assert_identical(again.state[:3], whole.state[:3])
    with Checkpointer(tmp_path, every=3) as c, pytest.raises(JournalError, match="KeptRows"):
        run(plan_of(threshold=2.0), checkpointer=c, **options)  # another rule is another run


@pytest.mark.slow
def test_a_plan_calibrates_both_noises_to_its_budget():
    builder = dpopt.Builder(num_examples=400, expected_batch_size=40, steps=10, key=jax.random.key(0))
    clip = rule(0.5)
    plan = builder.clip(clip).budget(epsilon=2.0, delta=1e-4).then(optax.sgd(0.1)).build()
    assert 1.95 < plan.epsilon() <= 2.0 and len(plan.optimizer.privacy.queries) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_eight_devices_keep_the_same_rows(kind):
    found = script(ROOT / "tests" / "programs" / "sparse_run.py", kind, devices=8)
    one, eight = found["1"], found["8"]
    assert eight["moved"] == one["moved"] and 16 <= sum(one["moved"]) < 64
    np.testing.assert_allclose(eight["params"], one["params"], rtol=2e-4, atol=1e-6)


@pytest.mark.slow
def touches_of(rows, clip):
    """The rows that each example touches, ``(B, rows of the table)``."""
    return np.asarray(rows.of_examples(clip._touches, [jnp.zeros(ROWS)]).materialize()[0])


def takes_keys(with_key):
    def loss_with_key(p, example):
        batch, key = example
        return loss(p, batch) + 0 * jax.random.normal(key)

    loss_with_key.takes_key = with_key
    return loss_with_key if with_key else loss


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "kind, with_key",
    [("examples", False), ("examples", True), ("users", False), ("users", True), ("clients", False)],
)
@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(seed=st.integers(0, 10**6))
def test_a_row_touches_what_its_examples_touch(kind, with_key, seed):
    """Once each, however many of its examples touch it, and whatever else is computed."""
    rng, clip, size = np.random.default_rng(seed), rule(), 4
    groups = jax.tree.map(lambda *x: np.stack(x), *[batch_of(3, seed=seed + i, words=ROWS + 3) for i in range(size)])
    groups["tokens"] -= 2  # some indices are negative
    own = rng.random((size, 3)) < 0.6
    if kind == "examples":
        groups, own = jax.tree.map(lambda x: x[:, 0], groups), np.ones((size, 1), bool)
        made, more = dpopt.per_example_grads(takes_keys(with_key)), {}
        tokens = groups["tokens"][:, None]
        batch = (groups, jax.random.split(jax.random.key(0), size)) if with_key else groups
    elif kind == "users":
        made, tokens, more = users.per_user_grads(takes_keys(with_key)), groups["tokens"], {}
        batch = users.Users(groups, own)
        batch = (batch, jax.random.split(jax.random.key(0), size)) if with_key else batch
    else:
        made = dpopt.federated.client_deltas(loss, local_steps=3, local_learning_rate=1e-3)
        tokens, more, batch = groups["tokens"], {"example_mask": own}, groups
    want = np.zeros((size, ROWS))
    for i, j in np.argwhere(own):
        want[i, [t for t in tokens[i, j] if 0 <= t < ROWS]] = 1
    np.testing.assert_array_equal(touches_of(made(start(), batch, mask=None, **more), clip), want)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int32])
def test_rows_of_a_table_are_more_than_a_narrow_type_counts(dtype):
    table, tokens = {"table": jnp.ones((300, WIDTH)), "w": jnp.ones((WIDTH, 2))}, np.array([[5, 100]], dtype)
    grads = dpopt.per_example_grads(loss)(table, {"tokens": tokens, "y": np.ones((1, 2), np.float32)}, mask=None)
    (touched,) = grads.of_examples(rule()._touches, [jnp.zeros(300)]).materialize()
    assert np.flatnonzero(np.asarray(touched)[0]).tolist() == [5, 100]
    wide = {"tokens": np.array([[5, 200]], np.uint8), "y": np.ones((1, 2), np.float32)}
    (touched,) = (
        dpopt.per_example_grads(loss)(table, wide, mask=None)
        .of_examples(rule()._touches, [jnp.zeros(300)])
        .materialize()
    )
    assert np.flatnonzero(np.asarray(touched)[0]).tolist() == [5, 200]


@pytest.mark.slow
def test_users_and_clients_train_on_the_rows_they_touch():
    for unit in ("user", "client"):
        clip = rule(0.5, threshold=0.2)
        optimizer = dpopt.privatize(**privacy_four(l2_clip_norm=clip, noise_multiplier=0.0))
        if unit == "user":
            made, optimizer = users.per_user_grads(loss), users.user_level(optimizer)
        else:
            made = dpopt.federated.client_deltas(loss, local_steps=3, local_learning_rate=1e-3)
            optimizer = dpopt.federated.client_level(optimizer)
        params = start()
        groups = jax.tree.map(lambda *x: np.stack(x), *[batch_of(3, seed=i, words=4) for i in range(4)])
        update = jax.jit(lambda p, s, rows, made=made, by=optimizer: by.update(made(p, rows, mask=None), s, p)[0])
        updates = update(params, optimizer.init(params), groups)
        touched = sorted(set(groups["tokens"].ravel().tolist()))
        assert np.flatnonzero(np.asarray(updates["table"]).any(1)).tolist() == touched and len(touched) == 4
        assert optimizer.privacy.unit == unit


# Refusals and inspection.


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(most_rows=0), ValueError, "most_rows"),
        (dict(most_rows=1.5), TypeError, "most_rows"),
        (dict(threshold=math.nan), ValueError, "threshold"),
        (dict(touch_share=0.0), ValueError, "touch_share"),
        (dict(touch_share=1.0), ValueError, "touch_share"),
        (dict(l2_touch_norm=-1.0), ValueError, "l2_touch_norm"),
        (dict(tables=3), TypeError, "tables must be a function"),
        (dict(rows="tokens"), TypeError, "rows must be a function"),
        (dict(l2_clip_norm=-1.0), ValueError, "l2_clip_norm"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        rule(**changes)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(tables=lambda p: []), ValueError, "one or more"),
        (dict(tables=lambda p: [p["table"], p["table"]]), ValueError, "each once"),
        (dict(rows=lambda x: [x["tokens"], x["tokens"]]), ValueError, "rows of 2 tables"),
        (dict(rows=lambda x: x["y"]), TypeError, "integers"),
    ],
)
def test_tables_and_rows_have_to_fit(changes, error, message):
    optimizer = dpopt.dp_sgd(0.1, **privacy_four(l2_clip_norm=rule(**changes)))
    params = start()
    with pytest.raises(error, match=message):
        step_of(optimizer)(params, optimizer.init(params), batch_of(4), np.ones(4, bool))


def test_gradients_without_their_examples_are_refused():
    optimizer = dpopt.dp_sgd(0.1, **privacy_four(l2_clip_norm=rule()))
    params = start()
    with pytest.raises(TypeError, match="passed in already computed"):
        optimizer.update(jax.tree.map(lambda p: jnp.ones((4, *p.shape)), params), optimizer.init(params), params)


def test_correlated_noise_is_refused():
    strategy = dpopt.correlated.banded(3, steps=12)
    with pytest.raises(ValueError, match="independent noise only"):
        dpopt.dp_sgd(1.0, noise=strategy, **privacy_four(l2_clip_norm=rule()))


@pytest.mark.slow
def test_rows_that_were_not_asked_privately_are_seen(monkeypatch):
    """A planted bug: the rows to keep are computed from the batch without noise."""
    optimizer = dpopt.privatize(**privacy_four(l2_clip_norm=rule()))
    params = start()
    monkeypatch.setattr(sparse.SparseRows, "_kept", lambda self, noisy: jnp.argsort(-noisy)[:4])
    grads = dpopt.per_example_grads(loss)(params, batch_of(4), mask=None)
    optimizer.update(grads, optimizer.init(params), params)  # any choice computed from noisy counts is allowed

    def unnoised(**four):
        core = dpopt.privatize(**four)

        def run(grads, state, params, **extra):
            return grads.clipped_sum(dpopt.FlatClip(1.0)).sum, state, None

        return dpopt.PrivateOptimizer(core.init, run, core.privacy)

    monkeypatch.setattr(sparse, "privatize", unnoised)
    optimizer = dpopt.privatize(**privacy_four(l2_clip_norm=rule()))
    with pytest.raises(ValueError, match="diagonal before the clip"):
        optimizer.update(grads, optimizer.init(params), params)


def test_a_query_about_rows_that_is_not_charged_is_seen(monkeypatch):
    class Uncharged(sparse.Privacy):
        def __init__(self, queries, unit):
            super().__init__(queries[:1], unit)

    monkeypatch.setattr(sparse, "Privacy", Uncharged)
    optimizer = dpopt.privatize(**privacy_four(l2_clip_norm=rule()))
    params = start()
    grads = dpopt.per_example_grads(loss)(params, batch_of(4), mask=None)
    with pytest.raises(ValueError, match="a step releases 2 noised sums, but is accounted for with 1"):
        optimizer.update(grads, optimizer.init(params), params)
