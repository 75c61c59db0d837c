"""Where a run's batches come from."""

from collections.abc import Callable, Sized
from typing import Any, cast

import jax
import numpy as np


def rows_of(data: Any, num_examples: int) -> Callable[[np.ndarray], Any]:
    """A function from indices to a batch, of a pytree of arrays or of a source; a function stays what it is.

    A source has a length and is indexed by integers, as those of Grain, torch and Hugging Face are: its examples are
    read one by one, or by ``__getitems__`` where it has that, and stacked.

    Raises:
        TypeError: for what is neither; ValueError: if there is not one row for every example.
    """
    if hasattr(data, "__len__") and (callable(data) or _is_source(data)):
        held = len(cast(Sized, data))
        if held != num_examples:
            raise ValueError(f"the data hold {held} examples, and the plan samples from {num_examples}.")
    if callable(data):
        return data
    if _is_source(data):
        return lambda indices: _stacked(data, indices)
    leaves = jax.tree_util.tree_leaves_with_path(data)
    if not leaves:
        raise TypeError(f"the data hold no arrays: {data!r}.")
    for path, leaf in leaves:
        name = f"data{jax.tree_util.keystr(path)}"
        if hasattr(leaf, "iloc"):  # of pandas
            raise TypeError(
                f"{name} is a {type(leaf).__name__} of pandas. Pass arrays, such as "
                "{'x': frame[columns].to_numpy('float32'), 'y': frame['label'].to_numpy()}."
            )
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"{name} is {_a(type(leaf).__name__)}. Data are arrays with a row for every example (of a list: "
                "np.asarray), a source of examples with a length and integer indices, or a function from row numbers, "
                "(B,) integers, to a batch."
            )
        if leaf.ndim == 0 or leaf.shape[0] != num_examples:
            raise ValueError(
                f"{name} has shape {tuple(leaf.shape)}, and the plan samples from {num_examples} examples: each array "
                f"needs {num_examples} rows. (A list of rows is one array after np.stack.)"
            )
    return lambda indices: jax.tree.map(lambda x: x[indices], data)


def read(rows: Callable[..., Any], step: int, indices: np.ndarray) -> Any:
    """The batch of a step, of data that differ from step to step (`dpopt.users.UserBatches`) or stay the same."""
    at_step = getattr(rows, "at_step", None)
    return rows(indices) if at_step is None else at_step(step, indices)


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _is_source(data: Any) -> bool:
    if isinstance(data, (str, bytes)) or hasattr(data, "iloc") or hasattr(data, "dtype"):
        return False
    is_leaf = jax.tree_util.all_leaves([data])
    return is_leaf and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _stacked(source: Any, indices: np.ndarray) -> Any:
    numbers = [int(i) for i in indices]
    many = getattr(source, "__getitems__", None)
    examples = many(numbers) if many is not None else [source[i] for i in numbers]
    try:
        return jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *examples)
    except ValueError as error:
        raise ValueError(
            f"examples of the data do not stack ({error}): every one needs the same arrays in the same shapes. Cut or "
            "pad them, and turn text into numbers, before dpopt reads them."
        ) from error
