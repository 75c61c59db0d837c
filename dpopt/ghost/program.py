"""The traced loss as a program of two parts, which can be run with taps.

The **prologue** computes what does not depend on the example. The **body** computes the rest for one
example, and the engine maps it over the batch. A ``Scope`` is one level of the body. ``scan`` and
``checkpoint`` have their own scopes: taps become scanned inputs, recorded inputs become outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from dpopt.common.trees import accumulator_dtype
from dpopt.ghost.values import Contact, ContactOp, Hook, Made, Op, Record, Value, read


class Scope:
    """The equations of one level of the body; the outermost scope also owns the prologue."""

    def __init__(self, parent: Scope | None, trace: Trace):
        self.parent, self.trace = parent, trace
        self.ops: list[Op | ContactOp | Block] = []
        self.results: list[Value] = []
        self.promoted: dict[Value, Value] = {}

    def hoist(self, op: Op) -> None:
        """Moves an equation that does not depend on the example to the prologue."""
        if self.parent is not None:
            return self.parent.hoist(op)
        self.trace.prologue.append(op)

    def locate(self, value: Value) -> tuple[Value, tuple[tuple[int, bool], ...]]:
        """The prologue's copy of a value, and for each enclosing scan its length and whether the value is scanned."""
        return (value, ()) if self.parent is None else self.parent.locate(value)

    def promote(self, value: Value) -> Value:
        """The weight as a value of the body, with a tap on it."""
        if value not in self.promoted:
            spread = self._spread(value, value.made) if value.made and value.made.spreads(value) else None
            self.promoted[value] = spread or self._tapped(value)
        return self.promoted[value]

    def _tapped(self, value: Value) -> Value:
        if self.parent is not None:
            return self.parent.promote(value)
        contact = self.trace.new_contact(value, None, value.shape, value.dtype)
        contact.of_step = contact
        tapped = Value(value.shape, value.dtype, dynamic=True)
        self.trace.identities.append(ContactOp(contact, lambda weight: [weight], [value], [tapped], None))
        return tapped

    def _spread(self, value: Value, made: Made) -> Value:
        """A weight that is spread over an array, such as a bias over positions: what is spread has the tap."""
        spread = Value(value.shape, value.dtype, dynamic=True)
        run = functools.partial(made.eqn.primitive.bind, **made.eqn.params)
        self.ops.append(Op(lambda x: [run(x)], made.eqn.primitive, [self.promote(made.inputs[0])], [spread]))
        return spread

    def contacts(self) -> list[Contact]:
        """The contacts of this scope and of those within, in the order of the equations."""
        found = []
        for op in self.ops:
            if isinstance(op, ContactOp):
                found.append(op.contact)
            elif isinstance(op, Block):
                found.extend(op.scope.contacts())
        return found

    def rematerialised(self) -> list[Remat]:
        """The blocks of this scope and of those within that are computed again, without those in such blocks."""
        found: list[Remat] = []
        for op in self.ops:
            if isinstance(op, Block):
                found += [op] if isinstance(op, Remat) else op.scope.rematerialised()
        return found

    def needs(self) -> set[Value]:
        """The values that this scope's equations and results read, as named in this scope."""
        found = set(self.results)
        for op in self.ops:
            found.update(op.inputs)
            if isinstance(op, Block):
                found |= op.scope.reads()
        return found

    def reads(self) -> set[Value]:
        """``needs``, as named in the enclosing scope."""
        return self.needs()

    def evaluate(self, env: dict[Value, Any], taps: dict[Contact, Any], record: Record | None) -> None:
        for op in self.ops:
            op.evaluate(env, taps, record)


