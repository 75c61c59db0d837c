"""The data of a run: indices to batches, from arrays, a source of examples or a function."""

import dataclasses
from collections.abc import Callable, Sized
from typing import Any, TypeAlias, cast

import jax
import numpy as np

from dpopt.common.types import Batch, PyTree
from dpopt.keys import example_keys, seeded_key
from dpopt.run._types import RunSampler
from dpopt.sampling import Indices, Mask

FetchBatch: TypeAlias = Callable[[np.ndarray], Batch]  # from indices (B,) to a batch
Data: TypeAlias = FetchBatch | PyTree  # or arrays with a row for every example, or a source of examples


def rows_of(data: Data, num_examples: int) -> FetchBatch:
    """A function from indices to a batch, made from a pytree of arrays or a source; a function is returned unchanged.

    A source has a length and integer indices, such as those of Grain, torch and Hugging Face. Its examples are read by
    ``__getitems__`` if it has that, otherwise one by one, and stacked.

    Raises:
        TypeError: for anything else; ValueError: unless there is one row per example.
    """
    if hasattr(data, "__len__") and (callable(data) or _is_source(data)):
        _check_count(len(cast(Sized, data)), num_examples)
    if callable(data):
        _check_count(getattr(data, "num_examples", num_examples), num_examples)
        return data
    if _is_source(data):
        return lambda indices: _stacked(data, indices)
    leaves = jax.tree_util.tree_leaves_with_path(data)
    if not leaves:
        raise TypeError(f"the data hold no arrays: {data!r}.")
    for path, leaf in leaves:
        _check_leaf(leaf, f"data{jax.tree_util.keystr(path)}", num_examples)
    return lambda indices: jax.tree.map(lambda x: x[indices], data)


def check_parts(rows: FetchBatch, sampler: object) -> None:
    """Refuses data whose row numbers depend on each other under a sampler that takes parts of the data by number.

    Raises:
        ValueError: for users that are numbered by the order of their ids: without one, the next is in another part.

    *Privacy*: what samplers of parts cost holds only if an example that is added or removed leaves all others in place.

    >>> from dpopt.samplers.parts import EpochSampler
    >>> check_parts(lambda indices: indices, EpochSampler(10, 4, seed=0))
    """
    if getattr(rows, "are_ranks", False) and getattr(sampler, "goes_by_number", False):
        raise ValueError(
            "users are numbered in the order of their ids, so removing one would move all later ones to other parts of "
            f"the data, and no theorem covers that. {type(sampler).__name__} takes parts by number: use "
            "BallsInBinsSampler (sampling='balls_in_bins'), which draws the part of each user, or PoissonSampler."
        )


def like_rows(fetch: FetchBatch, rows: FetchBatch, num_examples: int) -> FetchBatch:
    """``fetch``, made from ``rows``, with what a run asks of data: their number, and whether row numbers are ranks.

    *Privacy*: otherwise data that are refused would be taken once they are wrapped: by samplers of parts
    (`check_parts`), or by a plan for more rows. (JAX reads the last row again beyond the end of an array, so that one
    example could be in a batch many times.)

    >>> fetch = like_rows(lambda indices: indices, lambda indices: indices, 10)
    >>> fetch.are_ranks, fetch.num_examples
    (False, 10)
    """
    made = cast(Any, fetch)
    made.are_ranks, made.num_examples = getattr(rows, "are_ranks", False), num_examples
    return fetch


def read(rows: Callable[..., Batch], step: int, indices: np.ndarray) -> Batch:
    """The batch of a step, also from data that change with the step (`dpopt.users.UserBatches`)."""
    at_step = getattr(rows, "at_step", None)
    return rows(indices) if at_step is None else at_step(step, indices)


@dataclasses.dataclass(frozen=True)
class BatchReader:
    """Reads the batch of a step, and puts it on devices."""

    rows: FetchBatch
    example_key: jax.Array | None
    takes_key: bool  # whether the loss draws random numbers, so that it gets keys without `example_key`, too
    place: Callable[[Any], Any] | None  # puts (batch, mask) on devices

    def read(self, sampler: RunSampler, number: int) -> tuple[Indices, Batch, Mask]:
        """Indices, data and mask of the step that is charged under this number."""
        indices, mask = sampler.batch(number)
        return indices, read(self.rows, number, indices), mask

    def placed(self, sampler: RunSampler, number: int, rows: tuple[Indices, Batch, Mask]) -> tuple[PyTree, Any]:
        """Batch and mask on their devices; the batch has keys beside it if the loss takes them."""
        indices, data, mask = rows
        key = self.example_key
        if key is None and self.takes_key:
            key = seeded_key(sampler.seed)  # the seed of this segment, so that a replay draws the same
        if key is not None:
            data = data, example_keys(key, number, indices)
        return (data, mask) if self.place is None else self.place((data, mask))


def _check_count(held: int, num_examples: int) -> None:
    if held != num_examples:
        raise ValueError(f"the data hold {held} examples, and the plan samples from {num_examples}.")


def _check_leaf(leaf: Any, name: str, num_examples: int) -> None:
    if hasattr(leaf, "iloc"):  # of pandas
        raise TypeError(
            f"{name} is a {type(leaf).__name__} of pandas. Pass arrays, such as "
            "{'x': frame[columns].to_numpy('float32'), 'y': frame['label'].to_numpy()}."
        )
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        kind = type(leaf).__name__
        article = "an" if kind[0].lower() in "aeiou" else "a"
        raise TypeError(
            f"{name} is {article} {kind}. Data are arrays with a row for every example "
            "(for a list: np.asarray), a source of examples with a length and integer indices, or a function from row "
            "numbers, (B,) integers, to a batch."
        )
    if getattr(leaf.dtype, "kind", None) in ("O", "S", "U"):
        raise TypeError(
            f"{name} has dtype {leaf.dtype}, which JAX cannot compute with: turn text and objects into numbers first."
        )
    if leaf.ndim == 0 or leaf.shape[0] != num_examples:
        raise ValueError(
            f"{name} has shape {tuple(leaf.shape)}, and the plan samples from {num_examples} examples: each array "
            f"needs {num_examples} rows. (To make one array of a list of rows, use np.stack.)"
        )


def _is_source(data: Any) -> bool:
    if isinstance(data, (str, bytes)) or hasattr(data, "iloc") or hasattr(data, "dtype"):
        return False
    return jax.tree_util.all_leaves([data]) and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _stacked(source: Any, indices: np.ndarray) -> Batch:
    numbers = [int(i) for i in indices]
    many = getattr(source, "__getitems__", None)
    examples = many(numbers) if many is not None else [source[i] for i in numbers]
    try:
        return jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *examples)
    except ValueError as error:
        raise ValueError(
            f"examples of the data do not stack ({error}): every one needs the same arrays in the same shapes. Crop or "
            "pad them, and turn text into numbers, before dpopt reads them."
        ) from error
