"""The clipped sum: one forward, one backward to the taps, the norms, and a weighted sum.

    ``sum_i c_i (S g_i + o)``

where ``c_i`` depends on the norms of ``S g_i + o``. The batch's forward and backward passes are the
traced loss's own under ``vmap``, so examples cannot mix. By linearity the weighted sum is, at
every contact, the transposed primitive fed ``c_i y_i``: one ordinary kernel for the whole batch.

Nothing here looks at parameters' gradients of single examples unless the plan says that it is cheap,
or an example's gradient is not finite: then the batch is redone one example at a time (`_one_by_one`),
which is slow, rare, and the plain definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpopt.ghost import norms
from dpopt.ghost.plan import Explanation, LeafPlan, Plan, leaf_paths, make_plan, orientation
from dpopt.ghost.program import Contact, wide_dtype
from dpopt.ghost.trace import CannotFollow, trace_loss

_PRECISION = lax.Precision.HIGHEST


class GhostResult(NamedTuple):
    """What :func:`clipped_sum` returns. All but ``sum`` is per example, hence private."""

    sum: Any  # like params; at least float32
    leaf_norms: Any  # like params, leaves [B]; at least float32
    losses: jax.Array  # [B]
    aux: Any  # leaves [B, ...], or None
    ok: jax.Array  # [B] bool: unmasked, with a finite gradient


def plan_clipped_sum(
    loss_fn: Callable,
    params: Any,
    batch: Any,
    *,
    scale: Any = None,
    offset: Any = None,
    has_aux: bool = False,
) -> Plan:
    """Traces the loss and plans the norms; computes nothing. See :func:`clipped_sum` for arguments.

    ``plan.prefers_vmap`` tells whether plain per-example gradients should be faster.

    *Privacy*: Looks at shapes only.

    Raises:
      CannotFollow: the loss cannot be traced; the exception names the primitive.
    """
    for x in jax.tree.leaves(batch):
        if getattr(jax.typeof(x).sharding.mesh, "explicit_axes", ()):
            raise CannotFollow("sharding", "the batch has explicit mesh axes; use axis_types Auto")
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    sizes = {x.shape[0] for x in jax.tree.leaves(batch)}
    if len(sizes) != 1:
        raise ValueError(f"every leaf of batch needs the same leading axis, got sizes {sorted(sizes)}")
    return _plan(loss_fn, params, example, sizes.pop(), scale, offset, has_aux)


def _plan(loss_fn, params, example, batch_size, scale, offset, has_aux) -> Plan:
    trace = trace_loss(loss_fn, params, example, has_aux)
    scales = _like(params, scale)
    scaled = [s is not None and s.size > 1 for s in scales]
    return make_plan(trace, batch_size, scaled, offset is not None, leaf_paths(params))


def explain(
    loss_fn: Callable,
    params: Any,
    example: Any,
    *,
    batch_size: int,
    scale: Any = None,
    has_aux: bool = False,
) -> Explanation:
    """Prints and returns how the ghost engine would clip this loss.

    Args:
      loss_fn: ``loss_fn(params, example) -> scalar``.
      params: pytree of arrays.
      example: one example; only shapes matter.
      batch_size: examples in a batch.
      scale: the pre-clip diagonal, if there is one.
      has_aux: whether ``loss_fn`` returns ``(scalar, aux)``.

    *Privacy*: Looks at shapes only; nothing private is read.

    >>> import jax.numpy as jnp
    >>> plan = explain(lambda w, x: (x @ w).sum(), jnp.ones((3, 2)), jnp.ones(3), batch_size=8)
    parameter  shape   contacts     norm      operations  extra bytes
               (3, 2)  dot_general  rank_one  1.3e+03     0
    <BLANKLINE>
    batch of 8: an ordinary gradient takes 2.9e+02 operations, ghost 5.44 times as many, vmap 17.00 times (memory traffic included)
    engine='auto' would take ghost
    """  # noqa: E501
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), example)
    explanation = Explanation(_plan(loss_fn, params, example, batch_size, scale, None, has_aux))
    print(explanation)
    return explanation


def clipped_sum(
    loss_fn: Callable,
    params: Any,
    batch: Any,
    *,
    coefficients: Callable[[Any], Any],
    mask: jax.Array | None = None,
    scale: Any = None,
    offset: Any = None,
    has_aux: bool = False,
    plan: Plan | None = None,
) -> GhostResult:
    """Sum over examples of ``c_i (S g_i + o)``, without forming the gradients ``g_i``.

    Args:
      loss_fn: ``loss_fn(params, example) -> scalar``, or ``(scalar, aux)`` with ``has_aux``.
      params: pytree of arrays.
      batch: pytree whose leaves have a leading axis of B examples.
      coefficients: maps per-example norms (like params, leaves ``[B]``) to clip coefficients (like
        params, leaves ``[B]``). Returning one array for several parameters saves work.
      mask: ``[B]`` bool; a False example contributes exactly zero.
      scale: S, like params, each leaf of a shape that broadcasts to its parameter's.
      offset: o, likewise.
      has_aux: whether ``loss_fn`` also returns auxiliary data.
      plan: a plan from :func:`plan_clipped_sum` for the same arguments, to save a second trace.

    Returns:
      A :class:`GhostResult`.

    *Privacy*: ``sum`` has the sensitivity that ``coefficients`` enforces: every example enters through its
      own ``c_i`` and one whose gradient is not finite contributes zero. Nothing here is noised;
      norms, losses and aux are per example and must not be released.

    Raises:
      CannotFollow: the loss cannot be traced; raised before anything is computed.

    >>> import jax.numpy as jnp
    >>> clip = lambda norm: jnp.minimum(1.0, 1.0 / norm)
    >>> loss = lambda w, x: (x @ w) ** 2 / 2
    >>> result = clipped_sum(loss, jnp.ones(2), jnp.eye(2) * 3, coefficients=clip)
    >>> result.sum, result.leaf_norms
    (Array([1., 1.], dtype=float32), Array([9., 9.], dtype=float32))
    """
    if plan is None:
        plan = plan_clipped_sum(loss_fn, params, batch, scale=scale, offset=offset, has_aux=has_aux)
    leaves, tree = jax.tree.flatten(params)
    mask = jnp.ones(plan.batch_size, bool) if mask is None else jnp.asarray(mask, bool)
    batch = _finite_padding(batch, mask)
    run = _Run(plan, leaves, _like(params, scale), _like(params, offset))
    losses, aux, xs, ys = run.passes(jax.tree.leaves(batch))
    leaf_norms, kept = run.norms(xs, ys)

    def weigh(leaf_norms):
        given = coefficients(jax.tree.unflatten(tree, leaf_norms))
        masked: dict[int, jax.Array] = {}  # one array per distinct coefficient: sums are shared
        return [masked.setdefault(id(c), jnp.where(mask, c, 0)) for c in tree.flatten_up_to(given)]

    total = run.weighted_sum(weigh(leaf_norms), xs, ys, kept)
    finite = jnp.all(jnp.stack([jnp.isfinite(n) for n in leaf_norms] or [mask]))
    init = (finite, total, leaf_norms, mask)

    def redo(_):
        slow = _one_by_one(loss_fn, params, batch, mask, run, weigh, has_aux)
        return (jnp.array(True), *slow)

    # Ordinarily zero iterations. A loop rather than `cond`, which under vmap would run both sides; outside `jit`, where
    # the loop would be compiled at every call, Python looks for itself.
    if isinstance(finite, jax.core.Tracer):
        _, total, leaf_norms, ok = lax.while_loop(lambda state: ~state[0], redo, init)
    else:
        _, total, leaf_norms, ok = init if bool(finite) else redo(init)
    aux = jax.tree.unflatten(plan.trace.aux_tree, aux) if has_aux else None
    return GhostResult(jax.tree.unflatten(tree, total), jax.tree.unflatten(tree, leaf_norms), losses, aux, ok)


def _like(params: Any, tree: Any) -> list:
    """Leaves of an optional pytree that has the structure of ``params``."""
    leaves, structure = jax.tree.flatten(params)
    if tree is None:
        return [None] * len(leaves)

    def shaped(x, p):  # a mere number stays one: it costs less than a diagonal
        x = jnp.asarray(x, wide_dtype(p.dtype))
        return x.reshape(()) if x.size == 1 and p.size > 1 else jnp.broadcast_to(x, p.shape)

    return [shaped(x, p) for x, p in zip(structure.flatten_up_to(tree), leaves, strict=True)]


def _finite_padding(batch: Any, mask: jax.Array) -> Any:
    """Zeroes NaN and Inf in masked examples, lest harmless padding take the slow path."""

    def clean(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        keep = mask.reshape(-1, *[1] * (x.ndim - 1)) | jnp.isfinite(x)
        return jnp.where(keep, x, 0)

    return jax.tree.map(clean, batch)


class _Run:
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
        kept = {c: jax.vmap(lambda x, y, c=c: _form(c, x, y))(xs[c], ys[c]) for c in self.plan.kept}
        squares: list[Any] = [None] * len(self.leaves)
        for leaf_plan in self.plan.leaves:
            if leaf_plan.method != "pulled_back":
                squares[leaf_plan.leaf] = self._squared_norm(leaf_plan, xs, ys, kept)
        for contacts, leaves in self.plan.pulled_back:
            for leaf, square in zip(leaves, self._pulled(contacts, leaves, xs, ys, kept), strict=True):
                squares[leaf] = square
        return [jnp.sqrt(s) for s in squares], kept

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
                uses = zip([c.factors for c in contacts], turned, xs, ys, strict=True)
                return norms.shared_gram(list(uses))

            square = jax.vmap(shared)([xs[c] for c in contacts], [ys[c] for c in contacts])
        else:
            (contact,) = contacts
            diagonal = None
            if (scale is not None and number is None) or not contact.weight.entry.copy:
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


def _in_chunks(function: Callable, inputs: Any, batch_size: int, chunk: int) -> Any:
    """``function`` of a batch, ``chunk`` examples at a time, so that what it forms stays small.

    Examples i, i + n, i + 2n... make a chunk: with a batch sharded over devices each holds its share.
    """
    if chunk >= batch_size:
        return function(inputs)
    steps = batch_size // chunk

    def split(x):
        return jnp.swapaxes(x.reshape(chunk, steps, *x.shape[1:]), 0, 1)

    out = lax.map(function, jax.tree.map(split, inputs))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(batch_size), out)


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
    if contact.factors is None:
        return jnp.sum(weighted, axis=0)
    batched = jax.vmap(contact.apply, in_axes=(None, 0))
    shape = _weight_shape(contact)
    out = jax.eval_shape(batched, shape, x)
    (g,) = jax.linear_transpose(lambda w: batched(w, x), shape)(weighted.astype(out.dtype))
    return g


def _inner(contact: Contact, direction: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """``<G, direction>`` for one example, without G."""
    out = direction if contact.factors is None else contact.apply(direction, x)
    return jnp.sum(out * y.astype(out.dtype))


def _one_by_one(loss_fn, params, batch, mask, run: _Run, weigh: Callable, has_aux: bool):
    """The plain definition, one example at a time: sum, norms, and which examples counted.

    Taken when some norm is not finite. It tells a gradient that is not finite (contributes zero)
    from one whose squares overflow (clipped as usual: its norm is computed relative to its largest
    entry). Two sweeps of one loop, the first for the norms and the second for the sum, so that the
    loss is compiled once.
    """

    def gradient(example):
        g = jax.grad(loss_fn, has_aux=has_aux)(params, example)
        g = jax.tree.leaves(g[0] if has_aux else g)
        return [run._affine(i, x.astype(w.dtype)) for i, (x, w) in enumerate(zip(g, run.wide, strict=True))]

    def norm(g):
        largest = jnp.max(jnp.abs(g), initial=0)
        safe = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
        return jnp.sqrt(jnp.sum(jnp.square(g / safe))) * safe

    def visit(total, inputs):
        example, c, keep = inputs
        g = gradient(example)
        keep &= jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in g]))
        total = [t + jnp.where(keep, x * w, 0) for t, x, w in zip(total, g, c, strict=True)]
        return total, ([norm(x) for x in g], keep)

    def sweep(state, _):
        _, leaf_norms, _ = state
        zeros = [jnp.zeros(x.shape, x.dtype) for x in run.wide]
        total, (leaf_norms, ok) = lax.scan(visit, zeros, (batch, weigh(leaf_norms), mask))
        return (total, leaf_norms, ok), None

    zeros = [jnp.zeros(x.shape, x.dtype) for x in run.wide]
    start = (zeros, [jnp.zeros(mask.shape, x.dtype) for x in run.wide], mask)
    return lax.scan(sweep, start, length=2)[0]
