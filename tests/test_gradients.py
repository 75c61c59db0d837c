import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    RTOL32,
    RTOL64,
    assert_near,
    dot_loss,
    loop_clipped_sum,
    mlp_batch,
    mlp_loss,
    mlp_params,
    norm,
    privacy_four,
    random_tree,
    rows,
)

import dpopt
from dpopt.clipping import FlatClip
from dpopt.gradients import stacked_grads

CLIP = FlatClip(1.5)


ENGINES = pytest.mark.parametrize("engine", ["vmap", "auto"])


def promise(grads, mask=None, microbatch_size=None, params=None, engine="vmap"):
    params = random_tree(99) if params is None else params
    return dpopt.per_example_grads(dot_loss, engine=engine, microbatch_size=microbatch_size)(params, grads, mask=mask)


@pytest.mark.one_in(4)
@ENGINES
@pytest.mark.parametrize("microbatch_size", [None, 1, 3, 7, 100])
def test_clipped_sum_equals_a_loop(microbatch_size, engine):
    grads = random_tree(0, batch=7)
    run = jax.jit(lambda g: promise(g, microbatch_size=microbatch_size, engine=engine).clipped_sum(CLIP).sum)
    assert_near(run(grads), loop_clipped_sum(grads, 1.5))


def test_clipped_sum_equals_a_loop_in_64_bits(x64):
    grads = jax.tree.map(lambda g: g.astype(np.float64), random_tree(0, batch=7))
    params = jax.tree.map(lambda g: g[0], grads)
    run = jax.jit(lambda g, p: promise(g, params=p).clipped_sum(CLIP).sum)
    assert_near(run(grads, params), loop_clipped_sum(grads, 1.5), RTOL64)


@pytest.mark.one_in(2)
@ENGINES
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_each_sum_has_the_width_of_its_own_parameter(microbatch_size, engine, x64):
    """Found by the fuzzer: one float64 parameter made all of vmap's sums float64, and microbatches failed."""
    leaves, tree = jax.tree.flatten(random_tree(0, batch=7))
    dtypes = [np.float64, np.float32, jnp.bfloat16, np.float16][: len(leaves)]
    params = [np.zeros(g.shape[1:], t) for g, t in zip(leaves, dtypes, strict=True)]

    def loss(params, example):
        return sum(jnp.vdot(w.astype(np.float32), x) for w, x in zip(params, example, strict=True))

    made = dpopt.per_example_grads(loss, engine=engine, microbatch_size=microbatch_size)
    total = jax.jit(lambda p, batch: made(p, batch, mask=None).clipped_sum(CLIP).sum)(params, leaves)
    assert [x.dtype for x in total] == [jnp.promote_types(t, np.float32) for t in dtypes]
    # Plain gradients of half-precision parameters are rounded, and `auto` takes them for a tree as small as this.
    assert_near(tree.unflatten(total), loop_clipped_sum(tree.unflatten(leaves), 1.5), 2.0**-7)


@pytest.mark.one_in(4)
@ENGINES
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_scale_and_shift_act_before_the_clip(microbatch_size, engine):
    grads = random_tree(1, batch=5)
    scale = jax.tree.map(lambda x: np.abs(x) + 0.1, random_tree(2))
    offset = random_tree(3)
    got = (
        promise(grads, microbatch_size=microbatch_size, engine=engine).scale(scale).shift(offset).clipped_sum(CLIP).sum
    )
    assert_near(got, loop_clipped_sum(grads, 1.5, scale=scale, offset=offset))


def test_scale_after_shift_scales_the_shift():
    grads = random_tree(1, batch=5)
    got = promise(grads).scale(2.0).shift(random_tree(3)).scale(0.5).shift(1.0).clipped_sum(CLIP).sum
    offset = jax.tree.map(lambda o: 0.5 * o + 1.0, random_tree(3))
    assert_near(got, loop_clipped_sum(grads, 1.5, offset=offset))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("scale", [2.0, np.float64(2.0), jnp.bfloat16(2.0), np.full((2,), 2.0), np.full((3, 1), 2.0)])
def test_scale_broadcasts_to_a_parameter_and_keeps_its_dtype(scale, either_precision):
    params = {"w": jnp.zeros((3, 2), jnp.float32)}
    grads = {"w": jnp.asarray(random_tree(0, batch=4)["w"])}
    for microbatch_size in (None, 3):
        scaled = promise(grads, params=params, microbatch_size=microbatch_size).scale({"w": scale})
        total = scaled.clipped_sum(CLIP).sum
        assert total["w"].dtype == jnp.float32
        assert_near(total, loop_clipped_sum(grads, 1.5, scale={"w": 2.0}))
        assert_near(scaled.materialize(), {"w": 2.0 * grads["w"]})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("clip_norm", [1.5, np.float64(1.5), np.float32(1.5), 2])
