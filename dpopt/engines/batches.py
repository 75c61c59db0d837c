"""Checks of a batch, its mask, and the loss of one of its examples."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpopt.common import trees
from dpopt.common.types import Batch, Example, LossFn, PyTree
from dpopt.constants import constants_of, given, shapes_of


def batch_size(batch: Batch, name: str = "batch") -> int:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError(f"{name} has no arrays.")
    sizes = {}
    for path, leaf in leaves:
        where = jax.tree_util.keystr(path) or name
        if jnp.ndim(leaf) == 0:
            raise ValueError(f"every array of the {name} needs a leading batch axis; {where} is a scalar.")
        sizes[where] = jnp.shape(leaf)[0]
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{where}: {size}" for where, size in sizes.items())
        raise ValueError(f"the arrays of the {name} disagree on the batch size: {found}.")
    return next(iter(sizes.values()))


def checked_mask(mask: ArrayLike | None, batch_size: int) -> jax.Array:
    if mask is None:
        return jnp.ones((batch_size,), bool)
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"mask must be boolean, True for real examples; got dtype {mask.dtype}. Write mask > 0.")
    if mask.shape != (batch_size,):
        raise ValueError(f"mask must have shape ({batch_size},), one entry per example; got {mask.shape}.")
    return mask


def grouped_shape(batches: Batch, unit: str) -> tuple[int, int]:
    """The number of units (clients, users) in a batch of their examples, and the number of examples of each."""
    name, axes = f"{unit}_batches", f"({unit}s, examples)"
    leaves = jax.tree_util.tree_leaves_with_path(batches)
    if not leaves:
        raise ValueError(f"{name} has no arrays.")
    shapes = {jax.tree_util.keystr(path) or name: leaf.shape for path, leaf in leaves}
    for where, shape in shapes.items():
        if len(shape) < 2:
            raise ValueError(f"every array of {name} needs leading axes {axes}; {where} has shape {shape}.")
    if len({shape[:2] for shape in shapes.values()}) > 1:
        found = ", ".join(f"{where}: {shape[:2]}" for where, shape in shapes.items())
        raise ValueError(f"the arrays of {name} disagree on {axes}: {found}.")
    units, examples = next(iter(shapes.values()))[:2]
    if examples == 0:
        raise ValueError(f"{name} has no examples: pad each {unit} to at least one example, and mask it out.")
    return units, examples


def checked_example_mask(example_mask: ArrayLike, shape: tuple[int, int], unit: str) -> jax.Array:
    example_mask = jnp.asarray(example_mask)
    if example_mask.dtype != bool:
        raise TypeError(f"example_mask must be boolean, True for real examples; got dtype {example_mask.dtype}.")
    if example_mask.shape != shape:
        raise ValueError(f"example_mask must have shape ({unit}s, examples) = {shape}; got {example_mask.shape}.")
    return example_mask


def check_loss(loss_fn: LossFn, params: PyTree, batch: Batch, has_aux: bool) -> None:
    example = trees.structs(batch, 1)
    shapes, held = shapes_of(params), shapes_of(constants_of(loss_fn))  # without shardings, as in the engines
    try:
        value = jax.eval_shape(lambda p, x, c: given(loss_fn, c)(p, x), shapes, example, held)
    except Exception as error:
        error.add_note(
            f"dpopt called loss_fn(params, example) with params, a {type(params).__name__}, and a single example "
            f"without a batch axis: {_shapes(example)}. dpopt.flax.example_loss makes a loss of one example from one "
            "of a batch; for a Flax model, dpopt.flax.nnx_loss and linen_loss make the loss and its parameters."
        )
        raise
    if has_aux:
        if not (isinstance(value, tuple) and len(value) == 2):
            raise TypeError("with has_aux=True the loss must return (loss, aux).")
        value = value[0]
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape != () or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        got = f"shape {shape} and dtype {dtype}" if shape is not None else f"a {type(value).__name__}"
        raise ValueError(
            f"the loss of one example must be a real scalar; got {got}. loss_fn(params, example) is given a single "
            "example without a batch axis: reduce over its outputs, and pass has_aux=True if it returns more."
        )


def example_and_key(row: Example) -> tuple[Example, jax.Array | None]:
    """The example and the key that `dpopt.example_keys` put next to it, or None."""
    if isinstance(row, tuple) and len(row) == 2 and is_key(row[1]):
        return row
    return row, None


def is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _shapes(example: Example) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(example)
    shown = [f"example{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}" for path, x in leaves[:8]]
    return ", ".join(shown) + (", ..." if len(leaves) > 8 else "")
