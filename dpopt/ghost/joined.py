"""Gradients of parameters, formed from all that they are used for: pulled back from their contacts and added up.

A weight of an unrolled network has a contact for every use. An example's gradient at each of them takes a product, and
so does the weighted sum. Formed once and kept, the gradient is multiplied by nothing but its coefficient, and its
norm is of the same numbers that are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpopt.ghost.chunks import in_chunks
from dpopt.ghost.contacts import Formed, Recorded, Records, Seen, form, form_together, used_alike
from dpopt.ghost.run import Run
from dpopt.ghost.selection import without_bad_entries
from dpopt.ghost.values import Contact

# From one example's records to its gradients of some parameters, and those at the contacts, folded where there are
# factors; None for contacts whose gradients are only formed together with others.
PulledBack: TypeAlias = Callable[[Sequence[Recorded]], tuple[list[Array], list[Any]]]


def pulled_back(run: Run, contacts: Sequence[Contact], leaves: Sequence[int], records: Records) -> PulledBack:
    """The map from one example's records at ``contacts``, like those in ``records``, to its gradients of ``leaves``.

    Of numbers with one cotangent, such as a penalty in the loss, the gradient is pulled back once for all examples."""
    numbers = _alike(contacts)
    fixed = run.pull_back(numbers, [jnp.ones(c.weight.shape) for c in numbers], leaves) if numbers else None
    joined = used_alike(contacts, records)
    apart = {c for own in joined for c in own}  # whose gradients are not formed one by one

    def one(records: Sequence[Recorded]) -> tuple[list[Array], list[Any]]:
        at = dict(zip(contacts, records, strict=True))
        summed = {own[0]: form_together(own, [cast(Seen, at[c]) for c in own]) for own in joined}
        formed = [None if c in apart else c.unfold(form(c, r)) for c, r in at.items()]
        summed |= {c: g for c, g in zip(contacts, formed, strict=True) if g is not None}
        if fixed is None:
            return run.pull_back([*summed], [*summed.values()], leaves), formed
        y, others = summed[numbers[0]].reshape(()), [c for c in summed if c not in numbers]
        gradients = run.pull_back(others, [summed[c] for c in others], leaves)
        return [g + y.astype(g.dtype) * d for g, d in zip(gradients, fixed, strict=True)], formed

    return one


def _alike(contacts: Sequence[Contact]) -> list[Contact]:
    """Those contacts whose weights are numbers, if they have one cotangent and are beside others; else none."""
    numbers = [c for c in contacts if c.is_number]
    return numbers if len({c.shares or c for c in numbers}) == 1 and len(numbers) < len(contacts) else []


def joined(run: Run, seen: Mapping[Contact, Seen], mask: jax.Array) -> dict[Contact, Recorded]:
    """What was seen; of parameters in `Plan.joined` their gradients, ``[B, ...]``, in place of it.

    Those that ``mask`` excludes are finite, whatever padding holds."""
    found: dict[Contact, Recorded] = {**seen}
    for own in run.plan.joined:
        records = {c: cast(Seen, found.pop(c))._replace(out=None) for c in own.contacts}
        one = pulled_back(run, own.contacts, own.leaves, records)
        several = jax.vmap(lambda rows, one=one: one(rows)[0])
        size, chunk = run.plan.batch_size, run.plan.chunk(own.contacts)
        gradients = in_chunks(several, [*records.values()], size, chunk)
        found |= zip(own.at, map(Formed, without_bad_entries(~mask, gradients)), strict=True)
    return found
