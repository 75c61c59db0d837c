"""Layers of a scan that are clipped one by one, whatever their steps compute from them."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import enable_x64, slow_unless
from jax import lax

import dpopt
from dpopt.ghost import memory

D, T, LAYERS = 3, 2, 4

# What a step computes from the weights of its layer: two matrices and a vector.
_STEPS = {
    "as they are": lambda h, q: jnp.tanh(h @ q["w"] + q["b"]) @ q["v"],
    "normalised": lambda h, q: jnp.tanh(h @ (q["w"] / jnp.linalg.norm(q["w"], axis=0)) * q["b"]) @ q["v"],
    "used twice": lambda h, q: jnp.tanh(h @ q["w"] + q["b"]) @ q["w"].T + h @ q["v"] + q["b"],
    "by their size": lambda h, q: jnp.tanh(h @ q["w"]) * jnp.max(jnp.abs(q["b"])) @ q["v"] / jnp.sum(q["w"] ** 2),
    "product": lambda h, q: jnp.tanh(h @ (q["w"] @ q["v"])) * q["b"],
    "iterated": lambda h, q: lax.scan(lambda h, _: (jnp.tanh(h @ q["w"]) + q["b"], None), h, None, 2)[0] @ q["v"],
    "parts": lambda h, q: jnp.concatenate([h[:, :2] @ q["w"][:2], h[:, 2:] @ q["w"][2:]]).sum(0) * q["b"] + h @ q["v"],
    "chosen": lambda h, q: lax.cond(h[0, 0] > 0, lambda w: h @ w, lambda w: h * w[0], q["w"]) @ q["v"] + q["b"],
    "constant in one place": lambda h, q: jnp.tanh(h @ q["w"] * lax.stop_gradient(q["b"])) @ q["v"] + q["b"],
    "half": lambda h, q: (h.astype("float32") @ q["w"].astype("float32")).astype(h.dtype) @ q["v"] * q["b"],
}


def _nested(step, h, layers):
    """Steps within steps, as for rematerialisation in square-root memory."""
    outer = jax.tree.map(lambda x: x.reshape(2, LAYERS // 2, *x.shape[1:]), layers)
    return lax.scan(jax.checkpoint(lambda h, own: lax.scan(jax.checkpoint(step), h, own)), h, outer)[0]


_LOOPS = {
    "scan": lambda step, h, layers: lax.scan(step, h, layers)[0],
    "rematerialised": lambda step, h, layers: lax.scan(jax.checkpoint(step), h, layers)[0],
    "reversed": lambda step, h, layers: lax.scan(step, h, layers, reverse=True, unroll=2)[0],
    "nested": _nested,
    "within a call": lambda step, h, layers: jax.jit(lambda h, q: lax.scan(step, h, q)[0])(h, layers),
}
_SCALES = ["none", "number", "diagonal"]


def _loss(how, loop):
    def step(h, layer):
        return h + _STEPS[how](h, layer), None

    return lambda p, x: jnp.sum(jnp.sin(_LOOPS[loop](step, x @ p["in"], p["layers"])))


def _drawn(seed, scale):
    rng = np.random.default_rng(seed)
    shapes = {"in": (D, D), "layers": {"w": (LAYERS, D, D), "v": (LAYERS, D, D), "b": (LAYERS, D)}}
    params = jax.tree.map(lambda s: rng.normal(size=s), shapes, is_leaf=lambda s: isinstance(s, tuple))
    drawn = {
        "none": lambda w: None,
        "number": lambda w: np.float64(rng.uniform(-2, 2)),
        "diagonal": lambda w: rng.uniform(0.1, 3, w.shape),
    }[scale]
    diagonal = None if scale == "none" else jax.tree.map(drawn, params)
    size = int(rng.integers(1, 7))
    return params, rng.normal(size=(size, T, D)), diagonal, rng.random(size) < 0.8, float(rng.choice([0.1, 1, 10]))


def _expected(loss, params, batch, diagonal, mask, clip_norm):
    """Each layer's gradient clipped by itself: C is shared by all of them."""
    grads = jax.device_get(jax.vmap(jax.grad(loss), (None, 0))(params, batch))
    if diagonal is not None:
        grads = jax.tree.map(lambda g, s: g * s, grads, diagonal)
    share = clip_norm / (1 + 3 * LAYERS) ** 0.5

    def clipped(g, layers):
        norms = np.sqrt(np.sum(g**2, axis=tuple(range(1 + layers, g.ndim)), keepdims=True))
        counts = np.isfinite(norms) & mask.reshape(-1, *[1] * (g.ndim - 1))
        return np.sum(np.where(counts, g * np.minimum(1, share / np.maximum(norms, 1e-300)), 0), axis=0)

    return {"in": clipped(grads["in"], 0), "layers": {k: clipped(g, 1) for k, g in grads["layers"].items()}}


