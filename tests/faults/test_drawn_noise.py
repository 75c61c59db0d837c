"""Faults of version 0.1 in what noise was drawn: bounded tails, enumerable values, noise that float32 loses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import dpopt
from dpopt import noise
from dpopt.normals import box_muller, threefry

KEY = jax.random.key(0)


def jax_support():
    """Every value of `jax.random.normal` in float32: it comes from one of 2^23 uniforms."""
    bits = jnp.arange(2**23, dtype=jnp.uint32)
    uniform = jax.lax.bitcast_convert_type(bits | jnp.uint32(0x3F800000), jnp.float32) - 1.0
    low = jnp.nextafter(jnp.float32(-1), jnp.float32(0))
    return np.asarray(jnp.sqrt(jnp.float32(2)) * jax.lax.erf_inv(jnp.maximum(low, uniform * (1.0 - low) + low)))


def test_tails():
    """Draws from the last 2^-24 of radii, where the old ones had their last atom, are as frequent as they must be."""
    n, zeros = 1_000_000, 24

    @jax.jit
    def draw_far_out(key):
        a, b, c, d = threefry.random_words(key, (n,))
        return box_muller.normal_from_words(a & 1 | (a >> 1 >> zeros) << 1, b, c, d, jnp.float32)

    far = np.asarray(draw_far_out(KEY))
    for distance in (5.8, 6.0, 6.5, 7.0):  # all of it comes from radii in that share
        share = 2 * scipy.stats.norm.sf(distance) * 2.0**zeros
        assert abs((np.abs(far) > distance).sum() - n * share) < 4.5 * np.sqrt(n * share)
    assert abs((far > 0).sum() - n / 2) < 4.5 * np.sqrt(n) / 2
    _, repeats = np.unique(far[np.abs(far) > 5.5], return_counts=True)
    assert repeats.max() < 5, "an atom"


@pytest.mark.slow
def test_tails_of_many_draws():
    n, runs, distances = 4_000_000, 40, jnp.array([3.0, 4.0, 5.0, 5.42])

    @jax.jit
    def beyond(run):
        draw = jnp.abs(noise.standard_normal_like(jax.random.fold_in(KEY, run), jnp.zeros(n)))
        return jnp.stack([(draw > t).sum() for t in distances]), draw.max()

    counts, largest = zip(*map(beyond, range(runs)), strict=True)
    expected = 2 * scipy.stats.norm.sf(np.asarray(distances)) * n * runs
    assert (np.abs(np.sum(counts, axis=0) - expected) < 4.5 * np.sqrt(expected)).all()
    median = scipy.stats.norm.isf((1 - 0.5 ** (1 / n)) / 2)
    assert 10 < (np.array(largest) > median).sum() < 30


@pytest.mark.slow
def test_floatbits():
    """No table of all draws tells which sums are possible: as many lie in JAX's as would by chance."""
    support = jax_support()
    old = np.asarray(jax.random.normal(KEY, (20_000,)))
    new = np.asarray(noise.standard_normal_like(KEY, jnp.zeros(20_000)))
    assert np.isin(old, support).mean() > 0.99  # the table is right
    assert np.isin(new, support).mean() < 0.2
    # Low digits of the significand are even, also in pairs with what comes above them.
    digits = new[(np.abs(new) > 0.25) & (np.abs(new) < 4)].view(np.uint32)
    assert scipy.stats.chisquare(np.bincount(digits & 63, minlength=64)).pvalue > 1e-3
    assert scipy.stats.chisquare(np.bincount((digits >> 6) & 63, minlength=64)).pvalue > 1e-3


@pytest.mark.parametrize(("clip_norm", "multiplier"), [(2e-38, 0.5), (1e-38, 1.0), (1e-45, 1.0), (1e-25, 1e-20)])
def test_underflow_of_noise(clip_norm, multiplier):
    with pytest.raises(ValueError):
        dpopt.privatize(l2_clip_norm=clip_norm, noise_multiplier=multiplier, expected_batch_size=1, key=KEY)
    with pytest.raises(ValueError, match="noise_stddev must be 0 or at least"):
        dpopt.add_gaussian_noise(clip_norm * multiplier, KEY)


def test_the_least_noise_is_gaussian():
    transformation, zeros = dpopt.add_gaussian_noise(2.0**-100, KEY), jnp.zeros(20_000)
    noisy = np.asarray(transformation.update(zeros, transformation.init(zeros))[0]).astype(np.float64) * 2.0**100
    assert scipy.stats.kstest(noisy, "norm").pvalue > 1e-3
    assert scipy.stats.kstest(noisy * 2 / 3, "norm").pvalue < 1e-12


@pytest.mark.parametrize("stddev", [0.0, 1e-38, 1e-45, 7e-31, -1.0, np.nan])
def test_noise_that_vanishes_while_traced_is_nan(stddev):
    def noisy(traced):
        transformation = dpopt.add_gaussian_noise(traced, KEY)
        return transformation.update(jnp.ones(3), transformation.init(jnp.ones(3)))[0]

    if 0 <= stddev < 2.0**-126:  # a traced number, which nothing accounts for, may be switched off
        assert np.all(jax.jit(noisy)(stddev) == 1)
    else:
        assert np.isnan(jax.jit(noisy)(stddev)).all() and np.isfinite(jax.jit(noisy)(1e-30)).all()
    scheduled = dpopt.add_gaussian_noise(lambda step: jnp.where(step < 1, 1.0, stddev), KEY)
    first, state = scheduled.update(jnp.ones(3), scheduled.init(jnp.ones(3)))
    assert np.isfinite(first).all() and np.isnan(scheduled.update(jnp.ones(3), state)[0]).all()


def test_noise_that_decays_to_nothing_is_nan():
    halved = optax.exponential_decay(1.0, transition_steps=1, decay_rate=0.5)
    transformation = dpopt.add_gaussian_noise(halved, KEY)
    step = jax.jit(transformation.update)
    for count, lost in [(99, False), (101, True), (140, True), (200, True)]:
        noisy, _ = step(jnp.ones(3), noise.AddGaussianNoiseState(KEY, jnp.int32(count)))
        assert bool(jnp.isnan(noisy).all()) == lost