def test_type_of_the_clip_norm_does_not_change_the_dtype(clip_norm, either_precision):
    grads = {"w": jnp.asarray(random_tree(0, batch=4)["w"])}
    for microbatch_size in (None, 3):
        made = promise(grads, params={"w": jnp.zeros((3, 2), jnp.float32)}, microbatch_size=microbatch_size)
        assert made.clipped_sum(FlatClip(clip_norm)).sum["w"].dtype == jnp.float32


@pytest.mark.one_in(3)
@ENGINES
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_poisoned_examples_add_zero_and_are_counted(poison, microbatch_size, engine):
    grads = random_tree(0, batch=5)
    grads["w"][1, 0, 0] = poison
    grads["deep"][0].b[3] = poison
    made = promise(grads, microbatch_size=microbatch_size, engine=engine)
    assert_near(made.clipped_sum(CLIP).sum, loop_clipped_sum(grads, 1.5))
    assert made.sensitive.is_finite.tolist() == [True, False, True, False, True]


@ENGINES
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_padding_adds_zero_whatever_it_holds(microbatch_size, engine):
    grads = random_tree(0, batch=5)
    mask = np.array([True, False, True, True, False])
    clean = loop_clipped_sum(grads, 1.5, mask=mask)
    grads["w"][1], grads["w"][4] = np.nan, 1e30
    made = promise(grads, mask=mask, microbatch_size=microbatch_size, engine=engine)
    assert_near(made.clipped_sum(CLIP).sum, clean)
    assert made.sensitive.is_example.tolist() == mask.tolist()
    zeroed = jax.tree.map(lambda g: np.asarray(g)[~mask], made.materialize())
    assert norm(zeroed) == 0.0


def test_sensitive_reports_losses_norms_and_clipping_per_example():
    params, batch = mlp_params(), mlp_batch(5)
    made = dpopt.per_example_grads(mlp_loss, microbatch_size=2)(params, batch, mask=None)
    grads = jax.vmap(jax.grad(mlp_loss), (None, 0))(params, batch)
    norms = np.array([norm(g) for g in rows(grads)])
    made.clipped_sum(FlatClip(float(np.mean(np.sort(norms)[2:4]))))
    np.testing.assert_allclose(made.sensitive.norms, norms, rtol=RTOL32)
    np.testing.assert_allclose(made.sensitive.losses, jax.vmap(mlp_loss, (None, 0))(params, batch), rtol=RTOL32)
    assert made.sensitive.was_clipped.sum() == 2


def test_norms_are_those_of_the_space_where_the_clip_happened():
    made = promise(np.ones((2, 4), np.float32), params=jnp.zeros(4)).scale(10.0)
    assert made.clipped_sum(CLIP).sensitive.norms.tolist() == [20.0, 20.0]


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_aux_comes_back_per_example(microbatch_size):
    def loss(w, x):
        return jnp.sum(w * x), {"twice": 2 * x}

    grads = dpopt.per_example_grads(loss, has_aux=True, microbatch_size=microbatch_size)
    made = grads(jnp.zeros(2), jnp.arange(10.0).reshape(5, 2), mask=None)
    assert made.clipped_sum(CLIP).sensitive.aux["twice"].tolist() == (2 * np.arange(10.0).reshape(5, 2)).tolist()


def test_sensitive_before_a_clip_is_an_error():
    with pytest.raises(ValueError, match="not been clipped yet"):
        _ = promise(random_tree(0, batch=2)).sensitive


@ENGINES
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_an_empty_batch_sums_to_zero(microbatch_size, engine):
    made = promise(random_tree(0, batch=0), microbatch_size=microbatch_size, engine=engine)
    assert_near(made.clipped_sum(CLIP).sum, jax.tree.map(np.zeros_like, random_tree(0)))
    assert made.sensitive.norms.shape == (0,)
    assert jax.tree.leaves(made.materialize())[0].shape[0] == 0


