"""Random inputs and targets for the models."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cost.families import tokens


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Standard normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def uniform(*shape: int, seed: int = 2) -> jax.Array:
    """Uniform numbers between 0 and 1."""
    return jnp.asarray(np.random.default_rng(seed).uniform(size=shape), jnp.float32)


def images(count: int, size: int, channels: int = 3) -> jax.Array:
    """Images of standard normal pixels, channels last."""
    return normal(count, size, size, channels)


def words(vocabulary: int, *shape: int) -> jax.Array:
    """Token ids with the frequencies of words in a text."""
    return jnp.asarray(tokens(vocabulary, *shape))


def next_token(vocabulary: int, batch: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets of a language model: the targets are the inputs, shifted by one token."""
    text = words(vocabulary, batch, length + 1)
    return text[:, :-1], text[:, 1:]


def labels(classes: int, *shape: int, seed: int = 1) -> jax.Array:
    """Class labels, uniformly distributed."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, classes, shape), jnp.int32)
