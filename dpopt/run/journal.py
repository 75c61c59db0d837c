"""The journal: a privacy ledger on disk, with one line per step, written before the step's result is released.

A run that is killed may have released more steps than its newest checkpoint shows. The journal records what was
released, and the budget is charged from it. The line of a step also holds a digest of the state after the step, so that
a resumed run can prove that a step it recomputes is, bit for bit, the one that was paid for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from dpopt import events
from dpopt.common.lazy import dp_accounting
from dpopt.ledger import Ledger
from dpopt.run import journal_file


class JournalError(RuntimeError):
    """A journal that is damaged, in use, or belongs to another run.

    *Privacy*: raised instead of counting too little.
    """


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a journal after the first: a step, or the start of a segment.

    A segment is a stretch of steps in one software and hardware environment under one noise key. Its first entry costs
    nothing and has no event.

    *Privacy*: the digest is of released values; nothing here derives from the noise key or the sampler's seed.

    >>> Entry(event=None, digest="0", update=0, segment="a", environment={"jax": "1"}).is_step
    False
    """

    event: dp_accounting.DpEvent | None  # the cost of the step; None where a segment starts
    digest: str  # of the state after the step
    update: int  # steps in the history of that state
    segment: str  # the name of its segment
    environment: Mapping[str, Any] | None = None  # where a segment starts: versions, devices and flags
    program: Mapping[str, str] | None = None  # where a segment starts: loss and hyperparameters, as far as can be seen
    is_exact: bool = False  # where a segment starts: whether all draws derive from the plan's key and seed alone

    @property
    def is_step(self) -> bool:
        return self.event is not None

    def to_json(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["event"] = None if self.event is None else events.to_json(self.event)
        return {name: value for name, value in fields.items() if value is not None and value is not False}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Entry:
        return cls(**dict(data, event=events.from_json(data["event"]) if "event" in data else None))


class Journal:
    """An append-only list of entries, in memory until `attach` gives it a file.

    The first line of the file identifies the run. Every line carries a checksum over itself and all lines before it, so
    that a line that was changed, dropped or moved is detected. A last line without its end is an append that was cut
    off: its step was never released, and it is dropped.

    *Privacy*: `append` returns once the entry is on disk. The journal never counts less than was released, provided
    that every step is appended before its result leaves the process, as in `dpopt.run.loop.train`.

    >>> journal = Journal()
    >>> journal.append(Entry(events.poisson_event(noise_multiplier=1.0, sampling_prob=0.1, steps=1), "d", 1, "a"))
    >>> journal.ledger.steps, len(journal)
    (1, 1)
    """

    def __init__(self):
        self.run = secrets.token_hex(8)  # the name of the run, which is stored in the file
        self._entries: list[Entry] = []
        self._counted = 0, Ledger()  # how many entries are in this ledger: the others are added when it is read
        self._path: Path | None = None
        self._file: journal_file.JournalFile | None = None
        self._is_closed = False
        self._training = threading.Lock()

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
        """Everything spent so far: a copy, so that changing it does not change the journal."""
        return self._spent().copy()

    def _spent(self) -> Ledger:
        """The ledger of all entries. Derived from them, so that no interrupt leaves the two apart."""
        counted, ledger = self._counted
        new = [entry.event for entry in self._entries[counted:] if entry.event is not None]
        if new:
            ledger = ledger.copy()
            for event in new:
                ledger.record(event)
            self._counted = len(self._entries), ledger
        return ledger

    @property
    def is_open(self) -> bool:
        """Whether its file is open for writing (or reading, in all processes but the first of a run)."""
        return self._path is not None and not self._is_closed

    def __len__(self) -> int:
        return len(self._entries)

    @contextlib.contextmanager
    def one_call(self) -> Generator[None]:
        """The time in which one call of `dpopt.run.loop.train` adds entries: what is left of a budget is computed once.

        Raises:
            JournalError: if there is another one.
        """
        if not self._training.acquire(blocking=False):
            raise JournalError(
                "this plan is being trained by another call (from on_step, or in a thread), and each would spend what "
                "is left of the budget. Let it return first, or build a plan for each, with the cost of the others in "
                "budget(..., earlier=...)."
            )
        try:
            yield
        finally:
            self._training.release()

    def append(self, entry: Entry) -> None:
        """Adds an entry, and returns once it is on disk.

        Raises:
            OSError: if it cannot be written (disk full). The entry then does not count, its step must not be released,
                and the journal takes no more entries until it is opened again.
        """
        if self._is_closed:
            raise JournalError(f"the journal {self._path} is not open: pass the run's checkpointer to continue.")
        if self._file is not None:
            self._write(self._file, entry.to_json())
        self._entries.append(entry)

    def attach(self, path: Path, identity: Mapping[str, Any], *, is_writer: bool = True) -> None:
        """Keeps this journal in a file from now on: a new one, or one that holds the earlier part of the same run.

        Args:
            path: the file; its directory must exist.
            identity: what must be the same each time the run is resumed; see `dpopt.run.identity.run_identity`.
            is_writer: False to read the file and write nothing, as in all processes but the first of a run.

        Raises:
            JournalError: if the file is damaged, is open in another process, or belongs to another run (the differences
                are listed), or if this journal already holds steps that the file does not.
        """
        path = Path(path).absolute()
        if self._path == path and not self._is_closed:
            return
        spent = self._spent().steps
        if self._path != path and (self._path is not None or spent):
            where = self._path or "in memory only"
            raise JournalError(
                f"this plan has taken {spent} steps, recorded {where}, and cannot continue in {path}: their cost would "
                "be lost. Build a new plan with a new key, or give the checkpointer to the first run."
            )
        held = self._entries if self._path == path else []  # a call that failed before its first step took none
        file = _opened(path) if is_writer else None
        try:
            content = _content(path) if path.exists() else journal_file.Content()
            run, entries = self._continued_by(content, held, identity, path)
            if file is not None:
                file.follow(content)
        except BaseException:
            if file is not None:
                file.close()
            raise
        # At once: an interrupt must not leave a journal that has read some of its file.
        self.__dict__.update(
            run=run, _entries=entries, _counted=(0, Ledger()), _path=path, _file=file, _is_closed=False
        )
        if file is not None and content.length == 0:
            self._write(file, {"format": journal_file.FORMAT, "run": run, "identity": dict(identity)})
            journal_file.sync_directory(path.parent)

    def close(self) -> None:
        """Closes the file and releases its lock. The journal stays readable; to take entries, attach it again."""
        if self._path is not None:
            self._is_closed = True
        if self._file is not None:
            self._file.close()
            self._file = None

    def _continued_by(
        self, content: journal_file.Content, held: list[Entry], identity: Mapping[str, Any], path: Path
    ) -> tuple[str, list[Entry]]:
        """The name of the run, and the entries of its file, which must begin with those held here."""
        run = ""
        if content.header is not None:
            check_identity(content.header["identity"], identity, str(path))
            run = content.header["run"]
        entries = [Entry.from_json(body) for body in content.entries]
        if entries[: len(held)] != held or (held and run != self.run):
            raise JournalError(f"{path} lacks steps that this plan has taken and written there before.")
        return run or self.run, entries

    def _write(self, file: journal_file.JournalFile, body: dict[str, Any]) -> None:
        try:
            file.append(body)
        except BaseException:
            self.close()
            raise


def read(path: Path) -> tuple[dict[str, Any], Ledger]:
    """The identity of the run of a journal's file (a checkpointer's ``ledger.jsonl``), and what the run has spent.

    Changes nothing, and is safe while the run is in progress.

    Raises:
        JournalError: if the file is damaged, or not a journal; OSError: if it does not exist.

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
        journal.append(Entry.from_json(body))
    return content.header["identity"], journal.ledger


def _opened(path: Path) -> journal_file.JournalFile:
    try:
        return journal_file.JournalFile(path)
    except journal_file.InUse as error:
        raise JournalError(str(error)) from error


def _content(path: Path) -> journal_file.Content:
    try:
        return journal_file.read(path)
    except journal_file.Damaged as error:
        raise JournalError(str(error)) from None


def check_identity(stored: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Compares the identity stored in a file, whose name is ``where``, with that of the current run.

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
