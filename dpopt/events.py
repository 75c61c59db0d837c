"""Privacy events of ``dp_accounting`` for runs: made from an optimizer and a sampling scheme, simplified, counted."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from dpopt.common import validate
from dpopt.common.lazy import dp_accounting as dp
from dpopt.common.types import PyTree
from dpopt.composition import step_events
from dpopt.composition.event_kinds import check as check
from dpopt.composition.event_kinds import everything_in as everything_in
from dpopt.composition.event_kinds import following as following
from dpopt.composition.event_kinds import from_json as from_json
from dpopt.composition.event_kinds import is_replace_one as is_replace_one
from dpopt.composition.event_kinds import renyi_alone as renyi_alone
from dpopt.composition.event_kinds import to_json as to_json
from dpopt.composition.event_kinds import with_one_more as with_one_more
from dpopt.inspection import privacy_of
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

    >>> poisson_event(noise_multiplier=1.0, sampling_prob=0.1, steps=2).count
    2
    """
    validate.non_negative(noise_multiplier=noise_multiplier, allow_inf=True)
    return compose(Privacy((Query(noise_multiplier),)), Poisson(sampling_prob), steps)


def step_event(privacy: Privacy, scheme: Scheme | InParts, step: int, origin: int = 0) -> dp.DpEvent:
    """The event that one step adds to those before it.

    Args:
        privacy, scheme: see `compose`.
        step: number of the step.
        origin: first step of the strategy that correlates the noise, if any.

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
        sampling: a scheme of `dpopt.sampling`, `dpopt.samplers.truncated` or `dpopt.samplers.parts` (``Poisson``,
            ``WithoutReplacement``, ``TruncatedPoisson``, ``InParts``), or a sampler.
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
    return composer(privacy, scheme, start)(int(steps))  # dp_accounting rejects NumPy integers


def composer(privacy: Privacy, scheme: Scheme | InParts, start: int, origin: int = 0) -> Callable[[int], dp.DpEvent]:
    """`compose` for one start and many numbers of steps: each step of a schedule is evaluated once.

    ``origin``: see `step_event`.

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


