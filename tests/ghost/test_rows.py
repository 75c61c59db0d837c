"""Rows of factors: sums of products in the order that suits the device, and rows that are looked up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpopt.ghost.rows import OneHot, summed_products


@pytest.mark.parametrize("shape", [(300, 8, 2), (300, 2, 8), (10, 8, 2)])
def test_summed_products(shape):
    positions, wide, narrow = shape
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(3, positions, wide)), rng.normal(size=(3, positions, narrow))
    found = jax.jit(jax.vmap(summed_products))(left.astype(np.float32), right.astype(np.float32))
    np.testing.assert_allclose(found, np.einsum("bta,btp->bap", left, right), atol=1e-4)


@pytest.mark.parametrize("positions, narrow_first", [(300, True), (10, True), (7, False)])
def test_the_narrow_factor_comes_first_in_long_sums(positions, narrow_first):
    """XLA turns the product round without the barrier; it is several times slower then."""
    left, right = jnp.zeros((positions, 64)), jnp.zeros((positions, 4))
    compiled = jax.jit(summed_products).lower(left, right).compile().as_text()
    (product,) = [line for line in compiled.splitlines() if " dot(" in line]
    assert ("f32[4,64]" in product.partition(" dot(")[0]) == narrow_first


@pytest.mark.one_in(3)
@pytest.mark.parametrize("count, size", [(0, 5), (1, 5), (7, 3), (300, 40), (300, 100_000), (300, 2**31 - 5)])
def test_rows_with_equal_indices_are_merged_into_the_first(count, size):
    rng = np.random.default_rng(count)
    ids = rng.choice(rng.integers(-2, size + 2, 60), count)  # so that large ones repeat, too
    x = rng.normal(size=(count, 4)).astype(np.float32)
    want = np.zeros((count, 4))
    for t, i in enumerate(ids):
        if 0 <= i < size:
            want[list(ids).index(i)] += x[t]
    found = OneHot(jnp.asarray(ids, jnp.int32), size).merged(jnp.asarray(x))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
