"""Events: what a run did to privacy, in the words of ``dp_accounting``, and in JSON."""

import math
from collections import Counter
from typing import Any

import dp_accounting as dp

from dpopt import _validate
from dpopt.privacy import Privacy, Query, privacy_of
from dpopt.sampling import Poisson


def poisson_event(*, noise_multiplier: float, sampling_prob: float, steps: int) -> dp.DpEvent:
    """The event of ``steps`` Gaussian queries on Poisson samples.

    Args:
        noise_multiplier, sampling_prob, steps: see `epsilon`.

    Raises:
        ValueError, TypeError: for an argument out of range.

    *Privacy*: a description; reads no data.

    >>> poisson_event(noise_multiplier=1.0, sampling_prob=0.1, steps=2).count
    2
    """
    _validate.non_negative(noise_multiplier=noise_multiplier, allow_inf=True)
    return compose(Privacy((Query(noise_multiplier),)), Poisson(sampling_prob), steps)


def compose(privacy: Privacy, sampling: Any, steps: int, *, start: int = 0) -> dp.DpEvent:
    """The event of steps ``start .. start + steps - 1`` of an optimizer under a sampling scheme.

    Args:
        privacy: what a step costs.
        sampling: a scheme of `dpopt.sampling` (``Poisson``, ``WithoutReplacement``, or a sampler that has one).
        steps: how many steps; 0 gives the event that costs nothing.
        start: the first step, for optimizers whose cost depends on the step.

    Raises:
        ValueError, TypeError: for a count that is no non-negative integer, or a sampling that is no scheme.

    *Privacy*: a description; reads no data.

    >>> from dpopt.sampling import Poisson
    >>> compose(Privacy((Query(1.0),)), Poisson(0.5), 3)
    SelfComposedDpEvent(event=PoissonSampledDpEvent(sampling_probability=0.5, \
event=GaussianDpEvent(noise_multiplier=1.0)), count=3)
    """
    _validate.non_negative_int(steps=steps, start=start)
    scheme = getattr(sampling, "scheme", sampling)
    if not (hasattr(scheme, "event") and hasattr(scheme, "relation")):
        raise TypeError(
            f"sampling must be a sampler or a scheme of dpopt.sampling, such as Poisson(0.01); got {sampling!r}."
        )
    if steps == 0:
        return dp.NoOpDpEvent()
    steps = int(steps)  # dp_accounting takes no NumPy integers
    # Composition does not care about order, so equal steps are counted together.
    if privacy.varies:
        # Merged, since an event that is a list of queries cannot be counted.
        counts = Counter(merged(privacy.step_event(t, scheme.relation)) for t in range(start, start + steps)).items()
    else:
        counts = [(privacy.step_event(start, scheme.relation), steps)]
    events: list[dp.DpEvent] = [dp.SelfComposedDpEvent(scheme.event(e), count) for e, count in counts]
    return events[0] if len(events) == 1 else dp.ComposedDpEvent(events)


def privacy_event(optimizer: Any, *, sampling: Any, steps: int, params: Any = None) -> dp.DpEvent:
    """The event of training with an optimizer: by name, by `dpopt.chain`, by ``optax.chain``, or a train step.

    Args:
        optimizer: see `dpopt.privacy.privacy_of`.
        sampling: see `compose`.
        steps: number of steps.
        params: see `dpopt.privacy.privacy_of`.

    Raises:
        ValueError: if the optimizer does not privatise its gradients in an order that can be accounted for.

    *Privacy*: a description; reads no data.

    >>> import jax, dpopt
    >>> opt = dpopt.dp_sgd(
    ...     0.1, l2_clip_norm=1.0, noise_multiplier=2.0, expected_batch_size=50, key=jax.random.key(0))
    >>> sampler = dpopt.PoissonSampler(1_000, 50, seed=0)
    >>> event = privacy_event(opt, sampling=sampler, steps=100)
    >>> round(dpopt.epsilon_of_event(event, delta=1e-5), 2)
    1.1
    """
    return compose(privacy_of(optimizer, params), sampling, steps)


