"""One batch through the plan: the passes with taps, the norms at the contacts, and the weighted sum.

Nothing here forms the gradients of single examples unless the plan says that it is cheap, or some norm is not finite:
then they are formed one at a time from what the passes recorded (`Run.one_by_one`), which is slow and rare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from dpopt._norms import safe_norm
from dpopt.ghost import norms
from dpopt.ghost.canonical import channels_last
from dpopt.ghost.plan import LeafPlan, Plan, orientation
from dpopt.ghost.program import Contact, Entry, wide_dtype

_PRECISION = lax.Precision.HIGHEST


class Run:
    """One batch: the plan together with the arrays it is run on."""

    def __init__(self, plan: Plan, leaves: list, scales: list, offsets: list):
        self.plan, self.trace, self.leaves = plan, plan.trace, leaves
        self.scales, self.offsets = scales, offsets
        self.wide = [x.astype(wide_dtype(x.dtype)) if v.leaves else x
                     for x, v in zip(leaves, self.trace.leaves, strict=True)]  # fmt: skip

    def passes(self, batch: Sequence[jax.Array]):
        """Losses, aux, and per contact the recorded input x and the tap's cotangent y, all [B, ...]."""
        static = self.trace.run_prologue(self.leaves)

        def one(example):
            def loss(taps):
                value, aux, recorded = self.trace.run_body(static, example, taps)
                return value, (aux, recorded)

            taps = [jnp.zeros(c.tap_shape, c.tap_dtype) for c in self.trace.contacts]
            (value, (aux, recorded)), cotangents = jax.value_and_grad(loss, has_aux=True)(taps)
            return value, aux, recorded, cotangents

        losses, aux, xs, ys = jax.vmap(one, axis_size=self.plan.batch_size)(batch)
        contacts = self.trace.contacts
        return losses, aux, dict(zip(contacts, xs, strict=True)), dict(zip(contacts, ys, strict=True))

    def norms(self, xs: dict, ys: dict) -> tuple[list[jax.Array], dict[Contact, list[jax.Array]]]:
        """Per-example norms of ``S g + o`` per parameter, and the gradients that were kept."""
        kept = {c: self._kept(c, xs[c], ys[c]) for c in self.plan.kept}
        squares: list[Any] = [None] * len(self.leaves)
        for leaf_plan in self.plan.leaves:
            if leaf_plan.method != "pulled_back":
                squares[leaf_plan.leaf] = self._squared_norm(leaf_plan, xs, ys, kept)
        for contacts, leaves in self.plan.pulled_back:
            for leaf, square in zip(leaves, self._pulled(contacts, leaves, xs, ys, kept), strict=True):
                squares[leaf] = square
        return [jnp.sqrt(s) for s in squares], kept

    def _kept(self, contact: Contact, x: jax.Array, y: jax.Array) -> Any:
        form = jax.vmap(lambda inputs: _form(contact, *inputs))
        if contact.factors is None or contact.factors.shape[0] == 1:  # the input is read as it lies
            return form((x, y))
        return _in_chunks(form, (x, y), self.plan.batch_size, self.plan.chunk([contact]))

    def _pulled(self, contacts, leaves, xs, ys, kept) -> list[jax.Array]:
        """Squared norms of gradients formed at their contacts and pulled back, some examples at a time."""

        def one(inputs):
            formed = [_unfold(c, f if c in kept else _form(c, *f)) for c, f in zip(contacts, inputs, strict=True)]
            gradients = self._pull_back(contacts, formed, leaves)
            return [norms.sum_squares(self._affine(i, g)) for i, g in zip(leaves, gradients, strict=True)]

        inputs = [kept[c] if c in kept else (xs[c], ys[c]) for c in contacts]
        return _in_chunks(jax.vmap(one), inputs, self.plan.batch_size, self.plan.chunk(contacts))

    def _affine(self, leaf: int, gradient: jax.Array) -> jax.Array:
        """``S g + o`` for one parameter and one gradient."""
        scale, offset = self.scales[leaf], self.offsets[leaf]
        gradient = gradient if scale is None else gradient * scale
        return gradient if offset is None else gradient + offset

    def _squared_norm(self, leaf_plan: LeafPlan, xs, ys, kept) -> jax.Array:
        leaf, contacts, method = leaf_plan.leaf, leaf_plan.contacts, leaf_plan.method
        scale, offset = self.scales[leaf], self.offsets[leaf]
        shape = self.trace.leaves[leaf].shape
        number = scale if scale is not None and scale.size == 1 else None
        if method == "none":
            zero = jnp.zeros(shape, self.wide[leaf].dtype)
            square = norms.sum_squares(self._affine(leaf, zero))
            return jnp.broadcast_to(square, (self.plan.batch_size,))
        if method == "shared_gram":
            base = orientation(contacts[0])
            turned = [orientation(c) != base for c in contacts]

            def shared(xs, ys):
                uses = zip([cast(norms.Factors, c.factors) for c in contacts], turned, xs, ys, strict=True)
                return norms.shared_gram(list(uses))

            square = jax.vmap(shared)([xs[c] for c in contacts], [ys[c] for c in contacts])
        else:
            (contact,) = contacts
            diagonal = None
            if (scale is not None and number is None) or not cast(Entry, contact.weight.entry).copy:
                tangent = jnp.ones(shape, self.wide[leaf].dtype)
                if scale is not None and number is None:
                    tangent = tangent * scale
                diagonal = self._push(leaf, tangent, [contact])[0]
                if contact.factors is not None:
                    diagonal = contact.factors.fold(diagonal)
            if method == "explicit":
                square = self._formed_square(contact, diagonal, xs, ys, kept)
            else:
                one = norms.METHODS[method]
                square = jax.vmap(lambda x, y: one(contact.factors, x, y, diagonal))(xs[contact], ys[contact])
        if number is not None:
            square = square * jnp.square(number.reshape(()))
        if offset is not None:
            # |S g + o|^2 = |S g|^2 + 2 <g, S o> + |o|^2, and <g, S o> is a directional derivative.
            offset = jnp.broadcast_to(offset, shape)
            direction = offset if scale is None else offset * scale
            for c, v in zip(contacts, self._push(leaf, direction, contacts), strict=True):
                square = square + 2 * jax.vmap(lambda x, y, c=c, v=v: _inner(c, v, x, y))(xs[c], ys[c])
            square = jnp.maximum(square + norms.sum_squares(offset), 0)
        return square

    def _formed_square(self, contact: Contact, diagonal, xs, ys, kept) -> jax.Array:
        def one(f):
            formed = f if contact in kept else _form(contact, *f)
            if contact.factors is None:
                formed, scales = [formed], [diagonal]
            else:
                scales = [None] * len(formed) if diagonal is None else list(diagonal)
            parts = zip(formed, scales, strict=True)
            return sum(norms.sum_squares(g if s is None else g * s) for g, s in parts)

        inputs = kept[contact] if contact in kept else (xs[contact], ys[contact])
        return _in_chunks(jax.vmap(one), inputs, self.plan.batch_size, self.plan.chunk([contact]))

    def weighted_sum(self, weights: list, xs: dict, ys: dict, kept: dict) -> list[jax.Array]:
        """``sum_i c_i (S g_i + o)`` per parameter; ``weights`` holds c, zero for masked examples."""
        totals: list = [None] * len(weights)
        groups: dict[int, list[int]] = {}
        for leaf, c in enumerate(weights):
            groups.setdefault(id(c), []).append(leaf)
        for members in groups.values():
            c = weights[members[0]]
            mine = [k for k in self.trace.contacts if k.weight.leaves & set(members)]
            cotangents = [_combined(k, kept[k], c) if k in kept else _transposed(k, xs[k], ys[k], c) for k in mine]
            for leaf, g in zip(members, self._pull_back(mine, cotangents, members), strict=True):
                scale, offset = self.scales[leaf], self.offsets[leaf]
                g = g if scale is None else g * scale
                totals[leaf] = g if offset is None else g + jnp.sum(c) * offset
                totals[leaf] = totals[leaf].astype(self.wide[leaf].dtype)
        return totals

    def one_by_one(self, weigh: Callable, mask: jax.Array, xs: dict, ys: dict, kept: dict):
        """Sum, norms and which examples counted, from gradients formed one at a time.

        Tells a gradient that is not finite (contributes zero) from one whose squares overflow (clipped as usual: its
        norm is taken relative to its largest entry). Two sweeps of one loop, the first for the norms and the second
        for the sum, so that it is compiled once. As many examples as there are devices go together, so that each
        device visits its own share of a sharded batch.
        """
        contacts = self.trace.contacts
        together = math.gcd(self.plan.batch_size, jax.device_count())
        zeros = [jnp.zeros(x.shape, x.dtype) for x in self.wide]

        def gradient(recorded):
            # The primitives transposed: few operations, hence quick to compile.
            formed = [
                _unfold(c, r) if c in kept else _transposed(c, jax.tree.map(_alone, r[0]), _alone(r[1]), jnp.ones(1))
                for c, r in zip(contacts, recorded, strict=True)
            ]
            return [self._affine(i, g) for i, g in enumerate(self._pull_back(contacts, formed, range(len(zeros))))]

        def add(total, recorded, weights, keep):
            g = gradient(recorded)
            leaf_norms = [safe_norm(x.reshape(-1), axis=0) for x in g]
            keep &= jnp.all(jnp.isfinite(jnp.stack(leaf_norms)))
            total = [jnp.where(keep, t + x * c, t) for t, x, c in zip(total, g, weights, strict=True)]
            return total, (leaf_norms, keep)

        def add_several(total, inputs):
            parts, seen = jax.vmap(lambda rows: add(zeros, *rows))(inputs)
            return [t + jnp.sum(p, axis=0) for t, p in zip(total, parts, strict=True)], seen

        recorded = [kept[c] if c in kept else (xs[c], ys[c]) for c in contacts]

        def sweep(state, _):
            inputs = (recorded, weigh(state[1]), mask)
            if together == 1:
                total, seen = lax.scan(lambda total, rows: add(total, *rows), zeros, inputs)
            else:
                total, seen = lax.scan(add_several, zeros, jax.tree.map(lambda x: _split(x, together), inputs))
                seen = jax.tree.map(_joined, seen)
            return (total, *seen), None

        start = (zeros, [jnp.zeros(mask.shape, x.dtype) for x in self.wide], mask)
        return lax.scan(sweep, start, length=2)[0]

    def _weights(self, contacts: Sequence[Contact], leaves: Sequence[int]) -> Callable:
        """The contacts' weights as a function of some of the parameters."""

        def function(chosen):
            wide = list(self.wide)
            for leaf, x in zip(leaves, chosen, strict=True):
                wide[leaf] = x
            env = self.trace.run_prologue(wide, wide=True)
            return [env[c.weight] for c in contacts]

        return function

    def _pull_back(self, contacts: Sequence[Contact], cotangents: list, leaves: Sequence[int]) -> list:
        """Gradients with respect to the contacts' weights, taken to the parameters."""
        function = self._weights(contacts, leaves)
        values, pull = jax.vjp(function, [self.wide[i] for i in leaves])
        return pull([g.astype(v.dtype) for g, v in zip(cotangents, values, strict=True)])[0]

    def _push(self, leaf: int, tangent: jax.Array, contacts: Sequence[Contact]) -> list[jax.Array]:
        function = self._weights(contacts, [leaf])
        return jax.jvp(function, ([self.wide[leaf]],), ([tangent],))[1]


