"""Examples, weights and their statistics in another order, and products that are rounded as they are computed.

A reshape or a broadcast that transposed first passed for one that keeps the order: an example was read in another
one, and a statistic was taken for another filter's.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz import layouts
from helpers import contributions, enable_x64, slow_unless
from jax import lax

import dpopt
from dpopt.ghost.trace import trace_loss

_WAYS = "recorded", "two passes", "one pass"


def _filtered(groups):
    def convolved(x, w):
        numbers = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x[None], w, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups)

    return convolved


# The shapes of an example and of a weight, which allow for any order, and how they meet.
MEETINGS = {
    "matrix": ((3, 4), (4, 4), lambda x, w: x @ w),
    "vector": ((4,), (4, 3), lambda x, w: x @ w),
    "matrix on the left": ((4, 3), (4, 4), lambda x, w: w @ x),
    "a matrix for each head": ((4, 3, 2), (3, 2, 3), lambda x, w: jnp.einsum("tga,gap->tgp", x, w)),
    "filter": ((6, 3), (3, 3, 3), _filtered(1)),
    "grouped filter": ((6, 6), (3, 2, 3), _filtered(3)),
    "entries": ((3, 3), (3, 3), lambda x, w: x * w),
}


def _drawn(seed):
    """A loss of one parameter, its value and a batch."""
    rng = np.random.default_rng(seed)
    name = list(MEETINGS)[seed % len(MEETINGS)]
    example, weight, meet = MEETINGS[name]
    read = layouts.of_example(rng) if rng.random() < 0.6 else lambda x: x
    arranged = layouts.of_weight(rng) if rng.random() < 0.8 else lambda w: w

    def loss(params, x):
        return jnp.sum(jnp.tanh(meet(read(x), arranged(params["w"])))) + jnp.sum(jnp.sin(read(x)))

    return loss, {"w": rng.normal(size=weight)}, rng.normal(size=(4, *example))


_SEEDS = range(len(MEETINGS) * 3)
_RUNS = slow_unless({(seed, _WAYS[seed // len(MEETINGS) % 3]) for seed in _SEEDS}, itertools.product(range(210), _WAYS))


@pytest.mark.parametrize("run", _RUNS, ids=lambda run: f"{run[0]}, {run[1]}")
@pytest.mark.one_in(24)
def test_contributions_are_those_of_plain_gradients(run):
    seed, way = run
    loss, params, batch = _drawn(seed)
    with enable_x64(True), jax.numpy_rank_promotion("allow"):
        params, batch = jax.tree.map(jnp.asarray, (params, batch))
        expected = np.stack([jax.grad(loss)(params, x)["w"] for x in batch])
        norms = np.linalg.norm(expected.reshape(4, -1), axis=1)
        clip = float(np.median(norms)) / 2
        alone, among = contributions(loss, params, batch, way, clip, None)
    expected *= np.minimum(1, clip / norms).reshape(4, *[1] * (expected.ndim - 1))
    np.testing.assert_allclose(alone, expected, rtol=1e-8, atol=1e-9 * clip)
    np.testing.assert_allclose(among, expected, rtol=1e-8, atol=1e-9 * clip)
    contributions.clear_cache()


@pytest.mark.parametrize("kind", ["float32", "first", "second", "weights"])
@pytest.mark.one_in(4)
def test_a_product_is_rounded_where_the_loss_rounds_it(kind):
    """``preferred_element_type`` of fewer bits than the factors have, also where their types differ."""
    narrow = jnp.bfloat16
    x = jax.random.normal(jax.random.key(0), (3, 5, 4)).astype(narrow if kind == "first" else jnp.float32)
    w = jax.random.normal(jax.random.key(1), (4, 4)).astype(narrow if kind == "second" else jnp.float32)

    def loss(w, x):
        if kind == "weights":
            made = lax.dot_general(w, w, (((1,), (0,)), ((), ())), preferred_element_type=narrow)
            return jnp.sum(jnp.tanh(x @ made.astype(jnp.float32)))
        out = lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=narrow)
        return jnp.sum((out + jnp.ones(4, narrow)).astype(jnp.float32) ** 2)

    def clipped(engine):
        promise = dpopt.per_example_grads(loss, engine=engine)
        return jax.jit(lambda w, x: promise(w, x, mask=None).clipped_sum(dpopt.FlatClip(1.0)))(w, x)

    with jax.numpy_rank_promotion("allow"):
        ours, theirs = clipped("ghost"), clipped("vmap")
    np.testing.assert_allclose(ours.sensitive.losses, theirs.sensitive.losses, rtol=1e-5 if kind != "weights" else 1e-2)
    np.testing.assert_allclose(ours.sensitive.norms, theirs.sensitive.norms, rtol=2e-2)
    np.testing.assert_allclose(*(np.asarray(c.sum, np.float32) for c in (ours, theirs)), atol=2e-2)


@jax.custom_jvp
def _quantised(w):
    return w.astype(jnp.float8_e5m2).astype(w.dtype)


_quantised.defjvp(lambda primals, tangents: (_quantised(*primals), _quantised(*tangents)))
ROUNDING = {
    "remat": jax.checkpoint(lambda w: w.astype(jnp.bfloat16).astype(w.dtype)),
    "remat, precision": jax.checkpoint(lambda w: lax.reduce_precision(w, 8, 2)),
    "remat, product": jax.checkpoint(
        lambda w: jnp.dot(w, jnp.ones((1, 1)), preferred_element_type=jnp.bfloat16).astype(w.dtype)
    ),
    "custom_jvp": _quantised,
    "scan": lambda w: lax.scan(lambda c, _: (c.astype(jnp.float8_e5m2).astype(c.dtype), None), w, None, length=1)[0],
    "cond": lambda w: lax.cond(w[0, 0] > 9, lambda w: w, lambda w: w.astype(jnp.bfloat16).astype(w.dtype), w),
}


@pytest.mark.parametrize("engine", ["ghost", "auto"])
@pytest.mark.parametrize("kind", ROUNDING)
@pytest.mark.one_in(6)
def test_no_sum_is_rounded_within_another_equation(kind, engine):
    """A sum that is pulled back through an equation of 16 or 8 bits is rounded by more than one example adds."""
    x = jnp.asarray(1 + 0.5 * np.random.default_rng(0).random((240, 1, 1)), jnp.float32)

    def loss(w, x):
        return jnp.sum(x @ ROUNDING[kind](w))

    @jax.jit
    def total(mask):
        promise = dpopt.per_example_grads(loss, engine=engine)(jnp.ones((1, 1)), x, mask=mask)
        return promise.clipped_sum(dpopt.FlatClip(0.55)).sum

    everyone = jnp.ones(len(x), bool)
    moved = [abs(float((total(everyone) - total(everyone.at[i].set(False))).sum())) for i in range(4)]
    assert max(moved) <= 0.55 * (1 + 6e-4)  # what an event pays for


def test_sums_are_pulled_back_at_full_precision_on_a_gpu(monkeypatch):
    """Products of weights, whose transposes sums go through, would be in TF32 there."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ jnp.sin(w @ w)))

    trace = trace_loss(loss, jnp.ones((3, 3)), jnp.ones((2, 3)))
    products = [op for op in trace.prologue if op.primitive.name == "dot_general"]
    assert products and all(op.params["precision"] == (lax.Precision.HIGHEST,) * 2 for op in products)


@pytest.mark.parametrize("engine", ["ghost", "vmap", "auto"])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.one_in(6)
def test_parameters_of_8_bits(engine, size):
    """JAX does not promote them by itself."""
    x = jax.random.normal(jax.random.key(0), (4, 5, 4))
    w = jax.random.normal(jax.random.key(1), (4, 3)).astype(jnp.float8_e4m3fn)

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w.astype(jnp.float32)))

    def clipped(w, x):
        return dpopt.per_example_grads(loss, engine=engine, microbatch_size=size)(w, x, mask=None).clipped_sum(
            dpopt.FlatClip(1.0)
        )

    found = jax.jit(clipped)(w, x)
    expected = jax.jit(clipped)(w.astype(jnp.float32), x)
    assert found.sum.dtype == jnp.float32
    # vmap rounds each gradient to 8 bits; the ghost engine does not.
    np.testing.assert_allclose(found.sum, expected.sum, atol=0.3 if engine != "ghost" else 1e-5)
