"""Checkpoints: parameters, optimizer state, position and ledger, saved together by orbax, beside the run's journal.

Needs ``pip install 'dpopt[checkpoint]'``; nothing else in dpopt imports this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax

from dpopt.common import validate
from dpopt.common.names import first_line
from dpopt.ledger import Ledger
from dpopt.run import _orbax, entropy, identity
from dpopt.run.journal import Journal, check_identity
from dpopt.run.state import Segment, TrainState

_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used: damaged, of another run, or ahead of its journal.

    *Privacy*: raised instead of resuming with a ledger that counts too little.
    """


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was loaded and checked.

    *Privacy*: see `TrainState`.

    >>> Restored(TrainState(None, None, update=3), position=4).state.update
    3
    """

    state: TrainState
    position: int  # the number of entries in the journal when it was saved


class Checkpointer:
    """Saves and loads the state of a run in a directory of its own, and keeps the run's journal there.

    ``directory/ledger.jsonl`` is the journal (`dpopt.run.journal.Journal`); ``directory/checkpoints`` belongs to orbax,
    which writes a checkpoint aside and renames it when it is complete. Only their owner can read directory and journal.

    Args:
        directory: created if it does not exist. Use one per run. In a run of several processes all must see it.
        keep: how many checkpoints to keep; older ones are deleted.
        every: steps between two checkpoints of `dpopt.run.loop.train`, which also saves its last step.
        asynchronous: write in the background, while the next steps run.

    The constructor and `positions` change nothing on disk, also while another process writes there. Files are created,
    and incomplete files of a killed run are removed, once the journal is open, in one process at a time.

    Raises:
        ValueError, TypeError: if a number is below 1.

    *Privacy*: a checkpoint holds the noise key and the sampler's seed, and is as private as the training data. When it
    is loaded, its ledger is compared with the journal, which determines what was spent.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory, Checkpointer(directory, keep=2) as checkpointer:
    ...     checkpointer.positions()
    []
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, keep: int = 3, every: int = 100, asynchronous: bool = True
    ):
        validate.positive_int(keep=keep, every=every)
        self.directory = Path(directory).absolute()
        self.every, self.keep = int(every), int(keep)
        self._folder = _orbax.Folder(self.directory / "checkpoints", keep=keep, asynchronous=asynchronous)

    @property
    def journal_path(self) -> Path:
        """The path of the journal."""
        return self.directory / "ledger.jsonl"

    def make_directory(self) -> None:
        """Creates the directory, readable by its owner only, if it does not exist."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def positions(self) -> list[int]:
        """The positions (journal lengths) of the existing checkpoints. Changes nothing."""
        return self._folder.positions()

    def save(self, state: TrainState, journal: Journal, run: Mapping[str, Any]) -> None:
        """Saves a state at the journal's present end, in the background if asynchronous.

        Args:
            state: arrays, and typed or legacy PRNG keys.
            journal: the run's, whose last entry must be the step that made this state.
            run: `dpopt.run.identity.run_identity` of the run.

        Raises:
            CheckpointError: if this save, or an earlier one in the background, could not be written (the journal and
                earlier checkpoints are unaffected), or if the journal is not open.
        """
        self._open(journal)
        position = len(journal)
        _check_placed(state)
        if state.segment is None:
            raise CheckpointError("this state belongs to no segment of a run: save what dpopt.train returns.")
        if position in self._folder:
            return
        description = {
            "identity": dict(run),
            "position": position,
            "update": state.update,
            "segment": dataclasses.asdict(state.segment),
            "digest": identity.state_digest(state),
            "ledger": journal.ledger.to_json(),
        }
        # Copies, since the next step may reuse these buffers while they are still being written.
        leaves = _orbax.leaves_of({"params": state.params, "opt_state": state.opt_state})
        with self._writing():
            self._folder.save(position, leaves, description)

    def wait(self) -> None:
        """Returns when all saves are on disk, or raises a `CheckpointError` if one could not be written."""
        with self._writing():
            self._folder.wait()

    def settle(self) -> None:
        """Returns when nothing is being written any more, whether it succeeded or not."""
        with contextlib.suppress(CheckpointError):
            self.wait()

    def restore(self, like: TrainState, journal: Journal, run: Mapping[str, Any]) -> Restored | None:
        """The newest intact checkpoint, or None if there are no checkpoints.

        A damaged one is moved to ``directory/damaged-<position>``, and the one before it is tried: the journal records
        what was spent in between.

        Args:
            like: a state with the shapes, dtypes, keys and shardings to restore to (values are not read).
            journal, run: the run's, as for `save`; the journal is attached to its file.

        Raises:
            CheckpointError: if every checkpoint is damaged, or the journal lacks steps that a checkpoint counts.
            JournalError: if a checkpoint belongs to another run, with the differences.
        """
        self._open(journal)
        positions = self.positions()
        damage = []
        for position in reversed(positions):
            loaded, reason = None, "another process cannot read it"
            try:
                loaded = self._read(position, like)
            except Exception as error:  # orbax, tensorstore and the file system raise many types
                reason = first_line(error)[:200]
            if entropy.in_any_process(loaded is None) or loaded is None:
                damage.append(f"{position}: {reason}")
                continue
            state, described, digest = loaded
            found = identity.state_digest(state)
            if found != digest:
                damage.append(f"{position}: its content has digest {found}, and {digest} was saved")
                continue
            check_identity(described["identity"], run, f"checkpoint {position} of {self.directory}")
            self._check_journal(described, journal)
            for line in damage:
                _log.warning("dpopt: damaged checkpoint set aside: %s", line)
            self._folder.set_aside([p for p in positions if p > position])
            return Restored(state, position)
        if damage:
            raise CheckpointError(
                f"no checkpoint of {self.directory} can be read ({'; '.join(damage)}). The journal holds "
                f"{journal.ledger.steps} steps that are spent. To start over within the remaining budget, move the "
                "folder 'checkpoints' away and keep ledger.jsonl."
            )
        return None

    def _read(self, position: int, like: TrainState) -> tuple[TrainState, dict[str, Any], str]:
        """A checkpoint's state and description, and the digest that the state had."""
        tree, described = self._folder.load(position, {"params": like.params, "opt_state": like.opt_state})
        state = TrainState(tree["params"], tree["opt_state"], described["update"], Segment(**described["segment"]))
        return state, described, described["digest"]

    def _open(self, journal: Journal) -> None:
        """Opens the folder of checkpoints, under the lock of the journal."""
        if not journal.is_open or journal.path != self.journal_path:
            raise CheckpointError(
                f"the journal of {self.directory} is not open here, so another process may be writing: attach it first."
            )
        self._folder.open()

    def _check_journal(self, described: Mapping[str, Any], journal: Journal) -> None:
        """The journal must begin with the entries that it had when the checkpoint was saved."""
        position = described["position"]
        entries = journal.entries
        saved = Ledger.from_json(described["ledger"])
        if len(entries) < position:
            raise CheckpointError(
                f"checkpoint {position} of {self.directory} was saved when the journal had {position} entries "
                f"({saved.steps} steps); it now has {len(entries)}. What was spent since then is not known: restore "
                "ledger.jsonl."
            )
        before = Ledger()
        for entry in entries[:position]:
            if entry.event is not None:
                before.record(entry.event)
        if before != saved or entries[position - 1].digest != described["digest"]:
            raise CheckpointError(
                f"checkpoint {position} of {self.directory} and ledger.jsonl disagree on the first {position} entries: "
                f"the checkpoint has {saved.steps} steps, state {described['digest']}; the journal {before.steps} "
                f"steps, state {entries[position - 1].digest}. They are of different runs."
            )

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"a checkpoint in {self.directory} could not be written: {first_line(error)[:300]}. The ledger and "
                "earlier checkpoints are unaffected: start the run again when there is room, and the cause is removed."
            ) from error

    def close(self) -> None:
        """Waits for pending writes, and closes the checkpoints."""
        with self._writing():
            self._folder.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        del rest
        try:
            self.close()
        except CheckpointError:
            if kind is None:  # an earlier error must not be hidden
                raise


def _check_placed(state: TrainState) -> None:
    """Refuses arrays that each of several processes has for itself, which orbax cannot save."""
    if jax.process_count() == 1:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        if getattr(leaf, "is_fully_addressable", True):
            raise CheckpointError(
                f"the state{jax.tree_util.keystr(path)} is an array of this process alone, and several processes save "
                "one checkpoint: place the state on a mesh of all their devices, by dpopt.sharding.place_state or "
                "dpopt.run.meshes.train_on."
            )
