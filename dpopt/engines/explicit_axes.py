"""Meshes with explicit axes, as ``jax.make_mesh`` makes them: the engines run with automatic ones inside.

An explicit axis is part of an array's type, and every operation has to state how it treats that axis. The types of a
clipped sum are those of the parameters and the types of its by-products are those of the batch, so only its inputs and
outputs are typed; inside, XLA decides the sharding as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from dpopt.common import trees
from dpopt.common.types import PyTree


def explicit_mesh(tree: PyTree) -> Mesh | AbstractMesh | None:
    """The mesh of the first array whose type has explicit axes, or None."""
    for x in jax.tree.leaves(tree):
        if getattr(jax.typeof(x).sharding.mesh, "explicit_axes", ()):
            return jax.typeof(x).sharding.mesh if isinstance(x, Tracer) else x.sharding.mesh
    return None


def with_automatic_types(tree: PyTree) -> PyTree:
    """The same arrays on the same devices, without explicit axes in their types, for operations that need that."""

    def retyped(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not sharding.mesh.explicit_axes:
            return x
        mesh = Mesh(cast(Any, sharding.mesh.devices), sharding.mesh.axis_names)
        return jax.device_put(x, NamedSharding(mesh, sharding.spec))

    return jax.tree.map(retyped, tree)


def with_automatic_axes(
    function: Callable[..., PyTree], args: tuple[PyTree, ...], shardings: Callable[[PyTree], PyTree]
) -> PyTree:
    """``function(*args)``, run without explicit axes; ``shardings`` maps the shapes of the result to shardings."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            "within shard_map dpopt needs a mesh whose other axes are automatic, and this one has explicit axes "
            f"({jax.sharding.get_abstract_mesh()}). Make it with axis_types=(jax.sharding.AxisType.Auto, ...)."
        )
    out = jax.eval_shape(function, *trees.structs(args))
    return jax.sharding.auto_axes(function, out_sharding=shardings(out))(*args)
