"""Checks that no row of a batch can read another one.

A clip bounds what one example adds to a sum only if no other example's gradient depends on that example. ``vmap`` keeps
rows independent, with three exceptions: a collective over an axis bound outside the loss, a mutable reference, and a
random generator whose ``vmap`` gives all rows one stream (``rbg``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from dpopt.engines.programs import INLINED, equations, scan_arguments, subprograms

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

_STREAMS = {"rng_bit_generator", "rng_uniform"}  # vmap splits one stream among the rows
_ALL_AT_ONCE = {"expand_dims", "broadcast_all", "legacy_vectorized"}
# Operations that name an axis and read no other device's values.
_OF_ONE_DEVICE = {"axis_index", "pvary", "pcast"}
_NO_DRAW = {"random_seed", "random_wrap", "random_unwrap", "random_clone"}


def check_rows_are_independent(program: Jaxpr) -> None:
    """Raises if the program of one row, a closed jaxpr whose inputs are the row, may read other rows."""
    axes = sorted({str(cast(Any, e).name) for e in program.effects if type(e).__name__ == "NamedAxisEffect"})
    if axes := axes or sorted(_outer_axes(program.jaxpr)):
        raise ValueError(
            f"the gradient of one example reads the axis {', '.join(axes)}, which is bound outside the loss (by vmap, "
            "pmap or shard_map). It would depend on other examples, so no clip could bound what one of them adds. Take "
            "the collective out of the loss; in shard_map, where JAX itself sums gradients of unsharded parameters "
            "over the axis, pass check_vma=False and add up the clipped sums."
        )
    if any(hasattr(v.aval, "inner_aval") for v in program.jaxpr.constvars):
        raise ValueError(
            "the loss reads or writes a mutable reference that was made outside the loss, through which examples could "
            "read each other. Make the reference inside the loss, or pass in its value."
        )
    draws, _ = _follow(program.jaxpr, [True] * len(program.jaxpr.invars))
    if draws:
        raise TypeError(
            f"the loss draws random bits that depend on the example by {draws[0]}: under vmap the examples of a batch "
            "would share one stream, so the draws of one depend on the others. Use threefry keys, such as "
            "jax.random.key(seed, impl='threefry2x32'); a key that is the same for all examples may be of any kind."
        )


def custom_batching(program: Jaxpr) -> str | None:
    """The name of an operation whose ``vmap`` is user code, which is given all rows at once, or None."""
    for eqn in equations(program.jaxpr):
        name = eqn.primitive.name
        # Callbacks and foreign functions.
        if name == "custom_vmap_call" or eqn.params.get("vmap_method") in _ALL_AT_ONCE:
            return name
    return None


def _outer_axes(jaxpr: Jaxpr) -> set[str]:
    """The axes that collectives read and nothing within the program binds (those by which vmap maps are gone)."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in _OF_ONE_DEVICE:
            named = [eqn.params.get(name, ()) for name in ("axis_name", "axes")]
            each = [axis for n in named for axis in (n if isinstance(n, tuple | list | frozenset | set) else (n,))]
            found |= {str(axis) for axis in each if axis is not None and not hasattr(axis, "__index__")}
        inner = {axis for program in subprograms(eqn) for axis in _outer_axes(program)}
        mesh = eqn.params.get("mesh") if eqn.primitive.name == "shard_map" else None
        found |= inner - {str(axis) for axis in getattr(mesh, "axis_names", ())}
    return found


def draws_otherwise_in_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation, at any depth, draws different random bits under ``vmap`` than row by row."""
    return bool(_follow_one(eqn, [True] * len(eqn.invars))[0])


def _follow(jaxpr: Jaxpr, of_row: Sequence[bool]) -> tuple[list[str], list[bool]]:
    """Operations that draw for all rows at once, and which outputs depend on the row, if the inputs ``of_row`` do."""
    marked = {v for v, is_marked in zip(jaxpr.invars, of_row, strict=True) if is_marked}

    def depends(var: Var | Literal) -> bool:
        return not hasattr(var, "val") and var in marked  # literals have a value

    draws: list[str] = []
    for eqn in jaxpr.eqns:
        found, outs = _follow_one(eqn, [depends(v) for v in eqn.invars])
        draws += found
        marked.update(v for v, is_marked in zip(eqn.outvars, outs, strict=True) if is_marked)
    return draws, [depends(v) for v in jaxpr.outvars]


def _follow_one(eqn: JaxprEqn, of_row: Sequence[bool]) -> tuple[list[str], list[bool]]:
    name, every = eqn.primitive.name, [True] * len(eqn.outvars)
    if not any(of_row):
        return [], [False] * len(eqn.outvars)
    if name in _STREAMS:
        return [name], every
    if name.startswith("random_") and name not in _NO_DRAW:
        dtypes = (cast(ShapedArray, v.aval).dtype for v, is_marked in zip(eqn.invars, of_row, strict=True) if is_marked)
        keys = [t for t in dtypes if jnp.issubdtype(t, jax.dtypes.prng_key)]
        threefry = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
        return [f"{name} with keys of type {t}" for t in keys if t != threefry], every
    inner = list(subprograms(eqn))
    if name in INLINED | {"scan"} and len(inner) == 1 and len(inner[0].invars) == len(of_row):
        return _follow_scan(eqn, inner[0], of_row) if name == "scan" else _follow(inner[0], of_row)
    # Under vmap all rows run a branch or loop whose condition depends on the row, whatever its inputs.
    return [draw for jaxpr in inner for draw in _follow(jaxpr, [True] * len(jaxpr.invars))[0]], every


def _follow_scan(eqn: JaxprEqn, jaxpr: Jaxpr, of_row: Sequence[bool]) -> tuple[list[str], list[bool]]:
    of_row = list(of_row)
    first, count = scan_arguments(eqn)
    while True:  # until no more carries are found to depend on the row
        draws, outs = _follow(jaxpr, of_row)
        joined = [a or b for a, b in zip(of_row[first : first + count], outs[:count], strict=True)]
        if joined == of_row[first : first + count]:
            return draws, [*joined, *outs[count:]]
        of_row[first : first + count] = joined
