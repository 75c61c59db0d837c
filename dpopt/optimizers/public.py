"""Uses of public data with any optimizer: a warm start, and rules that read public values."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpopt.common.types import Batch, LossFn, PyTree


def with_public_arguments(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Passes extra arguments named ``public_...`` to a rule, without that prefix.

    Rules such as ``optax.contrib.reduce_on_plateau`` read a loss as ``value``. A private optimizer refuses an argument
    of that name, which could be private; the name ``public_value`` states that it is not.

    Args:
        rule: a transformation for after the noise.

    Returns:
        The same rule, whose ``update(..., public_value=v)`` is the rule's ``update(..., value=v)``.

    *Privacy*: post-processing, provided that the arguments are computed from public data, or by a mechanism that is
    accounted for elsewhere. A loss on the private data is neither.

    >>> plateau = with_public_arguments(optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    >>> state = plateau.init(jnp.zeros(1))
    >>> for value in (1.0, 1.0):
    ...     updates, state = plateau.update(jnp.ones(1), state, public_value=value)
    >>> updates.tolist()
    [0.5]
    """
    inner = optax.with_extra_args_support(rule)

    def update_fn(updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **extra_args: Any):
        public = {k.removeprefix("public_"): value for k, value in extra_args.items() if k.startswith("public_")}
        return inner.update(updates, state, params, **extra_args, **public)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def warm_start(
    loss_fn: LossFn, params: optax.Params, batches: Iterable[Batch], *, optimizer: optax.GradientTransformation
) -> optax.Params:
    """Trains on PUBLIC batches without privacy, for parameters from which private training can start.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``, the loss of one example, as for `per_example_grads`.
        params: initial parameters; not modified.
        batches: public batches, leaves ``(B, ...)``; one step each.
        optimizer: an ordinary Optax optimizer, such as ``optax.adam(1e-3)``.

    Raises:
        TypeError: if the optimizer is private: public data needs no noise.

    *Privacy*: NOT private: the result may reveal anything in the batches.

    >>> loss = lambda w, x: jnp.sum((w - x) ** 2)
    >>> warm_start(loss, jnp.zeros(1), [jnp.ones((4, 1))], optimizer=optax.sgd(0.5)).tolist()
    [1.0]
    """
    if hasattr(optimizer, "privacy") or not callable(getattr(optimizer, "update", None)):
        raise TypeError(f"warm_start needs an ordinary Optax optimizer, such as optax.adam(1e-3); got {optimizer!r}.")

    @jax.jit
    def step(params: optax.Params, state: optax.OptState, batch: Batch) -> tuple[optax.Params, optax.OptState]:
        grads = jax.grad(lambda p: jnp.mean(jax.vmap(loss_fn, in_axes=(None, 0))(p, batch)))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    return params
