"""The loss of a row that may be a canary, and what the loss of canaries says after a run."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpopt.audit.directions import Directions
from dpopt.common.types import LossFn
from dpopt.constants import wrapped
from dpopt.federated import Clients


class Row(NamedTuple):
    """A row of data with canaries."""

    example: Any
    canary: Any  # int32: the canary's number, -1 for the user's own example


def with_gradients(loss_fn: LossFn, directions: Directions) -> LossFn:
    """A loss of rows, which at a canary is linear in the parameters: its gradient is the canary's direction.

    >>> from dpopt.audit.directions import OneHot
    >>> loss = with_gradients(lambda w, x: jnp.sum(w * x), OneHot.of(jnp.zeros(2), 2, 9.0, seed=0))
    >>> sorted(jax.grad(loss)(jnp.ones(2), Row(jnp.ones(2), 0)).tolist())
    [0.0, 9.0]
    """

    def at_row(loss_fn: LossFn, params: Any, row: Any) -> Any:
        example, number = _unpacked(row)
        found = loss_fn(params, example)
        value, *aux = found if isinstance(found, tuple) else (found,)
        planted = directions.along(params, jnp.maximum(number, 0)).astype(value.dtype)
        value = jnp.where(number >= 0, planted, value)
        return (value, *aux) if aux else value

    return wrapped(lambda loss_fn: functools.partial(at_row, loss_fn), loss_fn)


def without_number(loss_fn: LossFn) -> LossFn:
    """A loss of rows, all of which are examples."""
    return wrapped(lambda loss_fn: lambda params, row: loss_fn(params, _unpacked(row)[0]), loss_fn)


def _unpacked(row: Any) -> tuple[Any, Any]:
    """The example, with its key where the row has one beside it (`dpopt.example_keys`), and the canary's number."""
    if isinstance(row, Row):
        return row.example, row.canary
    row, key = row
    return (row.example, key), row.canary


def loss_change(loss_fn: LossFn, before: Any, after: Any, examples: Any) -> jax.Array:
    """By how much each example's loss has fallen, ``(m,)``; for `dpopt.federated.Clients` a client's mean loss.

    >>> loss_change(lambda w, x: (w - x) ** 2, 0.0, 1.0, jnp.array([1.0, 2.0])).tolist()
    [1.0, 3.0]
    """

    def fall(example: Any) -> jax.Array:
        was, is_now = loss_fn(before, example), loss_fn(after, example)
        return was[0] - is_now[0] if isinstance(was, tuple) else was - is_now

    def one(example: Any) -> jax.Array:
        if not isinstance(example, Clients):
            return fall(example)
        counts = example.example_mask
        return jnp.sum(jnp.where(counts, jax.vmap(fall)(example.data), 0)) / jnp.maximum(jnp.sum(counts), 1)

    return jax.jit(lambda examples: jax.lax.map(one, examples, batch_size=64))(examples)
