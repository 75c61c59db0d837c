"""Federated training: local runs against NumPy, the sign, padding, the unit of privacy, device noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import distance, dot_loss, enable_x64, mlp_batch, mlp_loss, mlp_params, paid, privacy_four, slow_unless

import dpopt
from dpopt import federated
from dpopt.federated import client_deltas, client_level, device_noise


def regression_loss(w, example):
    return 0.5 * (example["x"] @ w["w"] + w["b"] - example["y"]) ** 2


def clients(num=5, examples=6, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(num, examples, 3)), "y": rng.normal(size=(num, examples))}


START = {"w": np.array([0.5, -1.0, 2.0]), "b": np.array(0.3)}


def numpy_delta(x, y, *, steps, lr, scale, batch):
    """The run of one client on its own examples only, in float64."""
    w, b = START["w"].copy(), float(START["b"])
    n = len(y)
    for k in range(steps):
        rows = np.arange(n) if batch is None or batch >= n else [(k * batch + j) % n for j in range(batch)]
        error = x[rows] @ w + b - y[rows]
        w -= lr * scale["w"] * (error @ x[rows]) / len(rows)
        b -= lr * scale["b"] * np.mean(error)
    return {"w": w - START["w"], "b": b - START["b"]}


def as_jax(tree):
    return jax.tree.map(jnp.asarray, tree)


@pytest.mark.parametrize("batch", slow_unless({None, 2, 100}, [None, 1, 2, 4, 6, 100]))
@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.one_in(6)
def test_local_runs_of_padded_clients(x64, batch, microbatch_size):
    data = clients()
    sizes = [6, 3, 1, 5, 4]
    mask = np.zeros((5, 6), bool)
    for i, n in enumerate(sizes):  # own examples are anywhere, not only at the front
        mask[i, np.random.default_rng(i).choice(6, n, replace=False)] = True
    padded = {k: np.where(mask if v.ndim == 2 else mask[..., None], v, np.nan) for k, v in data.items()}
    scale = {"w": np.array([1.0, 0.1, 3.0]), "b": 0.5}
    deltas = client_deltas(
        regression_loss, local_steps=5, local_learning_rate=0.1, scale=as_jax(scale), local_batch_size=batch,
        microbatch_size=microbatch_size,
    )  # fmt: skip

    @jax.jit
    def computed(params, batch):
        promise = deltas(params, batch, example_mask=mask, mask=None)
        return promise.materialize(), promise.clipped_sum(dpopt.FlatClip(jnp.inf)).sum

    rows, total = computed(START, padded)
    expected = [
        numpy_delta(data["x"][i][mask[i]], data["y"][i][mask[i]], steps=5, lr=0.1, scale=scale, batch=batch)
        for i in range(5)
    ]
    for i, e in enumerate(expected):
        np.testing.assert_allclose(np.asarray(rows["w"])[i], -e["w"], rtol=1e-10)
        np.testing.assert_allclose(np.asarray(rows["b"])[i], -e["b"], rtol=1e-10)
    np.testing.assert_allclose(total["w"], -sum(e["w"] for e in expected), rtol=1e-10)


@pytest.mark.slow
def test_learning_rate_one_adds_the_mean_delta(x64):
    """Algorithm 3's server: w <- w + mean of the clipped deltas."""
    data = clients()
    ones = {"w": np.ones(3), "b": 1.0}
    found = [
        numpy_delta(x, y, steps=3, lr=0.2, scale=ones, batch=None) for x, y in zip(data["x"], data["y"], strict=True)
    ]
    norms = [np.sqrt(np.sum(d["w"] ** 2) + d["b"] ** 2) for d in found]
    clip = float(np.median(norms))  # some are clipped, some are not
    opt = client_level(
        dpopt.dp_sgd(1.0, **privacy_four(l2_clip_norm=clip, noise_multiplier=0.0, expected_batch_size=4))
    )
    params = as_jax(START)
    promise = client_deltas(regression_loss, local_steps=3, local_learning_rate=0.2)(params, as_jax(data), mask=None)
    updates, _ = opt.update(promise, opt.init(params), params)
    expected = sum(d["w"] * min(1, clip / n) for d, n in zip(found, norms, strict=True)) / 4
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-10)
    np.testing.assert_allclose(promise.sensitive.norms, norms, rtol=1e-10)
    assert 0 < int(promise.sensitive.was_clipped.sum()) < 5


