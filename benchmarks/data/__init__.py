"""Finds and caches data sets, none of which is committed; also scikit-learn's digits.

There is a reader for each of the others: `imdb`, `ratings` (MovieLens), `idx` (MNIST), `cifar10`, `documents` (tokens),
and `synthetic`.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn import datasets, model_selection

from benchmarks.arguments import UserError


class MissingData(UserError, FileNotFoundError):
    """A data set is missing; the message states where to get it and where to put it."""


class DamagedData(UserError, ValueError):
    """A data file exists, but its content is wrong."""


class Split(NamedTuple):
    """A data set split into training and test."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def folder(option: str | Path | None = None) -> Path:
    """The folder with the data sets: ``option``, or the environment variable DPOPT_DATA, or ``data`` in this folder."""
    return Path(option or os.environ.get("DPOPT_DATA") or "data").expanduser()


def find(where: str | Path | None, names: tuple[str, ...], *, what: str, address: str) -> Path:
    """The first of ``names`` that exists in the data folder.

    Raises:
        MissingData: if none does.
    """
    base = folder(where)
    for name in names:
        if (base / name).exists():
            return base / name
    raise MissingData(
        f"{what} is not in {base}: expected {' or '.join(names)} there. Get it from {address}, and set the folder "
        "with --data or the variable DPOPT_DATA."
    )


def cached(source: Path, name: str, build: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays parsed from ``source`` and cached: beside it if that folder is writable, else in the user's cache.

    The cache is valid for one size and date of the source. An unreadable cache is rebuilt.
    """
    stat = source.stat()
    stamp = np.array([stat.st_size, stat.st_mtime_ns])
    places = [source.parent, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpopt"]
    for place in places:
        path = place / f"{name}.npz"
        if path.exists():
            try:
                with np.load(path, allow_pickle=False) as stored:
                    if np.array_equal(stored["stamp"], stamp):
                        return {key: stored[key] for key in stored.files if key != "stamp"}
            except Exception:  # NumPy raises all kinds of errors on a truncated file
                continue
    arrays = build()
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            handle, unfinished = tempfile.mkstemp(dir=place, suffix=".unfinished")
        except OSError:
            continue
        with os.fdopen(handle, "wb") as file:
            np.savez(file, stamp=stamp, **arrays)
        Path(unfinished).replace(place / f"{name}.npz")
        break
    return arrays


def digits() -> Split:
    """scikit-learn's 1,797 real digits, ``(8, 8, 1)`` float32 in [0, 1]; a fifth is for testing."""
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = model_selection.train_test_split(
        images, labels.astype(np.int32), test_size=0.2, random_state=0, stratify=labels
    )
    return Split(train_x, train_y, test_x, test_y)
