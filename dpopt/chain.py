"""Chains of transformations that state what they cost in privacy.

The order of a private optimizer is fixed: diagonals, one clip, one noise, division by a public constant, and then any
post-processing. `chain` checks it, passes the noisy mean back to preconditioners that learn from it, passes the
standard deviation of the noise on to the next stage, and holds the resulting `Privacy`.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, cast

import jax
import optax
from jax.core import Tracer

from dpopt import _stages, inspection
from dpopt._private_part import RunCore, run_private_part
from dpopt.clipping import as_promise
from dpopt.common import trees, validate
from dpopt.common.lazy import flow
from dpopt.common.names import name_of
from dpopt.common.types import PyTree
from dpopt.gradients import PerExampleGrads
from dpopt.privacy import PRIVATE_STAGES, Privacy, check_order, check_unit, privacy_of_stages

Gradients: TypeAlias = PerExampleGrads | optax.Updates  # a promise, or gradients stacked along a batch axis


class PrivateUpdate(Protocol):
    """Optax's ``update``, of a promise (`per_example_grads`) or of gradients stacked along a batch axis."""

    def __call__(
        self, updates: Gradients, state: optax.OptState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]: ...


class PrivateRun(Protocol):
    """`PrivateUpdate` that also returns the standard deviation of the noise in the updates, or None if unknown."""

    def __call__(
        self, updates: Gradients, state: optax.OptState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState, PyTree]: ...


class PrivateOptimizer(optax.GradientTransformationExtraArgs):
    """An Optax transformation from per-example gradients to updates, with the privacy that it costs.

    Attributes:
        privacy: what a step costs (`Privacy`).
        stages: the transformations it is made of.

    *Privacy*: releases what its noise stage releases; everything after is post-processing. This holds by construction
    for what `chain` makes; the first update of any other ``run`` is inspected (`dpopt.inspection`).

    >>> import dpopt, jax
    >>> core = dpopt.privatize(l2_clip_norm=1.0, noise_multiplier=2.0, expected_batch_size=8, key=jax.random.key(0))
    >>> round(core.privacy.step_event().noise_multiplier, 2)
    2.0
    """

    update: PrivateUpdate  # pyright: ignore[reportIncompatibleVariableOverride] a tuple's fields cannot be set
    privacy: Privacy
    stages: tuple[Any, ...]
    run: PrivateRun
    new_state: optax.TransformInitFn  # `init`, for a caller who gives every run noise of its own
    noise_unknown: bool = False  # whether stages after the noise have changed it
    updated: bool = False  # whether it has been used (or traced) in this process: see `dpopt.inspection.privacy_event`
    is_chained: bool  # whether `chain` made it, so that nothing after the noise can read what came before

    def __new__(
        cls,
        init: optax.TransformInitFn,
        run: PrivateRun,
        privacy: Privacy,
        stages: Sequence[Any] = (),
        is_chained: bool = False,
    ):
        def update(updates: PyTree, state: PyTree, params: optax.Params | None = None, **extra_args: Any):
            validate.public_arguments(extra_args)
            grads = as_promise(updates, params)
            check_unit(grads.unit, privacy.unit)
            self.updated = self.updated or not flow.is_inspecting()
            inspection.inspect_optimizer(self, grads, state, params, extra_args)
            with _stages.listening(None):  # this optimizer reports its privacy as a whole, not stage by stage
                new_updates, new_state, _ = run(grads, state, params, **extra_args)
            _stages.record(privacy)
            return new_updates, new_state

        def init_once(params: optax.Params):
            if self.updated and not any(isinstance(x, Tracer) for x in jax.tree.leaves(params)):
                warnings.warn(_USED, UserWarning, stacklevel=2)
            return init(params)

        self = super().__new__(cls, init_once, update)
        self.run = run
        self.new_state = init
        self.is_chained = is_chained
        self.privacy = privacy
        self.stages = tuple(stages)
        return self

    def __repr__(self) -> str:
        core, *post = self.stages or (self,)
        parts = (*core.stages, *post) if isinstance(core, PrivateOptimizer) and core.stages else self.stages
        return f"PrivateOptimizer({' > '.join(map(_name, parts))}; {self.privacy})"

    __reduce__ = _stages.StagedTransformation.__reduce__


_USED = (
    "this optimizer has been used, and a new state draws the noise of its first steps again: what two runs release "
    "then differs by no noise. Keep the state that update returns; for another run, make an optimizer with a key of "
    "its own."
)


class NoiseAware(optax.GradientTransformationExtraArgs):
    """A transformation after the noise that needs the noise in its input: ``update(..., noise_stddev=...)``.

    *Privacy*: post-processing; the noise's standard deviation is public.

    >>> NoiseAware(lambda p: (), lambda u, s, p=None, *, noise_stddev, **_: (u, s)).init(None)
    ()
    """

    correct_noise: bool = False  # whether it sums noise variances over steps, as for independent noise


