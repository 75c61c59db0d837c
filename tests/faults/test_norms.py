"""Norms that were too small: of several groups, of look-ups out of range, of numbers that underflow in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import contributions, slow_unless
from jax import lax

import dpopt
from dpopt import ghost
from dpopt.engines.norms import safe_norm
from dpopt.ghost import one_by_one
from dpopt.ghost.squares import sum_squares

SLACK = 2.0**-12


def contribution(loss, params, example, clip, engine="ghost", scale=None, offset=None):
    """The norm of one example's contribution in units of the sensitivity, in float64."""
    batch = jax.tree.map(lambda x: jnp.asarray(x)[None], example)
    promise = dpopt.per_example_grads(loss, engine=engine)(params, batch, mask=None)
    promise = promise if scale is None else promise.scale(scale)
    promise = promise if offset is None else promise.shift(offset)
    total = promise.clipped_sum(clip).sum
    return np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in jax.tree.leaves(total))) / clip.sensitivity


# --- several groups


@pytest.mark.slow
def test_scanned_tables():
    """A table per layer, read inside `scan`: one group per layer, of which only the first was counted."""

    def loss(w, ids):
        h, _ = lax.scan(lambda h, table: (jnp.tanh(h + table[ids]), None), jnp.zeros((200, 16)), w)
        return jnp.sum(h**2)

    w = jax.random.normal(jax.random.key(0), (12, 40, 16))
    ids = jax.random.randint(jax.random.key(1), (200,), 0, 40)
    assert 0.999 < contribution(loss, w, ids, dpopt.FlatClip(1.0)) < 1 + SLACK


@pytest.mark.parametrize("positions", [1, 3, 40])  # a norm method for each
@pytest.mark.parametrize("diagonal", slow_unless({True}, [False, True]))
@pytest.mark.one_in(4)
def test_scanned_tables_equal_plain_gradients(positions, diagonal):
    def loss(w, e):
        h, _ = lax.scan(lambda h, table: (h + jnp.sin(table[e["ids"]]) * e["u"], None), jnp.zeros((positions, 3)), w)
        return jnp.sum(h**2)

    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(4, 5, 3)), jnp.float32)
    batch = {"ids": jnp.asarray(rng.integers(0, 8, size=(3, positions))),  # some of them out of range
             "u": jnp.asarray(rng.normal(size=(3, positions, 3)), jnp.float32)}  # fmt: skip
    scale = jnp.asarray(rng.uniform(0.5, 2, size=w.shape), jnp.float32) if diagonal else None

    @functools.partial(jax.jit, static_argnums=0)
    def clipped(engine, w, batch):
        promise = dpopt.per_example_grads(loss, engine=engine)(w, batch, mask=None)
        found = (promise if scale is None else promise.scale(scale)).clipped_sum(dpopt.FlatClip(0.5))
        return found.sensitive.norms, found.sum

    (norms, total), (expected_norms, expected) = clipped("ghost", w, batch), clipped("vmap", w, batch)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(total, expected, atol=1e-6)


# --- out of range

_DIMENSIONS = lax.GatherDimensionNumbers((1,), (0,), (0,))
_LOOK_UPS = {
    "default": lambda p, i: p[i],
    "fill": lambda p, i: p.at[i].get(mode="fill"),
    "clip": lambda p, i: p.at[i].get(mode="clip"),
    "raw fill": lambda p, i: lax.gather(p, i[:, None], _DIMENSIONS, (1, p.shape[1]), mode="fill"),
    "raw promise": lambda p, i: lax.gather(p, i[:, None], _DIMENSIONS, (1, p.shape[1]), mode="promise_in_bounds"),
    "slices": lambda p, i: jnp.concatenate([lax.dynamic_slice_in_dim(p, k, 1) for k in i]),
}


