"""A weight shared by all steps of a loop, modified by a value that differs between steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpopt

D, STEPS, ROWS = 3, 4, 4
NUMBERS = jnp.array([1.0, 2.0, 3.0, -1.0])
MATRICES = jax.random.normal(jax.random.key(9), (STEPS, D, D))
TWICE = jnp.array([0, 0, 1, 1])  # the part of the weight that a step reads


def over(steps, step):
    """A loss that scans ``step(state, weight, value of the step, example)`` over the steps."""

    def loss(w, e):
        return jnp.sum(lax.scan(lambda h, s: (jnp.tanh(step(h, w, s, e)), None), jnp.ones(D), steps)[0] ** 2)

    return loss


def nested(w, e):  # the outer loop slices the weight, the inner one multiplies its slice by numbers
    def outer(h, part):
        return lax.scan(lambda h, s: (jnp.tanh(h @ (part * s) + e), None), h, NUMBERS)[0], None

    return jnp.sum(lax.scan(outer, jnp.ones(D), w)[0] ** 2)


CASES = {
    "times a number": (over(NUMBERS, lambda h, w, s, e: h @ (w * s) + e), (D, D)),
    "times a matrix": (over(MATRICES, lambda h, w, s, e: h @ (w * s) + e), (D, D)),
    "plus a matrix": (over(MATRICES, lambda h, w, s, e: h @ (w + s) + e), (D, D)),
    "masked": (over(MATRICES, lambda h, w, s, e: h @ jnp.where(s > 0, w, 0) + e), (D, D)),
    "bias": (over(NUMBERS, lambda h, w, s, e: h * e + w * s), (D,)),
    "table": (over(NUMBERS, lambda h, w, s, e: h + (w * s)[jnp.int32(jnp.abs(e)) % D].sum(0)), (D, D)),
    "part by number": (over(TWICE, lambda h, w, s, e: h @ w[s] + e), (2, D, D)),
    "window": (over(TWICE, lambda h, w, s, e: h @ lax.dynamic_slice(w, (s, 0), (D, D)) + e), (D + 1, D)),
    "nested": (nested, (2, D, D)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_norms_count_every_step(name):
    loss, shape = CASES[name]
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (shape, (ROWS, D)))
    wanted = [np.linalg.norm(np.asarray(jax.grad(loss)(w, e), np.float64)) for e in x]

    @jax.jit
    def clipped(w, x):
        ran = dpopt.per_example_grads(loss, engine="ghost")(w, x, mask=None).clipped_sum(dpopt.FlatClip(1e-3))
        return ran.sensitive.norms

    np.testing.assert_allclose(clipped(w, x), wanted, rtol=1e-4)
