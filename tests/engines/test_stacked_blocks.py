"""Blocks that an accelerator adds up at once, against float64 and against one block after another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpopt.engines import rounding, sums

SIZES = [1, 7, 86, 100, 256, 258, 264, 512, 1_000, 1_031, 4_096]


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def total(x: jax.Array, c: jax.Array, may_stack: bool) -> sums.Sum:
    def one_block(rows: jax.Array, c: jax.Array) -> jax.Array:
        return jnp.tensordot(c, rows, 1, precision="highest")

    def one_group(rows: jax.Array, c: jax.Array) -> dict[str, jax.Array]:
        return {"sum": sums.in_blocks(one_block, rows, c)}

    return jax.jit(functools.partial(sums.over_examples, one_group, may_stack=may_stack))(x, c)


def in_float64(found: sums.Sum) -> np.ndarray:
    parts = [found.value] if found.remainder is None else [found.value, found.remainder]
    return sum(np.asarray(part["sum"], np.float64) for part in parts)


@pytest.mark.parametrize(
    "bytes", [1 << 26, 1, 500, 5_000], ids=["all at once", "one at a time", "a few", "many at a time"]
)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.one_in(9)
def test_the_sum_is_that_of_one_block_after_another(accelerator, monkeypatch, size, bytes):
    """Blocks of whole numbers are added up exactly, so that all that is left is how blocks are added to each other."""
    monkeypatch.setattr(sums, "_STACK_BYTES", bytes)
    monkeypatch.setattr(sums, "_STACK_SHARE", 0.0)
    rng, rows = np.random.default_rng(size), sums._stacked(size) or size
    spread = 30 if sums.needs_remainder(size) else 1  # only pairs of floats add up blocks of any size
    scale = np.repeat(2.0 ** rng.integers(0, spread, size // rows), rows)[:, None]
    x, c = rng.integers(-1_000, 1_000, (size, 40)) * scale, rng.integers(0, 4, size)
    stacked, one_by_one = (total(jnp.asarray(x, jnp.float32), jnp.asarray(c, jnp.float32), s) for s in (True, False))
    assert (stacked.remainder is None) == (one_by_one.remainder is None) == (not sums.needs_remainder(size))
    bits = 44 if sums._stacked(size) else 20  # where nothing is stacked, blocks are others than those that are exact
    np.testing.assert_allclose(in_float64(stacked), c @ x, rtol=0, atol=2.0**-bits * np.abs(c[:, None] * x).sum())


def test_blocks_lose_no_more_than_is_paid_for():
    """By the formulas of `rounding.ROUNDING`, for every size that floats add up, and some that pairs of floats do."""
    for size in range(1, 1000):
        rows, levels = sums._stacked(size), rounding.levels(size)
        if rows and levels:
            one_by_one = rounding.lost(rows, size // rows)
            paired = rows**2 + 2 * size + 2 * size  # a rounding in the end, and a diagonal
            assert (one_by_one if size <= rounding.BLOCKS * rounding.ROWS else paired) <= rounding.lost(*levels)
    for size in (1_000, 86_000, 200_000, 215_000, 301_000, 400_000, 1 << 20):
        pairs = size // sums._stacked(size) if sums._stacked(size) else 0
        assert 3 * 2.0**-24 * size * pairs <= rounding.PAIRS
    assert sums._stacked(200_000) and not sums._stacked(301_000)


def test_several_blocks_are_one_product(accelerator):
    """One kernel for all blocks, instead of a loop."""
    x, c = jnp.ones((4_096, 40)), jnp.ones(4_096)
    group = functools.partial(sums.in_blocks, lambda rows, c: c @ rows)

    def program(may_stack: bool) -> str:
        return str(jax.make_jaxpr(functools.partial(sums.over_examples, group, may_stack=may_stack))(x, c))

    assert "while" not in program(True) and "scan" not in program(True)
    assert "while" in program(False) or "scan" in program(False)
