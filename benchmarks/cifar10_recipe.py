"""CIFAR-10 as De et al. (2022) train it: the network, the augmentation, and the settings.

"Unlocking high-accuracy differentially private image classification through scale", arXiv:2204.13650. The settings are
those of its Wide-ResNet-16-4 trained on CIFAR-10 alone, as far as the paper states them; departures are marked. The
network is `benchmarks.cost.models.WideResNet`, with group normalisation and weight standardisation.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.cost.models import WideResNet
from dpopt.augmentation import augmented
from dpopt.flax import linen_loss

BATCH_SIZE = 4096
MULTIPLICITY = 16  # augmentations of an image, averaged before the clip
CLIP_NORM = 1.0
LEARNING_RATE = 2.0  # constant, without momentum, for gradients clipped to norm 1
AVERAGE = 0.9999  # decay of the parameter average that is tested, which starts fast: `dpopt.average_params`
DELTA = 1e-5
STEPS = {1.0: 875, 8.0: 2_500}  # by epsilon
SHIFT = 4  # pixels, in each direction
CLASSES = 10


def steps_for(epsilon: float) -> int:
    """The number of steps: the paper's at epsilon 1 and 8, and a power of epsilon between them.

    Raises:
        ValueError: if epsilon is below 1 or above 8.

    >>> steps_for(1), steps_for(3), steps_for(8)
    (875, 1524, 2500)
    """
    (low, first), (high, last) = STEPS.items()
    if not low <= epsilon <= high:
        raise ValueError(f"steps are known for epsilon {low:g} to {high:g}; got {epsilon:g}. Set them with --steps.")
    return round(first * (last / first) ** (math.log(epsilon / low) / math.log(high / low)))


def flip_and_crop(example: Any, key: jax.Array) -> Any:
    """A random variant of ``(image, label)``: perhaps mirrored, and shifted, with the border filled by reflection."""
    image, label = example
    flip, place = jax.random.split(key)
    image = jnp.where(jax.random.bernoulli(flip), image, image[:, ::-1])
    padded = jnp.pad(image, ((SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0)), mode="reflect")
    corner = jax.random.randint(place, (2,), 0, 2 * SHIFT + 1)
    return jax.lax.dynamic_slice(padded, (*corner, 0), image.shape), label


def scaled(images: jax.Array) -> jax.Array:
    """Scales bytes to [-1, 1].

    (The usual means and standard deviations of the training images would be a query that epsilon does not cover.)
    """
    return images.astype(jnp.float32) / 127.5 - 1


def network(depth: int = 16, width: int = 4, dtype: Any = None) -> WideResNet:
    """The network, which computes in ``dtype`` (None: float32)."""
    return WideResNet(depth, width, CLASSES, dtype)


def loss_and_params(
    depth: int = 16, width: int = 4, multiplicity: int = MULTIPLICITY, dtype: Any = None
) -> tuple[Callable, Any]:
    """The loss of one example ``((image, label), key)``, averaged over augmentations, and initial parameters."""
    model = network(depth, width, dtype)
    params = model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"]  # a fixed key: nothing secret
    of_numbers = linen_loss(model, optax.softmax_cross_entropy_with_integer_labels)

    def loss_fn(params: Any, example: Any) -> jax.Array:
        image, label = example
        return of_numbers(params, (scaled(image), label))

    return augmented(loss_fn, flip_and_crop, multiplicity=multiplicity), params


def noise_batch(size: int) -> Any:
    """Examples with keys and random pixels, for timing and planning."""
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.integers(0, 256, (size, 32, 32, 3), dtype=np.uint8))
    labels = jnp.asarray(rng.integers(0, CLASSES, size), jnp.int32)
    return (images, labels), jax.random.split(jax.random.key(0), size)
