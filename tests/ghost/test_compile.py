"""Properties that keep the engine's programs quick to compile."""

import ghost_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_check import assert_trees_close

from dpopt import ghost
from dpopt.common.trees import at_once
from dpopt.engines import norms as engines_norms
from dpopt.engines.programs import equations
from dpopt.ghost import term_sizes
from dpopt.ghost.methods import GRAM
from dpopt.ghost.methods.explicit import formed


def test_a_convolution_takes_as_many_products_as_a_dense_layer():
    """The offsets of its filter are concatenated: one product each would mean nine times as many kernels to compile."""
    loss_fn, params, batch = ghost_cases.conv_small_image(ghost_cases.Arrays())
    (contact,) = ghost.plan_clipped_sum(loss_fn, params, batch).trace.contacts
    factors = contact.factors
    assert factors.shape[0] == 9
    x, y = jnp.ones(contact.input_shape), jnp.ones(contact.tap_shape)

    def products(function, *args):
        return [e.primitive.name for e in equations(jax.make_jaxpr(function)(*args).jaxpr)].count("dot_general")

    folded = factors.fold(jnp.ones(contact.weight.shape))
    assert products(lambda x, y: GRAM.square(factors._replace(inner=None), x, y, None), x, y) == 2
    assert products(lambda x, y, s: term_sizes.square(factors, x, y, s), x, y, folded) == 1
    assert products(lambda x, y: formed(factors, x, y), x, y) == 1


def test_functions_of_several_arrays_at_once():
    arrays = {"a": jnp.array([1.0, jnp.inf]), "b": jnp.array([2.0, jnp.nan]), "c": jnp.ones((2, 3), jnp.float16)}
    found = at_once(lambda x: jnp.where(jnp.isfinite(x), x, 0), arrays)
    assert_trees_close(found, {"a": np.array([1.0, 0.0]), "b": np.array([2.0, 0.0]), "c": np.ones((2, 3))}, rtol=0)
    assert found["c"].dtype == jnp.float16


def test_functions_of_several_trees_at_once():
    """Only arrays whose partners are alike, too, are stacked."""
    first = {"a": np.arange(2.0), "b": np.arange(2.0), "c": np.arange(3.0)}
    second = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float16), "c": np.ones(3, np.float32)}
    found = at_once(lambda x, y: x - y, first, second)
    assert_trees_close(found, {k: first[k] - np.float32(second[k]) for k in first}, rtol=0)


def _clipped_sum(loss_fn, params, batch):
    def coefficients(norms):
        return jax.tree.map(lambda n: 1 / (1 + n), norms)

    return ghost.clipped_sum(loss_fn, params, batch, coefficients=coefficients)


@pytest.mark.slow
def test_a_sum_over_many_groups_of_blocks_compiles_one():
    loss_fn, params, _ = ghost_cases.dense(ghost_cases.Arrays())

    def products(rows):
        jaxpr = jax.make_jaxpr(lambda p, b: _clipped_sum(loss_fn, p, b).sum)(params, jnp.ones((rows, 4)))
        return [e.primitive.name for e in equations(jaxpr.jaxpr)].count("dot_general")

    assert products(1000) == products(250)


def _counted(function, *args):
    return len(list(equations(jax.make_jaxpr(function)(*args).jaxpr)))


def test_windows_of_any_size_are_looked_up_at_once():
    """A slice for each offset of a filter would be a kernel for each."""

    def size(side):
        loss_fn = lambda w, x: jnp.sum(ghost_cases.conv(x, w) ** 2)  # noqa: E731
        plan = ghost.plan_clipped_sum(loss_fn, jnp.ones((side, side, 2, 3)), jnp.ones((4, 9, 9, 2)))
        (contact,) = plan.trace.contacts
        return _counted(contact.factors.split, jnp.ones(contact.input_shape), jnp.ones(contact.tap_shape))

    assert size(3) == size(5)


def test_norms_of_rare_examples_have_no_numbers_of_their_own_for_each_parameter(monkeypatch):
    """Arithmetic on one number is a kernel, which a CPU takes as long to compile as one on a vector of them."""
    monkeypatch.setattr(engines_norms, "_COPIED_SHARE", 1)

    def numbers(layers):
        def loss_fn(params, x):
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.sum(x)

        params, batch = [jnp.ones((4, 4))] * layers, jnp.ones((8, 3, 4))
        program = jax.make_jaxpr(lambda p, b: _clipped_sum(loss_fn, p, b).sum)(params, batch)
        found = [e for e in equations(program.jaxpr) if e.primitive.name in ("add", "mul", "div", "sqrt", "max")]
        return sum(e.outvars[0].aval.shape == () for e in found)

    assert numbers(4) == numbers(2)