def test_no_gradient_is_computed_before_the_clip():
    calls = []

    @jax.custom_vjp
    def watched(x):
        return x

    watched.defvjp(lambda x: (x, None), lambda _, g: (calls.append(1), (g,))[1])
    made = dpopt.per_example_grads(lambda w, x: watched(jnp.sum(w * x)))(jnp.zeros(2), jnp.ones((3, 2)), mask=None)
    made = made.scale(2.0).shift(1.0)
    assert not calls
    made.clipped_sum(CLIP)
    assert calls


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_gradients_are_summed_in_float32(dtype):
    # 1 + 300 * 2^-9 needs more bits than either type has, so a narrow sum would stop at 1.
    grads = np.array([1.0] + 300 * [2.0**-9])[:, None].astype(dtype)
    total = jax.jit(lambda g: promise(g, params=jnp.zeros(1, dtype)).clipped_sum(FlatClip(10.0)).sum)(grads)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, [1 + 300 * 2.0**-9], rtol=RTOL32)


@pytest.mark.parametrize(
    "params",
    [1.0, np.float64(1.0), {"a": 1.0, "b": None}, np.ones(()), (jnp.ones(2), [jnp.ones((0, 3))])],
    ids=["float", "np.float64", "dict with None", "0-d", "zero-size leaf"],
)
@pytest.mark.parametrize("under_jit", [False, True])
@pytest.mark.one_in(6)
def test_unusual_parameters(params, under_jit):
    def loss(p, x):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(p)) * x

    opt = dpopt.dp_adam(0.1, **privacy_four())
    step = dpopt.make_train_step(loss, opt, microbatch_size=2)
    new, _, _ = (jax.jit(step) if under_jit else step)(params, opt.init(params), np.ones(3, np.float32), mask=None)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))


def test_numpy_batches_and_masks_in_closures_of_a_jitted_function():
    params, batch = mlp_params(), jax.tree.map(np.asarray, mlp_batch(5))
    mask = np.array([True, True, False, True, True])
    f = dpopt.per_example_grads(mlp_loss, microbatch_size=2)
    got = jax.jit(lambda p: f(p, batch, mask=mask).clipped_sum(CLIP).sum)(params)
    grads = jax.vmap(jax.grad(mlp_loss), (None, 0))(params, batch)
    assert_near(got, loop_clipped_sum(grads, 1.5, mask=mask))


def test_a_batch_may_hold_integers_and_keys():
    def loss(w, example):
        return jnp.sum(w * jax.random.normal(example["key"], (2,))) * example["count"]

    batch = {"key": jax.random.split(jax.random.key(0), 3), "count": np.arange(3)}
    got = (
        dpopt.per_example_grads(loss, microbatch_size=2)(jnp.zeros(2), batch, mask=None)
        .clipped_sum(FlatClip(100.0))
        .sum
    )
    draws = jnp.stack([jax.random.normal(k, (2,)) for k in batch["key"]])
    np.testing.assert_allclose(got, draws[1] + 2 * draws[2], rtol=RTOL32)


W = np.zeros(2, np.float32)
X = np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("params", "batch", "mask", "error", "message"),
    [
        ({"w": np.zeros(2, np.int32)}, X, None, TypeError, r"\['w'\] has dtype int32"),
        ({"w": np.zeros(2, np.complex64)}, X, None, TypeError, r"\['w'\] has dtype complex64"),
        ({}, X, None, ValueError, "no leaves"),
        (W, {}, None, ValueError, "batch has no arrays"),
        (W, 1.0, None, ValueError, "leading batch axis; batch is a scalar"),
        (W, {"x": X, "y": X[:2]}, None, ValueError, r"disagree on the batch size: \['x'\]: 3, \['y'\]: 2"),
        (W, X, np.ones(2, bool), ValueError, r"mask must have shape \(3,\).*got \(2,\)"),
        (W, X, np.ones((3, 1), bool), ValueError, r"mask must have shape \(3,\)"),
        (W, X, True, ValueError, r"mask must have shape \(3,\)"),
        (W, X, np.ones(3), TypeError, "mask must be boolean.*float"),
        (W, X, np.ones(3, int), TypeError, "mask must be boolean.*int"),
    ],
)
def test_bad_parameters_batches_and_masks_are_named(params, batch, mask, error, message):
    with pytest.raises(error, match=message):
        dpopt.per_example_grads(lambda p, x: 0.0)(params, batch, mask=mask)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda w, x: w * x, r"shape \(2,\)"),
        (lambda w, x: jnp.sum(w * x)[None], r"shape \(1,\)"),
        (lambda w, x: jnp.int32(1), "dtype int32"),
        (lambda w, x: jnp.complex64(1), "dtype complex64"),
        (lambda w, x: (jnp.sum(w), x), "got a tuple.*has_aux"),
        (lambda w, x: None, "got a NoneType"),
    ],
)
def test_a_loss_that_is_no_real_scalar_is_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        dpopt.per_example_grads(loss)(W, X, mask=None)


