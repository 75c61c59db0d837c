"""Resuming a run: opening its journal, finding the state there, and starting a segment, in all processes alike."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpopt.common.names import first_line
from dpopt.common.types import PyTree
from dpopt.engines.batches import is_key
from dpopt.run import entropy, identity
from dpopt.run._types import RunSampler
from dpopt.run.data import FetchBatch, read
from dpopt.run.journal import Entry, Journal
from dpopt.run.state import Segment, TrainState

if TYPE_CHECKING:
    from dpopt.run.checkpoint import Checkpointer
    from dpopt.run.plan import Plan

_log = logging.getLogger("dpopt.run.loop")


# Rows of the data that processes compare before the first step.
_COMPARED = 64


def agree_on_plan(
    plan: Plan, state: TrainState, rows: FetchBatch, example_key: jax.Array | None, constants: PyTree,
    description: Any, options: list[Any],
) -> None:  # fmt: skip
    """Raises an error if the processes of a run differ; see `dpopt.run.entropy.agree`."""
    if jax.process_count() == 1:
        return
    keys = {f"key {i}" if i else "key": s.key for i, s in enumerate(entropy.noise_states(state.opt_state))}
    rest = {
        "seed": str(plan.sampler.seed),
        "example key": "none" if example_key is None else example_key,
        "plan": description,
        "parameters": identity.state_digest(state),
        "constants of the loss": identity.state_digest(TrainState(constants, ())),
        "steps, replay, budget, checkpoints and evaluations": options,
        "rows of the data": _some_rows(rows, plan.sampler),
    }
    entropy.agree(keys | rest)


def _some_rows(rows: FetchBatch, sampler: RunSampler) -> str:
    """A hash of some rows: if processes had them in different orders, an example could be in a batch twice.

    Not of rows that cannot be compared: those of which this process reads its own part only (unless
    `dpopt.run.loading.sharded_rows` chose it), or that are others each time."""
    count = min(_COMPARED, sampler.num_examples)
    chosen = np.random.default_rng(0).choice(sampler.num_examples, count, replace=False)
    unit = math.lcm(getattr(sampler, "pad_to", 1), getattr(sampler, "batch_size", 1))
    indices = np.resize(chosen, -(-count // unit) * unit)  # as many as devices may share
    try:
        found = [_hash(read(getattr(rows, "whole", rows), 0, indices), len(indices), count) for _ in range(2)]
        reason = "are parts of what is read" if None in found else "are others each time"
    except Exception as error:  # the first step raises it; here the others would wait for this process
        found, reason = [None], f"cannot be read: {first_line(error)}"
    if found[0] is not None and found[0] == found[-1]:
        return found[0]
    _log.warning("dpopt: rows of the data were not compared between the processes: they %s", reason)
    return reason


def _hash(batch: PyTree, size: int, count: int) -> str | None:
    """Of the first ``count`` of so many rows; None unless this process has them all."""
    leaves, found = jax.tree.leaves(batch), hashlib.sha256()
    if any(len(x) != size or not getattr(x, "is_fully_addressable", True) for x in leaves):
        return None
    for x in leaves:
        x = np.asarray(jax.random.key_data(x) if is_key(x) else x)[:count]
        found.update(f"{x.shape} {x.dtype}".encode() + x.tobytes())
    return found.hexdigest()


def warn_of_another_program(journal: Journal, program: dict[str, str]) -> None:
    """Logs in what the run is not what it was when its latest segment began: its steps so far are of the other one."""
    starts = [entry.program for entry in journal.entries if not entry.is_step]
    changed = identity.differences(starts[-1] or {}, program) if starts and journal.ledger.steps else ""
    if changed:
        steps = journal.ledger.steps
        _log.warning("dpopt: the run continues with another program than its %d steps so far: %s", steps, changed)


@contextlib.contextmanager
def opened(journal: Journal, checkpointer: Checkpointer | None, run: dict[str, Any]) -> Generator[None]:
    """Keeps the journal's file open, if there is a checkpointer; afterwards another process may continue the run."""
    with journal.one_call(), _file_opened(journal, checkpointer, run):
        yield


@contextlib.contextmanager
def _file_opened(journal: Journal, checkpointer: Checkpointer | None, run: dict[str, Any]) -> Generator[None]:
    if checkpointer is None:
        yield
        return
    try:
        # The first process writes, the others read the journal's present content before any step is added.
        if jax.process_index() == 0:
            checkpointer.make_directory()
            journal.attach(checkpointer.journal_path, run)
        meet("dpopt journal opened")
        if jax.process_index() != 0:
            journal.attach(checkpointer.journal_path, run, is_writer=False)
        # Processes wait for each other here, too. A directory that not all of them see is detected.
        entropy.agree({"checkpoint directory": [journal.run, len(journal)]})
        yield
    finally:
        checkpointer.settle()
        journal.close()


