"""Hooks: what is computed at a contact where its cotangent comes by, so that nothing is recorded.

A hook is an input that the forward pass ignores. What it asks for (the norms of the examples' gradients, or their
weighted sum) leaves the backward pass as that input's cotangent, so autodiff carries it out of scans and rematerialised
blocks by itself. The engine maps examples by ``vmap``, through which `_batched` sees all of them at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpopt.ghost.chunks import in_chunks
from dpopt.ghost.contacts import square_of_one, transposed
from dpopt.ghost.selection import selected
from dpopt.ghost.squares import tiny, to_one
from dpopt.ghost.values import Contact


def _hook(*, static: Sequence[str] = ()) -> Callable:
    """A frozen dataclass that is a pytree, all but its ``static`` fields."""

    def register(cls: type) -> type:
        cls = dataclasses.dataclass(frozen=True)(cls)
        arrays = [f.name for f in dataclasses.fields(cls) if f.name not in static]
        return jax.tree_util.register_dataclass(cls, data_fields=arrays, meta_fields=list(static))

    return register


@_hook(static=("method", "chunk"))
class NormHook:
    """Takes the norms of a contact's gradients on the way: the cotangent of ``bounds``."""

    bounds: jax.Array  # (*steps, 2) zeros: an upper and a lower bound on the norm of each step's gradient
    diagonal: jax.Array | None  # (*steps, *weight): multiplies the gradient first
    method: str
    chunk: int  # examples at a time

    def split(self, is_mapped: bool) -> tuple[NormHook, Callable]:
        """What each step of a loop gets of it, and how its own is made of that.

        (The weight is each step's own, ``is_mapped``: else steps have cross terms, and the contact is recorded.)"""
        del is_mapped
        return self, lambda own: own

    def attach(self, contact: Contact, run: Callable, values: list, at: int | None) -> jax.Array:
        """The contact's output, watched; see `_watched`."""

        def taken(x, y, diagonal):
            bounds = _norm_of_one(contact, self.method, x, y, diagonal)
            return jnp.stack(bounds).astype(self.bounds.dtype)

        def of_batch(x, y, diagonal):
            several = jax.vmap(lambda rows: taken(*rows, diagonal))
            return in_chunks(several, (x, y), y.shape[0], self.chunk)

        def backward(hook, x, y):
            bounds = _batched(taken, of_batch, True)((x, y), hook.diagonal)
            return dataclasses.replace(hook, bounds=bounds, diagonal=None)

        return _watched(self, run, values, at, backward)


@_hook()
class SumHook:
    """Adds up a contact's gradients on the way: the cotangents of ``totals``, of the whole batch together."""

    totals: list[jax.Array]  # zeros, like the weight, at least float32; several where its parameters' clips differ
    coefficients: list[jax.Array]  # (): this example's, for each; 0 leaves it out, whatever it holds

    def split(self, is_mapped: bool) -> tuple[Any, Callable]:
        """What each step of a loop gets of it, and how its own is made of that."""
        if is_mapped:
            return self.totals, lambda totals: SumHook(totals, self.coefficients)
        return None, lambda _: self

    def attach(self, contact: Contact, run: Callable, values: list, at: int | None) -> jax.Array:
        """The contact's output, watched; see `_watched`."""

        def of_batch(x, y, coefficients, _):
            return [
                transposed(contact, selected(c != 0, x), selected(c != 0, y), c).astype(t.dtype)
                for c, t in zip(coefficients, self.totals, strict=True)
            ]

        def of_one(x, y, coefficients, _):
            return of_batch(*jax.tree.map(lambda z: z[None], (x, y, coefficients)), None)

        def backward(hook, x, y):
            totals = _batched(of_one, of_batch, False)((x, y, hook.coefficients), None)
            return SumHook(totals, [None] * len(totals))

        return _watched(self, run, values, at, backward)


def _watched(hook: Any, run: Callable, values: list, at: int | None, backward: Callable) -> jax.Array:
    """``run(*values)``, whose backward pass also gives the hook its cotangent, ``backward(hook, x, y)``.

    ``at``: which of the values depends on the example, x; None where the only one is the weight itself.
    """

    @jax.custom_vjp
    def watched(hook, values):
        del hook
        return run(*values)

    def forward(hook, values):
        return run(*values), (hook, values)

    def back(saved, y):
        hook, values = saved
        x = None if at is None else values[at]
        cotangents: list = [None] * len(values)
        if at is not None and jnp.issubdtype(x.dtype, jnp.inexact):
            of_x = lambda x: run(*values[:at], x, *values[at + 1 :])  # noqa: E731
            (cotangents[at],) = jax.vjp(of_x, x)[1](y)
        return backward(hook, x, y), cotangents

    watched.defvjp(forward, back)
    return watched(hook, values)


def _batched(of_one: Callable, of_batch: Callable, is_per_example: bool) -> Callable:
    """``of_one(*rows, shared)``, or ``of_batch`` of all rows at once where the engine maps it over the batch.

    What is not per example is the batch's own: the engine's ``vmap`` returns it as it is.
    """

    @jax.custom_batching.custom_vmap
    def function(rows, shared):
        return of_one(*rows, shared)

    @function.def_vmap
    def _(size, are_mapped, rows, shared):
        def filled(x, is_mapped):
            return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))

        out = of_batch(*jax.tree.map(filled, rows, are_mapped[0]), shared)
        return out, jax.tree.map(lambda _: is_per_example, out)

    return function


def _norm_of_one(contact: Contact, method: str, x: Any, y: jax.Array, diagonal: Any) -> tuple[jax.Array, jax.Array]:
    """Upper and lower bounds on the norm of one example's gradient at a contact, of one step.

    The factors are scaled to 1 first, since there is no second look at squares that vanish or overflow.
    """
    (x, x_unit), (y, y_unit) = to_one(x), to_one(y)
    terms = 1 if contact.factors is None else contact.factors.positions
    lost, unit = terms * tiny(y.dtype), jnp.ones(())
    if diagonal is not None:  # its entries are below 2 then
        (diagonal, unit), lost = to_one(diagonal), 2 * lost
    square = square_of_one(contact, method, x, y, diagonal, lost)
    roots = (jnp.sqrt(s) for s in (square.value + square.missing, square.value))
    return tuple(unit * (y_unit * (x_unit * root)) for root in roots)
