import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from dpopt.normals import box_muller

TOP = 2**32 - 1
EDGES = [0, 1, 2, 3, 2**24 - 1, 2**31 - 1, 2**31, 2**31 + 1, TOP - 1, TOP]
from_words = jax.jit(box_muller.normal_from_words, static_argnums=4)


def words_of_all_sizes():
    """Corner cases in every combination, and random words with a random number of leading zeros."""
    rng = np.random.default_rng(0)
    random = rng.integers(0, TOP, (4, 50_000), endpoint=True) >> rng.integers(0, 32, (4, 50_000))
    edges = np.stack([axis.ravel() for axis in np.meshgrid(*4 * [EDGES])])
    return np.concatenate([edges, random], axis=1).astype(np.uint32)


def reference(words, dither):
    """The Box-Muller formula in 80 bits."""
    a, b, c, d = words.astype(np.longdouble)
    sign = np.where(words[0] & 1, -1, 1)
    halves = [np.floor(word / 2) for word in (a, b, c, d)]
    uniform = halves[0] * 2.0**-31 + (halves[1] + 0.5) * 2.0**-62
    turn = halves[2] * 2.0**-31 + (0 if dither else halves[3] * 2.0**-62)
    signed = np.where(words[3] < 2**31, d, d - 2.0**32)
    spread = 2.0**-8 if dither else 0.0
    radius = np.sqrt(-2 * np.log(np.minimum(uniform, 1)) * (1 - spread**2 / 3))
    return sign * radius * np.cos(np.longdouble(np.pi) / 2 * turn) + signed * spread * 2.0**-31


def test_every_word_pattern_gives_its_normal():
    words = words_of_all_sizes()
    got = np.asarray(from_words(*words, jnp.float32))
    assert got.dtype == np.float32 and np.isfinite(got).all()
    # Close to 1 the uniform has steps of 2^-24, so the radius has steps of 2^-12 close to 0; else a few roundings.
    expected = reference(words, dither=True)
    error = np.abs(got - expected)
    central = words[0] >= TOP - 2**16
    assert error[~central].max() < 2e-6 and error[central].max() < 4e-4
    assert 9.2 < np.abs(got).max() < 9.4


def test_every_word_pattern_gives_its_normal_in_64_bits(x64):
    words = words_of_all_sizes()
    got = np.asarray(from_words(*words, jnp.float64))
    assert got.dtype == np.float64 and np.isfinite(got).all()
    assert np.abs(got - reference(words, dither=False)).max() < 2e-8


def test_the_last_word_moves_a_draw_evenly_and_by_little():
    """Whatever the others are, so that low digits reveal nothing about them."""
    d = np.random.default_rng(1).integers(0, TOP, 100_000, endpoint=True, dtype=np.uint32)
    for a, c in [(0, 0), (2**31, 2**30), (12345, 2**31 + 5)]:
        rest = [np.full_like(d, word) for word in (a, 77, c)]
        draws = np.asarray(from_words(*rest, d, jnp.float32)).astype(np.float64)
        centre = float(from_words(*(w[:1] for w in rest), np.zeros(1, np.uint32), jnp.float32)[0])
        assert scipy.stats.kstest(draws - centre, "uniform", (-(2.0**-8), 2.0**-7)).pvalue > 1e-3


def test_low_digits_are_as_likely_as_security_says():
    """Where draws are above 1/16, odd floats are about as frequent as even ones; near 2^-10, three in ten are odd."""
    words = np.random.default_rng(0).integers(0, TOP, (4, 4_000_000), endpoint=True, dtype=np.uint32)
    drawn = np.abs(np.asarray(from_words(*words, jnp.float32)))
    is_odd = drawn.view(np.uint32) & 1
    assert 0.48 < is_odd[drawn > 1 / 16].mean() < 0.501
    assert 0.25 < is_odd[(drawn >= 2**-10) & (drawn < 2**-9)].mean() < 0.31
