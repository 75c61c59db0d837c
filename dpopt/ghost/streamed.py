"""The clipped sum with nothing recorded at the contacts that are streamed, in one pass over the batch or in two.

A recorded contact keeps its input and its cotangent until the clip coefficients are known, for every step of a scan
and through every rematerialised block: what was saved by rematerialising is spent again. A streamed one has hooks
(hooks.py): in the first pass for the norms and, the coefficients being known, in a second for the weighted sum. That
costs an ordinary gradient once more; the memory stays that of an ordinary one. Where a parameter's coefficient depends
on its own norm alone, the first pass clips and adds up as well, and if all parameters are such there is no second.

What the second pass adds up has to be what the first took norms of. Two programs of the same arithmetic may be rounded
in two ways, which is all there is of a gradient that is what rounding has left of larger terms. So both passes are the
steps of one loop, whose hooks do the one thing or the other.

A parameter with several contacts has cross terms, which no contact sees alone, as has one that the steps of a scan
share: those are recorded, as ever.

What is not finite is left out by selection, contact by contact. Squares neither vanish nor overflow, since hooks scale
their factors first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from dpopt.engines import sums
from dpopt.engines.blocks import Blocks
from dpopt.engines.norms import safe_norm
from dpopt.ghost import one_by_one
from dpopt.ghost.contacts import Formed, Seen
from dpopt.ghost.hooks import ClipHook, EitherHook
from dpopt.ghost.leaf_norms import leaf_norms
from dpopt.ghost.run import Run
from dpopt.ghost.selection import finite, selected, settled
from dpopt.ghost.values import Contact, Entry, wide_dtype
from dpopt.ghost.weighing import without_too_large
from dpopt.ghost.weighted_sum import grouped, to_leaf, to_leaves, weighted_sum


class Streamed(NamedTuple):
    """What the passes give."""

    sum: sums.Sum
    leaf_norms: list[jax.Array]  # [B], or [B, layers]; no smaller than they are
    losses: jax.Array
    aux: list[jax.Array]
    ok: jax.Array  # [B] bool: unmasked, with a finite gradient


def clipped_sum(
    run: Run, batch: Sequence[jax.Array], weigh: Callable, mask: jax.Array, limits: Sequence[Any],
    layer_axes: Sequence[int],
) -> Streamed:  # fmt: skip
    """``sum_i c_i (S g_i + o)`` for the parameters' leaves.

    Args:
        weigh: maps leaf norms, and a mask, to coefficients.
        limits: what the parameters of ``plan.single`` are scaled down to, each by its own norm.
        layer_axes: how many axes of each parameter number layers, which are clipped one by one.
    """
    if {leaf for c in run.plan.streamed for leaf in c.weight.leaves} <= run.plan.single:
        return _one_pass(run, batch, weigh, mask, limits, layer_axes)
    devices = math.gcd(len(mask), jax.device_count())
    if devices == 1 or len(mask) <= sums.ROWS:
        return _two_passes(run, batch, weigh, mask, limits, layer_axes)
    if len(mask) // devices <= sums.ROWS and _adds_up_exactly(run):
        return _two_passes(run, batch, weigh, mask, limits, layer_axes, whole=True)
    # Each device takes its own share of a sharded batch, and has a sum of its own.
    blocks = Blocks(len(mask), len(mask) // devices)
    found = jax.vmap(lambda b, m: _two_passes(run, b, weigh, m, limits, layer_axes))(*blocks.split(batch, mask))
    return Streamed(sums.fold(found.sum, blocks.rows), *blocks.join(tuple(found[1:])))


def _adds_up_exactly(run: Run) -> bool:
    """Whether a sum of the whole batch at a contact is as exact as one of blocks.

    What a float sum has lost is not multiplied: that would round it as a whole. Nor is there any of offsets."""
    if any(o is not None for o in run.offsets):
        return False
    entries = (cast(Entry, c.weight.entry) for c in run.plan.streamed)
    return not sums.needs_remainder(run.plan.batch_size) or (all(e.copy for e in entries) and not any(run.plan.scaled))


def _one_pass(
    run: Run, batch: Sequence[jax.Array], weigh: Callable, mask: jax.Array, limits: Sequence[Any],
    layer_axes: Sequence[int],
) -> Streamed:  # fmt: skip
    losses, aux, seen, asked = run.passes(batch, _hooks(run, limits, layer_axes, {}, None), mask)
    found = _looked_at(run, asked, seen, losses, weigh, mask)
    of_leaf = found.sums
    if found.weights:
        of_leaf |= dict(zip(found.weights, _each(_recorded_sum(run, found.weights, found.records)), strict=True))
    return Streamed(_listed(_joined(of_leaf)), found.norms, losses, aux, mask & finite([*found.norms, mask]))


class _Looked(NamedTuple):
    """What a first pass tells."""

    norms: list[jax.Array]
    weights: dict[int, jax.Array]  # of the parameters that are still to be added up
    sums: dict[int, sums.Sum]  # of those that were clipped as they came
    records: dict[Contact, Seen | Formed]


def _looked_at(
    run: Run, asked: Mapping, seen: Mapping[Contact, Seen], losses: jax.Array, weigh: Callable, mask: jax.Array
) -> _Looked:
    """The norms of all parameters, and coefficients."""
    known, of_leaf, largest = {}, {}, {}
    for contact, (bounds, total) in asked.items():
        (leaf,) = contact.weight.leaves
        if leaf in run.plan.single:
            of_leaf[leaf] = sums.Sum(*(None if t is None else to_leaf(run, contact, t) for t in total))
        else:  # all steps together
            largest[contact] = jnp.max(bounds[..., 2].reshape(len(mask), -1), axis=1)
            bounds = jnp.stack([safe_norm(b.reshape(len(mask), -1), axis=1) for b in _both(bounds)], axis=1)
        number = run.number(leaf)
        known[leaf] = tuple(b if number is None else b * jnp.abs(number) for b in _both(bounds))
    found = leaf_norms(run, settled(mask & ~jnp.isfinite(losses), seen), known)
    # What is streamed is scaled before it is squared: there is no need of a second look.
    leaves = [i for i in range(len(found.upper)) if i not in known]
    norms, records = one_by_one.certain(run, found.upper, found.lower, weigh, mask, found.records, leaves)
    weights = {leaf: c for leaf, c in enumerate(weigh(norms, mask)) if leaf not in of_leaf}
    if weights:
        weights = without_too_large(run, weights, dict(enumerate(norms)), records, largest, found.diagonals)
    return _Looked(norms, weights, of_leaf, records)


def _both(bounds: jax.Array) -> tuple[jax.Array, jax.Array]:
    return bounds[..., 0], bounds[..., 1]


def _recorded_sum(run: Run, weights: Mapping[int, jax.Array], records: Mapping[Contact, Seen | Formed]) -> sums.Sum:
    """The sums of some parameters, all of whose contacts were recorded."""
    chosen = {}
    for contact in run.contacts_of(list(weights)):
        counts = jnp.any(jnp.stack([weights[leaf] != 0 for leaf in contact.weight.leaves]), axis=0)
        chosen[contact] = jax.tree.map(lambda x, counts=counts: selected(counts, x), records[contact])
    return weighted_sum(run, weights, chosen)


class _Found(NamedTuple):
    """What the first pass leaves of all blocks: arrays ``[blocks, rows, ...]``."""

    norms: list[jax.Array]
    weights: list[jax.Array]  # the distinct ones
    losses: jax.Array
    aux: list[jax.Array]


def _two_passes(
    run: Run, batch: Sequence[jax.Array], weigh: Callable, mask: jax.Array, limits: Sequence[Any],
    layer_axes: Sequence[int], whole: bool = False,
) -> Streamed:  # fmt: skip
    """Blocks of rows one after the other, and then all of them again, in one loop; or the ``whole`` batch."""
    blocks = Blocks(len(mask), len(mask) if whole else -(-len(mask) // -(-len(mask) // sums.ROWS)))
    batch, mask = blocks.split(batch, mask)
    run = Run(run.plan.of(blocks.rows), run.leaves, run.scales, run.offsets)
    single, zeros = run.plan.single, {leaf: jnp.zeros(x.shape, x.dtype) for leaf, x in enumerate(run.wide)}
    axes = [n if leaf in single else 0 for leaf, n in enumerate(layer_axes)]
    norms = [jnp.zeros((blocks.rows, *x.shape[:n]), x.dtype) for x, n in zip(run.wide, axes, strict=True)]
    # Only which parameters share a coefficient matters here, and of what dtype.
    shared, groups = grouped({leaf: c for leaf, c in enumerate(weigh(norms, mask[0])) if leaf not in single})
    streamed = {leaf: groups[leaf] for c in run.plan.streamed for leaf in c.weight.leaves - single}
    rest = [leaf for leaf in zeros if leaf not in streamed]
    pairs = sums.needs_remainder(blocks.rows)

    nothing = {leaf: sums.Sum(z, z if pairs else None) for leaf, z in zeros.items()}

    def step(i: jax.Array, state: tuple[_Found, sums.Sum]) -> tuple[_Found, sums.Sum]:
        found, before = state
        adds_up, block = i >= blocks.count, i % blocks.count

        def own(tree: Any) -> Any:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, block, keepdims=False), tree)

        # The step has a hand in it: XLA would take what is the same in all out of the loop, and keep what it recorded.
        examples = jax.tree.map(lambda x: jnp.where(i < 0, jnp.zeros_like(x), x), own(batch))
        counts, coefficients = own(mask), own(found.weights)
        hooks = _hooks(run, limits, layer_axes, streamed, adds_up)
        losses, aux, seen, asked = run.passes(examples, hooks, counts, coefficients)

        # What hooks have added up, nothing in the first pass. Through `cond` it would be copied.
        parts = [to_leaves(run, streamed, coefficients, lambda k, _, i=i: asked[k][1][i]) for i in range(1 + pairs)]
        sums = {leaf: sums.Sum(*pair) for leaf, *pair in zip(streamed, *parts, strict=True)}

        def first() -> tuple:
            looked = _looked_at(run, asked, seen, losses, weigh, counts)
            weights = {group: looked.weights[leaf] for leaf, group in groups.items()}
            others = {leaf: looked.sums[leaf] if leaf in single else nothing[leaf] for leaf in rest}
            return looked.norms, [weights[group] for group in range(len(shared))], others

        def second() -> tuple:
            recorded = {leaf: coefficients[groups[leaf]] for leaf in rest if leaf not in single}
            records = {c: s._replace(out=None) for c, s in seen.items()}
            total = _each(_recorded_sum(run, recorded, records)) if recorded else []
            others = {leaf: nothing[leaf] for leaf in single} | dict(zip(recorded, total, strict=True))
            return own(found.norms), coefficients, others

        norms, weights, others = lax.cond(adds_up, second, first)
        here = {leaf: jax.tree.map(lambda s: jnp.where(adds_up, s, 0), total) for leaf, total in sums.items()} | others
        total = sums.add(before, _joined(here))
        if blocks.count == 1:  # nothing was there before: the memory of the parameters once less
            parts = (part and {**part, **{k: s[i] for k, s in sums.items()}} for i, part in enumerate(total))
            total = sums.Sum(*parts)
        now = _Found(norms, weights, losses, aux)
        return jax.tree.map(lambda all, x: lax.dynamic_update_index_in_dim(all, x, block, 0), found, now), total

    of_block = [jnp.zeros((blocks.rows, *v.shape), v.dtype) for v in run.trace.results]
    empty = _Found(norms, [jnp.zeros_like(c) for c in shared], of_block[0], of_block[1:])
    empty = jax.tree.map(lambda x: jnp.zeros((blocks.count, *x.shape), x.dtype), empty)
    start = _joined(nothing) if whole else sums.zero(zeros, blocks.rows, blocks.count)
    found, total = lax.fori_loop(0, 2 * blocks.count, step, (empty, start))

    norms, losses, aux, counts = blocks.join((found.norms, found.losses, found.aux, mask))
    return Streamed(_listed(total), norms, losses, aux, counts & finite([*norms, counts]))


def _each(total: sums.Sum) -> list[sums.Sum]:
    """The sums of a list of parameters, one by one."""
    rests = [None] * len(total.value) if total.remainder is None else total.remainder
    return [sums.Sum(*pair) for pair in zip(total.value, rests, strict=True)]


def _joined(sums: Mapping[int, sums.Sum]) -> sums.Sum:
    """One sum of all; in pairs of floats if any of them is."""
    if any(s.remainder is not None for s in sums.values()):
        sums = {leaf: sums.paired(s) for leaf, s in sums.items()}
        return sums.Sum(*({leaf: s[i] for leaf, s in sums.items()} for i in range(2)))
    return sums.Sum({leaf: s.value for leaf, s in sums.items()})


def _listed(total: sums.Sum) -> sums.Sum:
    """A sum of all in the parameters' order."""
    return sums.Sum(*(part and [part[leaf] for leaf in sorted(part)] for part in total))


