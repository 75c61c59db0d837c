"""Documents of tokens, cut into windows of one length: text files as bytes, or a file of tokens.

Every window lies within one document, so that documents can be the privacy unit.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import DamagedData, MissingData

PAD = -1  # padding of a document's last window; not a token, and not trained on
BYTES_END = 256  # ends a document of bytes
BYTES_VOCABULARY = 257
_CHUNK = 1 << 24  # tokens of a file that are checked at a time


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of ``length`` tokens and the next one; rows are read from disk on access.

    Attributes:
        document: ``(windows,)`` int64, the document of each window, as `dpopt.users.group` takes it.
        length: number of input tokens of a window; the target of each is the next token.
        vocabulary: number of tokens, which are numbers below it.
    """

    document: np.ndarray
    length: int
    vocabulary: int
    _tokens: np.ndarray = dataclasses.field(repr=False)  # (tokens,), perhaps on disk
    _start: np.ndarray = dataclasses.field(repr=False)  # (windows,), and where their documents stop
    _stop: np.ndarray = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return len(self.document)

    @property
    def documents(self) -> int:
        return int(self.document[-1]) + 1

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Windows by number: ``(n, length + 1)`` int32, with `PAD` after a document's end."""
        found = np.full((len(rows), self.length + 1), PAD, np.int32)
        for into, row in zip(found, rows, strict=True):
            start = self._start[row]
            piece = self._tokens[start : min(start + self.length + 1, self._stop[row])]
            into[: len(piece)] = piece
        return found


def read(where: Path, length: int, *, vocabulary: int | None = None, end: int | None = None) -> Windows:
    """Reads documents from a text file, a folder of ``.txt`` files (one document each), or a ``.npy`` file of tokens.

    Args:
        where: the file or the folder. A ``.npy`` file holds integers ``(tokens,)`` and stays on disk.
        length: number of input tokens of a window.
        vocabulary: the number of tokens of a ``.npy`` file. Text has `BYTES_VOCABULARY`.
        end: the token that ends a document in a ``.npy`` file. Text documents end with `BYTES_END`.

    Raises:
        MissingData: if there is no such file or folder.
        DamagedData: if there are no documents, or a token is not below ``vocabulary``.
        ValueError: if the length is not positive, or if ``vocabulary`` and ``end`` are missing for a ``.npy`` file or
            given for text.
    """
    if length < 1:
        raise ValueError(f"the length of a window must be at least 1 token; got {length}.")
    is_text = where.suffix != ".npy"
    if is_text and (vocabulary is not None or end is not None):
        raise ValueError(f"{where} is read as bytes, whose vocabulary and end are fixed: leave both out.")
    if not is_text and (vocabulary is None or end is None):
        raise ValueError(
            f"{where} holds tokens: pass their number (vocabulary) and the one that ends a document (end)."
        )
    if not where.exists():
        raise MissingData(f"there is no {where}: expected a text file, a folder of .txt files, or a .npy file.")
    if is_text:
        tokens, vocabulary, end = _bytes(where), BYTES_VOCABULARY, BYTES_END
    else:
        tokens = _stored(where)
    stops = _stops(tokens, int(vocabulary), int(end), where)
    starts = np.concatenate([[0], stops[:-1]])
    kept = stops - starts >= 2  # a token and its successor, so not a lone end token
    if not kept.any():
        raise DamagedData(f"{where} holds no document of at least one token.")
    return _cut(tokens, starts[kept], stops[kept], length, int(vocabulary))


def _cut(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, length: int, vocabulary: int) -> Windows:
    """A window for every ``length`` tokens with a successor in their document."""
    counts = -(-(stops - starts - 1) // length)
    document = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return Windows(document, length, vocabulary, tokens, starts[document] + length * place, stops[document])


def _bytes(where: Path) -> np.ndarray:
    paths = sorted(where.rglob("*.txt")) if where.is_dir() else [where]
    end = np.array([BYTES_END], np.uint16)
    pieces = [np.concatenate([np.frombuffer(path.read_bytes(), np.uint8), end]) for path in paths]
    if not pieces:
        raise MissingData(f"{where} holds no .txt file; each would be a document.")
    return np.concatenate(pieces)


def _stored(where: Path) -> np.ndarray:
    try:
        tokens: Any = np.load(where, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DamagedData(f"{where} is not a NumPy file, or is truncated: {error}.") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        shape = getattr(tokens, "shape", None)
        raise DamagedData(f"{where} must hold integers (tokens,); it holds {getattr(tokens, 'dtype', tokens)} {shape}.")
    return tokens


def _stops(tokens: np.ndarray, vocabulary: int, end: int, where: Path) -> np.ndarray:
    """Where documents stop, their end included; what follows the last end is a document, too."""
    if not 0 <= end < vocabulary:
        raise ValueError(f"the token that ends a document must be below the vocabulary, {vocabulary}; got {end}.")
    found = []
    for first in range(0, len(tokens), _CHUNK):
        chunk = np.asarray(tokens[first : first + _CHUNK])
        if chunk.min() < 0 or chunk.max() >= vocabulary:
            wrong = chunk[(chunk < 0) | (chunk >= vocabulary)][0]
            raise DamagedData(f"{where}: tokens must be 0 to {vocabulary - 1}; it holds {wrong}.")
        found.append(first + 1 + np.flatnonzero(chunk == end))
    stops = np.concatenate([*found, np.zeros(0, np.int64)])
    return stops if len(stops) and stops[-1] == len(tokens) else np.append(stops, len(tokens))
