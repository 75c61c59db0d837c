"""The clipped sum in two passes over the batch, with nothing recorded at the contacts that are streamed.

A recorded contact keeps its input and its cotangent until the clip coefficients are known, for every step of a scan
and through every rematerialised block: what was saved by rematerialising is spent again. A streamed one has hooks
(hooks.py): in the first pass for the norms and, the coefficients being known, in a second for the weighted sum. That
costs an ordinary gradient once more; the memory stays that of an ordinary one.

A parameter with several contacts has cross terms, which no contact sees alone, as has one that the steps of a scan
share: those are recorded in the first pass, as ever.

What is not finite is left out by selection, contact by contact. Squares neither vanish nor overflow, since hooks scale
their factors first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from dpopt import _sums
from dpopt._norms import safe_norm
from dpopt.ghost import one_by_one
from dpopt.ghost.hooks import NormHook, SumHook
from dpopt.ghost.run import Run
from dpopt.ghost.selection import finite
from dpopt.ghost.squares import TOLERANCE
from dpopt.ghost.values import Contact, wide_dtype


class Streamed(NamedTuple):
    """What two passes give."""

    sum: _sums.Sum
    leaf_norms: list[jax.Array]  # [B], no smaller than they are
    losses: jax.Array
    aux: list[jax.Array]
    ok: jax.Array  # [B] bool: unmasked, with a finite gradient


def clipped_sum(run: Run, batch: Sequence[jax.Array], weigh: Callable, mask: jax.Array) -> Streamed:
    """``sum_i c_i (S g_i + o)`` for the parameters' leaves; ``weigh`` maps leaf norms to coefficients."""
    plan = run.plan
    hooks = _norm_hooks(run)
    losses, aux, xs, ys, outs = run.passes(batch, hooks)
    known = {}
    for contact in hooks:
        (leaf,) = contact.weight.leaves
        number = run.number(leaf)
        found = (safe_norm(ys[contact][..., i].reshape(plan.batch_size, -1), axis=1) for i in (0, 1))
        known[leaf] = tuple(n if number is None else n * jnp.abs(number) for n in found)
    upper, lower, _ = run.norms(xs, ys, outs, known)
    upper, lower = ([n.astype(x.dtype) for n, x in zip(bounds, run.wide, strict=True)] for bounds in (upper, lower))
    upper = _looked_at(run, upper, lower, weigh, xs, ys, [i for i in range(len(upper)) if i not in known])
    ok = mask & finite(upper) if upper else mask
    weights = weigh(upper)
    distinct = {id(c): c for c in weights}
    leaf_groups = [list(distinct).index(id(c)) for c in weights]

    def one_group(rows):
        return _sums.in_blocks(lambda block: _second_pass(run, leaf_groups, *block), rows)

    total = _sums.over_examples(one_group, (list(distinct.values()), list(batch)))
    return Streamed(total, upper, losses, aux, ok)


def _looked_at(run: Run, upper, lower, weigh, xs, ys, leaves: list[int]) -> list[jax.Array]:
    """Norms, of the recorded ``leaves`` from formed gradients where squares vanish or overflow and the clip would tell.

    (As in engine.py. What is streamed is scaled before it is squared.)"""
    if not leaves:
        return upper
    certain = [c >= (1 - TOLERANCE) * most for c, most in zip(weigh(upper), weigh(lower), strict=True)]
    certain = jnp.all(jnp.stack([*certain, *(jnp.isfinite(upper[i]) for i in leaves)]), axis=0)
    recorded = [(xs[k], ys[k]) for k in run.contacts_of(leaves)]

    def look_closer(state: tuple) -> tuple:
        return jnp.array(True), one_by_one.norms(run, certain, state[1], recorded, {}, leaves)

    state = jnp.all(certain), [upper[i] for i in leaves]
    if isinstance(state[0], Tracer):
        state = lax.while_loop(lambda state: ~state[0], look_closer, state)
    elif not bool(state[0]):
        state = look_closer(state)
    found = dict(zip(leaves, state[1], strict=True))
    return [found.get(i, n) for i, n in enumerate(upper)]


def _norm_hooks(run: Run) -> dict[Contact, NormHook]:
    hooks = {}
    for contact, method in run.plan.streamed.items():
        (leaf,) = contact.weight.leaves
        scale = None if run.number(leaf) is not None else run.scales[leaf]
        steps = [length for length, _ in contact.loops]
        bounds = jnp.zeros((*steps, 2), wide_dtype(contact.tap_dtype))
        hooks[contact] = NormHook(bounds, run.diagonal(leaf, contact, scale), method, run.plan.streamed_chunk(contact))
    return hooks


def _second_pass(run: Run, leaf_groups: Sequence[int], coefficients: list, examples: list) -> list[jax.Array]:
    """``sum_i c_i (S g_i + o)``, over so few examples that float32 adds them up closely enough.

    Args:
        leaf_groups: which of ``coefficients`` is each parameter's.
        coefficients: ``[B]`` each.
        examples: leaves ``[B, ...]``.
    """
    trace = run.trace
    static = trace.run_prologue(run.leaves)
    groups_of = {c: sorted({leaf_groups[leaf] for leaf in c.weight.leaves}) for c in trace.contacts}

    def one(coefficients, example):
        def loss(totals):
            hooks = {
                c: SumHook(own, [coefficients[group] for group in groups_of[c]])
                for c, own in zip(trace.contacts, totals, strict=True)
            }
            return trace.run_body(static, example, hooks, records=False)[0]

        zeros = {c: jnp.zeros(c.weight.shape, wide_dtype(c.weight.dtype)) for c in trace.contacts}
        return jax.grad(loss)([[zeros[c]] * len(groups_of[c]) for c in trace.contacts])

    totals = dict(zip(trace.contacts, jax.vmap(one, out_axes=None)(coefficients, examples), strict=True))
    return run.pulled_to_leaves(leaf_groups, coefficients, lambda c, group: totals[c][groups_of[c].index(group)])
