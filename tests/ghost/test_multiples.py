"""Weights that are a parameter times a number, such as spectral normalisation (multiples.py)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_check import check, flat_clip, leaf_clip, random_like
from jax import lax

import dpopt
from dpopt.ghost.methods import PULLED_BACK


def spectral(p):
    """The parameter divided by ``u w v`` for vectors that count as constant, near its largest singular value."""
    w = p["w"].reshape(-1, p["w"].shape[-1])
    v = jnp.ones(w.shape[1])
    u = w @ v / jnp.linalg.norm(w @ v)
    v = u @ w / jnp.linalg.norm(u @ w)
    u, v = lax.stop_gradient((u, v))
    return p["w"] / (u @ w @ v)


NUMBERS = {
    "spectral": spectral,
    "norm": lambda p: p["w"] * lax.rsqrt(jnp.sum(p["w"] ** 2)),
    "learned": lambda p: jnp.exp(p["g"]) * p["w"],
    "learned norm": lambda p: p["w"] * (p["g"] / jnp.linalg.norm(p["w"])),
    "twice": lambda p: p["g"] * spectral(p),
    "spread": lambda p: p["w"] / jnp.broadcast_to(jnp.linalg.norm(p["w"]), p["w"].shape),
    "entry by entry before": lambda p: jnp.tanh(p["w"]) / jnp.max(jnp.abs(p["w"])),
}


def dense(rng, weight):
    """A product whose weight has been transposed on the way."""
    w, x = rng.normal(size=(5, 8)), rng.normal(size=(6, 2, 8))
    return w, x, lambda p, x: jnp.sum(jnp.tanh(x @ weight(p).T) ** 2)


def vector(rng, weight):
    return rng.normal(size=(8, 5)), rng.normal(size=(6, 8)), lambda p, x: jnp.sum(jnp.tanh(x @ weight(p)))


def convolution(rng, weight):
    run = lambda w, x: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))  # noqa: E731
    return rng.normal(size=(3, 6, 8)), rng.normal(size=(6, 1, 4, 6)), lambda p, x: jnp.sum(jnp.tanh(run(weight(p), x)))


def recurrent(rng, weight):
    """Every step of a loop uses the weight, which is computed outside or inside of it."""
    is_outside = rng.random() < 0.5

    def loss(p, xs):
        once = weight(p)
        step = lambda h, x: (jnp.tanh(h @ (once if is_outside else weight(p)) + x), None)  # noqa: E731
        return jnp.sum(lax.scan(step, jnp.ones(8), xs)[0])

    return rng.normal(size=(8, 8)), rng.normal(size=(6, 3, 8)), loss


def layers(rng, weight):
    """Every step of a loop has a weight of its own."""

    def loss(p, x):
        stacked = {"w": p["w"].reshape(2, 8, 8), "g": jnp.stack([p["g"], 2 * p["g"]])}
        return jnp.sum(lax.scan(lambda h, own: (jnp.tanh(h @ weight(own)), None), x, stacked)[0])

    return rng.normal(size=(16, 8)), rng.normal(size=(6, 8)), loss


def recomputed(rng, weight):
    w, x, run = vector(rng, weight)
    return w, x, jax.checkpoint(run)


def siamese(rng, weight):
    w, x, run = vector(rng, weight)
    return w, x, lambda p, x: run(p, x) * run(p, x[::-1])


LAYERS = {f.__name__: f for f in (dense, vector, convolution, recurrent, layers, recomputed, siamese)}
MOVED = {"dense", "vector", "convolution", "recurrent", "recomputed"}  # one contact beside the number


def drawn(rng, layer, number):
    w, x, loss = LAYERS[layer](rng, NUMBERS[number])
    return jax.tree.map(jnp.asarray, {"w": w, "g": rng.normal()}), jnp.asarray(x), loss


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("seed", range(28))
@pytest.mark.one_in(196)
def test_multiples_equal_plain_gradients(seed, layer, x64):
    rng = np.random.default_rng([seed, list(LAYERS).index(layer)])
    params, x, loss = drawn(rng, layer, str(rng.choice(list(NUMBERS))))
    scale = random_like(params, seed) if rng.random() < 0.5 else None
    with jax.numpy_rank_promotion("allow"):
        check(loss, params, x, scale=scale, clips=(leaf_clip if rng.random() < 0.5 else flat_clip,))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("layer", LAYERS)
def test_only_the_number_is_pulled_back(layer, number):
    params, x, loss = drawn(np.random.default_rng(0), layer, number)
    with jax.numpy_rank_promotion("allow"):
        plan = dpopt.ghost.plan_clipped_sum(loss, params, x)
    (leaf,) = (own for own in plan.leaves if own.leaf == 1)  # w, after g
    assert (leaf.method is not PULLED_BACK) == (layer in MOVED or (layer, number) == ("siamese", "learned"))
    if layer in MOVED:
        others = [c for c in leaf.contacts if c not in leaf.numbers]
        assert len(others) == 1 and others[0].weight.entry is not None
        assert bool(leaf.numbers) == (
            "norm" in number or number in ("spectral", "twice", "spread", "entry by entry before")
        )


def test_gradients_stay_pulled_back_where_forming_them_costs_little():
    """Multiplying a long output takes more memory than the gradient of a small filter."""
    params = {"w": jnp.ones((3, 2)), "g": jnp.ones(())}
    plan = dpopt.ghost.plan_clipped_sum(lambda p, x: jnp.sum(jnp.tanh(x @ spectral(p))), params, jnp.ones((4, 50, 3)))
    assert plan.leaves[1].method is PULLED_BACK and len(plan.trace.contacts) == 1


def test_half_precision_stays_as_it_is_written():
    """There ``(s w) x`` and ``s (w x)`` are rounded, or overflow, at other places."""
    params = {"w": jnp.ones((8, 5), jnp.float16), "g": jnp.ones((), jnp.float16)}
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ NUMBERS["learned"](p))).astype(jnp.float32)  # noqa: E731
    plan = dpopt.ghost.plan_clipped_sum(loss, params, jnp.ones((4, 8), jnp.float16))
    assert all(c.weight.multiple is None for c in plan.trace.contacts)
    assert not any(c.primitive is None for c in plan.trace.contacts)


@pytest.mark.slow
def test_products_in_more_bits_than_the_weight(x64):
    """The number is cast like the product that it divides."""

    def loss_fn(p, x):
        weight = p["w"] / jnp.linalg.norm(p["w"])
        product = lax.dot_general(x, weight, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float64)
        return jnp.sum(jnp.tanh(product))

    rng = np.random.default_rng(0)
    params, batch = {"w": jnp.float32(rng.normal(size=(8, 5)))}, jnp.float32(rng.normal(size=(6, 8)))
    plan = dpopt.ghost.plan_clipped_sum(loss_fn, params, batch)
    assert any(c.tap_dtype == jnp.float64 and c.weight.dtype == jnp.float32 for c in plan.trace.contacts)

    @functools.partial(jax.jit, static_argnums=0)
    def clipped(engine, params, batch):
        grads = dpopt.per_example_grads(loss_fn, engine=engine)(params, batch, mask=None)
        return grads.clipped_sum(dpopt.FlatClip(1.0)).sum["w"]

    np.testing.assert_allclose(clipped("ghost", params, batch), clipped("vmap", params, batch), rtol=1e-5)
