"""Examples that are masked, not finite, huge or tiny; half and mixed precision; errors."""

import ghost_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_check import assert_trees_close, check, flat_clip, leaf_clip, plain, random_like
from helpers import slow_unless
from jax import lax

from dpopt import ghost
from dpopt.ghost import one_by_one


def compiled(loss_fn, clip=flat_clip, **kwargs):
    def function(params, batch, mask):
        return ghost.clipped_sum(loss_fn, params, batch, coefficients=clip(0.7), mask=mask, **kwargs)

    return jax.jit(function)


def spoiled(batch, rows, value):
    batch = np.array(batch)
    batch[rows] = value
    return batch


def run(loss_fn, params, batch, clip=flat_clip, mask=None, **kwargs):
    return compiled(loss_fn, clip, **kwargs)(params, batch, mask)


ROBUST = pytest.mark.parametrize(
    "case",
    [ghost_cases.dense, ghost_cases.dense_sequence, ghost_cases.conv2d],
    ids=lambda c: c.__name__,
)


@ROBUST
@pytest.mark.parametrize("clip", slow_unless({flat_clip}, [flat_clip, leaf_clip]))
@pytest.mark.one_in(4)
def test_an_example_that_is_not_finite_contributes_zero(case, clip):
    loss_fn, params, batch = case(ghost_cases.Arrays())
    keep = np.arange(ghost_cases.B) != 2
    function = compiled(loss_fn, clip)
    with jax.numpy_rank_promotion("allow"):
        want, _ = plain(loss_fn, params, batch, clip(0.7), keep)
        for value in (np.nan, np.inf, -np.inf):
            got = function(params, spoiled(batch, 2, value), None)
            assert_trees_close(got.sum, want, 1e-5)
            np.testing.assert_array_equal(got.is_finite, keep)


def test_a_bad_example_with_a_filter_of_its_own_contributes_zero():
    test_an_example_that_is_not_finite_contributes_zero(ghost_cases.conv_own_filter, leaf_clip)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [ghost_cases.dense_sequence, ghost_cases.conv2d, ghost_cases.conv_groups],
    ids=lambda c: c.__name__,
)
def test_a_bad_example_among_several_devices_contributes_zero(case, monkeypatch):
    """The slow path then processes one example per device at a time; each must keep its own weight."""
    monkeypatch.setattr(jax, "device_count", lambda: ghost_cases.B)
    test_an_example_that_is_not_finite_contributes_zero(case, leaf_clip)
    monkeypatch.setattr(jax, "device_count", lambda: 2)  # chunks of examples that are not neighbours
    loss_fn, params, batch = case(ghost_cases.Arrays())
    batch = np.concatenate([batch, 2 * np.asarray(batch)])  # an even number
    keep = np.arange(len(batch)) != 2
    with jax.numpy_rank_promotion("allow"):
        got = run(loss_fn, params, spoiled(batch, 2, np.nan), leaf_clip)
        want, _ = plain(loss_fn, params, batch, leaf_clip(0.7), keep)
    assert_trees_close(got.sum, want, 1e-5)
    np.testing.assert_array_equal(got.is_finite, keep)


@pytest.mark.one_in(3)
@ROBUST
def test_a_masked_example_contributes_zero_whatever_it_holds(case):
    loss_fn, params, batch = case(ghost_cases.Arrays())
    mask = np.arange(ghost_cases.B) < 3
    function = compiled(loss_fn)
    with jax.numpy_rank_promotion("allow"):
        want, _ = plain(loss_fn, params, batch, flat_clip(0.7), mask)
        for value in (np.nan, np.inf, 1e30):
            got = function(params, spoiled(batch, slice(3, None), value), mask)
            assert_trees_close(got.sum, want, 1e-5)
            assert got.is_finite.all()


