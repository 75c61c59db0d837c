"""What a private search keeps on disk to be resumed: its cost, what was drawn for it, and the best trial so far."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pickle
import stat
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

from dpopt.common.lazy import dp_accounting
from dpopt.run import journal_file
from dpopt.run.journal import Entry, Journal, JournalError

_COST, _PROGRESS = "ledger.jsonl", "search.json"


@dataclasses.dataclass
class Progress:
    """Where a search stands. All of it is secret; of trials that are not the best nothing is kept.

    ``str`` and ``repr`` show nothing of it.
    """

    order: list[int] = dataclasses.field(repr=False)  # the setting of every trial, which says how many there are
    done: int = dataclasses.field(default=0, repr=False)
    best: int | None = dataclasses.field(default=None, repr=False)  # number of the trial
    score: float = dataclasses.field(default=-math.inf, repr=False)
    value: Any = dataclasses.field(default=None, repr=False)
    result: str | None = dataclasses.field(default=None, repr=False)  # checksum of the pickled value, on disk

    def add(self, value: Any, score: float) -> bool:
        """Counts one more trial, of whose result only the best is kept; of equals the first. Whether this was it."""
        is_best = self.best is None or score > self.score
        if is_best:
            self.best, self.score, self.value = self.done, score, value
        self.done += 1
        return is_best


class Memory:
    """Keeps a search in memory: nothing can be resumed."""

    def restored(self, fresh: Progress) -> Progress:
        return fresh

    def save(self, progress: Progress, is_new: bool) -> None:
        pass


class Directory:
    """Keeps a search in a directory, which one process at a time may use (`opened`).

    The cost is in a journal, whole and before the first trial. The rest is one small file, replaced at once after each
    trial, beside the pickled result of the best.
    """

    def __init__(self, path: Path, journal: Journal, event: dp_accounting.DpEvent):
        self._path, self._journal, self._event = path, journal, event

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, identity: dict[str, Any], event: dp_accounting.DpEvent) -> Generator[Directory]:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        _warn_if_open(path)
        _refuse_another(path, identity)
        journal = Journal()
        journal.attach(path / _COST, identity)
        try:
            if journal.entries and not (path / _PROGRESS).exists():
                raise JournalError(
                    f"{path} holds the cost of a search, and {_PROGRESS} is not there any more, which says what was "
                    "drawn for it. Put it back, or start another search, at its own cost, in another directory."
                )
            yield cls(path, journal, event)
        finally:
            journal.close()

    def restored(self, fresh: Progress) -> Progress:
        if (self._path / _PROGRESS).exists():
            progress = self._stored()
        else:
            progress = fresh
            self._replace(self._path / _PROGRESS, self._text(fresh))
        if not self._journal.entries:
            self._journal.append(Entry(self._event, "", 1, "selection"))
        kept = None if progress.best is None else self._result(progress.best)
        for pattern in ("best-*.pickle", "best-*.unfinished", "search.unfinished"):  # of calls that were killed
            for path in self._path.glob(pattern):
                if path != kept:
                    path.unlink()
        return progress

    def save(self, progress: Progress, is_new: bool) -> None:
        """Keeps what a finished trial has changed: first its result, then that it is the best, then no other."""
        before = json.loads((self._path / _PROGRESS).read_text())["best"]
        if is_new and progress.best is not None:
            result = pickle.dumps(progress.value)
            progress.result = _checksum(result)
            self._replace(self._result(progress.best), result)
        self._replace(self._path / _PROGRESS, self._text(progress))
        if is_new and before is not None:
            self._result(before).unlink()

    def _result(self, trial: int) -> Path:
        return self._path / f"best-{trial}.pickle"

    def _stored(self) -> Progress:
        """What was kept, if it is as it was written: more trials, or another best one, would not be paid for."""
        try:
            kept = json.loads((self._path / _PROGRESS).read_text())
            checksum = kept.pop("checksum")
            progress = Progress(**kept)
            if _checksum(json.dumps(kept).encode()) != checksum:
                raise ValueError("its checksum is another")
            if progress.best is not None:
                result = self._result(progress.best).read_bytes()
                if _checksum(result) != progress.result:
                    raise ValueError(f"the result of trial {progress.best} is not the one that it names")
                progress.value = pickle.loads(result)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise JournalError(
                f"{self._path / _PROGRESS} is damaged or was changed ({error}), so that the search cannot go on as it "
                "was paid for. Restore the directory from a copy, or start another search elsewhere, at its own cost."
            ) from error
        return progress

    def _text(self, progress: Progress) -> bytes:
        kept = {f.name: getattr(progress, f.name) for f in dataclasses.fields(progress) if f.name != "value"}
        return json.dumps({**kept, "checksum": _checksum(json.dumps(kept).encode())}).encode()

    def _replace(self, path: Path, content: bytes) -> None:
        """Whole or not at all, and durable."""
        unfinished = path.with_suffix(".unfinished")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        journal_file.sync_directory(self._path)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _warn_if_open(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        warnings.warn(
            f"other users may enter {path} (mode {mode:o}), and a search's directory is secret: names and dates of its "
            f"files tell of trials that are not released, and anyone who can write there can execute code. chmod 700 "
            f"{path}",
            stacklevel=2,
        )


def _refuse_another(path: Path, identity: dict[str, Any]) -> None:
    """Phrases the error for a search; the journal's own speaks of runs and plans."""
    with contextlib.suppress(FileNotFoundError, journal_file.Damaged):  # `Journal.attach` reports damage
        header = journal_file.read(path / _COST).header
        lines = "" if header is None else journal_file.differences(header["identity"], identity)
        if lines:
            raise ValueError(
                f"{path} holds another search, or a run:\n{lines}\nA directory is for one search on one data set: to "
                "go on with that, pass what is stored; to begin this one, at a cost of its own, pass another directory."
            )
