"""Scattering features: one path against a direct convolution, rotation and shift, energy, and the task."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_benchmark_data import mnist_files

pytest.importorskip("sklearn")

import dpopt
from benchmarks.data import idx
from benchmarks.utility import scattering, tasks
from benchmarks.utility.tasks import scattering as scattering_task

SIZE = 32
averages = functools.partial(jax.jit(scattering.averages, static_argnames=("scales", "angles")), scales=2, angles=8)


def images(n, size=SIZE):
    """Blobs of random places and widths."""
    rng = np.random.default_rng(0)
    grid = np.arange(size)
    x, y, w = rng.uniform(0.3 * size, 0.7 * size, (2, n, 3)).tolist() + [rng.uniform(1, 4, (n, 3)).tolist()]
    x, y, w = (np.array(v)[..., None, None] for v in (x, y, w))
    return np.exp(-((grid[:, None] - x) ** 2 + (grid - y) ** 2) / (2 * w**2)).sum(1).astype(np.float32)


def convolved(image, kernel):
    """Circular convolution by its definition, a sum over all pixels; the kernel's origin is at (0, 0)."""
    out = np.zeros(image.shape, complex)
    for a in range(image.shape[0]):
        for b in range(image.shape[1]):
            out += kernel[a, b] * np.roll(image, (a, b), (0, 1))
    return out


def on_torus(function, size):
    """A function on the plane, summed over all periods of the image."""
    axis = np.arange(size)[:, None] + size * np.arange(-3, 4)
    return function(axis[:, None, :, None], axis[None, :, None, :]).sum((2, 3))


def morlet_in_space(size, scale, turn, angles):
    """The wavelet in the spatial domain: a wave under a Gaussian, minus a Gaussian of the same shape."""
    deviation, centre, slant = 0.8 * 2**scale, 0.75 * np.pi / 2**scale, 4 / angles
    c, s = np.cos(np.pi * turn / angles), np.sin(np.pi * turn / angles)

    def window(x, y):
        along, across = c * x + s * y, c * y - s * x
        return np.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2)) * slant / (2 * np.pi * deviation**2)

    window_sum = on_torus(window, size)
    wave = on_torus(lambda x, y: window(x, y) * np.exp(1j * centre * (c * x + s * y)), size)
    return wave - wave.sum() / window_sum.sum() * window_sum


def gaussian_in_space(size, deviation):
    found = on_torus(lambda x, y: np.exp(-(x**2 + y**2) / (2 * deviation**2)), size)
    return found / found.sum()


@pytest.mark.parametrize("path", [(), ((0, 3),), ((1, 6),), ((0, 5), (1, 2))])
def test_a_path_is_the_convolution_that_it_says(path):
    image = images(1)[0]
    found = np.asarray(averages(image))
    # How far all wavelets are scaled, from the energy that the finest ones have at the frequency of their wave.
    _, wavelets = scattering.filters(SIZE, 2, 8)
    factor = wavelets[0, 0].max() / np.fft.fft2(morlet_in_space(SIZE, 0, 0, 8)).real.max()
    expected = image
    for scale, turn in path:
        expected = factor * np.abs(convolved(expected, morlet_in_space(SIZE, scale, turn, 8)))
    expected = convolved(expected, gaussian_in_space(SIZE, 1.6)).real
    channel = scattering.paths(2, 8).index(path)
    np.testing.assert_allclose(found[channel], expected, rtol=1e-3, atol=2e-6)


def test_no_frequency_is_amplified_and_wavelets_have_no_mean():
    average, wavelets = scattering.filters(SIZE, 2, 8)
    assert average[0, 0] == 1 and np.abs(wavelets[:, :, 0, 0]).max() < 1e-12
    back = np.roll(wavelets[..., ::-1, ::-1], 1, (-2, -1))
    energy = average**2 + (wavelets**2 + back**2).sum((0, 1)) / 2
    assert energy.max() == pytest.approx(1) and energy.min() > 0.1
    noise = np.random.default_rng(1).normal(size=(4, SIZE, SIZE)).astype(np.float32)
    for x in (images(4), noise):
        found = np.asarray(averages(x))
        kept = np.sum(found**2, (1, 2, 3))
        assert (kept <= np.sum(x**2, (1, 2))).all() and (kept > 0.05 * np.sum(x**2, (1, 2))).all()
        # The whole transform brings no two images further apart.
        assert np.sum((found[0] - found[1]) ** 2) <= np.sum((x[0] - x[1]) ** 2)