def test_one_local_step_is_dp_sgd_on_client_means():
    """With local_steps=1 and learning rate 1, row i is the mean gradient of the client, and so the step is the same."""
    params = mlp_params()
    data = jax.tree.map(lambda x: x.reshape((3, 4) + x.shape[1:]), mlp_batch(12))
    mean_loss = lambda p, client: jnp.mean(jax.vmap(mlp_loss, (None, 0))(p, client))  # noqa: E731
    opts = [dpopt.dp_sgd(0.7, momentum=0.9, **privacy_four(expected_batch_size=3))]
    opts.insert(0, client_level(*opts))
    promises = (
        client_deltas(mlp_loss, local_steps=1, local_learning_rate=1.0),
        dpopt.per_example_grads(mean_loss, engine="vmap"),
    )
    ends = []
    for opt, promise in zip(opts, promises, strict=True):

        @jax.jit
        def step(p, state, opt=opt, promise=promise):
            updates, state = opt.update(promise(p, data, mask=None), state, p)
            return optax.apply_updates(p, updates), state

        p, state = params, opt.init(params)
        for _ in range(3):
            p, state = step(p, state)
        ends.append(p)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *ends)


def test_server_momentum_accumulates_changes():
    params = jnp.zeros(2)
    grads = client_deltas(dot_loss, local_steps=1, local_learning_rate=1.0)
    four = privacy_four(noise_multiplier=0.0, l2_clip_norm=10.0, expected_batch_size=1)
    opt = client_level(dpopt.dp_sgd(1.0, momentum=0.9, **four))
    state = opt.init(params)
    for expected in (1.0, 1.9, 2.71):
        updates, state = opt.update(grads(params, -jnp.ones((1, 3, 2)), mask=None), state, params)
        np.testing.assert_allclose(updates, expected, rtol=1e-6)


@pytest.mark.slow
def test_masked_empty_and_broken_clients_contribute_zero():
    data = as_jax(jax.tree.map(lambda x: x.astype(np.float32), clients(num=4)))
    data["x"] = data["x"].at[1].set(jnp.nan)  # padding of the round
    data["x"] = data["x"].at[2].set(jnp.nan)  # has no examples of its own
    data["y"] = data["y"].at[3, 0].set(jnp.inf)  # a broken client
    deltas = client_deltas(regression_loss, local_steps=2, local_learning_rate=0.1)
    promise = deltas(
        as_jax(jax.tree.map(np.float32, START)),
        data,
        mask=jnp.array([True, False, True, True]),
        example_mask=jnp.ones((4, 6), bool).at[2].set(False),
    )
    alone = deltas(as_jax(jax.tree.map(np.float32, START)), jax.tree.map(lambda x: x[:1], data), mask=None)
    clip = dpopt.FlatClip(1.0)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        promise.clipped_sum(clip).sum,
        alone.clipped_sum(clip).sum,
    )
    assert promise.sensitive.is_example.tolist() == [True, False, True, True]
    assert not promise.sensitive.is_finite[3]


def test_empty_round_moves_by_noise_alone():
    params = jnp.zeros(3)
    opt = client_level(dpopt.dp_sgd(1.0, **privacy_four()))
    promise = client_deltas(dot_loss, local_steps=1, local_learning_rate=1.0)(params, jnp.zeros((0, 2, 3)), mask=None)
    updates, _ = opt.update(promise, opt.init(params), params)
    assert np.all(np.asarray(updates) != 0)


