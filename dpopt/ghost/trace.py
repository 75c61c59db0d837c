"""Tracing: find where parameters meet the example, and put a tap there.

The loss of **one example** is traced to a jaxpr and its equations are sorted into two programs:

* the **prologue**: everything that does not depend on the example. What it computes from
  parameters (casts, transposes, weight standardisation, LoRA products) is still "the weights",
  and the gradient with respect to it is pulled back to the parameters at the end;
* the **body**: everything that depends on the example.

A **contact** is where a value of the prologue that depends on parameters enters the body. If a rule
covers the equation (rules.py), the contact sits on its *output*: the tap's cotangent together with
the other input gives the weight's gradient without forming it. Otherwise it sits on the *weight
itself*, and the tap's cotangent is that weight's per-example gradient, whatever consumes it
(``cond``, ``custom_vjp``, an addition): exact, by JAX's own differentiation.

Calls are inlined. In a ``scan``, what does not depend on the example moves out to the prologue (over
the steps by ``vmap``), taps become scanned inputs, and the recorded inputs become scanned outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpopt.ghost import rules

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_REMAT = {"remat", "remat2", "checkpoint"}
# Every output entry copies one input entry and no input entry is copied twice.
_LAYOUT = {
    "reshape", "transpose", "squeeze", "expand_dims", "rev", "copy", "copy_p", "slice", "split",
    "convert_element_type", "reduce_precision", "broadcast_in_dim", "dynamic_slice",
}  # fmt: skip
# Every output entry is a function of one input entry.
_ELEMENTWISE = {
    "neg", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sqrt", "rsqrt", "square",
    "abs", "sin", "cos", "integer_pow", "sign", "erf", "add", "sub", "mul", "div", "max", "min",
}  # fmt: skip


class CannotFollow(Exception):
    """The ghost engine cannot trace this loss; ``primitive`` names the operation that stopped it."""

    def __init__(self, primitive: str, reason: str):
        self.primitive = primitive
        super().__init__(f"ghost clipping cannot follow primitive '{primitive}': {reason}")


class Entry(NamedTuple):
    """A value whose every entry depends on exactly one entry of one parameter, none used twice."""

    copy: bool  # entries are plain copies, so the gradient's norm is the same on both sides
    order: tuple[int, ...] | None  # axis i of the value is axis order[i] of the parameter


@dataclass(eq=False, slots=True)
class Value:
    """A variable of the traced loss."""

    shape: tuple[int, ...]
    dtype: Any
    dynamic: bool = False  # depends on the example
    leaves: frozenset[int] = frozenset()  # parameters that a prologue value is computed from
    entry: Entry | None = None
    constant: Any = None


@dataclass(eq=False, slots=True)
class Op:
    """An equation: ``run`` maps input arrays to a list of output arrays."""

    run: Callable
    name: str
    inputs: list[Value]
    outputs: list[Value]

    def evaluate(self, env: dict, taps: dict, record: dict) -> None:
        del taps, record
        env.update(zip(self.outputs, self.run(*_read(env, self.inputs)), strict=True))


@dataclass(eq=False, slots=True)
class Contact:
    """A place where a weight (a prologue value) enters the body."""

    index: int
    weight: Value  # as the prologue holds it: scanned weights have a leading axis of steps
    primitive: str
    tap_shape: tuple[int, ...]
    tap_dtype: Any
    factors: rules.Factors | None = None  # None: the tap sits on the weight itself
    apply: Callable | None = None  # (weight, x) -> output for one example, steps included
    input_shape: tuple[int, ...] = ()
    input_dtype: Any = None


@dataclass(eq=False, slots=True)
class _ContactOp:
    contact: Contact
    run: Callable
    inputs: list[Value]
    outputs: list[Value]
    input_position: int

    def evaluate(self, env: dict, taps: dict, record: dict) -> None:
        values = _read(env, self.inputs)
        record[self.contact] = values[self.input_position]
        (out,) = self.run(*values)
        env[self.outputs[0]] = _tap(out, taps[self.contact])


@jax.custom_jvp
def _tap(value, tap):
    """``value + tap`` for differentiation; the tap is always zero and so never read."""
    del tap
    return value


@_tap.defjvp
def _tap_jvp(primals, tangents):
    return primals[0], tangents[0] + tangents[1]


def _read(env: dict, values: Sequence[Value]) -> list:
    return [env[v] if v.constant is None else v.constant for v in values]


class Scope:
    """The equations of one level of the body; the outermost scope also owns the prologue."""

    def __init__(self, parent: Scope | None, trace: Trace):
        self.parent, self.trace = parent, trace
        self.ops: list[Any] = []
        self.results: list[Value] = []
        self.promoted: dict[Value, Value] = {}

    def static(self, run: Callable, name: str, inputs: list[Value], outputs: list[Value]) -> None:
        """Moves an equation that does not depend on the example to the prologue."""
        if self.parent is not None:
            return self.parent.static(run, name, inputs, outputs)
        self.trace.prologue.append(Op(run, name, inputs, outputs))

    def locate(self, value: Value) -> tuple[Value, tuple[tuple[int, bool], ...]]:
        """The prologue's own copy of a value, and per enclosing scan (length, is it scanned over?)."""
        return (value, ()) if self.parent is None else self.parent.locate(value)

    def promote(self, value: Value) -> Value:
        """The weight as a value of the body, with a tap on it."""
        if value not in self.promoted:
            if self.parent is not None:
                self.promoted[value] = self.parent.promote(value)
            else:
                contact = self.trace.new_contact(value, "identity", value.shape, value.dtype)
                self.promoted[value] = Value(value.shape, value.dtype, dynamic=True)
                self.trace.identities.append((contact, self.promoted[value]))
        return self.promoted[value]

    def contacts(self) -> list[Contact]:
        found = []
        for op in self.ops:
            if isinstance(op, _ContactOp):
                found.append(op.contact)
            elif isinstance(op, _Block):
                found.extend(op.scope.contacts())
        return found

    def needs(self) -> set[Value]:
        """Values that this scope's equations and results read, as this scope names them."""
        found = set(self.results)
        for op in self.ops:
            found.update(op.inputs)
            if isinstance(op, _Block):
                found |= op.scope.reads()
        return found

    def reads(self) -> set[Value]:
        """``needs``, as the enclosing scope names them."""
        return self.needs()

    def evaluate(self, env: dict, taps: dict, record: dict) -> None:
        for op in self.ops:
            op.evaluate(env, taps, record)


