"""A GPU's products of rounded factors, emulated: what one example adds stays within the clip norm."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import emulated_gpu

import dpopt
from dpopt.ghost import keeping, quick_sums, rows, squares

CLIP = 1e-4  # most gradients are clipped
DRAWS = 2_000
POSITIONS = [(1, 1, 1), (1, 3, 2), (3, 2, 2), (20, 3, 3)]  # half the number of terms, and the sizes of the factors
DTYPES = [jnp.float32, jnp.bfloat16]


def shapes(first):
    """All sizes of factors, each with one of the types in every run; ``first``: which one the first size has."""
    return pytest.mark.parametrize(
        "shape, dtype",
        [
            pytest.param(shape, dtype, id=f"{shape}-{dtype.dtype}", marks=[pytest.mark.slow] * ((i + j) % 2 != first))
            for i, shape in enumerate(POSITIONS)
            for j, dtype in enumerate(DTYPES)
        ],
    )


@pytest.fixture
def gpu():
    with emulated_gpu():
        yield


def loss_in(dtype):
    def loss_fn(w, example):
        x, v = example
        return jnp.sum((x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32) * v)

    return loss_fn


def in_a_loop(dtype):
    """`loss_in` one position after another, beside a parameter whose gradient need not be recorded."""

    def loss_fn(params, example):
        def step(total, row):
            x, v = row
            return total + jnp.sum((x.astype(dtype) @ params["w"].astype(dtype)).astype(jnp.float32) * v), None

        x, _ = example
        return jax.lax.scan(step, 0.0, example)[0] + 1e-9 * jnp.sum(x @ params["other"])

    return loss_fn


def cancelling(rng: np.random.Generator, size: int, positions: int, a: int, p: int):
    """Examples whose terms all but cancel, with inputs a little below and above numbers that TF32 holds, or equal."""
    grid = 1 + np.round(rng.uniform(size=(size, positions, a)) * 1024) / 1024
    near = 2.0 ** -rng.integers(10, 22, (size, 1, 1))
    x = np.concatenate([grid - near, grid + near * rng.uniform(size=grid.shape)], 1)
    x[::2, :positions] = x[::2, positions:] = grid[::2]
    v = rng.uniform(1, 2, size=(size, positions, p))
    return np.float32(x), np.float32(np.concatenate([v, -v * (1 + near)], 1))


def most_added(
    dtype, shape: tuple[int, int, int], passes: str = "recorded", size: int = 2, loop: bool = False, keeps: bool = False
) -> float:
    """The largest norm that one example adds to the sum of a batch of some ``size``, in clip norms."""
    w = np.zeros(shape[1:], np.float32)
    params = {"w": w, "other": w} if loop else {"w": w}
    loss_fn = in_a_loop(dtype) if loop else lambda params, example: loss_in(dtype)(params["w"], example)
    x, v = cancelling(np.random.default_rng(0), DRAWS, *shape)
    plan = dpopt.ghost.plan_clipped_sum(loss_fn, params, (x[:size], v[:size]))
    if keeps:
        assert plan.kept and not plan.quick, "the gradient is not kept"
    plan = {"recorded": plan, "two passes": plan.streaming(), "one pass": plan.streaming({0})}[passes]
    assert keeps or plan.quick, "the sum is not in TF32"
    assert bool(plan.streamed) == (passes != "recorded")

    def added(example):
        batch = jax.tree.map(lambda z: jnp.stack([z, *[jnp.ones_like(z)] * (size - 1)]), example)
        found = dpopt.ghost.clipped_sum(
            loss_fn, params, batch, mask=jnp.arange(size) == 0, plan=plan, limits=[CLIP] * len(params),
            coefficients=dpopt.FlatClip(CLIP).coefficients,
        )  # fmt: skip
        return jnp.linalg.norm(found.sum["w"])

    return float(np.max(jax.jit(lambda batch: jax.lax.map(added, batch))((x, v)))) / CLIP


@pytest.fixture
def none_for_adding(monkeypatch):
    """No allowance for imprecise additions, which are not emulated."""
    monkeypatch.setattr(quick_sums, "ADDING", 0.0)
    monkeypatch.setattr(squares, "QUICK_ROUNDINGS", squares._ROUNDINGS)


@pytest.fixture
def no_allowance(none_for_adding, monkeypatch):
    monkeypatch.setattr(quick_sums, "ROUNDING", 0.0)
    monkeypatch.setattr(squares, "QUICK_ROUNDINGS", 0)


@shapes(0)
@pytest.mark.one_in(4)
def test_an_example_adds_at_most_the_clip_norm_although_its_factors_are_rounded(gpu, dtype, shape):
    assert most_added(dtype, shape) <= 1 + 2.0**-13


@pytest.mark.one_in(4)
@shapes(1)
def test_rounding_is_allowed_for_without_what_is_allowed_for_additions(gpu, none_for_adding, dtype, shape):
    assert most_added(dtype, shape) <= 1 + 2.0**-13


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU; the other tests emulate one")
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", POSITIONS, ids=str)
def test_the_same_on_a_real_one(monkeypatch, dtype, shape):
    monkeypatch.setattr(keeping, "_KEPT_RATIO", 0.0)
    assert most_added(dtype, shape) <= 1 + 2.0**-13


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_without_the_allowance_an_example_would_add_more(gpu, no_allowance, dtype):
    assert most_added(dtype, POSITIONS[0]) > 1.1


@pytest.mark.one_in(4)
@shapes(0)
def test_a_gradient_that_is_kept_may_be_rounded_in_any_way(dtype, shape):
    with emulated_gpu(keeps=True):
        assert most_added(dtype, shape, keeps=True) <= 1 + 2.0**-20


MORE = {  # more examples than one block has
    "one pass": {"passes": "one pass", "size": 88},
    "two passes": {"passes": "two passes", "size": 88},
    "recorded in two passes": {"passes": "two passes", "size": 88, "loop": True},
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("how", MORE)
def test_the_same_in_passes(gpu, dtype, how):
    assert most_added(dtype, POSITIONS[0], **MORE[how]) <= 1 + 2.0**-13


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", MORE)
def test_without_the_allowance_passes_would_add_more(gpu, no_allowance, how):
    assert most_added(jnp.bfloat16, POSITIONS[0], **MORE[how]) > 1.1


def twice(w, example):
    """Two products with one cotangent; the second shares the tap of the first."""
    x, v = example
    return jnp.sum((x @ w["w"] + x[::-1] @ w["other"]) * v)


def rematerialised(w, example):
    return jax.checkpoint(lambda w: loss_in(jnp.float32)(w["w"], example))(w)


FOLLOWED = {"once": loss_in(jnp.float32), "twice": twice, "loop": in_a_loop(jnp.float32), "remat": rematerialised}


@pytest.mark.parametrize(
    "name, passes",
    [
        pytest.param(name, passes, marks=[pytest.mark.slow] * ((i + j) % 3 != 0))
        for i, name in enumerate(FOLLOWED)
        for j, passes in enumerate(["recorded", "one pass", "two passes"])
    ],
)
@pytest.mark.one_in(4)
def test_bits_that_tf32_does_not_hold_do_not_matter(gpu, name, passes):
    """Both factors are rounded before their norm is taken, so that norm and sum are of the same numbers."""
    w, loss_fn = np.zeros((3, 2), np.float32), FOLLOWED[name]
    params = w if name == "once" else {"w": w, "other": w} if name in ("twice", "loop") else {"w": w}
    rng = np.random.default_rng(0)
    batch = tuple(np.float32(rng.normal(size=(6, 8, n))) for n in (3, 2))
    plan = dpopt.ghost.plan_clipped_sum(loss_fn, params, batch)
    leaves = len(jax.tree.leaves(params))
    plan = {"recorded": plan, "two passes": plan.streaming(), "one pass": plan.streaming(range(leaves))}[passes]
    assert plan.quick

    @jax.jit
    def clipped(batch):
        clip = dpopt.FlatClip(CLIP) if passes != "one pass" else dpopt.LayerwiseClip(CLIP)
        found = dpopt.ghost.clipped_sum(
            loss_fn, params, batch, plan=plan, limits=[CLIP] * leaves, coefficients=clip.coefficients
        )
        return found.sum, found.leaf_norms

    assert jax.tree.all(jax.tree.map(np.array_equal, clipped(batch), clipped(jax.tree.map(rows.tf32, batch))))


def quick(loss_fn, params, batch, **options) -> bool:
    return bool(dpopt.ghost.plan_clipped_sum(loss_fn, params, batch, **options).quick)


def test_which_sums_are_rounded(gpu):
    batch, w = (jnp.ones((4, 8, 3)), jnp.ones((4, 8, 2))), jnp.zeros((3, 2))
    exact = lambda w, e: jnp.sum(jnp.matmul(e[0], w, precision="highest") * e[1])  # noqa: E731
    tied = lambda w, e: loss_in(jnp.float32)(w, e) + jnp.sum(e[0] @ w)  # noqa: E731
    masked = lambda w, e: loss_in(jnp.float32)(jnp.tril(w), e)  # noqa: E731
    assert quick(loss_in(jnp.float32), w, batch)
    assert quick(loss_in(jnp.float32), w, batch, scale=jnp.array(2.0)), "a number multiplies the allowance as well"
    assert not quick(exact, w, batch), "the loss asks for all bits"
    algorithm = jax.lax.DotAlgorithmPreset.F32_F32_F32
    chosen = lambda w, e: jnp.sum(jnp.matmul(e[0], w, precision=algorithm) * e[1])  # noqa: E731
    assert not quick(chosen, w, batch), "the loss chooses an algorithm"
    assert not quick(loss_in(jnp.float16), w, batch), "float16 has a narrower range than TF32"
    assert not quick(tied, w, batch)
    assert not quick(masked, w, batch)
    assert not quick(loss_in(jnp.float32), w, batch, scale=jnp.ones((3, 2)))
    assert not quick(loss_in(jnp.float32), w, batch, offset=jnp.ones((3, 2)))
    with mock.patch.object(jax, "default_backend", lambda: "tpu"):
        assert not quick(loss_in(jnp.float32), w, batch), "a TPU rounds to fewer bits"


def test_a_number_that_scales_the_gradients_scales_the_allowance(gpu):
    """Numbers that are multiplied by a power of two are rounded alike."""
    loss_fn, w = loss_in(jnp.float32), np.zeros((3, 2), np.float32)
    batch = cancelling(np.random.default_rng(0), 6, 4, 3, 2)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def norms(number, clip):
        grads = dpopt.per_example_grads(loss_fn, engine="ghost")(w, batch, mask=None).scale(number)
        return grads.clipped_sum(dpopt.FlatClip(clip)).sensitive.norms

    np.testing.assert_allclose(norms(8.0, 8 * CLIP), 8 * norms(1.0, CLIP), rtol=1e-6)


@pytest.mark.slow
def test_ordinary_gradients_lose_little_to_the_allowance(gpu):
    rng = np.random.default_rng(0)
    batch = tuple(jnp.asarray(rng.normal(size=(16, 64, n)), jnp.float32) for n in (32, 24))
    w, loss_fn = jnp.zeros((32, 24)), loss_in(jnp.float32)
    assert quick(loss_fn, w, batch)

    def clipped():
        grads = dpopt.per_example_grads(loss_fn, engine="ghost")(w, batch, mask=None)
        return np.asarray(grads.clipped_sum(dpopt.FlatClip(CLIP)).sum)

    rounded = clipped()
    with mock.patch.object(jax, "default_backend", lambda: "cpu"):
        exact = clipped()
    lost = 1 - np.vdot(rounded, exact) / np.vdot(exact, exact)
    assert 0 < lost < 0.007


@pytest.mark.parametrize(
    ("where", "options", "precision"),
    [("cpu", {}, "HIGHEST"), ("gpu", {}, "DEFAULT"), ("gpu", {"offset": jnp.ones((3, 2))}, "HIGHEST")],
)
def test_gradients_that_are_kept_are_formed_as_the_loss_is_computed(monkeypatch, where, options, precision):
    """Of them both norm and sum are taken, so that their rounding does not matter; unless an offset is added."""
    monkeypatch.setattr(jax, "default_backend", lambda: where)
    loss_fn, w, batch = loss_in(jnp.float32), jnp.zeros((3, 2)), (jnp.ones((4, 8, 3)), jnp.ones((4, 8, 2)))
    plan = dpopt.ghost.plan_clipped_sum(loss_fn, w, batch, **options)
    assert plan.kept

    def clipped(w, batch):
        clip = dpopt.FlatClip(CLIP).coefficients
        return dpopt.ghost.clipped_sum(loss_fn, w, batch, coefficients=clip, plan=plan, **options).sum

    program = jax.jit(clipped).lower(w, batch).as_text()
    (formed,) = re.findall(r"dot_general.*batching_dims.*precision = \[(\w+),", program)
    assert formed == precision
