"""Products with a weight on their left are computed with it on their right, whatever their axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_unless
from jax import lax
from jax.extend import core

import dpopt
from dpopt.engines.programs import equations
from dpopt.ghost import canonical


def _products(function, *args):
    return [e for e in equations(jax.make_jaxpr(function)(*args).jaxpr) if e.primitive is lax.dot_general_p]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", slow_unless(range(15), range(40)))
def test_any_product(seed, x64):
    rng = np.random.default_rng(seed)
    shared, contracted, own, other = (rng.integers(1, 4, n) for n in rng.integers(0, 3, 4))

    def operand(free):  # axes in any order; where the shared and the contracted ones are
        order = rng.permutation(len(shared) + len(contracted) + len(free))
        where = np.argsort(order)
        axes = (*where[: len(shared)].tolist(),), (*where[len(shared) :][: len(contracted)].tolist(),)
        return rng.normal(size=np.concatenate([shared, contracted, free]).astype(int)[order]), *axes

    (w, w_shared, w_contracted), (x, x_shared, x_contracted) = operand(own), operand(other)
    numbers = (w_contracted, x_contracted), (w_shared, x_shared)
    precision = [None, "highest", ("default", "highest")][seed % 3]

    def product(w, x):
        return lax.dot_general(w, x, numbers, precision=precision)

    (equation,) = _products(product, w, x)
    swapped = core.jaxpr_as_fun(core.ClosedJaxpr(*canonical.weight_last(equation)))
    (found,) = _products(swapped, w, x)
    assert [v.aval.shape for v in found.invars] == [x.shape, w.shape]
    np.testing.assert_allclose(swapped(w, x)[0], product(w, x), rtol=1e-12, atol=1e-12)


def test_cotangents_have_their_positions_first():
    """As norms need them: otherwise every cotangent would be copied twice, and the copy kept beside it."""

    def loss_fn(params, points):
        return jnp.sum(jax.vmap(lambda x: jnp.tanh(params["w"] @ x))(points))

    plan = dpopt.ghost.plan_clipped_sum(loss_fn, {"w": jnp.ones((3, 2))}, jnp.ones((4, 5, 2)))
    assert [c.tap_shape for c in plan.trace.contacts] == [(5, 3)]


def test_vectors_stay_where_they_are_in_memory():
    """`jax.vmap(equinox.nn.Linear)` moves the vectors to the last axis, and every operation after it reads across."""

    def loss_fn(params, points):
        return jnp.sum(jax.vmap(lambda x: jnp.tanh(params["w"] @ x + params["b"]))(points))

    params, batch = {"w": jnp.ones((3, 2)), "b": jnp.ones(3)}, jnp.ones((4, 5, 2))

    def clipped(params, batch):
        return (
            dpopt.per_example_grads(loss_fn, engine="ghost")(params, batch, mask=None)
            .clipped_sum(dpopt.FlatClip(1.0))
            .sum
        )

    forward = [e for e in _products(clipped, params, batch) if (3, 2) in [v.aval.shape for v in e.invars]]
    assert forward
    for equation in forward:
        assert equation.invars[1].aval.shape == (3, 2)
