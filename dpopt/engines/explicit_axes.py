"""Meshes with explicit axes, as ``jax.make_mesh`` makes them: within, the engines run with automatic ones.

An explicit axis is part of an array's type, and every operation has to say what becomes of it. A clipped sum has the
parameters' types and its by-products the batch's, so only its outside is typed; within, XLA decides as ever.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def explicit_mesh(tree: Any) -> Any:
    """The mesh of the first array whose type has explicit axes, or None."""
    for x in jax.tree.leaves(tree):
        if getattr(jax.typeof(x).sharding.mesh, "explicit_axes", ()):
            return jax.typeof(x).sharding.mesh if isinstance(x, Tracer) else x.sharding.mesh
    return None


def with_automatic_types(tree: Any) -> Any:
    """The same arrays, where they are, in whose types no axis is explicit: for operations that do not say."""

    def retyped(x: Any) -> Any:
        place = getattr(x, "sharding", None)
        if not isinstance(place, NamedSharding) or not place.mesh.explicit_axes:
            return x
        mesh = Mesh(cast(Any, place.mesh.devices), place.mesh.axis_names)
        return jax.device_put(x, NamedSharding(mesh, place.spec))

    return jax.tree.map(retyped, tree)


def like_parameters(params: Any, mesh: Any) -> Any:
    """Where each parameter lies."""
    return jax.tree.map(lambda p: NamedSharding(mesh, jax.typeof(p).sharding.spec), params)


def by_row(batch: Any, mesh: Any) -> NamedSharding:
    """Where what belongs to the rows of a batch lies."""
    return NamedSharding(mesh, PartitionSpec(*jax.typeof(jax.tree.leaves(batch)[0]).sharding.spec[:1]))


def with_automatic_axes(function: Callable, args: tuple, places: Callable[[Any], Any]) -> Any:
    """``function(*args)``, inside of which no axis is explicit; ``places`` says where each part of its result lies."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    return jax.sharding.auto_axes(function, out_sharding=places(jax.eval_shape(function, *shapes)))(*args)
