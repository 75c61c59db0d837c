"""The check against plain gradients: accepts correct engines, and names the parameter that is wrong."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mlp_batch, mlp_loss, mlp_params, privacy_four

import dpopt
from dpopt import verification
from dpopt.ghost import engine, records
from dpopt.verification import VerificationError, verify

PARAMS, BATCH = mlp_params(), mlp_batch(6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"engine": "ghost"}, {"engine": "vmap", "microbatch_size": 4}])
def test_what_is_right_passes(options):
    verify(mlp_loss, PARAMS, BATCH, **options)
    verify(lambda p, e: (mlp_loss(p, e), e["x"]), PARAMS, BATCH, has_aux=True, scale=0.5, examples=2, **options)


@pytest.mark.slow
def test_examples_that_are_not_finite_or_have_no_gradient_pass():
    batch = {"x": BATCH["x"].at[1].set(np.nan).at[2].set(0), "y": BATCH["y"]}
    verify(mlp_loss, PARAMS, batch, engine="ghost")
    verify(lambda w, x: 0 * jnp.sum(w * x), jnp.ones(3), jnp.ones((2, 3)), engine="ghost")


@pytest.mark.slow
def test_examples_whose_gradients_are_roundings_beside_others_pass():
    """Near saturation one rounding changes ``1 - tanh^2`` by a quarter, which does not affect the clip."""
    x = np.random.default_rng(0).normal(size=(4096, 6)).astype(np.float32)

    def loss(w, x):
        return jnp.sum(jnp.square(jnp.tanh(x @ w) - x[:4]))

    w = jnp.full((6, 4), 1.15)
    sizes = jnp.linalg.norm(jax.vmap(jax.grad(loss), (None, 0))(w, x).reshape(4096, -1), axis=1)
    faint = [i for i in np.argsort(sizes) if 0 < sizes[i] < 1e-4]
    assert len(faint) > 20
    for i in faint[:20]:
        verify(loss, w, np.concatenate([x[i : i + 1], x[:7]]), engine="ghost")


def test_a_model_in_bfloat16_passes():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((20, 30), (6, 5, 20)))
    verify(loss, w, x, engine="ghost")


def on_a_corner():
    """A ReLU network, and examples for which rounding decides whether the only unit is on: differently in a batch."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=1_000), jnp.float32)
    x = jnp.asarray(rng.normal(size=(512, 1_000)), jnp.float32)
    alone = np.array([jax.jit(jnp.vdot)(w, row) for row in x[:64]])
    together = np.asarray(jax.jit(lambda w, x: x @ w)(w, x[:64]))
    apart = np.flatnonzero(alone != together)
    return w, x[apart], np.maximum(alone, together)[apart]


@pytest.mark.slow
def test_a_corner_that_rounding_is_on_one_or_the_other_side_of_passes():
    w, x, highest = on_a_corner()
    if len(x) < 4:  # the units must be off in one of the two programs, and on in the other
        pytest.skip("a product of vectors and one of matrices are rounded alike here")

    def loss(w, example):
        row, corner = example
        return jax.nn.relu(jnp.vdot(w, row) - corner * (1 - 1e-7) + 1e-30)

    size = 4
    batch = x[:size], jnp.asarray(highest[:size])
    verify(loss, w, batch, engine="ghost")


def half_of_a_norm(monkeypatch):
    real = records.leaf_norms

    def wrong(*args):
        found = real(*args)
        return found._replace(upper=[found.upper[0] / 2, *found.upper[1:]])

    monkeypatch.setattr(records, "leaf_norms", wrong)


def a_sum_too_large(monkeypatch):
    real = engine.weighted_sum

    def wrong(*args):
        total = real(*args)
        return total._replace(value=[t * (1 + (i == 3)) for i, t in enumerate(total.value)])

    monkeypatch.setattr(engine, "weighted_sum", wrong)


def rows_that_mix(monkeypatch):
    """One example gets some of its neighbour's weight, which is visible only with the neighbour masked out."""
    real = engine.weighted_sum

    def wrong(run, weights, records):
        return real(run, {i: c + 0.1 * jnp.roll(c, 1) * (c == 0) for i, c in weights.items()}, records)

    monkeypatch.setattr(engine, "weighted_sum", wrong)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (half_of_a_norm, r"\['hidden'\]\['b'\]: the norm of the gradient of example 0 of the batch is"),
        (a_sum_too_large, r"\['out'\]\['w'\]: the clipped sum \(its norm\) of 4 examples together"),
        (rows_that_mix, r"the clipped sum \(its norm\) of"),
    ],
)
def test_a_planted_mistake_is_found_and_named(plant, said, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(VerificationError, match=said) as caught:
        verify(mlp_loss, PARAMS, BATCH, engine="ghost")
    assert "engine='vmap'" in str(caught.value) and "as private as the data" in str(caught.value)
    verify(mlp_loss, PARAMS, BATCH, engine="vmap")


def test_the_fixed_diagonals_of_an_optimizer_are_found():
    scale = np.array([[0.1], [1.0], [2.0], [10.0]], np.float32)
    optimizer = dpopt.adadps(0.1, scale=scale, **privacy_four())
    np.testing.assert_array_equal(verification.fixed_scale(optimizer, jnp.ones((4, 3))), scale)
    twice = dpopt.privatize(**privacy_four(), preconditioner=tuple(dpopt.side_information(s) for s in (scale, 2.0)))
    np.testing.assert_array_equal(verification.fixed_scale(twice, jnp.ones((4, 3))), 2 * scale)
    assert verification.fixed_scale(dpopt.dp_adam(0.1, **privacy_four()), jnp.ones((4, 3))) is None


def test_a_loss_that_is_no_function_of_its_example_is_refused():
    calls = itertools.count(1)
    with pytest.raises(VerificationError, match="depends on more than the parameters and its own example"):
        verify(lambda w, x: next(calls) * jnp.sum((w - x) ** 2), jnp.zeros(2), jnp.eye(2), engine="vmap")


def make_plan(key):
    builder = dpopt.Builder(num_examples=20, expected_batch_size=5, steps=2, key=jax.random.key(key), pad_to=16)
    return builder.clip(1.0).noise(1.0).then(optax.sgd(0.1)).build()


@pytest.mark.slow
def test_a_run_is_verified_before_its_first_step(monkeypatch):
    data, loss = mlp_batch(20), lambda p, e: mlp_loss(p, e)
    fetch = lambda rows: jax.tree.map(lambda x: x[rows], data)  # noqa: E731
    seen = []
    real = verification.verify
    monkeypatch.setattr(verification, "verify", lambda *a, **k: seen.append(1) or real(*a, **k))
    make_plan(101).run(loss, PARAMS, fetch, engine="ghost")
    make_plan(102).run(loss, PARAMS, fetch, engine="ghost")
    assert len(seen) == 1

    half_of_a_norm(monkeypatch)
    plan, other = make_plan(103), lambda p, e: mlp_loss(p, e)
    with pytest.raises(VerificationError):
        plan.run(other, PARAMS, fetch, engine="ghost")
    assert plan.journal.ledger.steps == 0
    assert make_plan(104).run(other, PARAMS, fetch, engine="ghost", verify=False).ledger.steps == 2
