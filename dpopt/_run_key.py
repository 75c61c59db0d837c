"""The noise key of a run: runs that train side by side under `jax.vmap` must not share one."""

from typing import Any

import jax

from dpopt.common.types import PyTree


def of_one_run(key: jax.Array, tree: PyTree) -> jax.Array:
    """The key. Under `jax.vmap`, within ``jax.jit`` or not, it must be mapped over wherever the tree is.

    Raises:
        ValueError: if the tree is that of several runs, and the key one.

    *Privacy*: reads no values.

    >>> of_one_run(jax.random.PRNGKey(0), jax.numpy.zeros(3)).tolist()
    [0, 0]
    """
    leaves = [jax.lax.stop_gradient(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return _key_beside(key, leaves)


@jax.custom_batching.custom_vmap
def _key_beside(key: jax.Array, leaves: list[jax.Array]) -> jax.Array:
    del leaves
    return key


@_key_beside.def_vmap  # pyright: ignore[reportArgumentType]
def _keys_beside(axis_size: int, in_batched: Any, key: jax.Array, leaves: list[jax.Array]) -> tuple[jax.Array, bool]:
    del axis_size
    has_own_key, are_of_runs = in_batched
    if any(are_of_runs) and not has_own_key:
        raise ValueError(
            "under jax.vmap, all runs would draw the same noise, and the difference of two of them would hold none. "
            "Give each run a key of its own (vmap over keys, and make the optimizer within), and account for every run."
        )
    return _key_beside(key, leaves), has_own_key  # again, for a vmap around this one
