"""Finds through which variables a loss has a derivative.

A use of a weight through which it has none, such as one behind ``stop_gradient``, needs no contact: a network that
makes its own targets, or the steps of a sampler, would otherwise count as many more uses, whose cotangents are zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend import core

from dpopt.engines.programs import scan_arguments
from dpopt.ghost.primitives import CALLS, COND, FLAT, REMAT, SCAN
from dpopt.ghost.values import aval


def differentiated_variables(jaxpr: core.Jaxpr, needed: Sequence[bool]) -> set[core.Var]:
    """The variables that outputs of a jaxpr have a derivative by; ``needed``: which outputs count."""
    found: set[core.Var] = set()

    def add(variables: Sequence[core.Var | core.Literal], chosen: Sequence[bool]) -> None:
        pairs = zip(variables, chosen, strict=True)
        found.update(v for v, is_chosen in pairs if is_chosen and isinstance(v, core.Var) and _is_inexact(v))

    add(jaxpr.outvars, needed)
    for eqn in reversed(jaxpr.eqns):
        add(eqn.invars, differentiated_inputs(eqn, [v in found for v in eqn.outvars]))
    return found


def differentiated_inputs(eqn: core.JaxprEqn, needed: Sequence[bool]) -> Sequence[bool]:
    """By which inputs the ``needed`` outputs of an equation may have a derivative."""
    if not any(needed) or eqn.primitive in FLAT:
        return [False] * len(eqn.invars)
    if eqn.primitive in CALLS:
        return _inside(eqn.params[CALLS[eqn.primitive]].jaxpr, needed)
    if eqn.primitive is REMAT:
        return _inside(eqn.params["jaxpr"], needed)
    if eqn.primitive is SCAN:
        return _inside(eqn.params["jaxpr"].jaxpr, of_steps(eqn, needed))
    if eqn.primitive is COND:
        branches = [_inside(branch.jaxpr, needed) for branch in eqn.params["branches"]]
        return [False, *map(any, zip(*branches, strict=True))]
    return [True] * len(eqn.invars)


def _inside(jaxpr: core.Jaxpr, needed: Sequence[bool]) -> list[bool]:
    found = differentiated_variables(jaxpr, needed)
    return [v in found for v in jaxpr.invars]


def of_steps(eqn: core.JaxprEqn, needed: Sequence[bool]) -> list[bool]:
    """Which outputs of one step the ``needed`` outputs of a scan may have a derivative by."""
    num_consts, num_carry = scan_arguments(eqn)
    needed = [*needed]
    while True:
        carries = _inside(eqn.params["jaxpr"].jaxpr, needed)[num_consts : num_consts + num_carry]
        more = [*map(max, needed, carries), *needed[num_carry:]]
        if more == needed:
            return needed
        needed = more


def _is_inexact(var: core.Var) -> bool:
    return jnp.issubdtype(aval(var).dtype, jnp.inexact)
