"""A run on a mesh of several axes: parameters are sharded along some of them, the batch along others.

`dpopt.run.sharding` places one thing at a time; this module places a whole run, with the usual layout as the default.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Unpack, cast

import jax
from jax.sharding import AxisType, Mesh

from dpopt.common.types import LossFn, PyTree
from dpopt.constants import constants_of
from dpopt.run import sharding
from dpopt.run._types import Options
from dpopt.run.data import Data
from dpopt.run.loading import sharded_rows
from dpopt.run.plan import Plan
from dpopt.run.results import TrainResult
from dpopt.run.state import TrainState


def mesh_of(text: str) -> Mesh:
    """The mesh over the first devices whose explicit axes a text such as ``"data=4,fsdp=2"`` lists in order.

    Raises:
        ValueError: if the text has another form, or there are fewer devices.

    *Privacy*: reads no data.

    >>> dict(mesh_of("data=1,fsdp=1").shape)
    {'data': 1, 'fsdp': 1}
    """
    pairs = [part.split("=") for part in text.split(",")]
    names = [pair[0].strip() for pair in pairs]
    is_valid = all(len(pair) == 2 and pair[1].strip().isdecimal() and int(pair[1]) > 0 for pair in pairs)
    if not is_valid or not all(name.isidentifier() for name in names) or len(set(names)) < len(names):
        raise ValueError(f"a mesh is described by axes and their sizes, such as data=4,fsdp=2; got {text!r}.")
    sizes = tuple(int(pair[1]) for pair in pairs)
    count, there = math.prod(sizes), len(jax.devices())
    if count > there:
        raise ValueError(
            f"the mesh {text} needs {count} devices, and there are {there}. To simulate them on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before JAX starts."
        )
    return jax.make_mesh(sizes, tuple(names), axis_types=(AxisType.Explicit,) * len(names))


def start(mesh: str | None, processes: Sequence[str] | None = None) -> Mesh | None:
    """The mesh that a command line specifies; call this before any other use of JAX.

    Args:
        mesh: as for `mesh_of`, or None for no mesh.
        processes: for a run of several processes, each of which calls this: the address of the first one
            (``"localhost:12355"``), their count, and the number of this one from 0. None for a single process.

    Raises:
        ValueError: for processes without a mesh, or invalid numbers; and as `mesh_of`.

    *Privacy*: reads no data.

    >>> start("data=1").shape["data"], start(None)
    (1, None)
    """
    if processes is not None:
        address, *numbers = processes
        if mesh is None:
            raise ValueError("several processes need a mesh over all their devices, such as data=2.")
        if len(numbers) != 2 or not all(n.isdecimal() for n in numbers) or not int(numbers[1]) < int(numbers[0]):
            raise ValueError(
                f"processes are an address, their count, and a number below it; got {' '.join(processes)}."
            )
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, num_processes=int(numbers[0]), process_id=int(numbers[1]))
    return None if mesh is None else mesh_of(mesh)


def train_on(
    mesh: Mesh,
    plan: Plan,
    loss_fn: LossFn,
    params: PyTree,
    data: Data,
    *,
    batch_axes: str | Sequence[str] | None = None,
    parameter_axes: str | Sequence[str] | None = "fsdp",
    **options: Unpack[Options],
) -> TrainResult:
    """``plan.run(loss_fn, params, data, **options)`` with everything placed on a mesh.

    Parameters, the optimizer's moments, the noise and the loss's constants (frozen weights) are sharded along
    ``parameter_axes``, the rows of a batch along ``batch_axes``; each host reads the rows of its own devices. In a run
    of several processes each calls this, with the same arguments.

    Args:
        mesh: its axes are automatic or explicit.
        plan, loss_fn, params, data: see `dpopt.train`. The parameters are initial ones, whole in every process.
        batch_axes: the axes of the mesh that split a batch; None for all. The sampler's ``pad_to`` must be a multiple
            of the number of devices along them.
        parameter_axes: the axes that split parameters; None, or a name that the mesh does not have, for none.
        **options: those of `dpopt.train`, without ``place_batch``.

    Raises:
        ValueError: if the mesh has no such axes, or ``pad_to`` is not a multiple of the number of devices along them;
            TypeError: if ``params`` is a `TrainState`; and whatever `dpopt.train` raises.

    *Privacy*: that of `dpopt.train`. The noise is the same on any mesh, and drawn once.

    >>> import jax.numpy as jnp, numpy as np, optax, dpopt
    >>> plan = dpopt.Builder(num_examples=100, expected_batch_size=10, steps=2, key=jax.random.key(7)).clip(1.0).noise(
    ...     2.0).then(optax.sgd(0.1)).build()
    >>> data = np.ones((100, 2), np.float32)
    >>> result = train_on(mesh_of("data=1,fsdp=1"), plan, lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(2), data)
    >>> result.params.sharding.spec[0], result.ledger.steps
    ('fsdp', 2)
    """
    if isinstance(params, TrainState):
        raise TypeError("train_on places initial parameters; got a TrainState, which is placed already: call plan.run.")
    if "place_batch" in options:
        raise ValueError("train_on places batches itself, along batch_axes: omit place_batch.")
    split = tuple(mesh.axis_names) if batch_axes is None else batch_axes
    has_axes = parameter_axes is not None and (not isinstance(parameter_axes, str) or parameter_axes in mesh.axis_names)
    layout = functools.partial(sharding.fully_sharded, axes=parameter_axes) if has_axes else sharding.replicated
    if constants_of(loss_fn) is not None:
        loss_fn = sharding.place_constants(loss_fn, mesh, layout)
    return plan.run(
        loss_fn,
        sharding.place_state(plan.optimizer, params, mesh, layout),
        sharded_rows(data, plan.sampler.num_examples, mesh, split),
        place_batch=lambda rows: sharding.shard_batch(rows, mesh, split),
        **cast(Any, options),
    )
