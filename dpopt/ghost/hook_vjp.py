"""Custom differentiation and batching rules that give a hook (hooks.py) a contact's cotangents, for the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from dpopt.common.types import PyTree

_Hook = TypeVar("_Hook")


def with_hook(
    hook: _Hook,
    run: Callable[..., jax.Array],
    values: list[jax.Array],
    at: int | None,
    backward: Callable[[_Hook, jax.Array | None, jax.Array], _Hook],
) -> jax.Array:
    """``run(*values)``, whose backward pass also computes the hook's cotangent, ``backward(hook, x, y)``.

    ``at``: the index of the value that depends on the example, x; None if the only value is the weight itself.
    """

    @jax.custom_vjp
    def inner(hook: _Hook, values: list[jax.Array]) -> jax.Array:
        del hook
        return run(*values)

    def forward(hook: _Hook, values: list[jax.Array]) -> tuple[jax.Array, tuple[_Hook, list[jax.Array]]]:
        return run(*values), (hook, values)

    def back(saved: tuple[_Hook, list[jax.Array]], y: jax.Array) -> tuple[_Hook, list[jax.Array | None]]:
        hook, values = saved
        cotangents: list[jax.Array | None] = [None] * len(values)
        if at is None:
            return backward(hook, None, y), cotangents
        x = values[at]
        if jnp.issubdtype(x.dtype, jnp.inexact):
            before, after = values[:at], values[at + 1 :]
            (cotangents[at],) = jax.vjp(lambda x: run(*before, x, *after), x)[1](y)
        return backward(hook, x, y), cotangents

    inner.defvjp(forward, back)
    return inner(hook, values)


def batched(of_batch: Callable[..., tuple[jax.Array, PyTree]]) -> Callable[..., tuple[jax.Array, PyTree]]:
    """``of_batch(rows, shared)`` for one example's rows, or for all at once where the engine maps it over the batch.

    The first result is per example. The second belongs to the whole batch, and ``vmap`` returns it unchanged.
    """

    @jax.custom_batching.custom_vmap
    def function(rows: PyTree, shared: PyTree) -> tuple[jax.Array, PyTree]:
        each, total = of_batch(jax.tree.map(lambda x: x[None], rows), shared)
        return each[0], total

    @function.def_vmap
    def _(size: int, are_mapped: PyTree, rows: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
        def filled(x: jax.Array, is_mapped: bool) -> jax.Array:
            return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))

        each, total = of_batch(jax.tree.map(filled, rows, are_mapped[0]), shared)
        return (each, total), (True, jax.tree.map(lambda _: False, total))

    return function
