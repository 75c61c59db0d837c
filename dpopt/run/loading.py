"""Batches for data loaders: a run's steps as a sequence, batches read ahead, and hosts that read only their own rows.

The sampler decides which examples are in a step. They can be read by anything: arrays in memory, Grain, torch's
``DataLoader``, Hugging Face ``datasets``. None of these may choose or shuffle.
"""

from __future__ import annotations

import concurrent.futures
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from dpopt.common import validate
from dpopt.keys import example_keys
from dpopt.run._types import RunSampler
from dpopt.run.data import Data, FetchBatch, check_parts, like_rows, read, rows_of
from dpopt.run.sharding import along_rows
from dpopt.sampling import AGAIN

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


class Steps(Sequence[Any]):
    """The steps of a run as a sequence: item t is the batch of step ``start + t``.

    Pass it to a loader as its data: ``grain.MapDataset.source(steps)``, or ``DataLoader(steps, batch_size=None)``. The
    loader then only reads ahead: the sampler chooses the batches, and any process may read a step. They are all steps
    of the run, not an epoch: a loop over them is not to be repeated, and there is a UserWarning if it is.

    Args:
        sampler: a sampler of `dpopt.sampling`.
        start, stop: the first step, and the one after the last.
        data: arrays, a source or a function, as for `dpopt.train`. Items are then ``(rows, mask)``; without it they are
            ``(indices, mask)``.
        example_key: for a loss that draws random numbers (dropout), a separate key: rows are then ``(rows, keys)``,
            with `dpopt.example_keys`.

    Raises:
        ValueError, TypeError: for an empty range, or data that cannot be indexed by row.

    *Privacy*: which examples are in a batch, and how many, is as private as the data. All these steps count as drawn.

    >>> from dpopt import PoissonSampler
    >>> steps = Steps(PoissonSampler(100, 10, seed=0, pad_to=4), 0, 50, data=np.arange(100))
    >>> rows, mask = steps[7]
    >>> len(steps), len(rows) == len(mask), len(rows) % 4
    (50, True, 0)
    """

    def __init__(
        self, sampler: RunSampler, start: int, stop: int, data: Data = None, *, example_key: jax.Array | None = None
    ):
        validate.non_negative_int(start=start, stop=stop)
        if stop <= start:
            raise ValueError(f"stop must exceed start; got start {start}, stop {stop}.")
        if example_key is not None:
            validate.prng_key(example_key, "example_key")
            if data is None:
                raise ValueError("example_key makes keys for rows, and there are no rows without data.")
        self.sampler, self.start, self.stop, self.example_key = sampler, start, stop, example_key
        self.rows = None if data is None else rows_of(data, sampler.num_examples)
        if self.rows is not None:
            check_parts(self.rows, sampler)
        sampler.hand_out(stop)  # other processes may draw them, unseen by this one

        self._iterated = False

    def __iter__(self) -> Iterator[Any]:
        if self._iterated and self.rows is not None:
            warnings.warn(AGAIN, UserWarning, stacklevel=2)
        self._iterated = True
        return super().__iter__()

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, t: Any) -> Any:
        if isinstance(t, slice):
            return [self[i] for i in range(*t.indices(len(self)))]
        if not -len(self) <= t < len(self):
            raise IndexError(f"there are {len(self)} steps; got {t}.")
        step = self.start + int(t) % len(self)
        batch = self.sampler.batch(step)
        if self.rows is None:
            return batch
        rows = read(self.rows, step, batch.indices)
        if self.example_key is not None:
            rows = rows, example_keys(self.example_key, step, batch.indices)
        return rows, batch.mask


def ahead(make: Callable[[_Item], _Made], items: Iterable[_Item], count: int) -> Iterator[_Made]:
    """``map(make, items)``, computed up to ``count`` items ahead in a thread.

    ``make`` is called in order; what it raises is raised when its result is requested. With ``count=0`` each result is
    computed on request.

    *Privacy*: changes nothing.

    >>> list(ahead(abs, [-1, 2, -3], 2))
    [1, 2, 3]
    """
    validate.non_negative_int(count=count)
    if count == 0:
        yield from map(make, items)
        return
    waiting: deque[concurrent.futures.Future[_Made]] = deque()
    executor = concurrent.futures.ThreadPoolExecutor(1, "dpopt-ahead")
    try:
        for item in items:
            waiting.append(executor.submit(make, item))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def sharded_rows(data: Data, num_examples: int, mesh: Mesh, axes: str | Sequence[str] | None = None) -> FetchBatch:
    """A function from indices to a batch split over a mesh; each host reads the rows of its own devices.

    Args:
        data: arrays, a source or a function, as for `dpopt.train`. It is called for parts of a batch.
        num_examples: number of rows.
        mesh, axes: as for `dpopt.run.sharding.shard_batch`, which leaves these batches unchanged.

    Returns:
        A function from indices ``(B,)`` to a pytree of arrays ``(B, ...)`` of the whole batch. For `dpopt.train`, with
        ``place_batch`` for the mask: ``lambda rows: shard_batch(rows, mesh)``.

    Raises:
        ValueError: if B is not a multiple of the number of devices along the axes; TypeError: see `dpopt.train`.

    *Privacy*: moves private data to devices, and changes nothing.

    >>> from dpopt.run.sharding import make_mesh
    >>> rows = sharded_rows({"x": np.ones((100, 2))}, 100, make_mesh(1))
    >>> rows(np.arange(4))["x"].shape
    (4, 2)
    """
    if getattr(data, "at_step", None) is not None:
        raise TypeError(
            "these data draw a whole batch anew at each step, which cannot be split. Use group(..., how='sample'), "
            "which draws once."
        )
    rows = rows_of(data, num_examples)

    def fetch(indices: np.ndarray) -> Any:
        sharding = along_rows(len(indices), mesh, axes)
        own = cast(dict[Any, tuple[slice]], sharding.addressable_devices_indices_map((len(indices),)))
        distinct = {str(part): part for (part,) in own.values()}  # devices that hold the same rows share them
        read = {name: rows(indices[part]) for name, part in distinct.items()}

        def whole(*parts: ArrayLike) -> jax.Array:
            placed = [jax.device_put(part, device) for part, device in zip(parts, own, strict=True)]
            return jax.make_array_from_single_device_arrays((len(indices), *placed[0].shape[1:]), sharding, placed)

        return jax.tree.map(whole, *(read[str(part)] for (part,) in own.values()))

    cast(Any, fetch).whole = rows  # which processes compare
    return like_rows(fetch, rows, num_examples)