@pytest.mark.parametrize("look_up", _LOOK_UPS)
@pytest.mark.parametrize("index", [8, 2**31 - 1, -8, -1])
@pytest.mark.slow
def test_tied_oov(look_up, index):
    """A table for look-up and read-out: where the look-up has no gradient, its cross term must not count either."""
    V, d, T, large = 6, 3, 4, 1e3

    def loss(p, e):
        rows = _LOOK_UPS[look_up](p, e["ids"])
        return jnp.sum(jnp.where(jnp.isfinite(rows), rows, 0) * e["u"]) + jnp.sum((e["v"] @ p.T) * e["w"])

    rng = np.random.default_rng(0)
    v = rng.normal(size=(T, d)).astype(np.float32)
    v /= np.linalg.norm(v[0])
    for row in range(V):  # the row that a wrong index would stand for cancels the gradient of the read-out
        w, u = np.zeros((T, V), np.float32), np.zeros((T, d), np.float32)
        w[0, row], u[0] = large, -large * v[0]
        e = {"ids": np.array([index] + [0] * (T - 1), np.int32), "u": u, "v": v, "w": w}
        assert contribution(loss, jnp.zeros((V, d)), e, dpopt.FlatClip(1.0)) < 1 + SLACK


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_indices_of_small_types(dtype):
    """A bound that does not fit the index's type must not wrap around."""

    def loss(p, e):
        return jnp.sum(p.at[e["ids"]].get(mode="clip") * e["u"])

    e = {"ids": np.array([np.iinfo(dtype).max, 1, 2], dtype), "u": np.full((3, 2), 5, np.float32)}
    np.testing.assert_allclose(contribution(loss, jnp.zeros((300, 2)), e, dpopt.FlatClip(1.0)), 1, rtol=1e-5)


# --- underflow in float32


def _dense(w, e):
    return jnp.sum((e["x"] @ w) * e["y"])


def _linear(w, e):
    return jnp.sum(jnp.sin(w) * e)


def _look_up(w, e):
    return jnp.sum(w[e["i"]] * e["y"])


_ONES = jnp.ones(100)
_SMALL = {"x": np.full(100, 9e-20, np.float32), "y": np.full(100, 4e9, np.float32)}
_ROW = {"i": np.int32(3), "y": np.full(100, 9e-20, np.float32)}
_SEQUENCE = {"x": np.full((3, 100), 9e-20, np.float32), "y": np.full((3, 80), 4e9, np.float32)}
_UNDERFLOW = [
    (_dense, (100, 100), _SMALL, dpopt.FlatClip(1e-9), None),
    (_dense, (100, 100), _SMALL, dpopt.FlatClip(0.005), jnp.full((100, 100), 1e7)),
    (_dense, (100, 100), _SMALL, dpopt.FlatClip(0.005), 1e7),
    (_dense, (100, 80), _SEQUENCE, dpopt.FlatClip(1e-9), None),
    (_linear, (100,), np.full(100, 9e-21, np.float32), dpopt.FlatClip(1.0), 1e25),
    (_linear, (100,), np.full(100, 1e-20, np.float32), dpopt.FlatClip(1.0), 1e21 * _ONES),
    (_linear, (100,), np.full(100, 9e-20, np.float32), dpopt.clipping.NormalizedClip(1.0, gamma=1e-20), None),
    (_linear, (100,), np.full(100, 1e-30, np.float32), dpopt.FlatClip(1e-30), None),
    (_look_up, (50, 100), _ROW, dpopt.FlatClip(1e-19), None),
    (_look_up, (50, 100), _ROW, dpopt.FlatClip(1.0), jnp.full((50, 100), 1e20)),
]


@pytest.mark.parametrize("case", range(len(_UNDERFLOW)))
@pytest.mark.one_in(10)
def test_underflow(case):
    loss, shape, example, clip, scale = _UNDERFLOW[case]
    assert 0.9 < contribution(loss, jnp.zeros(shape), example, clip, scale=scale) < 1 + SLACK


@pytest.mark.parametrize("clip, value", [(dpopt.FlatClip, 1e-31), (dpopt.FlatClip, 1e-45)])
def test_clip_norms_that_float32_cannot_keep_are_refused(clip, value):
    with pytest.raises(ValueError, match="at least"):
        clip(value)
    with pytest.raises(ValueError, match="at least"):
        dpopt.GroupClip({"a": 1.0, "b": value})
    with pytest.raises(ValueError, match="at least"):
        dpopt.clipping.NormalizedClip(1.0, gamma=value)
    with pytest.raises(ValueError, match="overflow"):
        dpopt.clipping.NormalizedClip(1e10, gamma=1e-25)


@pytest.mark.slow
def test_ordinary_small_gradients_are_not_computed_one_by_one(monkeypatch):
    """Zero and tiny gradients do not take the slow path, under an ordinary clip."""
    monkeypatch.setattr(one_by_one, "_norms", lambda *_: pytest.fail("computed one by one"))
    w, sizes = jnp.zeros((100, 80)), jnp.asarray([0, 1e-30, 1e-18, 1e-12, 1, 1e3])[:, None]
    for positions in (1, 3):
        batch = {"x": sizes[:, :, None] * jnp.ones((6, positions, 100)), "y": jnp.ones((6, positions, 80))}
        for clip in (dpopt.FlatClip(1.0), dpopt.clipping.NormalizedClip(1.0)):
            dpopt.per_example_grads(_dense, engine="ghost")(w, batch, mask=None).clipped_sum(clip)


