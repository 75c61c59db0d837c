"""Norms of look-ups whose squares float32 cannot hold, which are computed from the rows that an example looks up.

A search draws tables, indices that repeat or lie outside, rows of any size that add up or cancel, and factors. The
oracle adds up rows in NumPy, in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_check import leaf_clip
from helpers import slow_unless

from dpopt import ghost
from dpopt.engines.programs import equations
from dpopt.ghost import one_by_one

B = 4
QUICK = (0, 1, 2, 4, 10)  # every kind of factor, and every size


def draw(seed):
    """A table's shape, indices ``[B, T]`` and rows ``[B, T, p]``, a factor or None, and a size that all rows are near.

    With two groups each index looks into a table of its own."""
    rng = np.random.default_rng(seed)
    groups, size, width = rng.choice([1, 2]), rng.choice([9, 50]), rng.choice([4, 9])
    count = rng.integers(1, 7)
    few = rng.integers(0, size, 3)  # so that indices repeat
    outside = rng.choice([size + 3, -size - 3], (B, count, groups))
    ids = np.where(rng.random((B, count, groups)) < 0.7, rng.choice(few, (B, count, groups)), outside)
    scale = 10.0 ** rng.choice([-25, 25, 32])
    rows = rng.normal(size=(B, count, groups, width)) * 10.0 ** rng.uniform(-2, 0, (B, count, 1, 1))
    if rng.random() < 0.5:  # neighbours cancel
        rows[:, 1::2] = -rows[:, : 2 * (count // 2) : 2] * rng.choice([1, 1 + 1e-3])
    factors = {0: None, 1: 3.0, 2: rng.uniform(0.5, 2.0, (groups, size, width))}
    return (groups, size, width), ids, np.float32(rows * scale), factors[int(rng.integers(3))], scale


def loss_fn(table, example, first=0):
    """Looks up the ``first`` positions and the others separately."""
    read = lambda t, i: t.at[i].get(mode="fill", fill_value=0)  # noqa: E731

    def looked_up(ids, rows):
        return jnp.sum(jax.vmap(lambda i: jax.vmap(read)(table, i))(ids) * rows)

    ids, rows = example
    return sum(looked_up(ids[at], rows[at]) for at in (slice(0, first), slice(first, None)) if len(ids[at]))


def exact(shape, ids, rows, factor):
    """Gradients ``[B, groups, size, width]`` in float64, and norms of the rows ``[B, T, groups]`` that they add up."""
    gradients, terms = np.zeros((B, *shape)), np.zeros(ids.shape)
    for b, t, g in np.ndindex(*ids.shape):
        if 0 <= ids[b, t, g] < shape[1]:
            row = np.float64(rows[b, t, g])
            row = row * (1 if factor is None else factor if np.ndim(factor) == 0 else factor[g, ids[b, t, g]])
            gradients[b, g, ids[b, t, g]] += row
            terms[b, t, g] = np.linalg.norm(row)
    return gradients, terms


@pytest.mark.parametrize("seed", slow_unless(set(QUICK), range(120)))
@pytest.mark.one_in(6)
def test_norms_and_sums(seed, monkeypatch):
    shape, ids, rows, factor, size = draw(seed)
    gradients, terms = exact(shape, ids, rows, factor)
    norms = np.linalg.norm(gradients.reshape(B, -1) / size, axis=1) * size
    clip = float(np.float32(0.3 * size))
    merged = []
    monkeypatch.setattr(one_by_one, "_merged", lambda *of, f=one_by_one._merged: merged.append(of) or f(*of))
    first = int(np.random.default_rng((seed, 1)).integers(ids.shape[1]))
    loss = functools.partial(loss_fn, first=first)
    got = jax.jit(
        lambda table, batch: ghost.clipped_sum(
            loss, table, batch, scale=None if factor is None else jnp.asarray(factor, jnp.float32),
            coefficients=leaf_clip(clip),
        )
    )(jnp.zeros(shape), (jnp.asarray(ids, jnp.int32), jnp.asarray(rows)))  # fmt: skip
    assert merged or ids[0].size > shape[1], "the whole table was formed"
    assert got.is_finite.all()
    found, eps = np.float64(got.leaf_norms), np.finfo(np.float32).eps
    assert np.all(found >= norms * (1 - 1e-5) - 8 * eps * terms.sum((1, 2)))
    # Squares include the rounding error of the sum, 4 eps times the square of its terms' size (squares.py).
    size_of_terms = ids[0].size ** 0.5 * np.linalg.norm(terms.reshape(B, -1) / size, axis=1) * size
    most = np.hypot(norms / size, (4 * eps) ** 0.5 * size_of_terms / size) * size
    matters = most >= clip  # otherwise the norm may be any that clips nothing
    np.testing.assert_array_less(found[matters], most[matters] * (1 + 1e-5))
    weights = np.minimum(1, clip / np.maximum(found, 1e-300))
    want = np.tensordot(weights, gradients, 1)
    np.testing.assert_allclose(np.float64(got.sum) / clip, want / clip, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_rows_and_columns_of_a_square_table():
    """Their factors have one shape, but rows and columns must not be merged."""
    rng, size, scale = np.random.default_rng(0), 20, 1e-25
    ids, rows = rng.integers(0, size, (B, 3)), np.float32(rng.normal(size=(B, 2, 3, size)) * scale)

    def loss(table, example):
        ids, (by_row, by_column) = example
        return jnp.sum(table[ids] * by_row) + jnp.sum(table[:, ids] * by_column.T)

    want = np.zeros((B, size, size))
    for b, t in np.ndindex(B, 3):
        want[b, ids[b, t]] += rows[b, 0, t]
        want[b, :, ids[b, t]] += rows[b, 1, t]
    norms = np.linalg.norm(want.reshape(B, -1) / scale, axis=1)
    clip = float(norms.min() * scale / 2)
    clipped = jax.jit(lambda table, batch: ghost.clipped_sum(loss, table, batch, coefficients=leaf_clip(clip)))
    got = clipped(np.zeros((size, size), np.float32), (ids, rows))
    np.testing.assert_allclose(np.float64(got.leaf_norms) / scale, norms, rtol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", [0, 40])
@pytest.mark.parametrize("size, sorts", [(60, False), (200, True)])
def test_rows_are_merged_only_where_that_takes_less_memory_than_the_gradient(size, sorts, first):
    rows, ids = jnp.ones((B, 64, 1, 8)), jnp.zeros((B, 64, 1), jnp.int32)
    loss = functools.partial(loss_fn, first=first)
    program = jax.make_jaxpr(lambda t, b: ghost.clipped_sum(loss, t, b, coefficients=leaf_clip(1.0)).sum)(
        jnp.zeros((1, size, 8)), (ids, rows)
    )
    loops = [e.params["body_jaxpr"] for e in equations(program.jaxpr) if e.primitive.name == "while"]
    assert sorts == any(e.primitive.name == "sort" for loop in loops for e in equations(loop.jaxpr))


def test_the_whole_table_is_not_formed():
    """The compiled program has room for the clipped sum of a large table, but not for another one of an example."""
    size, width = 20_000, 64
    table = jax.ShapeDtypeStruct((1, size, width), jnp.float32)
    batch = jax.ShapeDtypeStruct((B, 8, 1), jnp.int32), jax.ShapeDtypeStruct((B, 8, 1, width), jnp.float32)
    clipped = jax.jit(lambda t, b: ghost.clipped_sum(loss_fn, t, b, coefficients=leaf_clip(1.0)).sum)
    scratch = clipped.lower(table, batch).compile().memory_analysis().temp_size_in_bytes
    assert scratch < 0.1 * 4 * size * width
