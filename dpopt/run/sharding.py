"""Placement of batches, parameters and states on several devices. The computation is JAX's own SPMD.

Split the batch over the devices of a mesh, and replicate the parameters (data parallel) or shard them (fully sharded);
``jax.jit`` does the rest. Noise is drawn by position in the whole array, so it is the same on any number of devices. It
is drawn once, after the clipped sum has been added up over devices.
"""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from dpopt.chain import PrivateOptimizer
from dpopt.common import validate
from dpopt.common.types import Batch, LossFn, PyTree
from dpopt.constants import constants_of, given
from dpopt.engines.batches import is_key
from dpopt.run.state import TrainState

Layout: TypeAlias = Callable[[PyTree, Mesh], PyTree]  # (parameters or a state, mesh) -> shardings like them


def make_mesh(num_devices: int | None = None, axis: str = "data") -> Mesh:
    """A mesh with one axis over the first ``num_devices`` of all processes' devices, None for all of them.

    Raises:
        ValueError: if there are fewer devices.

    *Privacy*: reads no data.

    >>> make_mesh(1).shape["data"]
    1
    """
    devices = jax.devices()
    if num_devices is not None:
        validate.positive_int(num_devices=num_devices)
    count = len(devices) if num_devices is None else num_devices
    if not 1 <= count <= len(devices):
        raise ValueError(f"there are {len(devices)} devices; got num_devices={num_devices}.")
    return Mesh(np.array(devices[:count]), (axis,))


def _chosen(mesh: Mesh, axes: str | Sequence[str] | None) -> tuple[str | tuple[str, ...], int]:
    """Names of axes of the mesh, by default its first, and the number of devices along them."""
    names = cast(tuple[str, ...], mesh.axis_names)
    chosen: tuple[str, ...] = names[:1] if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    if not chosen or not set(chosen) <= set(names):
        raise ValueError(f"the mesh has the axes {mesh.axis_names}; got axes={axes!r}.")
    return (chosen if len(chosen) > 1 else next(iter(chosen))), math.prod(mesh.shape[axis] for axis in chosen)


def shard_batch(batch: Batch, mesh: Mesh, axes: str | Sequence[str] | None = None) -> Batch:
    """Splits every array of a batch along its first axis over the mesh.

    In a run of several processes each must pass the same whole batch (the sampler draws the same indices in all of
    them); each keeps the rows of its own devices.

    Args:
        batch: pytree of arrays ``(B, ...)``, including the mask and examples' keys.
        mesh: the mesh, its axes automatic or explicit.
        axes: names of the axes to split over; None for the first.

    Raises:
        ValueError: if B is not a multiple of the number of devices along these axes (set the sampler's ``pad_to`` to
            one), or if the mesh has no such axis.

    *Privacy*: moves private data to devices, and changes nothing.

    >>> shard_batch({"x": np.ones((4, 2))}, make_mesh(1))["x"].shape
    (4, 2)
    """

    def place(x: ArrayLike) -> jax.Array:
        sharding = along_rows(x, mesh, axes)
        return x if isinstance(x, jax.Array) and x.sharding == sharding else _put(x, sharding)

    return jax.tree.map(place, batch)


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    """Places an array that every process has whole; each keeps the parts of its own devices."""
    if is_key(x):  # keys of random losses, which NumPy cannot hold
        return jax.random.wrap_key_data(_put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def along_rows(x: ArrayLike, mesh: Mesh, axes: str | Sequence[str] | None = None) -> NamedSharding:
    """The sharding along the rows of an array ``(B, ...)``, given the array or B; see `shard_batch`.

    *Privacy*: reads no data.

    >>> along_rows(8, make_mesh(1)).spec == PartitionSpec("data")
    True
    """
    name, count = _chosen(mesh, axes)
    shape = (x,) if isinstance(x, numbers.Integral) else np.shape(x)
    if not shape or shape[0] % count:
        raise ValueError(
            f"a batch of shape {shape} cannot be split over {count} devices: make pad_to of the sampler a multiple of "
            f"{count}."
        )
    return NamedSharding(mesh, PartitionSpec(name))


def replicated(params: PyTree, mesh: Mesh) -> PyTree:
    """Shardings, a pytree like ``params`` (arrays or shapes), that keep every array whole on each device.

    *Privacy*: reads no data.

    >>> replicated(np.ones(3), make_mesh(1)).spec == PartitionSpec()
    True
    """
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), params)


