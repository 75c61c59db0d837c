"""The clipped sum without recording anything at streamed contacts, in one or two passes over the batch.

A recorded contact keeps its input and its cotangent until the clip coefficients are known, for every step of a scan
and through every rematerialised block, so the memory saved by rematerialisation is spent again. A streamed contact has
hooks instead (hooks.py): in the first pass for the norms and, once the coefficients are known, in a second pass for the
weighted sum. That costs one more ordinary gradient; the memory stays that of an ordinary gradient. Where a parameter's
coefficient depends on its own norm alone, the first pass also clips and adds up; if that holds for all parameters,
there is no second pass.

The second pass has to add up exactly the gradients whose norms the first pass took. Two programs with the same
arithmetic may round differently, which matters if a gradient consists of little but the rounding error of larger terms.
So both passes are steps of one loop, whose hooks do either.

A parameter with several contacts, or one shared by the steps of a scan, has cross terms that no single contact can
compute: such contacts are recorded.

Gradients that are not finite are replaced by zeros, contact by contact. Squares neither underflow nor overflow, since
hooks scale their factors first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpopt.common.trees import accumulator_dtype
from dpopt.common.types import PyTree
from dpopt.engines import rounding, sums
from dpopt.engines.blocks import Blocks
from dpopt.engines.norms import safe_norm
from dpopt.engines.sums import Sum
from dpopt.ghost import one_by_one, quick_sums
from dpopt.ghost.contacts import Recorded, Records, Seen
from dpopt.ghost.hooks import ClipHook, Hooks, TwoPassHook
from dpopt.ghost.leaf_norms import leaf_norms
from dpopt.ghost.records import norms_in_place, settled_records
from dpopt.ghost.run import Run
from dpopt.ghost.selection import finite, selected
from dpopt.ghost.squares import tiny
from dpopt.ghost.underflow import without_underflowing
from dpopt.ghost.values import Contact
from dpopt.ghost.weighted_sum import Weigh, grouped, to_leaf, to_leaves, weighted_sum


class Streamed(NamedTuple):
    """The result of the passes."""

    sum: Sum
    leaf_norms: list[jax.Array]  # [B], or [B, layers]: upper bounds
    losses: jax.Array
    aux: list[jax.Array]
    ok: jax.Array  # [B] bool: unmasked, with a finite gradient


class Clip(NamedTuple):
    """How norms are clipped."""

    weigh: Weigh  # maps leaf norms and a mask to coefficients
    limits: Sequence[Any]  # the clip norms of the parameters in ``plan.single``, each clipped by its own norm
    layer_axes: Sequence[int]  # how many axes of each parameter index layers that are clipped separately


def clipped_sum(
    run: Run, batch: Sequence[jax.Array], raw: Sequence[jax.Array], clip: Clip, mask: jax.Array
) -> Streamed:
    """``sum_i c_i (S g_i + o)`` for the parameters' leaves. ``raw`` is the batch with whatever padding holds."""
    if run.plan.is_one_pass:
        return _one_pass(run, batch, raw, clip, mask)
    devices = math.gcd(len(mask), jax.device_count())
    if devices == 1 or len(mask) <= rounding.ROWS:
        return _two_passes(run, batch, clip, mask)
    if len(mask) // devices <= rounding.ROWS and _adds_up_exactly(run):
        return _two_passes(run, batch, clip, mask, whole=True)
    # Each device has its own share of a sharded batch, and its own sum.
    blocks = Blocks(len(mask), len(mask) // devices)
    found = jax.vmap(lambda b, m: _two_passes(run, b, clip, m))(*blocks.split(batch, mask))
    return Streamed(sums.fold(found.sum, blocks.rows), *blocks.join(tuple(found[1:])))


def _adds_up_exactly(run: Run) -> bool:
    """Whether summing the whole batch at a contact is as exact as summing blocks.

    It is not if the sum is multiplied afterwards: that would round all of it. Offsets have no sum at a contact."""
    if any(o is not None for o in run.offsets):
        return False
    is_multiplied = any(run.plan.scaled) or not all(c.is_copy for c in run.plan.streamed)
    return not (is_multiplied and sums.needs_remainder(run.plan.batch_size))


def _one_pass(run: Run, batch: Sequence[jax.Array], raw: Sequence[jax.Array], clip: Clip, mask: jax.Array) -> Streamed:
    losses, aux, seen, hooked = run.passes(batch, mask, _hooks(run, clip, {}, None), in_place=raw)
    first = _first_pass(run, hooked, seen, losses, clip.weigh, mask, raw)
    totals = first.totals | _recorded_sums(run, first.weights, first.records)
    return Streamed(_listed(_joined(totals)), first.norms, losses, aux, mask & finite([*first.norms, mask]))


class _FirstPass(NamedTuple):
    """The result of a first pass."""

    norms: list[jax.Array]
    weights: dict[int, jax.Array]  # coefficients of the parameters that are still to be added up
    totals: dict[int, Sum]  # sums of the parameters that were clipped in this pass
    records: dict[Contact, Recorded]


def _first_pass(
    run: Run, hooked: dict[Contact, Any], seen: Mapping[Contact, Seen], losses: jax.Array, weigh: Weigh,
    mask: jax.Array, in_place: Sequence[jax.Array] = (),
) -> _FirstPass:  # fmt: skip
    """The norms of all parameters, and coefficients, from the results of `Run.passes`, with the same ``in_place``."""
    known, totals, largest = {}, {}, {}
    for contact, (bounds, total) in hooked.items():
        (leaf,) = contact.weight.leaves
        if leaf in run.plan.single:
            totals[leaf] = Sum(*(None if t is None else to_leaf(run, contact, t) for t in total))
        else:  # all steps together
            largest[contact] = jnp.max(bounds[..., 2].reshape(len(mask), -1), axis=1, initial=0)
            bounds = jnp.stack([safe_norm(b.reshape(len(mask), -1), axis=1) for b in _both(bounds)], axis=1)
        number = run.scalar_scale(leaf)
        layers = run.wide[leaf].shape[: bounds.ndim > 2]  # numbered by the steps of one loop, or of several
        both = (b.reshape(len(mask), *layers) for b in _both(bounds))
        both = (b if number is None else b * jnp.abs(number) for b in both)
        # (Contacts with different parts of one parameter.)
        known[leaf] = tuple(map(jnp.hypot, known[leaf], both)) if leaf in known else tuple(both)
    bad = mask & ~jnp.isfinite(losses)
    if in_place:
        found = norms_in_place(run, seen, bad, mask, in_place, known)
    else:
        found = leaf_norms(run, settled_records(bad, seen), known)
    # Streamed gradients are scaled before they are squared, so their norms are certain.
    leaves = [i for i in range(len(found.upper)) if i not in known]
    norms, records = one_by_one.certain(run, found.upper, found.lower, weigh, mask, found.records, leaves)
    norms = quick_sums.all_raised(norms, found.terms)  # hooks have raised those of their own
    weights = {leaf: c for leaf, c in enumerate(weigh(norms, mask)) if leaf not in totals}
    if weights:
        weights = without_underflowing(run, weights, dict(enumerate(norms)), records, largest, found.diagonals)
    return _FirstPass(norms, weights, totals, records)


def _both(bounds: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower bounds."""
    return bounds[..., 0], bounds[..., 1]


def _recorded_sums(run: Run, weights: Mapping[int, jax.Array], records: Records) -> dict[int, Sum]:
    """The sums of some parameters, all of whose contacts were recorded."""
    if not weights:
        return {}
    chosen = {}
    for contact in run.contacts_of(weights):
        counts = jnp.any(jnp.stack([weights[leaf] != 0 for leaf in contact.weight.leaves]), axis=0)
        chosen[contact] = jax.tree.map(lambda x, counts=counts: selected(counts, x), records[contact])
    total = weighted_sum(run, weights, chosen)
    rests = [None] * len(weights) if total.remainder is None else total.remainder
    return {leaf: Sum(*pair) for leaf, *pair in zip(weights, total.value, rests, strict=True)}


class _PerBlock(NamedTuple):
    """The results of the first pass for all blocks: arrays ``[blocks, rows, ...]``."""

    norms: list[jax.Array]
    weights: list[jax.Array]  # the distinct coefficients
    losses: jax.Array
    aux: list[jax.Array]


def _two_passes(run: Run, batch: Sequence[jax.Array], clip: Clip, mask: jax.Array, whole: bool = False) -> Streamed:
    """Both passes, each over blocks of rows one after another, or over the ``whole`` batch, in one loop."""
    blocks = Blocks(len(mask), len(mask) if whole else rounding.blocks(len(mask)).length)
    batch, mask = blocks.split(batch, mask)
    run = Run(run.plan.of(blocks.rows), run.leaves, run.scales, run.offsets)
    single, zeros = run.plan.single, {leaf: jnp.zeros(x.shape, x.dtype) for leaf, x in enumerate(run.wide)}
    axes = [n if leaf in single else 0 for leaf, n in enumerate(clip.layer_axes)]
    norms = [jnp.zeros((blocks.rows, *x.shape[:n]), x.dtype) for x, n in zip(run.wide, axes, strict=True)]
    # Only which parameters share a coefficient, and its dtype, matter here.
    shared, groups = grouped({leaf: c for leaf, c in enumerate(clip.weigh(norms, mask[0])) if leaf not in single})
    streamed = {leaf: groups[leaf] for c in run.plan.streamed for leaf in c.weight.leaves - single}
    rest = [leaf for leaf in zeros if leaf not in streamed]
    pairs = sums.needs_remainder(blocks.rows)
    nothing = {leaf: Sum(z, z if pairs else None) for leaf, z in zeros.items()}

    def step(i: jax.Array, state: tuple[_PerBlock, Sum]) -> tuple[_PerBlock, Sum]:
        found, before = state
        adds_up, block = i >= blocks.count, i % blocks.count

        def own(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, block, keepdims=False), tree)

        # These depend on the step: otherwise XLA moves what is the same in both passes out of the loop, and records it.
        examples = jax.tree.map(lambda x: jnp.where(i < 0, jnp.zeros_like(x), x), own(batch))
        counts, coefficients = own(mask), own(found.weights)
        hooks = _hooks(run, clip, streamed, adds_up)
        losses, aux, seen, hooked = run.passes(examples, counts, hooks, coefficients)

        # What hooks have added up; zeros in the first pass. A `cond` would copy it.
        parts = [to_leaves(run, streamed, coefficients, lambda k, _, i=i: hooked[k][1][i]) for i in range(1 + pairs)]
        streamed_totals = {leaf: Sum(*pair) for leaf, *pair in zip(streamed, *parts, strict=True)}

        def first() -> tuple[list[jax.Array], list[jax.Array], dict[int, Sum]]:
            found = _first_pass(run, hooked, seen, losses, clip.weigh, counts)
            weights = {group: found.weights[leaf] for leaf, group in groups.items()}
            others = {leaf: found.totals[leaf] if leaf in single else nothing[leaf] for leaf in rest}
            return found.norms, [weights[group] for group in range(len(shared))], others

        def second() -> tuple[list[jax.Array], list[jax.Array], dict[int, Sum]]:
            recorded = {leaf: coefficients[groups[leaf]] for leaf in rest if leaf not in single}
            records = {c: s._replace(out=None) for c, s in seen.items()}
            others = {leaf: nothing[leaf] for leaf in single} | _recorded_sums(run, recorded, records)
            return own(found.norms), coefficients, others

        norms, weights, others = lax.cond(adds_up, second, first)
        added = {k: jax.tree.map(lambda s: jnp.where(adds_up, s, 0), t) for k, t in streamed_totals.items()}
        total = sums.add(before, _joined(added | others))
        if blocks.count == 1:  # the sum before is zero: this saves memory of the size of the parameters
            parts = (part and {**part, **{k: s[i] for k, s in streamed_totals.items()}} for i, part in enumerate(total))
            total = Sum(*parts)
        now = _PerBlock(norms, weights, losses, aux)
        return jax.tree.map(lambda all, x: lax.dynamic_update_index_in_dim(all, x, block, 0), found, now), total

    start = _joined(nothing) if whole else sums.zero(zeros, blocks.rows, blocks.count)
    losses, *aux = (jnp.zeros((blocks.rows, *v.shape), v.dtype) for v in run.trace.results)
    of_block = _PerBlock(norms, shared, losses, aux)
    found = jax.tree.map(lambda x: jnp.zeros((blocks.count, *x.shape), x.dtype), of_block)
    found, total = lax.fori_loop(0, 2 * blocks.count, step, (found, start))
    norms, losses, aux, counts = blocks.join((found.norms, found.losses, found.aux, mask))
    return Streamed(_listed(total), norms, losses, aux, counts & finite([*norms, counts]))


def _joined(totals: Mapping[int, Sum]) -> Sum:
    """One sum for all parameters, in pairs of floats if any of them is."""
    if any(s.remainder is not None for s in totals.values()):
        totals = {leaf: sums.paired(s) for leaf, s in totals.items()}
        return Sum(*({leaf: s[i] for leaf, s in totals.items()} for i in range(2)))
    return Sum({leaf: s.value for leaf, s in totals.items()})


def _listed(total: Sum) -> Sum:
    """The same with lists in the parameters' order for dicts."""
    return Sum(*(part and [part[leaf] for leaf in sorted(part)] for part in total))


def _hooks(run: Run, clip: Clip, groups: Mapping[int, int], adds_up: jax.Array | None) -> Hooks:
    hooks, pairs = {}, sums.needs_remainder(run.plan.batch_size)
    for contact, method in run.plan.streamed.items():
        (leaf,) = contact.weight.leaves
        number = run.scalar_scale(leaf)
        diagonal = run.diagonal(leaf, contact, None if number is not None else run.scales[leaf])
        # The barrier prevents constant folding of a mask's largest entry, which takes XLA seconds.
        diagonal = None if diagonal is None else lax.optimization_barrier(diagonal)
        steps = [length for length, _ in contact.loops]
        if leaf in run.plan.single and clip.layer_axes[leaf] > len(steps):  # the weight itself, with all its layers
            steps = list(contact.weight.shape[: clip.layer_axes[leaf]])
        dtype = accumulator_dtype(contact.tap_dtype)
        zeros = jnp.zeros(contact.weight.shape, accumulator_dtype(contact.weight.dtype))
        common: dict[str, Any] = dict(
            bounds=jnp.zeros((*steps, 3), dtype),
            total=Sum(zeros, jnp.zeros_like(zeros) if pairs else None),
            diagonal=diagonal, method=method, is_quick=contact in run.plan.quick,
            chunk=run.plan.streamed_chunk(contact), tiny=tiny(run.trace.narrowest), spare=run.plan.spare_bytes,
        )  # fmt: skip
        if leaf not in run.plan.single:
            hooks[contact] = TwoPassHook(**common, adds_up=adds_up, group=groups[leaf])
        else:  # a gradient that is multiplied by a number later is clipped to C divided by that number
            limit = clip.limits[leaf] if number is None else clip.limits[leaf] / jnp.abs(number)
            hooks[contact] = ClipHook(**common, limit=jnp.full(steps, limit, dtype))
    return hooks
