"""Convolutions with few channels a group are added up entry by entry: XLA's own are the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpopt.ghost.few_channels import add_up, can_add_up


def _drawn(seed: int):
    """The image, filter and parameters of a convolution, channels last, with any stride, padding and dilation."""
    rng = np.random.default_rng(seed)
    rank, groups = int(rng.integers(1, 4)), int(rng.integers(2, 6))
    channels, outputs = (int(n) for n in rng.integers(1, 4, 2))
    window = rng.integers(1, 4, rank)
    low, high = rng.integers(-1, 4, (2, rank))
    step, within, apart = (rng.integers(1, 4, rank) if rng.random() < 0.4 else np.ones(rank, int) for _ in range(3))
    # Large enough for one position of the filter.
    least = -(-((window - 1) * apart + 1 - low - high - 1) // within) + 1
    sides = np.maximum(least, 1) + rng.integers(0, 5, rank)
    image = rng.normal(size=(int(rng.integers(1, 4)), *sides, groups * channels))
    filters = rng.normal(size=(*window, channels, groups * outputs))
    options = {
        "window_strides": tuple(map(int, step)),
        "padding": [*zip(map(int, low), map(int, high), strict=True)],
        "lhs_dilation": tuple(map(int, within)),
        "rhs_dilation": tuple(map(int, apart)),
        "feature_group_count": groups,
    }
    return image, filters, options


def _by_xla(image, filters, options, **more):
    sides = "XYZ"[: image.ndim - 2]
    numbers = "N" + sides + "C", sides + "IO", "N" + sides + "C"
    return lax.conv_general_dilated(image, filters, dimension_numbers=numbers, **options, **more)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.one_in(12)
def test_equals_the_library(seed):
    image, filters, options = _drawn(seed)
    with jax.enable_x64(True):
        expected = _by_xla(image, filters, options)
        found = jax.jit(lambda *a: add_up(*a, **options, preferred_element_type=None))(image, filters)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_bfloat16_is_added_up_in_float32(preferred):
    image, filters, options = _drawn(3)
    narrow = jnp.asarray(image, jnp.bfloat16), jnp.asarray(filters, jnp.bfloat16)
    found = add_up(*narrow, **options, preferred_element_type=preferred)
    expected = _by_xla(*(x.astype(jnp.float32) for x in narrow), options)
    assert found.dtype == (preferred or jnp.bfloat16)
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(found.dtype).astype(jnp.float32), rtol=1e-5)


@pytest.mark.slow
def test_second_derivatives():
    """A penalty on a gradient differentiates the sum twice."""
    image, filters, options = _drawn(5)

    def slope(convolve):
        def size(image, filters):
            return jnp.sum(jnp.sin(convolve(image, filters)))

        return lambda image, filters: jnp.sum(jax.grad(size)(image, filters) ** 2)

    with jax.enable_x64(True):
        ours = slope(lambda *a: add_up(*a, **options, preferred_element_type=None))
        theirs = slope(lambda *a: _by_xla(*a, options))
        found, expected = (jax.grad(f, (0, 1))(jnp.asarray(image), jnp.asarray(filters)) for f in (ours, theirs))
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-10, atol=1e-10)


def test_a_filter_larger_than_its_image():
    """The result has no entries."""
    image, filters, options = np.ones((2, 3, 4)), np.ones((5, 2, 6)), _drawn(0)[2]
    options |= {"window_strides": (1,), "padding": [(0, 0)], "lhs_dilation": (1,), "rhs_dilation": (1,)}
    options |= {"feature_group_count": 2}
    found = add_up(jnp.asarray(image), jnp.asarray(filters), **options, preferred_element_type=None)
    assert found.shape == _by_xla(image, filters, options).shape == (2, 0, 6)


def test_only_where_it_is_faster(monkeypatch):
    grouped = {"feature_group_count": 2, "batch_group_count": 1}
    assert can_add_up(jnp.ones((3, 3, 1, 4)), **grouped)
    assert not can_add_up(jnp.ones((3, 3, 1, 4)), feature_group_count=1, batch_group_count=1)
    assert not can_add_up(jnp.ones((3, 3, 1, 4)), feature_group_count=2, batch_group_count=2)
    assert not can_add_up(jnp.ones((3, 3, 8, 4)), **grouped)
    assert not can_add_up(jnp.ones((9, 9, 1, 4)), **grouped)
    assert not can_add_up(jnp.ones((3, 3, 1, 4), int), **grouped)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not can_add_up(jnp.ones((3, 3, 1, 4)), **grouped)
