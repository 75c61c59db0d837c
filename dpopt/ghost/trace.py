"""Tracing: finds where parameters meet the example, and puts a tap there.

The loss of **one example** is traced to a jaxpr and its equations are sorted into two programs:

* the **prologue**: everything that does not depend on the example. What it computes from
  parameters (casts, transposes, weight standardisation, LoRA products) still counts as weights;
  the gradient with respect to it is pulled back to the parameters at the end;
* the **body**: everything that depends on the example, and equations that the gradient of a sum
  must not be pulled back through (linear.py: a user's ``custom_vjp``, complex values).

A **contact** is where a prologue value that depends on parameters enters the body. If a rule
covers the equation (rules/), the contact sits on its *output*: the tap's cotangent and the other
input determine the weight's gradient, which need not be formed. Otherwise it sits on the *weight
itself*, and the tap's cotangent is the per-example gradient of that weight, whatever reads it
(``cond``, ``custom_vjp``, an addition). That is exact, by JAX's own differentiation.

Calls are inlined. In a ``scan``, equations that do not depend on the example move out to the prologue
(``vmap`` maps them over the steps), taps become scanned inputs, and recorded inputs scanned outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import partial_eval

from dpopt.common.types import Example, LossFn, PyTree
from dpopt.engines.programs import equations, scan_arguments, subprograms
from dpopt.engines.rows import draws_otherwise_in_rows
from dpopt.ghost import primitives
from dpopt.ghost.binding import binder, differentiated
from dpopt.ghost.canonical import as_gather, in_steps, weight_last
from dpopt.ghost.complex_weights import in_real_numbers
from dpopt.ghost.cotangents import share_taps
from dpopt.ghost.derivatives import differentiated_inputs, differentiated_variables, of_steps
from dpopt.ghost.entries import describe
from dpopt.ghost.experts import dense_experts
from dpopt.ghost.factored import factored
from dpopt.ghost.failures import CannotFollow, planning
from dpopt.ghost.given import mark_given
from dpopt.ghost.linear import may_pull_back_sums
from dpopt.ghost.multiples import describe_multiple, moved_out
from dpopt.ghost.own_rules import with_forward_rule, with_products
from dpopt.ghost.precision import precise
from dpopt.ghost.products import remember, taken_apart
from dpopt.ghost.program import Loop, LoopScope, Remat, Scope, Trace
from dpopt.ghost.values import Contact, ContactOp, Entry, Op, Value


def trace_loss(
    loss_fn: LossFn, params: PyTree, example: Example, has_aux: bool = False, tapped_by_layer: Collection[int] = ()
) -> Trace:
    """Traces ``loss_fn(params, example)``. Arguments are arrays or ShapeDtypeStructs; only shapes matter.

    ``tapped_by_layer``: parameters whose layers have their taps where a scan reads them, whatever is computed from them
    there, so that all of a layer's gradient comes out of its step.

    Raises:
      CannotFollow: a parameter flows into an operation without a reverse-mode derivative, an operation has side effects
        (a mutable reference, a callback), or anything else fails although the loss itself does not.
    """
    # By a function of its own: JAX would remember what ``loss_fn`` read from Python when it was traced before.
    closed, shape = jax.make_jaxpr(lambda p, x: loss_fn(p, x), return_shape=True)(params, example)
    loss_shape = shape[0] if has_aux else shape
    if getattr(loss_shape, "shape", None) != () or not jnp.issubdtype(loss_shape.dtype, jnp.floating):
        raise TypeError(f"loss_fn must return a real scalar for one example, got {loss_shape}")
    for eqn in equations(closed.jaxpr):
        is_call = eqn.primitive in primitives.CALLS  # whose effects are those of its own equations
        if eqn.effects and not is_call and not eqn.primitive.name.startswith("debug_"):
            raise CannotFollow(eqn.primitive.name, "it has side effects")
    aux_tree = jax.tree.structure(shape[1]) if has_aux else None
    trace = Trace(closed, aux_tree=aux_tree, tapped_by_layer=frozenset(tapped_by_layer))
    with planning():
        count = len(jax.tree.leaves(params))
        real = in_real_numbers(closed, count)
        # Unused outputs would make contacts: `nnx.scan` returns the state of the layers, and with it every weight.
        needed, _ = partial_eval.dce_jaxpr(real.jaxpr, [True] * len(real.jaxpr.outvars), instantiate=True)
        _sort(needed, real.consts, count, trace)
    return trace


def _sort(jaxpr: core.Jaxpr, consts: Sequence[jax.Array], count: int, trace: Trace) -> None:
    """Sorts the equations of a loss, whose first ``count`` inputs are the parameters, into prologue and body."""
    trace.body = Scope(None, trace)
    trace.leaves = [Value.of(var) for var in jaxpr.invars[:count]]
    trace.example = [Value.of(var, dynamic=True) for var in jaxpr.invars[count:]]
    for i, value in enumerate(trace.leaves):
        if jnp.issubdtype(value.dtype, jnp.complexfloating):
            raise CannotFollow("complex", "complex parameters are not supported")
        if jnp.issubdtype(value.dtype, jnp.floating):
            value.leaves = frozenset([i])
            value.entry = Entry(True, tuple(range(len(value.shape))), layers=min(1, len(value.shape)))
    needed = [True] + [False] * (len(jaxpr.outvars) - 1)  # auxiliary outputs are not differentiated
    outs = _walk(jaxpr, consts, trace.leaves + trace.example, needed, trace.body)
    # A loss that does not depend on the example still has a gradient.
    trace.results = [trace.body.promote(outs[0]) if outs[0].leaves else outs[0], *outs[1:]]
    share_taps(trace.body, trace.results)
    mark_given(trace)


def _walk(
    jaxpr: core.Jaxpr, consts: Sequence[jax.Array], args: Sequence[Value], needed: Sequence[bool], scope: Scope
) -> list[Value]:
    """Adds the equations of a jaxpr to the scope and its prologue, and returns the outputs.

    ``needed``: which of them the loss may have a derivative by."""
    moving = differentiated_variables(jaxpr, needed)
    env = dict(zip(jaxpr.invars, args, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = Value.of(var, constant=const)

    def read(var: core.Var | core.Literal) -> Value:
        return Value.of(var, constant=var.val) if isinstance(var, core.Literal) else env[var]

    for eqn in jaxpr.eqns:
        outs = _visit(eqn, [read(v) for v in eqn.invars], [v in moving for v in eqn.outvars], scope)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _visit(eqn: core.JaxprEqn, inputs: list[Value], needed: Sequence[bool], scope: Scope) -> list[Value]:
    """Adds one equation to the prologue or the body and returns its outputs; ``needed`` as for `_walk`."""
    primitive = eqn.primitive
    if steps := in_steps(eqn):
        return _walk(*steps, inputs, needed, scope)
    if primitive in primitives.CALLS and (any(v.leaves for v in inputs) or _holds_filters(eqn)):
        inner = eqn.params[primitives.CALLS[primitive]]
        return _walk(inner.jaxpr, inner.consts, inputs, needed, scope)
    if any(v.dynamic for v in inputs) or not any(needed):
        moving = differentiated_inputs(eqn, needed)
        inputs = [v if m else _constant(v, scope) for v, m in zip(inputs, moving, strict=True)]
    if primitive is primitives.CUSTOM_VJP and any(v.leaves for v in inputs) and not any(v.dynamic for v in inputs):
        if forward := with_forward_rule(eqn, inputs):
            return _walk(*forward, inputs, needed, scope)
    outputs, weights = [Value.of(v) for v in eqn.outvars], [i for i, v in enumerate(inputs) if v.leaves]
    dynamic = any(v.dynamic for v in inputs) or _belongs_to_body(eqn, inputs, outputs, scope)
    for out in outputs:
        out.dynamic = dynamic
    if not dynamic:
        _refuse_filtered_weights(eqn, inputs)
        if _is_index_arithmetic(inputs, outputs):
            with jax.ensure_compile_time_eval():
                values = binder(eqn)(*(v.constant for v in inputs))
            return [Value.of(var, constant=value) for var, value in zip(eqn.outvars, values, strict=True)]
        describe(eqn, inputs, outputs)
        describe_multiple(eqn, inputs, outputs, scope)
        remember(eqn, inputs, outputs)
        eqn = precise(eqn) if weights else eqn
        scope.hoist(Op(binder(eqn), primitive, inputs, outputs, eqn.params))
        return outputs
    if weights and primitive is primitives.REMAT:
        return _visit_remat(eqn, inputs, outputs, needed, scope)
    if weights and primitive is primitives.SCAN:
        return _visit_scan(eqn, inputs, needed, scope)
    if primitive.name == primitives.RAGGED_DOT and not inputs[1].dynamic:
        if dense := dense_experts(eqn):
            scope.trace.can_be_vmapped = False
            return _walk(*dense, inputs, needed, scope)
    if weights == [0] and primitive is primitives.DYNAMIC_SLICE:
        if look_up := as_gather(eqn):
            return _walk(*look_up, inputs, needed, scope)
    if primitive is primitives.DOT and [v.dynamic for v in inputs] == [False, True]:
        if swapped := weight_last(eqn):
            return _walk(*swapped, inputs, needed, scope)
    if len(weights) == 1 and len(outputs) == 1:
        if parts := taken_apart(eqn, inputs, weights[0]):
            scope.trace.products.add(inputs[weights[0]])
            return _walk(*parts, needed, scope)
        if moved_out(eqn, inputs, outputs, weights[0], scope):
            return outputs
        if contact_op := factored(eqn, inputs, outputs, weights[0], scope):
            scope.ops.append(contact_op)
            return outputs
    if weights and (parts := with_products(eqn, inputs)):
        return _walk(*parts, inputs, needed, scope)
    if weights and primitive is primitives.WHILE:
        raise CannotFollow(primitive.name, "it has no reverse-mode derivative; use scan or fori_loop")
    _refuse_filters_within(eqn)
    inputs = [scope.promote(v) if v.leaves else v for v in inputs]
    moving = [i for i, v in enumerate(inputs) if v.dynamic]
    scope.ops.append(Op(differentiated(eqn, moving), primitive, inputs, outputs, eqn.params))
    return outputs


def _refuse_filters_within(eqn: core.JaxprEqn) -> None:
    """Refuses convolutions within an equation that is run as it is, where there are several devices.

    Gradients of filters are one grouped convolution under vmap, of which XLA leaves out all rows but those of the first
    device if the batch is divided among devices."""
    if jax.device_count() > 1 and _holds_filters(eqn):
        raise CannotFollow(eqn.primitive.name, "it holds a convolution, and there are several devices")


def _refuse_filtered_weights(eqn: core.JaxprEqn, inputs: list[Value]) -> None:
    """Refuses a convolution of weights with weights, where there are several devices.

    If the image is divided among devices along a spatial axis, XLA multiplies the filter's gradient by their number
    along another axis: that of the sum, but not the norms that it was clipped by."""
    filtered = all(v.leaves for v in inputs) if eqn.primitive is primitives.CONVOLUTION else _holds_filters(eqn)
    if jax.device_count() > 1 and filtered and any(v.leaves for v in inputs):
        raise CannotFollow(eqn.primitive.name, "it takes weights alone, and there are several devices")


def _holds_filters(eqn: core.JaxprEqn) -> bool:
    """Whether there are convolutions within an equation."""
    within = (inner for program in subprograms(eqn) for inner in equations(program))
    return any(inner.primitive is primitives.CONVOLUTION for inner in within)


def _belongs_to_body(eqn: core.JaxprEqn, inputs: list[Value], outputs: list[Value], scope: Scope) -> bool:
    """Whether an equation has to be in the body although it does not depend on the example."""
    if any(v.leaves for v in inputs):
        return not may_pull_back_sums(eqn, inputs, outputs)
    # Outside the loop, vmap would run it for all steps.
    return isinstance(scope, LoopScope) and draws_otherwise_in_rows(eqn)


def _is_index_arithmetic(inputs: list[Value], outputs: list[Value]) -> bool:
    """Whether these are constant integer scalars, as indexing makes them. Rules need their values."""
    return all(v.constant is not None for v in inputs) and all(
        v.shape == () and not jnp.issubdtype(v.dtype, jnp.inexact) for v in outputs
    )


def _constant(value: Value, scope: Scope) -> Value:
    """A value as one that counts as constant, if it is computed from parameters."""
    if not value.leaves:
        return value
    found = Value(value.shape, value.dtype)
    scope.hoist(Op(lambda x: [lax.stop_gradient(x)], primitives.STOP_GRADIENT, [value], [found]))
    return found


def _in_body(value: Value, is_needed: bool, scope: Scope) -> Value:
    """A value as the body reads it, with a tap on it if it is a weight that the loss may have a derivative by."""
    return scope.promote(value) if is_needed and value.leaves else _constant(value, scope)


def _tapped(layer: Value, scope: LoopScope) -> Value:
    """One layer of a parameter as its step reads it, with a tap of its own."""
    stack, loops = scope.locate(layer)
    shape = (*(length for length, _ in loops), *layer.shape)
    of_step = Contact(-1, layer, None, layer.shape, layer.dtype)
    contact = scope.trace.new_contact(stack, None, shape, layer.dtype, loops=loops, of_step=of_step)
    tapped = Value(layer.shape, layer.dtype, dynamic=True)
    scope.ops.append(ContactOp(contact, lambda weight: [weight], [layer], [tapped], None))
    return tapped


def _visit_remat(
    eqn: core.JaxprEqn, inputs: list[Value], outputs: list[Value], needed: Sequence[bool], scope: Scope
) -> list[Value]:
    inner = Scope(scope, scope.trace)
    results = _walk(eqn.params["jaxpr"], (), inputs, needed, inner)
    inner.results = [_in_body(v, n, inner) for v, n in zip(results, needed, strict=True)]
    scope.ops.append(Remat(inner, [], outputs, {name: eqn.params[name] for name in ("policy", "prevent_cse")}))
    return outputs


def _visit_scan(eqn: core.JaxprEqn, inputs: list[Value], needed: Sequence[bool], scope: Scope) -> list[Value]:
    needed = of_steps(eqn, needed)
    num_consts, num_carry = scan_arguments(eqn)
    closed, options = eqn.params["jaxpr"], {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    inner = LoopScope(scope, scope.trace, options["length"])
    args = list(inputs[:num_consts])
    starts, carries, unchanged = [], [], {}
    for i, value in enumerate(inputs[num_consts : num_consts + num_carry]):
        var = closed.jaxpr.invars[num_consts + i]
        if closed.jaxpr.outvars[i] is var:  # passed on unchanged: a constant of the loop
            unchanged[i] = value
            args.append(value)
        else:
            starts.append(_in_body(value, needed[i], scope))
            carries.append(Value.of(var, dynamic=True))
            args.append(carries[-1])
    for stack in inputs[num_consts + num_carry :]:
        layers = stack.entry.layers if stack.entry else 0
        entry = stack.entry and stack.entry._replace(order=None, layers=max(0, layers - 1))
        step = Value(stack.shape[1:], stack.dtype, stack.dynamic, stack.leaves, entry)
        inner.stacked[step] = stack
        args.append(_tapped(step, inner) if layers == 1 and stack.leaves <= scope.trace.tapped_by_layer else step)
    results = _walk(closed.jaxpr, closed.consts, args, needed, inner)
    inner.results = [_in_body(v, needed[i], inner) for i, v in enumerate(results) if i not in unchanged]
    outs = [Value.of(v, dynamic=True) for v in eqn.outvars]
    produced = [v for i, v in enumerate(outs) if i not in unchanged]
    scope.ops.append(Loop(inner, starts, produced, carries, options))
    return [unchanged.get(i, v) for i, v in enumerate(outs)]
