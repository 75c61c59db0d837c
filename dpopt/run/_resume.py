"""Where a resumed run continues: the state found in the journal, agreed on by the processes that share it."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

from dpopt.run import entropy, identity
from dpopt.run.identity import Segment, TrainState
from dpopt.run.journal import Entry, Journal

_log = logging.getLogger("dpopt.run.loop")


def agree_on_plan(plan: Any, state: TrainState, constants: Any, run: Any, program: Any, options: list) -> None:
    """Refuses to start where the processes of a run differ; see `dpopt.run.entropy.agree`."""
    if jax.process_count() == 1:
        return
    keys = {f"key {i}" if i else "key": s.key for i, s in enumerate(entropy.noise_states(state.opt_state))}
    entropy.agree(
        {
            **keys,
            "seed": str(plan.sampler.seed),
            "plan": {"identity": run, "program": program},
            "parameters": identity.state_digest(state),
            "constants of the loss": identity.state_digest(TrainState(constants, ())),
            "steps, replay and budget": options,
        }
    )


def attach(journal: Journal, checkpointer: Any, run: dict[str, Any]) -> None:
    """Opens the journal: the first process writes, the others read what it found before any step is added."""
    if jax.process_index() == 0:
        checkpointer.make_directory()
        journal.attach(checkpointer.journal_path, run)
    meet("dpopt journal opened")
    if jax.process_index() != 0:
        journal.attach(checkpointer.journal_path, run, is_writer=False)
    # Also where they wait for each other. A directory that not all of them see shows here.
    entropy.agree({"checkpoint directory": [journal.run, len(journal)]})


def meet(name: str) -> None:
    """Waits for all processes: none may let a result out before the one that writes has written."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


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
            f"{journal.ledger.steps} steps): their cost would be lost. Go on with the plan that it comes from, or with "
            "its checkpointer. To start a new run from its parameters pass them alone (state.params), and tell its "
            "budget what they cost: builder.budget(..., earlier=result.ledger.event)."
        )


class Place(NamedTuple):
    """Where a resumed run continues."""

    state: TrainState
    pending: list[Entry]  # steps that were paid for, to be computed again bit for bit
    lost: int  # steps that were paid for, and will not be
    reason: str | None  # why a new segment is to begin; None to continue the journal's last one


def find(plan: Any, journal: Journal, state: TrainState, replay: bool) -> Place:
    """Finds the state in the journal: what to repeat from there, or why the run continues with fresh noise.

    A step may be computed twice with the same noise only if both results are the same to the last bit. That can be
    expected of a state that the journal knows, in the environment of its latest segment, where nobody has put back
    older files; which is why it must be asked for.
    """
    entries = journal.entries
    last = max((i for i, entry in enumerate(entries) if not entry.is_step), default=None)
    if replay and last is not None and entries[last].is_exact and state.segment is None:
        state = state._replace(segment=Segment(entries[last].segment, plan.sampler.seed))
    at = _index(state, entries)
    after = list(entries if at is None else entries[at + 1 :])
    lost = sum(entry.is_step for entry in after)
    if last is None:
        return Place(state, [], 0, "the run starts")
    if not replay:
        return Place(state, [], lost, "replay=False")
    if at is None or at < last:
        return Place(state, [], lost, "the state is not in the journal's last segment")
    here = identity.environment((state.params, state.opt_state))
    if entries[last].environment != here:
        where = identity.differences(entries[last].environment or {}, here)
        return Place(state, [], lost, f"this is a different machine ({where})")
    return Place(state, after, 0, None)


def segment_start(journal: Journal) -> int:
    """How many steps the state had had when the journal's latest segment began."""
    return next(entry.update for entry in reversed(journal.entries) if not entry.is_step)


def _index(state: TrainState, entries: Sequence[Entry]) -> int | None:
    """The entry that says what the state is, the latest if there are several."""
    name = None if state.segment is None else state.segment.id
    mine = (identity.state_digest(state), state.update, name)
    found = [i for i, entry in enumerate(entries) if (entry.digest, entry.update, entry.segment) == mine]
    return found[-1] if found else None


def begin(plan: Any, journal: Journal, place: Place, replay: bool, program: dict[str, str]) -> TrainState:
    """Starts a segment: enters it in the journal, and gives the state a noise key and a seed that nothing else has.

    With ``replay`` the first segment of a run keeps the plan's own, so that everything follows from key and seed.
    """
    state = place.state
    if place.lost:
        _log.warning(
            "dpopt: %d steps are spent and not in the parameters at step %d; they are not repeated (%s): the run goes "
            "on with fresh noise, and the steps that replace them are charged anew.",
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
    return state._replace(opt_state=opt_state, segment=segment)
