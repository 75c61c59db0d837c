"""Noise keys from the operating system's entropy."""

import secrets

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils


def secure_key(impl: str | None = None, *, shared: bool = False) -> jax.Array:
    """A noise key that nobody can guess: filled with random bits from the operating system.

    ``jax.random.key(0)`` is known to everybody, and whoever knows the noise key can subtract the noise. Keep the key
    you get as secret as the data. It cannot be had a second time, and need not: a run that `dpopt.train` resumes goes
    on with what its checkpoint holds, and fresh bits.

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
