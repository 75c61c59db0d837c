"""Weights that a loss spreads over an array, as Haiku's biases are: the tap is on what is spread."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import contributions, enable_x64, slow_unless
from jax import lax

from dpopt.ghost.trace import trace_loss

_WAYS = "recorded", "two passes", "one pass"

# Arrays of the shape of h, (5, 4), from a vector b, (4,).
SPREADS = {
    "over rows": lambda b, h: jnp.broadcast_to(b, h.shape),
    "over columns": lambda b, h: jnp.broadcast_to(jnp.concatenate([b, b[:1]])[:, None], h.shape),
    "a number": lambda b, h: jnp.full(h.shape, b[1]),
    "twice": lambda b, h: jnp.broadcast_to(jnp.broadcast_to(b, (5, 4)) * 2, (2, 5, 4))[1],
    "a multiple": lambda b, h: jnp.broadcast_to(jnp.tanh(b), h.shape),
}
USES = {
    "added": lambda s, h: jnp.tanh(h + s),
    "multiplied": lambda s, h: jnp.sin(h * s),
    "both": lambda s, h: jnp.sin(h * s) + s * jnp.cos(h),
    "product": lambda s, h: jnp.tanh(h @ s.T)[:, :4],
    "start": lambda s, h: lax.scan(lambda c, x: (jnp.tanh(c * x), None), s, h)[0],
    "chosen": lambda s, h: lax.cond(h[0, 0] > 0, lambda s, h: s + h, lambda s, h: s * h, s, h),
}
AROUND = {
    "nothing": lambda layer, b, h: layer(b, h),
    "remat": lambda layer, b, h: jax.checkpoint(layer)(b, h),
    "steps": lambda layer, b, h: lax.scan(lambda h, _: (layer(b, h), None), h, None, length=3)[0],
    "layers": lambda layer, b, h: lax.scan(lambda h, b: (layer(b, h), None), h, jnp.stack([b, 2 * b]))[0],
    "remat in steps": lambda layer, b, h: lax.scan(lambda h, _: (jax.checkpoint(layer)(b, h), None), h, None, length=2)[
        0
    ],
}
_CASES = [*itertools.product(SPREADS, USES, AROUND)]
_RUNS = [(case, way) for case in _CASES for way in _WAYS]


@pytest.mark.parametrize("run", slow_unless(_RUNS[:: len(_RUNS) // 12 + 1], _RUNS), ids=str)
def test_contributions_are_those_of_plain_gradients(run):
    (spread, use, around), way = run

    def loss(params, h):
        layer = lambda b, h: USES[use](SPREADS[spread](b, h), h)  # noqa: E731
        return jnp.sum(jnp.sin(AROUND[around](layer, params["w"], h)))

    rng = np.random.default_rng(0)
    with enable_x64(True), jax.numpy_rank_promotion("allow"):
        params, batch = {"w": jnp.asarray(rng.normal(size=4))}, jnp.asarray(rng.normal(size=(3, 5, 4)))
        expected = np.stack([jax.grad(loss)(params, h)["w"] for h in batch])
        norms = np.linalg.norm(expected, axis=1)
        clip = float(np.median(norms)) / 2
        alone, among = contributions(loss, params, batch, way, clip, None)
    expected *= np.minimum(1, clip / norms)[:, None]
    np.testing.assert_allclose(alone, expected, rtol=1e-8, atol=1e-9 * clip)
    np.testing.assert_allclose(among, expected, rtol=1e-8, atol=1e-9 * clip)
    contributions.clear_cache()


@pytest.mark.parametrize("around", AROUND)
def test_no_array_is_recorded_for_what_is_spread(around):
    layer = lambda b, h: jnp.tanh(h + jnp.broadcast_to(b, h.shape))  # noqa: E731
    shapes = jax.ShapeDtypeStruct((4,), "float32"), jax.ShapeDtypeStruct((5, 4), "float32")
    trace = trace_loss(lambda b, h: jnp.sum(AROUND[around](layer, b, h)), *shapes)
    assert [c.weight.shape for c in trace.contacts] == [(2, 4) if around == "layers" else (4,)]
