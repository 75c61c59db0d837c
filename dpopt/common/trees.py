"""Small pytree helpers."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from dpopt.common.types import PyTree


def accumulator_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype of sums, noise and moments for values of ``dtype``: float32, or float64 for float64."""
    # JAX promotes no floating-point numbers of 8 bits by itself.
    return jnp.dtype(jnp.float32) if is_narrow(dtype) else jnp.promote_types(dtype, jnp.float32)


def is_narrow(dtype: DTypeLike) -> bool:
    """Whether a dtype is floating-point with fewer than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def widened(number: Any) -> Any:
    """A number that is not rounded to 16 bits when another one multiplies or divides it, and does not wrap around."""
    dtype = getattr(number, "dtype", None)
    if dtype is None or not (is_narrow(dtype) or jnp.issubdtype(dtype, jnp.integer)):
        return number
    return number.astype(accumulator_dtype(dtype))


def upcast(tree: PyTree) -> PyTree:
    """``tree`` with every floating leaf narrower than float32 cast to float32."""

    def wide(x: ArrayLike) -> ArrayLike:
        dtype = jnp.result_type(x)
        return jnp.asarray(x, accumulator_dtype(dtype)) if jnp.issubdtype(dtype, jnp.floating) else x

    return jax.tree.map(wide, tree)


def at_once(function: Callable[..., jax.Array], *trees: PyTree) -> PyTree:
    """Applies an elementwise function to all leaves, stacked by shape and dtype, so that few kernels are compiled.

    ``function`` takes one array from each of ``trees``, pytrees of one structure with equal shapes."""
    structure = jax.tree.structure(trees[0])
    leaves = list(zip(*(structure.flatten_up_to(tree) for tree in trees), strict=True))
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, arrays in enumerate(leaves):
        alike.setdefault(tuple((x.shape, x.dtype) for x in arrays), []).append(i)
    found: dict[int, jax.Array] = {}
    for members in alike.values():
        out = function(*(jnp.stack(arrays) for arrays in zip(*(leaves[i] for i in members), strict=True)))
        found |= zip(members, out, strict=True)
    return structure.unflatten(found[i] for i in range(len(leaves)))


def structs(tree: PyTree, first_axis: int = 0) -> PyTree:
    """The shapes, from ``first_axis`` on, and the dtypes of arrays, as a trace sees them: weak types stay weak.

    (``jnp.full(n, 1.0)`` has one, and what it multiplies keeps its own dtype.)"""

    def struct(x: Any) -> jax.ShapeDtypeStruct:
        t: Any = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
        return jax.ShapeDtypeStruct(t.shape[first_axis:], t.dtype, weak_type=t.weak_type)

    return jax.tree.map(struct, tree)


def zeros(tree: PyTree) -> PyTree:
    """Zeros shaped like ``tree``, in float32 or wider."""
    return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), accumulator_dtype(jnp.result_type(x))), tree)


def next_count(count: jax.Array) -> jax.Array:
    """``count + 1``, or ``count`` if that is the largest integer of its type."""
    return cast(jax.Array, optax.safe_increment(count))  # Optax annotates ArrayLike


def broadcast_prefix(prefix: PyTree, tree: PyTree, name: str) -> PyTree:
    """The entry of ``prefix`` for every leaf of ``tree``; an entry may stand for a subtree, a scalar for all leaves."""
    try:
        full = jax.tree.map(lambda entry, subtree: jax.tree.map(lambda _: entry, subtree), prefix, tree)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{name} must have the tree structure of the parameters, or be a prefix of it; got "
            f"{jax.tree.structure(prefix)} for parameters {jax.tree.structure(tree)}."
        ) from error

    def check(path: tuple[Any, ...], entry: ArrayLike, leaf: ArrayLike) -> ArrayLike:
        try:
            fits = np.broadcast_shapes(jnp.shape(entry), jnp.shape(leaf)) == jnp.shape(leaf)
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} has shape {jnp.shape(entry)}, which does not broadcast to the "
                f"parameter's shape {jnp.shape(leaf)}."
            )
        # As many axes as the leaf has, so that later products need no rank promotion.
        missing = jnp.ndim(leaf) - jnp.ndim(entry)
        return jnp.reshape(entry, (1,) * missing + jnp.shape(entry)) if missing and jnp.ndim(entry) else entry

    return jax.tree_util.tree_map_with_path(check, full, tree)


def per_example(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Reshapes ``[B]`` or ``[B, layers]`` so that it broadcasts against ``like`` of shape ``[B, ...]``."""
    return vector.reshape(vector.shape + (1,) * (like.ndim - vector.ndim))
