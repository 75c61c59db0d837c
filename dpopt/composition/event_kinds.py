"""The kinds of events that dpopt accounts for and stores, and their numbers; any other kind is refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from dpopt.common.lazy import dp_accounting as dp


@functools.cache
def _coded() -> dict[str, tuple[type, tuple[str, ...]]]:
    """By name: the kind, and its fields."""
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


def check(event: Any) -> None:
    """Refuses an event of a kind that dpopt does not account for, or with a number out of range, at any depth.

    Nothing is guessed: random allocation, shuffling, sampling with replacement and whatever else a later
    ``dp_accounting`` describes are refused, and so are subclasses. A negative count would pay back.

    Raises:
        TypeError: for what is no event; ValueError: naming the event.

    *Privacy*: a description; reads no data.

    >>> check(dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.0), -3))
    Traceback (most recent call last):
    ...
    ValueError: this event cannot be accounted for, a number in it is out of range: SelfComposedDpEvent(...
    """
    kind = type(event)
    if not isinstance(event, dp.DpEvent):
        raise TypeError(f"privacy is described by events of dp_accounting; got {event!r} of type {kind.__name__}.")
    if _coded().get(kind.__name__, (None,))[0] is not kind:
        raise ValueError(
            f"events of kind {kind.__name__} are not accounted for here; known are {', '.join(_coded())}. Describe the "
            "mechanism by these, so that it costs no less than it does, or account for it with dp_accounting itself."
        )
    match event:
        case dp.GaussianDpEvent(noise_multiplier=sigma):
            is_sound = sigma >= 0
        case dp.SelfComposedDpEvent(count=count):
            is_sound = count >= 1 and count == int(count)
        case dp.PoissonSampledDpEvent(sampling_probability=q):
            is_sound = 0 <= q <= 1
        case dp.SampledWithoutReplacementDpEvent(source_dataset_size=n, sample_size=b):
            is_sound = 0 <= b <= n
        case dp.TruncatedSubsampledGaussianDpEvent(
            dataset_size=n, sampling_probability=q, truncated_batch_size=b, noise_multiplier=sigma
        ):
            is_sound = sigma >= 0 and 0 <= q <= 1 and all(x >= 0 and x == int(x) for x in (n, b))
        case dp.dp_event.RepeatAndSelectDpEvent(mean=mean, shape=shape):
            is_sound = 1 <= mean < math.inf and shape >= 0
        case _:
            is_sound = True
    if not is_sound:  # NaN compares false
        raise ValueError(f"this event cannot be accounted for, a number in it is out of range: {event!r}.")
    for part in _parts(event):
        check(part)


def _parts(event: Any) -> list[Any]:
    return [part for part in getattr(event, "events", [getattr(event, "event", None)]) if part is not None]


def everything_in(event: Any) -> Iterator[Any]:
    """An event and all that it is made of, at any depth."""
    yield event
    for part in _parts(event):
        yield from everything_in(part)


def following(earlier: dp.DpEvent | None, event: dp.DpEvent) -> dp.DpEvent:
    """The event of both; of ``event`` alone where nothing was spent earlier.

    *Privacy*: a description; reads no data.

    >>> following(None, dp.GaussianDpEvent(2.0))
    GaussianDpEvent(noise_multiplier=2.0)
    """
    return event if earlier is None else dp.ComposedDpEvent([earlier, event])


def with_one_more(event: Any) -> Any:
    """The same run on data of one example more, on whose number truncated samples depend.

    *Privacy*: a description; reads no data.

    >>> with_one_more(dp.TruncatedSubsampledGaussianDpEvent(10, 0.5, 6, 1.0)).dataset_size
    11
    """
    match event:
        case dp.TruncatedSubsampledGaussianDpEvent(
            dataset_size=n, sampling_probability=q, truncated_batch_size=b, noise_multiplier=sigma
        ):
            return dp.TruncatedSubsampledGaussianDpEvent(n + 1, q, b, sigma)
        case dp.ComposedDpEvent(events=parts):
            return dp.ComposedDpEvent([with_one_more(part) for part in parts])
        case dp.SelfComposedDpEvent(event=inner, count=count):
            return dp.SelfComposedDpEvent(with_one_more(inner), count)
        case dp.dp_event.RepeatAndSelectDpEvent(event=inner, mean=mean, shape=shape):
            return dp.dp_event.RepeatAndSelectDpEvent(with_one_more(inner), mean, shape)
    return event


def is_replace_one(steps: Iterable[Any]) -> bool:
    """Whether these steps are accounted for under replace-one: those on samples of fixed size are."""
    return any(isinstance(e, dp.SampledWithoutReplacementDpEvent) for step in steps for e in everything_in(step))


def renyi_alone(steps: Iterable[Any]) -> str | None:
    """What among these steps has a bound by Renyi divergences and no other, in words; None where nothing has."""
    if any(isinstance(step, dp.dp_event.RepeatAndSelectDpEvent) for step in steps):
        return "the selection of the best of several runs"
    return "sampling without replacement" if is_replace_one(steps) else None


def to_json(event: Any) -> Any:
    """An event as plain dictionaries, lists and numbers.

    Raises:
        TypeError: for an event of a kind that dpopt does not make.

    *Privacy*: a description; reads no data.

    >>> to_json(dp.GaussianDpEvent(2.0))
    {'kind': 'GaussianDpEvent', 'noise_multiplier': 2.0}
    """
    if isinstance(event, list):
        return [to_json(e) for e in event]
    if not isinstance(event, dp.DpEvent):
        return event.item() if hasattr(event, "item") else event  # a number, perhaps NumPy's or JAX's
    kind = type(event).__name__
    if kind not in _coded():
        raise TypeError(f"a ledger cannot store events of kind {kind}; it knows {', '.join(_coded())}.")
    return {"kind": kind, **{f: to_json(getattr(event, f)) for f in _coded()[kind][1]}}


def from_json(data: Any) -> Any:
    """The event that `to_json` wrote.

    Raises:
        ValueError: for an unknown kind or a missing field.

    *Privacy*: a description; reads no data.

    >>> from_json({"kind": "GaussianDpEvent", "noise_multiplier": 2.0})
    GaussianDpEvent(noise_multiplier=2.0)
    """
    if isinstance(data, list):
        return [from_json(d) for d in data]
    if not isinstance(data, dict):
        return data
    if data.get("kind") not in _coded():
        raise ValueError(f"unknown kind of event {data.get('kind')!r}; expected one of {', '.join(_coded())}.")
    kind, fields = _coded()[data["kind"]]
    if set(fields) != set(data) - {"kind"}:
        raise ValueError(
            f"a stored {data['kind']} has fields {sorted(set(data) - {'kind'})}; expected {sorted(fields)}."
        )
    return kind(**{f: from_json(data[f]) for f in fields})