class _LoopScope(Scope):
    """The body of a scan. ``stacked`` maps a value of one step to all steps' values outside."""

    def __init__(self, parent: Scope, trace: Trace, length: int):
        super().__init__(parent, trace)
        self.length = length
        self.stacked: dict[Value, Value] = {}

    def static(self, run, name, inputs, outputs):
        # Hoisted out of the loop: once if it is the same in every step, else for all steps by vmap.
        mapped = [v in self.stacked for v in inputs]
        if not any(mapped):
            return self.parent.static(run, name, inputs, outputs)
        same_map = len({m for m, v in zip(mapped, inputs, strict=True) if v.leaves}) == 1
        outside = []
        for v in outputs:
            # A parameter shared by all steps would be copied to each: no longer entry by entry.
            v.entry = v.entry._replace(order=None) if v.entry and same_map else None
            stack = Value((self.length, *v.shape), v.dtype, False, v.leaves, v.entry)
            self.stacked[v] = stack
            outside.append(stack)
        axes = [0 if m else None for m in mapped]
        batched = jax.vmap(lambda *a: run(*a), in_axes=axes, axis_size=self.length)
        self.parent.static(batched, name, [self.stacked.get(v, v) for v in inputs], outside)

    def reads(self):
        return {self.stacked.get(v, v) for v in self.needs()}

    def locate(self, value):
        mapped = value in self.stacked
        outer, loops = self.parent.locate(self.stacked[value] if mapped else value)
        return outer, (*loops, (self.length, mapped))

    def promote(self, value):
        if value in self.stacked and value not in self.promoted:
            inner = Value(value.shape, value.dtype, dynamic=True)
            self.stacked[inner] = self.parent.promote(self.stacked[value])
            self.promoted[value] = inner
        return self.promoted.get(value) or super().promote(value)


@dataclass(eq=False, slots=True)
class _Block:
    """An equation with a scope of its own, which also reads what that scope reads."""

    scope: Scope
    inputs: list[Value]  # beyond those: the carries' starts
    outputs: list[Value]


@dataclass(eq=False, slots=True)
class _Remat(_Block):
    """``jax.checkpoint``: recorded inputs are outputs, the rest is recomputed as the user asked."""

    options: dict

    def evaluate(self, env: dict, taps: dict, record: dict) -> None:
        contacts = self.scope.contacts()
        reads = [v for v in self.scope.reads() if v in env]

        def body(values, own_taps):
            local, own_record = dict(zip(reads, values, strict=True)), {}
            self.scope.evaluate(local, dict(zip(contacts, own_taps, strict=True)), own_record)
            return _read(local, self.scope.results), [own_record[c] for c in contacts]

        outs, recorded = jax.checkpoint(body, **self.options)(_read(env, reads), [taps[c] for c in contacts])
        env.update(zip(self.outputs, outs, strict=True))
        record.update(zip(contacts, recorded, strict=True))


