"""The steps of an event, nested as it may be: what an accountant composes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, cast

from dpopt.common.lazy import dp_accounting as dp
from dpopt.composition import step_events
from dpopt.composition.event_kinds import changed, everything_in, with_one_more


def merged(event: dp.DpEvent) -> dp.DpEvent:
    r"""An equivalent event that both accountants accept: Gaussian queries on the same sample become one.

    k Gaussian queries on the same data equal one with multiplier :math:`(\sum_j \sigma_j^{-2})^{-1/2}`, exactly. A
    query without noise becomes the event that is not private, one with infinite noise the event that costs nothing.

    >>> merged(dp.ComposedDpEvent([dp.GaussianDpEvent(3.0)] * 4)).noise_multiplier
    1.5
    """
    match event:
        case dp.GaussianDpEvent(noise_multiplier=math.inf):
            return dp.NoOpDpEvent()
        case dp.GaussianDpEvent(noise_multiplier=sigma):  # so that its square is finite
            return dp.NonPrivateDpEvent() if sigma < 1e-100 else dp.GaussianDpEvent(min(sigma, 1e100))
        case dp.ComposedDpEvent(events=parts):
            parts = [e for e in map(merged, parts) if not isinstance(e, dp.NoOpDpEvent)]
            if not parts:
                return dp.NoOpDpEvent()
            gaussians = [e for e in parts if isinstance(e, dp.GaussianDpEvent)]
            if len(gaussians) == len(parts):
                return dp.GaussianDpEvent(sum(e.noise_multiplier**-2 for e in gaussians) ** -0.5)
            if any(isinstance(e, dp.NonPrivateDpEvent) for e in parts):
                return dp.NonPrivateDpEvent()
            return dp.ComposedDpEvent(parts)
        case dp.SelfComposedDpEvent(event=inner, count=count):
            inner = merged(inner)
            if isinstance(inner, dp.GaussianDpEvent):
                return dp.GaussianDpEvent(inner.noise_multiplier * count**-0.5)
            return inner if _is_trivial(inner) else changed(event, event=inner)
        case dp.TruncatedSubsampledGaussianDpEvent(noise_multiplier=sigma):
            query = merged(dp.GaussianDpEvent(sigma))
            return query if _is_trivial(query) else step_events.with_noise(event, step_events.noise(query))
        case dp.PoissonSampledDpEvent() | dp.SampledWithoutReplacementDpEvent() | dp.dp_event.RepeatAndSelectDpEvent():
            inner = merged(event.event)
            return inner if _is_trivial(inner) else changed(event, event=inner)
        case _:
            return event


def flattened(event: dp.DpEvent, for_replacing: bool | None = None) -> Counter[dp.DpEvent]:
    """The steps of an event, with the number of times each occurs, since order does not matter.

    Steps are Gaussian queries, on all data or on a sample, and selections of the best of several runs. Steps that cost
    nothing are dropped; all queries on all data are merged into one.

    Next to samples of fixed size, which are accounted for under replace-one, a query on all data counts with half its
    multiplier: replacing an example may move a sum by twice as much as adding or removing one.

    Args:
        for_replacing: whether the event is part of one with samples of fixed size; None: whether it has such itself.

    Raises:
        ValueError: for queries on a sample that are not Gaussian, or Poisson samples together with samples of fixed
            size.

    >>> flattened(dp.ComposedDpEvent([dp.GaussianDpEvent(2.0), dp.SelfComposedDpEvent(dp.GaussianDpEvent(4.0), 12)]))
    Counter({GaussianDpEvent(noise_multiplier=1.0): 1})
    """
    steps: Counter[dp.DpEvent] = Counter()
    if for_replacing is None:
        for_replacing = any(isinstance(e, dp.SampledWithoutReplacementDpEvent) for e in everything_in(event))
    _collect(merged(event), 1, steps, for_replacing)
    kinds = {type(e) for step in steps for e in everything_in(step)}
    poisson = {dp.PoissonSampledDpEvent, dp.TruncatedSubsampledGaussianDpEvent}
    if dp.SampledWithoutReplacementDpEvent in kinds and kinds & poisson:
        raise ValueError(
            "this event mixes Poisson samples, accounted for under add-or-remove-one, with samples of fixed size, "
            "accounted for under replace-one; no accountant handles both."
        )
    unsampled: list[dp.DpEvent] = [
        dp.SelfComposedDpEvent(e, n) for e, n in steps.items() if isinstance(e, dp.GaussianDpEvent)
    ]
    if len(unsampled) > 1 or (unsampled and for_replacing):
        steps = Counter({e: n for e, n in steps.items() if not isinstance(e, dp.GaussianDpEvent)})
        together = merged(dp.ComposedDpEvent(unsampled))
        if for_replacing and isinstance(together, dp.GaussianDpEvent):
            together = merged(dp.GaussianDpEvent(together.noise_multiplier / 2))
        steps[together] += 1
    return steps


def flattened_both_ways(event: dp.DpEvent) -> list[Counter[dp.DpEvent]]:
    """`flattened` against data sets with one example fewer and, if the cost differs, against those with one more.

    The cost of a truncated sample depends on the size of the larger of two neighbouring data sets. With one more,
    samples are cut more often, but each example is less likely to be cut, so neither case always costs more. Epsilon is
    the larger one.

    >>> len(flattened_both_ways(dp.GaussianDpEvent(1.0)))
    1
    """
    sized = any(isinstance(e, dp.TruncatedSubsampledGaussianDpEvent) for e in everything_in(event))
    return [flattened(e) for e in ([event, with_one_more(event)] if sized else [event])]


def _collect(event: dp.DpEvent, count: int, steps: Counter[dp.DpEvent], for_replacing: bool) -> None:
    match event:
        case dp.PoissonSampledDpEvent(sampling_probability=0) | dp.SampledWithoutReplacementDpEvent(sample_size=0):
            pass
        case dp.TruncatedSubsampledGaussianDpEvent(sampling_probability=q, noise_multiplier=sigma):
            if min(event.dataset_size, event.truncated_batch_size, q) > 0:
                if step_events.prob_full(event) > 0:
                    steps[event] += count
                else:
                    _collect(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), count, steps, for_replacing)
        case dp.ComposedDpEvent(events=parts):
            for part in parts:
                _collect(part, count, steps, for_replacing)
        case dp.SelfComposedDpEvent(event=inner, count=times):
            _collect(inner, count * int(times), steps, for_replacing)
        case dp.PoissonSampledDpEvent(sampling_probability=1, event=inner):
            _collect(merged(dp.SelfComposedDpEvent(inner, count)), 1, steps, for_replacing)
        case dp.GaussianDpEvent() | dp.NonPrivateDpEvent():
            steps[merged(dp.SelfComposedDpEvent(event, count))] += 1
        case dp.PoissonSampledDpEvent() | dp.SampledWithoutReplacementDpEvent():
            if not isinstance(event.event, dp.GaussianDpEvent):
                raise ValueError(f"only Gaussian queries on a sample can be accounted for; got {event!r}.")
            steps[_with_bounded_noise(event)] += count
        case dp.dp_event.RepeatAndSelectDpEvent(event=inner, mean=mean, shape=shape):
            parts = [dp.SelfComposedDpEvent(e, n) for e, n in flattened(inner, for_replacing).items()]
            if parts:
                runs = dp.ComposedDpEvent(cast(Any, tuple(parts)))  # hashable, as a list is not
                steps[dp.dp_event.RepeatAndSelectDpEvent(runs, mean, shape)] += count
        case _:  # NoOpDpEvent
            pass


def _is_trivial(event: dp.DpEvent) -> bool:
    return isinstance(event, dp.NonPrivateDpEvent | dp.NoOpDpEvent)


def _with_bounded_noise(event: dp.DpEvent) -> dp.DpEvent:
    """A sample of fixed size with no more noise than dp_accounting can handle; what that costs is next to nothing."""
    if not isinstance(event, dp.SampledWithoutReplacementDpEvent):
        return event
    return step_events.with_noise(event, min(step_events.noise(event), 1e6))
