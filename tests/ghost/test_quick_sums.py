"""A GPU's products of rounded factors, emulated: what one example adds stays within the clip norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpopt
from dpopt.ghost import contacts, memory, planner, quick_sums

CLIP = 1e-4  # most gradients are clipped
POSITIONS = [(1, 1, 1), (1, 3, 2), (3, 2, 2), (20, 3, 3)]  # half the number of terms, and the sizes of the factors
DTYPES = [jnp.float32, jnp.bfloat16]


def truncated(x: jax.Array) -> jax.Array:
    """The 11 leading bits, as hardware that ignores the others reads them: the worst that the GPU may do."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFE000), jnp.float32)


@pytest.fixture
def gpu(monkeypatch):
    """The engine as it is on a GPU, whose products round their factors."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(planner, "_KEPT_RATIO", 0.0)  # kept gradients are not added up from factors

    def products(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum("ta,tp->ap", truncated(left), truncated(right))

    monkeypatch.setattr(contacts, "quick_products", products)


def loss_in(dtype):
    def loss_fn(w, example):
        x, v = example
        return jnp.sum((x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32) * v)

    return loss_fn


def cancelling(rng: np.random.Generator, size: int, positions: int, a: int, p: int):
    """Examples whose terms all but cancel, with inputs just below and just above numbers that TF32 holds."""
    grid = 1 + np.round(rng.uniform(size=(size, positions, a)) * 1024) / 1024
    near = 2.0 ** -rng.integers(11, 22, (size, 1, 1))
    x = np.concatenate([grid - near, grid + near * rng.uniform(size=grid.shape)], 1)
    v = rng.uniform(1, 2, size=(size, positions, p))
    return jnp.asarray(x, jnp.float32), jnp.asarray(np.concatenate([v, -v * (1 + near)], 1), jnp.float32)


def most_added(dtype, shape: tuple[int, int, int], clip=None, draws: int = 2_000, size: int = 2, **how) -> float:
    """The largest norm that one example adds to the sum of a batch, in clip norms."""
    loss_fn, w = loss_in(dtype), jnp.zeros(shape[1:], jnp.float32)
    x, v = cancelling(np.random.default_rng(0), draws, *shape)
    assert dpopt.ghost.plan_clipped_sum(loss_fn, w, (x[:size], v[:size])).quick, "the sum is not computed in TF32"

    def added(example):
        batch = jax.tree.map(lambda z: jnp.stack([z, *[jnp.ones_like(z)] * (size - 1)]), example)
        grads = dpopt.per_example_grads(loss_fn, **({"engine": "ghost"} | how))(w, batch, mask=jnp.arange(size) == 0)
        return jnp.linalg.norm(grads.clipped_sum(clip or dpopt.FlatClip(CLIP)).sum)

    return float(jnp.max(jax.jit(lambda batch: jax.lax.map(added, batch))((x, v)))) / CLIP


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", POSITIONS, ids=str)
def test_an_example_adds_at_most_the_clip_norm_although_its_factors_are_rounded(gpu, dtype, shape):
    assert most_added(dtype, shape) <= 1 + 2.0**-13


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_without_the_allowance_an_example_would_add_more(gpu, monkeypatch, dtype):
    for name in ("ROUNDING", "ROUNDING_OF_ONE"):
        monkeypatch.setattr(quick_sums, name, 0.0)
    assert most_added(dtype, POSITIONS[0]) > 1.1


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("passes", ["one pass", "two passes"])
def test_the_same_where_nothing_is_recorded(gpu, monkeypatch, dtype, passes):
    monkeypatch.setattr(memory, "_SMALL_BYTES", 0)
    clip = dpopt.LayerwiseClip(CLIP) if passes == "one pass" else dpopt.FlatClip(CLIP)
    how = {"clip": clip, "size": 88, "engine": "auto", "memory": 1}  # more examples than one block has
    assert most_added(dtype, POSITIONS[0], **how) <= 1 + 2.0**-13
    monkeypatch.setattr(quick_sums, "ROUNDING", 0.0)
    monkeypatch.setattr(quick_sums, "ROUNDING_OF_ONE", 0.0)
    if passes == "one pass" or dtype == jnp.bfloat16:  # the draws are not bad enough for the other one
        assert most_added(dtype, POSITIONS[0], **how) > 1.1, "the test has no power"


def quick(loss_fn, params, batch, **options) -> bool:
    return bool(dpopt.ghost.plan_clipped_sum(loss_fn, params, batch, **options).quick)


def test_which_sums_are_rounded(gpu, monkeypatch):
    batch, w = (jnp.ones((4, 8, 3)), jnp.ones((4, 8, 2))), jnp.zeros((3, 2))
    exact = lambda w, e: jnp.sum(jnp.matmul(e[0], w, precision="highest") * e[1])  # noqa: E731
    tied = lambda w, e: loss_in(jnp.float32)(w, e) + jnp.sum(e[0] @ w)  # noqa: E731
    masked = lambda w, e: loss_in(jnp.float32)(jnp.tril(w), e)  # noqa: E731
    assert quick(loss_in(jnp.float32), w, batch)
    assert quick(loss_in(jnp.float32), w, batch, scale=jnp.array(2.0)), "a number multiplies the allowance as well"
    assert not quick(exact, w, batch), "the loss asks for all bits"
    assert not quick(loss_in(jnp.float16), w, batch), "float16 has a narrower range than TF32"
    assert not quick(tied, w, batch)
    assert not quick(masked, w, batch)
    assert not quick(loss_in(jnp.float32), w, batch, scale=jnp.ones((3, 2)))
    assert not quick(loss_in(jnp.float32), w, batch, offset=jnp.ones((3, 2)))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert not quick(loss_in(jnp.float32), w, batch), "a TPU rounds to fewer bits"


def test_a_number_that_scales_the_gradients_scales_the_allowance(gpu):
    """Numbers that are multiplied by a power of two are rounded alike."""
    loss_fn, w = loss_in(jnp.float32), jnp.zeros((3, 2))
    batch = cancelling(np.random.default_rng(0), 6, 4, 3, 2)

    def norms(number, clip):
        grads = dpopt.per_example_grads(loss_fn, engine="ghost")(w, batch, mask=None).scale(number)
        return grads.clipped_sum(dpopt.FlatClip(clip)).sensitive.norms

    np.testing.assert_allclose(norms(8.0, 8 * CLIP), 8 * norms(1.0, CLIP), rtol=1e-6)


def test_ordinary_gradients_lose_little_to_the_allowance(gpu, monkeypatch):
    rng = np.random.default_rng(0)
    batch = tuple(jnp.asarray(rng.normal(size=(16, 64, n)), jnp.float32) for n in (32, 24))
    w, loss_fn = jnp.zeros((32, 24)), loss_in(jnp.float32)
    assert quick(loss_fn, w, batch)

    def clipped():
        grads = dpopt.per_example_grads(loss_fn, engine="ghost")(w, batch, mask=None)
        return np.asarray(grads.clipped_sum(dpopt.FlatClip(CLIP)).sum)

    rounded = clipped()
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    exact = clipped()
    lost = 1 - np.vdot(rounded, exact) / np.vdot(exact, exact)
    assert 0 < lost < 0.015
