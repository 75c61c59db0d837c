"""The clipped sum in two passes over the batch, or in one, with nothing recorded at the contacts that are streamed.

A recorded contact keeps its input and its cotangent until the clip coefficients are known, for every step of a scan
and through every rematerialised block: what was saved by rematerialising is spent again. A streamed one has hooks
(hooks.py): in the first pass for the norms and, the coefficients being known, in a second for the weighted sum. That
costs an ordinary gradient once more; the memory stays that of an ordinary one. Where a parameter's coefficient depends
on its own norm alone, the first pass clips and adds up as well, and if all parameters are such there is no second.

A parameter with several contacts has cross terms, which no contact sees alone, as has one that the steps of a scan
share: those are recorded in the first pass, as ever.

What is not finite is left out by selection, contact by contact. Squares neither vanish nor overflow, since hooks scale
their factors first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpopt import _sums
from dpopt._norms import safe_norm
from dpopt.ghost import one_by_one
from dpopt.ghost.contacts import Formed, Seen
from dpopt.ghost.hooks import ClipHook, NormHook, SumHook
from dpopt.ghost.leaf_norms import leaf_norms
from dpopt.ghost.run import Run
from dpopt.ghost.selection import finite, selected, settled
from dpopt.ghost.values import Contact, wide_dtype
from dpopt.ghost.weighing import without_too_large
from dpopt.ghost.weighted_sum import to_leaf, to_leaves, weighted_sum


class Streamed(NamedTuple):
    """What the passes give."""

    sum: _sums.Sum
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
        weigh: maps leaf norms to coefficients.
        limits: what the parameters of ``plan.single`` are scaled down to, each by its own norm.
        layer_axes: how many axes of each parameter number layers that are clipped one by one.
    """
    plan = run.plan
    hooks = _hooks(run, limits, layer_axes)
    losses, aux, seen, asked = run.passes(batch, hooks, mask)
    known, sums, largest = {}, {}, {}
    for contact, bounds in asked.items():
        (leaf,) = contact.weight.leaves
        if isinstance(hooks[contact], ClipHook):
            bounds, total = bounds
            sums[leaf] = _sums.Sum(*(None if t is None else to_leaf(run, contact, t) for t in total))
        else:  # all steps together
            largest[contact] = jnp.max(bounds[..., 2].reshape(plan.batch_size, -1), axis=1)
            bounds = jnp.stack([safe_norm(b.reshape(plan.batch_size, -1), axis=1) for b in _both(bounds)], axis=1)
        number = run.number(leaf)
        known[leaf] = tuple(b if number is None else b * jnp.abs(number) for b in _both(bounds))
    found = leaf_norms(run, settled(mask & ~jnp.isfinite(losses), seen), known)
    looked_at = [
        i for i in range(len(found.upper)) if i not in known
    ]  # what is streamed is scaled before it is squared
    norms, _ = one_by_one.certain(run, found.upper, found.lower, weigh, mask, found.records, looked_at)
    weights = {leaf: c for leaf, c in enumerate(weigh(norms)) if leaf not in sums}
    if weights:
        weights = without_too_large(run, weights, dict(enumerate(norms)), found.records, largest, found.diagonals)
        rest = _twice(run, batch, weights) if weights.keys() & known.keys() else _once(run, weights, found.records)
        rests = [None] * len(weights) if rest.remainder is None else rest.remainder
        sums |= {
            leaf: _sums.Sum(*pair) for leaf, pair in zip(weights, zip(rest.value, rests, strict=True), strict=True)
        }
    value, remainder = ([s[i] for _, s in sorted(sums.items())] for i in (0, 1))
    if any(r is not None for r in remainder):
        remainder = [jnp.zeros_like(v) if r is None else r for v, r in zip(value, remainder, strict=True)]
        total = _sums.Sum(value, remainder)
    else:
        total = _sums.Sum(value)
    return Streamed(total, norms, losses, aux, mask & finite([*norms, mask]))


def _both(bounds: jax.Array) -> tuple[jax.Array, jax.Array]:
    return bounds[..., 0], bounds[..., 1]


def _once(run: Run, weights: dict[int, jax.Array], records: Mapping[Contact, Seen | Formed]) -> _sums.Sum:
    """The sums of some parameters, all of whose contacts were recorded."""
    chosen = {}
    for contact in run.contacts_of(list(weights)):
        counts = jnp.any(jnp.stack([weights[leaf] != 0 for leaf in contact.weight.leaves]), axis=0)
        chosen[contact] = jax.tree.map(lambda x, counts=counts: selected(counts, x), records[contact])
    return weighted_sum(run, weights, chosen)


def _twice(run: Run, batch: Sequence[jax.Array], weights: dict[int, jax.Array]) -> _sums.Sum:
    """The sums of some parameters, in a pass of their own."""
    distinct = {id(c): c for c in weights.values()}
    groups = {leaf: list(distinct).index(id(c)) for leaf, c in weights.items()}

    def one_group(rows):
        return _sums.in_blocks(lambda block: _second_pass(run, groups, *block), rows)

    return _sums.over_examples(one_group, (list(distinct.values()), list(batch)))


def _hooks(run: Run, limits: Sequence[Any], layer_axes: Sequence[int]) -> dict[Contact, NormHook | ClipHook]:
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
        if leaf not in run.plan.single:
            hooks[contact] = NormHook(bounds, diagonal, method, chunk)
            continue
        zeros = jnp.zeros(contact.weight.shape, wide_dtype(contact.weight.dtype))
        total = _sums.Sum(zeros, jnp.zeros_like(zeros) if _sums.needs_remainder(run.plan.batch_size) else None)
        # A gradient that is multiplied by a number later is clipped to as much less.
        limit = limits[leaf] if number is None else limits[leaf] / jnp.abs(number)
        hooks[contact] = ClipHook(bounds, total, jnp.full(steps, limit, dtype), diagonal, method, chunk)
    return hooks


def _second_pass(run: Run, leaf_groups: dict[int, int], coefficients: list, examples: list) -> list[jax.Array]:
    """``sum_i c_i (S g_i + o)``, over so few examples that float32 adds them up closely enough.

    Args:
        leaf_groups: of each parameter that is added up, which of ``coefficients`` is its own.
        coefficients: ``[B]`` each.
        examples: leaves ``[B, ...]``.
    """
    trace = run.trace
    static = trace.run_prologue(run.leaves)
    contacts = run.contacts_of(list(leaf_groups))
    groups_of = {c: sorted({leaf_groups[i] for i in c.weight.leaves if i in leaf_groups}) for c in contacts}

    def one(coefficients, example):
        def loss(totals):
            hooks = {
                c: SumHook(own, [coefficients[group] for group in groups_of[c]])
                for c, own in zip(contacts, totals, strict=True)
            }
            return trace.run_body(static, example, hooks)[0]

        zeros = {c: jnp.zeros(c.weight.shape, wide_dtype(c.weight.dtype)) for c in contacts}
        return jax.grad(loss)([[zeros[c]] * len(groups_of[c]) for c in contacts])

    totals = dict(zip(contacts, jax.vmap(one, out_axes=None)(coefficients, examples), strict=True))
    return to_leaves(run, leaf_groups, coefficients, lambda c, group: totals[c][groups_of[c].index(group)])