def _hooks(
    run: Run, limits: Sequence[Any], layer_axes: Sequence[int], groups: Mapping[int, int], adds_up: jax.Array | None
) -> dict[Contact, EitherHook | ClipHook]:
    hooks = {}
    for contact, method in run.plan.streamed.items():
        (leaf,) = contact.weight.leaves
        number = run.number(leaf)
        diagonal = run.diagonal(leaf, contact, None if number is not None else run.scales[leaf])
        steps = [length for length, _ in contact.loops]
        if leaf in run.plan.single and layer_axes[leaf] > len(steps):  # the weight itself, with all its layers
            steps = list(contact.weight.shape[: layer_axes[leaf]])
        dtype = wide_dtype(contact.tap_dtype)
        bounds, chunk = jnp.zeros((*steps, 3), dtype), run.plan.streamed_chunk(contact)
        zeros = jnp.zeros(contact.weight.shape, wide_dtype(contact.weight.dtype))
        total = sums.Sum(zeros, jnp.zeros_like(zeros) if sums.needs_remainder(run.plan.batch_size) else None)
        if leaf not in run.plan.single:
            hooks[contact] = EitherHook(bounds, total, adds_up, diagonal, method, chunk, groups[leaf])
            continue
        # A gradient that is multiplied by a number later is clipped to as much less.
        limit = limits[leaf] if number is None else limits[leaf] / jnp.abs(number)
        hooks[contact] = ClipHook(bounds, total, jnp.full(steps, limit, dtype), diagonal, method, chunk)
    return hooks