def test_losses_are_the_clients_at_the_start():
    data = as_jax(jax.tree.map(np.float32, clients()))
    params = as_jax(jax.tree.map(np.float32, START))
    promise = client_deltas(regression_loss, local_steps=4, local_learning_rate=0.1)(params, data, mask=None)
    losses = promise.clipped_sum(dpopt.FlatClip(1.0)).sensitive.losses
    expected = jax.vmap(jax.vmap(regression_loss, (None, 0)), (None, 0))(params, data).mean(axis=1)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_sensitivity_to_one_client():
    """Adding a client moves the clipped sum by at most C, whatever its data."""
    data = as_jax(jax.tree.map(np.float32, clients(num=3)))
    params = as_jax(jax.tree.map(np.float32, START))
    data["y"] = data["y"].at[2].set(1e4)
    deltas = client_deltas(regression_loss, local_steps=3, local_learning_rate=0.1)
    clip = dpopt.FlatClip(0.25)
    with_it = deltas(params, data, mask=None).clipped_sum(clip).sum
    without = deltas(params, data, mask=jnp.array([True, True, False])).clipped_sum(clip).sum
    assert distance(with_it, without) == pytest.approx(0.25, rel=1e-5)


def test_bfloat16_models_run_locally_in_float32():
    """Steps too small for bfloat16 still count, and the loss gets bfloat16 weights."""
    seen = []

    def loss(w, x):
        seen.append(w.dtype)
        return jnp.sum(w.astype(jnp.float32) * x)

    params = jnp.ones(2, jnp.bfloat16)
    deltas = client_deltas(loss, local_steps=10, local_learning_rate=1e-4)
    rows = deltas(params, jnp.ones((1, 1, 2)), mask=None).materialize()
    assert set(map(str, seen)) == {"bfloat16"} and rows.dtype == jnp.float32
    np.testing.assert_allclose(rows, 1e-3, rtol=1e-2)


def test_jit_scan_and_train_step():
    data = as_jax(jax.tree.map(np.float32, clients()))
    params = as_jax(jax.tree.map(np.float32, START))
    opt = client_level(dpopt.dp_adam(0.05, **privacy_four(noise_multiplier=0.01, expected_batch_size=5)))
    step = dpopt.run.training.TrainStep(opt, client_deltas(regression_loss, local_steps=3, local_learning_rate=0.1))

    @jax.jit
    def train(params):
        def round_(carry, _):
            params, state, metrics = step(*carry, data, mask=None)
            return (params, state), metrics.loss

        return jax.lax.scan(round_, (params, opt.init(params)), length=60)[1]

    losses = train(params)
    assert losses[-1] < 0.5 * losses[0]


# --- privacy ----------------------------------------------------------------------------------------------------------


def test_unit_is_the_client_through_further_chaining():
    server = client_level(dpopt.privatize(**privacy_four(noise_multiplier=2.0)))
    opt = dpopt.chain(server, optax.sgd(1.0))
    assert opt.privacy.unit == "client"
    assert opt.privacy.step_event() == dpopt.dp_sgd(1.0, **privacy_four(noise_multiplier=2.0)).privacy.step_event()
    assert dpopt.privacy_of(opt).unit == "client"


def test_client_level_refuses_single_examples():
    opt = client_level(dpopt.dp_sgd(1.0, **privacy_four()))
    params = jnp.zeros(2)
    promise = dpopt.per_example_grads(dot_loss)(params, jnp.ones((3, 2)), mask=None)
    with pytest.raises(TypeError, match="gradients of single examples"):
        opt.update(promise, opt.init(params), params)
    with pytest.raises(TypeError, match="not marked as clients"):
        opt.update(jnp.ones((3, 2)), opt.init(params), params)
    rows = federated.client_rows(jnp.ones((3, 2)), mask=jnp.array([True, True, False]))
    updates, _ = opt.update(rows, opt.init(params), params)
    stacked, _ = dpopt.dp_sgd(1.0, **privacy_four()).update(jnp.ones((2, 2)), opt.init(params), params)
    np.testing.assert_array_equal(updates, stacked)


