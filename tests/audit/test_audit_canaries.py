"""Canaries are what they say in every kind of run, and are in the data exactly where their coins put them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import dot_loss, mlp_batch, mlp_loss, mlp_params, random_tree, slow_unless

pytest.importorskip("scipy")

import dpopt
from dpopt import audit, federated
from dpopt.audit.directions import OneHot
from dpopt.run import checkpoint, journal
from dpopt.samplers import truncated

stats = pytest.importorskip("scipy.stats")


class Example(NamedTuple):
    x: object
    y: object


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def canaries_of(size, count):
    return audit.gradient_canaries(jnp.zeros(size), count, length=100.0, seed=0)


def directions_of(canaries, params):
    """All directions, ``(m, d)``, by differentiating."""
    gradient = jax.jit(jax.grad(canaries.along))
    return np.stack([flat(gradient(params, i)) for i in range(len(canaries))])


@pytest.mark.parametrize("seed", slow_unless(range(3), range(8)))
def test_one_hot_canaries_have_a_coordinate_each(seed):
    params = random_tree(seed)
    total, rng = flat(params).size, np.random.default_rng(seed)
    count = int(rng.integers(1, total + 1))
    found = directions_of(audit.gradient_canaries(params, count, seed=seed, length=3.0), params)
    np.testing.assert_array_equal(found @ found.T, 9 * np.eye(count))
    assert np.all(np.count_nonzero(found, axis=1) == 1)
    with pytest.raises(ValueError, match="need as many coordinates"):
        audit.gradient_canaries(params, total + 1, length=100.0, seed=seed)


def test_the_least_used_coordinates_are_taken():
    params, batch = mlp_params(), mlp_batch(6)
    # A feature that nobody has: four weights without a gradient.
    batch["x"] = np.where(np.arange(3) == 1, 0, batch["x"])
    usage = audit.coordinate_usage(mlp_loss, params, batch)
    rows = jax.jit(jax.vmap(jax.grad(mlp_loss), (None, 0)))(params, batch)
    np.testing.assert_allclose(flat(usage), flat(jax.tree.map(lambda g: np.sum(np.square(g), axis=0), rows)), rtol=1e-5)
    found = directions_of(audit.gradient_canaries(params, 4, length=100.0, seed=0, usage=usage), params)
    unused = {"hidden": {"w": np.zeros((3, 4)), "b": np.zeros(4)}, "out": {"w": np.zeros((4, 2)), "b": np.zeros(2)}}
    unused["hidden"]["w"][1] = 100
    np.testing.assert_array_equal(found.sum(axis=0), flat(unused))


def test_random_canaries_are_long_and_nearly_orthogonal():
    params = {"a": np.zeros((30, 40), np.float32), "b": np.zeros(800, np.float32)}
    found = directions_of(audit.gradient_canaries(params, 10, seed=0, kind="random", length=5.0), params)
    products = found @ found.T / 25
    np.testing.assert_allclose(np.diag(products), 1, rtol=1e-5)
    assert np.abs(products - np.diag(np.diag(products))).max() < 0.12
    assert np.all(np.linalg.norm(found[:, :1200], axis=1) > 2)  # in every leaf, so that groups are filled


BATCHES = {
    "dict": lambda x, y: {"x": x, "y": y},
    "NamedTuple": Example,
    "tuple": lambda x, y: (x, y),
}


def loss_of(kind):
    def loss_fn(params, example):
        x, y = example.values() if kind == "dict" else example
        return mlp_loss(params, {"x": x, "y": y})

    return loss_fn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("container", "kind", "engine"),
    [
        ("dict", "one_hot", "ghost"),
        ("NamedTuple", "random", "ghost"),
        ("tuple", "one_hot", "vmap"),
        ("dict", "random", "vmap"),
    ],
)
def test_rows_have_their_own_gradient_or_the_canarys(container, kind, engine):
    params, batch = mlp_params(), mlp_batch(6)
    data, loss_fn = BATCHES[container](np.asarray(batch["x"]), np.asarray(batch["y"])), loss_of(container)
    canaries = audit.gradient_canaries(params, 5, seed=1, kind=kind, length=100.0)
    planted = audit.plant(canaries, loss_fn, data, 6, seed=0)
    rows = planted.data(np.array([3, 6, 0, 10]))
    plain = jax.device_get(jax.jit(jax.vmap(jax.grad(mlp_loss), (None, 0)))(params, batch))
    own = [flat(jax.tree.map(lambda g, i=i: g[i], plain)) for i in range(6)]
    expected = np.stack([own[3], directions_of(canaries, params)[0], own[0], directions_of(canaries, params)[4]])

    @jax.jit
    def found_and_clipped(params, rows):
        promise = dpopt.per_example_grads(planted.loss_fn, engine=engine)(params, rows, mask=None)
        return promise.materialize(), promise.clipped_sum(dpopt.FlatClip(0.5)).sum

    found, clipped = jax.device_get(found_and_clipped(params, rows))
    found = np.stack([flat(jax.tree.map(lambda g, i=i: g[i], found)) for i in range(4)])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    norms = np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(flat(clipped), (expected * np.minimum(1, 0.5 / norms)).sum(axis=0), atol=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["one_hot", "random"])
def test_scores_are_inner_products_with_the_sum_of_updates(kind):
    params = mlp_params()
    after = jax.tree.map(lambda p: p + 0.1 * np.cos(np.arange(p.size, dtype=p.dtype)).reshape(p.shape), params)
    canaries = audit.gradient_canaries(params, 7, seed=0, kind=kind, length=4.0)
    planted = audit.plant(canaries, mlp_loss, mlp_batch(6), 6, seed=0)
    expected = directions_of(canaries, params) @ (flat(params) - flat(after))
    np.testing.assert_allclose(planted.scores(params, after), expected, rtol=1e-4, atol=1e-5)


SAMPLERS = {
    "poisson": lambda n: dpopt.PoissonSampler(n, 12, seed=3),
    "fixed size": lambda n: dpopt.FixedSizeSampler(n, 12, seed=3),
    "cyclic poisson": lambda n: dpopt.samplers.parts.CyclicPoissonSampler(n, 6, parts=2, seed=3),
    "epochs": lambda n: dpopt.samplers.parts.EpochSampler(n, 12, seed=3),
    "balls in bins": lambda n: dpopt.samplers.parts.BallsInBinsSampler(n, 12, seed=3),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_canaries_that_are_out_are_never_drawn_and_nobody_else_is_touched(name):
    planted = audit.plant(
        audit.gradient_canaries(jnp.zeros(30), 20, length=100.0, seed=0), dot_loss, np.ones((40, 30)), 40, seed=5
    )
    out = 40 + np.flatnonzero(~planted.included)
    assert 0 < len(out) < 20
    for sampler in (SAMPLERS[name](60), SAMPLERS[name](60).reseeded(9)):
        remaining = planted.sampler(sampler)
        assert isinstance(remaining, type(sampler)) and remaining.scheme == sampler.scheme
        seen = []
        for step in range(40):
            kept, all_drawn = remaining.drawn(step), sampler.drawn(step)
            np.testing.assert_array_equal(kept, all_drawn[~np.isin(all_drawn, out)])
            indices, mask = remaining.batch(step)
            np.testing.assert_array_equal(indices[mask], kept)
            seen.extend(kept)
        assert not set(seen) & set(out.tolist()) and set(seen) & (set(range(40, 60)) - set(out.tolist()))
        np.testing.assert_array_equal(remaining.reseeded(4).drawn(1), planted.sampler(sampler.reseeded(4)).drawn(1))
        assert remaining.batches(0, 3).mask.sum() == sum(len(remaining.drawn(t)) for t in range(3))
    with pytest.raises(ValueError, match=r"num_examples=planted\.num_examples"):
        planted.sampler(SAMPLERS[name](48))


def planted_plan(planted, **builder):
    settings = dict(expected_batch_size=10, steps=6, key=dpopt.secure_key(), pad_to=32) | builder
    plan = (
        dpopt.Builder(num_examples=planted.num_examples, **settings).clip(1.0).noise(0.0).then(optax.sgd(1.0)).build()
    )
    return plan, planted.plan(plan)


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
def test_a_plan_is_the_same_but_for_whom_it_draws(sampling):
    planted = audit.plant(
        audit.gradient_canaries(jnp.zeros(30), 20, length=100.0, seed=0), dot_loss, np.ones((40, 30)), 40, seed=5
    )
    plan, audited = planted_plan(planted, sampling=sampling)
    assert audited.event == plan.event and str(audited) == str(plan) and audited.journal is plan.journal
    assert audited.epsilon(delta=1e-3) == plan.epsilon(delta=1e-3)


@pytest.mark.parametrize("kind", slow_unless({"random"}, ["one_hot", "random"]))
def test_without_noise_training_gives_every_coin_away(kind):
    params = jnp.zeros(4_000)  # random directions hardly overlap
    canaries = audit.gradient_canaries(params, 12, length=100.0, seed=0, kind=kind)
    planted = audit.plant(canaries, dot_loss, np.zeros((40, 4_000), np.float32), 40, seed=1)
    _, plan = planted_plan(planted, steps=60)
    result = plan.run(planted.loss_fn, params, planted.data)
    scores = np.asarray(planted.scores(params, result.params))
    assert 0 < planted.included.sum() < 12
    assert scores[planted.included].min() > 2 * np.abs(scores[~planted.included]).max()


def test_coins_are_fair_and_differ():
    canaries = canaries_of(5_000, 5_000)
    a, b = (audit.plant(canaries, dot_loss, np.ones((4, 5_000)), 4).included for _ in range(2))
    for coins in (a, b, a != b):
        assert abs(coins.mean() - 0.5) < 0.035  # five standard deviations


@pytest.mark.parametrize("how", ["arrays", "source", "function"])
def test_any_kind_of_data(how):
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    data = {"arrays": x, "source": list(x), "function": lambda rows: x[rows]}[how]
    if how == "source":

        class Source:
            def __len__(self):
                return 6

            def __getitem__(self, i):
                return x[i]

        data = Source()
    planted = audit.plant(x[:3] + 100, dot_loss, data, 6, seed=0)
    rows = planted.data(np.array([5, 6, 8, 0]))
    np.testing.assert_array_equal(rows.example, [x[5], x[0] + 100, x[2] + 100, x[0]])
    np.testing.assert_array_equal(rows.canary, [-1, 0, 2, -1])
    before, after = jnp.zeros(2), jnp.array([1.0, -1.0])
    np.testing.assert_allclose(planted.scores(before, after), [1.0, 1.0, 1.0])


@pytest.mark.slow
def test_losses_that_draw_random_numbers_get_their_keys():
    def loss_fn(w, row):
        x, key = row
        return jnp.sum(w * x * jax.random.bernoulli(key, 0.5, x.shape))

    planted = audit.plant(canaries_of(30, 8), loss_fn, np.ones((40, 30)), 40, seed=5)
    _, plan = planted_plan(planted)
    result = plan.run(planted.loss_fn, jnp.zeros(30), planted.data, example_key=jax.random.key(1))
    assert np.isfinite(result.params).all()

    flax_like = lambda w, row: loss_fn(w, row)  # noqa: E731
    flax_like.takes_key = True
    for canaries in (canaries_of(30, 8), np.ones((8, 30))):
        planted = audit.plant(canaries, flax_like, np.ones((40, 30)), 40, seed=5)
        _, plan = planted_plan(planted)
        assert planted.loss_fn.takes_key
        assert np.isfinite(plan.run(planted.loss_fn, jnp.zeros(30), planted.data).params).all()


def test_a_loss_may_return_more():
    loss_fn = lambda w, x: (jnp.sum(w * x), {"x": x})  # noqa: E731
    planted = audit.plant(canaries_of(3, 2), loss_fn, np.ones((4, 3)), 4, seed=0)
    opt = dpopt.dp_sgd(1.0, l2_clip_norm=1.0, noise_multiplier=0.0, expected_batch_size=4, key=jax.random.key(0))
    step = jax.jit(dpopt.make_train_step(planted.loss_fn, opt, has_aux=True))
    *_, aux = step(jnp.zeros(3), opt.init(jnp.zeros(3)), planted.data(np.arange(6)), None)
    assert aux["x"].shape == (6, 3)


@pytest.mark.slow
def test_canaries_can_be_clients():
    rng = np.random.default_rng(0)
    data = rng.normal(size=(10, 4, 6)).astype(np.float32)
    example_mask = np.arange(4) < rng.integers(1, 5, size=(10, 1))
    loss_fn = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)  # noqa: E731
    canaries = canaries_of(6, 3)
    planted = audit.plant(canaries, loss_fn, federated.Clients(data, example_mask), 10, seed=0)
    deltas = federated.client_deltas(planted.loss_fn, local_steps=2, local_learning_rate=0.1)
    rows = planted.data(np.array([2, 11, 5]))
    found = deltas(jnp.zeros(6), rows, mask=None).materialize()
    theirs = federated.client_deltas(loss_fn, local_steps=2, local_learning_rate=0.1)
    plain = theirs(jnp.zeros(6), federated.Clients(data, example_mask), mask=None).materialize()
    np.testing.assert_allclose(found[jnp.array([0, 2])], plain[jnp.array([2, 5])], rtol=1e-6)
    np.testing.assert_allclose(found[1], 0.2 * directions_of(canaries, jnp.zeros(6))[1], rtol=1e-6)
    _, plan = planted_plan(planted, unit="client", expected_batch_size=5)
    result = plan.run(deltas, jnp.zeros(6), planted.data)
    assert planted.scores(jnp.zeros(6), result.params).shape == (3,)

    given = federated.Clients(data[:2] + 5, example_mask[:2])
    planted = audit.plant(given, loss_fn, federated.Clients(data, example_mask), 10, seed=0)
    fall = 0.5 * np.sum((data[:2] + 5) ** 2 - (data[:2] + 4) ** 2, axis=2)
    expected = np.sum(fall * example_mask[:2], axis=1) / example_mask[:2].sum(axis=1)
    np.testing.assert_allclose(planted.scores(jnp.zeros(6), jnp.ones(6)), expected, rtol=1e-5)


# Examples that are learnt by heart


@pytest.mark.parametrize("container", BATCHES)
def test_relabelled_examples_have_every_class_but_their_own(container):
    own = np.repeat(np.arange(4, dtype=np.int8), 200)
    label = 1 if container == "tuple" else "y"
    made = audit.relabelled(BATCHES[container](np.ones((800, 2)), own), label, num_classes=4, seed=0)
    _, wrong = jax.tree.leaves(made)
    assert jax.tree.structure(made) == jax.tree.structure(BATCHES[container](0, 0)) and wrong.dtype == np.int8
    counts = np.array([np.bincount(wrong[own == c], minlength=4) for c in range(4)])
    assert np.all(np.diag(counts) == 0) and counts[~np.eye(4, dtype=bool)].min() > 40


def test_labels_that_are_not_found_or_not_labels_are_refused():
    batch = {"x": np.ones((3, 2)), "y": np.arange(3)}
    with pytest.raises(ValueError, match=r"0 leaves are called 'label'.*\['x'\]"):
        audit.relabelled(batch, "label", num_classes=3, seed=0)
    with pytest.raises(ValueError, match="2 leaves are called 'y'"):
        audit.relabelled({"a": batch, "b": batch}, "y", num_classes=3, seed=0)
    with pytest.raises(ValueError, match="integers from 0 to 1"):
        audit.relabelled(batch, "y", num_classes=2, seed=0)
    with pytest.raises(ValueError, match="at least 2"):
        audit.relabelled(batch, "y", num_classes=1, seed=0)


def test_random_examples_look_like_the_data_from_afar():
    rng = np.random.default_rng(0)
    x = (3 + 2 * rng.normal(size=(400, 5))).astype(jnp.bfloat16)
    made = audit.random_examples(Example(x, rng.choice([2, 7], 400)), 300, seed=0)
    assert made.x.dtype == jnp.bfloat16 and made.x.shape == (300, 5) and set(made.y) == {2, 7}
    values = made.x.astype(np.float64)
    assert abs(values.mean() - 3) < 0.3 and abs(values.std() - 2) < 0.2


def test_bad_arguments_are_refused():
    params, ones = jnp.zeros(30), np.ones((40, 30))
    with pytest.raises(ValueError, match="kind"):
        audit.gradient_canaries(params, 3, length=100.0, seed=0, kind="orthogonal")
    with pytest.raises(ValueError, match="usage chooses coordinates"):
        audit.gradient_canaries(params, 3, length=100.0, seed=0, kind="random", usage=params)
    with pytest.raises(ValueError, match="usage must be like params"):
        audit.gradient_canaries(params, 3, length=100.0, seed=0, usage=jnp.zeros(2))
    with pytest.raises(ValueError, match="count"):
        audit.gradient_canaries(params, 0, length=100.0, seed=0)
    with pytest.raises(ValueError, match="length"):
        audit.gradient_canaries(params, 3, seed=0, length=0.0)
    with pytest.raises(TypeError, match="loss_fn"):
        audit.plant(canaries_of(30, 3), None, ones, 40)
    with pytest.raises(ValueError, match="40 rows"):
        audit.plant(canaries_of(30, 3), dot_loss, ones[:39], 40)
    with pytest.raises(ValueError, match=r"canaries have shape \(29,\)"):
        audit.plant(np.ones((3, 29)), dot_loss, ones, 40, seed=0).data(np.array([1]))
    assert isinstance(canaries_of(30, 3), OneHot)


@pytest.mark.parametrize("engine", slow_unless({"ghost"}, ["vmap", "ghost"]))
def test_a_bad_row_of_the_data_does_not_silence_canaries(engine):
    """A canary stands in a row of the data, whose own gradient may not be finite: only that one's may be lost."""
    data = np.random.default_rng(0).normal(size=(10, 30)).astype(np.float32)
    data[0] = 0

    def norm(w, x):  # has no gradient at 0
        return jnp.sqrt(jnp.sum((w * x) ** 2))

    planted = audit.plant(canaries_of(30, 20), norm, data, 10, seed=0)
    rows = planted.data(np.arange(10, 30))

    @jax.jit
    def norms(params, rows):
        grads = dpopt.per_example_grads(planted.loss_fn, engine=engine)(params, rows, mask=None)
        grads.clipped_sum(dpopt.FlatClip(1.0))
        return grads.sensitive.norms

    assert int(np.isfinite(norms(np.ones(30, np.float32), rows)).sum()) >= 18