def _split(x: jax.Array, rows: int) -> jax.Array:
    """``[B, ...]`` to ``[B / rows, rows, ...]``.

    On several devices, of n = B / rows chunks one holds examples i, i + n, i + 2n...: each device finds its share of a
    sharded batch in every chunk. On one device that would be a copy for nothing.
    """
    chunks = x.shape[0] // rows
    if jax.device_count() == 1:
        return x.reshape(chunks, rows, *x.shape[1:])
    return jnp.swapaxes(x.reshape(rows, chunks, *x.shape[1:]), 0, 1)


def _joined(x: jax.Array) -> jax.Array:
    """The inverse of `_split`."""
    x = x if jax.device_count() == 1 else jnp.swapaxes(x, 0, 1)
    return x.reshape(-1, *x.shape[2:])


def _alone(x: jax.Array) -> jax.Array:
    """One example as a batch."""
    return x[None]


def _in_chunks(function: Callable, inputs: Any, batch_size: int, chunk: int) -> Any:
    """``function`` of a batch, ``chunk`` examples at a time, so that what it forms stays small."""
    if chunk >= batch_size:
        return function(inputs)
    return jax.tree.map(_joined, lax.map(function, jax.tree.map(lambda x: _split(x, chunk), inputs)))


def _form(contact: Contact, x: jax.Array, y: jax.Array) -> Any:
    """One example's gradient of a contact's weight: K folded arrays where there are factors."""
    if contact.factors is None:
        return y.astype(wide_dtype(y.dtype))
    return norms.explicit(contact.factors, x, y)


