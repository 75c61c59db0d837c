"""Update rules of a group without parameters, as `optax.partition` makes them where a label is not used."""

import jax
import jax.numpy as jnp
import optax
import pytest

from dpopt.optimizers import adam_bc, microadam

RULES = {
    "adam_bc": adam_bc.scale_by_adam_bc(noise_stddev=0.1),
    "rms_bc": adam_bc.scale_by_rms_bc(noise_stddev=0.1),
    "adagrad_bc": adam_bc.scale_by_adagrad_bc(noise_stddev=0.1),
    "micro_adam": microadam.scale_by_micro_adam(density=0.5),
    "micro_adam, rounded at random": microadam.scale_by_micro_adam(density=0.5, rounding_key=jax.random.key(0)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_group_without_parameters_has_no_updates(name):
    groups = {"used": optax.sgd(1.0), "not used": RULES[name]}
    rule = optax.partition(groups, {"w": "used"})
    params = {"w": jnp.ones(2)}
    updates, _ = jax.jit(rule.update)(params, rule.init(params), params)
    assert updates["w"].tolist() == [-1.0, -1.0]