def _clipped(loss, params, batch, diagonal, mask, clip_norm):
    clip = dpopt.LayerwiseClip(clip_norm, scanned={"in": False, "layers": True})

    def run(params, batch, mask):
        promise = dpopt.per_example_grads(loss, engine="ghost")(params, batch, mask=mask)
        return (promise if diagonal is None else promise.scale(diagonal)).clipped_sum(clip).sum

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no fallback
        return jax.device_get(jax.jit(run)(params, batch, mask))


_RUNS = list(itertools.product(_STEPS, _LOOPS, _SCALES))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("run", slow_unless(_RUNS[::7], _RUNS), ids=", ".join)
def test_each_layer_is_clipped_by_itself(run, monkeypatch):
    how, loop, scale = run
    loss, seed = _loss(how, loop), _RUNS.index(run)
    if seed % 2:
        monkeypatch.setattr(memory, "_SMALL_BYTES", 0)
    params, batch, diagonal, mask, clip_norm = _drawn(seed, scale)
    with enable_x64(True), jax.numpy_rank_promotion("allow"):
        got = _clipped(loss, params, batch, diagonal, mask, clip_norm)
        expected = _expected(loss, params, batch, diagonal, mask, clip_norm)
    tolerance = 1e-5 if how == "half" else 1e-9
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * clip_norm), got, expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["scan", "nested"])
@pytest.mark.parametrize("how", ["normalised", "used twice"])
def test_layers_whose_gradient_is_not_finite_are_left_out(how, loop):
    loss = _loss(how, loop)
    params, _, _, _, _ = _drawn(3, "none")
    batch = np.random.default_rng(3).normal(size=(4, T, D))
    params, batch = jax.tree.map(np.float32, (params, batch))
    batch[1, 0, 0] = np.inf
    with jax.numpy_rank_promotion("allow"):
        poisoned = _clipped(loss, params, batch, None, np.ones(4, bool), 1.0)
        without = _clipped(loss, params, np.nan_to_num(batch, posinf=0), None, np.arange(4) != 1, 1.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), poisoned, without)


def test_layers_that_are_formed_are_formed_for_as_many_examples_as_the_memory_takes():
    """All gradients of a layer for a batch of 128 would take 33 MB, beside 8 MB of an ordinary gradient."""

    def loss(p, x):
        step = lambda h, w: (h + jnp.tanh(h @ (w / jnp.linalg.norm(w, axis=0))), None)  # noqa: E731
        return jnp.sum(jnp.sin(lax.scan(jax.checkpoint(step), x, p)[0]))

    def ordinary(p, x):
        return jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, x)))(p)

    def clipped(p, x):
        promise = dpopt.per_example_grads(loss, engine="ghost")(p, x, mask=None)
        return promise.clipped_sum(dpopt.LayerwiseClip(1.0, scanned=True)).sum

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((4, 256, 256), (128, 8, 256))]
    with jax.numpy_rank_promotion("allow"):
        taken = [jax.jit(f).lower(*shapes).compile().memory_analysis() for f in (ordinary, clipped)]
    least, most = (m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes for m in taken)
    assert most <= 1.5 * least


def test_the_reason_for_a_fallback_is_named_and_microbatches_remove_it():
    loss = lambda p, x: jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0])  # noqa: E731
    params, batch = (jax.ShapeDtypeStruct(s, "float32") for s in ((3, 4, 4), (1024, 2, 4)))
    clip = dpopt.LayerwiseClip(1.0, scanned=True)

    def clipped(p, x, size):
        promise = dpopt.per_example_grads(loss, engine="ghost", microbatch_size=size)(p, x, mask=None)
        return promise.scale(2 * jnp.ones((3, 4, 4))).clipped_sum(clip).sum

    with pytest.warns(UserWarning, match="a sum of 1024 examples is in pairs of floats, which cannot be multi"):
        jax.eval_shape(lambda p, x: clipped(p, x, None), params, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(lambda p, x: clipped(p, x, 256), params, batch)


@pytest.mark.parametrize("engine", ["auto", "ghost"])
def test_a_stack_without_gradients_is_clipped_by_layer_with_an_offset(engine):
    """Each of its layers was clipped by the norm of all of them."""
    params = {"a": jnp.ones(3), "v": jnp.ones((4, 3))}
    offset = {"a": jnp.zeros(3), "v": jnp.diag(jnp.array([3.0, 1.0, 0.1]), 0)[jnp.array([0, 1, 2, 2])]}
    clip = dpopt.LayerwiseClip(5**0.5 * 0.5, scanned={"a": False, "v": True})

    def run(engine):
        promise = dpopt.per_example_grads(lambda p, x: jnp.sum(jnp.sin(p["a"] * x)), engine=engine)
        found = promise(params, jnp.ones((2, 3)), mask=None).shift(offset).clipped_sum(clip)
        return found.sum, found.leaf_norms

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ghost clipping cannot follow")  # `v`, which has an offset added
        found = run(engine)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, run("vmap"))
