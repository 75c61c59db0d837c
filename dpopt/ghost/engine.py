"""The clipped sum: one forward pass, one backward pass to the taps, the norms, and a weighted sum.

    ``sum_i c_i (S g_i + o)``

where ``c_i`` depends on the norms of ``S g_i + o``. The forward and backward passes of the batch are those of the
traced loss under ``vmap``, so examples cannot mix. By linearity the weighted sum at a contact is the transposed
primitive applied to ``c_i y_i``: one ordinary kernel for the whole batch.

Where a norm is not finite, or not certain enough, that example's gradient is formed for its norm, which is slow and
rare.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from dpopt.common.trees import accumulator_dtype, at_once, per_example, structs
from dpopt.common.types import Batch, Example, LossFn, PyTree
from dpopt.engines.stacked import EngineResult
from dpopt.engines.sums import Sum
from dpopt.ghost import one_by_one, quick_sums, streamed
from dpopt.ghost.failures import planning
from dpopt.ghost.joined import joined
from dpopt.ghost.layers import is_by_layer
from dpopt.ghost.plan import Plan
from dpopt.ghost.planner import leaf_paths, make_plan
from dpopt.ghost.records import norms_in_place
from dpopt.ghost.run import Run
from dpopt.ghost.selection import finite, settled, without_bad_entries
from dpopt.ghost.trace import trace_loss
from dpopt.ghost.underflow import without_underflowing
from dpopt.ghost.weighted_sum import weighted_sum


def plan_clipped_sum(
    loss_fn: LossFn,
    params: PyTree,
    batch: Batch,
    *,
    scale: PyTree = None,
    offset: PyTree = None,
    has_aux: bool = False,
    layer_axes: Sequence[int] = (),
) -> Plan:
    """Traces the loss and plans the norms, without computing anything. See `clipped_sum` for arguments.

    ``plan.prefers_vmap`` is True if plain per-example gradients should be faster.

    *Privacy*: Reads shapes only.

    Raises:
        CannotFollow: the loss cannot be traced; the exception names the primitive.
    """
    example = structs(batch, 1)
    sizes = {x.shape[0] for x in jax.tree.leaves(batch)}
    if len(sizes) != 1:
        raise ValueError(f"all leaves of batch need the same leading axis; got sizes {sorted(sizes)}")
    return plan_example(loss_fn, params, example, sizes.pop(), scale, offset, has_aux, layer_axes)


def plan_example(
    loss_fn: LossFn, params: PyTree, example: Example, batch_size: int, scale: PyTree, offset: PyTree, has_aux: bool,
    layer_axes: Sequence[int] = (),
) -> Plan:  # fmt: skip
    """`plan_clipped_sum` from a single example, whose values are not read."""
    scaled = [s is not None and s.size > 1 for s in _like(params, scale)]

    def planned(tapped_by_layer: Collection[int]) -> Plan:
        trace = trace_loss(loss_fn, params, example, has_aux, tapped_by_layer)
        with planning():
            return make_plan(trace, batch_size, scaled, offset is not None, leaf_paths(params))

    plan = planned(())
    # A layer that its step changes, or uses more than once, has a gradient for each use; its norm is that of their sum.
    changed = [i for i, axes in enumerate(layer_axes) if axes and not is_by_layer(plan, i)]
    return planned(changed) if changed else plan


def clipped_sum(
    loss_fn: LossFn,
    params: PyTree,
    batch: Batch,
    *,
    coefficients: Callable[[PyTree], PyTree],
    mask: jax.Array | None = None,
    scale: PyTree = None,
    offset: PyTree = None,
    has_aux: bool = False,
    plan: Plan | None = None,
    limits: Sequence[Any] = (),
    layer_axes: Sequence[int] = (),
) -> EngineResult:
    """Sum over examples of ``c_i (S g_i + o)``, without forming the gradients ``g_i``.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``, or ``(scalar, aux)`` with ``has_aux``.
        params: pytree of arrays.
        batch: pytree whose leaves have a leading axis of B examples.
        coefficients: maps per-example norms (like params, leaves ``[B]``, infinite where a gradient is not finite) to
            clip coefficients (like params, leaves ``[B]``). Returning one array for several parameters saves work.
        mask: ``[B]`` bool; a False example contributes exactly zero.
        scale: S, like params, each leaf of a shape that broadcasts to that of its parameter.
        offset: o, with shapes like S.
        has_aux: whether ``loss_fn`` also returns auxiliary data.
        plan: a plan from `plan_clipped_sum` for the same arguments, to save a second trace.
        limits: for each parameter in ``plan.single``, its clip norm: ``coefficients`` has to return
            ``min(1, limit / norm)`` for it.
        layer_axes: per parameter, how many axes index layers that are clipped separately (norms are ``[B, layers]``).

    Returns:
        An `EngineResult`. Rows that the mask excludes count as finite.

    *Privacy*: ``sum`` has the sensitivity that ``coefficients`` enforces: every example is multiplied by its
      own ``c_i``, and one whose gradient is not finite contributes zero. Nothing here has noise added;
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
    # Padding with NaN or Inf must not take the slow path.
    # In memory, if it is computed in the same program, so that norms and sums read the same (`selection.settled`).
    given = lax.optimization_barrier(jax.tree.leaves(batch))
    batch = without_bad_entries(~mask, given)
    run = Run(plan, leaves, _like(params, scale), _like(params, offset))

    axes = layer_axes or [0] * len(leaves)
    unused = {p.leaf: leaves[p.leaf].shape[: axes[p.leaf]] for p in plan.leaves if axes[p.leaf] and not p.contacts}

    def by_layer(norms: list[jax.Array]) -> list[jax.Array]:
        """Also of stacks that the loss does not use: their layers count among those that share a clip norm."""
        return [jnp.broadcast_to(n[:, None], (len(n), *unused[i])) if i in unused else n for i, n in enumerate(norms)]

    def weigh(norms: list[jax.Array], mask: jax.Array) -> list[jax.Array]:
        # A norm that is not finite counts as infinite: the gradient and those clipped with it contribute zero.
        norms = at_once(lambda n: jnp.where(jnp.isfinite(n), n, jnp.inf), norms)
        given = tree.flatten_up_to(coefficients(jax.tree.unflatten(tree, by_layer(norms))))
        given = [jnp.max(c, axis=1, initial=0) if i in unused else c for i, c in enumerate(given)]
        distinct = {id(c): c for c in given}  # one array for each, so that sums are shared
        masked = {i: jnp.where(per_example(mask, c) & (c > 0), c, 0) for i, c in distinct.items()}
        return [masked[id(c)] for c in given]

    def result(
        total: Sum, norms: list[jax.Array], losses: jax.Array, aux: list[jax.Array], ok: jax.Array
    ) -> EngineResult:
        aux_tree = plan.trace.aux_tree.unflatten(aux) if has_aux else None
        remainder = None if total.remainder is None else tree.unflatten(total.remainder)
        norms = by_layer(norms)
        return EngineResult(tree.unflatten(total.value), tree.unflatten(norms), losses, aux_tree, ok | ~mask, remainder)

    if plan.streamed:
        clip = streamed.Clip(weigh, limits, axes)
        return result(*streamed.clipped_sum(run, batch, given, clip, mask))
    losses, aux, seen, _ = run.passes(batch, mask, in_place=given)
    found = norms_in_place(run, joined(run, seen, mask), mask & ~jnp.isfinite(losses), mask, given)
    # The sum is computed the same way for all batches: what an example adds must not depend on whether another is bad.
    norms, records = one_by_one.certain(run, found.upper, found.lower, weigh, mask, found.records)
    norms = quick_sums.all_raised(norms, found.terms)
    ok = mask & finite([*norms, mask])
    weights = dict(enumerate(weigh(norms, mask)))
    weights = without_underflowing(run, weights, dict(enumerate(norms)), records, {}, found.diagonals)
    if jax.default_backend() == "cpu":  # otherwise every product with a coefficient computes it again, entry by entry
        weights = settled(~ok, weights)
    return result(weighted_sum(run, weights, records), norms, losses, aux, ok)


def _like(params: PyTree, tree: PyTree) -> list[jax.Array | None]:
    """Leaves of an optional pytree with the structure of ``params``."""
    leaves, structure = jax.tree.flatten(params)
    if tree is None:
        return [None] * len(leaves)

    def shaped(x: ArrayLike, p: jax.Array) -> jax.Array:  # a single number stays one: it costs less than a diagonal
        x = jnp.asarray(x, accumulator_dtype(p.dtype))
        return x.reshape(()) if x.size == 1 and p.size > 1 else jnp.broadcast_to(x, p.shape)

    return [shaped(x, p) for x, p in zip(structure.flatten_up_to(tree), leaves, strict=True)]
