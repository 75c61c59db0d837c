"""Reading JAX programs: equations at any depth, and what they hold."""

from collections.abc import Iterator
from typing import Any


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subprograms(eqn):
            yield from equations(inner)


def subprograms(eqn: Any) -> Iterator[Any]:
    """The programs that an equation holds, directly."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def scan_arguments(eqn: Any) -> tuple[int, int]:
    """How many of a scan's inputs are constants, and how many carries; scanned inputs follow."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carries, _ = eqn.params["ft_in"].unpack()  # JAX 0.12 describes the inputs by a tree
    return len(consts), len(carries)
