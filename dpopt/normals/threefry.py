"""Threefry random words: the same bits as `jax.random.bits`, several times as fast on CPUs.

Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011). On
CPUs JAX runs the rounds in a loop, which writes every number to memory between rounds. With the rounds unrolled, the
compiler fuses them, and whatever uses the words, into one pass.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)  # of the key schedule, from Skein
COUNTERS = 2**32  # distinct values of one word


def threefry2x32(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Encrypts two-word counters under a two-word key, elementwise; all uint32."""
    keys = (*key, key[0] ^ key[1] ^ PARITY)
    x0, x1 = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << np.uint32(distance)) | (x1 >> np.uint32(32 - distance)))
        x0, x1 = x0 + keys[(group + 1) % 3], x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def counters(shape: tuple[int, ...], limit: int = COUNTERS) -> tuple[jax.Array, jax.Array]:
    """A different pair of uint32 for every entry of an array: (0, flat index) if that fits into one word.

    In larger arrays the second word counts over as many of the last axes as fit, the first word over the others; 2^63
    entries, or an axis longer than 2^32, are refused. Each word is a sum of one iota per axis, so that the counters of
    a sharded array are computed shard by shard.
    """
    words, axis = [], len(shape)
    for word_limit in (limit, limit // 2):  # `blocks_at` uses the top bit of the first word
        word, stride = jnp.zeros(shape, jnp.uint32), 1
        while axis and stride * shape[axis - 1] <= word_limit:
            axis -= 1
            word = word + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % COUNTERS)
            stride *= shape[axis]
        words.append(word)
    if axis:
        raise ValueError(f"an array of shape {shape} is too large for noise: {math.prod(shape)} entries.")
    return words[1], words[0]


def words_of(key: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """The two words of a threefry key; None for other generators."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if str(jax.random.key_impl(key)) != "threefry2x32":
        return None
    data = jax.random.key_data(key)
    return data[0], data[1]


def fold_in(key: jax.Array, number: jax.Array) -> jax.Array:
    """`jax.random.fold_in` with a third of the compile time, since that of JAX is a loop on CPUs."""
    words = words_of(key)
    if words is None:
        return jax.random.fold_in(key, number)
    number = jnp.asarray(number).astype(jnp.uint32)
    data = jnp.stack(threefry2x32(words, (jnp.zeros_like(number), number)))
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def blocks_at(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Four independent words for each counter from `counters`."""
    first, second = counter
    return *threefry2x32(key, counter), *threefry2x32(key, (first | np.uint32(1 << 31), second))


def random_words(key: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Four independent uint32 arrays of the given shape.

    From a threefry key, two blocks per entry: a function of the key and the position of the entry alone, whatever the
    devices and the value of ``jax_threefry_partitionable``. For keys of other generators, `jax.random.bits`.
    """
    words = words_of(key)
    if words is None:
        a, b, c, d = jax.random.bits(key, (4, *shape), jnp.uint32)
        return a, b, c, d
    return blocks_at(words, counters(shape))
