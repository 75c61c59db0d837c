"""The cells of a utility table beside the score: seeds, cost of tuning, what epsilon does not cover, time, memory.

They come from the records alone: nothing is run.
"""

import functools
import json
import statistics
from typing import Any

import dp_accounting

from dpopt import accounting, events, tuning

Row = dict[str, Any]


def seeds(*rows: Row) -> str:
    """The number of seeds; for several rows, the range."""
    counts = sorted({len(row["seeds"]) for row in rows})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def not_covered(row: Row) -> str:
    """What was read from private data and is not covered by epsilon."""
    return ", ".join(row["not_covered_by_epsilon"]) or "nothing"


def seconds(*rows: Row) -> str:
    """The seconds of one run; for several rows, the median."""
    median = statistics.median(row["seconds"] for row in rows)
    return f"{median:.1f}" if median < 10 else f"{median:.0f}"


def state(row: Row) -> str:
    """The bytes of optimizer state, in total and per parameter."""
    return f"{row['state_bytes']:,} ({row['state_bytes'] / row['parameters']:.2g})"


def step_memory(*rows: Row) -> str:
    """Scratch memory of the compiled steps of one run in MB, the largest of the rows; empty if no record has it."""
    found = [row["step_bytes"] for row in rows if row.get("step_bytes") is not None]
    return f"{max(found) / 1e6:.3g}" if found else ""


@functools.lru_cache(maxsize=4_096)
def _epsilon(event: str, runs: int, delta: float) -> float:
    all_of_them = dp_accounting.SelfComposedDpEvent(events.from_json(json.loads(event)), runs)
    return accounting.epsilon_of_event(all_of_them, delta=delta, accountant="rdp")


def with_candidates(row: Row) -> float | None:
    """Epsilon, by Renyi divergences, of all runs together: the candidates' at the row's own noise, and the last one.

    The scores used for the choice are not included: they were read from held-out examples without noise. None if the
    number of candidates is unknown. The event of a row with paid tuning includes the tuning.
    """
    if row.get("tuning_is_paid"):
        return row["epsilon"]["rdp"]
    if row.get("tried") is None:
        return None
    return _epsilon(json.dumps(row["event"]), row["tried"] + 1, row["delta"])


def with_tuning(*rows: Row) -> str:
    """`with_candidates` as a cell; several rows one after the other."""
    if any(row.get("tuning_is_paid") for row in rows):
        return "paid"
    found = [with_candidates(row) for row in rows]
    said = ["not known" if epsilon is None else f"{epsilon:.3g}" for epsilon in found]
    return said[0] if len(set(said)) == 1 else " / ".join(said)


def by_selection(row: Row) -> float:
    """Epsilon if repeat-and-select had made the choice, with as many runs on average as there were candidates."""
    if row.get("tuning_is_paid"):
        return row["epsilon"]["rdp"]
    trials = tuning.NumTrials(mean=float(row["tried"]), shape=0.0)
    event = trials.event(events.from_json(row["event"]))
    return accounting.epsilon_of_event(event, delta=row["delta"], accountant="rdp")
