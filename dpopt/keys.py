"""Random keys: for the noise, from the entropy of the operating system; for losses, from step and example."""

import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import ArrayLike

from dpopt.common import validate

_LOSS_SPAWN_KEY = 0x6C6F7373  # keeps these keys apart from the draws of samplers, which use the seed and a step


def secure_key(impl: str | None = None, *, shared: bool = False) -> jax.Array:
    """A noise key that nobody can guess: random bits from the operating system.

    Anyone can guess ``jax.random.key(0)``, and anyone with the noise key can subtract the noise. Keep the key as secret
    as the data. It cannot be made again, and need not be: `dpopt.train` resumes a run with a fresh key.

    Only the seed is of cryptographic quality. The generators of JAX (by default threefry with 20 rounds and a 64-bit
    key) are designed for statistics and speed: no attack that would help here is known, but none is ruled out.

    Args:
        impl: name of a JAX generator; None for the default. ``"rbg"`` has a 128-bit key, splits it by threefry, and its
            draws may differ between kinds of device.
        shared: whether all processes of a run, which must all call this, get that of the first (``jax.distributed``).

    Raises:
        ValueError: if JAX has no such generator.

    *Privacy*: reads no data.

    >>> bool(jnp.all(jax.random.key_data(secure_key()) == jax.random.key_data(secure_key())))
    False
    """
    shape = jax.random.key_data(jax.random.key(0, impl=impl)).shape
    words = secret_words(int(np.prod(shape)), shared)
    return jax.random.wrap_key_data(jnp.asarray(words).reshape(shape), impl=impl)


def secure_seed(*, shared: bool = False) -> int:
    """A sampler's seed that nobody can guess: 128 random bits from the operating system.

    Amplification by sampling assumes that nobody knows who was in a batch. A short seed can be searched for: each
    released step tells true batches from others a little, and two or three steps tell 2^32 seeds apart.

    Args:
        shared: whether all processes of a run, which must all call this, get that of the first (``jax.distributed``).

    Returns:
        A non-negative integer below 2^128, for ``seed=`` of a sampler.

    *Privacy*: reads no data. Keep it as secret as the noise key.

    >>> secure_seed() == secure_seed()
    False
    """
    return int.from_bytes(secret_words(4, shared).tobytes(), "little")


def secret_words(count: int, shared: bool) -> np.ndarray:
    """Words of 32 bits from the operating system, ``shared``: those of the first process."""
    words = np.array([secrets.randbits(32) for _ in range(count)], np.uint32)
    if shared and jax.process_count() > 1:
        words = np.asarray(multihost_utils.broadcast_one_to_all(words))
    return words


def own_key(key: jax.Array) -> jax.Array:
    """A copy of a PRNG key for an optimizer's state, typed: digests of states leave keys out, and know them by type.

    *Privacy*: a legacy key is an array of numbers like any other; a digest in a run's ledger would give it away.

    >>> own_key(jax.random.PRNGKey(3)) == jax.random.key(3)
    Array(True, dtype=bool)
    """
    copied = jnp.array(key, copy=True)  # a state may be donated
    return copied if jnp.issubdtype(copied.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(copied)


def example_keys(key: jax.Array, step: int | jax.Array, indices: ArrayLike | Sequence[int]) -> jax.Array:
    """One key per example, from step and example, for a loss that draws random numbers (dropout, augmentation).

    Do not use keys by row: with ``jax.random.split(key, B)``, the key of an example changes if an example before it
    leaves the batch. Then one example changes the gradients of others, and moves the clipped sum by much more than C.

    Args:
        key: a key for this purpose alone, not the noise key.
        step: number of the step, an integer.
        indices: ``(B,)`` integers: indices of the examples in the data set, as a sampler returns them.

    Returns:
        ``(B,)`` keys, to be put into the batch beside the examples.

    Raises:
        ValueError, TypeError: if ``key`` is not a key, or ``indices`` is not a vector of integers.

    *Privacy*: the draws of an example depend on no other example, so the clip still bounds what one example adds.

    >>> key = jax.random.key(5)
    >>> keys, fewer = example_keys(key, 3, [7, 8, 9]), example_keys(key, 3, [8, 9])
    >>> bool(jnp.all(keys[1:] == fewer))
    True
    """
    validate.prng_key(key)
    if not isinstance(step, jax.Array | np.ndarray):
        validate.non_negative_int(step=step)
    indices = jnp.asarray(indices)
    if indices.ndim != 1 or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"indices must be a vector of integers; got {indices.dtype} of shape {indices.shape}.")
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, step), indices)


def seeded_key(seed: int) -> jax.Array:
    """A key for random losses from the seed of a sampler, hashed by NumPy, so that it reveals nothing about batches.

    Args:
        seed: a non-negative integer of any size.

    *Privacy*: as secret as the seed.

    >>> bool(jnp.all(jax.random.key_data(seeded_key(2**100)) == jax.random.key_data(seeded_key(2**100))))
    True
    """
    words = np.random.SeedSequence(seed, spawn_key=(_LOSS_SPAWN_KEY,)).generate_state(2)
    return jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl="threefry2x32")
