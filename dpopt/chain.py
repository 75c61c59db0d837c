"""Chains of transformations that know what they cost in privacy.

The order of a private optimizer is fixed: diagonals, one clip, one noise, division by a public constant, and then any
post-processing. `chain` checks it, carries what the noise released back to diagonals that learn from it, tells the next
stage how much noise is left in its input, and holds the resulting `Privacy`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import optax

from dpopt import _stages, inspection
from dpopt.clipping import as_promise
from dpopt.common import trees, validate
from dpopt.common.lazy import flow
from dpopt.common.names import name_of
from dpopt.engines import sums
from dpopt.gradients import PerExampleGrads
from dpopt.preconditioners.base import apply_diagonal
from dpopt.privacy import PRIVATE_STAGES, Privacy, check_order, check_unit, privacy_of_stages


class PrivateUpdate(Protocol):
    """Optax's ``update``, of a promise (`per_example_grads`) or of gradients stacked along a batch axis."""

    def __call__(
        self,
        updates: PerExampleGrads | optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]: ...


class PrivateOptimizer(optax.GradientTransformationExtraArgs):
    """An Optax transformation from per-example gradients to updates that knows its privacy.

    Attributes:
        privacy: what a step costs (`Privacy`).
        stages: the transformations it is made of.

    *Privacy*: releases what its noise stage releases; everything after is post-processing. What `chain` puts together
    cannot do otherwise; of any other ``run`` the first update is inspected (`dpopt.inspection`).

    >>> import dpopt
    >>> core = dpopt.privatize(l2_clip_norm=1.0, noise_multiplier=2.0, expected_batch_size=8, key=jax.random.key(0))
    >>> round(core.privacy.step_event().noise_multiplier, 2)
    2.0
    """

    update: PrivateUpdate
    privacy: Privacy
    stages: tuple[Any, ...]
    run: Callable[..., Any]  # see `__new__`
    noise_unknown: bool = False  # whether stages after the noise have changed it
    updated: bool = False  # whether it has been used (or traced) here, which `dpopt.events.privacy_event` looks at
    is_chained: bool  # whether `chain` put it together, so that nothing after the noise sees what was before

    def __new__(
        cls,
        init: Callable[..., Any],
        run: Callable[..., Any],
        privacy: Privacy,
        stages: Sequence = (),
        is_chained: bool = False,
    ):
        """``run(grads, state, params, **extra) -> (updates, state, noise_stddev)``; the last None where unknown."""

        def update(updates, state, params=None, **extra_args):
            validate.public_arguments(extra_args)
            grads = as_promise(updates, params)
            check_unit(grads.unit, privacy.unit)
            self.updated = self.updated or not flow.is_inspecting()
            if not is_chained:
                inspection.inspect_once(update, update, grads, state, params, extra_args)
            with _stages.listening(None):  # its parts are summed up by its own report
                new_updates, new_state, _ = run(grads, state, params, **extra_args)
            _stages.record(privacy)
            return new_updates, new_state

        self = super().__new__(cls, init, update)
        self.run = run
        self.is_chained = is_chained
        self.privacy = privacy
        self.stages = tuple(stages)
        return self

    def __repr__(self) -> str:
        core, *post = self.stages or (self,)
        parts = (*core.stages, *post) if isinstance(core, PrivateOptimizer) and core.stages else self.stages
        return f"PrivateOptimizer({' > '.join(map(_name, parts))}; {self.privacy})"

    __reduce__ = _stages.StagedTransformation.__reduce__


class NoiseAware(optax.GradientTransformationExtraArgs):
    """A post-noise transformation that must know the noise in its input: ``update(..., noise_stddev=...)``.

    *Privacy*: post-processing; the noise's standard deviation is public.

    >>> NoiseAware(lambda p: (), lambda u, s, p=None, *, noise_stddev, **_: (u, s)).init(None)
    ()
    """

    correct_noise: bool = False  # whether it adds noises of several steps up, as if they were independent


