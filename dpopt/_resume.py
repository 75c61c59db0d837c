"""Where a run goes on: the state found in the journal, among the processes that share it."""

import logging
from typing import Any

import jax
from jax.experimental import multihost_utils

from dpopt import identity
from dpopt.identity import TrainState
from dpopt.journal import Entry, Journal

_log = logging.getLogger("dpopt.loop")


def attach(journal: Journal, checkpointer: Any, run: dict[str, Any]) -> None:
    """Opens the journal: the first process writes, the others read what it found before any step is added."""
    if jax.process_index() == 0:
        journal.attach(checkpointer.journal_path, run)
    meet("dpopt journal opened")
    if jax.process_index() != 0:
        journal.attach(checkpointer.journal_path, run, is_writer=False)
    meet("dpopt journal read")


def meet(name: str) -> None:
    """Waits for all processes: none may let a result out before the one that writes has written."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def check_count(state: TrainState) -> None:
    """Refuses a state whose noise is at another step than the run: its cost would be looked up there."""
    counts = {int(x.count) for x in identity.noise_states(state.opt_state)}
    if counts - {state.update}:
        raise ValueError(
            f"the optimizer's state has drawn noise {sorted(counts)} times, and the run is at step {state.update}: its "
            "cost would be looked up at the wrong step. Pass parameters alone, or the state of an earlier result."
        )


def enter(plan: Any, journal: Journal, state: TrainState, replay: bool) -> tuple[TrainState, list[Entry]]:
    """Finds the state in the journal: what to repeat from there, and whether under fresh noise.

    A step may be computed twice with the same noise only if both results are the same to the last bit. That can be
    expected of a state that the journal knows, in the environment of its latest segment; anything else starts a new
    segment, under a fresh key unless it goes on exactly where the journal ends.
    """
    found = identity.state_digest(state)
    here = identity.environment((state.params, state.opt_state))
    entries = journal.entries

    def begin(state: TrainState) -> tuple[TrainState, list[Entry]]:
        journal.append(Entry(None, found, state.update, state.fresh, here))
        meet(f"dpopt segment {len(journal)}")
        return state, []

    if not entries:
        return begin(state)
    start = max(i for i, entry in enumerate(entries) if not entry.is_step)
    segment = entries[start:]
    known = [i for i, entry in enumerate(segment) if (entry.digest, entry.fresh) == (found, state.fresh)]
    is_same_place = segment[0].environment == here
    if known and known[-1] == len(segment) - 1:
        return (state, []) if is_same_place else begin(state)
    if known and is_same_place and replay:
        return state, list(segment[known[-1] + 1 :])

    number = 1 + max(entry.fresh for entry in entries)
    queries = len(plan.optimizer.privacy.queries)
    reason = "replay=False" if not replay else "the state is not in the journal's last part"
    if known and not is_same_place:
        reason = f"the machine is another ({identity.differences(segment[0].environment or {}, here)})"
    _log.warning(
        "dpopt: %d steps are spent and not in the parameters at step %d; they cannot be repeated bit for bit (%s), so "
        "the run goes on with fresh noise and the steps that replace them are charged anew.",
        journal.ledger.steps - state.update,
        state.update,
        reason,
    )
    renewed = identity.with_fresh_noise(state.opt_state, number, queries)
    return begin(state._replace(opt_state=renewed, fresh=number))
