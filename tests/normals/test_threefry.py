import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpopt.normals import threefry

# Known answers for Threefry-2x32 with 20 rounds, as Random123 publishes them: counter, key, result.
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    got = threefry.threefry2x32(*(tuple(jnp.uint32(word) for word in words) for words in (key, counter)))
    assert tuple(map(int, got)) == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 2)])
def test_the_first_block_is_what_jax_draws(shape):
    key = jax.random.key(3)
    a, b, c, d = threefry.random_words(key, shape)
    np.testing.assert_array_equal(a ^ b, jax.random.bits(key, shape))
    assert len({int(np.ravel(word)[0]) for word in (a, b, c, d)}) == 4


@pytest.mark.parametrize("shape", [(), (4,), (3, 0, 2), (2, 3, 5)])
def test_counters_are_flat_indices_where_they_fit(shape):
    first, second = threefry.counters(shape)
    assert not first.any()
    np.testing.assert_array_equal(second, np.arange(np.prod(shape, dtype=int)).reshape(shape))


@pytest.mark.parametrize(("shape", "limit"), [((4, 3, 5), 16), ((2, 2, 9), 10), ((3, 4), 12), ((8, 16), 16)])
def test_counters_of_large_arrays_are_all_different(shape, limit):
    first, second = threefry.counters(shape, limit)
    assert len(set(zip(first.ravel().tolist(), second.ravel().tolist(), strict=True))) == np.prod(shape)
    assert first.max() < limit // 2 and second.max() < limit


def test_an_array_beyond_two_words_is_refused():
    assert jax.eval_shape(lambda: threefry.counters((2**16, 2**8, 2**20)))[0].shape == (2**16, 2**8, 2**20)
    for shape in [(2**32, 2**32), (2**31 + 1, 2**20, 2**12)]:
        with pytest.raises(ValueError, match="too large"):
            jax.eval_shape(lambda shape=shape: threefry.counters(shape))


def test_other_kinds_of_key_draw_from_their_own_generator():
    key = jax.random.key(3, impl="rbg")
    np.testing.assert_array_equal(threefry.random_words(key, (5,)), jax.random.bits(key, (4, 5)))