def test_all_examples_masked_or_bad():
    loss_fn, params, batch = ghost_cases.dense(ghost_cases.Arrays())
    zero = jax.tree.map(jnp.zeros_like, params)
    got = run(loss_fn, params, batch, mask=jnp.zeros(ghost_cases.B, bool))
    assert_trees_close(got.sum, zero, 0)
    got = run(loss_fn, params, jnp.full_like(batch, jnp.nan))
    assert_trees_close(got.sum, zero, 0)
    assert not got.is_finite.any()


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_squares_that_overflow_or_underflow(size):
    """The gradient equals the example: its squares leave the range of float32, the gradient itself does not."""

    def loss_fn(w, x):
        return jnp.sum(w * x)

    batch = jnp.array([[3.0, 4.0], [3.0 * size, 4.0 * size]], jnp.float32)
    got = run(loss_fn, jnp.zeros(2), batch, clip=lambda c: flat_clip(1.0))
    assert got.is_finite.all()
    direction = np.array([0.6, 0.8])
    if size > 1:
        np.testing.assert_allclose(got.leaf_norms, [5, 5 * size], rtol=1e-6)
        np.testing.assert_allclose(got.sum, 2 * direction, rtol=1e-6)
    else:  # its norm may be reported as zero, but it must stay within the bound
        np.testing.assert_allclose(got.sum, direction, rtol=1e-6)


def test_a_dense_layer_on_huge_inputs():
    def loss_fn(w, x):
        return jnp.sum(x @ w)

    batch = jnp.array([[1e30, -2e30], [1.0, 2.0]], jnp.float32)
    got = run(loss_fn, jnp.ones((2, 3)), batch, clip=lambda c: flat_clip(1.0))
    g = np.array([[1, -2], [1, 2]]) / np.sqrt(15)
    np.testing.assert_allclose(got.sum, np.repeat(g.sum(0)[:, None], 3, 1), rtol=1e-6, atol=1e-7)


def test_offset_and_scale_survive_a_bad_example():
    loss_fn, params, batch = ghost_cases.dense(ghost_cases.Arrays())
    scale = jax.tree.map(lambda p: np.full(p.shape, 2.0, np.float32), params)
    offset = jax.tree.map(lambda p: np.full(p.shape, 0.1, np.float32), params)
    got = run(loss_fn, params, spoiled(batch, 1, np.nan), scale=scale, offset=offset)
    want, _ = plain(loss_fn, params, batch, flat_clip(0.7), np.arange(5) != 1, scale, offset)
    assert_trees_close(got.sum, want, 1e-5)


@pytest.mark.parametrize(
    "case, dtype",
    [
        (ghost_cases.dense_sequence, jnp.float16),
        (ghost_cases.dense_sequence, jnp.bfloat16),
        (ghost_cases.conv2d, jnp.bfloat16),
        (ghost_cases.conv2d, jnp.float16),
        (ghost_cases.lstm, jnp.float16),
        (ghost_cases.lstm, jnp.bfloat16),
    ],
)
@pytest.mark.slow
def test_half_precision_parameters(case, dtype):
    """Norms and sums are float32; they agree as well as 8 bits of mantissa in the passes allow."""
    loss_fn, params, batch = case(ghost_cases.Arrays())
    half = jax.tree.map(lambda x: np.asarray(x).astype(dtype), params)

    def cast(p, x):
        return loss_fn(p, x.astype(dtype)).astype(jnp.float32)

    if case is ghost_cases.lstm:

        def cast(p, x):
            return loss_fn(jax.tree.map(lambda w: w.astype(jnp.float32), p), x)

    with jax.numpy_rank_promotion("allow"):
        got = run(cast, half, batch)
        want, norms = plain(cast, half, batch, flat_clip(0.7), np.ones(5, bool))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((got.sum, got.leaf_norms)))
    assert_trees_close(got.leaf_norms, norms, 0.05)
    assert_trees_close(got.sum, want, 0.05)


def test_half_precision_sums_keep_the_clip_bound():
    """The norm of the clipped contribution is at most the bound, up to float32 rounding."""
    params = {"w": jax.random.normal(jax.random.key(0), (33, 7)).astype(jnp.bfloat16)}
    batch = jax.random.normal(jax.random.key(1), (1, 5, 33)).astype(jnp.bfloat16)

    def loss_fn(p, x):
        return jnp.sum((x @ p["w"]).astype(jnp.float32) ** 2)

    got = run(loss_fn, params, batch)
    np.testing.assert_allclose(jnp.linalg.norm(got.sum["w"]), 0.7, rtol=1e-5)