def chain(*transformations: optax.GradientTransformation) -> PrivateOptimizer:
    """Puts transformations in a row, like ``optax.chain``, and works out what they cost in privacy.

    Args:
        *transformations: in this order: any number of `precondition` stages, one `clip_and_sum`, one
            `add_gaussian_noise`, at most one `normalize_by`, then any Optax transformations. Or a `PrivateOptimizer`
            (such as `privatize` makes) first, then any Optax transformations.

    Returns:
        A `PrivateOptimizer`. Its state is a tuple with one entry a stage. Stages after the noise see float32 updates
        and float32 parameters, so that moments of bfloat16 models do not lose bits.

    Raises:
        ValueError: if the order is another, with the position of the offending stage; TypeError: for something that is
            no transformation.

    *Privacy*: Gaussian mechanism with multiplier noise_stddev / sensitivity at each step; the rest is post-processing.

    >>> import dpopt
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
        if (
            not isinstance(t, tuple)
            or not callable(getattr(t, "init", None))
            or not callable(getattr(t, "update", None))
        ):
            raise TypeError(f"stage {position} is not an Optax transformation: {t!r}.")
    is_chained = True
    if transformations and isinstance(transformations[0], PrivateOptimizer):
        core, rest = transformations[0], transformations[1:]
        is_chained = core.is_chained
        _refuse_private_parts(rest, first_position=1)
        core_init, core_run, privacy = (lambda p: (core.init(p),)), _run_nested(core), core.privacy
    else:
        names = [_name(t) for t in transformations]
        check_order(names)
        end = max(i for i, name in enumerate(names) if name in PRIVATE_STAGES) + 1
        # Only stages have such names, and the order checked leaves nothing between them.
        parts = cast(tuple[_stages.StagedTransformation, ...], transformations[:end])
        rest = transformations[end:]
        core_init, core_run = (lambda p: tuple(t.init(p) for t in parts)), _run_parts(parts)
        privacy = privacy_of_stages([t.stage for t in parts])
    _refuse_sums_of_correlated_noise(transformations, privacy)
    return _with_post_processing(core_init, core_run, privacy, rest, transformations, is_chained)


def _with_post_processing(core_init, core_run, privacy, rest, stages, is_chained) -> PrivateOptimizer:
    core_length = len(stages) - len(rest)
    for i, t in enumerate(rest):
        inspection.check_arguments(t.update, f"stage {core_length + i} ({_name(t)})")
        # Any other transformation before it has changed the noise in a way that nobody told us.
        if isinstance(t, NoiseAware) and (i > 0 or getattr(stages[0], "noise_unknown", False)):
            raise ValueError(
                f"stage {core_length + i} ({_name(t)}) must know the noise in its input, and cannot after "
                f"{_name(stages[core_length + i - 1])}: put it right after the noise, or pass noise_stddev yourself."
            )
    post = [optax.with_extra_args_support(t) for t in rest]

    def init_fn(params):
        wide = trees.upcast(params)
        return core_init(params) + tuple(t.init(wide) for t in post)

    def run(updates, state, params=None, **extra_args):
        updates, core_state, noise_stddev = core_run(updates, state[:core_length], params, extra_args)
        wide = None if params is None else trees.upcast(params)
        post_state = []
        for t, s in zip(post, state[core_length:], strict=True):
            # To this stage alone: an optax.chain would hand it on to parts that see other noise.
            known = {"noise_stddev": noise_stddev} if isinstance(t, NoiseAware) and noise_stddev is not None else {}
            updates, s = t.update(updates, s, wide, **extra_args, **known)
            noise_stddev = None
            post_state.append(s)
        return updates, (*core_state, *post_state), noise_stddev

    optimizer = PrivateOptimizer(init_fn, run, privacy, stages, is_chained=is_chained)
    optimizer.noise_unknown = bool(rest)
    return optimizer


def _refuse_sums_of_correlated_noise(stages: Sequence, privacy: Privacy) -> None:
    strategies = [q.strategy for q in privacy.queries if q.strategy is not None and q.strategy.bands > 1]
    for i, t in enumerate(stages):
        part = getattr(getattr(t, "stage", None), "preconditioner", t)
        if strategies and getattr(part, "correct_noise", False):
            raise ValueError(
                f"stage {i} ({_name(t)}) takes the variance of an average out with correct_noise=True, which it works "
                f"out for independent noise; here noise is correlated over steps ({strategies[0].name})."
            )


def _run_nested(core: PrivateOptimizer) -> Callable[..., Any]:
    def run(updates, state, params, extra_args):
        updates, core_state, noise_stddev = core.run(updates, state[0], params, **extra_args)
        return updates, (core_state,), noise_stddev

    return run


def _run_parts(parts: Sequence[_stages.StagedTransformation]) -> Callable[..., Any]:
    """The private part: diagonals, clip, noise, division, release, and what the diagonals learn from it."""

    def run(updates, state, params, extra_args):
        states = list(state)
        diagonals = {}
        updates = promise = as_promise(updates, params)
        noise_stddev = None
        for i, part in enumerate(parts):
            if isinstance(part.stage, _stages.Precondition):
                diagonals[i], states[i] = part.stage.preconditioner.diagonal(states[i], params, **extra_args)
                if diagonals[i].offset is not None and any(d.release is not None for d in diagonals.values()):
                    raise ValueError(
                        f"stage {i} (precondition) adds an offset in units that an earlier diagonal undoes after the "
                        "noise; put the one that is undone last."
                    )
                updates = apply_diagonal(updates, diagonals[i])
                continue
            if isinstance(part.stage, _stages.Noise):
                noise_stddev = part.stage.stddev_in(states[i])
                if promise.latest.remainder is not None:
                    updates = sums.Sum(updates, promise.latest.remainder)
            if isinstance(part.stage, _stages.Normalize):
                noise_stddev = noise_stddev / part.stage.divisor
            updates, states[i] = part.update(updates, states[i], params, **extra_args)

        for diagonal in diagonals.values():
            if diagonal.release is not None:
                release = trees.broadcast_prefix(diagonal.release, updates, "release")
                updates = jax.tree.map(lambda u, r: u * jnp.asarray(r, u.dtype), updates, release)
                noise_stddev = _times(noise_stddev, release)
        for i in diagonals:
            states[i] = parts[i].stage.preconditioner.observe(states[i], updates, noise_stddev)
        return updates, tuple(states), noise_stddev

    return run


def _times(noise_stddev: Any, release: Any) -> Any:
    """Noise of one standard deviation a leaf (or one for all) after multiplication by ``release``."""
    if jax.tree.structure(noise_stddev) == jax.tree.structure(release):
        return jax.tree.map(lambda s, r: s * jnp.abs(r), noise_stddev, release)
    return jax.tree.map(lambda r: noise_stddev * jnp.abs(r), release)


def _name(transformation: Any) -> str:
    if isinstance(transformation, _stages.StagedTransformation):
        return transformation.stage.name
    if isinstance(transformation, PrivateOptimizer):
        return "private optimizer"
    name = name_of(transformation.update)
    return f"another {name}" if name in PRIVATE_STAGES else name  # a namesake is no stage of dpopt


def _refuse_private_parts(rest: Sequence, first_position: int) -> None:
    for i, t in enumerate(rest):
        if isinstance(t, _stages.StagedTransformation | PrivateOptimizer):
            raise ValueError(
                f"stage {first_position + i} ({_name(t)}) follows an optimizer that has clipped and noised already: "
                "only post-processing may come after it."
            )
