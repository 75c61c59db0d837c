"""scale_by_micro_adam and dp_micro_adam: the authors' trajectories, a NumPy transcription, limits, state size."""

import itertools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import enable_x64, slow_unless

import dpopt
from dpopt.optimizers import _quantize, _topk
from dpopt.optimizers.microadam import dp_micro_adam, scale_by_micro_adam

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
LEAVES = ("b", "u", "w")


def load(name, dtype):
    """Metadata, and every array of a golden file as ``{prefix: {leaf: array}}``."""
    with np.load(GOLDEN / name) as d:
        meta = json.loads(str(d["meta"]))
        arrays = {k: np.asarray(d[k]) for k in d.files if k != "meta"}
    trees: dict = {}
    for key, value in arrays.items():
        prefix, _, leaf = key.partition("__")
        if leaf:
            trees.setdefault(prefix, {})[leaf] = value.astype(dtype) if value.dtype.kind == "f" else value
        else:
            trees[key] = value
    return meta, trees


def at(tree, t):
    return {leaf: jnp.asarray(tree[leaf][t]) for leaf in LEAVES}


def assert_close(actual, expected, rtol):
    """The largest difference relative to the largest value, as in the notes on the golden files."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.max(np.abs(actual - expected)) <= rtol * np.max(np.abs(expected))


# --- the authors' trajectories ----------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name, x64, rtol",
    [
        ("microadam_wd01_f64.npz", True, 1e-10),
        ("microadam_wd0_f64_m10_d01.npz", True, 1e-10),
        pytest.param("microadam_wd0_f32.npz", False, 1e-5, marks=pytest.mark.slow),
        ("microadam_wd01_f32.npz", False, 1e-5),
    ],
)
def test_golden_microadam(name, x64, rtol):
    with enable_x64(x64):
        meta, data = load(name, np.float64 if x64 else np.float32)
        h = meta.get("hyperparameters", meta)
        rule = scale_by_micro_adam(
            b1=h["beta1"], b2=h["beta2"], eps=h["eps"], density=h["density"], memory_size=h["num_grads"],
            quantization_bits=None,
        )  # fmt: skip
        lrs = jnp.asarray(data["lr_used"], jnp.float64 if x64 else jnp.float32)
        opt = optax.chain(
            rule, optax.add_decayed_weights(h["weight_decay"]), optax.scale_by_learning_rate(lambda t: lrs[t])
        )
        params = {leaf: jnp.asarray(data["init"][leaf]) for leaf in LEAVES}
        state = opt.init(params)

        @jax.jit
        def step(params, state, grads):
            updates, state = opt.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for t in range(h["T"]):
            params, state = step(params, state, at(data["grad"], t))
            slot = t % h["num_grads"]
            for leaf in LEAVES:
                indices = np.asarray(state[0].indices[leaf][slot])
                order = np.argsort(indices)
                np.testing.assert_array_equal(indices[order], data["idx"][leaf][t])
                np.testing.assert_array_equal(np.asarray(state[0].values[leaf][slot])[order], data["val"][leaf][t])
                np.testing.assert_array_equal(
                    np.asarray(state[0].error[leaf]).reshape(data["ef"][leaf][t].shape), data["ef"][leaf][t]
                )
                assert_close(params[leaf], data["param"][leaf][t], rtol)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("x64, rtol", [(True, 1e-6), (False, 1e-5)])  # the reference clips by C / (n + 1e-6)
def test_golden_dp_micro_adam_with_its_own_clip_and_noise(monkeypatch, x64, rtol):
    with enable_x64(x64):
        dtype = np.float64 if x64 else np.float32
        meta, data = load("dpmicroadam_v1_reset_sigma1.npz", dtype)
        h = meta.get("hyperparameters", meta)
        drawn = {}
        monkeypatch.setattr(dpopt.noise, "standard_normal_like", lambda key, tree: drawn["z"])
        opt = dp_micro_adam(
            h["lr"], l2_clip_norm=h["clip"], noise_multiplier=h["sigma"], expected_batch_size=h["B"],
            key=jax.random.key(0), b1=h["beta1"], b2=h["beta2"], eps=h["eps"], density=h["density"],
            memory_size=h["num_grads"], quantization_bits=None, weight_decay=h["weight_decay"],
        )  # fmt: skip
        params = {leaf: jnp.asarray(data["init"][leaf]) for leaf in LEAVES}
        state = opt.init(params)

        @jax.jit
        def step(params, state, per_example, z):
            drawn["z"] = z
            updates, state = opt.update(per_example, state, params)
            return optax.apply_updates(params, updates), state

        for t in range(h["T"]):
            params, state = step(params, state, at(data["eg"], t), at(data["z"], t))
            for leaf in LEAVES:
                assert_close(params[leaf], data["param"][leaf][t], rtol)


def test_golden_private_mean_gives_the_authors_parameters():
    with enable_x64(True):
        meta, data = load("dpmicroadam_v1_reset_sigma1.npz", np.float64)
        h = meta.get("hyperparameters", meta)
        rule = scale_by_micro_adam(density=h["density"], memory_size=h["num_grads"], quantization_bits=None)
        params = {leaf: jnp.asarray(data["init"][leaf]) for leaf in LEAVES}
        state = rule.init(params)
        update = jax.jit(rule.update)
        for t in range(h["T"]):
            updates, state = update(at(data["g"], t), state)
            params = jax.tree.map(lambda p, u: p - h["lr"] * u, params, updates)
        for leaf in LEAVES:
            assert_close(params[leaf], data["param"][leaf][-1], 1e-10)


# --- a transcription in NumPy, from the equations ---------------------------------------------------------------------


def numpy_quantize(a, bits, bucket, r):
    """Encodes and decodes each range."""
    out = np.empty_like(a)
    for start in range(0, a.size, bucket or a.size):
        x = a[start : start + (bucket or a.size)]
        low, high = x.min(), x.max()
        u = (high - low) / (2**bits - 1)
        if u == 0:
            out[start : start + x.size] = low
            continue
        q = np.clip(np.floor((x - low) / u + r[start : start + x.size]), 0, 2**bits - 1)
        out[start : start + x.size] = q * u + low
    return out


def numpy_top_k(a, density, block):
    chosen = []
    for start in range(0, a.size, block or a.size):
        x = np.abs(a[start : start + (block or a.size)])
        chosen.extend(start + np.argsort(-x, kind="stable")[: math.ceil(density * x.size)])
    return np.array(chosen)


def numpy_micro_adam(grads, *, b1, b2, eps, density, m, bits, bucket, block, window_correction, rounding):
    """Updates of one leaf over time, float64. ``rounding(t)`` gives the number added before the floor."""
    d = grads[0].size
    e, window, updates = np.zeros(d), [], []
    for t, g in enumerate(grads, start=1):
        a = g.reshape(-1) + e
        chosen = numpy_top_k(a, density, block)
        window = [*window, (chosen, a[chosen].copy())][-m:]
        a[chosen] = 0
        e = a if bits is None else numpy_quantize(a, bits, bucket, rounding(t))
        z1, z2 = np.zeros(d), np.zeros(d)
        for age, (i, v) in enumerate(reversed(window)):
            z1[i] += b1**age * v
            z2[i] += b2**age * v**2
        seen = len(window) if window_correction else t
        m_hat, v_hat = (1 - b1) * z1 / (1 - b1**seen), (1 - b2) * z2 / (1 - b2**seen)
        updates.append((m_hat / (eps + np.sqrt(v_hat))).reshape(g.shape))
    return updates


OPTIONS = {
    "paper": {},
    "eight bits": {"quantization_bits": 8},
    "dense error": {"quantization_bits": None},
    "buckets": {"bucket_size": 16},
    "a bucket a number": {"bucket_size": 1},
    "odd buckets, 8 bits": {"bucket_size": 7, "quantization_bits": 8},
    "blocks": {"block_size": 12},
    "blocks and buckets": {"block_size": 10, "bucket_size": 25},
    "window": {"bias_correction": "window"},
    "one row": {"memory_size": 1},
}


@pytest.mark.parametrize("option", slow_unless(OPTIONS.keys() - {"eight bits", "buckets", "blocks"}, OPTIONS))
@pytest.mark.one_in(8)
def test_numpy_transcription_over_three_wraps(option):
    options = {"density": 0.2, "memory_size": 4, "quantization_bits": 4, "b1": 0.8, "b2": 0.95, "eps": 1e-4}
    options |= OPTIONS[option]
    shapes = {"w": (7, 9), "b": (5,), "s": ()}
    rng = np.random.default_rng(0)
    grads = [{k: rng.normal(size=s) * 10.0 ** rng.integers(-3, 1) for k, s in shapes.items()} for _ in range(14)]
    with enable_x64(True):
        rule = scale_by_micro_adam(**options)
        state = rule.init({k: jnp.zeros(s) for k, s in shapes.items()})
        update = jax.jit(rule.update)
        actual = []
        for g in grads:
            u, state = update(jax.tree.map(jnp.asarray, g), state)
            actual.append(u)
    for k, shape in shapes.items():
        expected = numpy_micro_adam(
            [g[k] for g in grads], b1=options["b1"], b2=options["b2"], eps=options["eps"], density=options["density"],
            m=options["memory_size"], bits=options["quantization_bits"], bucket=options.get("bucket_size"),
            block=options.get("block_size"), window_correction=options.get("bias_correction") == "window",
            rounding=lambda t, shape=shape: np.full(math.prod(shape), 0.5),
        )  # fmt: skip
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a[k], e, rtol=1e-9, atol=1e-12)


def test_numpy_transcription_with_the_same_random_rounding(monkeypatch):
    """Stochastic rounding adds drawn numbers, one per coordinate, instead of a half."""
    d, steps = 40, 13
    draws = np.random.default_rng(1).uniform(size=(steps, d))
    drawn = {}
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: drawn["r"].reshape(shape).astype(dtype))
    grads = list(np.random.default_rng(2).normal(size=(steps, d)))
    with enable_x64(True):
        rule = scale_by_micro_adam(density=0.1, memory_size=4, rounding_key=jax.random.key(0), eps=1e-3)
        state = rule.init(jnp.zeros(d))

        @jax.jit
        def update(g, state, r):
            drawn["r"] = r
            return rule.update(g, state)

        actual = []
        for g, r in zip(grads, draws, strict=True):
            u, state = update(g, state, r)
            actual.append(u)
    expected = numpy_micro_adam(
        grads, b1=0.9, b2=0.999, eps=1e-3, density=0.1, m=4, bits=4, bucket=None, block=None, window_correction=False,
        rounding=lambda t: draws[t - 1],
    )  # fmt: skip
    np.testing.assert_allclose(np.stack(actual), np.stack(expected), rtol=1e-9, atol=1e-12)


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bucket", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("size", [1, 2, 7, 64])
@pytest.mark.one_in(21)
def test_quantized_error_is_at_most_half_a_unit(bits, bucket, size):
    x = jnp.asarray(10 + np.random.default_rng(size).normal(size=size), jnp.float32)
    q = _quantize.quantize(x, bits=bits, bucket_size=bucket)
    buckets = np.split(np.asarray(x), range(bucket or size, size, bucket or size))
    np.testing.assert_array_equal(q.low, [b.min() for b in buckets])
    np.testing.assert_array_equal(q.high, [b.max() for b in buckets])
    back = _quantize.dequantize(q, size, bits=bits, bucket_size=bucket)
    unit = np.repeat(np.asarray(q.high - q.low) / (2**bits - 1), bucket or size)[:size]
    assert np.all(np.abs(np.asarray(back - x)) <= 0.5 * unit + 1e-5)
    assert q.codes.dtype == jnp.uint8 and q.codes.size == math.ceil(size * bits / 8)
    like = _quantize.zeros(size, jnp.float32, bits=bits, bucket_size=bucket)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), like) == jax.tree.map(lambda a: (a.shape, a.dtype), q)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("value", [0.0, -3.7, 1e-30])
@pytest.mark.parametrize("key", [None, 0])
def test_constant_vectors_survive(value, key):
    x = jnp.full((9,), value, jnp.float32)
    with jax.debug_nans(True):  # the code of a NaN depends on the hardware
        q = _quantize.quantize(x, bits=4, bucket_size=None, key=None if key is None else jax.random.key(key))
    np.testing.assert_array_equal(_quantize.dequantize(q, 9, bits=4, bucket_size=None), x)


@pytest.mark.parametrize("bits", [4, 8])
def test_largest_value_survives_stochastic_rounding(monkeypatch, bits):
    """Its code plus a number just below 1 may round up to one code more, which would overflow into other bits."""
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.full(shape, 1 - 2.0**-24, dtype))
    x = jnp.array([-1.0, 2.0, 2.0, -1.0], jnp.float32)
    q = _quantize.quantize(x, bits=bits, bucket_size=None, key=jax.random.key(0))
    np.testing.assert_array_equal(q.codes, [0xF0, 0x0F] if bits == 4 else [0, 255, 255, 0])
    np.testing.assert_allclose(_quantize.dequantize(q, 4, bits=bits, bucket_size=None), x, rtol=1e-6)


def test_stochastic_rounding_is_unbiased_and_nearest_is_not():
    x = jnp.linspace(-1.0, 2.0, 50) ** 3

    def mean_error(round_once, n):
        backs = jax.vmap(lambda k: _quantize.dequantize(round_once(k), 50, bits=4, bucket_size=None))
        error = jax.jit(lambda keys: jnp.mean(backs(keys), axis=0) - x)
        return np.asarray(error(jax.random.split(jax.random.key(0), n)))

    unit, n = 9.0 / 15, 4_000
    stochastic = mean_error(lambda k: _quantize.quantize(x, bits=4, bucket_size=None, key=k), n)
    nearest = mean_error(lambda k: _quantize.quantize(x, bits=4, bucket_size=None), n)
    # A code's standard deviation is at most half a unit; 5 standard errors for 50 coordinates at once.
    assert np.max(np.abs(stochastic)) < 5 * 0.5 * unit / math.sqrt(n)
    assert np.max(np.abs(nearest)) > 10 * 0.5 * unit / math.sqrt(n)


def test_each_step_and_leaf_rounds_with_its_own_draws():
    rule = scale_by_micro_adam(rounding_key=jax.random.key(0), density=0.01)
    g = jnp.sin(jnp.arange(200.0))
    update = jax.jit(rule.update)
    state0 = rule.init({"a": g, "b": g})
    _, state1 = update({"a": g, "b": g}, state0)
    assert not np.array_equal(state1.error["a"].codes, state1.error["b"].codes)
    later = state0._replace(count=jnp.asarray(7, jnp.int32))
    _, other = update({"a": g, "b": g}, later)
    assert not np.array_equal(state1.error["a"].codes, other.error["a"].codes)
    again = update({"a": g, "b": g}, state0)[1]
    np.testing.assert_array_equal(state1.error["a"].codes, again.error["a"].codes)


def test_rounding_never_reuses_the_noise(monkeypatch):
    """Even with one key for both: codes that depend on the noise would reveal it."""
    used: dict = {"noise": [], "rounding": []}
    normal, uniform = dpopt.noise.standard_normal_like, jax.random.uniform

    def spy_noise(key, tree):
        keys = jax.random.key_data(dpopt.noise._keys(key, 2))  # that its leaves would be drawn with
        used["noise"] += [jax.random.key_data(key), *keys]
        return normal(key, tree)

    def spy_rounding(key, *args):
        used["rounding"].append(jax.random.key_data(key))
        return uniform(key, *args)

    monkeypatch.setattr(dpopt.noise, "standard_normal_like", spy_noise)
    monkeypatch.setattr(jax.random, "uniform", spy_rounding)
    key = jax.random.key(3)
    opt = dp_micro_adam(1.0, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=1, key=key, rounding_key=key)
    params = {"a": jnp.zeros(8), "b": jnp.zeros(8)}

    @jax.jit
    def keys(rows):
        opt.update(rows, opt.init(params), params)
        return used

    found = keys({"a": np.ones((1, 8), np.float32), "b": np.ones((1, 8), np.float32)})
    assert len(found["noise"]) == 3 and len(found["rounding"]) == 2
    assert len({tuple(words.tolist()) for words in found["noise"] + found["rounding"]}) == 5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size, density, block, kept", [(100, 0.01, None, 1), (101, 0.01, None, 2), (1, 0.01, None, 1),
    (100, 0.05, 20, 5), (110, 0.1, 20, 11), (7, 0.5, 100, 4), (60, 1.0, 7, 60)])  # fmt: skip
def test_number_kept(size, density, block, kept):
    assert _topk.num_kept(size, density, block) == kept
    chosen = _topk.top_k(jnp.arange(size, dtype=jnp.float32), density, block)
    assert chosen.shape == (kept,) and len(set(chosen.tolist())) == kept


def test_blocks_choose_within_themselves():
    x = jnp.array([9.0, -8.0, 7.0, 0.1, -0.2, 0.3, 5.0])
    assert sorted(_topk.top_k(x, 1 / 3, 3).tolist()) == [0, 5, 6]
    assert sorted(_topk.top_k(x, 3 / 7).tolist()) == [0, 1, 2]


# --- limit cases ------------------------------------------------------------------------------------------------------


def run(opt, params, grads):
    def step(carry, g):
        params, state = carry
        updates, state = opt.update(g, state, params)
        return (optax.apply_updates(params, updates), state), params

    (params, _), trajectory = jax.lax.scan(step, (params, opt.init(params)), grads)
    return jax.tree.map(lambda a, b: jnp.concatenate([a[1:], b[None]]), trajectory, params)


def random_grads(steps, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(rng.normal(size=(steps, 4, 3)), dtype),
        "s": jnp.asarray(rng.normal(size=(steps,)), dtype),
    }


@pytest.mark.parametrize("x64, rtol", [(True, 1e-12), (False, 1e-4)])  # optax rounds 1 - b2^t in float32
@pytest.mark.parametrize("correction", ["global", "window"])
@pytest.mark.one_in(6)
def test_density_one_and_long_memory_is_adam(x64, rtol, correction):
    with enable_x64(x64):
        grads = random_grads(25, jnp.float64 if x64 else jnp.float32)
        params = jax.tree.map(lambda g: jnp.ones_like(g[0]), grads)
        rule = scale_by_micro_adam(density=1.0, memory_size=30, quantization_bits=None, bias_correction=correction)
        ours = run(optax.chain(rule, optax.scale_by_learning_rate(0.1)), params, grads)
        theirs = run(optax.adam(0.1), params, grads)
        for k in grads:
            np.testing.assert_allclose(ours[k], theirs[k], rtol=rtol, atol=rtol)


def test_density_one_loses_nothing_to_quantisation():
    grads = random_grads(12, jnp.float32)
    params = jax.tree.map(lambda g: jnp.zeros_like(g[0]), grads)
    dense = run(scale_by_micro_adam(density=1.0, quantization_bits=None), params, grads)
    coded = run(scale_by_micro_adam(density=1.0, quantization_bits=4), params, grads)
    for k in grads:
        np.testing.assert_array_equal(dense[k], coded[k])


@pytest.mark.parametrize("correction, ratio", [("global", (1 - 0.9**10) / math.sqrt(1 - 0.999**10)), ("window", 1.0)])
def test_constant_gradient_steps_as_documented(correction, ratio):
    """Global bias correction: about 6.5 times Adam's step once the window is full; window correction: Adam's."""
    rule = scale_by_micro_adam(density=1.0, quantization_bits=None, bias_correction=correction)
    state = rule.init(jnp.zeros(3))._replace(count=jnp.asarray(100_000, jnp.int32))
    update = jax.jit(rule.update)
    for _ in range(10):
        updates, state = update(jnp.array([1.0, -2.0, 0.5]), state)
    np.testing.assert_allclose(updates, ratio * np.array([1.0, -1.0, 1.0]), rtol=1e-4)


def test_coordinates_outside_the_window_stand_still():
    rule = scale_by_micro_adam(density=0.25, memory_size=2, quantization_bits=None)
    state = rule.init(jnp.zeros(4))
    g = jnp.array([1.0, 0.0, 0.0, 0.0])
    updates, state = rule.update(g, state)
    assert updates[0] != 0 and not updates[1:].any()
    for _ in range(2):
        updates, state = rule.update(jnp.array([0.0, 5.0, 0.0, 0.0]), state)
    assert updates[0] == 0 and updates[1] != 0


def test_weight_decay_is_decoupled():
    four = {"l2_clip_norm": 9.0, "noise_multiplier": 0.0, "expected_batch_size": 1, "key": jax.random.key(0)}
    w, g = jnp.array([2.0, -4.0]), jnp.ones((1, 2))
    a, b = (
        opt.update(g, opt.init(w), w)[0] for opt in (dp_micro_adam(0.1, **four, weight_decay=d) for d in (0.0, 0.5))
    )
    np.testing.assert_allclose(b - a, -0.1 * 0.5 * w, rtol=1e-6)


# --- the state --------------------------------------------------------------------------------------------------------


def wide_resnet_like():
    """Shapes of a small Wide-ResNet: convolutions, group-norm scales and biases, a head."""
    shapes = {"stem": (3, 3, 3, 16), "head": (128, 10), "head_bias": (10,)}
    widths = [16, 64, 64, 128, 128]
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        shapes |= {f"conv{i}a": (3, 3, a, b), f"conv{i}b": (3, 3, b, b), f"scale{i}": (b,), f"bias{i}": (b,)}
    return {k: jnp.zeros(s) for k, s in shapes.items()}


def state_bytes_per_parameter(rule, params):
    state = jax.eval_shape(rule.init, params)
    stored = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state._replace(key=None)))
    return stored / sum(p.size for p in jax.tree.leaves(params))


def test_state_is_at_most_1_35_bytes_per_parameter():
    params = wide_resnet_like()
    assert state_bytes_per_parameter(scale_by_micro_adam(), params) <= 1.35
    assert state_bytes_per_parameter(scale_by_micro_adam(block_size=4096), params) <= 1.35
    big = {"w": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    assert state_bytes_per_parameter(scale_by_micro_adam(), big) == pytest.approx(1.3, abs=0.01)
    assert state_bytes_per_parameter(scale_by_micro_adam(quantization_bits=8), big) == pytest.approx(1.8, abs=0.01)
    assert state_bytes_per_parameter(scale_by_micro_adam(bucket_size=64), big) == pytest.approx(1.425, abs=0.01)


def test_large_leaves_use_indices_that_reach_their_end():
    for size, dtype in ((256, jnp.uint8), (257, jnp.uint16), (65_536, jnp.uint16), (65_537, jnp.int32)):
        rule = scale_by_micro_adam(density=1e-9, quantization_bits=None)
        state = rule.init(jnp.zeros(size))
        assert state.indices.dtype == dtype
        updates, state = jax.jit(rule.update)((np.arange(size) == size - 1).astype(np.float32), state)
        assert np.asarray(state.indices)[0, 0] == size - 1 and np.asarray(updates)[-1] == 1.0


def test_update_holds_no_float_copy_of_all_rows_and_compiles_once():
    d, m = 100_000, 10
    rule = scale_by_micro_adam(density=0.01, memory_size=m)
    state = rule.init(jnp.zeros(d))
    update = jax.jit(rule.update)
    for t in range(2 * m + 2):
        _, state = update(jnp.full(d, float(t)), state)
    assert update._cache_size() == 1
    largest = max(
        math.prod(v.aval.shape) for jaxpr in _jaxprs(jax.make_jaxpr(rule.update)(jnp.zeros(d), state).jaxpr)
        for equation in jaxpr.eqns for v in equation.outvars
    )  # fmt: skip
    assert largest <= d + 1


def _jaxprs(jaxpr):
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _jaxprs(inner)


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_state_keeps_its_types_under_scan(x64, dtype):
    with enable_x64(x64):
        params = {"w": jnp.ones((6, 5), dtype), "tiny": jnp.ones(2, dtype), "s": jnp.ones((), dtype),
                  "none": jnp.zeros((0, 3), dtype)}  # fmt: skip
        opt = dp_micro_adam(
            0.01, l2_clip_norm=1.0, noise_multiplier=0.5, expected_batch_size=4, key=jax.random.key(0), density=0.1,
            rounding_key=jax.random.key(1), weight_decay=0.01,
        )  # fmt: skip
        grads = jax.tree.map(lambda p: jnp.ones((12, 4, *p.shape), dtype), params)
        end = jax.jit(lambda p, g: run(opt, p, g))(params, grads)
        state = opt.init(params)
        micro = next(s for s in state if hasattr(s, "indices"))
        assert all(v.dtype == jnp.float32 for v in jax.tree.leaves(micro.values))
        for k, p in params.items():
            assert end[k].dtype == dtype and end[k].shape == (12, *p.shape)
            assert np.all(np.isfinite(np.asarray(end[k], np.float32)))
        assert not np.array_equal(np.asarray(end["w"][0], np.float32), np.asarray(end["w"][-1], np.float32))


def test_resuming_from_a_saved_state_changes_nothing():
    rule = scale_by_micro_adam(density=0.1, memory_size=3, rounding_key=jax.random.key(5))
    grads = np.random.default_rng(0).normal(size=(9, 30)).astype(np.float32)
    state, update = rule.init(jnp.zeros(30)), jax.jit(rule.update)
    for g in grads[:5]:
        _, state = update(g, state)
    # A checkpoint comes back as NumPy arrays.
    saved = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x), state)
    for g in grads[5:]:
        straight, state = update(g, state)
        resumed, saved = update(g, saved)
        np.testing.assert_array_equal(straight, resumed)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, named",
    [
        ({"density": 0.0}, "density"),
        ({"density": 1.5}, "density"),
        ({"density": float("nan")}, "density"),
        ({"quantization_bits": 3}, "quantization_bits"),
        ({"memory_size": 0}, "memory_size"),
        ({"bucket_size": 0}, "bucket_size"),
        ({"bucket_size": 64, "quantization_bits": None}, "bucket_size"),
        ({"block_size": 0}, "block_size"),
        ({"b1": 1.0}, "b1"),
        ({"b2": -0.1}, "b2"),
        ({"eps": 0.0}, "eps"),
        ({"rounding_key": jax.random.key(0), "quantization_bits": None}, "quantization_bits"),
        ({"bias_correction": "none"}, "bias_correction"),
    ],
)
def test_bad_arguments_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        scale_by_micro_adam(**options)


@pytest.mark.parametrize(
    "options", [{"memory_size": 2.5}, {"density": "0.1"}, {"bucket_size": True}, {"rounding_key": 7}]
)
def test_arguments_of_a_wrong_type(options):
    with pytest.raises(TypeError):
        scale_by_micro_adam(**options)


def test_unknown_option_and_negative_decay():
    four = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 1, "key": jax.random.key(0)}
    with pytest.raises(TypeError, match="num_grads"):
        dp_micro_adam(0.1, num_grads=3, **four)
    with pytest.raises(ValueError, match="weight_decay"):
        dp_micro_adam(0.1, weight_decay=-1.0, **four)
