"""Privacy events of ``dp_accounting`` for runs: made from an optimizer and a sampling scheme, simplified, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from dpopt import _moved
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting as dp
from dpopt.composition.event_kinds import check as check
from dpopt.composition.event_kinds import everything_in as everything_in
from dpopt.composition.event_kinds import following as following
from dpopt.composition.event_kinds import from_json as from_json
from dpopt.composition.event_kinds import is_replace_one as is_replace_one
from dpopt.composition.event_kinds import relation_of as relation_of
from dpopt.composition.event_kinds import renyi_alone as renyi_alone
from dpopt.composition.event_kinds import to_json as to_json
from dpopt.composition.event_kinds import with_one_more as with_one_more
from dpopt.composition.flattened import flattened as flattened
from dpopt.composition.flattened import flattened_both_ways as flattened_both_ways
from dpopt.composition.flattened import merged as merged
from dpopt.privacy import Privacy, Query
from dpopt.samplers.parts import InParts
from dpopt.sampling import HasScheme, Poisson, Scheme

Sampling: TypeAlias = "Scheme | InParts | HasScheme"


def poisson_event(*, noise_multiplier: float, sampling_prob: float, steps: int) -> dp.DpEvent:
    """The event of ``steps`` Gaussian queries on Poisson samples.

    Args:
        noise_multiplier, sampling_prob, steps: see `epsilon`.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: arithmetic on public constants.

    >>> poisson_event(noise_multiplier=1.0, sampling_prob=0.1, steps=2).count
    2
    """
    validate.non_negative(noise_multiplier=noise_multiplier, allow_inf=True)
    return compose(Privacy((Query(noise_multiplier),)), Poisson(sampling_prob), steps)


def step_event(privacy: Privacy, scheme: Scheme | InParts, step: int, origin: int = 0) -> dp.DpEvent:
    """The event that one step adds to those before it; ``origin`` is the step at which correlated noise began.

    *Privacy*: arithmetic on public constants.

    >>> step_event(Privacy((Query(1.0),)), Poisson(0.5), 3).sampling_probability
    0.5
    """
    if isinstance(scheme, InParts):
        return scheme.event(privacy, step - origin, step - origin + 1)
    return scheme.event(privacy.step_event(step, scheme.relation))


def compose(privacy: Privacy, sampling: Sampling, steps: int, *, start: int = 0) -> dp.DpEvent:
    """The event of steps ``start .. start + steps - 1`` of an optimizer under a sampling scheme.

    Args:
        privacy: the queries of a step.
        sampling: a sampler, or a scheme of `dpopt.sampling`, `dpopt.samplers.truncated` or `dpopt.samplers.parts`.
        steps: number of steps; 0 gives the event that costs nothing.
        start: the first step, for optimizers whose cost depends on the step.

    Raises:
        ValueError, TypeError: if a count is not a non-negative integer, or ``sampling`` has no scheme.

    >>> from dpopt.sampling import Poisson
    >>> compose(Privacy((Query(1.0),)), Poisson(0.5), 3)
    SelfComposedDpEvent(event=PoissonSampledDpEvent(sampling_probability=0.5, \
event=GaussianDpEvent(noise_multiplier=0.999...)), count=3)
    """
    validate.non_negative_int(steps=steps, start=start)
    scheme: Any = getattr(sampling, "scheme", sampling)
    if not (hasattr(scheme, "event") and hasattr(scheme, "relation")):
        raise TypeError(
            f"sampling must be a sampler or a scheme of dpopt.sampling, such as Poisson(0.01); got {sampling!r}."
        )
    # Not what these steps add to those before them, whose cost is not part of this event.
    return composer(privacy, scheme, start, origin=start)(int(steps))  # dp_accounting rejects NumPy integers


def composer(privacy: Privacy, scheme: Scheme | InParts, start: int, origin: int = 0) -> Callable[[int], dp.DpEvent]:
    """`compose` for one start and many numbers of steps: each step of a schedule is evaluated once.

    ``origin``: see `step_event`.

    *Privacy*: arithmetic on public constants.

    >>> composer(Privacy((Query(1.0),)), Poisson(0.5), start=0)(3).count
    3
    """
    if isinstance(scheme, InParts):
        return lambda steps: scheme.event(privacy, start - origin, start - origin + steps)
    seen: list[dp.DpEvent] = []

    def event(steps: int) -> dp.DpEvent:
        if steps == 0:
            return dp.NoOpDpEvent()
        if not privacy.varies:
            return dp.SelfComposedDpEvent(scheme.event(privacy.step_event(start, scheme.relation)), steps)
        # Merged, since a composed event holds a list and has no hash.
        seen.extend(merged(privacy.step_event(start + i, scheme.relation)) for i in range(len(seen), steps))
        # Order does not matter for composition, so equal steps are counted together.
        counts = Counter(seen[:steps])
        parts = [dp.SelfComposedDpEvent(scheme.event(e), count) for e, count in counts.items()]
        return parts[0] if len(parts) == 1 else dp.ComposedDpEvent(cast(list[dp.DpEvent], parts))

    return event


def __getattr__(name: str) -> Any:
    return _moved.attribute("dpopt.events", name)