def _unfold(contact: Contact, gradient: Any) -> jax.Array:
    return gradient if contact.factors is None else contact.factors.unfold(jnp.stack(gradient))


def _combined(contact: Contact, formed: Any, c: jax.Array) -> jax.Array:
    """``sum_i c_i G_i`` at one contact, from the kept gradients."""
    weigh = lambda g: jnp.tensordot(c.astype(g.dtype), g, 1, precision=_PRECISION)  # noqa: E731
    return _unfold(contact, jax.tree.map(weigh, formed))


def _weight_shape(contact: Contact) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(contact.weight.shape, wide_dtype(contact.weight.dtype))


def _transposed(contact: Contact, x: jax.Array, y: jax.Array, c: jax.Array) -> jax.Array:
    """``sum_i c_i G_i`` at one contact: its primitive, linear in the weight, transposed."""
    weighted = y * c.reshape(-1, *[1] * (y.ndim - 1)).astype(wide_dtype(y.dtype))
    if contact.apply is None:
        return jnp.sum(weighted, axis=0)
    batched = jax.vmap(contact.apply, in_axes=(None, 0))
    shape = _weight_shape(contact)
    out = jax.eval_shape(batched, shape, x)
    transposed = jax.linear_transpose(lambda w: batched(w, x), shape)
    return channels_last(lambda y: transposed(y)[0])(weighted.astype(out.dtype))


def _inner(contact: Contact, direction: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """``<G, direction>`` for one example, without G."""
    out = direction if contact.apply is None else contact.apply(direction, x)
    return jnp.sum(out * y.astype(out.dtype))
