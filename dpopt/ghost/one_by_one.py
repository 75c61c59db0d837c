"""Gradients of single examples, formed from what the passes recorded: slow, and rare.

For examples whose norm float32 could not tell otherwise, or whose offset cancels the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
    certain: jax.Array,
    leaf_norms: list[jax.Array],
    recorded: list,
    kept: dict,
    leaves: Sequence[int],
) -> list[jax.Array]:
    """Norms of the gradients themselves where they are not certain, for a sum that is computed in another way.

    Args:
        leaf_norms: of ``leaves``, as is what is returned.
        recorded: at the contacts of these.
    """
    contacts = run.contacts_of(leaves)
    gains = run.gains(contacts, leaves)

    def one(rows):
        recorded, is_certain, known = rows
        formed = _formed(contacts, recorded, kept)
        own = [safe_norm(g.reshape(-1), axis=0) for g in _gradient(run, contacts, formed, leaves)]
        totals = run.roundings(gains, contacts, formed, recorded, kept)
        own = [with_roundings(n, t) for n, t in zip(own, totals, strict=True)]
        return [jnp.where(is_certain, n, o.astype(n.dtype)) for n, o in zip(known, own, strict=True)]

    rows = recorded, certain, leaf_norms
    together = _together(run)
    if together == 1:
        return lax.map(one, rows)
    several = lax.map(jax.vmap(one), jax.tree.map(lambda x: split_rows(x, together), rows))
    return jax.tree.map(join_rows, several)


def add(
    run: Run,
    total: _sums.Sum,
    weigh: Callable[[list[jax.Array]], list[jax.Array]],
    chosen: jax.Array,
    leaf_norms: list[jax.Array],
    recorded: list,
    fine: list[jax.Array],
    kept: dict,
) -> tuple[_sums.Sum, list[jax.Array]]:
    """``total`` and ``c_i (S g_i + o)`` of the ``chosen`` examples, and the norms, theirs of the gradients themselves.

    Tells a gradient that is not finite (contributes zero) from one whose squares overflow (clipped as usual: its norm
    is taken relative to its largest entry).

    Args:
        weigh: coefficients for norms, ``[1]`` each.
        fine: at each contact, whether what is recorded of an example was finite.
    """
    together, contacts, leaves = _together(run), run.trace.contacts, range(len(run.leaves))

    def one(rows):
        recorded, fine, known, is_chosen = rows
        gradient = _gradient(run, contacts, _formed(contacts, recorded, kept), leaves)
        good = [jnp.all(jnp.isfinite(g)) for g in gradient]
        for contact, is_fine in zip(contacts, fine, strict=True):
            for leaf in contact.weight.leaves:
                good[leaf] &= is_fine
        gradient = _settled(gradient, good)
        own = [jnp.where(f, safe_norm(g.reshape(-1), axis=0), jnp.nan).astype(n.dtype)
               for f, g, n in zip(good, gradient, known, strict=True)]  # fmt: skip
        weights = [c[0] for c in weigh([n[None] for n in own])]
        parts = [jnp.where(is_chosen, g * c, 0).astype(x.dtype)
                 for g, c, x in zip(gradient, weights, run.wide, strict=True)]  # fmt: skip
        return parts, [jnp.where(is_chosen, o, n) for o, n in zip(own, known, strict=True)]

    def several(total, rows):
        parts, norms = jax.vmap(one)(rows)
        return _sums.add(total, _sums.Sum([jnp.sum(x, axis=0) for x in parts])), norms

    rows = jax.tree.map(lambda x: split_rows(x, together), (recorded, fine, leaf_norms, chosen))
    # By themselves, in pairs of floats if there are many: one after the other onto the total, each would round all.
    nothing = _sums.zero([jnp.zeros_like(x) for x in run.wide], together, run.plan.batch_size // together)
    more, norms = lax.scan(several, nothing, rows)
    return _sums.add(total, more), jax.tree.map(join_rows, norms)


def _settled(gradient: list[jax.Array], good: list[jax.Array]) -> list[jax.Array]:
    """Zeros for what is not finite, computed once for the norm and for the sum: XLA might do so for each of them."""

    def without_bad_ones(state):
        return jnp.array(True), [jnp.where(f, g, 0) for f, g in zip(good, state[1], strict=True)]

    state = jnp.all(jnp.stack([jnp.array(True), *good])), gradient
    return lax.while_loop(lambda state: ~state[0], without_bad_ones, state)[1]


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
