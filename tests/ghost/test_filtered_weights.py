"""Convolutions of weights with weights: followed on one device, refused on several, wherever they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpopt
from dpopt.common.lazy import ghost

RNG = np.random.default_rng(3)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


PARAMS = {"image": normal(1, 2, 6, 6), "filter": normal(2, 2, 3, 3)}
BATCH = normal(4, 2, 6, 6)


def convolved(image, kernel):
    return lax.conv_general_dilated(image, kernel, (1, 1), "SAME")


@jax.custom_jvp
def with_a_rule(image, kernel):
    return convolved(image, kernel)


@with_a_rule.defjvp
def _rule(primals, tangents):
    (image, kernel), (d_image, d_kernel) = primals, tangents
    return with_a_rule(image, kernel), convolved(d_image, kernel) + convolved(image, d_kernel)


def in_a_loop(image, kernel):
    return lax.scan(lambda h, _: (convolved(h, kernel), None), image, None, length=2)[0]


def in_a_loop_with_a_rule(image, kernel):
    return lax.scan(lambda h, _: (with_a_rule(h, kernel), None), image, None, length=2)[0]


WAYS = {
    "plain": convolved,
    "jit": jax.jit(convolved),
    "rule": with_a_rule,
    "loop": in_a_loop,
    "loop, rule": in_a_loop_with_a_rule,
    "checkpoint": jax.checkpoint(convolved),
    "cond": lambda image, kernel: lax.cond(kernel[0, 0, 0, 0] > 9, lambda a, b: a, convolved, image, kernel),
}


def loss_of(way):
    def loss(params, x):
        return jnp.sum(jnp.tanh(WAYS[way](params["image"], params["filter"])[0] * x))

    return loss


@pytest.mark.parametrize("way", WAYS)
def test_one_device_equals_vmap(way):
    def run(engine):
        promise = dpopt.per_example_grads(loss_of(way), engine=engine)(PARAMS, BATCH, mask=None)
        found = promise.clipped_sum(dpopt.FlatClip(1.0))
        return found.sum, found.sensitive.norms

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), run("ghost"), run("vmap"))


@pytest.mark.parametrize("way", WAYS)
def test_several_devices_refuse_it(way, monkeypatch):
    """Where the image is divided along a spatial axis, its norms would not be those of what is added up."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with pytest.raises(ghost.CannotFollow):
        ghost.plan_clipped_sum(loss_of(way), PARAMS, BATCH)


def test_several_devices_follow_convolutions_of_the_example(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    loss = lambda params, x: jnp.sum(jnp.tanh(convolved(x[None], params["filter"])) * params["image"])  # noqa: E731
    assert ghost.plan_clipped_sum(loss, PARAMS, BATCH).leaves
