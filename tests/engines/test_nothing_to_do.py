"""Results without entries, and groups without parameters."""

import jax.numpy as jnp
import pytest

import dpopt


@pytest.mark.parametrize("engine", ["ghost", "vmap"])
@pytest.mark.parametrize("size", [2, 3])
def test_auxiliary_outputs_without_entries(engine, size):
    """Joining the microbatches of an array without entries divided by zero."""
    promise = dpopt.per_example_grads(
        lambda w, x: (jnp.sum(jnp.tanh(x @ w)), jnp.zeros(0)), engine=engine, microbatch_size=size, has_aux=True
    )
    found = promise(jnp.ones((3, 2)), jnp.ones((4, 3)), mask=None).clipped_sum(dpopt.FlatClip(1.0))
    assert found.sensitive.aux.shape == (4, 0)


def test_a_group_without_parameters():
    params = {"a": jnp.ones((3, 3)), "b": {}}
    promise = dpopt.per_example_grads(lambda p, x: jnp.sum(x @ p["a"]))(params, jnp.ones((4, 3)), mask=None)
    assert promise.clipped_sum(dpopt.GroupClip({"a": 1.0, "b": 0.5})).sum["b"] == {}
