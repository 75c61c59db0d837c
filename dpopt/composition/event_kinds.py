"""The kinds of events that dpopt accounts for and stores: checks, traversal, JSON. All other kinds are refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from dpopt.common.lazy import dp_accounting as dp
from dpopt.composition.relation import Relation


@functools.cache
def _kinds() -> dict[str, tuple[type[dp.DpEvent], tuple[str, ...]]]:
    """The class and the fields of each kind, by the name of the class."""
    return {
        kind.__name__: (kind, fields)
        for kind, fields in (
            (dp.NoOpDpEvent, ()),
            (dp.NonPrivateDpEvent, ()),
            (dp.GaussianDpEvent, ("noise_multiplier",)),
            (dp.ComposedDpEvent, ("events",)),
            (dp.SelfComposedDpEvent, ("event", "count")),
            (dp.PoissonSampledDpEvent, ("sampling_probability", "event")),
            (dp.SampledWithoutReplacementDpEvent, ("source_dataset_size", "sample_size", "event")),
            (
                dp.TruncatedSubsampledGaussianDpEvent,
                ("dataset_size", "sampling_probability", "truncated_batch_size", "noise_multiplier"),
            ),
            (dp.dp_event.RepeatAndSelectDpEvent, ("event", "mean", "shape")),
        )
    }


def check(event: object) -> None:
    """Refuses events of an unknown kind, or with a number out of range, at any depth.

    Random allocation, shuffling, sampling with replacement and whatever else a later ``dp_accounting`` describes are
    refused, and so are subclasses. A negative count would reduce epsilon.

    >>> check(dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.0), -3))
    Traceback (most recent call last):
    ...
    ValueError: this event cannot be accounted for, a number in it is out of range: SelfComposedDpEvent(...
    """
    kind = type(event)
    if not isinstance(event, dp.DpEvent):
        raise TypeError(f"expected an event of dp_accounting; got {event!r} of type {kind.__name__}.")
    if _kinds().get(kind.__name__, (None,))[0] is not kind:
        raise ValueError(
            f"dpopt does not account for events of kind {kind.__name__}, but for {', '.join(_kinds())}. Bound the "
            "cost of the mechanism from above by these, or use dp_accounting directly."
        )
    match event:
        case dp.GaussianDpEvent(noise_multiplier=sigma):
            is_sound = sigma >= 0
        case dp.SelfComposedDpEvent(count=count):
            is_sound = 1 <= count < math.inf and count == int(count)
        case dp.PoissonSampledDpEvent(sampling_probability=q):
            is_sound = 0 <= q <= 1
        case dp.SampledWithoutReplacementDpEvent(source_dataset_size=n, sample_size=b):
            is_sound = 0 <= b <= n < math.inf
        case dp.TruncatedSubsampledGaussianDpEvent(sampling_probability=q, noise_multiplier=sigma):
            counts = event.dataset_size, event.truncated_batch_size
            is_sound = sigma >= 0 and 0 <= q <= 1 and all(0 <= x < math.inf and x == int(x) for x in counts)
        case dp.dp_event.RepeatAndSelectDpEvent(mean=mean, shape=shape):
            is_sound = 1 <= mean < math.inf and shape >= 0
        case _:
            is_sound = True
    if not is_sound:  # also for NaN, which compares false
        raise ValueError(f"this event cannot be accounted for, a number in it is out of range: {event!r}.")
    for part in _parts(event):
        check(part)


def _parts(event: Any) -> list[dp.DpEvent]:
    return [event.event] if hasattr(event, "event") else list(getattr(event, "events", []))


def everything_in(event: dp.DpEvent) -> Iterator[dp.DpEvent]:
    """An event and all events nested in it, at any depth."""
    yield event
    for part in _parts(event):
        yield from everything_in(part)


def following(earlier: dp.DpEvent | None, event: dp.DpEvent) -> dp.DpEvent:
    """The composition of both, or ``event`` alone if nothing was spent earlier.

    >>> following(None, dp.GaussianDpEvent(2.0))
    GaussianDpEvent(noise_multiplier=2.0)
    """
    return event if earlier is None else dp.ComposedDpEvent([earlier, event])


def changed(event: dp.DpEvent, /, **fields: Any) -> dp.DpEvent:
    """The same event with other values of these fields."""
    kind, names = _kinds()[type(event).__name__]
    return kind(**{name: fields.get(name, getattr(event, name)) for name in names})


def with_one_more(event: dp.DpEvent) -> dp.DpEvent:
    """The event of the same run on data with one more example; truncated samples depend on the number of examples.

    >>> with_one_more(dp.TruncatedSubsampledGaussianDpEvent(10, 0.5, 6, 1.0)).dataset_size
    11
    """
    match event:
        case dp.TruncatedSubsampledGaussianDpEvent(dataset_size=n):
            return changed(event, dataset_size=n + 1)
        case dp.ComposedDpEvent(events=parts):
            return dp.ComposedDpEvent([with_one_more(part) for part in parts])
        case dp.SelfComposedDpEvent(event=inner) | dp.dp_event.RepeatAndSelectDpEvent(event=inner):
            return changed(event, event=with_one_more(inner))
        case _:
            return event


def is_replace_one(steps: Iterable[dp.DpEvent]) -> bool:
    """Whether any step is on a sample of fixed size, which is accounted for under replace-one."""
    return any(isinstance(e, dp.SampledWithoutReplacementDpEvent) for step in steps for e in everything_in(step))


def relation_of(steps: Iterable[dp.DpEvent]) -> Relation:
    """Which data sets are neighbours for a composition of these steps."""
    return Relation.REPLACE_ONE if is_replace_one(steps) else Relation.ADD_OR_REMOVE_ONE


def renyi_alone(steps: Iterable[dp.DpEvent]) -> str | None:
    """A phrase for what has only a Renyi bound among these steps; None if nothing has."""
    if any(isinstance(step, dp.dp_event.RepeatAndSelectDpEvent) for step in steps):
        return "the selection of the best of several runs"
    return "sampling without replacement" if is_replace_one(steps) else None


def to_json(event: Any) -> Any:
    """An event, a list of events or a number as plain dictionaries, lists and numbers.

    >>> to_json(dp.GaussianDpEvent(2.0))
    {'kind': 'GaussianDpEvent', 'noise_multiplier': 2.0}
    """
    if isinstance(event, list | tuple):
        return [to_json(e) for e in event]
    if not isinstance(event, dp.DpEvent):
        return event.item() if hasattr(event, "item") else event  # a Python, NumPy or JAX number
    kind = type(event).__name__
    if kind not in _kinds():
        raise TypeError(f"a ledger cannot store events of kind {kind}; it stores {', '.join(_kinds())}.")
    return {"kind": kind, **{f: to_json(getattr(event, f)) for f in _kinds()[kind][1]}}


def from_json(data: Any) -> Any:
    """The inverse of `to_json`. An unknown kind or a missing field is a ValueError.

    >>> from_json({"kind": "GaussianDpEvent", "noise_multiplier": 2.0})
    GaussianDpEvent(noise_multiplier=2.0)
    """
    if isinstance(data, list):
        return [from_json(d) for d in data]
    if not isinstance(data, dict):
        return data
    if data.get("kind") not in _kinds():
        raise ValueError(f"unknown kind of event {data.get('kind')!r}; expected one of {', '.join(_kinds())}.")
    kind, fields = _kinds()[data["kind"]]
    if set(fields) != set(data) - {"kind"}:
        raise ValueError(
            f"a stored {data['kind']} has fields {sorted(set(data) - {'kind'})}; expected {sorted(fields)}."
        )
    return kind(**{f: from_json(data[f]) for f in fields})
