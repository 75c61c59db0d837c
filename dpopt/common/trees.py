"""Small pytree helpers that more than one module needs."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax


def accumulator_dtype(dtype: Any) -> Any:
    """The dtype sums, noise and moments use for values of ``dtype``: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def upcast(tree: Any) -> Any:
    """``tree`` with every floating leaf narrower than float32 cast to float32."""

    def widened(x):
        dtype = jnp.result_type(x)
        return jnp.asarray(x, accumulator_dtype(dtype)) if jnp.issubdtype(dtype, jnp.floating) else x

    return jax.tree.map(widened, tree)


def at_once(function: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """An elementwise function of every leaf; leaves of one shape and dtype go as one array: one kernel to compile."""
    leaves, structure = jax.tree.flatten(tree)
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        alike.setdefault((x.shape, x.dtype), []).append(i)
    for members in alike.values():
        out = function(jnp.stack([leaves[i] for i in members]))
        for row, i in enumerate(members):
            leaves[i] = out[row]
    return structure.unflatten(leaves)


def zeros(tree: Any) -> Any:
    """Zeros shaped like ``tree``, at least float32."""
    return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), accumulator_dtype(jnp.result_type(x))), tree)


def next_count(count: jax.Array) -> jax.Array:
    """The step after ``count``, or the same where the integer type ends."""
    return cast(jax.Array, optax.safe_increment(count))  # Optax calls it ArrayLike, whatever goes in


def broadcast_prefix(prefix: Any, tree: Any, name: str) -> Any:
    """Gives every leaf of ``tree`` its entry of ``prefix``, a tree that may stop early (a scalar stops at the root).

    Raises:
        ValueError: if ``prefix`` is no prefix of ``tree``, or an entry does not broadcast to its leaf's shape.
    """
    try:
        full = jax.tree.map(lambda entry, subtree: jax.tree.map(lambda _: entry, subtree), prefix, tree)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{name} must have the tree structure of the parameters, or be a prefix of it; got "
            f"{jax.tree.structure(prefix)} for parameters {jax.tree.structure(tree)}."
        ) from error

    def check(path, entry, leaf):
        try:
            fits = np.broadcast_shapes(jnp.shape(entry), jnp.shape(leaf)) == jnp.shape(leaf)
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} has shape {jnp.shape(entry)}, which does not broadcast to the "
                f"parameter's shape {jnp.shape(leaf)}."
            )
        # One axis for each of the leaf's, so that no later product has to promote ranks.
        missing = jnp.ndim(leaf) - jnp.ndim(entry)
        return jnp.reshape(entry, (1,) * missing + jnp.shape(entry)) if missing and jnp.ndim(entry) else entry

    return jax.tree_util.tree_map_with_path(check, full, tree)


def per_example(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Reshapes a ``[B]`` vector, or ``[B, layers]``, so that it broadcasts against ``like`` of shape ``[B, ...]``."""
    return vector.reshape(vector.shape + (1,) * (like.ndim - vector.ndim))
