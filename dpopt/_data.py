"""Where a run's batches come from."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def rows_of(data: Any, num_examples: int) -> Callable[[np.ndarray], Any]:
    """A function from indices to a batch, of a pytree of arrays; a function stays what it is.

    Raises:
        TypeError: for what is neither; ValueError: if an array has not one row for every example.
    """
    if callable(data):
        return data
    leaves = jax.tree_util.tree_leaves_with_path(data)
    if not leaves:
        raise TypeError(f"the data hold no arrays: {data!r}.")
    for path, leaf in leaves:
        name = f"data{jax.tree_util.keystr(path)}"
        if hasattr(leaf, "iloc"):  # of pandas
            raise TypeError(
                f"{name} is a {type(leaf).__name__}, whose columns are of many kinds. Pass arrays, such as "
                "{'x': frame[columns].to_numpy('float32'), 'y': frame['label'].to_numpy()}."
            )
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"{name} is a {type(leaf).__name__}. Data are arrays with a row for every example, or a function from "
                "row numbers, (B,) integers, to a batch."
            )
        if leaf.ndim == 0 or leaf.shape[0] != num_examples:
            raise ValueError(
                f"{name} has shape {tuple(leaf.shape)}, and the plan samples from {num_examples} examples: each array "
                f"needs {num_examples} rows."
            )
    return lambda indices: jax.tree.map(lambda x: x[indices], data)
