"""The scattering transform of small images: fixed wavelets, moduli and averages, without training data.

A channel is the average, over a neighbourhood of ``2**scales`` pixels, of the image (order 0), of ``|image * psi|``
(order 1), or of ``||image * psi| * psi'|`` with psi' a coarser wavelet (order 2). The wavelets are Morlet's: a wave
under a Gaussian window, minus a multiple of the window that makes the mean 0. Convolutions are products in frequency.

Convolution wraps around; `transform` pads the image with zeros, wide enough for its border.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 0.8  # standard deviation of the finest window, in pixels
FREQUENCY = 3 * np.pi / 4  # of the finest wave, in radians a pixel
ALIASES = 3  # periods of the frequency axes that are summed on either side: the rest is below 1e-12


def _gaussian(size: int, deviation: float, centre: float, angle: float, slant: float) -> np.ndarray:
    """Fourier transform, at the ``size x size`` frequencies, of a unit-integral window times a wave of ``centre``.

    Args:
        size: pixels of a side.
        deviation: standard deviation of the window along the wave.
        centre: frequency of the wave, in radians a pixel.
        angle: direction of the wave; 0 is along the axis of rows.
        slant: ratio of the deviations along and across the wave.
    """
    own = 2 * np.pi * np.fft.fftfreq(size)
    shifts = 2 * np.pi * np.arange(-ALIASES, ALIASES + 1)
    axis = own[:, None] + shifts
    first, second = axis[:, None, :, None], axis[None, :, None, :]
    along = first * np.cos(angle) + second * np.sin(angle) - centre
    across = second * np.cos(angle) - first * np.sin(angle)
    return np.exp(-0.5 * deviation**2 * (along**2 + (across / slant) ** 2)).sum((2, 3))


def morlet(size: int, scale: int, turn: int, angles: int) -> np.ndarray:
    """The real Fourier transform of a wavelet: ``scale`` 0 is the finest; ``turn`` is the direction, of ``angles``."""
    deviation, centre = WIDTH * 2.0**scale, FREQUENCY / 2.0**scale
    angle, slant = np.pi * turn / angles, 4 / angles
    wave = _gaussian(size, deviation, centre, angle, slant)
    window = _gaussian(size, deviation, 0.0, angle, slant)
    return wave - wave[0, 0] / window[0, 0] * window


@functools.lru_cache(maxsize=4)
def filters(size: int, scales: int, angles: int) -> tuple[np.ndarray, np.ndarray]:
    """Fourier transforms of the average, ``(size, size)``, and of the wavelets, ``(scales, angles, size, size)``.

    One factor scales all wavelets so that no frequency is amplified: for real images, average and wavelets together
    then have at most the energy of the image (Littlewood and Paley's condition).
    """
    average = _gaussian(size, WIDTH * 2.0 ** (scales - 1), 0.0, 0.0, 1.0)
    average /= average[0, 0]
    wavelets = np.array([[morlet(size, j, k, angles) for k in range(angles)] for j in range(scales)])
    squares = (wavelets**2).sum((0, 1))
    opposite = np.roll(squares[::-1, ::-1], 1, (0, 1))  # at the negative of each frequency
    energy = (squares + opposite) / 2
    room = 1 - average**2
    is_used = energy > 1e-9 * energy.max()
    wavelets *= np.sqrt((room[is_used] / energy[is_used]).min())
    return average, wavelets


def paths(scales: int, angles: int) -> list[tuple[tuple[int, int], ...]]:
    """The channels in order: for each, its wavelets (scale, direction), from fine to coarse."""
    first = [(j, k) for j in range(scales) for k in range(angles)]
    second = [(a, b) for a in first for b in first if b[0] > a[0]]
    return [(), *((a,) for a in first), *second]


def _modulus(transformed: jax.Array, spectrum: jax.Array) -> jax.Array:
    """Moduli ``(..., n, size, size)`` for a transformed image ``(..., 1, size, size)`` and n spectra."""
    every = jnp.broadcast_to(spectrum, transformed.shape[:-3] + spectrum.shape)
    return jnp.abs(jnp.fft.ifft2(transformed * every))


def _moduli(images: jax.Array, scales: int, angles: int) -> jax.Array:
    """All channels before the average, ``(..., channels, size, size)``."""
    wavelets = jnp.asarray(filters(images.shape[-1], scales, angles)[1], jnp.float32)
    image = jnp.fft.fft2(images)[..., None, :, :]
    first = [_modulus(image, wavelets[j]) for j in range(scales)]
    second = []
    for j in range(scales - 1):
        coarser = wavelets[j + 1 :].reshape(-1, *wavelets.shape[2:])
        both = _modulus(jnp.fft.fft2(first[j])[..., None, :, :], coarser)
        second.append(both.reshape(*images.shape[:-2], -1, *images.shape[-2:]))
    return jnp.concatenate([images[..., None, :, :], *first, *second], axis=-3)


def averages(images: jax.Array, *, scales: int, angles: int, kept: slice = slice(None)) -> jax.Array:
    """All channels of ``(..., size, size)`` at the pixels ``kept`` of either axis; convolution wraps around.

    The average is a Gaussian along each axis: two matrix products, restricted to the rows that are kept.
    """
    average, _ = filters(images.shape[-1], scales, angles)
    kernel = np.fft.ifft(average[0]).real
    along = jnp.asarray([np.roll(kernel, i) for i in range(len(kernel))][kept], jnp.float32)
    return along @ _moduli(images, scales, angles) @ along.T


def transform(images: jax.Array, *, scales: int = 2, angles: int = 8) -> jax.Array:
    """The channels of square images, one value for every ``2**scales`` pixels.

    Args:
        images: ``(..., size, size)``, with ``size`` a multiple of ``2**scales``.
        scales, angles: how many sizes and directions of wavelets.

    Returns:
        ``(..., channels, size / 2**scales, size / 2**scales)``: 81 channels of 7 x 7 for 28 x 28 pixels at the default.

    Raises:
        ValueError: if images are not square, or their size is not such a multiple.
    """
    if scales < 1 or angles < 1:
        raise ValueError(f"scales and angles must be at least 1; got {scales} and {angles}.")
    step = 2**scales
    if images.ndim < 2 or images.shape[-1] != images.shape[-2] or images.shape[-1] % step:
        raise ValueError(f"images must be square with sides that {step} divides; got shape {images.shape}.")
    # Half a step in front, so that the kept pixels are centred on the image.
    front, behind = step // 2, 3 * step // 2
    around = [(0, 0)] * (images.ndim - 2) + [(front, behind)] * 2
    kept = slice(step, step + images.shape[-1], step)
    return averages(jnp.pad(images, around), scales=scales, angles=angles, kept=kept)
