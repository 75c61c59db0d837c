"""Checkpoints: parameters, optimizer state, position and ledger, saved as one by orbax, beside the run's journal.

Needs ``pip install 'dpopt[checkpoint]'``; nothing else in dpopt imports this module.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dpopt.common import validate
from dpopt.ledger import Ledger
from dpopt.run import identity
from dpopt.run.identity import Segment, TrainState
from dpopt.run.journal import Journal, JournalError, check_identity

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError("dpopt.run.checkpoint needs orbax: pip install 'dpopt[checkpoint]'.") from error

_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used: damaged, of another run, or ahead of its journal.

    *Privacy*: raised instead of resuming with a ledger that counts too little.

    >>> issubclass(CheckpointError, RuntimeError)
    True
    """


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was loaded and checked.

    *Privacy*: see `TrainState`.

    >>> Restored(TrainState(None, None, update=3), position=4).state.update
    3
    """

    state: TrainState
    position: int  # entries that the journal held when it was saved


class Checkpointer:
    """Saves and loads the state of a run in a directory of its own, and keeps the run's journal there.

    ``directory/ledger.jsonl`` is the journal (`dpopt.run.journal.Journal`); ``directory/checkpoints`` belongs to orbax,
    which writes a checkpoint aside and renames it when whole. Directory and journal can be read by their owner only.

    Args:
        directory: made if it does not exist. Give each run its own. In a run of several processes all must see it.
        keep: how many checkpoints to keep; older ones are deleted.
        every: steps between two checkpoints of `dpopt.run.loop.train`, which also saves its last step.
        asynchronous: write in the background, while the next steps run.

    Making one, and asking for `positions`, changes nothing on disk, also while another process writes there. Files are
    made, and what a killed run left half written is removed, once the journal is open, which one process at a time can.

    Raises:
        ValueError, TypeError: if a number is below 1.

    *Privacy*: a checkpoint holds the noise key and the sampler's seed, and is as private as the training data. The
    ledger in it is checked against the journal when it is loaded, and the journal is what counts.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory, Checkpointer(directory, keep=2) as checkpointer:
    ...     checkpointer.positions()
    []
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int = 3, every: int = 100, asynchronous: bool = True):
        validate.positive_int(keep=keep, every=every)
        self.directory = Path(directory).absolute()
        self.every = every
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=asynchronous, cleanup_tmp_directories=True
        )
        self._opened: ocp.CheckpointManager | None = None

    @property
    def journal_path(self) -> Path:
        """Where the journal lies."""
        return self.directory / "ledger.jsonl"

    def make_directory(self) -> None:
        """Makes the directory, for its owner only, if it does not exist."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def positions(self) -> list[int]:
        """The positions (journal lengths) of the checkpoints there are. Changes nothing."""
        names = [path.name for path in (self.directory / "checkpoints").glob("*")]
        return sorted(int(name) for name in names if name.isdecimal())  # longer while orbax writes it

    def _manager(self, journal: Journal) -> ocp.CheckpointManager:
        """Orbax, which cleans up as it opens the folder: only under the journal's lock."""
        if not journal.is_open or journal.path != self.journal_path:
            raise CheckpointError(
                f"the journal of {self.directory} is not open here, so another process may be writing: attach it first."
            )
        if self._opened is None:
            self._opened = ocp.CheckpointManager(
                self.directory / "checkpoints", options=self._options, item_names=("state", "run")
            )
        return self._opened

    def save(self, state: TrainState, journal: Journal, run: Mapping[str, Any]) -> None:
        """Saves a state at the journal's present end, in the background if asynchronous.

        Args:
            state: arrays, and typed or legacy PRNG keys.
            journal: the run's journal; its last entry must be the step that made this state.
            run: `dpopt.run.identity.run_identity` of the run.

        Raises:
            CheckpointError: if this save, or an earlier one in the background, could not be written (the journal and
                earlier checkpoints stand), or if the journal is not open.
        """
        position, manager = len(journal), self._manager(journal)
        if state.segment is None:
            raise CheckpointError("this state belongs to no segment of a run: save what dpopt.train returns.")
        if position in manager.all_steps():
            return
        described = {
            "identity": dict(run),
            "position": position,
            "update": state.update,
            "segment": dataclasses.asdict(state.segment),
            "digest": identity.state_digest(state),
            "ledger": journal.ledger.to_json(),
        }
        # A copy, since the next step may reuse these buffers while they are still being written.
        tree = jax.tree.map(lambda x: jnp.copy(_raw(x)), {"params": state.params, "opt_state": state.opt_state})
        leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(tree))}
        try:
            args = ocp.args.Composite(state=ocp.args.StandardSave(leaves), run=ocp.args.JsonSave(described))
            manager.save(position, args=args, force=True)
        except Exception as error:
            raise _not_written(self.directory, error) from error

    def wait(self) -> None:
        """Returns when all saves are on disk.

        Raises:
            CheckpointError: if one could not be written.
        """
        if self._opened is None:
            return
        try:
            self._opened.wait_until_finished()
            self._opened.check_for_errors()
        except Exception as error:
            raise _not_written(self.directory, error) from error

    def settle(self) -> None:
        """Returns when nothing is being written any more, whether it succeeded or not."""
        with contextlib.suppress(CheckpointError):
            self.wait()

    def restore(self, like: TrainState, journal: Journal, run: Mapping[str, Any]) -> Restored | None:
        """The newest checkpoint that is whole, or None if there is none at all.

        A damaged one is moved to ``directory/damaged-<position>`` and the one before is tried: the journal knows what
        was spent in between.

        Args:
            like: a state with the shapes, dtypes, keys and shardings to restore to (values are not read).
            journal: the run's journal, attached to its file.
            run: `dpopt.run.identity.run_identity` of the run.

        Raises:
            CheckpointError: if every checkpoint is damaged, or the journal lacks what a checkpoint says was spent.
            JournalError: if a checkpoint belongs to another run, with the differences.
        """
        manager = self._manager(journal)
        positions = self.positions()
        damage = []
        for position in reversed(positions):
            try:
                described, state = self._load(manager, position, like)
            except JournalError:
                raise
            except Exception as error:  # orbax, tensorstore and the file system raise of many kinds
                damage.append(f"{position}: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}")
                continue
            check_identity(described["identity"], run, f"checkpoint {position} of {self.directory}")
            self._check_journal(described, journal)
            for line in damage:
                _log.warning("dpopt: damaged checkpoint set aside: %s", line)
            self._set_aside(manager, [p for p in positions if p > position])
            return Restored(state, position)
        if damage:
            raise CheckpointError(
                f"no checkpoint of {self.directory} can be read ({'; '.join(damage)}). The journal holds "
                f"{journal.ledger.steps} steps that are spent. To start over within the budget that is left, move the "
                "folder 'checkpoints' away and keep ledger.jsonl."
            )
        return None

    def _load(self, manager: Any, position: int, like: TrainState) -> tuple[dict[str, Any], TrainState]:
        tree = {"params": like.params, "opt_state": like.opt_state}
        leaves, structure = jax.tree.flatten(tree)
        target = {str(i): _shape_of(_raw(leaf)) for i, leaf in enumerate(leaves)}
        run = manager.restore(position, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        loaded = manager.restore(position, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
        values = [_keyed(loaded["state"][str(i)], leaf) for i, leaf in enumerate(leaves)]
        tree = jax.tree.unflatten(structure, values)
        state = TrainState(tree["params"], tree["opt_state"], run["update"], Segment(**run["segment"]))
        found = identity.state_digest(state)
        if found != run["digest"]:
            raise CheckpointError(f"its content has digest {found}, and {run['digest']} was saved")
        return run, state

    def _check_journal(self, described: Mapping[str, Any], journal: Journal) -> None:
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
                f"the checkpoint says {saved.steps} steps, state {described['digest']}; the journal {before.steps} "
                f"steps, state {entries[position - 1].digest}. They are of different runs."
            )

    def _set_aside(self, manager: Any, positions: list[int]) -> None:
        if jax.process_index() == 0:
            for position in positions:
                target = self.directory / f"damaged-{position}"
                number = 1
                while target.exists():
                    number += 1
                    target = self.directory / f"damaged-{position}-{number}"
                (self.directory / "checkpoints" / str(position)).rename(target)
        if positions:
            manager.reload()

    def close(self) -> None:
        """Waits for pending writes, and releases the directory."""
        manager, self._opened = self._opened, None
        if manager is None:
            return
        try:
            manager.close()
        except Exception as error:
            raise _not_written(self.directory, error) from error

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        del rest
        try:
            self.close()
        except CheckpointError:
            if kind is None:  # what failed first is what must be seen
                raise


def _not_written(directory: Path, error: Exception) -> CheckpointError:
    reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return CheckpointError(
        f"a checkpoint in {directory} could not be written: {reason}. The ledger stands and earlier checkpoints are "
        "whole: make room and start the run again."
    )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _raw(x: Any) -> Any:
    """A typed key as its bits, which every version of orbax can store."""
    return jax.random.key_data(x) if _is_key(x) else jnp.asarray(x)


def _keyed(raw: Any, like: Any) -> Any:
    return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(like)) if _is_key(like) else raw


def _shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
