"""What the program of one row of a batch must not do: rows could read each other.

A clip bounds what one example adds to a sum only if no other example's gradient depends on it. ``vmap`` keeps rows
apart except where a program asks for the others (a collective over an axis that is bound outside), keeps something from
row to row (a mutable reference), or draws by a generator whose ``vmap`` gives all rows one stream (``rbg``).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpopt.engines.programs import equations, scan_arguments, subprograms

_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call", "scan"}
_STREAMS = {"rng_bit_generator", "rng_uniform"}  # under vmap one stream is cut into rows
_ALL_AT_ONCE = {"expand_dims", "broadcast_all", "legacy_vectorized"}
_NO_DRAW = {"random_seed", "random_wrap", "random_unwrap", "random_clone"}


def check_rows_are_independent(program: Any) -> None:
    """Refuses a row's program (a closed jaxpr whose inputs are the row) that may read other rows.

    Raises:
        ValueError: for a collective over an outer axis, or a mutable reference from outside.
        TypeError: for random bits that depend on the row and whose generator is not threefry.
    """
    axes = sorted(str(e.name) for e in program.effects if type(e).__name__ == "NamedAxisEffect")
    if axes:
        raise ValueError(
            f"the gradient of one example reads the axis {', '.join(axes)}, which is bound outside of the loss (by "
            "vmap, pmap or shard_map): it would depend on other examples, and no clip could bound what one of them "
            "adds. Take the collective out of the loss; in shard_map, where JAX adds up gradients of unsharded "
            "parameters over the axis by itself, pass check_vma=False and add up the clipped sums."
        )
    if any(hasattr(v.aval, "inner_aval") for v in program.jaxpr.constvars):
        raise ValueError(
            "the loss reads or writes a mutable reference that was made outside of it: examples would see what others "
            "left there. Make the reference inside the loss, or pass its value in."
        )
    draws, _ = _follow(program.jaxpr, [True] * len(program.jaxpr.invars))
    if draws:
        raise TypeError(
            f"the loss draws random bits that depend on the example by {draws[0]}: under vmap the examples of a batch "
            "would share one stream, so that each reads the others. Use threefry keys, such as "
            "jax.random.key(seed, impl='threefry2x32'); a key that is the same for all examples may be of any kind."
        )


def batched_by_hand(program: Any) -> str | None:
    """An operation whose ``vmap`` is code of the user's, which gets all rows at once: its name, or None."""
    for eqn in equations(program.jaxpr):
        name = eqn.primitive.name
        if name == "custom_vmap_call" or (eqn.params.get("vmap_method") in _ALL_AT_ONCE and name == "pure_callback"):
            return name
    return None


def draws_otherwise_in_rows(eqn: Any) -> bool:
    """Whether an equation, or one that it holds, draws other random bits under ``vmap`` than row by row."""
    return bool(_follow_one(eqn, [True] * len(eqn.invars))[0])


def _follow(jaxpr: Any, of_row: Sequence[bool]) -> tuple[list[str], list[bool]]:
    """What draws for all rows at once where only the marked inputs depend on the row; and which outputs do."""
    marked = {v for v, is_marked in zip(jaxpr.invars, of_row, strict=True) if is_marked}

    def depends(var):
        return not hasattr(var, "val") and var in marked  # literals have a value

    draws: list[str] = []
    for eqn in jaxpr.eqns:
        found, outs = _follow_one(eqn, [depends(v) for v in eqn.invars])
        draws += found
        marked.update(v for v, is_marked in zip(eqn.outvars, outs, strict=True) if is_marked)
    return draws, [depends(v) for v in jaxpr.outvars]


def _follow_one(eqn: Any, of_row: Sequence[bool]) -> tuple[list[str], list[bool]]:
    name, every = eqn.primitive.name, [True] * len(eqn.outvars)
    if not any(of_row):
        return [], [False] * len(eqn.outvars)
    if name in _STREAMS:
        return [name], every
    if name.startswith("random_") and name not in _NO_DRAW:
        dtypes = (v.aval.dtype for v, is_marked in zip(eqn.invars, of_row, strict=True) if is_marked)
        keys = [t for t in dtypes if jnp.issubdtype(t, jax.dtypes.prng_key)]
        return [f"{name} with keys of type {t}" for t in keys if t != _threefry()], every
    inner = list(subprograms(eqn))
    if name in _CALLS and len(inner) == 1 and len(inner[0].invars) == len(of_row):
        return _follow_scan(eqn, inner[0], of_row) if name == "scan" else _follow(inner[0], of_row)
    # Branches and loops that some row decides on are taken by all rows at once, whatever their inputs.
    return [draw for jaxpr in inner for draw in _follow(jaxpr, [True] * len(jaxpr.invars))[0]], every


def _follow_scan(eqn: Any, jaxpr: Any, of_row: Sequence[bool]) -> tuple[list[str], list[bool]]:
    of_row = list(of_row)
    first, count = scan_arguments(eqn)
    while True:  # until no further carry turns out to depend on the row
        draws, outs = _follow(jaxpr, of_row)
        joined = [a or b for a, b in zip(of_row[first : first + count], outs[:count], strict=True)]
        if joined == of_row[first : first + count]:
            return draws, [*joined, *outs[count:]]
        of_row[first : first + count] = joined


def _threefry() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
