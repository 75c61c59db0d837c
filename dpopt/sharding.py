"""More than one device: where batches, parameters and states lie. The computation is JAX's own SPMD.

Put the batch on the devices of a mesh, and the parameters on all of them (data parallel) or in parts (fully sharded);
``jax.jit`` does the rest. Noise is drawn by position in the whole array, so it is the same on any number of devices,
and it is drawn once: the clipped sum is added up over devices before the noise is.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpopt.identity import TrainState


def make_mesh(num_devices: int | None = None, axis: str = "data") -> Mesh:
    """A mesh with one axis over the first devices, of all processes.

    Args:
        num_devices: how many; None for all.
        axis: name of the axis.

    Raises:
        ValueError: if there are fewer.

    *Privacy*: reads no data.

    >>> make_mesh(1).shape["data"]
    1
    """
    devices = jax.devices()
    count = len(devices) if num_devices is None else num_devices
    if not 1 <= count <= len(devices):
        raise ValueError(f"there are {len(devices)} devices; got num_devices={num_devices}.")
    return Mesh(np.array(devices[:count]), (axis,))


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Splits every array of a batch along its first axis over the mesh.

    In a run of several processes each must pass the same whole batch (the sampler gives all of them the same indices);
    each keeps the rows of its own devices.

    Args:
        batch: pytree of arrays ``(B, ...)``, the mask among them.
        mesh: the mesh, of one axis.

    Raises:
        ValueError: if B is no multiple of the number of devices: make it the sampler's ``pad_to``.

    *Privacy*: moves private data to devices, and changes nothing.

    >>> shard_batch({"x": np.ones((4, 2))}, make_mesh(1))["x"].shape
    (4, 2)
    """
    (axis,) = mesh.axis_names
    sharding = NamedSharding(mesh, PartitionSpec(axis))

    def place(x):
        x = np.asarray(x)
        if x.ndim == 0 or x.shape[0] % mesh.size:
            raise ValueError(
                f"a batch of shape {x.shape} cannot be split over {mesh.size} devices: make pad_to of the sampler a "
                f"multiple of {mesh.size}."
            )
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(place, batch)


def replicated(params: Any, mesh: Mesh) -> Any:
    """Where everything lies whole on each device: data parallelism.

    Args:
        params: pytree of arrays or shapes.
        mesh: the mesh.

    Returns:
        A pytree of shardings like ``params``.

    *Privacy*: reads no data.

    >>> replicated(np.ones(3), make_mesh(1)).spec == PartitionSpec()
    True
    """
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), params)


def fully_sharded(params: Any, mesh: Mesh) -> Any:
    """Where every array lies in parts: its longest axis that the devices divide is split; others stay whole.

    Of an optimizer's state, moments and noise lie as the parameters they belong to.

    Args:
        params: pytree of arrays or shapes: parameters, or a state.
        mesh: the mesh, of one axis.

    Returns:
        A pytree of shardings like ``params``.

    *Privacy*: reads no data.

    >>> fully_sharded(np.ones((3, 4)), make_mesh(1)).spec == PartitionSpec(None, "data")
    True
    """
    (axis,) = mesh.axis_names

    def place(x):
        shape = np.shape(x)
        fitting = [i for i, n in enumerate(shape) if n >= mesh.size and n % mesh.size == 0]
        if not fitting:
            return NamedSharding(mesh, PartitionSpec())
        longest = max(fitting, key=lambda i: shape[i])
        return NamedSharding(mesh, PartitionSpec(*(axis if i == longest else None for i in range(longest + 1))))

    return jax.tree.map(place, params)


def place_state(optimizer: Any, params: Any, mesh: Mesh, layout: Any = replicated) -> TrainState:
    """The state at the start of a run on a mesh, for `dpopt.loop.train`.

    Args:
        optimizer: a private optimizer.
        params: initial parameters; the same in every process.
        mesh: the mesh.
        layout: `replicated` or `fully_sharded`.

    Returns:
        A `TrainState` whose arrays lie where ``layout`` says.

    *Privacy*: reads no data.

    >>> from dpopt import dp_sgd
    >>> opt = dp_sgd(1.0, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=jax.random.key(0))
    >>> place_state(opt, np.ones(3), make_mesh(1)).params.shape
    (3,)
    """
    params = jax.tree.map(
        lambda x, s: jax.make_array_from_callback(np.shape(x), s, lambda index, x=x: np.asarray(x)[index]),
        params,
        layout(params, mesh),
    )
    shapes = jax.eval_shape(optimizer.init, params)
    opt_state = jax.jit(optimizer.init, out_shardings=layout(shapes, mesh))(params)
    return TrainState(params, opt_state)
