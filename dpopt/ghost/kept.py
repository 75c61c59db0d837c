"""How much an ordinary gradient of one example keeps in memory between its forward and its backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.extend import core

from dpopt.ghost.primitives import CALLS, RECOMPUTED
from dpopt.ghost.program import Trace
from dpopt.ghost.values import aval


@dataclass(frozen=True, eq=False)
class _Array:
    """An array that depends on the example, and the ``stored`` arrays that XLA would recompute it from.

    What is cheap to compute is fused with its uses, so that it is never stored: next to ``tanh(z)``, which the next
    layer reads, XLA keeps no ``1 - tanh(z)^2``, though JAX lists both."""

    bytes: int
    stored: frozenset[_Array]  # empty: this array is stored itself


_Env = dict[core.Var, _Array]


def kept_bytes(trace: Trace) -> float:
    """Bytes that an ordinary gradient of one example keeps from its forward pass, without what all examples share."""
    count = len(trace.leaves)

    def pulled(*inputs: jax.Array) -> list[jax.Array]:
        params, example = inputs[:count], inputs[count:]
        return jax.tree.leaves(jax.vjp(lambda *p: core.jaxpr_as_fun(trace.loss)(*p, *example)[0], *params)[1])

    jaxpr = jax.make_jaxpr(pulled)(*trace.loss.in_avals).jaxpr
    own = jaxpr.invars[count:]
    found = dict.fromkeys(_outputs(jaxpr, {v: _stored(v) for v in own}))
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
            outs = [_Array(_nbytes(v), _behind(inputs)) for v in eqn.outvars]
        else:
            outs = [_stored(v) for v in eqn.outvars]
        env.update((v, x) for v, x in zip(eqn.outvars, outs, strict=True) if x is not None)
    return [_read(env, v) for v in jaxpr.outvars]


def _read(env: Mapping[core.Var, _Array], v: core.Var | core.Literal) -> _Array | None:
    return None if isinstance(v, core.Literal) else env.get(v)


def _behind(inputs: Sequence[_Array | None]) -> frozenset[_Array]:
    return frozenset(s for x in inputs if x is not None for s in (x.stored or {x}))


def _stored(v: core.Var) -> _Array:
    return _Array(_nbytes(v), frozenset())


def _nbytes(v: core.Var) -> int:
    return aval(v).size * aval(v).dtype.itemsize


def _total(arrays: Iterable[_Array]) -> int:
    return sum(x.bytes for x in arrays)
