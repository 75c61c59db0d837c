import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from helpers import dot_loss, mlp_batch, mlp_loss, mlp_params, privacy_four, slow_unless

import dpopt
from dpopt import noise

N = 20_000  # enough to tell a standard deviation from 2/3 or 3/2 of it with certainty
PLAUSIBLE = 1e-3  # keys are fixed, so a p-value above this stays above it
ABSURD = 1e-12


def p_value(samples, stddev):
    return scipy.stats.kstest(np.asarray(samples).astype(np.float64).ravel() / stddev, "norm").pvalue


def assert_gaussian(samples, stddev):
    """Accepts N(0, stddev^2), and shows that the test would reject a wrong standard deviation."""
    assert p_value(samples, stddev) > PLAUSIBLE
    assert p_value(samples, stddev * 2 / 3) < ABSURD
    assert p_value(samples, stddev * 3 / 2) < ABSURD


def assert_uncorrelated(a, b):
    correlation = np.corrcoef(np.asarray(a).ravel(), np.asarray(b).ravel())[0, 1]
    assert abs(correlation) < 4.5 / np.sqrt(np.size(a))  # 4.5 standard errors


def noise_of(transformation, tree, steps=1):
    state = transformation.init(tree)
    for _ in range(steps):
        noisy, state = transformation.update(tree, state)
    return noisy


@pytest.mark.parametrize("stddev", [0.01, 1.0, 37.0])
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_noise_has_the_stated_standard_deviation(stddev, make_key):
    assert_gaussian(noise_of(dpopt.add_gaussian_noise(stddev, make_key(1)), jnp.zeros(N)), stddev)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_noise_on_narrow_types_is_drawn_in_float32(dtype):
    noisy = noise_of(dpopt.add_gaussian_noise(2.0, jax.random.key(1)), jnp.zeros(N, dtype))
    assert noisy.dtype == jnp.float32
    assert_gaussian(noisy, 2.0)
    assert len(np.unique(noisy)) > 0.99 * N  # bfloat16 has far fewer values there


def test_noise_in_64_bits(x64):
    noisy = noise_of(dpopt.add_gaussian_noise(2.0, jax.random.key(1)), jnp.zeros(N, jnp.float64))
    assert noisy.dtype == jnp.float64
    assert_gaussian(noisy, 2.0)


def test_noise_is_centred_on_the_sum():
    total = jnp.linspace(-100, 100, N)
    assert_gaussian(noise_of(dpopt.add_gaussian_noise(3.0, jax.random.key(2)), total) - total, 3.0)


def test_noise_of_an_optimizer_is_sigma_c_over_b():
    opt = dpopt.dp_sgd(1.0, **privacy_four(l2_clip_norm=0.5, noise_multiplier=3.0, expected_batch_size=8))
    params = jnp.zeros(N)
    updates, _ = opt.update(jnp.zeros((2, N)), opt.init(params), params)
    assert_gaussian(updates, 3.0 * 0.5 / 8)


