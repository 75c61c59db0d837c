"""Epsilon and delta: thin, careful calls of ``dp_accounting``.

Every epsilon here is for the add-or-remove-one relation unless the sampler says otherwise, and is an upper bound. What
was drawn and what is accounted cannot differ: both come from the same `dpopt.privacy.Privacy`.
"""

import json
import logging
import math
from typing import Any, ClassVar, Literal

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

from dpopt import _validate, events
from dpopt.events import poisson_event
from dpopt.privacy import Relation

Accountant = Literal["pld", "rdp"]

# Grid of the privacy loss at an epsilon between 1 and 100. Rounding is pessimistic, so a coarser grid gives a larger
# epsilon, never a smaller one. At 1e-3 IMDB's 39,000 steps cost 2.81 (2.79 on a grid ten times finer, for eight times
# the work). Below 1 the grid shrinks with epsilon; above 100 it grows, to fit memory.
_PLD_INTERVAL = 1e-3


def epsilon(
    *, noise_multiplier: float, sampling_prob: float, steps: int, delta: float, accountant: Accountant = "pld"
) -> float:
    """Epsilon of ``steps`` Gaussian queries, each on a Poisson sample of the data.

    Args:
        noise_multiplier: standard deviation of the noise over the L2 sensitivity; 0 gives infinity.
        sampling_prob: probability with which each example is in a batch, in (0, 1].
        steps: number of steps; empty batches count.
        delta: target delta, in (0, 1).
        accountant: ``"pld"`` (privacy loss distributions, tight) or ``"rdp"`` (Renyi).

    Returns:
        An upper bound on epsilon for adding or removing one example.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: arithmetic on public constants.

    >>> settings = dict(noise_multiplier=1.0, sampling_prob=64 / 25_000, steps=39_000, delta=1e-5)
    >>> round(epsilon(**settings), 2), round(epsilon(**settings, accountant="rdp"), 2)
    (2.81, 3.03)
    """
    event = poisson_event(noise_multiplier=noise_multiplier, sampling_prob=sampling_prob, steps=steps)
    return epsilon_of_event(event, delta=delta, accountant=accountant)


def calibrate(
    *, epsilon: float, delta: float, sampling_prob: float, steps: int, accountant: Accountant = "pld"
) -> float:
    """The smallest noise multiplier whose epsilon does not exceed the target, to within 1e-3 (and never below it).

    Args:
        epsilon: the target, positive and finite.
        delta, sampling_prob, steps, accountant: see `epsilon`.

    Raises:
        ValueError, TypeError: for an argument out of range, or a target that no multiplier below 2^40 meets.

    *Privacy*: arithmetic on public constants.

    >>> sigma = calibrate(epsilon=3.0, delta=1e-5, sampling_prob=0.01, steps=1_000)
    >>> settings = dict(sampling_prob=0.01, steps=1_000, delta=1e-5)
    >>> 2.99 < globals()["epsilon"](noise_multiplier=sigma, **settings) <= 3.0
    True
    """
    _validate.positive(epsilon=epsilon)
    _validate.probability(sampling_prob=sampling_prob)
    _validate.positive_int(steps=steps)

    def make_event(noise_multiplier: float) -> dp_accounting.DpEvent:
        return poisson_event(noise_multiplier=noise_multiplier, sampling_prob=sampling_prob, steps=steps)

    return calibrate_event(make_event, epsilon=epsilon, delta=delta, accountant=accountant)


def calibrate_event(make_event: Any, *, epsilon: float, delta: float, accountant: Accountant = "pld") -> float:
    """`calibrate` for any family of events: ``make_event(noise_multiplier)``, whose epsilon falls as noise grows.

    Args:
        make_event: from a positive multiplier to a ``dp_accounting`` event.
        epsilon, delta, accountant: see `calibrate`.

    Raises:
        ValueError, TypeError: see `calibrate`.

    *Privacy*: arithmetic on public constants.

    >>> round(calibrate_event(dp_accounting.GaussianDpEvent, epsilon=1.0, delta=1e-5), 1)
    3.7
    """
    _validate.positive(epsilon=epsilon)

    def gap(noise_multiplier: float) -> float:
        return epsilon_of_event(make_event(noise_multiplier), delta=delta, accountant=accountant) - epsilon

    # A bracket grown from 1 by doubling or halving: the accountant never sees the near-zero noise at which privacy loss
    # distributions outgrow memory.
    low = high = 1.0
    if gap(1.0) > 0:
        while gap(high) > 0:
            low, high = high, 2 * high
            if high > 2.0**40:
                raise ValueError(f"no noise multiplier below 2^40 reaches epsilon {epsilon} at delta {delta}.")
    else:
        while gap(low) <= 0:
            low, high = low / 2, low
            if low < 1e-3:
                return high  # a target this loose is met by hardly any noise; do not search for less
    # Bisection that keeps the target met at `high`, which is therefore safe to return.
    while high - low > min(1e-3, 1e-3 * high) / 2:
        middle = (low + high) / 2
        low, high = (middle, high) if gap(middle) > 0 else (low, middle)
    return high


