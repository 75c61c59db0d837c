"""Sums of products of factors, in the order that suits the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpopt.ghost.rows import summed_products


@pytest.mark.parametrize("shape", [(300, 8, 2), (300, 2, 8), (10, 8, 2)])
def test_summed_products(shape):
    positions, wide, narrow = shape
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(3, positions, wide)), rng.normal(size=(3, positions, narrow))
    found = jax.jit(jax.vmap(summed_products))(left.astype(np.float32), right.astype(np.float32))
    np.testing.assert_allclose(found, np.einsum("bta,btp->bap", left, right), atol=1e-4)


@pytest.mark.parametrize("positions, narrow_first", [(300, True), (10, False)])
def test_the_narrow_factor_comes_first_in_long_sums(positions, narrow_first):
    """XLA turns the product round without the barrier; it is several times slower then."""
    left, right = jnp.zeros((positions, 64)), jnp.zeros((positions, 4))
    compiled = jax.jit(summed_products).lower(left, right).compile().as_text()
    (product,) = [line for line in compiled.splitlines() if " dot(" in line]
    assert ("f32[4,64]" in product.partition(" dot(")[0]) == narrow_first