@dataclass(eq=False, slots=True)
class _Loop(_Block):
    """A ``scan``; the first ``len(carries)`` outputs are carries."""

    carries: list[Value]  # inside, at the start of a step
    options: dict

    def evaluate(self, env: dict, taps: dict, record: dict) -> None:
        contacts = self.scope.contacts()
        needed = self.scope.needs()
        scanned = {v: env[s] for v, s in self.scope.stacked.items() if v in needed}
        steps = list(scanned)
        count = len(self.carries)

        def body(carry, x):
            values, own_taps = x
            local, own_record = dict(env), {}
            local.update(zip(self.carries, carry, strict=True))
            local.update(zip(steps, values, strict=True))
            self.scope.evaluate(local, dict(zip(contacts, own_taps, strict=True)), own_record)
            results = _read(local, self.scope.results)
            return results[:count], (results[count:], [own_record[c] for c in contacts])

        xs = ([scanned[v] for v in steps], [taps[c] for c in contacts])
        carry, (ys, recorded) = lax.scan(body, _read(env, self.inputs), xs, **self.options)
        env.update(zip(self.outputs, [*carry, *ys], strict=True))
        record.update(zip(contacts, recorded, strict=True))


@dataclass(eq=False)
class Trace:
    """The traced loss of one example."""

    leaves: list[Value] = field(default_factory=list)
    example: list[Value] = field(default_factory=list)
    prologue: list[Op] = field(default_factory=list)
    contacts: list[Contact] = field(default_factory=list)
    identities: list[tuple[Contact, Value]] = field(default_factory=list)
    body: Scope = None  # type: ignore[assignment]
    results: list[Value] = field(default_factory=list)  # the loss, then the auxiliary leaves
    aux_tree: Any = None

    def new_contact(self, weight: Value, *args: Any, **kwargs: Any) -> Contact:
        self.contacts.append(Contact(len(self.contacts), weight, *args, **kwargs))
        return self.contacts[-1]

    def run_prologue(self, leaves: Sequence[jax.Array], wide: bool = False) -> dict[Value, jax.Array]:
        """All prologue values. ``wide`` skips casts to 16 bits, so that pulling back loses nothing."""
        env = dict(zip(self.leaves, leaves, strict=True))
        for op in self.prologue:
            values = _read(env, op.inputs)
            if wide and op.name == "convert_element_type" and op.inputs[0].leaves:
                if op.outputs[0].dtype != wide_dtype(op.outputs[0].dtype):
                    env[op.outputs[0]] = values[0]
                    continue
            if wide and op.name not in _LAYOUT:
                values = [x.astype(v.dtype) if v.leaves else x for x, v in zip(values, op.inputs, strict=True)]
            env.update(zip(op.outputs, op.run(*values), strict=True))
        return env

    def run_body(self, static: dict, example: Sequence[jax.Array], taps: Sequence[jax.Array]):
        """Loss, auxiliary leaves and the recorded inputs (None where not needed), for one example."""
        by_contact = dict(zip(self.contacts, taps, strict=True))
        env = {**static, **dict(zip(self.example, example, strict=True))}
        for contact, value in self.identities:
            env[value] = _tap(env[contact.weight], by_contact[contact])
        record: dict[Contact, jax.Array] = {}
        self.body.evaluate(env, by_contact, record)
        loss, *aux = _read(env, self.results)
        return loss, aux, [record.get(c) for c in self.contacts]


