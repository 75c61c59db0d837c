"""Ten thousand random pairs of neighbouring batches: clipped sums are never further apart than the sensitivity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpopt

PAIRS, BATCH = 10_000, 6
# A sum of B float32 terms of norm C is off by at most about B eps C, and a norm of d squares by d eps / 2.
ROUNDING = 2e-5


def linear(params, e):
    return jnp.sum(params["w"] * e["x"]) + params["b"] * e["y"]


def logistic(params, e):
    return jax.nn.softplus(-e["y"] * (params["w"] @ e["x"] + params["b"]))


def network(params, e):
    hidden = jnp.tanh(jnp.outer(params["w"], e["x"]).sum(0) + params["b"])
    return jnp.sum((hidden * params["w"] - e["y"]) ** 2)


def embedding(params, e):
    row = params["w"][jnp.clip(jnp.abs(e["x"][0]), 0, 3).astype(jnp.int32)]
    return (row * e["y"] - params["b"]) ** 2


LOSSES = [linear, logistic, network, embedding]
CLIPS = [
    dpopt.FlatClip(1.0),
    dpopt.FlatClip(1e-3),
    dpopt.GroupClip({"w": 0.3, "b": 0.4}),
    dpopt.clipping.NormalizedClip(2.0, gamma=0.1),
]


def pairs(seed, count):
    """Batches with examples of all sizes, from 1e-30 to 1e30, some of them not finite, and a row to leave out."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.choice([-30, -20, -3, 0, 0, 0, 3, 15, 30], size=(count, BATCH, 1))
    x = rng.normal(size=(count, BATCH, 4)) * scale
    y = rng.normal(size=(count, BATCH)) * 10.0 ** rng.choice([-5, 0, 0, 5], size=(count, BATCH))
    x[rng.random(x.shape) < 0.01] = np.nan
    x[rng.random(x.shape) < 0.01] = np.inf
    mask = rng.random((count, BATCH)) < 0.9
    left_out = rng.integers(BATCH, size=count)
    mask[np.arange(count), left_out] = True
    without = mask.copy()
    without[np.arange(count), left_out] = False
    params = {"w": rng.normal(size=(count, 4)), "b": rng.normal(size=count)}
    single = jax.tree.map(lambda a: a.astype(np.float32), (params, {"x": x, "y": y}))
    return (*single, mask, without)


def distances(loss, clip, engine, scale, seed, count):
    """Distances between the two clipped sums of each pair, and norms of the first, in float64."""

    def clipped(params, batch, mask):
        grads = dpopt.per_example_grads(loss, engine=engine)(params, batch, mask=mask)
        return (grads if scale is None else grads.scale(scale)).clipped_sum(clip).sum

    params, batch, mask, without = pairs(seed, count)
    run = jax.jit(jax.vmap(clipped))
    a, b = (jax.tree.leaves(run(params, batch, m)) for m in (mask, without))
    flat = [np.concatenate([np.float64(x).reshape(count, -1) for x in leaves], 1) for leaves in (a, b)]
    return np.linalg.norm(flat[0] - flat[1], axis=1), np.linalg.norm(flat[0], axis=1)


CASES = [
    (loss, clip, scale)
    for i, loss in enumerate(LOSSES)
    for clip, scale in [(CLIPS[i], None), (CLIPS[0], {"w": 100.0, "b": 0.01})]
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("engine", ["vmap", "ghost"])
def test_no_neighbour_is_further_than_the_sensitivity(engine):
    count, furthest = PAIRS // len(CASES), []
    for seed, (loss, clip, scale) in enumerate(CASES):
        moved, size = distances(loss, clip, engine, scale, seed, count)
        assert np.isfinite(moved).all(), (loss.__name__, clip)
        # The sums themselves are rounded, and so is their difference.
        allowed = clip.sensitivity * (1 + ROUNDING) + ROUNDING * size / 10
        assert (moved <= allowed).all(), (loss.__name__, clip, (moved / clip.sensitivity).max())
        furthest.append((moved / clip.sensitivity).max())
    assert max(furthest) > 0.999, "some pair comes near the bound, or the test shows little"


def test_the_check_finds_a_clip_that_is_too_loose():
    class Loose(dpopt.FlatClip):
        def coefficients(self, leaf_norms):
            return jax.tree.map(lambda c: 1.001 * c, super().coefficients(leaf_norms))

    moved, _ = distances(linear, Loose(1.0), "vmap", None, 0, 200)
    assert moved.max() > 1.0005