def privacy_event(optimizer: Any, *, sampling: Sampling, steps: int, params: PyTree = None) -> dp.DpEvent:
    """The event of training with a named optimizer, a `dpopt.chain`, an ``optax.chain`` or a train step.

    A sampler stands for the run that it feeds. There is a UserWarning if it has drawn more batches than ``steps``, or
    none although the optimizer has been used: the batches then came from elsewhere (an epoch over shuffled data is not
    a Poisson sample). For the cost of another run, pass a scheme (``sampler.scheme``).

    Args:
        optimizer, params: see `dpopt.inspection.privacy_of`.
        sampling, steps: see `compose`.

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
    event = compose(privacy_of(optimizer, params), sampling, steps)
    _warn_of_another_run(optimizer, getattr(sampling, "drawn_to", None), steps)
    return event


def _warn_of_another_run(optimizer: Any, drawn_to: int | None, steps: int) -> None:
    while not hasattr(optimizer, "updated"):  # a train step or an NNX optimizer holds one
        held = getattr(optimizer, "optimizer", getattr(optimizer, "tx", None))
        if held is None:
            break
        optimizer = held
    if drawn_to == 0 and getattr(optimizer, "updated", False):
        warnings.warn(
            "this optimizer has been used, but this sampler has drawn no batches. If they came from elsewhere, such as "
            "epochs over shuffled data, epsilon does not hold for them. Pass the sampler that drew them, or a scheme "
            "(sampler.scheme) for the cost of a planned run.",
            UserWarning,
            stacklevel=3,
        )
    elif drawn_to is not None and steps < drawn_to:
        warnings.warn(
            f"this sampler has drawn the batches of {drawn_to} steps, but only {steps} are accounted for: the others "
            "cost nothing only if their results were never used. Pass a scheme (sampler.scheme) for the cost of a "
            "shorter run.",
            UserWarning,
            stacklevel=3,
        )


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
            return _unless_trivial(inner, lambda e: dp.SelfComposedDpEvent(e, count))
        case dp.PoissonSampledDpEvent(sampling_probability=q, event=inner):
            return _unless_trivial(merged(inner), lambda e: dp.PoissonSampledDpEvent(q, e))
        case dp.SampledWithoutReplacementDpEvent(source_dataset_size=n, sample_size=b, event=inner):
            return _unless_trivial(merged(inner), lambda e: dp.SampledWithoutReplacementDpEvent(n, b, e))
        case dp.TruncatedSubsampledGaussianDpEvent(noise_multiplier=sigma):
            query = merged(dp.GaussianDpEvent(sigma))
            return _unless_trivial(query, lambda e: step_events.with_noise(event, step_events.noise(e)))
        case dp.dp_event.RepeatAndSelectDpEvent(event=inner, mean=mean, shape=shape):
            return _unless_trivial(merged(inner), lambda e: dp.dp_event.RepeatAndSelectDpEvent(e, mean, shape))
        case _:
            return event


def flattened(event: dp.DpEvent) -> Counter[dp.DpEvent]:
    """The steps of an event, with the number of times each occurs, since order does not matter.

    Steps are Gaussian queries, on all data or on a sample, and selections of the best of several runs. Steps that cost
    nothing are dropped; all queries on all data are merged into one.

    Raises:
        ValueError: for queries on a sample that are not Gaussian, or Poisson samples together with samples of fixed
            size.

    >>> flattened(dp.ComposedDpEvent([dp.GaussianDpEvent(2.0), dp.SelfComposedDpEvent(dp.GaussianDpEvent(4.0), 12)]))
    Counter({GaussianDpEvent(noise_multiplier=1.0): 1})
    """
    steps: Counter[dp.DpEvent] = Counter()
    _collect(merged(event), 1, steps)
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
    if len(unsampled) > 1:
        steps = Counter({e: n for e, n in steps.items() if not isinstance(e, dp.GaussianDpEvent)})
        steps[merged(dp.ComposedDpEvent(unsampled))] += 1
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


def _collect(event: dp.DpEvent, count: int, steps: Counter[dp.DpEvent]) -> None:
    match event:
        case dp.NoOpDpEvent() | dp.PoissonSampledDpEvent(sampling_probability=0):
            pass
        case dp.SampledWithoutReplacementDpEvent(sample_size=0):
            pass
        case dp.TruncatedSubsampledGaussianDpEvent(sampling_probability=q, noise_multiplier=sigma):
            if min(event.dataset_size, event.truncated_batch_size, q) > 0:
                if step_events.prob_full(event) > 0:
                    steps[event] += count
                else:
                    _collect(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), count, steps)
        case dp.ComposedDpEvent(events=parts):
            for part in parts:
                _collect(part, count, steps)
        case dp.SelfComposedDpEvent(event=inner, count=times):
            _collect(inner, count * int(times), steps)
        case dp.PoissonSampledDpEvent(sampling_probability=1, event=inner):
            _collect(merged(dp.SelfComposedDpEvent(inner, count)), 1, steps)
        case dp.GaussianDpEvent() | dp.NonPrivateDpEvent():
            steps[merged(dp.SelfComposedDpEvent(event, count))] += 1
        case dp.PoissonSampledDpEvent() | dp.SampledWithoutReplacementDpEvent():
            if not isinstance(event.event, dp.GaussianDpEvent):
                raise ValueError(f"only Gaussian queries on a sample can be accounted for; got {event!r}.")
            steps[event] += count
        case dp.dp_event.RepeatAndSelectDpEvent(event=inner, mean=mean, shape=shape):
            parts = [dp.SelfComposedDpEvent(e, n) for e, n in flattened(inner).items()]
            if parts:
                runs = dp.ComposedDpEvent(cast(Any, tuple(parts)))  # hashable, as a list is not
                steps[dp.dp_event.RepeatAndSelectDpEvent(runs, mean, shape)] += count
        case _:
            pass


def _unless_trivial(inner: dp.DpEvent, wrap: Callable[[dp.DpEvent], dp.DpEvent]) -> dp.DpEvent:
    return inner if isinstance(inner, dp.NonPrivateDpEvent | dp.NoOpDpEvent) else wrap(inner)