class LoopScope(Scope):
    """The body of a scan. ``stacked`` maps a value of one step to the stack of all steps' values outside."""

    parent: Scope

    def __init__(self, parent: Scope, trace: Trace, length: int):
        super().__init__(parent, trace)
        self.length = length
        self.stacked: dict[Value, Value] = {}

    def hoist(self, op: Op) -> None:
        # Hoisted out of the loop: run once if it is the same in every step, else for all steps by vmap.
        mapped = [v in self.stacked for v in op.inputs]
        if not any(mapped):
            return self.parent.hoist(op)
        apart = all(m for m, v in zip(mapped, op.inputs, strict=True) if v.leaves)
        stacks = [self.stacked[v].entry for m, v in zip(mapped, op.inputs, strict=True) if m and v.leaves]
        layers = {e.layers if e else 0 for e in stacks} if apart else {0}
        outside = []
        for v in op.outputs:
            # A parameter that all steps share (multiplied by one they do not) is copied to each: its entries add up.
            v.entry = v.entry._replace(order=None) if v.entry and apart else None
            # The loop's steps number layers, and so do a step's own axes, if they are what they were in its inputs.
            inside = v.entry.layers if v.entry else 0
            entry = v.entry and v.entry._replace(layers=inside + 1 if layers == {inside + 1} else 0)
            stack = Value((self.length, *v.shape), v.dtype, False, v.leaves, entry)
            self.stacked[v] = stack
            outside.append(stack)
        axes = [0 if m else None for m in mapped]
        batched = jax.vmap(lambda *a: op.run(*a), in_axes=axes, axis_size=self.length)
        self.parent.hoist(Op(batched, op.primitive, [self.stacked.get(v, v) for v in op.inputs], outside))

    def reads(self) -> set[Value]:
        return {self.stacked.get(v, v) for v in self.needs()}

    def locate(self, value: Value) -> tuple[Value, tuple[tuple[int, bool], ...]]:
        mapped = value in self.stacked
        outer, loops = self.parent.locate(self.stacked[value] if mapped else value)
        return outer, (*loops, (self.length, mapped))

    def _tapped(self, value: Value) -> Value:
        if value not in self.stacked:
            return super()._tapped(value)
        inner = Value(value.shape, value.dtype, dynamic=True)
        self.stacked[inner] = self.parent.promote(self.stacked[value])
        return inner


@dataclass(eq=False, slots=True, frozen=True)
class Block:
    """An equation with its own scope; it also reads what that scope reads."""

    scope: Scope
    inputs: list[Value]  # besides what the scope reads: initial carries
    outputs: list[Value]

    def evaluate(self, env: dict[Value, Any], taps: dict[Contact, Any], record: Record | None) -> None:
        raise NotImplementedError


@dataclass(eq=False, slots=True, frozen=True)
class Remat(Block):
    """``jax.checkpoint``: recorded inputs are outputs, the rest is recomputed under the user's policy."""

    options: dict[str, Any]

    def evaluate(self, env: dict[Value, Any], taps: dict[Contact, Any], record: Record | None) -> None:
        contacts = self.scope.contacts()
        tapped = [c for c in contacts if c in taps]
        reads = [v for v in self.scope.reads() if v in env]

        def body(values: list[jax.Array], own_taps: list[Any]):
            local, own = dict(zip(reads, values, strict=True)), _own(record)
            self.scope.evaluate(local, dict(zip(tapped, own_taps, strict=True)), own)
            return read(local, self.scope.results), _found(own, contacts)

        outs, recorded = jax.checkpoint(body, **self.options)(read(env, reads), [taps[c] for c in tapped])
        env.update(zip(self.outputs, outs, strict=True))
        if record is not None:
            record.update(zip(contacts, recorded, strict=True))


@dataclass(eq=False, slots=True, frozen=True)
class Loop(Block):
    """A ``scan``; the first ``len(carries)`` outputs are carries."""

    scope: LoopScope
    carries: list[Value]  # inside, at the start of a step
    options: dict[str, Any]

    def evaluate(self, env: dict[Value, Any], taps: dict[Contact, Any], record: Record | None) -> None:
        contacts = self.scope.contacts()
        tapped = [c for c in contacts if c in taps]
        needed, count = self.scope.needs(), len(self.carries)
        stacks = [(v, s) for v, s in self.scope.stacked.items() if v in needed]
        scanned = dict(zip((v for v, _ in stacks), read(env, [s for _, s in stacks]), strict=True))
        split = {c: _split(taps[c]) for c in tapped}

        def body(carry: list[jax.Array], x: tuple[list[jax.Array], list[Any]]):
            values, own_taps = x
            own_taps = [join(own) for own, (_, join) in zip(own_taps, split.values(), strict=True)]
            local = {**env, **dict(zip([*self.carries, *scanned], [*carry, *values], strict=True))}
            own = _own(record)
            self.scope.evaluate(local, dict(zip(tapped, own_taps, strict=True)), own)
            results = read(local, self.scope.results)
            return results[:count], (results[count:], _found(own, contacts))

        xs = (list(scanned.values()), [scanned_tap for scanned_tap, _ in split.values()])
        carry, (ys, recorded) = lax.scan(body, read(env, self.inputs), xs, **self.options)
        env.update(zip(self.outputs, [*carry, *ys], strict=True))
        if record is not None:
            record.update(zip(contacts, recorded, strict=True))


