"""Explains what the ghost engine would do with a loss, as a table."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from dpopt.common import trees, validate
from dpopt.common.types import Example, LossFn, PyTree
from dpopt.engines.clips import ClipFunction, layer_axes, own_clip_norms
from dpopt.ghost.engine import plan_example
from dpopt.ghost.memory import Memory, Way, choose, estimate
from dpopt.ghost.methods import EXPLICIT
from dpopt.ghost.plan import Plan


@dataclass(frozen=True)
class Explanation:
    """What the ghost engine would do with a loss; ``print`` shows it as a table."""

    plan: Plan
    way: Way
    memory: Memory

    def __str__(self) -> str:
        plan, ordinary = self.plan, max(self.plan.batch_size * self.plan.ordinary_cost, 1.0)
        return "\n".join([
            *_table(("parameter", "shape", "contacts", "norm", "operations", "extra bytes"), self._parameters()),
            "",
            f"A batch of {plan.batch_size}: an ordinary gradient takes about {ordinary:.2g} operations (memory traffic "
            f"included) and {_size(self.memory.ordinary)}. In units of that:",
            "",
            *_table(("way", "operations", "memory"), self._ways()),
            "",
            f"engine='auto' takes {self._taken()}: {self.way.reason}.",
        ])  # fmt: skip

    def _parameters(self) -> list[tuple[str, ...]]:
        """One row per parameter, or per group of parameters that differ only in the numbers in their names."""
        equal: dict[tuple[str, ...], list[str]] = {}
        taken = self.way.plan  # where memory allows, it keeps more gradients
        shown = self.plan if taken is None or taken.streamed else taken
        joined = {plan.leaf: plan for own in shown.joined for plan in own.plans}
        for leaf in (joined.get(plan.leaf, plan) for plan in shown.leaves):
            names = Counter("identity" if c.primitive is None else c.primitive.name for c in leaf.contacts)
            notes = ", standardized" if leaf.standardized else ""
            methods = Counter(part.method.name for part in leaf.parts or [leaf])
            if leaf.leaf in joined or (set(methods) == {EXPLICIT.name} and set(leaf.contacts) <= shown.kept):
                notes += ", kept"
            row = (
                str(self.plan.trace.leaves[leaf.leaf].shape),
                _listed(names) or "none",
                _listed(methods) + notes,
                f"{self.plan.batch_size * leaf.operations:.2g}",
                f"{self.plan.batch_size * leaf.bytes:.2g}",
            )
            path = self.plan.paths[leaf.leaf]
            equal.setdefault((re.sub(r"\d+", "*", path), *row), []).append(path)
        return [
            (paths[0] if len(paths) == 1 else f"{name} (x{len(paths)})", *row) for (name, *row), paths in equal.items()
        ]

    def _ways(self) -> list[tuple[str, ...]]:
        """The cost of each way. The second of two passes is an ordinary gradient."""
        plan, memory, ordinary = self.plan, self.memory, max(self.plan.ordinary_cost, 1.0)
        found = [("ghost", plan.ghost_cost, memory.recorded(1))]
        if (parts := plan.parts) > 1:
            name = f"ghost in {parts} parts of {plan.batch_size // parts}"
            found.append((name, plan.ghost_cost, memory.recorded(parts)))
        found += [
            ("ghost in two passes", plan.ghost_cost + plan.ordinary_cost, memory.streamed),
            ("vmap", plan.vmap_cost, memory.vmap),
        ]
        return [(name, f"{time / ordinary:.2f}", f"{size / max(memory.ordinary, 1):.2f}") for name, time, size in found]

    def _taken(self) -> str:
        if self.way.plan is None:
            return "vmap"
        parts = self.way.parts
        if not self.way.plan.streamed:
            return "ghost" if parts == 1 else f"ghost in {parts} parts"
        if not self.way.plan.is_one_pass:
            return "ghost in two passes, for the norms and the sum"
        return "ghost in one pass" if parts == 1 else f"ghost in one pass over each of {parts} parts"

    def __repr__(self) -> str:
        # Not the table: `explain` has already printed it when a notebook shows its value.
        ratio = self.plan.ghost_cost / max(self.plan.ordinary_cost, 1.0)
        return f"<Explanation: {len(self.plan.leaves)} parameters, {ratio:.2f} times an ordinary gradient>"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    rows = [header, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def _listed(names: Counter[str]) -> str:
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in names.items())


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def explain(
    loss_fn: LossFn,
    params: PyTree,
    example: Example,
    *,
    batch_size: int,
    scale: PyTree = None,
    has_aux: bool = False,
    clip: ClipFunction | None = None,
    memory: float | int = 1.25,
) -> Explanation:
    """Prints and returns how the ghost engine would clip this loss.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``.
        params: pytree of arrays.
        example: one example; only shapes matter.
        batch_size: examples in a batch.
        scale: the pre-clip diagonal, if there is one.
        has_aux: whether ``loss_fn`` returns ``(scalar, aux)``.
        clip: the clip function, if it clips parameters or layers separately (`dpopt.GroupClip`, `dpopt.LayerwiseClip`).
        memory: as for `dpopt.per_example_grads`.

    Raises:
        CannotFollow: the loss cannot be traced; ValueError, TypeError: for a bad argument.

    *Privacy*: Uses shapes only; no private data is read.

    >>> import jax.numpy as jnp
    >>> plan = explain(lambda w, x: (x @ w).sum(), jnp.ones((3, 2)), jnp.ones(3), batch_size=8)
    parameter  shape   contacts     norm      operations  extra bytes
               (3, 2)  dot_general  rank_one  1.3e+03     0
    <BLANKLINE>
    A batch of 8: an ordinary gradient takes about 2.9e+02 operations (memory traffic included) and 208 bytes. In units of that:
    <BLANKLINE>
    way                  operations  memory
    ghost                5.44        1.00
    ghost in two passes  6.44        1.00
    vmap                 33.00       1.92
    <BLANKLINE>
    engine='auto' takes vmap: all gradients of the batch together take at most 64 kB, where both engines run in microseconds, whatever the table says, and vmap compiles faster.
    """  # noqa: E501
    validate.positive_int(batch_size=batch_size)
    validate.positive(memory=memory)
    example = trees.structs(example)
    limits, axes = ((), ()) if clip is None else (own_clip_norms(clip, params), layer_axes(clip, params))
    plan = plan_example(loss_fn, params, example, batch_size, scale, None, has_aux, axes)
    way = choose(plan, memory, may_split=True, may_vmap=True, limits=limits, layer_axes=axes)
    explanation = Explanation(plan, way, estimate(plan))
    print(explanation)
    return explanation
