"""Privacy stated for users or clients instead of examples, and batches of their examples."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpopt.chain import PrivateOptimizer
from dpopt.common.types import Batch
from dpopt.engines import batches


def stated_for(unit: str, optimizer: object) -> PrivateOptimizer:
    """The same optimizer with its privacy stated for another unit; it refuses rows of any other unit."""
    if not isinstance(optimizer, PrivateOptimizer):
        raise TypeError(
            f"{unit}_level needs an optimizer made by dpopt (a named one, dpopt.privatize or dpopt.chain); got "
            f"{optimizer!r}."
        )
    privacy = dataclasses.replace(optimizer.privacy, unit=unit)
    stated = PrivateOptimizer(optimizer.init, optimizer.run, privacy, optimizer.stages, is_chained=optimizer.is_chained)
    stated.noise_unknown = optimizer.noise_unknown
    return stated


def arrays_of(
    batch: Batch, example_mask: ArrayLike | None, kind: type, unit: str
) -> tuple[Batch, tuple[int, int], jax.Array | None]:
    """A batch of the examples of units, which may be a ``kind`` with a mask of its own: data, leading axes, mask."""
    if isinstance(batch, kind):
        if example_mask is not None:
            raise ValueError(f"{kind.__name__} have an example_mask, but another was given: leave out example_mask=.")
        batch, example_mask = batch
    data = jax.tree.map(jnp.asarray, batch)
    shape = batches.grouped_shape(data, unit)
    return data, shape, None if example_mask is None else batches.checked_example_mask(example_mask, shape, unit)
