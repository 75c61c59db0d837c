"""The journal: a privacy ledger on disk, one line a step, written before the step's result is released.

A run that is killed may have released more steps than its latest checkpoint shows. The journal is what was released,
and the budget is charged from it. Each step's line also holds a digest of the state after the step, so that a resumed
run can prove that a step it computes again is, bit for bit, the one that was paid for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpopt import events
from dpopt.common.lazy import dp_accounting
from dpopt.ledger import Ledger
from dpopt.run import journal_file


class JournalError(RuntimeError):
    """A journal that is damaged, in use, or belongs to another run.

    *Privacy*: raised instead of counting too little.

    >>> issubclass(JournalError, RuntimeError)
    True
    """


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a journal after the first: a step, or the start of a segment.

    A segment is a stretch of steps in one software and hardware environment under one noise key. Its first entry costs
    nothing and has no event.

    *Privacy*: the digest is of released values; nothing here is made of the noise key or the sampler's seed.

    >>> Entry(event=None, digest="0", update=0, segment="a", environment={"jax": "1"}).is_step
    False
    """

    event: dp_accounting.DpEvent | None  # what the step cost; None where a segment starts
    digest: str  # of the state after the step
    update: int  # steps in the history of that state
    segment: str  # the name of its segment
    environment: Mapping[str, Any] | None = None  # where a segment starts: what it runs on
    program: Mapping[str, str] | None = None  # where a segment starts: loss and hyperparameters, as far as can be seen
    is_exact: bool = False  # where a segment starts: whether its noise and batches follow from the plan's key and seed

    @property
    def is_step(self) -> bool:
        return self.event is not None

    def to_json(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["event"] = None if self.event is None else events.to_json(self.event)
        return {name: value for name, value in fields.items() if value is not None and value is not False}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Entry:
        return cls(**{**data, "event": events.from_json(data["event"]) if "event" in data else None})


class Journal:
    """An append-only list of entries, in memory until `attach` gives it a file.

    The first line of the file says which run it belongs to. Every line carries a checksum over itself and all lines
    before it, so a line that was changed, dropped or moved is found. A last line without its end is an append that was
    cut off: its step was never released, and it is dropped.

    *Privacy*: `append` returns once the entry is on disk. What it says was spent is never less than what was released,
    provided that every step is appended before its result leaves the process, which `dpopt.run.loop.train` does.

    >>> journal = Journal()
    >>> journal.append(Entry(events.poisson_event(noise_multiplier=1.0, sampling_prob=0.1, steps=1), "d", 1, "a"))
    >>> journal.ledger.steps, len(journal)
    (1, 1)
    """

    def __init__(self):
        self.run = secrets.token_hex(8)  # the name of the run, which its file keeps
        self._entries: list[Entry] = []
        self._ledger = Ledger()
        self._path: Path | None = None
        self._file: Any = None
        self._sum = ""
        self._is_closed = False

    @property
    def path(self) -> Path | None:
        """The file, or None for a journal in memory."""
        return self._path

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries."""
        return tuple(self._entries)

    @property
    def ledger(self) -> Ledger:
        """Everything spent so far: a copy, so that nothing done to it changes the journal."""
        return self._ledger.copy()

    @property
    def is_open(self) -> bool:
        """Whether its file is open, to be written (or read, as all processes but the first of a run do)."""
        return self._path is not None and not self._is_closed

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, entry: Entry) -> None:
        """Adds an entry, and returns when it is on disk.

        Raises:
            OSError: if it cannot be written (disk full). The entry then does not count, its step must not be released,
                and the journal takes no more entries until it is opened again.
        """
        if self._is_closed:
            raise JournalError(f"the journal {self._path} is not open: pass the run's checkpointer to continue.")
        if self._file is not None:
            self._write(entry.to_json())
        self._keep(entry)

    def attach(self, path: Path, identity: Mapping[str, Any], *, is_writer: bool = True) -> None:
        """Keeps this journal in a file from now on: a new one, or one that holds the earlier part of the same run.

        Args:
            path: the file; its directory must exist.
            identity: what must be the same each time the run is resumed; see `dpopt.run.identity.run_identity`.
            is_writer: False to read what is there and write nothing, as all processes but the first of a run do.

        Raises:
            JournalError: if the file is damaged, is open in another process, or belongs to another run (the differences
                are listed), or if this journal already holds steps that the file does not.
        """
        path = Path(path).absolute()
        if self._path == path and not self._is_closed:
            return
        if self._path != path and (self._path is not None or self._entries):
            where = self._path or "in memory only"
            raise JournalError(
                f"this plan has taken {self._ledger.steps} steps, recorded {where}, and cannot continue in {path}: "
                "their cost would be lost. Build a new plan with a new key, or give the checkpointer to the first run."
            )
        if is_writer:
            # Unbuffered: a line is handed to the system whole, and what was not written is known.
            file = open(path, "ab+", buffering=0)
            os.chmod(path, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.close()
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise JournalError(f"{path} is in use by another process: one run has one writer.") from error
        else:
            file = None
        try:
            content = _content(path) if path.exists() else journal_file.Content()
            run = ""
            if content.header is not None:
                check_identity(content.header["identity"], identity, str(path))
                run = content.header["run"]
            entries = [Entry.from_json(body) for body in content.entries]
            if entries[: len(self)] != self._entries or (self._entries and run != self.run):
                raise JournalError(f"{path} lacks steps that this plan has taken and written there before.")
            if file is not None:
                file.truncate(content.length)
        except BaseException:
            if file is not None:
                file.close()
            raise
        for entry in entries[len(self) :]:  # all, or what another process added since
            self._keep(entry)
        self._path, self._file, self._sum, self._is_closed = path, file, content.checksum, False
        self.run = run or self.run
        if file is not None and content.length == 0:
            self._write({"format": journal_file.FORMAT, "run": self.run, "identity": dict(identity)})
            journal_file.sync_directory(path.parent)

    def close(self) -> None:
        """Lets go of the file and its lock. The journal stays readable; to take entries it must be attached again."""
        if self._path is not None:
            self._is_closed = True
        if self._file is not None:
            self._file.close()
            self._file = None

    def _keep(self, entry: Entry) -> None:
        if entry.event is not None:
            self._ledger.record(entry.event)
        self._entries.append(entry)

    def _write(self, body: dict[str, Any]) -> None:
        line, checksum = journal_file.line(body, self._sum)
        start = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, f"{self._path}: no space for an entry of {len(line)} bytes")
            os.fsync(self._file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):  # a half line that stays is recognised and dropped when next opened
                self._file.truncate(start)
            self.close()
            raise
        self._sum = checksum


def read(path: Path) -> tuple[dict[str, Any], Ledger]:
    """What a journal's file says: which run it is of, and what was spent.

    Changes nothing, and is safe while the run is in progress.

    Args:
        path: the file, ``ledger.jsonl`` in a checkpointer's directory.

    Raises:
        JournalError: if the file is damaged, or is no journal; OSError: if there is none.

    *Privacy*: the file holds nothing private.

    >>> read(Path("nowhere/ledger.jsonl"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: [Errno 2] No such file or directory: 'nowhere/ledger.jsonl'
    """
    content = _content(path)
    if content.header is None:
        raise JournalError(f"{path} is empty: its run has not started.")
    journal = Journal()
    for body in content.entries:
        journal._keep(Entry.from_json(body))
    return content.header["identity"], journal.ledger


def _content(path: Path) -> journal_file.Content:
    try:
        return journal_file.read(path)
    except journal_file.Damaged as error:
        raise JournalError(str(error)) from None


def check_identity(stored: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Compares what a file says about its run with the run at hand.

    Args:
        stored: what the file says.
        now: the run at hand.
        where: the name of the file.

    Raises:
        JournalError: if they differ, with every difference.

    *Privacy*: a ledger continued under another mechanism would count the wrong cost.

    >>> check_identity({"num_examples": 10}, {"num_examples": 12}, "ledger.jsonl")
    Traceback (most recent call last):
    ...
    dpopt.run.journal.JournalError: ledger.jsonl belongs to another run:
      num_examples: stored 10, now 12
    Resume with the plan it was made by, or start in another directory.
    """
    lines = journal_file.differences(stored, now)
    if lines:
        raise JournalError(
            f"{where} belongs to another run:\n{lines}\nResume with the plan it was made by, or start in another "
            "directory."
        )
