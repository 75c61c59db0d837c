"""Gradients of single examples, formed from what the passes recorded: slow, and rare.

For examples whose norm float32 could not tell otherwise, or whose offset cancels the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from dpopt import _sums
from dpopt._norms import safe_norm
from dpopt.ghost.chunks import join_rows, split_rows
from dpopt.ghost.contacts import transposed, unfold
from dpopt.ghost.run import Run
from dpopt.ghost.squares import with_roundings
from dpopt.ghost.values import Contact


def norms(
    run: Run,
    mask: jax.Array,
    certain: jax.Array,
    leaf_norms: list[jax.Array],
    recorded: list,
    kept: dict,
    leaves: Sequence[int],
) -> tuple[list[jax.Array], jax.Array]:
    """Norms of the gradients themselves where they are not certain, and which examples count.

    Tells a gradient that is not finite (contributes zero) from one whose squares overflow (clipped as usual: its norm
    is taken relative to its largest entry).

    Args:
        leaf_norms: of ``leaves``, as is what is returned.
        recorded: at the contacts of these.
    """
    contacts = run.contacts_of(leaves)
    gains = run.gains(contacts, leaves)

    def one(rows):
        recorded, is_certain, known, keep = rows
        formed = _formed(contacts, recorded, kept)
        own = [safe_norm(g.reshape(-1), axis=0) for g in _gradient(run, contacts, formed, leaves)]
        totals = run.roundings(gains, contacts, formed, recorded, kept)
        own = [with_roundings(n, t) for n, t in zip(own, totals, strict=True)]
        keep &= is_certain | jnp.all(jnp.isfinite(jnp.stack(own)))
        return [jnp.where(is_certain, n, o.astype(n.dtype)) for n, o in zip(known, own, strict=True)], keep

    rows = recorded, certain, leaf_norms, mask
    together = _together(run)
    if together == 1:
        return lax.map(one, rows)
    several = lax.map(jax.vmap(one), jax.tree.map(lambda x: split_rows(x, together), rows))
    return jax.tree.map(join_rows, several)


def add(run: Run, total: _sums.Sum, weights: list, chosen: jax.Array, recorded: list, kept: dict) -> _sums.Sum:
    """``total`` and ``c_i (S g_i + o)`` of the ``chosen`` examples.

    For those whose offset cancels the gradient: in the weighted sum the two are added up apart.
    """
    together, contacts = _together(run), run.trace.contacts

    def one(rows):
        recorded, weights, keep = rows
        gradient = _gradient(run, contacts, _formed(contacts, recorded, kept), range(len(run.leaves)))
        return [jnp.where(keep, g * c, 0).astype(x.dtype) for g, c, x in zip(gradient, weights, run.wide, strict=True)]

    def several(total, rows):
        return _sums.add(total, _sums.Sum([jnp.sum(x, axis=0) for x in jax.vmap(one)(rows)])), None

    rows = jax.tree.map(lambda x: split_rows(x, together), (recorded, weights, chosen))
    # By themselves, in pairs of floats if there are many: one after the other onto the total, each would round all.
    nothing = _sums.zero([jnp.zeros_like(x) for x in run.wide], together, run.plan.batch_size // together)
    return _sums.add(total, lax.scan(several, nothing, rows)[0])


def _together(run: Run) -> int:
    """How many examples go together where one would do: each device visits its own share of a sharded batch."""
    return math.gcd(run.plan.batch_size, jax.device_count())


def _formed(contacts: Sequence[Contact], recorded: list, kept: dict) -> list[jax.Array]:
    """One example's gradients at the contacts: the primitives transposed, few operations, hence quick to compile."""
    batches_of_one = jax.tree.map(lambda x: x[None], recorded)
    return [
        unfold(c, r) if c in kept else transposed(c, alone[0], alone[1], jnp.ones(1))
        for c, r, alone in zip(contacts, recorded, batches_of_one, strict=True)
    ]


def _gradient(run: Run, contacts: Sequence[Contact], formed: list, leaves: Sequence[int]) -> list[jax.Array]:
    """One example's ``S g + o``."""
    return [run.affine(i, g) for i, g in zip(leaves, run.pull_back(contacts, formed, leaves), strict=True)]