def test_an_offset_that_cancels_the_gradient():
    """``|g + o|`` is far smaller than either, and must not be lost in their rounding error."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50,)).astype(np.float32)
    for size in (1e-2, 1e-4, 1e-6):
        offset = jnp.asarray(-x + size * rng.normal(size=50).astype(np.float32))
        clip = dpopt.FlatClip(float(size))
        assert contribution(lambda w, e: jnp.sum(w * e), jnp.zeros(50), x, clip, offset=offset) < 1 + SLACK


@pytest.mark.parametrize("size", [1e21, 1e-30, 1e37])
def test_norms_of_constants(size):
    """XLA squared a constant and its unit separately at compile time: 0 * inf."""
    x = np.float32(size) * np.random.default_rng(0).uniform(0.5, 1, (4, 6)).astype(np.float32)
    found = jax.jit(lambda y: safe_norm(x + 0 * y, axis=1))(0.0)
    np.testing.assert_allclose(found, np.linalg.norm(x.astype(np.float64), axis=1), rtol=1e-6)


@pytest.mark.parametrize("row", [[np.inf], [-np.inf], [np.inf, 1.0], [np.nan], [np.nan, 1.0], [np.nan, np.inf]])
def test_norms_show_what_is_not_finite(row):
    """XLA replaces the root of a single square by the number itself, which clipping would make finite."""
    x = np.array([row], np.float32)
    for found in (safe_norm(jnp.asarray(x), axis=1), jax.jit(lambda x: safe_norm(x, axis=1))(x)):
        assert not np.isfinite(found).any()


# --- rounding of long sums


def test_long_sums_of_squares():
    """One entry of 1 and millions whose squares it absorbs: added up in sequence, the norm is 1 instead of 1.1."""
    n = 2**23
    x = np.full(n, 2.0**-12.5, np.float32)
    x[0] = 1
    exact = np.sum(np.square(x, dtype=np.float64))
    np.testing.assert_allclose(jax.jit(sum_squares)(x), exact, rtol=2.0**-16)
    np.testing.assert_allclose(jax.jit(lambda x: safe_norm(x[None], axis=1))(x)[0], exact**0.5, rtol=2.0**-16)
    # 2^-20 in versions newer than JAX 0.10.0; half of the slack of `rounding.ROUNDING` for squares is 2^-14.
    np.testing.assert_allclose(jax.jit(jax.vmap(sum_squares))(x.reshape(1, -1, 32))[0], exact, rtol=2.0**-15)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("diagonal", [False, True])
def test_a_long_row_with_a_diagonal(diagonal):
    n = 2**17
    x = np.full(n, 2.0**-12.5, np.float32)
    x[0] = 1
    e = {"x": x, "y": np.ones(2, np.float32)}
    scale = jnp.ones((n, 2)) if diagonal else None
    assert contribution(_dense, jnp.zeros((n, 2)), e, dpopt.FlatClip(0.1), scale=scale) < 1 + SLACK


def test_positions_that_cancel():
    """Terms far larger than their sum are rounded in the sum over the batch: the clip must allow for that."""
    B, T, V, d = 32, 12, 40, 8
    rng = np.random.default_rng(0)
    batch = {"i": rng.integers(0, V, (B, T)).astype(np.int32), "y": rng.normal(size=(B, T, d)).astype(np.float32)}
    k = B // 2
    for large in (1e4, 1e8):
        batch["y"][k], batch["i"][k] = 0, np.arange(T)
        batch["y"][k, 0], batch["y"][k, -1], batch["i"][k, -1] = large, -large, 0

        @jax.jit
        def total(mask, batch):
            return dpopt.per_example_grads(_look_up, engine="ghost")(jnp.zeros((V, d)), batch, mask=mask).clipped_sum(
                dpopt.FlatClip(1.0)
            )

        with_it, without = (np.asarray(total(m, batch).sum, np.float64) for m in (np.ones(B, bool), np.arange(B) != k))
        assert np.linalg.norm(with_it - without) < 1 + SLACK


def test_plans_of_scanned_tables_count_every_group():
    def loss(w, ids):
        return jnp.sum(lax.scan(lambda h, table: (h + table[ids], None), jnp.zeros((30, 4)), w)[0])

    ids = jnp.zeros((2, 30), jnp.int32)
    one, many = (
        ghost.plan_clipped_sum(loss, jnp.zeros((n, 50, 4)), ids).leaves[0] for n in (1, 8)
    )  # fmt: skip
    assert many.operations >= 7 * one.operations


@pytest.mark.parametrize("spoiled_by", [np.nan, 1e-30])
def test_a_bad_example_leaves_the_coefficients_of_others_alone(spoiled_by):
    """Found by the fuzzer: with it the batch was added up one by one, and all norms were computed differently."""
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(2, 8, 2, 5)).astype(np.float32)
    x[:, 0] *= 1e7
    x[:, 1], v[:, 1] = x[:, 0], -v[:, 0] + 1e-7  # two positions whose gradients are large and cancel
    v[0, 0, 0] = spoiled_by
    if np.isfinite(spoiled_by):  # squares of all its entries vanish, and the clip below would tell
        x[0], v[0] = spoiled_by, spoiled_by
    clip = dpopt.clipping.NormalizedClip(1.0, gamma=1e-20)

    def clipped(mask):
        grads = dpopt.per_example_grads(lambda w, e: jnp.sum(e[0] @ w * e[1]), engine="ghost")
        return grads(jnp.zeros((5, 5)), (jnp.asarray(x), jnp.asarray(v)), mask=mask).clipped_sum(clip).sum

    everyone, others = np.ones(8, bool), np.arange(8) > 0
    moved = np.linalg.norm(np.float64(jax.jit(clipped)(everyone)) - np.float64(jax.jit(clipped)(others)))
    assert moved <= 1 + SLACK


def _standardized(w):
    w = w - jnp.mean(w)
    return w / jnp.sqrt(jnp.mean(w**2))


def _of_length_one(w):
    return w / jnp.linalg.norm(w)


@pytest.mark.parametrize("memory", slow_unless({1.25}, [1.25, 1]))
@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize(
    "weight",
    [lambda w: jnp.where(jnp.arange(w.size).reshape(w.shape) % 4 == 0, 0, w), jnp.triu, lambda w: w.at[1].set(1)],
    ids=["masked", "triangular", "overwritten"],
)
@pytest.mark.one_in(6)
def test_what_a_weight_drops_is_dropped_beside_a_bad_example(weight, is_group, memory):
    """Found by the fuzzer: an example whose gradient is NaN only where the weight is masked counted, but not where
    another example was bad, which moved the sum by 1.3 C."""

    def loss(params, example):
        return jnp.sum(example["x"] @ (weight(params["w"]) * example["s"])) + jnp.sum(params["v"] * example["x"])

    params = {"v": jnp.ones(4), "w": jnp.ones((4, 4))}
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    s = np.ones((3, 4, 4), np.float32)
    s[0, 1, 0] = np.nan
    x[1] = np.inf
    clip = dpopt.GroupClip({"v": 1.0, "w": 1.0}) if is_group else dpopt.FlatClip(1.0)

    @jax.jit
    def clipped(mask):
        promise = dpopt.per_example_grads(loss, engine="ghost", memory=memory)
        return promise(params, {"x": x, "s": s}, mask=mask).clipped_sum(clip).sum

    def of_first(others):
        first, without = (clipped(np.array([is_in, *others])) for is_in in (True, False))
        return np.concatenate([np.ravel(first[k] - without[k]) for k in params])

    expected = of_first([False, True])
    np.testing.assert_allclose(of_first([True, True]), expected, atol=1e-5)


@pytest.mark.parametrize("memory", slow_unless({1.25}, [1.25, 1]))
@pytest.mark.parametrize("ratio", [10.0**k for k in range(1, 11, 3)])
@pytest.mark.parametrize("weight", [_standardized, _of_length_one])
@pytest.mark.one_in(8)
def test_gradients_that_the_weight_takes_away(weight, ratio, memory):
    """Found by the fuzzer: a normalised weight takes one direction out of the gradient, but not out of the roundings of
    the sum. It moved by 194 C."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=30).astype(np.float32)
    lost = np.ones(30) if weight is _standardized else w
    x = (rng.normal(size=(64, 30)) + ratio * rng.normal(size=(64, 1)) * lost).astype(np.float32)
    clip = dpopt.clipping.NormalizedClip(1.0, gamma=1e-20)

    @jax.jit
    def clipped(mask):
        grads = dpopt.per_example_grads(lambda w, x: jnp.sum(x * weight(w)), engine="ghost", memory=memory)
        return grads(jnp.asarray(w), jnp.asarray(x), mask=mask).clipped_sum(clip).sum

    whole = np.float64(clipped(np.ones(64, bool)))
    moved = max(np.linalg.norm(whole - np.float64(clipped(np.arange(64) != i))) for i in range(0, 64, 8))
    assert moved <= 1 + SLACK
    assert moved > 0.99 or ratio > 1e3  # norms that are certain are not enlarged