def test_who_is_out_takes_nobodys_place_in_a_cut():
    """Truncated samples: as large, and as likely to hold a row, as those of the data without it."""
    planted = audit.plant(canaries_of(400, 100), lambda w, x: w @ x, np.ones((100, 400)), 100, seed=0)
    sampler = truncated.TruncatedPoissonSampler(200, 60, max_batch_size=60, seed=1)
    present, q, steps = 100 + int(planted.included.sum()), 60 / 200, 2_000
    remaining = planted.sampler(sampler)
    sizes = np.array([remaining.batch(t).mask.sum() for t in range(steps)])
    numbers = np.arange(present + 1)
    want = stats.binom.pmf(numbers, present, q) @ np.minimum(numbers, 60)
    assert abs(sizes.mean() - want) < 5 * sizes.std() / np.sqrt(steps) and sizes.max() == 60
    seen = np.bincount(np.concatenate([remaining.drawn(t) for t in range(steps)]), minlength=200)
    assert not seen[100:][~planted.included].any()
    there = np.append(seen[:100], seen[100:][planted.included])
    assert stats.chisquare(there).pvalue > 1e-4


@pytest.mark.slow
def test_an_audit_is_not_resumed_under_other_coins(tmp_path):
    def run(seed, steps):
        planted = audit.plant(canaries_of(8, 8), lambda w, x: w @ x, np.ones((16, 8)), 16, seed=seed)
        builder = dpopt.Builder(num_examples=24, expected_batch_size=8, steps=4, key=jax.random.key(0))
        plan = planted.plan(builder.clip(1.0).noise(1.0).then(optax.sgd(0.1)).build())
        with checkpoint.Checkpointer(tmp_path, every=1) as checkpointer:
            return plan.run(planted.loss_fn, jnp.zeros(8), planted.data, steps=steps, checkpointer=checkpointer)

    run(1, 2)
    with pytest.raises(journal.JournalError, match="coins"):
        run(2, 4)
    assert run(1, 4).ledger.steps == 4
