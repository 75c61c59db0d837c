"""What an ordinary gradient of one example keeps in memory from its forward pass for its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from dpopt.ghost.primitives import CALLS, COND, RECOMPUTED
from dpopt.ghost.program import Remat, Trace
from dpopt.ghost.values import Contact, Op, aval, read


@dataclass(frozen=True, eq=False)
class _Array:
    """An array that depends on the example, and the ``stored`` arrays that XLA would recompute it from.

    What is cheap to compute is fused with its uses, so that it is never stored: next to ``tanh(z)``, which the next
    layer reads, XLA keeps no ``1 - tanh(z)^2``, though JAX lists both."""

    bytes: int
    stored: frozenset[_Array]  # empty: this array is stored itself


_Env = dict[core.Var, _Array]


def residual_bytes(trace: Trace) -> float:
    """Bytes that an ordinary gradient of one example keeps from its forward pass, without what all examples share."""
    count, loss = len(trace.leaves), core.jaxpr_as_fun(trace.loss)
    is_own = [i >= count for i in range(len(trace.loss.in_avals))]
    return _residual_bytes(lambda *inputs: loss(*inputs)[:1], trace.loss.in_avals, is_own, [not own for own in is_own])


def recomputed_bytes(block: Remat, by_weights: bool) -> float:
    """Bytes that the backward pass of a block computes again and holds, for one example (and one step of a loop).

    That pass holds what it keeps of blocks within, too, while it computes one of these again. Without ``by_weights``,
    it computes the cotangents of activations alone."""
    within = (recomputed_bytes(inner, by_weights) for inner in block.scope.rematerialised())
    return _recomputed_bytes(block, by_weights) + max(within, default=0)


def _recomputed_bytes(block: Remat, by_weights: bool) -> float:
    """The same without what is computed again within blocks that it holds."""
    inside = {v for op in block.scope.ops for v in op.outputs}
    reads = [v for v in block.scope.reads() - inside if v.constant is None]

    def run(*inputs: jax.Array) -> list[jax.Array]:
        env = dict(zip(reads, inputs, strict=True))
        block.scope.evaluate(env, {}, None)
        return read(env, block.scope.results)

    avals, own = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in reads], [v.dynamic for v in reads]
    by = [v.dynamic or (by_weights and bool(v.leaves)) for v in reads]
    saved = jax.checkpoint(run, **block.options)
    return max(0, _residual_bytes(run, avals, own, by) - _residual_bytes(saved, avals, own, by))


def formed_in_conditionals(trace: Trace) -> set[Contact]:
    """The contacts whose gradients an ordinary gradient forms for every example, too: on weights in a conditional.

    Under `vmap` the cotangents of its inputs are those of single examples. (So are those of a function with a
    derivative of its own, but where XLA fuses them with their sum, none is in memory.)"""
    at = {op.outputs[0]: op.contact for op in trace.identities}
    read = (v for op in trace.body.ops if isinstance(op, Op) and op.primitive is COND for v in op.inputs)
    return {at[v] for v in read if v in at}


def _residual_bytes(
    function: Callable[..., list[jax.Array]], inputs: Sequence[Any], is_own: Sequence[bool], by: Sequence[bool]
) -> float:
    """What the derivative of a function keeps that depends on those inputs that are the example's own.

    ``by``: for each input whether the derivative by it is wanted, if it is of a floating-point type."""
    by = [wanted and jnp.issubdtype(x.dtype, jnp.floating) for x, wanted in zip(inputs, by, strict=True)]

    def pulled(*inputs: jax.Array) -> list[jax.Array]:
        def outputs(moving: Sequence[jax.Array]) -> list[jax.Array]:
            found = iter(moving)
            outs = function(*(next(found) if wanted else x for x, wanted in zip(inputs, by, strict=True)))
            return [x for x in outs if jnp.issubdtype(x.dtype, jnp.floating)]

        return jax.tree.leaves(jax.vjp(outputs, [x for x, wanted in zip(inputs, by, strict=True) if wanted])[1])

    jaxpr = jax.make_jaxpr(pulled)(*inputs).jaxpr
    own = {v: _stored(v) for v, of_example in zip(jaxpr.invars, is_own, strict=True) if of_example}
    found = dict.fromkeys(_outputs(jaxpr, own))
    kept = {array for array in found if array is not None and not array.stored}
    for array in found:
        if array is not None and array.stored:
            missing = array.stored - kept
            kept |= missing if _total(missing) < array.bytes else {array}
    return float(_total(kept))


def _outputs(jaxpr: core.Jaxpr, env: _Env) -> list[_Array | None]:
    """The outputs of a program that depend on its inputs in ``env``, None for others."""
    for eqn in jaxpr.eqns:
        inputs = [_read(env, v) for v in eqn.invars]
        if all(x is None for x in inputs):
            continue
        if eqn.primitive in CALLS:
            inner = eqn.params[CALLS[eqn.primitive]].jaxpr
            given = {v: x for v, x in zip(inner.invars, inputs, strict=True) if x is not None}
            outs = _outputs(inner, given)
        elif eqn.primitive in RECOMPUTED:
            outs = [_Array(_bytes_of(v), _behind(inputs)) for v in eqn.outvars]
        else:
            outs = [_stored(v) for v in eqn.outvars]
        env.update((v, x) for v, x in zip(eqn.outvars, outs, strict=True) if x is not None)
    return [_read(env, v) for v in jaxpr.outvars]


def _read(env: Mapping[core.Var, _Array], v: core.Var | core.Literal) -> _Array | None:
    return None if isinstance(v, core.Literal) else env.get(v)


def _behind(inputs: Sequence[_Array | None]) -> frozenset[_Array]:
    return frozenset(s for x in inputs if x is not None for s in (x.stored or {x}))


def _stored(v: core.Var) -> _Array:
    return _Array(_bytes_of(v), frozenset())


def _bytes_of(v: core.Var) -> int:
    return aval(v).size * aval(v).dtype.itemsize


def _total(arrays: Iterable[_Array]) -> int:
    return sum(x.bytes for x in arrays)