def wide_dtype(dtype: Any) -> Any:
    """The type in which gradients add up: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def trace_loss(loss_fn: Callable, params: Any, example: Any, has_aux: bool = False) -> Trace:
    """Traces ``loss_fn(params, example)``; arrays or ShapeDtypeStructs, only shapes matter.

    Raises:
      CannotFollow: a parameter flows into an operation that has no reverse-mode derivative.
    """
    closed, shape = jax.make_jaxpr(loss_fn, return_shape=True)(params, example)
    loss_shape = shape[0] if has_aux else shape
    if getattr(loss_shape, "shape", None) != () or not jnp.issubdtype(loss_shape.dtype, jnp.floating):
        raise TypeError(f"loss_fn must return a real scalar for one example, got {loss_shape}")
    trace = Trace(aux_tree=jax.tree.structure(shape[1]) if has_aux else None)
    trace.body = Scope(None, trace)
    count = len(jax.tree.leaves(params))
    for i, var in enumerate(closed.jaxpr.invars):
        aval, is_leaf = var.aval, i < count
        value = Value(aval.shape, aval.dtype, dynamic=not is_leaf)
        if is_leaf:
            if jnp.issubdtype(aval.dtype, jnp.complexfloating):
                raise CannotFollow("complex", "complex parameters are not supported")
            if jnp.issubdtype(aval.dtype, jnp.floating):
                value.leaves = frozenset([i])
                value.entry = Entry(True, tuple(range(len(aval.shape))))
        (trace.leaves if is_leaf else trace.example).append(value)
    outs = _walk(closed.jaxpr, closed.consts, trace.leaves + trace.example, trace.body)
    # A loss that does not depend on the example still has a gradient.
    trace.results = [trace.body.promote(outs[0]) if outs[0].leaves else outs[0], *outs[1:]]
    return trace


def _walk(jaxpr: Any, consts: Sequence, args: Sequence[Value], scope: Scope) -> list[Value]:
    env = dict(zip(jaxpr.invars, args, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = Value(var.aval.shape, var.aval.dtype, constant=const)

    def read(var):
        if isinstance(var, core.Literal):
            return Value(var.aval.shape, var.aval.dtype, constant=var.val)
        return env[var]

    for eqn in jaxpr.eqns:
        outs = _visit(eqn, [read(v) for v in eqn.invars], scope)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _visit(eqn: Any, inputs: list[Value], scope: Scope) -> list[Value]:
    """Adds one equation to the prologue or the body and returns its outputs."""
    name = eqn.primitive.name
    weights = [i for i, v in enumerate(inputs) if v.leaves]
    if weights and name in _CALLS:
        inner = eqn.params[_CALLS[name]]
        return _walk(inner.jaxpr, inner.consts, inputs, scope)
    dynamic = any(v.dynamic for v in inputs)
    outputs = [Value(v.aval.shape, v.aval.dtype, dynamic) for v in eqn.outvars]
    if not dynamic:
        if _is_index_arithmetic(inputs, outputs):
            with jax.ensure_compile_time_eval():
                values = _binder(eqn)(*(v.constant for v in inputs))
            for out, value in zip(outputs, values, strict=True):
                out.constant = value
            return outputs
        _describe(eqn, inputs, outputs)
        scope.static(_binder(eqn), name, inputs, outputs)
        return outputs
    if weights and name in _REMAT:
        return _visit_remat(eqn, inputs, outputs, scope)
    if weights and name == "scan":
        return _visit_scan(eqn, inputs, scope)
    if len(weights) == 1 and len(outputs) == 1:
        contact_op = _factored(eqn, inputs, outputs, weights[0], scope)
        if contact_op is not None:
            scope.ops.append(contact_op)
            return outputs
    if weights and name == "while":
        raise CannotFollow(name, "it has no reverse-mode derivative; use scan or fori_loop")
    inputs = [scope.promote(v) if v.leaves else v for v in inputs]
    scope.ops.append(Op(_binder(eqn), name, inputs, outputs))
    return outputs


def _binder(eqn: Any) -> Callable:
    def run(*args):
        params = eqn.primitive.get_bind_params(eqn.params)
        functions, params = params if isinstance(params, tuple) else ((), params)
        out = eqn.primitive.bind(*functions, *args, **params)
        return list(out) if eqn.primitive.multiple_results else [out]

    return run


def _is_index_arithmetic(inputs: list[Value], outputs: list[Value]) -> bool:
    """Constant integer scalars, as indexing makes them: rules want to see their values."""
    return all(v.constant is not None for v in inputs) and all(
        v.shape == () and not jnp.issubdtype(v.dtype, jnp.inexact) for v in outputs
    )


def _describe(eqn: Any, inputs: list[Value], outputs: list[Value]) -> None:
    """How the outputs of a prologue equation depend on parameters."""
    name = eqn.primitive.name
    sources = [v for v in inputs if v.leaves]
    leaves = frozenset().union(*(v.leaves for v in inputs))
    if name == "stop_gradient" or not leaves:
        return
    for out in outputs:
        if not jnp.issubdtype(out.dtype, jnp.floating):
            continue
        out.leaves = leaves
        if len(sources) != 1 or sources[0].entry is None:
            continue
        (source,) = sources
        size = math.prod(source.shape)
        if name in _LAYOUT and math.prod(out.shape) <= size:
            order = source.entry.order
            if name == "transpose":
                order = order and tuple(order[i] for i in eqn.params["permutation"])
            elif name not in ("convert_element_type", "reduce_precision", "copy"):
                order = None
            out.entry = Entry(source.entry.copy, order)
        elif name in _ELEMENTWISE and out.shape == source.shape:
            out.entry = Entry(False, source.entry.order)


def _factored(eqn: Any, inputs: list[Value], outputs: list[Value], position: int, scope: Scope) -> _ContactOp | None:
    """A contact on the equation's output, where a rule covers it."""
    moving = [i for i, v in enumerate(inputs) if v.dynamic]
    if len(moving) != 1:
        return None
    fixed = {i: v.constant for i, v in enumerate(inputs) if i not in (position, moving[0])}
    if any(value is None for value in fixed.values()):
        return None
    weight, x, out = inputs[position], inputs[moving[0]], outputs[0]
    use = rules.Use(eqn.params, position, moving[0], fixed, weight.shape, x.shape, out.shape)
    factors = rules.factors_for(eqn.primitive.name, use)
    if factors is None:
        return None
    located, loops = scope.locate(weight)
    steps = tuple(length for length, _ in loops)
    apply = _wide_apply(eqn, position, moving[0], fixed)
    for length, mapped in reversed(loops):
        factors = rules.lift(factors, length, mapped)
        apply = jax.vmap(apply, in_axes=(0 if mapped else None, 0))
    contact = scope.trace.new_contact(
        located, eqn.primitive.name, (*steps, *out.shape), out.dtype, factors, apply,
        (*steps, *x.shape), x.dtype,
    )  # fmt: skip
    return _ContactOp(contact, _binder(eqn), inputs, outputs, moving[0])


