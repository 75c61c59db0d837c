"""Losses that read arrays which are not trained: frozen weights, tables.

A loss may simply close over such arrays. But then ``jax.jit`` copies their values into every program that it compiles,
unsharded on each device, and refuses arrays that are partly held by other processes. A loss made here lists what it
reads, so that `dpopt.train` can pass it as an argument and `dpopt.run.sharding.place_constants` can shard it.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from dpopt.common import trees
from dpopt.common.types import LossFn, PyTree

_Loss = TypeVar("_Loss", bound=Callable[..., Any])


def with_constants(loss: Callable[..., Any], constants: PyTree) -> LossFn:
    """``loss_fn(params, example)`` from ``loss(params, example, constants)``.

    `dpopt.flax.nnx_loss` makes such a loss from a model. In your own training step under ``jax.jit``, pass
    ``loss_fn.constants`` as an argument and take gradients of ``loss_fn.given(constants)``.

    Args:
        loss: ``loss(params, example, constants) -> scalar``, of one example.
        constants: pytree of arrays that are not trained and are the same for all examples.

    Returns:
        The loss, with attributes ``constants`` and ``given``, which maps other constants to the loss with these.

    Raises:
        TypeError: if ``loss`` is not a function.

    *Privacy*: constants are not clipped and get no noise. They must not depend on the private examples.

    >>> import jax.numpy as jnp
    >>> loss_fn = with_constants(lambda w, x, frozen: jnp.sum((frozen @ w - x) ** 2), jnp.eye(2))
    >>> float(loss_fn(jnp.ones(2), jnp.zeros(2))), float(loss_fn.given(2 * jnp.eye(2))(jnp.ones(2), jnp.zeros(2)))
    (2.0, 8.0)
    """
    if not callable(loss):
        raise TypeError(f"loss must be a function of (params, example, constants); got {loss!r}.")

    def loss_fn(params: PyTree, example: PyTree) -> Any:
        return loss(params, example, constants)

    made = cast(Any, loss_fn)
    if getattr(loss, "takes_key", False):
        made.takes_key = True  # read by `dpopt.train`
    made.constants, made.given = constants, lambda others: with_constants(loss, others)
    return loss_fn


def constants_of(loss_fn: LossFn) -> PyTree:
    """The constants of a loss made by `with_constants`, None for other losses.

    *Privacy*: reads no data.

    >>> constants_of(with_constants(lambda w, x, frozen: 0.0, 3)), constants_of(lambda w, x: 0.0)
    (3, None)
    """
    return getattr(loss_fn, "constants", None)


def given(loss_fn: LossFn, constants: PyTree) -> LossFn:
    """The loss with other constants in place of `constants_of` it; a loss without constants unchanged.

    *Privacy*: see `with_constants`.

    >>> given(with_constants(lambda w, x, frozen: w + frozen, 3), 4)(1, None)
    5
    """
    return loss_fn if constants_of(loss_fn) is None else cast(Any, loss_fn).given(constants)


def wrapped(wrap: Callable[[LossFn], _Loss], loss_fn: LossFn, *, takes_key: bool | None = None) -> _Loss:
    """``wrap(loss_fn)`` with what training asks of ``loss_fn``: its constants, and whether it takes keys.

    Args:
        wrap: makes a loss of another one.
        takes_key: whether it takes keys beside its examples (`dpopt.example_keys`); None: if ``loss_fn`` does.

    *Privacy*: see `with_constants`.

    >>> double = lambda loss_fn: lambda w, x: 2 * loss_fn(w, x)
    >>> loss_fn = wrapped(double, with_constants(lambda w, x, frozen: w + frozen, 3))
    >>> loss_fn(1, None), given(loss_fn, 4)(1, None)
    (8, 10)
    """
    loss = wrap(loss_fn)
    made = cast(Any, loss)
    made.takes_key = getattr(loss_fn, "takes_key", False) if takes_key is None else takes_key  # read by `dpopt.train`
    constants = constants_of(loss_fn)
    if constants is not None:
        made.constants = constants
        made.given = lambda others: wrapped(wrap, given(loss_fn, others), takes_key=takes_key)
    return loss


def shapes_of(constants: PyTree) -> PyTree:
    """Shapes and dtypes, without shardings.

    *Privacy*: reads no data.

    >>> import jax.numpy as jnp
    >>> shapes_of(jnp.ones(3))
    ShapeDtypeStruct(shape=(3,), dtype=float32)
    """
    return trees.structs(constants)