def agree_on_step(digest: str) -> None:
    """Waits for all processes, and raises in each unless all have computed the same state.

    With other data in each, say, all would add the same noise to their own sums: the difference would hold none."""
    if jax.process_count() > 1:
        entropy.agree({"the result of this step (the data, or the loss)": digest})


def meet(name: str) -> None:
    """Waits for all processes: none may release a result before the first one has written to the journal."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _agree_on_file(journal: Journal) -> None:
    """Raises in every process unless all see what the first one has just written, and not copies of the directory."""
    if jax.process_count() > 1 and journal.path is not None:
        entropy.agree({"checkpoint directory": hashlib.sha256(journal.path.read_bytes()).hexdigest()})


def check_state(state: TrainState, journal: Journal) -> None:
    """Refuses a state whose steps are not in the journal, or whose noise is at another step than the run."""
    counts = {int(x.count) for x in entropy.noise_states(state.opt_state)}
    if counts - {state.update}:
        raise ValueError(
            f"the optimizer's state has drawn noise {sorted(counts)} times, and the run is at step {state.update}: its "
            "cost would be looked up at the wrong step. Pass parameters alone, or the state of an earlier result."
        )
    is_new = state.update == 0 and state.segment is None
    if not is_new and not any(state.segment and e.segment == state.segment.id for e in journal.entries):
        where = journal.path or "in memory"
        raise ValueError(
            f"this state has had {state.update} steps, which are not in this plan's journal ({where}; "
            f"{journal.ledger.steps} steps): their cost would be lost. Continue with the plan that it comes from, or "
            "with its checkpointer. To start a new run from its parameters pass them alone (state.params), and pass "
            "their cost to the budget: builder.budget(..., earlier=result)."
        )


class Place(NamedTuple):
    """Where a resumed run continues."""

    state: TrainState
    pending: tuple[Entry, ...]  # steps that were paid for, to be repeated bit for bit
    lost: int  # steps that were paid for, and will not be repeated
    reason: str | None  # for starting a segment; None to continue the journal's last one

    @property
    def paid(self) -> int:
        """Steps in the history of the state, including those to be repeated."""
        return self.state.update + len(self.pending)

    def origin(self, journal: Journal) -> int:
        """The number of steps that the state had had when its segment began, or will have had."""
        if self.reason is not None:
            return self.paid
        return next(entry.update for entry in reversed(journal.entries) if not entry.is_step)


def find(plan: Plan, state: TrainState, replay: bool) -> Place:
    """Finds the state in the journal: which steps to repeat from there, or why to continue with fresh noise.

    A step may be computed twice with the same noise only if both results are identical to the last bit. This can be
    expected only of a state in the journal, in the environment of its latest segment, if nobody has restored older
    files. Since the last condition cannot be checked, ``replay`` is off by default.
    """
    entries = plan.journal.entries
    last = max((i for i, entry in enumerate(entries) if not entry.is_step), default=None)
    if replay and last is not None and entries[last].is_exact and state.segment is None:
        state = state._replace(segment=Segment(entries[last].segment, plan.sampler.seed))
    mine = identity.state_digest(state), state.update, None if state.segment is None else state.segment.id
    at = max((i for i, e in enumerate(entries) if (e.digest, e.update, e.segment) == mine), default=None)
    after = entries if at is None else entries[at + 1 :]
    lost = sum(entry.is_step for entry in after)
    if last is None:
        return Place(state, (), 0, "the run starts")
    if not replay:
        return Place(state, (), lost, "replay=False")
    if at is None or at < last:
        return Place(state, (), lost, "the state is not in the journal's last segment")
    here = identity.environment((state.params, state.opt_state))
    if entries[last].environment != here:
        where = identity.differences(entries[last].environment or {}, here)
        return Place(state, (), lost, f"this is a different machine ({where})")
    return Place(state, after, 0, None)


def begin(plan: Plan, place: Place, replay: bool, program: dict[str, str]) -> TrainState:
    """Starts a segment: enters it in the journal, and gives the state a noise key and a seed that nothing else has.

    With ``replay`` the first segment of a run keeps the plan's own, so that everything derives from key and seed.
    """
    state, journal = place.state, plan.journal
    if place.lost:
        _log.warning(
            "dpopt: %d steps are spent and not in the parameters at step %d; they are not repeated (%s): the run "
            "continues with fresh noise, and the steps that replace them are charged again.",
            place.lost,
            state.update,
            place.reason,
        )
    words = entropy.draw()
    segment = entropy.new_segment(plan.sampler.seed, words)
    is_exact = replay and len(journal) == 0
    if is_exact:
        segment, opt_state = Segment(segment.id, plan.sampler.seed), state.opt_state
    else:
        opt_state = entropy.with_fresh_noise(state.opt_state, words, len(plan.optimizer.privacy.queries))
    here = identity.environment((state.params, state.opt_state))
    digest = identity.state_digest(state)
    journal.append(Entry(None, digest, state.update, segment.id, here, program, is_exact))
    meet(f"dpopt segment {len(journal)}")
    _agree_on_file(journal)
    return state._replace(opt_state=opt_state, segment=segment)
