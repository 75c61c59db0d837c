import itertools
import math

import numpy as np
import pytest
import scipy.stats

from dpopt import FixedSizeSampler, PoissonSampler
from dpopt.sampling import Poisson, WithoutReplacement, sampling_prob

STEPS = 4000
PLAUSIBLE, ABSURD = 1e-3, 1e-12  # seeds are fixed, so outcomes do not change


def inclusions(draw, num_examples, steps=STEPS):
    """A ``(steps, num_examples)`` table of 0 and 1 from ``draw(step) -> indices``."""
    table = np.zeros((steps, num_examples), int)
    for step in range(steps):
        drawn = np.asarray(draw(step))
        assert len(set(drawn.tolist())) == len(drawn), "an example was drawn twice"
        table[step, drawn] = 1
    return table


def joint_law_p_value(table, q):
    """Chi-square of ALL subsets against independent coin flips of probability q, the definition of Poisson sampling."""
    n = table.shape[1]
    observed = np.bincount(table @ (1 << np.arange(n)), minlength=2**n)
    sizes = np.array([bin(code).count("1") for code in range(2**n)])
    expected = len(table) * q**sizes * (1 - q) ** (n - sizes)
    return scipy.stats.chisquare(observed, expected).pvalue


@pytest.mark.parametrize(("n", "expected_size"), [(4, 2), (5, 1.5), (3, 2.4)])
def test_poisson_samples_are_independent_coin_flips(n, expected_size):
    table = inclusions(PoissonSampler(n, expected_size, seed=0).drawn, n)
    assert joint_law_p_value(table, expected_size / n) > PLAUSIBLE


def rounded_poisson(step, n=4, q=0.5):
    """Wrong: a size near the expected one, then sampling without replacement."""
    rng = np.random.default_rng(step)
    return rng.choice(n, round(n * q) + rng.integers(-1, 2), replace=False)


def shuffled_epochs(step, n=4, size=2):
    """Wrong: consecutive pieces of a shuffled data set."""
    epoch, position = divmod(step, n // size)
    return np.random.default_rng(epoch).permutation(n)[position * size : (position + 1) * size]


def uneven(step, n=4):
    """Wrong: one example is drawn more often."""
    return np.flatnonzero(np.random.default_rng(step).random(n) < [0.5, 0.5, 0.5, 0.6])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "draw",
    [rounded_poisson, shuffled_epochs, uneven, FixedSizeSampler(4, 2, seed=0).drawn],
    ids=lambda draw: draw.__name__,
)
def test_the_law_of_other_schemes_is_rejected(draw):
    assert joint_law_p_value(inclusions(draw, 4), 0.5) < ABSURD


def steps_p_value(table, q):
    """Chi-square of the membership of two examples in two consecutive steps, against independence."""
    pairs = np.concatenate([table[0::2, :2], table[1::2, :2]], axis=1)
    return joint_law_p_value(pairs, q)


def test_consecutive_steps_are_independent():
    assert steps_p_value(inclusions(PoissonSampler(4, 2, seed=0).drawn, 4), 0.5) > PLAUSIBLE
    assert steps_p_value(inclusions(shuffled_epochs, 4), 0.5) < ABSURD


def test_inclusion_frequency_and_size_of_a_realistic_sampler():
    n, size = 2000, 40
    table = inclusions(PoissonSampler(n, size, seed=3).drawn, n, steps=1000)
    q = size / n
    frequency = scipy.stats.chisquare(
        np.stack([table.sum(0), 1000 - table.sum(0)]),
        np.array([[1000 * q], [1000 * (1 - q)]]) * np.ones(n),
        axis=None,
        ddof=n - 1,
    )
    assert frequency.pvalue > PLAUSIBLE
    sizes = table.sum(1)
    assert abs(sizes.mean() - n * q) < 4 * math.sqrt(n * q * (1 - q) / 1000)
    # Variance of a variance of a near-normal count: 2 v^2 / steps.
    assert abs(sizes.var() / (n * q * (1 - q)) - 1) < 4 * math.sqrt(2 / 1000)


def test_fixed_size_samples_are_uniform():
    draw = FixedSizeSampler(5, 2, seed=0).drawn
    counts = {pair: 0 for pair in itertools.combinations(range(5), 2)}
    for step in range(STEPS):
        counts[tuple(sorted(draw(step).tolist()))] += 1
    assert scipy.stats.chisquare(list(counts.values())).pvalue > PLAUSIBLE


SAMPLERS = [
    lambda **k: PoissonSampler(50, 10, **k),
    lambda **k: PoissonSampler(50, 0.2, **k),
    lambda **k: PoissonSampler(3, 3, **k),
    lambda **k: FixedSizeSampler(50, 10, **k),
]