def merged(event: dp.DpEvent) -> dp.DpEvent:
    r"""The same event in a form that either accountant takes: Gaussian queries on one sample become one.

    k Gaussian queries on the same data are one of multiplier :math:`(\sum_j \sigma_j^{-2})^{-1/2}`, exactly. A query
    without noise becomes the event that is not private, one of infinite noise the event that costs nothing.

    *Privacy*: a description; reads no data.

    >>> merged(dp.ComposedDpEvent([dp.GaussianDpEvent(3.0)] * 4)).noise_multiplier
    1.5
    """
    match event:
        case dp.GaussianDpEvent(noise_multiplier=0):
            return dp.NonPrivateDpEvent()
        case dp.GaussianDpEvent(noise_multiplier=math.inf):
            return dp.NoOpDpEvent()
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
            return _unless_trivial(merged(inner), lambda e: dp.SelfComposedDpEvent(e, count))
        case dp.PoissonSampledDpEvent(sampling_probability=q, event=inner):
            return _unless_trivial(merged(inner), lambda e: dp.PoissonSampledDpEvent(q, e))
        case dp.SampledWithoutReplacementDpEvent(source_dataset_size=n, sample_size=b, event=inner):
            return _unless_trivial(merged(inner), lambda e: dp.SampledWithoutReplacementDpEvent(n, b, e))
    return event


def _unless_trivial(inner: dp.DpEvent, wrap: Any) -> dp.DpEvent:
    return inner if isinstance(inner, dp.NonPrivateDpEvent | dp.NoOpDpEvent) else wrap(inner)


def check(event: Any) -> None:
    """Refuses an event whose numbers are out of range, at any depth: composed, a negative count would pay back.

    Raises:
        ValueError: naming the event.

    *Privacy*: a description; reads no data.

    >>> check(dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.0), -3))
    Traceback (most recent call last):
    ...
    ValueError: this event cannot be accounted for, a number in it is out of range: SelfComposedDpEvent(...
    """
    match event:
        case dp.GaussianDpEvent(noise_multiplier=sigma):
            is_sound = sigma >= 0
        case dp.SelfComposedDpEvent(count=count):
            is_sound = count >= 1 and count == int(count)
        case dp.PoissonSampledDpEvent(sampling_probability=q):
            is_sound = 0 <= q <= 1
        case dp.SampledWithoutReplacementDpEvent(source_dataset_size=n, sample_size=b):
            is_sound = 0 <= b <= n
        case _:
            is_sound = True
    if not is_sound:  # NaN compares false
        raise ValueError(f"this event cannot be accounted for, a number in it is out of range: {event!r}.")
    for part in (getattr(event, "event", None), *getattr(event, "events", ())):
        if part is not None:
            check(part)


def samples_without_replacement(event: dp.DpEvent) -> bool:
    """Whether any part of the event samples without replacement, which makes it a replace-one statement.

    *Privacy*: a description; reads no data.

    >>> samples_without_replacement(dp.GaussianDpEvent(1.0))
    False
    """
    parts = [getattr(event, "event", None), *getattr(event, "events", ())]
    return isinstance(event, dp.SampledWithoutReplacementDpEvent) or any(
        samples_without_replacement(e) for e in parts if e is not None
    )


_CODED = {
    kind.__name__: (kind, fields)
    for kind, fields in (
        (dp.NoOpDpEvent, ()),
        (dp.NonPrivateDpEvent, ()),
        (dp.GaussianDpEvent, ("noise_multiplier",)),
        (dp.ComposedDpEvent, ("events",)),
        (dp.SelfComposedDpEvent, ("event", "count")),
        (dp.PoissonSampledDpEvent, ("sampling_probability", "event")),
        (dp.SampledWithoutReplacementDpEvent, ("source_dataset_size", "sample_size", "event")),
    )
}


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
    if kind not in _CODED:
        raise TypeError(f"a ledger cannot store events of kind {kind}; it knows {', '.join(_CODED)}.")
    return {"kind": kind, **{f: to_json(getattr(event, f)) for f in _CODED[kind][1]}}


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
    if data.get("kind") not in _CODED:
        raise ValueError(f"unknown kind of event {data.get('kind')!r}; expected one of {', '.join(_CODED)}.")
    kind, fields = _CODED[data["kind"]]
    if set(fields) != set(data) - {"kind"}:
        raise ValueError(
            f"a stored {data['kind']} has fields {sorted(set(data) - {'kind'})}; expected {sorted(fields)}."
        )
    return kind(**{f: from_json(data[f]) for f in fields})