def test_leaves_coordinates_and_steps_are_uncorrelated():
    transformation = dpopt.add_gaussian_noise(1.0, jax.random.key(3))
    tree = {"a": jnp.zeros(N), "b": jnp.zeros(N), "c": [jnp.zeros((N // 100, 100))]}
    first, state = transformation.update(tree, transformation.init(tree))
    second, _ = transformation.update(tree, state)
    assert_uncorrelated(first["a"], first["b"])
    assert_uncorrelated(first["a"], first["c"][0])
    assert_uncorrelated(first["a"], second["a"])
    assert_uncorrelated(first["a"], second["b"])
    assert_uncorrelated(first["a"][:-1], first["a"][1:])
    assert_uncorrelated(first["c"][0][:-1], first["c"][0][1:])


def test_steps_are_independent_at_one_coordinate():
    transformation = dpopt.add_gaussian_noise(1.0, jax.random.key(3))

    def step(state, _):
        noisy, state = transformation.update(jnp.zeros(2), state)
        return state, noisy

    _, draws = jax.lax.scan(step, transformation.init(jnp.zeros(2)), length=N)
    assert_gaussian(draws[:, 0], 1.0)
    assert_uncorrelated(draws[:-1, 0], draws[1:, 0])
    assert_uncorrelated(draws[:, 0], draws[:, 1])


def test_the_correlation_check_has_power():
    one_key_for_all = jax.random.normal(jax.random.key(0), (N,))
    with pytest.raises(AssertionError):
        assert_uncorrelated(one_key_for_all, one_key_for_all)
    with pytest.raises(AssertionError):
        assert_uncorrelated(one_key_for_all, 0.1 * one_key_for_all + jax.random.normal(jax.random.key(1), (N,)))


def test_same_key_and_count_same_draw():
    first, again = (noise_of(dpopt.add_gaussian_noise(1.0, jax.random.key(7)), jnp.zeros(5), steps=3) for _ in "ab")
    assert first.tolist() == again.tolist()
    assert first.tolist() != noise_of(dpopt.add_gaussian_noise(1.0, jax.random.key(8)), jnp.zeros(5), 3).tolist()
    assert first.tolist() != noise_of(dpopt.add_gaussian_noise(1.0, jax.random.key(7)), jnp.zeros(5), 2).tolist()


def test_the_draw_does_not_depend_on_the_data():
    transformation = dpopt.add_gaussian_noise(1.0, jax.random.key(7))
    zeros, large = (noise_of(transformation, jnp.full(5, value)) for value in (0.0, 1024.0))
    np.testing.assert_allclose(large - 1024.0, zeros, atol=1024 * 1.2e-7)


def test_a_resumed_state_draws_what_it_would_have_drawn():
    transformation = dpopt.add_gaussian_noise(1.0, jax.random.key(7))
    _, state = transformation.update(jnp.zeros(3), transformation.init(jnp.zeros(3)))
    restored = jax.tree.map(lambda x: x, dpopt.noise.AddGaussianNoiseState(jax.random.key(7), np.int32(1)))
    expected, _ = transformation.update(jnp.zeros(3), state)
    resumed, _ = transformation.update(jnp.zeros(3), restored)
    assert expected.tolist() == resumed.tolist()


def test_the_state_carries_the_key_so_a_checkpoint_does():
    one, other = (dpopt.add_gaussian_noise(1.0, jax.random.key(seed)) for seed in (1, 2))
    state = one.init(jnp.zeros(3))
    assert one.update(jnp.zeros(3), state)[0].tolist() == other.update(jnp.zeros(3), state)[0].tolist()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("microbatch_size", slow_unless({None, 3}, [None, 1, 3, 8]))
@pytest.mark.parametrize("mask", [None, [True, False] * 4, [False] * 8])
def test_one_draw_a_step_whatever_the_microbatch_size(count_draws, microbatch_size, mask):
    opt = dpopt.dp_adam(0.1, **privacy_four())
    step = dpopt.make_train_step(mlp_loss, opt, engine="vmap", microbatch_size=microbatch_size)
    params, mask = mlp_params(), None if mask is None else np.array(mask)

    def two_steps(params, state, batch):
        for _ in range(2):
            params, state, _ = step(params, state, batch, mask)
        return params, state

    jax.eval_shape(two_steps, params, opt.init(params), mlp_batch(8))  # draws are counted when they are traced
    assert count_draws == 2 * [jax.tree.structure(params)]


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_the_noise_is_the_same_whatever_the_microbatch_size(microbatch_size):
    opt = dpopt.dp_sgd(1.0, **privacy_four())
    step = dpopt.make_train_step(dot_loss, opt, engine="vmap", microbatch_size=microbatch_size)
    params = jnp.zeros(4)
    got, _, _ = step(params, opt.init(params), jnp.zeros((6, 4)), mask=None)
    draw = noise.standard_normal_like(jax.random.fold_in(jax.random.key(0), 0), params)
    np.testing.assert_array_equal(got, -draw / 4)


def test_zero_noise_adds_nothing_but_counts(count_draws):
    transformation = dpopt.add_gaussian_noise(0.0, jax.random.key(0))
    noisy, state = transformation.update(jnp.ones(3), transformation.init(jnp.ones(3)))
    assert noisy.tolist() == [1.0, 1.0, 1.0] and int(state.count) == 1 and not count_draws


def test_a_schedule_sets_the_noise_of_each_step():
    transformation = dpopt.add_gaussian_noise(lambda step: jnp.where(step < 1, 1.0, 10.0), jax.random.key(0))
    first, state = transformation.update(jnp.zeros(N), transformation.init(jnp.zeros(N)))
    second, _ = transformation.update(jnp.zeros(N), state)
    assert_gaussian(first, 1.0)
    assert_gaussian(second, 10.0)


def test_legacy_and_typed_keys_draw_the_same():
    draws = [
        noise_of(dpopt.add_gaussian_noise(1.0, key), jnp.zeros(4))
        for key in (jax.random.key(5), jax.random.PRNGKey(5), np.asarray(jax.random.PRNGKey(5)))
    ]
    assert draws[0].tolist() == draws[1].tolist() == draws[2].tolist()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_of_any_kind_work(impl):
    noisy = noise_of(dpopt.add_gaussian_noise(1.0, jax.random.key(5, impl=impl)), jnp.zeros(N))
    assert_gaussian(noisy, 1.0)


def test_draws_are_the_same_however_threefry_is_set():
    tree = {"a": jnp.zeros(5), "b": jnp.zeros(3), "large": jnp.zeros((3, noise.SMALL))}
    drawn = noise.standard_normal_like(jax.random.key(5), tree)
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        again = noise.standard_normal_like(jax.random.key(5), tree)
    jax.tree.map(np.testing.assert_array_equal, drawn, again)


def test_small_leaves_are_drawn_together():
    """And differ; many leaves need no more compiled draws than a few."""
    trees = [[jnp.zeros((50, n)) for n in range(1, count)] for count in (4, 16)]
    lowered = [jax.jit(noise.standard_normal_like).lower(jax.random.key(0), tree).as_text() for tree in trees]
    assert len({text.count("shift_right_logical") for text in lowered}) == 1
    values = np.concatenate([np.ravel(leaf) for leaf in noise.standard_normal_like(jax.random.key(0), trees[1])])
    assert p_value(values, 1.0) > PLAUSIBLE and len(np.unique(values)) > 0.999 * len(values)


def test_leaves_of_each_kind_have_draws_of_their_own(x64):
    small, large = (4, 50), (2, noise.SMALL)
    tree = [jnp.zeros(shape, dtype) for shape in (small, large) for dtype in (jnp.float32, jnp.float64) for _ in "ab"]
    drawn = noise.standard_normal_like(jax.random.key(0), [*tree, jnp.zeros(()), jnp.zeros((0, 3))])
    assert [(d.shape, d.dtype) for d in drawn[:-2]] == [(t.shape, t.dtype) for t in tree]
    assert drawn[-2].shape == () and drawn[-1].shape == (0, 3)
    assert [d.shape for d in noise.standard_normal_like(jax.random.key(0), 2 * [jnp.zeros((0, 3))])] == [(0, 3), (0, 3)]
    starts = np.array([np.ravel(d)[:200] for d in drawn[:-2]])
    assert np.abs(np.corrcoef(starts) - np.eye(len(tree))).max() < 4.5 / np.sqrt(200)


def test_noise_for_complex_arrays_is_refused():
    with pytest.raises(TypeError, match="real arrays only; got dtype complex64"):
        noise.standard_normal_like(jax.random.key(0), {"a": jnp.zeros(2), "b": jnp.zeros(2, jnp.complex64)})


def test_donating_the_state_keeps_the_callers_key():
    key = jax.random.key(0)
    transformation = dpopt.add_gaussian_noise(1.0, key)
    step = jax.jit(lambda state: transformation.update(jnp.zeros(2), state), donate_argnums=0)
    draws = [step(transformation.init(jnp.zeros(2)))[0].tolist() for _ in range(2)]
    assert draws[0] == draws[1]
    jax.random.key_data(key).block_until_ready()


@pytest.mark.slow
def test_keys_and_noise_can_be_vmapped_over():
    def run(key, stddev):
        return noise_of(dpopt.add_gaussian_noise(stddev, key), jnp.zeros(3))

    keys, stddevs = jax.random.split(jax.random.key(0), 4), jnp.arange(1.0, 5.0)
    rows = jax.vmap(run)(keys, stddevs)
    for row, key, stddev in zip(rows, keys, stddevs, strict=True):
        np.testing.assert_allclose(row, run(key, float(stddev)), rtol=1e-6)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (0, TypeError),
        (None, TypeError),
        (jnp.zeros(2), TypeError),
        (jnp.zeros(2, jnp.int32), TypeError),
        (np.zeros(3, np.uint32), ValueError),
        (np.zeros((2, 2), np.uint32), ValueError),
        (jax.random.split(jax.random.PRNGKey(0)), ValueError),
        ("seed", TypeError),
    ],
)
def test_what_is_no_key_is_refused(key, error):
    with pytest.raises(error, match=r"key must be a.*PRNG key.*got"):
        dpopt.add_gaussian_noise(1.0, key)


def test_an_array_of_typed_keys_is_refused():
    with pytest.raises(ValueError, match=r"single PRNG key.*shape \(2,\)"):
        dpopt.add_gaussian_noise(1.0, jax.random.split(jax.random.key(0)))


@pytest.mark.parametrize("stddev", [-1.0, np.nan, np.inf, jnp.float32(-1.0)])
def test_a_bad_standard_deviation_is_refused(stddev):
    with pytest.raises(ValueError, match="noise_stddev must be non-negative and finite; got"):
        dpopt.add_gaussian_noise(stddev, jax.random.key(0))


@pytest.mark.parametrize("stddev", ["1", None, True, np.ones(2)])
def test_a_standard_deviation_that_is_no_number_is_refused(stddev):
    with pytest.raises(TypeError, match="noise_stddev must be a"):
        dpopt.add_gaussian_noise(stddev, jax.random.key(0))


def test_noise_refuses_gradients_that_were_not_summed():
    transformation = dpopt.add_gaussian_noise(1.0, jax.random.key(0))
    grads = dpopt.per_example_grads(dot_loss)(jnp.zeros(2), jnp.ones((3, 2)), mask=None)
    with pytest.raises(TypeError, match="Put clip_and_sum first"):
        transformation.update(grads, transformation.init(jnp.zeros(2)))


@pytest.mark.parametrize("size", [0, -1, np.nan, np.inf])
def test_a_bad_expected_batch_size_is_refused(size):
    with pytest.raises(ValueError, match="expected_batch_size must be positive and finite; got"):
        dpopt.normalize_by(size)


def test_normalisation_keeps_dtypes(either_precision):
    mean, _ = dpopt.normalize_by(np.float64(4)).update(jnp.ones(2, jnp.float32), optax.EmptyState())
    assert mean.dtype == jnp.float32 and mean.tolist() == [0.25, 0.25]


def test_privacy_noise_is_drawn_in_one_place_only():
    """No other module calls a normal sampler, JAX's or its own, except two that draw no privacy noise."""
    not_noise = {"audit/directions.py", "optimizers/muon.py"}  # a canary's gradient; an average after the noise
    package = pathlib.Path(inspect.getfile(dpopt)).parent
    sampler = r"random\.(normal|multivariate_normal|truncated_normal)\(|normal_from_words\("
    code = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    without_doctests = {path: re.sub(r"(?m)^ *(>>>|\.\.\.) .*", "", text) for path, text in code.items()}
    users = {path for path, text in without_doctests.items() if re.search(sampler, text)}
    assert users == {"noise.py", "normals/box_muller.py"} | not_noise


def test_streams_that_are_set_apart_have_numbers_of_their_own():
    """Numbers folded into a key, besides steps: two equal ones would share draws."""
    package = pathlib.Path(inspect.getfile(dpopt)).parent
    found = [n for path in package.rglob("*.py") for n in re.findall(r"2\*\*31 - \d+", path.read_text())]
    assert len(found) >= 5 and len(set(found)) == len(found)