@pytest.mark.one_in(4)
@pytest.mark.parametrize("engine", ["ghost", "vmap"])
@pytest.mark.parametrize("number", [1e10, 1e25])
def test_a_parameter_without_a_gradient_under_a_large_number_drops_nobody(engine, number):
    """XLA may square or divide the number before it meets the gradient: 0 * inf would be NaN, the example dropped."""

    def loss(p, x):
        return jnp.sum(jax.lax.cond(x[0] > 0, lambda: p["w"] * x, lambda: x)) + jnp.sum(p["v"] * x)

    params, x = {"v": jnp.ones(3), "w": jnp.ones(3)}, jnp.array([[1.0, 2, 3], [-1, 2, 3]])

    @jax.jit
    def clipped(params, x):
        promise = dpopt.per_example_grads(loss, engine=engine)(params, x, mask=None)
        return promise.scale({"v": jnp.float32(1), "w": jnp.float32(number)}).clipped_sum(dpopt.FlatClip(1.0)).sum

    np.testing.assert_allclose(np.linalg.norm(clipped(params, x)["v"]), 1, rtol=1e-5)  # of the second example


@pytest.mark.slow
def test_the_rounding_error_of_a_norm_is_that_of_its_own_dtype(x64):
    """Norms formed one by one are computed together: a float64 parameter must not make float32 ones look exact."""

    def loss(p, example):
        x, r = example
        return jnp.sum((x @ p["w"].astype(jnp.float32)) * r) + sum(jnp.sum(q) for name, q in p.items() if name != "w")

    # Two terms that all but cancel, whose squares overflow: the norm is mostly the bound on what they lose.
    x, r = (np.full((1, 2, size), 1e14, np.float32) for size in (30, 40))
    batch = x * np.float32([[1], [-1]]), r * np.float32([[1], [1 - 1e-5]])
    w = {"w": jnp.ones((30, 40), jnp.float32)}

    @jax.jit
    def norm(params):
        return ghost.clipped_sum(loss, params, batch, coefficients=lambda n: jax.tree.map(jnp.zeros_like, n)).leaf_norms

    alone, beside = norm(w), norm(w | {"v": jnp.ones(2, jnp.float64)})
    assert float(alone["w"][0]) > 1e26  # without the bound: 3e24
    np.testing.assert_allclose(beside["w"], alone["w"], rtol=1e-5)
    # In float64 itself, while the loss computes in float32.
    np.testing.assert_allclose(norm({"w": w["w"].astype(jnp.float64)})["w"], alone["w"], rtol=1e-5)