@pytest.mark.slow
def test_mixed_precision_compute(x64):
    """Float32 parameters are cast to bfloat16 for the forward pass; the reference rounds differently."""
    loss_fn, params, batch = ghost_cases.dense_sequence(ghost_cases.Arrays())
    params, batch = jax.tree.map(np.float32, (params, batch))

    def half(tree):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    def cast(p, x):
        return loss_fn(half(p), half(x)).astype(jnp.float32)

    with jax.numpy_rank_promotion("allow"):
        check(cast, params, batch, rtol=0.05)


def test_norms_of_a_million_entries():
    """Float32 norms of large leaves are accurate to 1e-6."""

    def loss_fn(p, x):
        return jnp.sum(jnp.tanh(x[0] * p))

    params = jax.random.normal(jax.random.key(0), (1000, 1000))
    batch = jnp.array([[1.0], [0.3]])
    got = run(loss_fn, params, batch)
    exact = [np.linalg.norm(x / np.cosh(x * np.asarray(params, np.float64)) ** 2) for x in (1.0, float(batch[1, 0]))]
    np.testing.assert_allclose(got.leaf_norms, exact, rtol=1e-6)


def test_a_bias_on_a_sequence():
    """As in opacus#751: the norm is of the summed gradient, not of the sequence of gradients."""
    got = run(lambda b, x: jnp.sum(x + b[None]), jnp.zeros(3), jnp.ones((2, 4, 3)))
    np.testing.assert_allclose(got.leaf_norms, [4 * 3**0.5] * 2, rtol=1e-6)


@pytest.mark.slow
def test_the_clip_norm_is_obeyed():
    """As in opacus#664: doubling the bound of clipped examples doubles the sum."""
    loss_fn, params, batch = ghost_cases.dense_sequence(ghost_cases.Arrays())
    with jax.numpy_rank_promotion("allow"):
        small, large = (run(loss_fn, params, batch * 9, lambda _, c=c: flat_clip(c)) for c in (1e-3, 2e-3))
    assert_trees_close(jax.tree.map(lambda x: 2 * x, small.sum), large.sum, 1e-5)


def test_has_aux_and_losses():
    loss_fn, params, batch = ghost_cases.dense(ghost_cases.Arrays())

    def with_aux(p, x):
        return (loss_fn(p, x), {"x": x, "w": p["b"]})

    got = run(with_aux, params, batch, has_aux=True)
    np.testing.assert_allclose(got.aux["x"], batch)
    assert got.aux["w"].shape == (ghost_cases.B, 3)
    bad = run(with_aux, params, spoiled(batch, 0, np.nan), has_aux=True)
    assert list(bad.is_finite) == [False, True, True, True, True]


def test_cannot_follow_names_the_primitive():
    def loss_fn(w, x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * w), (x, x))[1]

    with pytest.raises(ghost.CannotFollow, match="while") as error:
        ghost.clipped_sum(loss_fn, jnp.float32(2), jnp.ones(3), coefficients=flat_clip(1))
    assert error.value.primitive == "while"


def test_a_loss_that_is_not_a_scalar_is_refused():
    with pytest.raises(TypeError, match="real scalar"):
        run(lambda w, x: x * w, jnp.ones(3), jnp.ones((2, 3)))


@pytest.mark.parametrize(
    "case",
    [
            ghost_cases.conv2d, ghost_cases.embedding, ghost_cases.embedding_long, ghost_cases.embedding_out_of_range,
            ghost_cases.embedding_clipped, ghost_cases.tied_embedding_large, ghost_cases.matrix_factorization,
        ],
    ids=lambda c: c.__name__,
)  # fmt: skip
@pytest.mark.slow
def test_finite_gradients_need_no_slow_path(case, monkeypatch, x64):
    """The slow path would give the right result too, so no other test would notice a NaN on the fast path."""

    monkeypatch.setattr(one_by_one, "_norms", lambda run, chosen, norms, *_: jnp.full_like(norms, jnp.nan))
    loss_fn, params, batch = case(ghost_cases.Arrays())
    scale, offset = random_like(params, 1), random_like(params, 2, low=-0.5)
    with jax.numpy_rank_promotion("allow"):
        for shift in (None, offset):
            got = run(loss_fn, params, batch, scale=scale, offset=shift)
            assert all(np.isfinite(x).all() for x in jax.tree.leaves((got.sum, got.leaf_norms)))