def test_shifts_move_the_channels_and_quarter_turns_exchange_them():
    x = images(1)[0]
    found, moved = averages(x), averages(np.roll(x, (3, 5), (0, 1)))
    np.testing.assert_allclose(moved, np.roll(found, (3, 5), (1, 2)), rtol=1e-3, atol=1e-5)
    # A quarter turn about pixel (0, 0) is four directions of eight, at every order.
    turned = averages(np.roll(np.rot90(x), 1, 0))
    paths = scattering.paths(2, 8)
    into = [paths.index(tuple((j, (k + 4) % 8) for j, k in path)) for path in paths]
    expected = np.roll(np.rot90(np.asarray(found), axes=(1, 2)), 1, 1)
    np.testing.assert_allclose(np.asarray(turned)[into], expected, rtol=1e-3, atol=1e-5)
    # A small shift changes rough pixels altogether and the features little: that is what they are for.
    rough = np.random.default_rng(2).normal(size=(SIZE, SIZE)).astype(np.float32)
    transform = jax.jit(scattering.transform)
    a, b = (np.asarray(transform(v)) for v in (rough, np.roll(rough, 1, 0)))
    assert np.linalg.norm(rough - np.roll(rough, 1, 0)) > np.linalg.norm(rough)
    assert np.linalg.norm(a - b) < 0.4 * np.linalg.norm(a)


def test_shapes_are_checked():
    digits = jax.eval_shape(scattering.transform, jnp.zeros((2, 28, 28)))
    small = jax.eval_shape(lambda x: scattering.transform(x, scales=1, angles=4), jnp.zeros((8, 8)))
    assert digits.shape == (2, 81, 7, 7) and small.shape == (5, 4, 4)
    assert len(scattering.paths(2, 8)) == 81 and len(scattering.paths(3, 4)) == 1 + 12 + 48
    for bad in (jnp.zeros((28, 27)), jnp.zeros((30, 30)), jnp.zeros(28)):
        with pytest.raises(ValueError, match="square"):
            scattering.transform(bad)
    with pytest.raises(ValueError, match="at least 1"):
        scattering.transform(jnp.zeros((28, 28)), scales=0)


def test_normalisation_reads_one_example_at_a_time():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(3, 6, 2, 2)).astype(np.float32)
    found = scattering_task.group_normalized(features, 2)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    groups = found.reshape(3, 2, 12)
    np.testing.assert_allclose(groups.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(groups.std(-1), groups.std(-1)[0, 0], rtol=1e-3)
    alone = scattering_task.group_normalized(features[1:2], 2)
    np.testing.assert_array_equal(alone[0], found[1])
    assert (scattering_task.group_normalized(np.zeros((1, 6, 2, 2)), 3) == 0).all()
    with pytest.raises(ValueError, match="divide the 6 channels"):
        scattering_task.group_normalized(features, 4)


@pytest.fixture
def few_digits(tmp_path):
    mnist_files(tmp_path, train=40, test=8)
    yield tmp_path
    tasks._make.cache_clear()


@pytest.mark.slow
def test_the_task_learns_and_works_its_features_out_once(few_digits, monkeypatch):
    task = tasks.make("mnist-scattering", {}, few_digits)
    assert task.num_examples == 40 and task.not_covered_by_epsilon == () and not task.has_public_data
    tasks._make.cache_clear()
    monkeypatch.setattr(scattering_task, "features", lambda images: pytest.fail("worked out again"))
    again = tasks.make("mnist-scattering", {"validate": True}, few_digits)
    assert again.num_examples == 32
    params = task.init(0)
    assert all((p == 0).all() for p in jax.tree.leaves(params))

    def loss(p):
        return jnp.mean(jax.vmap(task._loss_of_one, (None, 0))(p, task.all_examples()[0]))

    before = loss(params)
    for _ in range(20):
        grads = task.grads(params, task.all_examples()).clipped_sum(dpopt.FlatClip(1.0)).sum
        params = jax.tree.map(lambda p, g: p - g, params, grads)
    assert loss(params) < before - 0.1
    with pytest.raises(ValueError, match="groups"):
        scattering_task.MnistScattering(few_digits, groups=4)
    assert idx.path(few_digits, "train", "images").exists()
