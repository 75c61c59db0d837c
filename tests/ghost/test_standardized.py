"""Weights normalised filter by filter are recognised, and their gradients are pulled back in closed form."""

import ghost_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import slow_unless
from jax import lax

import dpopt
from dpopt import ghost
from dpopt.ghost.methods import EXPLICIT, GRAM
from dpopt.ghost.methods.standardized import from_formed
from dpopt.ghost.standardized import standardized
from dpopt.ghost.trace import trace_loss

AXES = (0, 1, 2)


def by_flax(w):
    """Like `flax.linen.WeightNorm`, without its gain."""
    return w * lax.rsqrt(jnp.sum(lax.square(w), axis=AXES, keepdims=True) + 1e-12)


def described(weight, w):
    """The description of ``weight(w)`` as the filter of a convolution."""
    x = jax.ShapeDtypeStruct((4, 4, w.shape[2]), w.dtype)
    with jax.numpy_rank_promotion("allow"):
        trace = trace_loss(lambda w, x: jnp.sum(ghost_cases.conv(x, weight(w)) ** 2), w, x)
    return trace.contacts[0], standardized(trace, trace.contacts[0])


ALIKE = {
    "by mean and variance": ghost_cases.standardized,
    "kept axes": lambda w: (w - w.mean(AXES, keepdims=True)) / (jnp.std(w, AXES, keepdims=True) + 1e-4),
    "moments by hand": lambda w: (w - jnp.mean(w, AXES)) * lax.rsqrt(
        jnp.maximum(jnp.mean(w**2, AXES) - jnp.mean(w, AXES) ** 2, 1e-9)
    ),
    "centred only": lambda w: w - w.mean(AXES),
    "normalised only": lambda w: w / jnp.sqrt(jnp.sum(w * w, AXES)),
    "as flax does": by_flax,
    "with an affine mixture": lambda w: -2.0 * w + jnp.tanh(w.sum(AXES)) * 3.0 - w.var(AXES),
    "a mean held constant": lambda w: w - lax.stop_gradient(w.mean(AXES)),
}  # fmt: skip
OTHERS = {
    "one mean for all filters": lambda w: w - w.mean(),
    "over other axes": lambda w: w - w.mean((0, 1)),
    "entry by entry": lambda w: jnp.tanh(w),
    "a third moment": lambda w: w - (w**3).mean(AXES),
    "the largest entry": lambda w: w / jnp.max(jnp.abs(w), AXES),
    "filters mixed": lambda w: w - jnp.flip(w.mean(AXES)),
    "divided by entries": lambda w: w.mean(AXES) / w,
    "in half precision": lambda w: ghost_cases.standardized(w.astype(jnp.bfloat16)).astype(jnp.float32),
    "turned": lambda w: (w - w.mean(AXES))[::-1],
    "cast to integers": lambda w: w - w.astype(jnp.int32).astype(w.dtype) * 0.3,
    "entries counted": lambda w: w * lax.rsqrt(jnp.sum(w**2, AXES) / jnp.sum(w.astype(bool), AXES)),
    "a mean of rounded entries": lambda w: w - lax.reduce_precision(w, 8, 2).mean(AXES),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("weight", ALIKE.values(), ids=ALIKE)
def test_pulls_back_as_jax_does(weight, x64):
    w = np.random.default_rng(0).normal(0.3, 1, (3, 3, 2, 4))
    contact, found = described(weight, w)
    assert found is not None
    gradient = np.random.default_rng(1).normal(size=w.shape)
    scale, fold = np.random.default_rng(2).uniform(0.5, 2, w.shape), contact.factors.fold

    def squares(w, gradient, scale):
        (expected,), c = jax.vjp(weight, w)[1](gradient), found.coefficients(w)
        for s in (None, scale):
            got = from_formed(fold(gradient), fold(c.deviation), None if s is None else fold(s), c)
            yield got.value, jnp.sum((expected if s is None else expected * s) ** 2)

    with jax.numpy_rank_promotion("allow"):
        for got, want in jax.jit(lambda *args: [*squares(*args)])(w, gradient, scale):
            np.testing.assert_allclose(got, want, rtol=1e-11)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", slow_unless({0}, range(3)))
@pytest.mark.parametrize("weight", ALIKE.values(), ids=ALIKE)
def test_gains_bound_what_an_entry_adds(weight, seed, x64):
    rng = np.random.default_rng(seed)
    w = rng.normal(rng.normal(), 10 ** rng.uniform(-1, 1, 4), (*rng.integers(1, 4, 2), 2, 4))
    uneven = [10 ** rng.uniform(-spread, spread, w.shape) for spread in (0.3, 3)]
    _, found = described(weight, w)
    with jax.numpy_rank_promotion("allow"):
        jacobian, gains = jax.jit(
            lambda w, scales: (jax.jacobian(weight)(w), [found.gain(found.coefficients(w), s) for s in scales])
        )(w, [None, *uneven])
        jacobian = np.reshape(jacobian, (w.size, *w.shape))  # rows: entries of the weight
        for scale, gain in zip([None, *uneven], gains, strict=True):
            exact = np.linalg.norm((jacobian if scale is None else jacobian * scale).reshape(w.size, -1), axis=1)
            bound = np.broadcast_to(gain, w.shape).reshape(-1)
            assert (bound >= exact * (1 - 1e-9)).all()
            if scale is not uneven[1]:
                assert np.median(bound) < 6 * np.median(exact)  # the terms are bounded one by one


@pytest.mark.parametrize("weight", OTHERS.values(), ids=OTHERS)
def test_others_are_left_to_the_general_method(weight):
    assert described(weight, np.ones((3, 3, 2, 4), np.float32))[1] is None


def test_a_filter_far_from_zero_keeps_its_digits():
    """Moments about zero would lose the variance of a filter whose mean is a thousand times its spread."""
    w = np.float32(1_000 + np.random.default_rng(0).normal(size=(3, 3, 2, 4)))
    _, found = described(ghost_cases.standardized, w)
    with jax.numpy_rank_promotion("allow"):
        (slope, *_) = jax.jit(lambda w: found.coefficients(w).per_filter.slope)(w)
        exact = np.asarray(w, np.float64)
        np.testing.assert_allclose(slope, 1 / np.sqrt(exact.var(AXES) + 1e-3), rtol=1e-4)


@pytest.mark.slow
def test_a_filter_whose_slope_is_zero_is_clipped_by_the_plain_definition():
    """The closed form divides by the slope, so the batch takes the slow path; the result still equals vmap's."""

    def loss_fn(p, x):
        shrunk = (p["w"] - p["w"].mean(AXES, keepdims=True)) * p["w"].var(AXES, keepdims=True)
        return jnp.sum(jnp.tanh(ghost_cases.conv(x + ghost_cases.conv(x, shrunk), p["v"])))

    rng = np.random.default_rng(0)
    params = {"w": jnp.ones((3, 3, 24, 24)), "v": jnp.asarray(rng.normal(size=(1, 1, 24, 2)), jnp.float32)}
    batch = jnp.asarray(rng.normal(size=(4, 4, 4, 24)), jnp.float32)
    found = {leaf.leaf: leaf for leaf in ghost.plan_clipped_sum(loss_fn, params, batch).leaves}
    assert found[1].standardized and found[1].method is GRAM
    sums = [
        dpopt.per_example_grads(loss_fn, engine=engine)(params, batch, mask=None).clipped_sum(dpopt.FlatClip(0.5)).sum
        for engine in ("ghost", "vmap")
    ]
    for name in params:
        np.testing.assert_allclose(sums[0][name], sums[1][name], rtol=1e-4, atol=1e-6)
    assert float(jnp.linalg.norm(sums[1]["v"])) > 0.1


@pytest.mark.parametrize("rounds", ["accelerator", "bfloat16"])
def test_rounded_outputs_are_not_read(rounds, monkeypatch):
    """Accelerators multiply in fewer bits by default; a norm computed from such an output might be too small."""
    loss_fn, params, batch = ghost_cases.weight_standardized_gram(ghost_cases.Arrays())
    params, batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, batch))
    if rounds == "accelerator":
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    else:
        whole = loss_fn

        def loss_fn(p, x):
            y = ghost_cases.conv(x.astype(jnp.bfloat16), ghost_cases.standardized(p["w"]).astype(jnp.bfloat16))
            return jnp.sum(y.astype(jnp.float32)) + 0 * whole({"w": jnp.ones((3, 3, 24, 24)), "v": p["v"]}, x)

    with jax.numpy_rank_promotion("allow"):
        plan = ghost.plan_clipped_sum(loss_fn, params, batch)
    leaf = next(leaf for leaf in plan.leaves if "w" in plan.paths[leaf.leaf])
    assert leaf.standardized and leaf.method is EXPLICIT
    assert not any(c.weight.leaves == frozenset([leaf.leaf]) for c in plan.outputs)


class _Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(3, use_bias=False), use_scale=False)(x)


def test_flax_weight_norm_is_recognised():
    model = _Norm()
    x = jnp.ones((5, 4))
    params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    trace = trace_loss(lambda p, x: jnp.sum(model.apply({"params": p}, x)), params, x)
    (contact,) = trace.contacts
    assert standardized(trace, contact) is not None