@pytest.mark.parametrize("make", SAMPLERS)
def test_a_sampler_restarts_at_any_step(make):
    whole = list(itertools.islice(make(seed=5), 9))
    resumed = list(itertools.islice(make(seed=5, start=4), 5))
    for a, b in zip(whole[4:], resumed, strict=True):
        np.testing.assert_array_equal(a.indices, b.indices)
        np.testing.assert_array_equal(a.mask, b.mask)
    np.testing.assert_array_equal(make(seed=5).batch(7).indices, whole[7].indices)


def test_seeds_and_steps_give_other_batches():
    sampler, other = PoissonSampler(1000, 50, seed=0), PoissonSampler(1000, 50, seed=1)
    drawn = [tuple(s.drawn(t)) for s in (sampler, other) for t in range(20)]
    assert len(set(drawn)) == 40


def test_iterating_twice_gives_the_same():
    sampler = PoissonSampler(50, 10, seed=0)
    first = next(iter(sampler))
    with pytest.warns(UserWarning, match="iterated over before"):
        again = next(iter(sampler))
    np.testing.assert_array_equal(first.indices, again.indices)


@pytest.mark.parametrize("make", SAMPLERS)
@pytest.mark.parametrize("pad_to", [1, 4, 16, 1000])
def test_batches_are_padded_to_a_multiple_with_valid_indices(make, pad_to):
    sampler = make(seed=0, pad_to=pad_to)
    for step in range(30):
        indices, mask = sampler.batch(step)
        assert len(indices) % pad_to == 0 and indices.dtype == np.int64 and mask.dtype == bool
        assert indices.min() >= 0 and indices.max() < sampler.num_examples
        np.testing.assert_array_equal(indices[mask], sampler.drawn(step))


def test_an_empty_batch_is_a_batch():
    sampler = PoissonSampler(1000, 0.01, seed=0, pad_to=8)
    indices, mask = sampler.batch(0)
    assert indices.shape == (8,) and not mask.any()


def test_stacked_batches_are_the_batches():
    sampler = PoissonSampler(200, 10, seed=0, pad_to=4)
    stacked = sampler.batches(3, 9)
    assert stacked.indices.shape == stacked.mask.shape and len(stacked.indices) == 6
    for step, indices, mask in zip(range(3, 9), *stacked, strict=True):
        np.testing.assert_array_equal(indices[mask], sampler.drawn(step))
    assert stacked.indices.shape[1] % 4 == 0


def test_full_sampling_takes_everything():
    assert sorted(PoissonSampler(7, 7, seed=0).drawn(0)) == list(range(7))


def test_a_sample_is_never_cut():
    with pytest.raises(ValueError, match="drew 7 examples, which do not fit in 5"):
        PoissonSampler(7, 7, seed=0).batch(0, size=5)


def test_schemes_carry_their_probability():
    assert PoissonSampler(200, 10, seed=0).scheme == Poisson(0.05)
    assert sampling_prob(PoissonSampler(200, 10, seed=0)) == 0.05
    assert sampling_prob(FixedSizeSampler(200, 10, seed=0)) == 0.05
    assert FixedSizeSampler(200, 10, seed=0).scheme == WithoutReplacement(200, 10)
    assert FixedSizeSampler(200, 10, seed=0).expected_batch_size == 10


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_examples": 0}, ValueError, "num_examples must be at least 1; got 0"),
        ({"num_examples": 10.0}, TypeError, "num_examples must be an integer; got 10.0"),
        ({"expected_batch_size": 0}, ValueError, "expected_batch_size must be positive"),
        ({"expected_batch_size": -1}, ValueError, "expected_batch_size.*got -1"),
        ({"expected_batch_size": math.nan}, ValueError, "expected_batch_size.*got nan"),
        ({"expected_batch_size": 11}, ValueError, "11 exceeds num_examples 10"),
        ({"seed": -1}, ValueError, "seed must be at least 0; got -1"),
        ({"seed": 0.5}, TypeError, "seed must be an integer"),
        ({"pad_to": 0}, ValueError, "pad_to must be at least 1; got 0"),
        ({"start": -1}, ValueError, "start must be at least 0; got -1"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        PoissonSampler(**{**dict(num_examples=10, expected_batch_size=2, seed=0), **change})


def test_bad_schemes_and_ranges_are_named():
    for q in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"sampling_prob must lie in \(0, 1\]"):
            Poisson(q)
    with pytest.raises(ValueError, match="exceeds num_examples"):
        FixedSizeSampler(4, 5, seed=0)
    with pytest.raises(ValueError, match="stop must exceed start"):
        PoissonSampler(4, 2, seed=0).batches(3, 3)
    with pytest.raises(ValueError, match="step must be at least 0"):
        PoissonSampler(4, 2, seed=0).batch(-1)
