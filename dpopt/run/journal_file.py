"""A journal's file: one line of JSON per entry, each with a checksum over itself and all lines before it."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 2


class Damaged(ValueError):
    """A file that is not a journal, or was changed after it was written."""


class InUse(RuntimeError):
    """A file that another process has open for writing."""


class Replaced(OSError):
    """A file that somebody removed, replaced or cut off while it was open for writing."""


class Content(NamedTuple):
    """The content of a file."""

    header: dict[str, Any] | None = None  # format, run and identity; None for an empty file
    entries: list[dict[str, Any]] = []  # noqa: RUF012  never changed
    checksum: str = ""  # of the last complete line
    length: int = 0  # of all complete lines, in bytes


class JournalFile:
    """A file that is open for appending, by one process at a time.

    Raises:
        InUse: if another process has it open; OSError: if it cannot be opened.
    """

    def __init__(self, path: Path):
        self._path, self._checksum, self._length, self._owner = path, "", 0, os.getpid()
        # Unbuffered: each line is passed to the system in one write, whose failure is seen.
        self._file = open(path, "ab+", buffering=0)
        os.chmod(path, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise InUse(
                f"{path} is in use by another process: one run has one writer. (If that run was killed, processes that "
                "it had started, such as those that load data, may hold the file: end them.)"
            ) from error

    def follow(self, content: Content) -> None:
        """Continues after this content of the file; an incomplete last line is dropped."""
        self._file.truncate(content.length)
        self._checksum, self._length = content.checksum, content.length

    def append(self, body: dict[str, Any]) -> None:
        """Adds a line, and returns once it is on disk.

        Raises:
            OSError: if it cannot be written. The file must then be closed.
            Replaced: if what is at the file's path is no longer what was written to it.
        """
        line, checksum = _line(body, self._checksum)
        self._check()
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, f"{self._path}: no space for an entry of {len(line)} bytes")
            os.fsync(self._file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):  # an incomplete line that stays is dropped when the file is next opened
                self._file.truncate(self._length)
            raise
        self._checksum, self._length = checksum, self._length + len(line)
        self._check()

    def _check(self) -> None:
        """An editor, or a tool that synchronises folders, writes a new file in the place of the one that is locked."""
        own = os.fstat(self._file.fileno())
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            found = None
        if found is None or not os.path.samestat(own, found) or own.st_size != self._length:
            raise Replaced(
                errno.ESTALE,
                f"{self._path} was removed, replaced or cut off while the run had it open, so that it may lack steps "
                "that were released. Restore it from a copy, and keep other programs away from it",
            )

    def close(self) -> None:
        """Closes the file and releases its lock."""
        # Explicitly, since a process that was forked meanwhile has the file open, too; but not in that process.
        if self._owner == os.getpid() and not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


def _line(body: dict[str, Any], before: str) -> tuple[bytes, str]:
    """A line with its end, and its checksum; ``before`` is that of the line before it."""
    text = json.dumps(body, sort_keys=True)
    checksum = hashlib.sha256(f"{before}{text}".encode()).hexdigest()[:16]
    return f"{checksum} {text}\n".encode(), checksum


def read(path: Path) -> Content:
    """The content of a file, checked. A last line without its end is dropped: its step was never released.

    Raises:
        Damaged: for a line that was changed, dropped or moved, or another format.
    """
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    bodies, checksum = [], ""
    for number, row in enumerate(complete.splitlines(), 1):
        try:
            stored, text = row.decode().split(" ", 1)
            body = json.loads(text)
            expected, checksum = _line(body, checksum)
        except (ValueError, UnicodeDecodeError):
            body, stored, expected = None, "", b""
        if body is None or expected.rstrip(b"\n") != row or stored != checksum:
            raise Damaged(
                f"line {number} of {path} is damaged or was changed, so what was spent is not known. Restore the file "
                "from a copy; without one the run cannot be resumed within a known budget."
            )
        bodies.append(body)
    if not bodies:
        return Content()
    header, *rest = bodies
    if header.get("format") != FORMAT:
        raise Damaged(f"{path} has format {header.get('format')!r}; this version of dpopt reads {FORMAT}.")
    return Content(header, rest, checksum, len(complete))


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences between an identity and the stored one, one line each; empty if they agree."""
    now = json.loads(json.dumps(now))  # tuples become lists, as they did when stored
    lines = [f"  {name}: stored {_short(a)}, now {_short(b)}" for name, a, b in _differences(stored, now)]
    return "\n".join(lines)


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    found = []
    for name in sorted({*a, *b}):
        x, y = a.get(name), b.get(name)
        if isinstance(x, dict) and isinstance(y, dict):
            found += [(f"{name}.{inner}", p, q) for inner, p, q in _differences(x, y)]
        elif x != y:
            found.append((name, x, y))
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 400 else f"{text[:400]}..."


def sync_directory(path: Path) -> None:
    """Makes the name of a new file durable, not only its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