def test_an_optimizer_that_states_another_unit_than_the_rows_warns():
    """dp_sgd on changes of clients states epsilon for one example, although it bounds one client."""
    opt, params = dpopt.dp_sgd(1.0, **privacy_four()), jnp.zeros(2)
    promise = client_deltas(dot_loss, local_steps=1, local_learning_rate=1.0)(params, jnp.ones((3, 1, 2)), mask=None)
    with pytest.warns(FutureWarning, match="client_level"):
        opt.update(promise, opt.init(params), params)


def test_client_level_keeps_what_the_chain_knows_about_noise():
    sgd = client_level(dpopt.dp_sgd(1.0, **privacy_four()))
    with pytest.raises(ValueError, match="needs the noise"):
        dpopt.chain(sgd, dpopt.chain.__globals__["NoiseAware"](lambda p: (), lambda u, s, p=None, **_: (u, s)))
    with pytest.raises(TypeError, match="client_level needs an optimizer made by dpopt"):
        client_level(optax.sgd(0.1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("b", [1, 16])
def test_device_noise_is_drawn_and_accounted_as_the_sum_of_shares(b):
    sigma, clip, d = 0.5, 2.0, 20_000
    four = privacy_four(l2_clip_norm=clip, noise_multiplier=device_noise(sigma, num_devices=b), expected_batch_size=b)
    opt = client_level(dpopt.dp_sgd(1.0, **four))
    assert opt.privacy.step_event().noise_multiplier == pytest.approx(paid(np.sqrt(b) * sigma))
    params = jnp.zeros(d)
    deltas = client_deltas(dot_loss, local_steps=1, local_learning_rate=1.0)
    update = jax.jit(lambda batch: opt.update(deltas(params, batch, mask=None), opt.init(params), params)[0])
    updates = np.asarray(update(np.zeros((b, 1, d), np.float32)))
    shares = sigma * clip * np.random.default_rng(0).normal(size=(b, d))
    # Relative standard error of either deviation: 1 / sqrt(2 d) = 0.5%.
    assert np.std(updates) == pytest.approx(np.std(shares.sum(axis=0) / b), rel=0.03)


def test_device_noise_follows_a_schedule():
    opt = dpopt.dp_sgd(1.0, **privacy_four(noise_multiplier=device_noise(lambda t: 1.0 + t, num_devices=4)))
    assert [opt.privacy.step_event(t).noise_multiplier for t in (0, 1)] == [paid(2.0), paid(4.0)]


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, named",
    [
        ({"local_steps": 0}, "local_steps"),
        ({"local_learning_rate": 0.0}, "local_learning_rate"),
        ({"local_batch_size": 0}, "local_batch_size"),
        ({"microbatch_size": 0}, "microbatch_size"),
        ({"scale": {"w": -1.0}}, "scale"),
        ({"scale": {"w": 0.0}}, "scale"),
    ],
)
def test_bad_arguments_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        client_deltas(dot_loss, **{"local_steps": 1, "local_learning_rate": 1.0, **options})


@pytest.mark.parametrize(
    "batch, keywords, message",
    [
        (jnp.zeros(3), {}, "leading axes"),
        ({"a": jnp.zeros((3, 2, 2)), "b": jnp.zeros((3, 4, 2))}, {}, "disagree"),
        ({}, {}, "no arrays"),
        (jnp.zeros((3, 0, 2)), {}, "at least one"),
        (jnp.zeros((3, 4, 2)), {"mask": jnp.ones(4, bool)}, "mask"),
        (jnp.zeros((3, 4, 2)), {"example_mask": jnp.ones((4, 3), bool)}, "example_mask"),
    ],
)
def test_batches_that_do_not_fit(batch, keywords, message):
    deltas = client_deltas(dot_loss, local_steps=1, local_learning_rate=1.0)
    with pytest.raises(ValueError, match=message):
        deltas(jnp.zeros(2), batch, **{"mask": None, **keywords})


def test_further_bad_input():
    deltas = client_deltas(dot_loss, local_steps=1, local_learning_rate=1.0)
    with pytest.raises(TypeError, match="example_mask must be boolean"):
        deltas(jnp.zeros(2), jnp.zeros((3, 4, 2)), example_mask=jnp.ones((3, 4)), mask=None)
    with pytest.raises(ValueError, match="real scalar"):
        client_deltas(lambda w, x: w * x, local_steps=1, local_learning_rate=1.0)(
            jnp.zeros(2), jnp.zeros((3, 4, 2)), mask=None
        )
    with pytest.raises(TypeError, match="loss_fn"):
        client_deltas(3, local_steps=1, local_learning_rate=1.0)
    with pytest.raises(ValueError, match="scale"):
        client_deltas(dot_loss, local_steps=1, local_learning_rate=1.0, scale={"v": 1.0})(
            {"w": jnp.zeros(2)}, {"w": jnp.zeros((3, 4, 2))}, mask=None
        )
    with pytest.raises(ValueError, match="num_devices"):
        device_noise(1.0, num_devices=0)
    with pytest.raises(ValueError, match="noise_multiplier"):
        device_noise(-1.0, num_devices=2)


def test_module_is_reachable_as_promised():
    assert federated.client_deltas is client_deltas
    with enable_x64(False):
        assert (
            client_deltas(dot_loss, local_steps=1, local_learning_rate=1.0)(
                jnp.zeros(2), jnp.ones((1, 1, 2)), mask=None
            ).unit
            == "client"
        )


def client_plan(key=0, **more):
    builder = dpopt.Builder(
        num_examples=20, expected_batch_size=6, steps=4, key=jax.random.key(key), pad_to=16, unit="client", **more
    )
    return builder.clip(0.5).noise(1.0).then(optax.sgd(1.0, momentum=0.9)).build()


def test_a_plan_for_clients_is_the_loop_for_clients():
    data, mask = clients(num=20), np.random.default_rng(1).random((20, 6)) < 0.7
    data = jax.tree.map(lambda x: x.astype(np.float32), data)
    start = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), START)
    deltas = client_deltas(regression_loss, local_steps=2, local_learning_rate=0.1)
    plan = client_plan()
    result = plan.run(deltas, start, federated.Clients(data, mask), replay=True)

    @jax.jit
    def step(params, state, batch, real, own):
        grads = deltas(params, batch, mask=real, example_mask=own)
        updates, state = plan.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = start, plan.optimizer.init(start)
    for t in range(4):
        rows, real = plan.sampler.batch(t)
        params, state = step(params, state, {k: v[rows] for k, v in data.items()}, real, mask[rows])
    assert distance(result.params, params) < 1e-5
    assert result.unit == "client" and "client" in str(plan) and "client" in str(result.statement(delta=1e-3))
    event = dpopt.privacy_event(plan.optimizer, sampling=plan.sampler, steps=4)
    assert result.ledger.epsilon(delta=1e-3) == dpopt.epsilon_of_event(event, delta=1e-3)


def test_a_plan_for_clients_refuses_examples_and_options_of_examples():
    start = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), START)
    data = jax.tree.map(lambda x: x.astype(np.float32), clients(num=20))
    deltas = client_deltas(regression_loss, local_steps=2, local_learning_rate=0.1)
    with pytest.raises(TypeError, match="states its privacy for clients, but got gradients of single examples"):
        rows = {"x": data["x"][:, 0], "y": data["y"][:, 0]}
        client_plan(1).run(regression_loss, start, rows, verify=False)
    with pytest.raises(ValueError, match="pass microbatch_size to it"):
        client_plan(2).run(deltas, start, data, microbatch_size=2)
    with pytest.raises(ValueError, match="unit must be one of"):
        dpopt.Builder(num_examples=20, expected_batch_size=6, steps=4, key=jax.random.key(0), unit="household")
    with pytest.raises(ValueError, match="another was given"):
        mask = np.ones((20, 6), bool)
        deltas(start, federated.Clients(data, mask), mask=None, example_mask=mask)
