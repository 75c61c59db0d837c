"""What a clipped sum sends between devices, and the products that keep a convolution's share on its own."""

import ghost_cases
import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from runs import ROOT, script

from dpopt.ghost.convolutions import channels_last


@pytest.mark.slow  # four processes, each of which compiles some thirty programs for eight devices
@pytest.mark.parametrize("part", range(4))
def test_only_sums_travel_between_devices(part):
    """Every coverage case, recorded, in one pass and in two: whatever the model, no examples, no gradients of theirs.

    But for a filter of each example's own, whose convolutions run one after the other."""
    found = script(ROOT / "tests" / "programs" / "collectives_run.py", part, 4, devices=8, timeout=1500)
    assert len(found) == 6 * len(ghost_cases.CASES[part::4])
    assert {c: sent for c, sent in found.items() if sent and not c.startswith("conv_own_filter")} == {}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_no_device_s_rows_are_left_out(devices):
    """XLA leaves out all but the first device's where filters' gradients are mapped over a batch that is divided."""
    found = script(ROOT / "tests" / "programs" / "filters_run.py", devices=devices)
    assert len(found) == 28
    assert {way: off for way, off in found.items() if off > 1e-4} == {}


@pytest.mark.slow
def test_what_xla_divides_wrongly_is_not_verified():
    """It may miscompute a gradient on several devices, the ordinary one included: the oracle takes it on one."""
    found = script(ROOT / "tests" / "programs" / "placed_run.py", devices=8)
    assert all(passes == is_right for passes, is_right in found["verified"])
    assert found["verified"][-1] == [True, True]
    assert {way: off for way, off in found["explicit"].items() if off > 1e-5} == {}
    assert found["moved"] <= 1 + 1e-6
    assert found["resumed"] == [[2, 4], [2, 4]]


@st.composite
def convolutions(draw):
    """Shapes of shares of images and of a filter, and the options of a convolution, in one to three dimensions."""
    n = draw(st.integers(1, 3))
    several = lambda low, high: draw(st.lists(st.integers(low, high), min_size=n, max_size=n))  # noqa: E731
    groups, size = draw(st.integers(1, 3)), several(3, 5)
    window, channels = [draw(st.integers(1, s)) for s in size], groups * draw(st.integers(1, 2))
    options = {
        "window_strides": several(1, 3),
        "padding": list(zip(several(0, 2), several(0, 2), strict=True)),
        "lhs_dilation": several(1, 2),
        "rhs_dilation": several(1, 2),
        "feature_group_count": groups,
    }
    taken = [(w - 1) * step + 1 for w, step in zip(window, options["rhs_dilation"], strict=True)]
    there = [
        (s - 1) * step + 1 + low + high
        for s, step, (low, high) in zip(size, options["lhs_dilation"], options["padding"], strict=True)
    ]
    assume(all(t <= s for t, s in zip(taken, there, strict=True)))
    return (2, 3, channels, *size), (groups * draw(st.integers(1, 2)), channels // groups, *window), options


@pytest.mark.slow  # thirty convolutions, each compiled several times
@settings(max_examples=30)
@given(case=convolutions())
def test_products_are_the_gradients_of_filters(x64, case):
    images, filters, options = case
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=images), rng.normal(size=filters)

    def convolved(w, x):
        return lax.conv_general_dilated(x, w, **options)

    out = jax.eval_shape(jax.vmap(convolved, (None, 0)), w, x)
    y = rng.normal(size=out.shape)

    def xlas(x, y):
        return jax.linear_transpose(lambda w: convolved(w, x), w)(y)[0]

    def gradient(x, y):
        return channels_last(lambda y: xlas(x, y))(y)

    want = jax.vmap(xlas)(x, y)
    alone = [gradient(*share) for share in zip(x, y, strict=True)]  # on one device, some are products
    np.testing.assert_allclose(alone, want, rtol=1e-12, atol=1e-12)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(jax, "device_count", lambda: 2)
        program = jax.make_jaxpr(jax.vmap(gradient))(x, y)
        got = jax.vmap(gradient)(x, y)
    assert "conv_general_dilated" not in str(program)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
