"""A diagonal in the wrong place, on purpose: after the noise, as the baselines have it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpopt.chain import NoiseAware
from dpopt.common import trees


def precondition_after_noise(preconditioner: Any) -> optax.GradientTransformationExtraArgs:
    r"""Applies a preconditioner to the private mean gradient: :math:`\tilde g \mapsto S \tilde g + o`.

    The noise is multiplied as well, which is what the papers' baselines suffer from. The preconditioner learns from
    the private mean as it came.

    Args:
        preconditioner: any that `precondition` takes.

    Returns:
        A transformation for after the noise.

    Raises:
        TypeError: if ``preconditioner`` lacks a method.

    *Privacy*: post-processing.

    >>> from dpopt.preconditioners.base import side_information
    >>> part = precondition_after_noise(side_information(2.0))
    >>> part.update(jnp.array([1.0, 3.0]), part.init(jnp.zeros(2)))[0].tolist()
    [2.0, 6.0]
    """
    for method in ("init", "diagonal", "observe"):
        if not callable(getattr(preconditioner, method, None)):
            raise TypeError(f"{preconditioner!r} is no preconditioner: it has no method {method!r}.")

    def update_fn(updates, state, params=None, *, noise_stddev=None, **extra_args):
        diagonal, state = preconditioner.diagonal(state, params, **extra_args)
        state = preconditioner.observe(state, updates, noise_stddev)
        updates = _combine(jnp.multiply, updates, diagonal.scale, "scale")
        updates = _combine(jnp.add, updates, diagonal.offset, "offset")
        updates = _combine(jnp.multiply, updates, diagonal.release, "release")
        return updates, state

    # Only a preconditioner that corrects for the noise must stand where the chain knows it.
    if not getattr(preconditioner, "correct_noise", False):
        return optax.GradientTransformationExtraArgs(preconditioner.init, update_fn)
    part = NoiseAware(preconditioner.init, update_fn)
    part.correct_noise = True
    return part


def _combine(operation, updates, other, name):
    if other is None:
        return updates
    other = trees.broadcast_prefix(other, updates, name)
    return jax.tree.map(lambda u, x: operation(u, jnp.asarray(x, u.dtype)), updates, other)