def epsilon_of_event(event: dp_accounting.DpEvent, *, delta: float, accountant: Accountant = "pld") -> float:
    """Epsilon of any event that dpopt makes; an upper bound.

    Args:
        event: a ``dp_accounting`` event.
        delta: target delta, in (0, 1).
        accountant: ``"pld"`` or ``"rdp"``. Sampling without replacement has an RDP bound only: ask for it by name.

    Raises:
        ValueError: if delta is out of range or the accountant cannot account for the event.

    *Privacy*: arithmetic on public constants.

    >>> epsilon_of_event(dp_accounting.GaussianDpEvent(0.0), delta=1e-5)
    inf
    """
    _validate.positive(delta=delta)
    if delta >= 1:
        raise ValueError(f"delta must be below 1; got {delta}.")
    _validate.one_of(("pld", "rdp"), accountant=accountant)
    events.check(event)
    event = events.merged(event)
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return 0.0
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        return math.inf
    replaces = events.samples_without_replacement(event)
    relation = Relation.REPLACE_ONE if replaces else Relation.ADD_OR_REMOVE_ONE
    if accountant == "rdp":
        return _rdp_epsilon(event, delta, relation)
    if replaces:
        raise ValueError(
            "sampling without replacement has no privacy-loss-distribution bound in dp_accounting; pass "
            "accountant='rdp', or sample with PoissonSampler."
        )
    # A Renyi bound at a few orders says how wide the grid must be before any memory is spent on it.
    bound = _rdp_epsilon(event, delta, relation, orders=(2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128))
    if bound > 1e6:
        return bound  # no privacy to speak of, in numbers that a grid of privacy losses cannot hold
    interval = _PLD_INTERVAL * (min(bound, 1.0) if bound < 100 else bound / 100)
    composed = pld.PLDAccountant(relation, value_discretization_interval=max(interval, 1e-9)).compose(event)
    return min(float(composed.get_epsilon(delta)), bound)  # both are upper bounds


def _rdp_epsilon(event: dp_accounting.DpEvent, delta: float, relation: Relation, orders: Any = None) -> float:
    absl = logging.getLogger("absl")
    level = absl.level
    try:
        absl.setLevel(logging.ERROR)  # it reports every order that it leaves out, which is sound and of no interest
        composed = rdp.RdpAccountant(orders, relation).compose(event)
    except dp_accounting.UnsupportedEventError as error:
        raise ValueError(
            f"no accountant takes this event under {relation.name}: {error}. Poisson samples are accounted for under "
            "add-or-remove-one, samples of fixed size under replace-one; a run cannot mix them."
        ) from error
    finally:
        absl.setLevel(level)
    # Cancellation can make the divergence negative at extreme orders; dp_accounting would then report epsilon 0.
    sound = composed.rdp >= 0
    if not sound.any():
        return math.inf
    kept = np.asarray(composed.orders)[sound]
    # dp_accounting annotates sequences, and passes arrays itself.
    return float(rdp.compute_epsilon(kept, composed.rdp[sound], delta)[0])  # pyright: ignore[reportArgumentType]


class Ledger:
    """What has been spent so far: an append-only list of events.

    Asking for epsilon changes nothing; entries cannot be removed or edited; saving and loading gives the same ledger.

    *Privacy*: holds descriptions of queries, no data. It is as public as epsilon is.

    >>> ledger = Ledger()
    >>> step = poisson_event(noise_multiplier=1.0, sampling_prob=0.01, steps=1)
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
            TypeError: if ``event`` is of a kind that cannot be stored; ValueError: if ``count`` is below 1, or a number
                in the event is out of range.
        """
        _validate.positive_int(count=count)
        if not isinstance(event, dp_accounting.DpEvent):
            raise TypeError(f"a ledger records events of dp_accounting; got {event!r} of type {type(event).__name__}.")
        count = int(count)
        events.check(event)
        event = events.from_json(events.to_json(event))  # a copy: a composed event holds a list that others can change
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
        # Order does not matter to composition; equal steps counted together are composed fast.
        counts: dict[str, int] = {}
        for event, count in self._entries:
            text = json.dumps(events.to_json(event))
            counts[text] = counts.get(text, 0) + count
        parts: list[dp_accounting.DpEvent] = [
            dp_accounting.SelfComposedDpEvent(events.from_json(json.loads(e)), n) for e, n in counts.items()
        ]
        return dp_accounting.ComposedDpEvent(parts)

    def epsilon(self, *, delta: float, accountant: Accountant = "pld") -> float:
        """Epsilon of everything recorded; 0 for an empty ledger."""
        return epsilon_of_event(self.event, delta=delta, accountant=accountant) if self._entries else 0.0

    def copy(self) -> "Ledger":
        """A ledger with the same entries, that grows on its own."""
        ledger = Ledger()
        ledger._entries = list(self._entries)
        return ledger

    def to_json(self) -> str:
        """The ledger as text."""
        return json.dumps([{"event": events.to_json(e), "count": n} for e, n in self._entries])

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """The ledger that `to_json` wrote.

        Raises:
            ValueError: if the text is damaged or holds an unknown event.
        """
        ledger = cls()
        entries = json.loads(text)
        if not isinstance(entries, list):
            raise ValueError(f"a stored ledger is a list of entries; got {entries!r}.")
        for entry in entries:
            if not isinstance(entry, dict) or set(entry) != {"event", "count"}:
                raise ValueError(f"an entry of a ledger has the fields 'event' and 'count'; got {entry!r}.")
            ledger.record(events.from_json(entry["event"]), entry["count"])
        return ledger

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Ledger) and self._entries == other._entries

    __hash__: ClassVar[None] = None  # it grows

    def __repr__(self) -> str:
        return f"Ledger({self.to_json()})"
