"""A diagonal after the noise instead of before the clip, as in the baselines."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpopt.chain import NoiseAware
from dpopt.common import trees
from dpopt.common.types import PyTree
from dpopt.preconditioners.base import Preconditioner, check_methods


def precondition_after_noise(preconditioner: Preconditioner) -> optax.GradientTransformationExtraArgs:
    r"""Applies a preconditioner to the private mean gradient: :math:`\tilde g \mapsto S \tilde g + o`.

    The diagonal also multiplies the noise, which is the weakness of the papers' baselines. The preconditioner observes
    the private mean before it is multiplied.

    Args:
        preconditioner: see `precondition`.

    Raises:
        TypeError: if ``preconditioner`` lacks a method.

    *Privacy*: post-processing.

    >>> from dpopt.preconditioners.base import side_information
    >>> part = precondition_after_noise(side_information(2.0))
    >>> part.update(jnp.array([1.0, 3.0]), part.init(jnp.zeros(2)))[0].tolist()
    [2.0, 6.0]
    """
    check_methods(preconditioner)

    def update_fn(updates: PyTree, state: PyTree, params: PyTree = None, *, noise_stddev: PyTree = None, **extra: Any):
        diagonal, state = preconditioner.diagonal(state, params, **extra)
        state = preconditioner.observe(state, updates, noise_stddev)
        for name, combine in (("scale", jnp.multiply), ("offset", jnp.add), ("release", jnp.multiply)):
            if (other := getattr(diagonal, name)) is not None:
                other = trees.broadcast_prefix(other, updates, name)
                updates = jax.tree.map(lambda u, x, f=combine: f(u, jnp.asarray(x, u.dtype)), updates, other)
        return updates, state

    # Only a preconditioner that corrects for the noise must stand where the noise is known: right after it in a chain.
    if not getattr(preconditioner, "correct_noise", False):
        return optax.GradientTransformationExtraArgs(preconditioner.init, update_fn)
    part = NoiseAware(preconditioner.init, update_fn)
    part.correct_noise = True
    return part
