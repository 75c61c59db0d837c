"""Timing of functions against each other, independent of any library."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

SLOW_S = 2.0  # slower calls are timed only a few times, without rehearsals
FEW = 3
VERY_SLOW_S = 20.0  # slower calls still are timed once

Call = Callable[[], Any]  # returns when the work is done, not when it is dispatched


def seconds_of(call: Call) -> float:
    """The seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def interleaved(
    calls: Mapping[str, Call], budget_s: float, *, at_least: int = 5, rehearse: bool = True
) -> dict[str, float]:
    """Median seconds of each call. The calls take turns, so that other load on the machine affects all alike.

    With ``rehearse``, an untimed call precedes every timed one, so that freeing the previous function's memory is not
    timed.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    if not times:
        return {}
    started = time.perf_counter()
    while min(map(len, times.values())) < at_least or (
        time.perf_counter() - started < budget_s and min(map(len, times.values())) < 50
    ):
        for name, call in calls.items():
            if rehearse:
                call()
            times[name].append(seconds_of(call))
    return {name: statistics.median(ts) for name, ts in times.items()}


def with_few_slow(calls: Mapping[str, Call], once: Mapping[str, float], budget_s: float) -> dict[str, float]:
    """`interleaved`, for calls that may be slow; ``once`` has the seconds of a single call of each."""
    found = {n: once[n] for n in calls}
    slow = {n for n in calls if SLOW_S < once[n] <= VERY_SLOW_S}
    found |= interleaved({n: c for n, c in calls.items() if once[n] <= SLOW_S}, budget_s, at_least=FEW)
    return found | interleaved({n: c for n, c in calls.items() if n in slow}, 0.0, at_least=FEW, rehearse=False)