def fully_sharded(params: PyTree, mesh: Mesh, axes: str | Sequence[str] | None = None) -> PyTree:
    """Shardings like ``params`` that split every array along its longest axis that the number of devices divides.

    An array without such an axis stays whole. In an optimizer's state, moments and noise are sharded like the
    parameters they belong to.

    Args:
        params: pytree of arrays or shapes: parameters, or a state.
        mesh: the mesh, its axes automatic or explicit.
        axes: names of the axes to split over; None for the first.

    Raises:
        ValueError: if the mesh has no such axis.

    *Privacy*: reads no data.

    >>> fully_sharded(np.ones((3, 4)), make_mesh(1)).spec == PartitionSpec(None, "data")
    True
    """
    name, count = _chosen(mesh, axes)

    def place(x: Any) -> NamedSharding:
        shape = np.shape(x)
        fitting = [i for i, n in enumerate(shape) if n >= count and n % count == 0]
        if not fitting:
            return NamedSharding(mesh, PartitionSpec())
        longest = max(fitting, key=lambda i: shape[i])
        return NamedSharding(mesh, PartitionSpec(*(name if i == longest else None for i in range(longest + 1))))

    return jax.tree.map(place, params)


def place_state(optimizer: PrivateOptimizer, params: PyTree, mesh: Mesh, layout: Layout = replicated) -> TrainState:
    """The `TrainState` at the start of a run on a mesh, its arrays placed by ``layout``, for `dpopt.run.loop.train`.

    Args:
        optimizer: a private optimizer.
        params: initial parameters; the same in every process.
        mesh: the mesh.
        layout: `replicated`, `fully_sharded`, or another function of parameters (or a state) and mesh.

    *Privacy*: reads no data.

    >>> from dpopt import dp_sgd
    >>> opt = dp_sgd(1.0, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=jax.random.key(0))
    >>> place_state(opt, np.ones(3), make_mesh(1)).params.shape
    (3,)
    """
    params = jax.tree.map(_put, params, layout(params, mesh))
    shapes = jax.eval_shape(optimizer.init, params)
    opt_state = jax.jit(optimizer.init, out_shardings=layout(shapes, mesh))(params)
    return TrainState(params, opt_state)


def place_constants(loss_fn: LossFn, mesh: Mesh, layout: Layout = replicated) -> LossFn:
    """The same loss, with its constants (frozen weights) placed on a mesh.

    `dpopt.train` copies constants that are elsewhere to every device of the parameters; use this for another layout.

    Args:
        loss_fn: a loss with constants: from `dpopt.flax.nnx_loss`, or made by `dpopt.constants.with_constants`.
        mesh: the mesh of the parameters, its axes automatic or explicit.
        layout: as for `place_state`.

    Raises:
        TypeError: if the loss declares no constants.

    *Privacy*: moves arrays to devices, and changes nothing.

    >>> from dpopt.constants import constants_of, with_constants
    >>> loss_fn = with_constants(lambda w, x, frozen: (frozen @ w) @ x, np.ones((4, 2)))
    >>> constants_of(place_constants(loss_fn, make_mesh(1), fully_sharded)).sharding.spec == PartitionSpec("data")
    True
    """
    constants = constants_of(loss_fn)
    if constants is None:
        raise TypeError(
            f"this loss has no constants that could be placed: {loss_fn!r}. Arrays that it closes over become part of "
            "its program; make it by dpopt.constants.with_constants, or from an NNX model by dpopt.flax.nnx_loss."
        )
    return given(loss_fn, jax.tree.map(_put, constants, layout(constants, mesh)))


def beside(constants: PyTree, params: PyTree) -> PyTree:
    """The constants of a loss, copied to every device of the parameters unless they are there already.

    Every process of a run has all constants. If no parameter is on a mesh, they are returned unchanged.

    *Privacy*: moves arrays to devices, and changes nothing.

    >>> w = jax.device_put(np.ones(2), replicated(np.ones(2), make_mesh(1)))
    >>> beside(np.ones(3), w).sharding == w.sharding
    True
    """
    places = [x.sharding for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    mesh = next((place.mesh for place in places if isinstance(place, NamedSharding)), None)
    if mesh is None:
        return constants
    devices = set(cast(Any, mesh.devices).flat)

    def place(x: Any) -> jax.Array:
        is_there = isinstance(x, jax.Array) and x.sharding.device_set == devices
        return x if is_there else _put(x, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(place, constants)


def whole(tree: PyTree) -> PyTree:
    """Gathers arrays from a mesh, each whole and in this process's memory: to evaluate, save or print them.

    They become NumPy arrays; other leaves are unchanged. In a run of several processes all must call it.

    *Privacy*: moves arrays, and changes nothing.

    >>> place = NamedSharding(make_mesh(1), PartitionSpec("data"))
    >>> whole({"w": jax.device_put(np.ones(2), place)})
    {'w': array([1., 1.], dtype=float32)}
    """

    def gathered(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
            return x
        if not x.is_fully_addressable:
            x = jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
        return np.asarray(x)

    return jax.tree.map(gathered, tree)
