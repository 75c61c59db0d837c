"""Losses that read arrays which are not trained: frozen weights, tables.

A loss may simply close over such arrays. ``jax.jit`` then writes their values into every program that it compiles, on
each device whole, and refuses arrays of which other processes hold a part. A loss made here says what it reads, so that
`dpopt.train` hands it over as an argument, and `dpopt.run.sharding.place_constants` can lay it on a mesh.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp


def with_constants(loss: Callable[..., Any], constants: Any) -> Callable[..., Any]:
    """``loss_fn(params, example)`` from ``loss(params, example, constants)``.

    `dpopt.flax.nnx_loss` makes such a loss of a model by itself. In a step of your own under ``jax.jit``, pass
    ``loss_fn.constants`` in as an argument and take gradients of ``loss_fn.given(constants)``; without that the step
    closes over them, as it would over any array.

    Args:
        loss: ``loss(params, example, constants) -> scalar``, of one example.
        constants: pytree of arrays that are not trained and are the same for all examples.

    Returns:
        The loss, with attributes ``constants`` and ``given``: a function from other constants to the loss with these.

    Raises:
        TypeError: if ``loss`` is no function.

    *Privacy*: constants are covered by no clip and no noise. They must not depend on the private examples.

    >>> loss_fn = with_constants(lambda w, x, frozen: jnp.sum((frozen @ w - x) ** 2), jnp.eye(2))
    >>> float(loss_fn(jnp.ones(2), jnp.zeros(2))), float(loss_fn.given(2 * jnp.eye(2))(jnp.ones(2), jnp.zeros(2)))
    (2.0, 8.0)
    """
    if not callable(loss):
        raise TypeError(f"loss must be a function of (params, example, constants); got {loss!r}.")

    def loss_fn(params, example):
        return loss(params, example, constants)

    made = cast(Any, loss_fn)
    if getattr(loss, "takes_key", False):
        made.takes_key = True  # `dpopt.train` asks
    made.constants, made.given = constants, lambda others: with_constants(loss, others)
    return loss_fn


def constants_of(loss_fn: Callable[..., Any]) -> Any:
    """What `with_constants` was given, or None for another loss.

    *Privacy*: reads no data.

    >>> constants_of(with_constants(lambda w, x, frozen: 0.0, 3)), constants_of(lambda w, x: 0.0)
    (3, None)
    """
    return getattr(loss_fn, "constants", None)


def given(loss_fn: Callable[..., Any], constants: Any) -> Callable[..., Any]:
    """The loss with other constants, as `constants_of` gives them; a loss that has none as it is.

    *Privacy*: see `with_constants`.

    >>> given(with_constants(lambda w, x, frozen: w + frozen, 3), 4)(1, None)
    5
    """
    return loss_fn if constants_of(loss_fn) is None else cast(Any, loss_fn).given(constants)


def shapes_of(constants: Any) -> Any:
    """Shapes and dtypes, without where the arrays lie.

    *Privacy*: reads no data.

    >>> shapes_of(jnp.ones(3))
    ShapeDtypeStruct(shape=(3,), dtype=float32)
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), constants)
