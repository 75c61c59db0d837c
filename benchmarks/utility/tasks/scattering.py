"""Handwritten digits by a linear model on scattering features, which do not depend on data."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks import data
from benchmarks.data import idx
from benchmarks.utility import scattering
from benchmarks.utility.tasks.networks import Classifier

CHANNELS = len(scattering.paths(2, 8))
TOGETHER = 200  # images transformed at a time
CACHE = "scattering-2-8"  # to be changed with the transform


def group_normalized(features: np.ndarray, groups: int) -> np.ndarray:
    """Normalises each example: neighbouring channels in ``groups`` to mean 0 and equal variance, then all to norm 1.

    Each example is normalised alone, so no statistics of the data are needed and it costs no privacy.

    Args:
        features: ``(n, channels, height, width)``.
        groups: a divisor of the number of channels.

    Returns:
        ``(n, channels * height * width)`` float32, rows of norm 1, or 0 for an empty image.
    """
    n, channels = features.shape[:2]
    if groups < 1 or channels % groups:
        raise ValueError(f"groups must divide the {channels} channels; got {groups}.")
    rows = features.reshape(n, groups, -1).astype(np.float32)
    rows = rows - rows.mean(-1, keepdims=True)
    rows /= rows.std(-1, keepdims=True) + 1e-5
    rows = rows.reshape(n, -1)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)


def features(images: np.ndarray) -> np.ndarray:
    """Scattering channels of ``(n, 28, 28)`` images in [0, 1], as float16, which is precise enough to store."""
    together = jax.jit(scattering.transform)
    parts = [np.asarray(together(jnp.asarray(part)), np.float16) for part in _parts(images)]
    return np.concatenate(parts)


def _parts(images: np.ndarray) -> list[np.ndarray]:
    return [images[i : i + TOGETHER] for i in range(0, len(images), TOGETHER)]


def _stored(where: Path | None, part: str, images: np.ndarray) -> np.ndarray:
    """Features of the training or test images, computed once for every copy of the file."""
    source = idx.path(where, part, "images")
    return data.cached(source, f"{source.name}-{CACHE}", lambda: {"features": features(images[..., 0])})["features"]


class Linear(nn.Module):
    """A multinomial logistic regression that starts at 0.

    It has no bias, which would take half of every squared gradient norm: rows have norm 1, and classes are balanced.
    """

    outputs: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.outputs, use_bias=False, kernel_init=nn.initializers.zeros)(x)


class MnistScattering(Classifier):
    """A linear model on the scattering features of the digits (all in the training file).

    Args:
        where: data folder.
        groups: number of groups of channels that are normalised together; see `group_normalized`.
        options: as for `networks.Network`.
    """

    def __init__(self, where: Path | None = None, *, groups: int = 27, **options: Any):
        if groups < 1 or CHANNELS % groups:
            raise ValueError(f"groups must divide the {CHANNELS} channels; got {groups}.")
        split = idx.load(where)
        train, test = (
            group_normalized(_stored(where, part, images), groups)
            for part, images in (("train", split.train_x), ("t10k", split.test_x))
        )
        super().__init__(Linear(), split._replace(train_x=train, test_x=test), **options)
