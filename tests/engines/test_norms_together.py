"""Norms computed together equal norms computed one by one, whatever the arrays contain."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpopt.engines import norms

SHAPES = st.lists(
    st.sampled_from([(0,), (), (1,), (3, 2), (1023,), (1024,), (1025,), (2, 2049), (5000,)]), min_size=1, max_size=9
)
SCALES = (0.0, 1e-38, 1e-30, 1.0, 1e18, 1e30, 3e38, np.inf, np.nan)


def arrays(shapes, seed):
    rng = np.random.default_rng(seed)
    found = []
    for shape in shapes:
        x = rng.normal(size=shape)
        scale = rng.choice(SCALES)
        if x.size and not np.isfinite(scale):
            x = np.where(np.arange(x.size).reshape(shape) == rng.integers(x.size), scale, x)
        else:
            x = np.clip(x, -1, 1) * scale
        found.append(jnp.asarray(x, jnp.float32))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "copied, share",  # no arrays together, the small ones, all
    [
        (1_500, 1),
        *((copied, 1) for copied in (0, 6_000, 2**22)),
        (6_000, 1 / 8),
        *((copied, 1 / 8) for copied in (0, 1_500, 2**22)),
    ],
)
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(shapes=SHAPES, seed=st.integers(0, 10_000))
def test_norms_together_are_those_one_by_one(copied, share, shapes, seed):
    given = arrays(shapes, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "_COPIED", copied)
        patch.setattr(norms, "_COPIED_SHARE", share)
        together = norms.norms_together(given)
    alone = [norms.safe_norm(x.reshape(-1), axis=0) for x in given]
    # A norm near the smallest float is only a few of its steps.
    np.testing.assert_allclose(together, alone, rtol=3e-6, atol=1e-43)


@pytest.mark.parametrize(
    "row", [[9.0], [3e38, 1e38], [1e-38, 2e-38], [1e30, -1e30], [0.0, 0.0], [-np.inf], [np.nan, 1.0]]
)
def test_norms_of_constants_are_those_of_arguments(row):
    """XLA computes with constants when it compiles, by rules of its own."""
    x = np.asarray(row, np.float32)
    found = [
        jax.jit(lambda y: norms.safe_norm(y, axis=0))(x),
        jax.jit(lambda: norms.safe_norm(jnp.asarray(x), axis=0))(),
    ]
    np.testing.assert_allclose(found, np.abs(np.linalg.norm(x.astype(np.float64))), rtol=3e-7, atol=1.2e-38)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older versions of XLA store the squares")
def test_norms_of_rows_need_no_copy_of_them():
    x = jax.ShapeDtypeStruct((64, 2**16), jnp.float32)
    program = jax.jit(lambda x: norms.safe_norm(x, axis=1)).lower(x).compile()
    assert program.memory_analysis().temp_size_in_bytes < 0.01 * x.size * 4
