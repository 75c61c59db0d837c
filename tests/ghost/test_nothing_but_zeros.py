"""Gradients that a diagonal, a mask or a cotangent makes zero, though other factors are as large as floats can be.

Four examples of 1e38 add up to more than a float32 holds, and infinity times 0 is NaN."""

import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpopt
from dpopt import ghost
from dpopt.ghost import hooks, memory

HUGE = 1e38
CLIPS = {
    "flat": dpopt.FlatClip(1.0),
    "layers": dpopt.LayerwiseClip(1.0),
    "groups": dpopt.GroupClip({"a": 0.5, "b": 1.0}),
}
ZEROS = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]], np.float32)  # which entries of a matrix have a gradient


def identity(w, x):
    return jnp.sum(w * x)


def outer(w, x):  # of one position
    return x[:, 0] @ w @ jnp.where(jnp.arange(3) == 1, 1e-3, 1.0)


def positions(w, x):
    return jnp.sum(jnp.stack([x[:, 0], x[:, 1]]) @ w @ jnp.where(jnp.arange(3) == 1, 1e-3, 1.0))


def rows(w, x):
    return jnp.sum(w[jnp.array([0, 1, 1])] * x[jnp.array([0, 1, 1])])


USES = {"identity": identity, "outer product": outer, "positions": positions, "look-ups": rows}
# How the entries get their factor: a diagonal, a number, a mask in the loss.
FACTORS = ("diagonal", "number", "mask", "mask, diagonal")


def case(use, factor):
    """A loss, a diagonal, and examples whose gradients are huge at entries that count for nothing."""
    zeros = np.zeros_like(ZEROS) if factor == "number" or use == "outer product" else ZEROS
    masked = jnp.asarray(zeros) if "mask" in factor else 1.0

    def loss(params, example):
        return USES[use](params["a"] * masked, example[0]) + jnp.dot(params["b"], example[1])

    diagonal = {"diagonal": zeros, "number": 0.0}.get(factor, 1.0)
    diagonal = np.where(zeros > 0, 0.5, 0.0) if factor == "mask, diagonal" else diagonal
    small = np.where(ZEROS > 0, 0.25, HUGE)
    if use in ("outer product", "positions"):
        small = np.where(np.arange(2)[:, None] == 1, HUGE / 8, 0.25) * np.ones(3)
    if use == "look-ups":  # of a row twice
        small = np.minimum(small, HUGE / 2)
    return loss, {"a": jnp.asarray(diagonal, jnp.float32), "b": jnp.float32(1.0)}, np.asarray(small, np.float32)


def run(loss, params, batch, diagonal, clip, **options):
    promise = dpopt.per_example_grads(loss, **options)(params, batch, mask=None)
    found = promise.scale(diagonal).clipped_sum(clip)
    return found.sum, found.sensitive.norms, found.sensitive.is_finite


@pytest.mark.parametrize("way", ["recorded", "least memory", "parts"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.one_in(4)
def test_sums_that_overflow_where_they_count_for_nothing(use, factor, clip, way, monkeypatch):
    if way == "least memory" and use == "identity" and clip != "flat" and factor != "number":
        pytest.skip("in one pass squares are relative to the largest entry: what the example adds is too small")
    loss, diagonal, x = case(use, factor)
    params = {"a": jnp.full((2, 3), 0.5), "b": jnp.ones(2)}
    batch = jnp.asarray(np.stack([x] * 12)), jnp.full((12, 2), 0.1, jnp.float32)
    options = {"recorded": {}, "least memory": {"memory": 1}, "parts": {"microbatch_size": 6}}[way]
    if way == "least memory":
        monkeypatch.setattr(memory, "_SMALL_BYTES", 0)
    expected = run(loss, params, batch, diagonal, CLIPS[clip], engine="vmap")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected)) and expected[2].all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(loss, params, batch, diagonal, CLIPS[clip], engine="ghost", **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize("nothing", ["cotangent", "input", "diagonal"])
@pytest.mark.parametrize("clip", ["flat", "groups"])
def test_a_layer_without_a_gradient_has_no_norm_in_two_passes(nothing, clip, monkeypatch):
    """It was 1e-19 times the other factor, by which a flat clip shrank all that the example adds elsewhere."""
    monkeypatch.setattr(memory, "_SMALL_BYTES", 0)

    def loss(params, example):
        x, y, g = example
        step = jax.checkpoint(lambda h, w: (h + jnp.tanh(x @ w), None))
        return y * jnp.sum(jax.lax.scan(step, x, params["a"])[0]) + jnp.dot(params["b"], g)

    x, y, s = {"cotangent": (1e25, 0.0, 1.0), "input": (0.0, 1e25, 1.0), "diagonal": (1.0, 1e25, 0.0)}[nothing]
    params = {"a": jnp.full((4, 16, 16), 1e-3), "b": jnp.ones(2)}
    batch = jnp.full((64, 8, 16), x, jnp.float32), jnp.full(64, y, jnp.float32), jnp.full((64, 2), 0.1, jnp.float32)
    diagonal = {"a": jnp.full((4, 16, 16), s), "b": jnp.ones(2)}
    args = loss, params, batch, diagonal, CLIPS[clip]
    assert "two passes" in str(dpopt.explain(loss, params, jax.tree.map(lambda x: x[0], batch), batch_size=64))
    found, expected = run(*args, engine="ghost", memory=1), run(*args, engine="vmap")
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[0], expected[0])


@pytest.mark.parametrize("scaled", [False, True])
def test_norms_in_hooks_are_upper_bounds_whatever_the_units(scaled):
    """Factors of any size whose large entries may meet zeros. Units were multiplied one after the other, so that bounds
    vanished: that of x = 1e-20 and y = 5e18, say, beside y = 1e38 where x is zero."""
    w, x = jnp.zeros((3, 2)), jnp.zeros((1, 4, 3))
    plan = ghost.plan_clipped_sum(lambda w, x: jnp.sum(jnp.tanh(x @ w)), w, x).streaming()
    ((contact, method),) = plan.streamed.items()
    hook = types.SimpleNamespace(method=method, is_quick=False)
    one = jax.jit(lambda x, y, s: hooks._norm_of_one(contact, hook, x, y, s if scaled else None)[:2])
    rng, seen = np.random.default_rng(0), {"zero": 0, "tiny": 0, "other": 0}
    for _ in range(2_000):
        # An exponent for each factor and for each of its rows, and rows and factors that are zero.
        powers = [rng.uniform(-40, 30) + rng.choice([0, -25], (n, 1)) for n in (4, 4, 3)]
        x, y, s = (
            np.float32(rng.normal(size=(n, k)) * 10.0**p * (rng.random((n, 1)) < 0.7) * (rng.random() < 0.9))
            for n, k, p in zip((4, 4, 3), (3, 2, 2), powers, strict=True)
        )
        x, y, s = (np.where(np.abs(z) < np.finfo(np.float32).tiny, np.float32(0), z) for z in (x, y, s))  # as on CPUs
        gradient = x.astype(float).T @ y.astype(float) * (s.astype(float) if scaled else 1)
        norm, (upper, lower) = np.linalg.norm(gradient), (float(b) for b in one(x, y, s))
        assert norm > 1e38 or norm < 1e-37 or upper >= norm * (1 - 1e-5), (x, y, s)
        if not (x.any() and y.any() and (s.any() or not scaled)):
            assert upper == lower == 0
            seen["zero"] += 1
        else:
            seen["tiny" if norm < 1e-37 else "other"] += 1
    assert min(seen.values()) > 50, seen
