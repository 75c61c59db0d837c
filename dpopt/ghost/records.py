"""What the passes recorded, without copies of the batch: inputs that are its arrays are read in place.

Padding may hold anything there, and so may examples that turn out not to be finite. Norms are of inputs in which
padding is zero, or zero themselves for padding, and sums leave out, block by block, every example whose coefficient is
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
from jax import lax

from dpopt.ghost.contacts import Formed, Recorded, Seen
from dpopt.ghost.leaf_norms import Bounds, LeafNorms, SeenAt, leaf_norms
from dpopt.ghost.methods import RANK_ONE
from dpopt.ghost.plan import Plan
from dpopt.ghost.rows import tf32
from dpopt.ghost.run import Run
from dpopt.ghost.selection import settled, without_bad_entries
from dpopt.ghost.values import Contact

_Record = TypeVar("_Record", bound=Recorded)


def without_given(
    records: Mapping[Contact, _Record],
) -> tuple[dict[Contact, _Record], Callable[[Mapping[Contact, Any]], dict[Contact, Any]]]:
    """Records without inputs that are arrays of the batch, and a function that puts these back.

    A loop would copy them: they are not the engine's to write to."""
    given = {c: r.x for c, r in records.items() if c.given is not None and isinstance(r, Seen)}

    def put_back(records: Mapping[Contact, Any]) -> dict[Contact, Any]:
        return {c: r._replace(x=given[c]) if c in given else r for c, r in records.items()}

    return {c: cast(Any, r)._replace(x=None) if c in given else r for c, r in records.items()}, put_back


def settled_records(
    bad: jax.Array, seen: SeenAt, batch: Sequence[jax.Array] | None = None, quick: Collection[Contact] = ()
) -> dict[Contact, Any]:  # fmt: skip
    """`settled`, without copies of inputs that are arrays of the ``batch``, whatever padding holds there.

    They are read again only then: XLA would compute early what reads them. ``quick``: whose inputs are rounded."""
    rest = settled(bad, without_given(seen)[0])
    given = [c for c in rest if c.given is not None]
    inputs = [seen[c].x for c in given]
    if batch is not None:
        inputs = [batch[cast(int, c.given)].reshape(x.shape) for c, x in zip(given, inputs, strict=True)]
        inputs = [tf32(x) if c in quick else x for c, x in zip(given, inputs, strict=True)]
    if given:
        inputs, _ = lax.optimization_barrier((inputs, rest[given[0]].y))
    return rest | {c: rest[c]._replace(x=x) for c, x in zip(given, inputs, strict=True)}


def norms_in_place(
    run: Run, seen: SeenAt, bad: jax.Array, mask: jax.Array, batch: Sequence[jax.Array],
    known: Mapping[int, Bounds] | None = None,
) -> LeafNorms:  # fmt: skip
    """`leaf_norms` of what is `settled_records`, and the records.

    They are finite for padding whatever the arrays of the batch hold there. If not, norms of parameters that are
    `_only_squared` are replaced; elsewhere entries of the input are, which copies it."""
    seen = settled_records(bad, seen, batch, run.plan.quick)
    alone = _only_squared(run.plan)
    copied = {c for c in seen if c.given is not None} - {*alone.values()}
    cleaned = {c: r._replace(x=without_bad_entries(~mask, [r.x])[0]) if c in copied else r for c, r in seen.items()}
    found = leaf_norms(run, cleaned, known)

    def replaced(norms: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        return {i: without_bad_entries(~mask, [n])[0] if i in alone else n for i, n in norms.items()}

    upper, lower = ([*replaced(dict(enumerate(x))).values()] for x in (found.upper, found.lower))
    records = {
        c: r if c.given is None or isinstance(r, Formed) else r._replace(x=seen[c].x) for c, r in found.records.items()
    }
    return LeafNorms(upper, lower, records, found.diagonals, replaced(found.terms))


def _only_squared(plan: Plan) -> dict[int, Contact]:
    """For some parameters, the contact whose input is an array of the batch, of which norms read one row's squares."""
    alone = {p.leaf: p.contacts[0] for p in plan.leaves if p.method is RANK_ONE}
    return {i: c for i, c in alone.items() if c.given is not None}
