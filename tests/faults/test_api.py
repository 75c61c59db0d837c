"""Faults of what is called by hand: masks that were forgotten, means that passed for rows, keys by row."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dot_loss, privacy_four

import dpopt
from dpopt.gradients import stacked_grads

OPT = dpopt.dp_sgd(1.0, **privacy_four(noise_multiplier=0.0))
W, X = jnp.zeros(4), np.ones((6, 4), np.float32)
TAKE_A_MASK = {
    "promise": lambda **mask: dpopt.per_example_grads(dot_loss)(W, X, **mask),
    "clients": lambda **mask: dpopt.federated.client_deltas(dot_loss, local_steps=1, local_learning_rate=1.0)(
        W, X[:, None], **mask
    ),
    "stacked": lambda **mask: stacked_grads(X, **mask),
    "step": lambda **mask: dpopt.make_train_step(dot_loss, OPT)(W, OPT.init(W), X, **mask),
    "jitted step": lambda **mask: jax.jit(dpopt.make_train_step(dot_loss, OPT))(W, OPT.init(W), X, **mask),
}


@pytest.mark.parametrize("take", TAKE_A_MASK.values(), ids=TAKE_A_MASK)
def test_forgotten_mask(take):
    with pytest.raises(TypeError, match=r"pass the batch's mask.*or mask=None if no row is padding"):
        take()
    take(mask=None)
    take(mask=np.ones(6, bool))


def test_the_mask_has_no_default():
    for function in (dpopt.per_example_grads(dot_loss), stacked_grads, dpopt.make_train_step(dot_loss, OPT)):
        assert inspect.signature(function).parameters["mask"].default is inspect.Parameter.empty
