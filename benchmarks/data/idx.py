"""MNIST from its official idx files, compressed or not, with any number of digits."""

import gzip
import zlib
from pathlib import Path

import numpy as np

from benchmarks import data

ADDRESS = "https://yann.lecun.org/exdb/mnist/ (train-images-idx3-ubyte.gz and three more)"
RANKS = {"images": 3, "labels": 1}
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read(path: Path) -> np.ndarray:
    """The array in an idx file.

    Raises:
        data.DamagedData: if the header or the length is wrong.
    """
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise data.DamagedData(f"{path} is damaged: {error}. Get it again from {ADDRESS}.") from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES:
        raise data.DamagedData(f"{path} is not an idx file: it begins with {raw[:4]!r}.")
    rank = raw[3]
    shape = np.frombuffer(raw, ">i4", min(rank, (len(raw) - 4) // 4), 4)
    kind = np.dtype(_TYPES[raw[2]])
    expected = 4 + 4 * rank + int(np.prod(shape)) * kind.itemsize
    if len(shape) != rank or len(raw) != expected:
        raise data.DamagedData(f"{path} has {len(raw)} bytes; by its header it should have {expected}.")
    values = np.frombuffer(raw, kind, offset=4 + 4 * rank)
    return values.reshape(shape).astype(kind.newbyteorder("="))


def path(where: str | Path | None, part: str, kind: str) -> Path:
    """The path of a file: ``part`` is ``"train"`` or ``"t10k"``, ``kind`` is ``"images"`` or ``"labels"``.

    Raises:
        data.MissingData: if there is no such file.
    """
    name = f"{part}-{kind}-idx{RANKS[kind]}-ubyte"
    names = tuple(f"{prefix}{name}{end}" for prefix in ("mnist/", "") for end in (".gz", ""))
    return data.find(where, names, what="MNIST", address=ADDRESS)


def load(where: str | Path | None = None) -> data.Split:
    """All images in the files, ``(n, 28, 28, 1)`` float32 in [0, 1], and labels int32.

    Raises:
        data.MissingData, data.DamagedData
    """
    arrays = []
    for part in ("train", "t10k"):
        for kind, rank in RANKS.items():
            found = path(where, part, kind)
            arrays.append(read(found))
            if arrays[-1].ndim != rank:
                raise data.DamagedData(f"{found.name}: expected rank {rank}; got shape {arrays[-1].shape}.")
        if len(arrays[-2]) != len(arrays[-1]):
            raise data.DamagedData(f"MNIST, {part}: {len(arrays[-2])} images and {len(arrays[-1])} labels.")
    train_x, train_y, test_x, test_y = arrays

    def images(x):
        return (x[..., None] / 255).astype(np.float32)

    return data.Split(images(train_x), train_y.astype(np.int32), images(test_x), test_y.astype(np.int32))
