"""What the ghost engine would do with a loss, as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpopt.ghost.engine import plan_example
from dpopt.ghost.memory import DEFAULT_MEMORY, Way, choose
from dpopt.ghost.plan import Plan


@dataclass(frozen=True)
class Explanation:
    """What the ghost engine would do; ``print`` it."""

    plan: Plan
    way: Way

    def __str__(self) -> str:
        header = ("parameter", "shape", "contacts", "norm", "operations", "extra bytes")
        rows: list[tuple[str, ...]] = [header]
        for leaf in self.plan.leaves:
            names: dict[str, int] = {}
            for c in leaf.contacts:
                names[c.primitive] = names.get(c.primitive, 0) + 1
            notes = ", standardized" if leaf.standardized else ""
            if leaf.method == "explicit" and set(leaf.contacts) <= self.plan.kept:
                notes += ", kept"
            rows.append((
                self.plan.paths[leaf.leaf],
                str(self.plan.trace.leaves[leaf.leaf].shape),
                ", ".join(n if k == 1 else f"{n} x{k}" for n, k in names.items()) or "none",
                leaf.method + notes,
                f"{leaf.operations:.2g}",
                f"{leaf.bytes:.2g}",
            ))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
        plan = self.plan
        ordinary = max(plan.ordinary_cost, 1.0)
        parts = self.way.parts
        in_parts = f", in {parts} parts of {plan.batch_size // parts}" if parts > 1 else ""
        lines += [
            "",
            f"batch of {plan.batch_size}{in_parts}: an ordinary gradient takes {ordinary:.2g} operations, "
            f"ghost {plan.ghost_cost / ordinary:.2f} times as many, "
            f"vmap {plan.vmap_cost / ordinary:.2f} times (memory traffic included)",
            f"engine='auto' would take {self._taken()}",
        ]
        return "\n".join(lines)

    def _taken(self) -> str:
        if self.way.plan is None:
            return "vmap"
        if not self.way.plan.streamed:
            return "ghost"
        return (
            "ghost, in two passes over the batch, for the norms and for the sum: what it records in one would take "
            "more memory than is allowed, 1.25 times an ordinary gradient's"
        )

    def __repr__(self) -> str:
        # Not the table, which `explain` has printed already where a notebook shows this.
        ratio = self.plan.ghost_cost / max(self.plan.ordinary_cost, 1.0)
        return f"<Explanation: {len(self.plan.leaves)} parameters, {ratio:.2f} times an ordinary gradient>"


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
    engine='auto' would take vmap
    """  # noqa: E501
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), example)
    plan = plan_example(loss_fn, params, example, batch_size, scale, None, has_aux)
    way = choose(plan, loss_fn, params, example, has_aux, DEFAULT_MEMORY, may_split=True, may_vmap=True)
    explanation = Explanation(plan, way)
    print(explanation)
    return explanation