def test_has_aux_needs_a_pair():
    with pytest.raises(TypeError, match="must return"):
        dpopt.per_example_grads(lambda w, x: jnp.sum(w * x), has_aux=True)(W, X, mask=None)


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"microbatch_size": 0}, ValueError),
        ({"microbatch_size": -2}, ValueError),
        ({"microbatch_size": 2.0}, TypeError),
        ({"microbatch_size": True}, TypeError),
        ({"engine": "fast"}, ValueError),
    ],
)
def test_bad_settings_are_named(kwargs, error):
    with pytest.raises(error, match=next(iter(kwargs))):
        dpopt.per_example_grads(dot_loss, **kwargs)


def test_the_loss_must_be_a_function():
    with pytest.raises(TypeError, match="loss_fn"):
        dpopt.per_example_grads(3)


@pytest.mark.parametrize("method", ["scale", "shift"])
@pytest.mark.parametrize(
    ("diagonal", "message"),
    [
        ({"w": 1.0}, "tree structure of the parameters"),
        (np.ones((5,)), "does not broadcast"),
        ({"w": np.ones((4, 3, 2)), "deep": 1.0, "t": 1.0}, r"\['w'\] has shape \(4, 3, 2\)"),
    ],
)
def test_a_diagonal_that_does_not_fit_is_refused(method, diagonal, message):
    with pytest.raises(ValueError, match=message):
        getattr(promise(random_tree(0, batch=2)), method)(diagonal)


def test_a_promise_does_not_cross_a_jit_boundary_unnoticed():
    made = promise(random_tree(0, batch=2))
    with pytest.raises(TypeError, match="PerExampleGrads"):
        jax.jit(lambda g: 0)(made)


def test_a_promise_refuses_arithmetic():
    made = promise(random_tree(0, batch=2))
    for operation in (lambda g: 2.0 * g, lambda g: g + 1, lambda g: -g, lambda g: g**2, lambda g: g / 2):
        with pytest.raises(TypeError, match="clip_and_sum first"):
            operation(made)


def test_stacked_gradients_serve_as_a_promise():
    grads = random_tree(0, batch=4)
    assert_near(stacked_grads(grads, mask=None).clipped_sum(CLIP).sum, loop_clipped_sum(grads, 1.5))
    with pytest.raises(ValueError, match="disagree"):
        stacked_grads({"a": X, "b": X[:2]}, mask=None)
    with pytest.raises(TypeError, match="int"):
        stacked_grads(np.ones((3, 2), int), mask=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, groups, engine",
    [
        (jnp.float32, 2, "vmap"),
        (jnp.float64, 1, "ghost"),
        (jnp.float32, 2, "ghost"),
        (jnp.float64, 1, "vmap"),
    ],
)
@pytest.mark.parametrize(
    "microbatch_size, jitted",
    [(3, True), (None, True), (None, False)],
)
def test_a_convolution_keeps_a_poisoned_example_apart(dtype, groups, microbatch_size, jitted, engine):
    """Under vmap the filter gradients of all examples are one convolution, in which XLA may multiply NaN by 0."""
    with jax.enable_x64(dtype == jnp.float64):
        rng = np.random.default_rng(0)
        w, x = (jnp.asarray(rng.normal(size=s), dtype) for s in ((3, 3, 4 // groups, 4), (6, 5, 5, 4)))

        def loss(w, x):
            numbers = ("NHWC", "HWIO", "NHWC")
            options = {"dimension_numbers": numbers, "feature_group_count": groups}
            return jnp.sum(jnp.tanh(jax.lax.conv_general_dilated(x[None], w, (2, 2), "SAME", **options)))

        made = dpopt.per_example_grads(loss, engine=engine, microbatch_size=microbatch_size)

        def run(w, x, mask):
            return made(w, x, mask=mask).clipped_sum(CLIP)

        run = jax.jit(run) if jitted else run
        keep = np.arange(6) != 2
        want = run(w, x, keep)
        poisoned = run(w, x.at[2].set(np.nan), np.ones(6, bool))
        padded = run(w, x.at[2].set(np.nan), keep)
        for got in (poisoned, padded):
            np.testing.assert_allclose(got.sum, want.sum, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(poisoned.sensitive.is_finite, keep)
        assert float(jnp.abs(want.sum).max()) > 0.01
        finite = jnp.isfinite(made(w, x.at[2].set(np.nan), mask=None).materialize()).all((1, 2, 3, 4))
        np.testing.assert_array_equal(finite, keep)
