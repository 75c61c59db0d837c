"""The sizes of the terms of a gradient: never underestimated, and not much overestimated."""

import itertools

import jax
import numpy as np
import pytest
from helpers import slow_unless
from jax import lax

from dpopt.ghost import term_sizes
from dpopt.ghost.rules import Use, convolution
from dpopt.ghost.rules.base import lift

STRIDES = [(1, 1), (2, 3), (4, 4), (3, 1)]  # some skip pixels, or extend beyond the edge
PADDINGS = [((0, 0), (0, 0)), ((1, 1), (0, 1)), ((1, 2), (-1, 3))]
# Strides, dilation of the filter and of the image, padding, groups.
ALL = list(itertools.product(STRIDES, [(1, 1), (2, 3)], [(1, 1), (2, 1)], PADDINGS, [1, 2]))
# Without strides, dilated images have other factors (test_plan.py).
ALL = [kind for kind in ALL if kind[0] != (1, 1) or kind[2] == (1, 1)]
KINDS = slow_unless(ALL[::19], ALL)


def _factors(stride, dilation, image_dilation, padding, groups):
    x, w = np.zeros((1, 9, 11, 4), np.float32), np.zeros((3, 2, 4 // groups, 6), np.float32)

    def convolve(x, w):
        names = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, w, stride, padding, image_dilation, dilation, names, feature_group_count=groups
        )

    (equation,) = jax.make_jaxpr(convolve)(x, w).eqns
    out = equation.outvars[0].aval.shape
    return convolution.conv_general_dilated(Use(equation.params, 1, 0, w.shape, x.shape, out)), x.shape, out


def _split(factors, x, y):
    """``left`` for each offset, and ``right``."""
    left, right = jax.jit(factors.split)(x, y)
    return np.split(np.asarray(left), factors.shape[0], axis=-1), right


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.one_in(6)
def test_columns_of_a_convolution_are_read_off_its_input(kind):
    factors, input_shape, output_shape = _factors(*kind)
    rng = np.random.default_rng(0)
    x, y, scale = (np.float32(rng.normal(size=s)) for s in (input_shape, output_shape, factors.shape))
    left, right = _split(factors, x, y)
    exact = np.stack([np.sum(np.square(z), axis=1) for z in left])
    found = np.asarray(jax.jit(factors.columns)(x))
    assert found.shape == exact.shape
    assert (found >= exact * (1 - 1e-5)).all()
    assert found.sum() <= 2.5 * exact.sum()  # border pixels that some windows miss
    assert exact.sum() <= factors.overlap * np.sum(x * x) * (1 + 1e-5)

    sizes = [np.einsum("nta,ntp->nap", np.abs(z), np.abs(right)) for z in left]
    for s in (scale, None):
        at_least = np.sum(np.square(sizes if s is None else scale * np.stack(sizes)))
        found = jax.jit(lambda x, y, s: term_sizes.square(factors, x, y, s).value)(x, y, s)
        assert found >= at_least * (1 - 1e-5)

    for mapped in (True, False):  # two steps of a loop
        lifted, steps = lift(factors, 2, mapped), np.stack([x, 2 * x])
        exact = np.stack([np.sum(np.square(z), axis=1) for z in _split(lifted, steps, np.stack([y, y]))[0]])
        assert (np.asarray(jax.jit(lifted.columns)(steps)) >= exact * (1 - 1e-5)).all()


@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (3, 2)])
def test_patches_are_not_counted_once_for_every_pixel(stride):
    """Rounding is proportional to the number of windows that contain a pixel: one, if windows do not overlap."""
    factors, input_shape, output_shape = _factors(stride, (1, 1), (1, 1), ((0, 0), (0, 0)), 1)
    assert factors.overlap == {(1, 1): 6, (2, 1): 4, (3, 2): 1}[stride]
    rng = np.random.default_rng(0)
    x, y = (np.float32(rng.normal(size=s)) for s in (input_shape, output_shape))
    left, right = jax.jit(factors.split)(x, y)
    exact = np.sum(np.square(left)) * np.sum(np.square(right))
    for scale in (None, np.ones(factors.shape, np.float32)):
        found = jax.jit(lambda x, y, s: term_sizes.square(factors, x, y, s).value)(x, y, scale)
        assert exact * (1 - 1e-5) <= found <= 2 * exact  # except at edges