def _wide_apply(eqn: Any, position: int, moving: int, fixed: dict[int, Any]) -> Callable:
    """The equation as a linear function of its weight, computed in at least float32."""

    def apply(weight, x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(jnp.promote_types(x.dtype, weight.dtype))
            weight = weight.astype(x.dtype)
        args = [fixed.get(i) for i in range(len(eqn.invars))]
        args[position], args[moving] = weight, x
        params = dict(eqn.params)
        if params.get("preferred_element_type") is not None:
            params["preferred_element_type"] = weight.dtype
        return eqn.primitive.bind(*args, **params)

    return apply


def _visit_remat(eqn: Any, inputs: list[Value], outputs: list[Value], scope: Scope) -> list[Value]:
    inner = Scope(scope, scope.trace)
    results = _walk(eqn.params["jaxpr"], (), inputs, inner)
    inner.results = [inner.promote(v) if v.leaves else v for v in results]
    options = {"policy": eqn.params["policy"], "prevent_cse": eqn.params["prevent_cse"]}
    scope.ops.append(_Remat(inner, [], outputs, options))
    return outputs


def _visit_scan(eqn: Any, inputs: list[Value], scope: Scope) -> list[Value]:
    params = eqn.params
    if "num_consts" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:  # JAX 0.12 describes the arguments by a tree of (constants, carries, scanned inputs)
        num_consts, num_carry, _ = (len(group) for group in params["ft_in"].unpack())
    jaxpr, length = params["jaxpr"].jaxpr, params["length"]
    inner = _LoopScope(scope, scope.trace, length)
    args = list(inputs[:num_consts])
    starts, carries, unchanged = [], [], {}
    for i in range(num_consts, num_consts + num_carry):
        var = jaxpr.invars[i]
        if jaxpr.outvars[i - num_consts] is var:  # handed on unchanged: a constant of the loop
            unchanged[i - num_consts] = inputs[i]
            args.append(inputs[i])
            continue
        start = scope.promote(inputs[i]) if inputs[i].leaves else inputs[i]
        starts.append(start)
        carries.append(Value(var.aval.shape, var.aval.dtype, dynamic=True))
        args.append(carries[-1])
    for stack in inputs[num_consts + num_carry :]:
        entry = stack.entry and stack.entry._replace(order=None)
        step = Value(stack.shape[1:], stack.dtype, stack.dynamic, stack.leaves, entry)
        inner.stacked[step] = stack
        args.append(step)
    results = _walk(jaxpr, params["jaxpr"].consts, args, inner)
    kept = [v for i, v in enumerate(results) if i not in unchanged]
    inner.results = [inner.promote(v) if v.leaves else v for v in kept]
    outs = [Value(v.aval.shape, v.aval.dtype, dynamic=True) for v in eqn.outvars]
    options = {"length": length, "reverse": params["reverse"], "unroll": params["unroll"]}
    produced = [v for i, v in enumerate(outs) if i not in unchanged]
    scope.ops.append(_Loop(inner, starts, produced, carries, options))
    return [unchanged.get(i, v) for i, v in enumerate(outs)]
