"""Reading jaxprs: equations at any depth, and the jaxprs inside an equation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `jax.extend` takes as long to import as all of dpopt
    from jax.extend.core import Jaxpr, JaxprEqn

# Primitives that run one jaxpr once, on their own inputs.
INLINED = {"jit", "closed_call", "eval_jaxpr", "checkpoint", "remat", "remat2", "custom_jvp_call"}


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a jaxpr, at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subprograms(eqn):
            yield from equations(inner)


def subprograms(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def scan_arguments(eqn: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's inputs are constants and how many are carries; the scanned inputs follow."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carries, _ = eqn.params["ft_in"].unpack()  # JAX 0.12 describes the inputs by a tree
    return len(consts), len(carries)
