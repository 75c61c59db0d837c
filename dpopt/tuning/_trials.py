"""One trial of a search: what it may cost, and what is kept of it."""

from __future__ import annotations

from typing import Any

import jax

from dpopt import events
from dpopt.common.lazy import dp_accounting
from dpopt.composition import bounds
from dpopt.run.results import TrainResult
from dpopt.tuning.scores import PrivateScore, PublicScore


def trial_event(training: dp_accounting.DpEvent, score: PublicScore | PrivateScore) -> dp_accounting.DpEvent:
    """The event of one trial, its score included."""
    if isinstance(score, PublicScore):
        return training
    return dp_accounting.ComposedDpEvent([training, score.event])


def most_expensive(event: Any, settings: list[Any]) -> dp_accounting.DpEvent:
    """The event that covers every setting's."""
    if not callable(event):
        events.check(event)
        return event
    found: list[dp_accounting.DpEvent] = []
    for setting in settings:
        one: Any = event(setting)
        events.check(one)
        if one not in found:
            found.append(one)
    for one in found:
        if all(_covers(one, other) for other in found):
            return one
    raise ValueError(
        f"the settings' trials cost differently, and none of their {len(found)} events covers all others at every "
        "Renyi order. Leave fixed what moves epsilon (noise multiplier, batch size, steps), or state one event that "
        "covers all of them."
    )


def _covers(event: dp_accounting.DpEvent, other: dp_accounting.DpEvent) -> bool:
    """Whether one mechanism's Renyi divergences are at no order below another's, but for rounding."""
    pairs = [(event, other), (events.with_one_more(event), events.with_one_more(other))]
    return all(_covers_one_way(*pair) for pair in (pairs if pairs[0] != pairs[1] else pairs[:1]))


def _covers_one_way(event: dp_accounting.DpEvent, other: dp_accounting.DpEvent) -> bool:
    steps, others = events.flattened(event), events.flattened(other)
    if not others:
        return True
    replaces = events.is_replace_one(steps)
    if not steps or replaces != events.is_replace_one(others):
        return event == other
    return bounds.covers(steps, others, events.relation_of(steps))


def kept(
    trained: Any,
    event: dp_accounting.DpEvent,
    num_examples: int,
    unit: str,
    earlier: dp_accounting.DpEvent | None,
) -> Any:
    """What is kept of a trial's result, which must not have cost more than is stated."""
    if not isinstance(trained, TrainResult):
        return trained
    if (trained.num_examples, trained.unit) != (num_examples, unit):
        raise ValueError(
            f"the search is for {num_examples} records of unit {unit!r}, and a trial trained on {trained.num_examples} "
            f"of unit {trained.unit!r}: pass the trials' own num_examples and unit."
        )
    if trained.earlier is not None and trained.earlier != earlier:
        raise ValueError(
            "a trial counts what was spent before it (earlier=), and the search does not: its epsilon would leave that "
            "out. Pass the same earlier to repeat_and_select."
        )
    if not _covers(event, trained.ledger.event):
        raise ValueError(
            "a trial spent more than the event that is stated for it, and the search is charged by: more steps, less "
            "noise, or steps that were lost and taken anew. State the event of what trials do."
        )
    return jax.device_get(trained.params)
