"""Gradients of filters, which the engine computes as products where XLA's convolutions are slow."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from dpopt.ghost import canonical


@st.composite
def _convolutions(draw):
    """A convolution as a function of images and filters, and the shapes of both."""
    spatial = draw(st.integers(1, 2))
    groups = draw(st.sampled_from([1, 2, 3, 6]))
    per_group, out_of_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    window = draw(st.tuples(*[st.integers(1, 4)] * spatial))
    dilations = draw(st.tuples(*[st.integers(1, 2)] * spatial))
    reach = [(n - 1) * step + 1 for n, step in zip(window, dilations, strict=True)]
    size = [draw(st.integers(n, n + 5)) for n in reach]
    low_and_high = st.tuples(st.integers(0, 2), st.integers(0, 2))
    numbers = [("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW")], [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")]
    last = draw(st.booleans())
    order = numbers[spatial - 1][0 if last else 1]
    options = dict(
        window_strides=draw(st.tuples(*[st.integers(1, 3)] * spatial)),
        padding=[draw(low_and_high) for _ in range(spatial)],
        rhs_dilation=dilations,
        lhs_dilation=draw(st.tuples(*[st.integers(1, 2)] * spatial)),
        feature_group_count=groups,
        dimension_numbers=order,
    )
    batch, channels, features = draw(st.integers(1, 3)), groups * per_group, groups * out_of_group
    images = (batch, *size, channels) if last else (batch, channels, *size)
    filters = (*window, per_group, features) if last else (features, per_group, *window)
    return (lambda x, w: lax.conv_general_dilated(x, w, **options)), images, filters


@settings(max_examples=40, deadline=None)
@given(_convolutions(), st.integers(0, 2**31))
def test_gradients_of_filters_equal_xlas(found, seed):
    convolution, images, filters = found
    rng = np.random.default_rng(seed)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (images, filters))
    y = jnp.asarray(rng.normal(size=jax.eval_shape(convolution, x, w).shape), jnp.float32)
    transposed = jax.linear_transpose(lambda w: convolution(x, w), w)
    (expected,) = transposed(y)
    found = canonical.channels_last(lambda y: transposed(y)[0])(y)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
