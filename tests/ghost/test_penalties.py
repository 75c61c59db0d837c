"""Losses with a term that does not depend on the example, such as weight decay, and weights mapped entry by entry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_check import check, flat_clip, leaf_clip, random_like
from jax import lax

import dpopt
from dpopt.ghost import entries
from dpopt.ghost.methods import PULLED_BACK
from dpopt.ghost.trace import trace_loss

MAPS = {
    "plain": lambda w: w,
    "softplus": jax.nn.softplus,
    "gated": lambda w: w * jax.nn.sigmoid(3 * w),  # one parameter, twice in one entry
    "straight through": lambda w: w + lax.stop_gradient(jnp.round(w) - w),
    "transposed": lambda w: (w.T * 2).T,
    "shifted": lambda w: w - 0.5,
    "subtracted": lambda w: 0.5 - w,
}
# Entries depend on several ones of the parameter, so that gradients are pulled back.
MIXED = {
    "centred": lambda w: w - jnp.mean(w),
    "symmetric": lambda w: w + w[::-1],
    "normalised": lambda w: w / (1 + jnp.linalg.norm(w)),
}
PENALTIES = {
    "squares": lambda ws: 0.05 * sum(jnp.sum(w**2) for w in ws),
    "absolute": lambda ws: 0.1 * sum(jnp.sum(jnp.abs(w)) for w in ws),
    "product": lambda ws: 0.01 * jnp.prod(jnp.stack([jnp.vdot(w, w) for w in ws])),
    "of one": lambda ws: jnp.sum(jnp.cos(ws[0])),
}


def dense(rng, use, positions):
    w, x = rng.normal(size=(4, 3)), rng.normal(size=(6, positions, 4))
    return {"w": w}, x, lambda p, x: jnp.sum(jnp.tanh(x @ use(p["w"])) ** 2)


def convolution(rng, use):
    w, x = rng.normal(size=(3, 2, 4)), rng.normal(size=(6, 1, 9, 2))
    run = lambda w, x: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))  # noqa: E731
    return {"w": w}, x, lambda p, x: jnp.sum(jnp.tanh(run(use(p["w"]), x)))


def table(rng, use):
    return (
        {"w": rng.normal(size=(5, 3))},
        rng.integers(0, 5, (6, 4)),
        lambda p, i: jnp.sum(jnp.sin(use(p["w"])[i]) ** 2),
    )


def bias(rng, use):
    return {"w": rng.normal(size=(1, 4))}, rng.normal(size=(6, 3, 4)), lambda p, x: jnp.sum(jnp.tanh(x + use(p["w"])))


LAYERS = {
    "one row": lambda rng, use: dense(rng, use, 1),
    "few rows": lambda rng, use: dense(rng, use, 2),
    "many rows": lambda rng, use: dense(rng, use, 40),
    "convolution": convolution,
    "table": table,
    "bias": bias,
}


def penalized(rng: np.random.Generator, layer: str, mapped: str, varies: bool):
    """A loss with one or two penalties, which an example may weigh itself."""
    params, x, fit = LAYERS[layer](rng, (MAPS | MIXED)[mapped])
    params["b"] = rng.normal(size=3)
    chosen = [PENALTIES[str(name)] for name in rng.choice(list(PENALTIES), rng.integers(1, 3), replace=False)]

    def loss_fn(params, example):
        x, m = example
        value = fit(params, x) + m * jnp.sum(jnp.sin(params["b"])[: x.shape[-1]])
        for penalty in chosen:
            value = value + (m if varies else 1.0) * penalty([params["w"], params["b"]])
        return value

    return loss_fn, jax.tree.map(jnp.asarray, params), (jnp.asarray(x), jnp.asarray(rng.normal(size=6)))


@pytest.mark.parametrize(
    "seed, layer",
    [
        pytest.param(seed, layer, marks=[pytest.mark.slow] * (seed != (0, 3)[i % 2]))
        for seed in range(24)
        for i, layer in enumerate(LAYERS)
    ],
)
@pytest.mark.one_in(6)
def test_penalties_equal_plain_gradients(seed, layer, x64):
    rng = np.random.default_rng([seed, list(LAYERS).index(layer)])
    mapped, varies = str(rng.choice([*MAPS, *MIXED])), bool(rng.random() < 0.5)
    loss_fn, params, batch = penalized(rng, layer, mapped, varies)
    scale = random_like(params, seed) if seed % 2 else None
    with jax.numpy_rank_promotion("allow"):
        check(loss_fn, params, batch, scale=scale, clips=(leaf_clip if seed % 4 > 1 else flat_clip,))


@pytest.mark.parametrize("layer", LAYERS)
def test_no_gradient_is_formed_for_a_penalty(layer):
    """A penalty is the same array for all examples: only an inner product with it is needed."""
    rng = np.random.default_rng(0)
    params, x, fit = LAYERS[layer](rng, MAPS["plain"])

    def loss_fn(params, x):
        return (
            fit(params, x) + 1e-3 * sum(jnp.vdot(w, w) for w in jax.tree.leaves(params)) + jnp.sum(jnp.abs(params["w"]))
        )

    with jax.numpy_rank_promotion("allow"):
        own, without = (dpopt.ghost.plan_clipped_sum(f, params, jnp.asarray(x)).leaves for f in (loss_fn, fit))
    assert len(own[0].numbers) == 2 and not without[0].numbers
    assert own[0].method is without[0].method is not PULLED_BACK


@pytest.mark.slow
def test_a_penalty_that_cancels_the_gradient_is_not_underestimated():
    """Where all but a little of the two cancels, the norm is that of what is added up."""
    rng, clip = np.random.default_rng(0), 0.5
    w = jnp.asarray(rng.normal(size=(8, 5)), jnp.float32)
    near = jnp.asarray(10.0 ** rng.uniform(-7, 0, (40, 1, 1)), jnp.float32)

    def loss_fn(w, example):  # the gradient of the first term is -w, but for a little
        x, v = example
        return jnp.sum((x @ w) * v) + 0.5 * jnp.sum(w**2)

    rest = jnp.asarray(rng.normal(size=(40, 8, 5)), jnp.float32)
    batch = (jnp.broadcast_to(jnp.eye(8), (40, 8, 8)), near * rest - w[None])
    assert dpopt.ghost.plan_clipped_sum(loss_fn, w, batch).leaves[0].numbers

    def alone(i):
        grads = dpopt.per_example_grads(loss_fn, engine="ghost")(w, batch, mask=jnp.arange(40) == i)
        return jnp.linalg.norm(grads.clipped_sum(dpopt.FlatClip(clip)).sum)

    sizes = jax.jit(lambda: jax.lax.map(alone, jnp.arange(40)))()
    assert float(jnp.max(sizes)) <= clip * (1 + 1e-3)
    assert float(jnp.max(sizes)) >= clip * (1 - 1e-3), "the bound is reached"


@pytest.mark.parametrize("name", MAPS)
def test_weights_that_are_mapped_entry_by_entry_are_direct(name):
    trace = trace_loss(lambda w, x: jnp.sum(jnp.tanh(x @ MAPS[name](w))), jnp.ones((4, 3)), jnp.ones((2, 4)))
    (contact,) = trace.contacts
    assert contact.weight.entry is not None and contact.weight.entry.copy == (
        name in ("plain", "straight through", "shifted")
    )


@jax.custom_jvp
def mixing(w):
    return jnp.sin(w)


@mixing.defjvp
def _mixing_jvp(primals, tangents):
    return jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0][::-1]  # of another entry


@pytest.mark.parametrize(
    "mapped",
    [mixing, lambda w: w + w[::-1], lambda w: w - jnp.mean(w), lambda w: w * w[0], lambda w: w @ w, lambda w: w / w.T],
)
def test_other_maps_are_not(mapped):
    """Also if it is only the derivative that mixes entries."""
    with jax.numpy_rank_promotion("allow"):
        trace = trace_loss(lambda w, x: jnp.sum(x @ mapped(w)), jnp.ones((3, 3)), jnp.ones((2, 3)))
    assert all(c.weight.entry is None for c in trace.contacts)


def test_two_parameters_in_one_entry_are_not_one():
    trace = trace_loss(lambda p, x: jnp.sum(x @ (p[0] * p[1])), [jnp.ones((3, 3))] * 2, jnp.ones((2, 3)))
    assert trace.contacts[0].weight.entry is None
    assert entries._are_aligned(trace.leaves[:1]) and not entries._are_aligned(trace.leaves)
