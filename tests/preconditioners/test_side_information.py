"""Public diagonals from statistics of text."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import privacy_four

import dpopt
from dpopt.optimizers.adadps import adadps, broadcast_feature_scale, scale_from_frequencies, tfidf_scores


def test_scale_from_frequencies():
    np.testing.assert_allclose(scale_from_frequencies([5, 50, 1e-9, 0], division=10.0), [1.0, 0.1, 1e3, 1e3])
    np.testing.assert_allclose(scale_from_frequencies(np.array([4, 2]), cap=1.5, division=1.0), [1.0, 1.5])
    dpopt.side_information(scale_from_frequencies([0, 3]))  # positive and finite: accepted


def test_tfidf_scores():
    counts = np.array([[3, 1, 0], [0, 2, 0], [0, 0, 0]])
    expected = np.array([(3 / 4) / 3 * np.log(3), (1 / 4 + 1) / 3 * np.log(3 / 2), 0.0])
    np.testing.assert_allclose(tfidf_scores(counts), expected)
    scale = scale_from_frequencies(tfidf_scores(counts))
    assert scale[2] == 100.0 and scale[0] != scale[1]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: scale_from_frequencies([1.0, -1.0]), ValueError, "must be non-negative and finite; it holds -1.0"),
        (lambda: scale_from_frequencies([1.0, np.nan]), ValueError, "it holds nan"),
        (lambda: scale_from_frequencies([0.0, 0.0]), ValueError, "at least one positive"),
        (lambda: scale_from_frequencies([[1.0]]), ValueError, "rank 1"),
        (lambda: scale_from_frequencies(["a"]), TypeError, "real numbers"),
        (lambda: scale_from_frequencies([1.0], cap=0.5), ValueError, "cap must be at least 1"),
        (lambda: scale_from_frequencies([1.0], division=0.0), ValueError, "division must be positive"),
        (lambda: tfidf_scores([1.0, 2.0]), ValueError, "rank 2"),
    ],
)
def test_bad_statistics(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_broadcast_feature_scale_reaches_the_weights_only():
    params = {"first": {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}, "last": {"kernel": jnp.zeros((2, 3))}}
    scale = broadcast_feature_scale([1.0, 2.0, 4.0], params, leaf="first/kernel")
    assert scale["first"]["kernel"].tolist() == [[1.0], [2.0], [4.0]]
    assert (scale["first"]["bias"], scale["last"]["kernel"]) == (1.0, 1.0)
    across = broadcast_feature_scale([1.0, 2.0, 4.0], params, leaf="last/kernel", axis=-1)
    assert across["last"]["kernel"].tolist() == [[1.0, 2.0, 4.0]]
    opt = adadps(1.0, scale=scale, **privacy_four(noise_multiplier=0.0, l2_clip_norm=math.inf))
    ones = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), params)
    updates, _ = opt.update(ones, opt.init(params), params)
    np.testing.assert_allclose(updates["first"]["kernel"], [[-1.0] * 2, [-2.0] * 2, [-4.0] * 2])
    np.testing.assert_allclose(updates["first"]["bias"], -1.0)


@pytest.mark.parametrize(
    ("scale", "leaf", "match"),
    [
        ([1.0, 2.0], "kernel", "must name one parameter; it names 2 of a/kernel, b/kernel"),
        ([1.0, 2.0], "weights", "it names 0 of"),
        ([1.0, 2.0, 3.0], "a/kernel", r"has shape \(2, 2\), which has no 3 features on axis 0"),
        ([[1.0], [2.0]], "a/kernel", "one number a feature"),
    ],
)
def test_broadcast_feature_scale_refuses(scale, leaf, match):
    params = {"a": {"kernel": jnp.zeros((2, 2))}, "b": {"kernel": jnp.zeros((2, 2))}}
    with pytest.raises(ValueError, match=match):
        broadcast_feature_scale(scale, params, leaf=leaf)
