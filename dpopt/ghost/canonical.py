"""Equations in the form that is fast, or that rules know.

Convolutions are written channels last, the order in which XLA's CPU backend is fast everywhere.
The transpose of a convolution with respect to its filter has its batch where a channel should be, that with respect to
its image has the filter's channels swapped. XLA reorders such operands by itself, but not inside loops: in a `lax.scan`
over training steps the gradient of a filter then takes some 70 times as long (53.8 ms against 0.71 ms for 320x8x8x16 to
32 channels on two cores; JAX issue 12868), that of an image five times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpopt.ghost.primitives import CONVOLUTION
from dpopt.ghost.rows import bounded
from dpopt.ghost.values import is_narrow


def channels_last(function: Callable) -> Callable:
    """``function`` of one array, its convolutions rewritten; meant for the transpose of a single primitive."""

    def run(x: jax.Array) -> Any:
        closed = jax.make_jaxpr(function)(x)
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env[closed.jaxpr.invars[0]] = x

        def read(var):
            return var.val if isinstance(var, core.Literal) else env[var]

        for eqn in closed.jaxpr.eqns:
            args = [read(v) for v in eqn.invars]
            if eqn.primitive is CONVOLUTION:
                outs = [_convolve(eqn.primitive, *args, **eqn.params)]
            else:
                out = eqn.primitive.bind(*args, **eqn.params)
                outs = out if eqn.primitive.multiple_results else [out]
            env.update(zip(eqn.outvars, outs, strict=True))
        (out,) = closed.jaxpr.outvars
        return read(out)

    return run


def convolution(eqn: Any, moving: Sequence[int]) -> Callable:
    """The equation as a function, channels last in both directions; gradients go to the inputs in ``moving`` alone.

    If both are, every example has a filter of its own. As one grouped convolution of the batch that would be slow, and
    XLA may compute it as one dense convolution with zeros between examples, where ``0 * nan`` spreads: they are
    taken in turn.
    """
    in_turn = jax.custom_batching.sequential_vmap if len(moving) > 1 else lambda function: function
    forward = in_turn(lambda *operands: _convolve(eqn.primitive, *operands, **eqn.params))

    def gradient(i: int) -> Callable:
        """Of the i-th operand, from the other one and the output's cotangent."""

        def pulled(other, cotangent):
            def of_one(x):
                return eqn.primitive.bind(*((x, other) if i == 0 else (other, x)), **eqn.params)

            transposed = jax.linear_transpose(of_one, eqn.invars[i].aval)
            return channels_last(lambda y: transposed(y)[0])(cotangent)

        return in_turn(pulled)

    gradients = {i: gradient(i) for i in moving}

    @jax.custom_vjp
    def run(*operands):
        return [forward(*operands)]

    def keep(*operands):  # what is kept of one operand is for the other's gradient
        return run(*operands), [x if 1 - i in moving else None for i, x in enumerate(operands)]

    def pull(kept, cotangents):
        return tuple(gradients[i](kept[1 - i], *cotangents) if i in moving else None for i in (0, 1))

    run.defvjp(keep, pull)
    return run


def _convolve(primitive: Any, lhs: jax.Array, rhs: jax.Array, *, dimension_numbers: Any, **params: Any) -> jax.Array:
    lhs_spec, rhs_spec, out_spec = dimension_numbers
    n = lhs.ndim
    inner = tuple(range(1, n - 1))
    lhs = jnp.transpose(lhs, (lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))
    rhs = jnp.transpose(rhs, (*rhs_spec[2:], rhs_spec[1], rhs_spec[0]))
    images, filters = (0, n - 1, *inner), (n - 1, n - 2, *range(n - 2))
    numbers = lax.ConvDimensionNumbers(images, filters, images)
    out = primitive.bind(lhs, rhs, dimension_numbers=numbers, **params)
    places = [0] * n  # axis of `out` that goes to each axis asked for
    for axis, place in zip((0, n - 1, *inner), out_spec, strict=True):
        places[place] = axis
    return jnp.transpose(out, places)


def as_gather(eqn: Any) -> core.ClosedJaxpr | None:
    """A dynamic slice as a gather, whose starts are one input, if it takes one entry or all along each axis."""
    if any(size not in (1, n) for n, size in zip(eqn.invars[0].aval.shape, eqn.params["slice_sizes"], strict=True)):
        return None

    def look_up(table, *starts):
        last = [n - size for n, size in zip(table.shape, eqn.params["slice_sizes"], strict=True)]
        at = jnp.stack([bounded(start, n + 1) for start, n in zip(starts, last, strict=True)])
        axes = tuple(range(table.ndim))
        numbers = lax.GatherDimensionNumbers(offset_dims=axes, collapsed_slice_dims=(), start_index_map=axes)
        return lax.gather(table, at, numbers, eqn.params["slice_sizes"], mode=lax.GatherScatterMode.CLIP)

    return jax.make_jaxpr(look_up)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars))


def differentiated(eqn: Any, moving: Sequence[int]) -> Callable:
    """The equation as a function of which the inputs in ``moving`` get gradients."""
    return convolution(eqn, moving) if eqn.primitive is CONVOLUTION else binder(eqn)


def binder(eqn: Any) -> Callable:
    """The equation as a function of its inputs, to a list of its outputs."""

    def run(*args):
        params = eqn.primitive.get_bind_params(eqn.params)
        functions, params = params if isinstance(params, tuple) else ((), params)
        wanted = params.get("preferred_element_type")
        if wanted is not None and is_narrow(wanted) and not is_narrow(args[0].dtype):  # run wide: see `Op.wide`
            params = {**params, "preferred_element_type": args[0].dtype}
        out = eqn.primitive.bind(*functions, *args, **params)
        return list(out) if eqn.primitive.multiple_results else [out]

    return run
