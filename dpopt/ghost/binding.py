"""Equations as functions of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.extend import core

from dpopt.common.trees import is_narrow
from dpopt.ghost.convolutions import convolution
from dpopt.ghost.max_pooling import max_pooling
from dpopt.ghost.primitives import CONVOLUTION, MAX_POOL
from dpopt.ghost.values import aval


def binder(eqn: core.JaxprEqn) -> Callable[..., list[jax.Array]]:
    """The equation as a function of its inputs that returns a list of its outputs."""

    def run(*args: jax.Array) -> list[jax.Array]:
        params = eqn.primitive.get_bind_params(eqn.params)
        functions, params = params if isinstance(params, tuple) else ((), params)
        wanted = params.get("preferred_element_type")
        if wanted is not None and is_narrow(wanted):
            operands = zip(args, eqn.invars, strict=True)
            widened = [x.dtype for x, v in operands if is_narrow(aval(v).dtype) and not is_narrow(x.dtype)]
            if widened:  # see `Op.wide`
                params = {**params, "preferred_element_type": widened[0]}
        out = eqn.primitive.bind(*functions, *args, **params)
        return list(out) if eqn.primitive.multiple_results else [out]

    return run


def differentiated(eqn: core.JaxprEqn, moving: Sequence[int]) -> Callable[..., list[jax.Array]]:
    """The equation as a function that is differentiated by its inputs in ``moving``."""
    if eqn.primitive is MAX_POOL and (pooling := max_pooling(eqn)):
        return pooling
    return convolution(eqn, moving) if eqn.primitive is CONVOLUTION else binder(eqn)