def chain(*transformations: optax.GradientTransformation) -> PrivateOptimizer:
    """Chains transformations, like ``optax.chain``, and computes what they cost in privacy.

    Args:
        *transformations: in this order: any number of `precondition` stages, one `clip_and_sum`, one
            `add_gaussian_noise`, at most one `normalize_by`, then any Optax transformations. Or a `PrivateOptimizer`
            (as `privatize` returns) first, then any Optax transformations.

    Returns:
        A `PrivateOptimizer`. Its state is a tuple with one entry per stage. Stages after the noise get float32 updates
        and float32 parameters, so that moments of bfloat16 models do not lose bits.

    Raises:
        ValueError: if the order is wrong, with the position. TypeError: for something that is not a transformation.

    *Privacy*: Gaussian mechanism with multiplier noise_stddev / sensitivity at each step; the rest is post-processing.

    >>> import dpopt, jax
    >>> clip, noise = dpopt.clip_and_sum(0.5), dpopt.add_gaussian_noise(1.0, jax.random.key(0))
    >>> opt = chain(clip, noise, dpopt.normalize_by(32), optax.sgd(0.1))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    2.0
    >>> chain(noise, clip)
    Traceback (most recent call last):
    ...
    ValueError: stage 0 (add_gaussian_noise) comes before any clip_and_sum: noise protects a clipped sum. The order is \
precondition, clip_and_sum, add_gaussian_noise, normalize_by, then post-processing.
    """
    for position, t in enumerate(transformations):
        if not _is_transformation(t):
            raise TypeError(f"stage {position} is not an Optax transformation: {t!r}.")
    is_chained = True
    if transformations and isinstance(transformations[0], PrivateOptimizer):
        core, end = transformations[0], 1
        is_chained = core.is_chained
        for i, t in enumerate(transformations[1:], start=1):
            if isinstance(t, _stages.StagedTransformation | PrivateOptimizer):
                raise ValueError(
                    f"stage {i} ({_name(t)}) follows an optimizer that has already clipped and noised: only "
                    "post-processing may come after it."
                )
        core_init, run_core, privacy = (lambda p: (core.init(p),)), _run_nested(core), core.privacy
    else:
        names = [_name(t) for t in transformations]
        check_order(names)
        end = max(i for i, name in enumerate(names) if name in PRIVATE_STAGES) + 1
        # Only stages have these names, and nothing else can stand between them in this order.
        parts = cast(tuple[_stages.StagedTransformation, ...], transformations[:end])
        core_init, run_core = (lambda p: tuple(t.init(p) for t in parts)), run_private_part(parts)
        privacy = privacy_of_stages([t.stage for t in parts])
    _refuse_sums_of_correlated_noise(transformations, privacy)
    return _with_post_processing(core_init, run_core, privacy, end, transformations, is_chained)


def _with_post_processing(
    core_init: Callable[[optax.Params], tuple[optax.OptState, ...]],
    run_core: RunCore,
    privacy: Privacy,
    core_length: int,
    stages: Sequence[optax.GradientTransformation],
    is_chained: bool,
) -> PrivateOptimizer:
    rest = stages[core_length:]
    for i, t in enumerate(rest, start=core_length):
        inspection.check_arguments(t.update, f"stage {i} ({_name(t)})")
        # Any other transformation before it has changed the noise in an unknown way.
        if isinstance(t, NoiseAware) and (i > core_length or getattr(stages[0], "noise_unknown", False)):
            raise ValueError(
                f"stage {i} ({_name(t)}) needs the noise in its input, which is unknown after {_name(stages[i - 1])}: "
                "put it right after the noise."
            )
    post = [optax.with_extra_args_support(t) for t in rest]

    def init_fn(params: optax.Params):
        wide = trees.upcast(params)
        return core_init(params) + tuple(t.init(wide) for t in post)

    def run(updates: PyTree, state: PyTree, params: optax.Params | None = None, **extra_args: Any):
        updates, core_state, noise_stddev = run_core(updates, state[:core_length], params, extra_args)
        wide = None if params is None else trees.upcast(params)
        post_state: list[PyTree] = []
        for t, s in zip(post, state[core_length:], strict=True):
            # To this stage alone: an optax.chain would pass it on to parts whose input has other noise.
            known = {"noise_stddev": noise_stddev} if isinstance(t, NoiseAware) and noise_stddev is not None else {}
            updates, s = t.update(updates, s, wide, **{**extra_args, **known})
            noise_stddev = None
            post_state.append(s)
        return updates, (*core_state, *post_state), noise_stddev

    optimizer = PrivateOptimizer(init_fn, run, privacy, stages, is_chained=is_chained)
    optimizer.noise_unknown = bool(rest)
    return optimizer


def _refuse_sums_of_correlated_noise(stages: Sequence[optax.GradientTransformation], privacy: Privacy) -> None:
    for i, t in enumerate(stages):
        part = getattr(getattr(t, "stage", None), "preconditioner", t)
        if privacy.correlation is not None and getattr(part, "correct_noise", False):
            raise ValueError(
                f"stage {i} ({_name(t)}) has correct_noise=True: it subtracts the variance that independent noise has "
                f"in an average, but this noise is correlated over steps ({privacy.correlation})."
            )


def _run_nested(core: PrivateOptimizer) -> RunCore:
    def run(updates: PyTree, state: Sequence[PyTree], params: optax.Params | None, extra_args: dict[str, Any]):
        updates, core_state, noise_stddev = core.run(updates, state[0], params, **extra_args)
        return updates, (core_state,), noise_stddev

    return run


def _is_transformation(x: object) -> bool:
    return isinstance(x, tuple) and all(callable(getattr(x, name, None)) for name in ("init", "update"))


def _name(transformation: optax.GradientTransformation) -> str:
    if isinstance(transformation, _stages.StagedTransformation):
        return transformation.stage.name
    if isinstance(transformation, PrivateOptimizer):
        return "private optimizer"
    name = name_of(transformation.update)
    return f"another {name}" if name in PRIVATE_STAGES else name  # not a stage of dpopt, only the same name
