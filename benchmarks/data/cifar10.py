"""CIFAR-10 from its official archives, packed or unpacked, with any number of images."""

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import data

ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar.html (cifar-10-binary.tar.gz, or cifar-10-python.tar.gz)"
_BYTES = 3 * 32 * 32  # of an image: red, then green, then blue, each row by row
_CLASSES = 10
_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
# By the archive's name: its folder, and the suffix of batch files.
_LAYOUTS = {
    "cifar-10-binary.tar.gz": ("cifar-10-batches-bin", ".bin"),
    "cifar-10-python.tar.gz": ("cifar-10-batches-py", ""),
}


def load(where: str | Path | None = None) -> data.Split:
    """All images in the files, ``(n, 32, 32, 3)`` uint8, and labels int32.

    Float32 images would take four times the memory; scale them on use.

    Raises:
        data.MissingData, data.DamagedData
    """
    names = tuple(name for archive, (folder, _) in _LAYOUTS.items() for name in (folder, archive))
    found = data.find(where, names, what="CIFAR-10", address=ADDRESS)
    layout = next(archive for archive, (folder, _) in _LAYOUTS.items() if found.name in (archive, folder))
    folder, suffix = _LAYOUTS[layout]
    parse = _binary if suffix else _pickled
    read = _from_folder if found.is_dir() else _from_archive
    wanted = {name: f"{folder}/{name}{suffix}" for name in (*_TRAIN, "test_batch")}
    contents = read(found, tuple(wanted.values()))
    batches = {}
    for name, member in wanted.items():
        if member not in contents:
            raise data.DamagedData(f"{found} has no {member}. Get it again from {ADDRESS}.")
        batches[name] = parse(contents[member], f"{found}: {member}")
    sizes = {name: len(labels) for name, (_, labels) in batches.items()}
    if len(set(sizes.values())) != 1:  # a file truncated between two images shows in no other way
        raise data.DamagedData(f"{found}: all batches must hold the same number of images; they hold {sizes}.")
    train_x, train_y = (np.concatenate(parts) for parts in zip(*(batches[name] for name in _TRAIN), strict=True))
    return data.Split(train_x, train_y, *batches["test_batch"])


def _from_folder(found: Path, wanted: tuple[str, ...]) -> dict[str, bytes]:
    paths = {member: found.parent / member for member in wanted}
    return {member: path.read_bytes() for member, path in paths.items() if path.exists()}


def _from_archive(found: Path, wanted: tuple[str, ...]) -> dict[str, bytes]:
    contents = {}
    try:
        with tarfile.open(found) as archive:
            for member in archive:
                if member.name in wanted and member.isfile():
                    contents[member.name] = archive.extractfile(member).read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise data.DamagedData(f"{found} is damaged: {error}. Get it again from {ADDRESS}.") from error
    return contents


def _binary(raw: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Parses records of one label byte and the bytes of an image."""
    if not raw or len(raw) % (1 + _BYTES):
        raise data.DamagedData(
            f"{name} has {len(raw)} bytes; expected a multiple of {1 + _BYTES}, a label and an image."
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, 1 + _BYTES)
    return _checked(records[:, 1:], records[:, 0], name)


def _pickled(raw: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Parses a dictionary with an array of images and a list of labels."""
    try:
        content = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
    except Exception as error:  # a damaged pickle raises all kinds of errors
        raise data.DamagedData(f"{name} cannot be read: {error}. Get it again from {ADDRESS}.") from error
    content = content if isinstance(content, dict) else {}
    images, labels = content.get(b"data"), np.asarray(content.get(b"labels"))
    is_array = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape[1:] == (_BYTES,)
    if not is_array or not len(images) or labels.shape != (len(images),) or labels.dtype.kind != "i":
        raise data.DamagedData(f"{name} must hold 'data', (n, {_BYTES}) bytes, and n integer 'labels'; it does not.")
    return _checked(images, labels, name)


def _checked(images: np.ndarray, labels: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    wrong = np.flatnonzero((labels < 0) | (labels >= _CLASSES))
    if len(wrong):
        raise data.DamagedData(
            f"{name}: labels are 0 to {_CLASSES - 1}; image {wrong[0]} has {labels[wrong[0]]}. Get it again from "
            f"{ADDRESS}."
        )
    channels_last = images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(channels_last), labels.astype(np.int32)


class _ArraysOnly(pickle.Unpickler):
    """Loads only numbers, text, containers and NumPy arrays: a pickle could otherwise call any function."""

    _ARRAYS = "numpy.core.multiarray", "numpy._core.multiarray"  # in NumPy 1 and 2

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if module in self._ARRAYS and name == "_reconstruct":
            return _empty
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return _latin1
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only NumPy arrays are allowed")


def _empty(subtype: Any, shape: Any, dtype: Any) -> np.ndarray:
    """An empty array for the unpickler to fill, whatever the pickle requests."""
    return np.ndarray.__new__(np.ndarray, (0,), "b")


def _latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin1")