def _own(record: Record | None) -> Record | None:
    """An empty record for a scope, if the program is recorded."""
    return None if record is None else record.empty()


def _found(record: Record | None, contacts: Sequence[Contact]) -> list[tuple[jax.Array | None, ...]]:
    return [(record or {}).get(c, (None, None)) for c in contacts]


def _split(given: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The part of a tap that a loop scans over, and a function that makes one step's tap of its slice."""
    return given.split() if isinstance(given, Hook) else (given, lambda own: own)


@dataclass(eq=False)
class Trace:
    """The traced loss of one example."""

    # Of the parameters and the example, as the user wrote it.
    loss: core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]  it is public
    leaves: list[Value] = field(default_factory=list)
    example: list[Value] = field(default_factory=list)
    prologue: list[Op] = field(default_factory=list)
    contacts: list[Contact] = field(default_factory=list)
    identities: list[ContactOp] = field(default_factory=list)  # contacts on a weight itself
    products: set[Value] = field(default_factory=set)  # weights that the loss forms, in whose place their factors are
    body: Scope = field(init=False)  # set by trace.py: a scope refers to its trace
    results: list[Value] = field(default_factory=list)  # the loss, then the auxiliary leaves
    aux_tree: Any = None
    tapped_by_layer: frozenset[int] = frozenset()  # see `trace.trace_loss`
    can_be_vmapped: bool = True  # whether JAX has rules to map all of it over examples

    def new_contact(self, weight: Value, *args: Any, **kwargs: Any) -> Contact:
        self.contacts.append(Contact(len(self.contacts), weight, *args, **kwargs))
        return self.contacts[-1]

    @functools.cached_property
    def narrowest(self) -> np.dtype:
        """The narrowest dtype on gradients' way from the contacts to the parameters, whose bounds hold for them.

        A loss may compute in float32 with parameters, and so with coefficients, in float64."""
        dtypes = [c.tap_dtype for c in self.contacts]
        dtypes += [v.dtype for op in self.prologue for v in op.outputs if v.leaves]
        wide = (jnp.finfo(accumulator_dtype(d)).dtype for d in dtypes if jnp.issubdtype(d, jnp.inexact))
        return min(wide, key=lambda d: d.itemsize, default=np.dtype(np.float32))

    def behind(self, values: Iterable[Value]) -> list[Op]:
        """The equations of the prologue that some of its values are computed by, in order."""
        needed, found = {*values}, []
        for op in reversed(self.prologue):
            if not needed.isdisjoint(op.outputs):
                needed.update(op.inputs)
                found.append(op)
        return found[::-1]

    def run_prologue(
        self, leaves: Sequence[jax.Array], ops: Sequence[Op] | None = None, wide: bool = False
    ) -> dict[Value, jax.Array]:
        """The values of the prologue, or of some of its ``ops``.

        ``wide``: from wide ``leaves``, so that pulling back does not round to 16 bits."""
        env = dict(zip(self.leaves, leaves, strict=True))
        for op in self.prologue if ops is None else ops:
            values = read(env, op.inputs)
            outs = op.wide(values) if wide and any(v.leaves for v in op.inputs) else op.run(*values)
            env.update(zip(op.outputs, outs, strict=True))
        return env

    def run_body(
        self, static: dict[Value, Any], example: Sequence[jax.Array], taps: dict[Contact, Any], record: Record | None
    ) -> tuple[jax.Array, list[jax.Array], list[tuple[jax.Array | None, ...]]]:
        """Loss, auxiliary leaves, and for each contact its recorded input and output, for one example.

        A tap is an array, added to the contact's output for differentiation, or a hook (hooks.py)."""
        env = {**static, **dict(zip(self.example, example, strict=True))}
        for op in self.identities:
            op.evaluate(env, taps, record)
        self.body.evaluate(env, taps, record)
        loss, *aux = read(env, self.results)
        return loss, aux, _found(record, self.contacts)
