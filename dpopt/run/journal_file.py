"""A journal's file: a line of JSON for every entry, each with a checksum over itself and all lines before it."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 2


class Damaged(ValueError):
    """A file that is no journal, or not as it was written."""


class Content(NamedTuple):
    """What a file holds."""

    header: dict[str, Any] | None = None  # format, run and identity; None for an empty file
    entries: list[dict[str, Any]] = []  # noqa: RUF012  never changed
    checksum: str = ""  # the last one
    length: int = 0  # of what is whole, in bytes


def line(body: dict[str, Any], before: str) -> tuple[bytes, str]:
    text = json.dumps(body, sort_keys=True)
    checksum = hashlib.sha256(f"{before}{text}".encode()).hexdigest()[:16]
    return f"{checksum} {text}\n".encode(), checksum


def read(path: Path) -> Content:
    """What a file holds, all of it checked; a last line without its end is of a step never released, and is dropped.

    Raises:
        Damaged: for a line that was changed, dropped or moved, or another format.
    """
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    bodies, checksum = [], ""
    for number, row in enumerate(whole.splitlines(), 1):
        try:
            stored, text = row.decode().split(" ", 1)
            body = json.loads(text)
            expected, checksum = line(body, checksum)
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
    return Content(header, rest, checksum, len(whole))


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Where an identity is not the stored one, a line for each place; empty if they agree."""
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
    """Makes a new file's name durable, not only its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
