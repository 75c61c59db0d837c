"""How a hook (hooks.py) gets to see a contact's cotangent, and the whole batch's at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def watched(hook: Any, run: Callable, values: list, at: int | None, backward: Callable) -> jax.Array:
    """``run(*values)``, whose backward pass also gives the hook its cotangent, ``backward(hook, x, y)``.

    ``at``: which of the values depends on the example, x; None where the only one is the weight itself.
    """

    @jax.custom_vjp
    def inner(hook, values):
        del hook
        return run(*values)

    def forward(hook, values):
        return run(*values), (hook, values)

    def back(saved, y):
        hook, values = saved
        cotangents: list = [None] * len(values)
        if at is None:
            return backward(hook, None, y), cotangents
        x = values[at]
        if jnp.issubdtype(x.dtype, jnp.inexact):
            before, after = values[:at], values[at + 1 :]
            (cotangents[at],) = jax.vjp(lambda x: run(*before, x, *after), x)[1](y)
        return backward(hook, x, y), cotangents

    inner.defvjp(forward, back)
    return inner(hook, values)


def batched(of_one: Callable, of_batch: Callable, is_per_example: Any) -> Callable:
    """``of_one(*rows, shared)``, or ``of_batch`` of all rows at once where the engine maps it over the batch.

    What is not per example (a prefix of the output says so) is the batch's own: the engine's ``vmap`` returns it as it
    is.
    """

    @jax.custom_batching.custom_vmap
    def function(rows, shared):
        return of_one(*rows, shared)

    @function.def_vmap
    def _(size, are_mapped, rows, shared):
        def filled(x, is_mapped):
            return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))

        out = of_batch(*jax.tree.map(filled, rows, are_mapped[0]), shared)
        return out, jax.tree.map(lambda own, part: jax.tree.map(lambda _: own, part), is_per_example, out)

    return function
