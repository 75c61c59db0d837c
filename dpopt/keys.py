"""Keys: the noise's from the operating system's entropy, those of random losses from the step and the example."""

import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dpopt.common import validate

_OF_LOSSES = 0x6C6F7373  # samplers draw from the seed and a step, spawned keys are apart from those


def secure_key(impl: str | None = None, *, shared: bool = False) -> jax.Array:
    """A noise key that nobody can guess: filled with random bits from the operating system.

    ``jax.random.key(0)`` is known to everybody, and whoever knows the noise key can subtract the noise. Keep the key
    you get as secret as the data. There is no way to get the same one again, and no need: a run that `dpopt.train`
    resumes continues from its checkpoint, with fresh bits.

    Only the seed is of cryptographic quality. JAX's generators (threefry with 20 rounds by default, a 64-bit key) are
    built for statistics and speed: no attack on them is known that would help here, and none is proven impossible.

    Args:
        impl: name of JAX's generator; None for the default. ``"rbg"`` has a 128-bit key, of which the splits are made
            by threefry, and draws that may differ between kinds of device.
        shared: give all processes of a run the first one's key, by ``jax.distributed``; all must call this.

    Raises:
        ValueError: if JAX knows no such generator.

    *Privacy*: reads no data.

    >>> bool(jnp.all(jax.random.key_data(secure_key()) == jax.random.key_data(secure_key())))
    False
    """
    shape = jax.random.key_data(jax.random.key(0, impl=impl)).shape
    words = np.array([secrets.randbits(32) for _ in range(int(np.prod(shape)))], np.uint32)
    if shared and jax.process_count() > 1:
        words = np.asarray(multihost_utils.broadcast_one_to_all(words))
    return jax.random.wrap_key_data(jnp.asarray(words).reshape(shape), impl=impl)


def example_keys(key: jax.Array, step: Any, indices: Any) -> jax.Array:
    """Keys for a loss that draws random numbers (dropout, augmentation): one for each example, by step and example.

    Not by row: ``jax.random.split(key, B)`` gives an example another key when somebody before it leaves the batch. Then
    one example's presence changes the gradients of others, and moves the clipped sum by much more than C.

    Args:
        key: a key for this purpose alone, not the noise's.
        step: number of the step, an integer.
        indices: ``(B,)`` integers: numbers of the examples in the data set, as a sampler gives them.

    Returns:
        ``(B,)`` keys. Put them into the batch, beside the examples.

    Raises:
        ValueError, TypeError: if ``key`` is not a key, or ``indices`` not a row of integers.

    *Privacy*: an example's draws depend on no other example, so the clip bounds what it adds, as without draws.

    >>> key = jax.random.key(5)
    >>> keys, fewer = example_keys(key, 3, [7, 8, 9]), example_keys(key, 3, [8, 9])
    >>> bool(jnp.all(keys[1:] == fewer))
    True
    """
    validate.prng_key(key)
    indices = jnp.asarray(indices)
    if indices.ndim != 1 or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"indices must be a row of integers; got {indices.dtype} of shape {indices.shape}.")
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, step), indices)


def seeded_key(seed: int) -> jax.Array:
    """A key for random losses, made of a sampler's seed by NumPy's hash: it says nothing about the batches.

    Args:
        seed: non-negative, of any size.

    *Privacy*: as secret as the seed.

    >>> bool(jnp.all(jax.random.key_data(seeded_key(2**100)) == jax.random.key_data(seeded_key(2**100))))
    True
    """
    words = np.random.SeedSequence(seed, spawn_key=(_OF_LOSSES,)).generate_state(2)
    return jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl="threefry2x32")
