"""The ghost engine equals ``vmap(grad)`` for every coverage item, in float64 and float32."""

import functools

import ghost_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_check import check, flat_clip, leaf_clip, random_like
from helpers import slow_unless

import dpopt

CASES = pytest.mark.parametrize("case", ghost_cases.CASES, ids=lambda case: case.__name__)


# One case for every norm method and every kind of weight. Every run tests these; `-m slow` adds the others.
_KINDS = {
    ghost_cases.dense, ghost_cases.dense_wide, ghost_cases.dense_sequence, ghost_cases.scaled_weight,
    ghost_cases.norms_and_scales, ghost_cases.embedding, ghost_cases.embedding_long,
    ghost_cases.embedding_out_of_range, ghost_cases.table_of_two_indices_out_of_range, ghost_cases.table_of_two_scalars,
    ghost_cases.vmapped_embedding, ghost_cases.tied_embedding_large,
    ghost_cases.conv2d, ghost_cases.conv_small_image, ghost_cases.weight_standardized,
    ghost_cases.weight_standardized_gram, ghost_cases.conv_pixel_gram, ghost_cases.matrix_factorization,
    ghost_cases.attention, ghost_cases.lstm, ghost_cases.scanned_layers, ghost_cases.frozen_and_unused,
    ghost_cases.cond,
}  # fmt: skip

# In float64 those, and a third of the others.
_QUICK = _KINDS | {*[case for case in ghost_cases.CASES if case not in _KINDS][::3]}


def kinds(share):
    """A sixth of the kinds for every run; diagonals, two passes and one pass each take a different sixth."""
    quick = [case for case in ghost_cases.CASES if case in _KINDS][share::6]
    return pytest.mark.parametrize("case", slow_unless(quick, ghost_cases.CASES), ids=lambda case: case.__name__)


@pytest.mark.parametrize("case", slow_unless(_QUICK, ghost_cases.CASES), ids=lambda case: case.__name__)
@pytest.mark.one_in(8)
def test_equals_vmap_in_float64(case, x64):
    loss_fn, params, batch = case(ghost_cases.Arrays())
    with jax.numpy_rank_promotion("allow"):  # for the models; test_transforms tests the engine without it
        check(loss_fn, params, batch)


@kinds(0)
@pytest.mark.slow
def test_equals_vmap_under_a_diagonal(case, x64):
    loss_fn, params, batch = case(ghost_cases.Arrays())
    with jax.numpy_rank_promotion("allow"):
        check(loss_fn, params, batch, scale=random_like(params, 1), clips=(leaf_clip,))


@pytest.mark.slow
@CASES
def test_equals_vmap_with_an_offset(case, x64):
    loss_fn, params, batch = case(ghost_cases.Arrays())
    scale, offset = random_like(params, 1), random_like(params, 2, low=-0.5)
    with jax.numpy_rank_promotion("allow"):
        check(loss_fn, params, batch, scale=scale, offset=offset, clips=(flat_clip,))


@pytest.mark.slow
@CASES
def test_equals_vmap_in_float32(case):
    loss_fn, params, batch = case(ghost_cases.Arrays())
    with jax.numpy_rank_promotion("allow"):
        check(loss_fn, params, batch, rtol=1e-5, atol=1e-5, clips=(flat_clip,))


@kinds(1)
@pytest.mark.one_in(4)
def test_two_passes_equal_vmap(case, x64):
    loss_fn, params, batch = case(ghost_cases.Arrays())
    with jax.numpy_rank_promotion("allow"):
        check(loss_fn, params, batch, clips=(flat_clip,), two_passes=True)


@kinds(2)
@pytest.mark.parametrize("diagonal", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "diagonal"])
@pytest.mark.one_in(6)
def test_one_pass_equals_vmap(case, diagonal, x64):
    """Parameters that cannot be clipped in the first pass take a second one."""
    loss_fn, params, batch = case(ghost_cases.Arrays())
    scale = random_like(params, 1) if diagonal else None
    with jax.numpy_rank_promotion("allow"):
        check(loss_fn, params, batch, scale=scale, clips=(leaf_clip,), one_pass=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [ghost_cases.dense, ghost_cases.conv2d, ghost_cases.tied_embedding])
def test_scales_and_offsets_broadcast(case, x64):
    loss_fn, params, batch = case(ghost_cases.Arrays())
    with jax.numpy_rank_promotion("allow"):
        numbers = jax.tree.map(lambda p: jnp.float64(-1.7), params)
        check(loss_fn, params, batch, scale=numbers, clips=(flat_clip,))
        check(
            loss_fn,
            params,
            batch,
            clips=(flat_clip,),
            scale=numbers,
            offset=jax.tree.map(lambda p: jnp.float64(0.2), params),
        )
        rows = jax.tree.map(lambda p: random_like(p[..., :1], 3), params)
        check(loss_fn, params, batch, scale=rows, offset=rows, clips=(flat_clip,))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("algorithm", ["F32_F32_F32", "BF16_BF16_F32", "BF16_BF16_F32_X6"])
def test_a_loss_that_chooses_how_products_are_computed(algorithm):
    """An algorithm stands where a precision for each factor usually does."""
    rng = np.random.default_rng(0)
    x, v = (np.float32(rng.normal(size=(4, 8, n))) for n in (5, 3))
    w = np.float32(rng.normal(size=(5, 3)))

    def loss_fn(w, example):
        product = jnp.matmul(example[0], w, precision=jax.lax.DotAlgorithmPreset[algorithm])
        return jnp.sum(jnp.tanh(product) * example[1])

    @functools.partial(jax.jit, static_argnums=0)
    def clipped(engine, w, batch):
        grads = dpopt.per_example_grads(loss_fn, engine=engine)(w, batch, mask=None)
        return grads.clipped_sum(dpopt.FlatClip(1.0)).sum

    tolerance = 1e-6 if algorithm == "F32_F32_F32" else 1e-2  # products for the sum are computed in full precision
    np.testing.assert_allclose(clipped("ghost", w, (x, v)), clipped("vmap", w, (x, v)), rtol=0, atol=tolerance)
