"""Hooks: computations at a contact during the backward pass, so that nothing has to be recorded.

A hook has inputs, its slots, that the forward pass ignores. Its results (the norms of the examples' gradients, or their
weighted sum) are the cotangents of the slots, so autodiff carries them out of scans and rematerialised blocks. The
engine maps over examples by ``vmap``; `hook_vjp.batched` gives a hook all examples at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from dpopt.common.trees import per_example
from dpopt.engines import rounding, sums
from dpopt.engines.norms import safe_norm, shrink_to
from dpopt.engines.rare_branch import if_any
from dpopt.ghost import contacts, quick_sums
from dpopt.ghost.chunks import in_chunks, join_rows, split_rows, together
from dpopt.ghost.hook_vjp import batched, with_hook
from dpopt.ghost.large_sums import is_large, large_sum
from dpopt.ghost.methods import EXPLICIT, AtContact
from dpopt.ghost.rows import tf32
from dpopt.ghost.selection import selected
from dpopt.ghost.squares import largest, tiny, to_one
from dpopt.ghost.values import Contact, Hook

_STATIC = {"static": True}
_Rows = tuple[jax.Array | None, jax.Array, jax.Array]  # inputs, cotangents and coefficients
_Results = tuple[jax.Array, sums.Sum]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Hook(Hook):
    """What both hooks have in common. Layers of a weight that no loop slices count as steps."""

    # (*steps, 3) zeros: an upper and a lower bound on the norm of each step's gradient, and
    # `contacts.largest_of_other_factor`
    bounds: jax.Array
    total: sums.Sum  # zeros like the weight, at least float32; the sum is over the whole batch
    diagonal: jax.Array | None  # (*steps, *weight): multiplies the gradient before the norm, not in the sum
    method: AtContact = dataclasses.field(metadata=_STATIC)
    chunk: int = dataclasses.field(metadata=_STATIC)  # examples at a time
    tiny: float = dataclasses.field(metadata=_STATIC)  # of `Trace.narrowest`
    spare: float = dataclasses.field(metadata=_STATIC)  # of `Plan.spare_bytes`
    is_quick: bool = dataclasses.field(metadata=_STATIC)  # whether norm and sum are those of quick_sums.py
    coefficient: jax.Array | None = None  # (): this example's; 0 excludes it, whatever it contains

    slot_axes = (0, None)  # of the slots' cotangents: whether they have a batch axis

    @property
    def slots(self) -> _Results:
        """The inputs whose cotangents are the hook's results."""
        return self.bounds, self.total

    def results(self, contact: Contact, rows: _Rows, shared: Any) -> _Results:
        """Bounds, ``[B, *steps, 3]``, and the total of a batch; ``shared`` is the hook with what all examples share."""
        raise NotImplementedError

    def attach(
        self, contact: Contact, run: Callable[..., jax.Array], values: list[jax.Array], at: int | None
    ) -> jax.Array:
        def backward(hook: _Hook, x: jax.Array | None, y: jax.Array) -> _Hook:
            if self.is_quick:
                x, y = tf32(cast(jax.Array, x)), tf32(y)
            shared = dataclasses.replace(hook, bounds=None, total=None, coefficient=None)
            bounds, total = batched(functools.partial(self.results, contact))((x, y, hook.coefficient), shared)
            return dataclasses.replace(jax.tree.map(lambda _: None, hook), bounds=bounds, total=total)

        return with_hook(self, run, values, at, backward)

    def nothing(self, size: int) -> _Results:
        """The results of a batch in which no example counts."""
        bounds = jnp.zeros((size, *self.bounds.shape), self.bounds.dtype)
        return bounds, jax.tree.map(jnp.zeros_like, self.total)

    def norms(self, contact: Contact, x: jax.Array | None, y: jax.Array, diagonal: jax.Array | None) -> jax.Array:
        """The bounds of a batch, computed for a chunk of examples at a time."""

        def of_one(rows: tuple[jax.Array | None, jax.Array]) -> jax.Array:
            def of_layer(y: jax.Array, diagonal: jax.Array | None) -> jax.Array:
                return jnp.stack(_norm_of_one(contact, self, rows[0], y, diagonal)).astype(self.bounds.dtype)

            # A weight that no loop slices has all its layers in one gradient; then there is no input.
            return jax.vmap(of_layer)(rows[1], diagonal) if self.bounds.ndim > 1 else of_layer(rows[1], diagonal)

        return in_chunks(jax.vmap(of_one), (x, y), y.shape[0], self.chunk)

    def added(self, contact: Contact, x: jax.Array | None, y: jax.Array, c: jax.Array) -> sums.Sum:
        """The sum of a batch's gradients, weighted by ``c``."""

        def one_block(rows: tuple[Any, jax.Array], c: jax.Array) -> jax.Array:
            x, y = (selected(c != 0, z) for z in rows)
            return contacts.sum_of_factors(contact, x, y, c, self.is_quick)

        use = contact, contacts.Seen(x, y)
        if is_large([use], len(c)):
            total = large_sum([use], c, None, self.spare)
        else:
            one_group = functools.partial(sums.in_blocks, one_block)
            total = sums.over_examples(one_group, (x, y), c, may_stack=contacts.may_stack(contact))
        total = total if self.total.remainder is None else sums.paired(total)  # the sum of a single example is not
        return jax.tree.map(lambda x, like: x.astype(like.dtype), total, self.total)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoPassHook(_Hook):
    """Computes the norms of a contact's gradients, or their sum.

    The choice is made at run time, so that one program does both (streamed.py)."""

    adds_up: jax.Array | None  # () bool
    group: int = dataclasses.field(metadata=_STATIC)  # index of this parameter's coefficient

    def filled(self, slots: _Results, keep: jax.Array, coefficients: Sequence[jax.Array]) -> TwoPassHook:
        """The hook with these slots, for an example that counts unless ``keep`` is 0."""
        del keep
        return dataclasses.replace(self, bounds=slots[0], total=slots[1], coefficient=coefficients[self.group])

    def split(self) -> tuple[TwoPassHook, Callable[[TwoPassHook], TwoPassHook]]:
        # Each step has its own weight: otherwise steps have cross terms, and the contact is recorded.
        same = {"adds_up": self.adds_up, "coefficient": self.coefficient}
        sliced = dataclasses.replace(self, adds_up=None, coefficient=None)
        return sliced, lambda own: dataclasses.replace(own, **same)

    def results(self, contact: Contact, rows: _Rows, shared: TwoPassHook) -> _Results:
        x, y, c = rows
        return lax.cond(
            cast(jax.Array, shared.adds_up),
            lambda: (self.nothing(len(c))[0], self.added(contact, x, y, c)),
            lambda: (self.norms(contact, x, y, shared.diagonal), self.nothing(len(c))[1]),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipHook(_Hook):
    """Computes the norms of a contact's gradients, clips by them and adds up.

    For a parameter, or a loop step's part of one, whose coefficient depends on its own norm alone."""

    limit: jax.Array  # (*steps,), like bounds: the clip norm

    def filled(self, slots: _Results, keep: jax.Array, coefficients: Sequence[jax.Array]) -> ClipHook:
        del coefficients
        return dataclasses.replace(self, bounds=slots[0], total=slots[1], coefficient=keep)

    def split(self) -> tuple[ClipHook, Callable[[ClipHook], ClipHook]]:
        sliced = dataclasses.replace(self, coefficient=None)
        return sliced, lambda own: dataclasses.replace(own, coefficient=self.coefficient)

    def results(self, contact: Contact, rows: _Rows, shared: ClipHook) -> _Results:
        keep, nothing = rows[-1], self.nothing(len(rows[-1]))
        # A conditional materialises its inputs: norms and sums use the same bits.
        clipped = functools.partial(_clipped, contact, self, rows, shared.limit, shared.diagonal)
        return lax.cond(jnp.any(keep > 0), clipped, lambda: nothing)


Hooks = Mapping[Contact, TwoPassHook | ClipHook]


def _clipped(contact: Contact, hook: ClipHook, rows: _Rows, limit: jax.Array, diagonal: jax.Array | None) -> _Results:
    """Bounds and the clipped sum."""
    x, y, keep = rows
    if hook.method is EXPLICIT and contact.factors is not None and len(keep) <= rounding.ROWS:
        return _clipped_as_formed(contact, hook, rows, limit, diagonal)
    bounds = hook.norms(contact, x, y, diagonal)
    upper = bounds[..., 0]
    c = jnp.where((per_example(keep, upper) > 0) & jnp.isfinite(upper), shrink_to(limit[None], upper), 0)
    lost = contacts.lost_to_weighing(contact, bounds[..., 2], len(keep))
    c = jnp.where(contacts.can_weigh(c, limit[None], lost * _gain(hook, contact, diagonal), hook.tiny), c, 0)
    return bounds, hook.added(contact, x, y, c)


def _gain(hook: ClipHook, contact: Contact, diagonal: jax.Array | None) -> jax.Array:
    """The norm of the diagonal, for each step: a bound on how far an error of 1 in every entry moves the norm."""
    layers = hook.bounds.shape[:-1]
    if diagonal is None:
        return jnp.array((math.prod(contact.weight.shape) / math.prod(layers)) ** 0.5)
    return safe_norm(jnp.broadcast_to(diagonal, contact.weight.shape).reshape(*layers, -1), axis=-1)


def _clipped_as_formed(
    contact: Contact, hook: ClipHook, rows: _Rows, limit: jax.Array, diagonal: jax.Array | None
) -> _Results:
    """`_clipped` from gradients formed once; for batches that floats can add up.

    Norm and sum are computed from the same numbers, so rounding errors of these do not matter."""
    size = len(rows[-1])
    diagonal = None if diagonal is None else contact.fold(diagonal)

    def of_chunk(x: jax.Array | None, y: jax.Array, keep: jax.Array) -> tuple[jax.Array, jax.Array]:
        formed = jax.vmap(lambda x, y: contacts.form(contact, contacts.Seen(x, y), for_sum=True))(x, y)
        scaled = formed if diagonal is None else formed * diagonal[None]
        norm = safe_norm(scaled.reshape(len(keep), -1), axis=1)
        is_finite = jnp.isfinite(norm)
        fine = (keep > 0) & is_finite
        c, other = jnp.where(fine, shrink_to(limit[None], norm), 0), jnp.ones_like(norm)
        lost = contacts.lost_to_weighing(contact, other, size) * (1 if diagonal is None else largest(diagonal))
        c = jnp.where(contacts.can_weigh(c, limit[None], lost * formed[0].size ** 0.5, hook.tiny), c, 0)
        # Hardly ever: a selection copies all gradients of the chunk.
        formed = if_any(~is_finite, functools.partial(selected, is_finite), formed)
        total = contacts.sum_of_formed(contact, formed, c).astype(hook.total.value.dtype)
        return jnp.stack([norm, norm, other], axis=1).astype(hook.bounds.dtype), total

    chunk = together(size, hook.chunk)
    if chunk >= size:
        bounds, total = of_chunk(*rows)
    else:

        def step(total: jax.Array, rows: _Rows) -> tuple[jax.Array, jax.Array]:
            bounds, more = of_chunk(*rows)
            return total + more, bounds

        split = jax.tree.map(lambda x: split_rows(x, chunk), rows)
        total, bounds = lax.scan(step, jnp.zeros_like(hook.total.value), split)
        bounds = join_rows(bounds)
    rest = None if hook.total.remainder is None else jnp.zeros_like(hook.total.remainder)
    return bounds, sums.Sum(total, rest)


def _norm_of_one(
    contact: Contact, hook: _Hook, x: jax.Array | None, y: jax.Array, diagonal: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Upper and lower bounds on one example's norm at a contact, for one step; and `largest_of_other_factor`.

    The factors are first scaled to about 1, since squares that underflow or overflow are not computed again.
    """
    (x, x_unit), (y, y_unit) = to_one(x), to_one(y)
    terms = 1 if contact.factors is None else contact.factors.positions
    lost, unit = terms * tiny(y.dtype), jnp.ones(())
    if diagonal is not None:  # its entries are below 2 once scaled
        (diagonal, unit), lost = to_one(diagonal), 2 * lost
    square = contacts.square_of_one(contact, hook.method, contacts.Seen(x, y), diagonal, lost, hook.is_quick)
    upper, lower = (jnp.sqrt(s) for s in (square.value + square.missing, square.value))
    if hook.is_quick:
        upper = quick_sums.raised(upper, jnp.sqrt(cast(jax.Array, square.terms)))
    other = y_unit if x is not None and contacts.weighs_input(contact, x, y) else x_unit
    units = jnp.stack([x_unit, y_unit, unit.astype(y_unit.dtype)])
    # All powers of two at once: a product of some may underflow where that of all does not.
    power = jnp.sum(jnp.frexp(units)[1] - 1)
    is_zero = jnp.any(units == 0) & (lower == 0)  # not what may be missing from the square of zeros
    upper, lower = (jnp.where(is_zero, 0, jnp.ldexp(bound, power)) for bound in (upper, lower))
    return upper, lower, 2 * other
