"""The privacy ledger: an append-only record of what a run has spent."""

from __future__ import annotations

import json
from collections import Counter

from dpopt import events
from dpopt.accounting import Accountant, accountant_for, epsilon_of_event
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting


class Ledger:
    """An append-only list of the events that a run has recorded.

    Entries cannot be removed or edited. Neither computing epsilon nor `to_json` and `from_json` change a ledger.

    *Privacy*: holds descriptions of queries, no data. It is as public as epsilon.

    >>> ledger = Ledger()
    >>> step = events.poisson_event(noise_multiplier=1.0, sampling_prob=0.01, steps=1)
    >>> for _ in range(3):
    ...     ledger.record(step)
    >>> ledger.steps, ledger.epsilon(delta=1e-5) == ledger.epsilon(delta=1e-5)
    (3, True)
    >>> Ledger.from_json(ledger.to_json()) == ledger
    True
    """

    def __init__(self):
        self._entries: list[tuple[dp_accounting.DpEvent, int]] = []

    def record(self, event: dp_accounting.DpEvent, count: int = 1) -> None:
        """Appends ``count`` repetitions of a step's event. Call it before the step's result is released.

        Raises:
            TypeError: if events of this kind cannot be stored.
            ValueError: if ``count`` is below 1, or a number in the event is out of range.

        *Privacy*: what is released without having been recorded is not in `epsilon`.
        """
        validate.positive_int(count=count)
        if not isinstance(event, dp_accounting.DpEvent):  # pyright: ignore[reportUnnecessaryIsInstance] for untyped callers
            raise TypeError(f"a ledger records events of dp_accounting; got {event!r} of type {type(event).__name__}.")
        count = int(count)
        # Copied, since a composed event holds a list that the caller could change.
        event = events.from_json(events.to_json(event))
        events.check(event)
        if self._entries and self._entries[-1][0] == event:
            self._entries[-1] = (event, self._entries[-1][1] + count)
        else:
            self._entries.append((event, count))

    @property
    def steps(self) -> int:
        """Number of events recorded."""
        return sum(count for _, count in self._entries)

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Everything recorded, as one event."""
        # Order does not matter for composition, and it is faster on counts of equal steps.
        counts: Counter[str] = Counter()
        for event, count in self._entries:
            counts[json.dumps(events.to_json(event))] += count
        distinct = [(events.from_json(json.loads(text)), count) for text, count in counts.items()]
        return dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(e, n) for e, n in distinct])

    def epsilon(self, *, delta: float, accountant: Accountant | None = None) -> float:
        """Epsilon of everything recorded; 0 for an empty ledger.

        Args:
            accountant: see `dpopt.epsilon`; None for ``"pld"``, or for samples of fixed size and selections ``"rdp"``.

        Raises:
            ValueError: for a delta that is not between 0 and 1, or an event that the accountant does not support.
        """
        if not self._entries:
            return 0.0
        event = self.event
        return epsilon_of_event(event, delta=delta, accountant=accountant or accountant_for(event))

    def copy(self) -> Ledger:
        """An independent ledger with the same entries."""
        ledger = Ledger()
        ledger._entries = list(self._entries)
        return ledger

    def to_json(self) -> str:
        """The ledger as text. *Privacy*: public constants, but for whatever the number of steps says."""
        return json.dumps([{"event": events.to_json(e), "count": n} for e, n in self._entries])

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """The ledger that `to_json` wrote.

        Raises:
            ValueError: if the text is damaged or contains an unknown event.

        *Privacy*: whoever can change the text can make epsilon smaller: `dpopt.run.journal` guards its own.
        """
        ledger = cls()
        entries = json.loads(text)
        if not isinstance(entries, list):
            raise ValueError(f"a stored ledger must be a list of entries; got {entries!r}.")
        for entry in entries:
            if not isinstance(entry, dict) or set(entry) != {"event", "count"}:
                raise ValueError(f"an entry of a ledger must have the fields 'event' and 'count'; got {entry!r}.")
            try:
                ledger.record(events.from_json(entry["event"]), entry["count"])
            except TypeError as error:
                raise ValueError(f"an entry of a ledger is damaged ({error}); got {entry!r}.") from error
        return ledger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._entries == other._entries

    def __repr__(self) -> str:
        return f"Ledger({self.to_json()})"