@pytest.mark.parametrize("way", ["recorded", "two passes", "one pass"])
@pytest.mark.parametrize("outlier", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("form", ["scan", "sequence"])
@pytest.mark.one_in(20)
def test_a_large_input_where_a_unit_is_saturated(form, outlier, way):
    """Its cotangent is zero, so it has no part in the gradient, and none in how large the terms of a sum may be."""
    rng = np.random.default_rng(0)
    u = jnp.asarray(rng.normal(size=(8, 8)) / 12, jnp.float32)

    def loss(p, x):
        if form == "sequence":
            return jnp.sum(jnp.tanh(x @ p["w"]) ** 2)
        step = lambda s, x: (z := jnp.tanh(x @ p["w"] + s @ u), z)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, jnp.zeros(8), x)[1] ** 2)

    params = {"w": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)}
    batch = rng.normal(size=(3, 16, 8)).astype(np.float32)
    batch[0, 5, 1] = outlier
    grads = np.asarray(jax.vmap(jax.grad(loss), (None, 0))(params, batch)["w"], np.float64)
    expected = grads / np.linalg.norm(grads.reshape(3, -1), axis=1)[:, None, None] / 2
    with jax.numpy_rank_promotion("allow"):
        alone, among = contributions(loss, params, jnp.asarray(batch), way, 0.5, None)
    np.testing.assert_allclose(alone, expected, atol=5e-5)
    np.testing.assert_allclose(among, expected, atol=1e-4)
    contributions.clear_cache()
