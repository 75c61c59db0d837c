"""Sums of large tables and matrices, of batches of several blocks, against sums in float64 by NumPy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpopt
from dpopt import ghost
from dpopt.engines import rounding, sums
from dpopt.ghost import large_sums, memory, weighted_sum

CLIP = 0.7


def _table(rng):
    """Rows looked up once or twice, some of them out of range, of a table that may be transposed."""
    size, width, times = int(rng.integers(600, 900)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    mode = ["clip", "fill", "drop"][rng.integers(3)]
    is_turned, is_tied = rng.random(2) < 0.4
    if is_tied:
        times, size = 1, size + 300

    def loss_fn(table, example):
        ids, y = example
        table = table.T if is_turned else table
        rows = table.at[ids].get(mode=mode)
        rows = jnp.where(jnp.isfinite(rows), rows, 0)  # "fill" reads NaN
        found = jnp.sum(jnp.sin(rows) * y)
        return found + jnp.sum(table.at[ids[::-1]].get(mode="clip") * y) if is_tied else found

    def batch(size_of_batch):
        ids = rng.integers(-3, size + 3, (size_of_batch, times)) % (size + 3)  # a negative index would mean the end
        ids[: len(ids) // 2] = ids[0]  # half of the examples read the same rows
        return jnp.asarray(ids), jnp.asarray(rng.normal(size=(size_of_batch, times, width)), jnp.float32)

    table = rng.normal(size=(width, size) if is_turned else (size, width))
    return loss_fn, jnp.asarray(table, jnp.float32), batch


def _matrix(rng):
    """A dense layer on some positions, or in a loop, with its weight on either side."""
    a, p, positions = (int(n) for n in rng.integers(1, [40, 40, 4]))
    is_left, is_looped = rng.random(2) < 0.5

    def loss_fn(w, x):
        if not is_looped:
            return jnp.sum(jnp.tanh(w @ x.T if is_left else x @ w))
        rows = jax.lax.map(lambda row: jnp.tanh(w @ row if is_left else row @ w), x)
        return jnp.sum(rows)

    def batch(size):
        return jnp.asarray(rng.normal(size=(size, positions, a)), jnp.float32)

    return loss_fn, jnp.asarray(rng.normal(size=(p, a) if is_left else (a, p)), jnp.float32), batch


@pytest.mark.slow
def test_tables_and_matrices_of_layers(used):
    """Every layer has its own, which a scan reads: none of them is left out."""
    rng = np.random.default_rng(0)
    params = {"table": jnp.asarray(rng.normal(size=(2, 600, 3)), jnp.float32)}
    params["w"] = jnp.asarray(rng.normal(size=(2, 3, 3)), jnp.float32)
    batch = jnp.asarray(rng.integers(0, 600, (300, 2))), jnp.asarray(rng.normal(size=(300, 3)), jnp.float32)

    def loss_fn(params, example):
        def layer(x, own):
            return jnp.tanh(x @ own["w"] + own["table"][example[0]].sum(0)), None

        return jnp.sum(jax.lax.scan(layer, example[1], params)[0])

    @functools.partial(jax.jit, static_argnums=0)
    def clipped(engine, params, batch):
        grads = dpopt.per_example_grads(loss_fn, engine=engine)(params, batch, mask=None)
        return grads.clipped_sum(dpopt.FlatClip(CLIP)).sum

    chex.assert_trees_all_close(clipped("ghost", params, batch), clipped("vmap", params, batch), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_table_that_is_a_matrix_too(is_turned, used, monkeypatch):
    """As of a language model whose output layer is its table: its sum is neither one of rows nor one product.

    Even if both uses arranged it in one way."""
    monkeypatch.setattr(weighted_sum, "usage", lambda contact: None)
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(600, 3)), jnp.float32)
    batch = jnp.asarray(rng.integers(0, 600, 300)), jnp.asarray(rng.normal(size=(300, 600 if is_turned else 3)))

    def loss_fn(table, example):
        row = table[example[0]]
        out = example[1] @ table if is_turned else table @ example[1]
        return jnp.sum(jnp.sin(row)) + jnp.sum(jnp.tanh(out))

    @functools.partial(jax.jit, static_argnums=0)
    def clipped(engine, table, batch):
        grads = dpopt.per_example_grads(loss_fn, engine=engine)(table, batch, mask=None)
        return grads.clipped_sum(dpopt.FlatClip(CLIP)).sum

    np.testing.assert_allclose(clipped("ghost", table, batch), clipped("vmap", table, batch), atol=2e-5)


@pytest.fixture
def used(monkeypatch):
    """Which sums took which way; every parameter counts as large."""
    found = []

    def spied(name):
        function = getattr(large_sums, name)
        return lambda *args: found.append(name) or function(*args)

    for name in ("_of_rows", "_of_matrix"):
        monkeypatch.setattr(large_sums, name, spied(name))
    monkeypatch.setattr(large_sums, "_LARGE_BYTES", 64)
    monkeypatch.setattr(large_sums, "_PART_BYTES", 64)
    monkeypatch.setattr(sums, "_PART", 7)
    return found


@pytest.mark.parametrize("seed", range(160))
@pytest.mark.one_in(160)
def test_any_sum(seed, used, monkeypatch):
    rng = np.random.default_rng(seed)
    if seed % 8 == 7:  # a matrix that goes whole
        monkeypatch.setattr(large_sums, "_PART_BYTES", 1 << 20)
    kind, way = [(_table, "_of_rows"), (_matrix, "_of_matrix")][seed % 2]
    loss_fn, params, draw = kind(rng)
    size = int(rng.choice([87, 172, 258, 259, 512, 701, 777]))
    batch, mask = draw(size), rng.random(size) < 0.9
    scale = [None, jnp.float32(0.3), jnp.asarray(rng.uniform(0.5, 2, params.shape), jnp.float32)][rng.integers(3)]
    # The same for a single parameter, but what is clipped by its own norm is added up during the backward pass.
    monkeypatch.setattr(memory, "_SMALL_BYTES", 0)
    clip = [dpopt.FlatClip(CLIP), dpopt.LayerwiseClip(CLIP)][rng.integers(2)]

    def clipped(params, batch):
        grads = dpopt.per_example_grads(loss_fn, engine="ghost", memory=1e9)(params, batch, mask=mask)
        found = (grads if scale is None else grads.scale(scale)).clipped_sum(clip)
        return found.sum, found.remainder

    value, rest = jax.jit(clipped)(params, batch)
    assert (rest is None) == (rounding.levels(size) is not None)
    each = np.float64(jax.jit(jax.vmap(jax.grad(loss_fn), (None, 0)))(params, batch))
    each = (each * (1 if scale is None else np.float64(scale)))[mask]
    lengths = np.linalg.norm(each.reshape(len(each), -1), axis=1).reshape(-1, *[1] * (each.ndim - 1))
    expected = np.sum(each * np.minimum(1, CLIP / np.maximum(lengths, 1e-30)), axis=0)
    np.testing.assert_allclose(np.float64(value) + (0 if rest is None else np.float64(rest)), expected, atol=2e-5)
    # Gradients that are formed for their norms, and kept, are added up as such.
    kept = ghost.plan_clipped_sum(loss_fn, params, batch, scale=scale).kept
    assert set(used) == ({way} if params.nbytes > 64 and not kept else set())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [6, 7, 8, 29])
@pytest.mark.parametrize("has_rest", [False, True])
def test_pairs_are_added_part_by_part(size, has_rest, used):
    """To the same bits as all at once."""
    rng = np.random.default_rng(size)
    a, a_rest, b, b_rest = (jnp.asarray(rng.normal(size=(size, 2)) * s, jnp.float32) for s in (1, 1e-8, 1, 1e-8))
    found = jax.jit(sums.add)(sums.Sum(a, a_rest), sums.Sum(b, b_rest if has_rest else None))
    expected = jax.jit(sums._add)(a, a_rest, b, b_rest if has_rest else jnp.zeros_like(b))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("has_diagonal", [False, True])
def test_no_block_takes_memory_of_the_size_of_a_parameter(has_diagonal):
    """Nor is one copied while others are added up. Of a diagonal, half is squared at a time."""
    if has_diagonal and jax.__version_info__ < (0, 12):
        pytest.skip("XLA drops barriers too early on CPUs")
    batch, matrix = jnp.ones((512, 2000)), jnp.ones((2000, 2000))

    def added_up(batch, scale):
        grads = dpopt.per_example_grads(lambda w, e: e[0] @ w @ e[1], engine="ghost")
        grads = grads(jnp.zeros((2000, 2000)), (batch, batch), mask=None)
        return (grads.scale(scale) if has_diagonal else grads).clipped_sum(dpopt.FlatClip(CLIP)).sum

    taken = jax.jit(added_up).lower(batch, matrix).compile().memory_analysis().temp_size_in_bytes
    assert taken < (2 if has_diagonal else 1.1) * matrix.nbytes
