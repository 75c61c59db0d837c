"""Diagonals applied to every per-example gradient before the clip.

A preconditioner (`Preconditioner`) is a state and pure functions: what gradients are multiplied by at this step
(`Diagonal`), and the state after the private mean of the step. It never receives a raw gradient. The diagonal therefore
depends only on public data, side information or noised values, and the clip after it bounds what one example adds.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from dpopt import _stages
from dpopt.clipping import as_promise
from dpopt.common import trees, validate
from dpopt.common.types import PyTree
from dpopt.gradients import PerExampleGrads


class Diagonal(NamedTuple):
    """What is done to gradients at one step. A field is a pytree, a prefix of the parameters, or None for nothing."""

    scale: PyTree = None  # S: every per-example gradient becomes S * g_i ...
    offset: PyTree = None  # ... + o, and is then clipped
    release: PyTree = None  # multiplies the noisy mean: undoes S, or restores the units of a clip norm folded into S


class Preconditioner(Protocol):
    """A source of diagonals. A subclass without its own `init` or `observe` keeps nothing between steps."""

    needs_feedback: bool = False  # whether it uses `observe` or `Diagonal.release`, which only `dpopt.chain` supports

    def init(self, params: optax.Params) -> PyTree:
        """The state before the first step: arrays only, of fixed shapes."""
        del params
        return optax.EmptyState()

    def diagonal(self, state: PyTree, params: optax.Params | None, **extra_args: Any) -> tuple[Diagonal, PyTree]:
        """This step's diagonal and the state. Reads only the state and public values (``public_grads``)."""
        ...

    def observe(self, state: PyTree, private_mean: optax.Updates, noise_stddev: PyTree) -> PyTree:
        """The state after this step's private mean gradient. ``noise_stddev`` is the standard deviation of its noise:
        one number, or one per parameter or coordinate if a diagonal was undone."""
        del private_mean, noise_stddev
        return state


@dataclasses.dataclass(frozen=True, eq=False)
class SideInformation(Preconditioner):
    """A fixed diagonal that multiplies every per-example gradient (AdaDPS with side information, A = 1 / scale).

    Args:
        scale: positive numbers: a pytree with the parameters' structure, or a prefix of it, whose leaves broadcast to
            the parameters' shapes. For token frequencies see `scale_from_frequencies`.

    Raises:
        ValueError, TypeError: if an entry is zero, negative, NaN, infinite or not a number; in ``update``, if the tree
            or a shape does not fit the parameters.

    *Privacy*: reads only ``scale``, which must be public. Statistics of the private training set are not public:
    release them by a private mechanism of their own and add its event, or count them elsewhere.

    Reference: Li, Zaheer, Reddi and Smith (2022), Private Adaptive Optimization with Side Information, Algorithm 1.

    >>> side_information({"w": np.array([[0.5], [2.0]]), "b": 1.0}).needs_feedback
    False
    """

    scale: PyTree

    def __post_init__(self):
        entries = jax.tree_util.tree_leaves_with_path(self.scale)
        if not entries:
            raise ValueError("scale has no entries; give a number, an array, or a pytree of them.")
        for path, entry in entries:
            where = f"scale{jax.tree_util.keystr(path)}"
            if isinstance(entry, Tracer):
                continue
            values = np.asarray(entry)
            if not (np.issubdtype(values.dtype, np.number) or "float" in str(values.dtype)):
                raise TypeError(f"{where} must hold real numbers; got dtype {values.dtype}.")
            values = values.astype(np.float64)
            if not (np.isfinite(values).all() and (values > 0).all()):
                bad = values[~(np.isfinite(values) & (values > 0))].flat[0]
                raise ValueError(
                    f"{where} must be positive and finite everywhere; it holds {bad}. To freeze a coordinate, keep it "
                    "outside params; for a frequency of 0, cap 1 / frequency."
                )

    def diagonal(
        self, state: optax.EmptyState, params: optax.Params | None, **extra_args: Any
    ) -> tuple[Diagonal, optax.EmptyState]:
        del extra_args
        if params is None:
            return Diagonal(scale=self.scale), state

        def like_moments(entry: ArrayLike, p: ArrayLike) -> jax.Array:  # a float64 table must not widen the gradients
            return jnp.asarray(entry, trees.accumulator_dtype(jnp.result_type(p)))

        scale = trees.broadcast_prefix(self.scale, params, "scale")
        return Diagonal(scale=jax.tree.map(like_moments, scale, params)), state


side_information = SideInformation
"""Alias of `SideInformation`: the name to use."""


class ScheduledClipNormState(NamedTuple):
    """State of `scheduled_clip_norm`."""

    count: jax.Array  # (), int32: steps so far  # pyright: ignore[reportIncompatibleMethodOverride]


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledClipNorm:
    r"""Makes the clip norm follow a schedule: :math:`C(t) = r(t)\, C`, with the noise in proportion.

    The chain clips at the constant C. Gradients are divided by r(t) before the clip and the noisy mean is multiplied by
    r(t) after it, which is exactly clipping at :math:`r(t) C` with noise :math:`\sigma r(t) C`.

    Args:
        relative_norm: r, a schedule ``step -> number`` of positive numbers that are fixed in advance, such as
            ``optax.linear_schedule(1.0, 0.1, 1000)``. Put this after all other diagonals.

    Raises:
        ValueError, TypeError: if it is not a schedule, or does not start at a positive number.

    *Privacy*: the noise multiplier, and so the event of a step, does not change. The schedule must not depend on
    private data.

    >>> scheduled_clip_norm(optax.linear_schedule(1.0, 0.5, 10)).needs_feedback
    True
    """

    relative_norm: Callable[[Any], Any]

    needs_feedback = True

    def __post_init__(self):
        if not callable(self.relative_norm):
            raise TypeError(
                f"relative_norm must be a schedule, step -> C(step) / C; got {self.relative_norm!r}. Pass a constant "
                "clip norm to clip_and_sum."
            )
        validate.positive(**{"relative_norm(0)": self.relative_norm(0)})

    def init(self, params: optax.Params) -> ScheduledClipNormState:
        del params
        return ScheduledClipNormState(jnp.zeros([], jnp.int32))

    def diagonal(
        self, state: ScheduledClipNormState, params: optax.Params | None, **extra_args: Any
    ) -> tuple[Diagonal, ScheduledClipNormState]:
        del params, extra_args
        ratio = self.relative_norm(state.count)
        # clip(g / r, C) * r = clip(g, r C), and the noise sigma C becomes sigma r C.
        return Diagonal(scale=1 / ratio, release=ratio), state

    def observe(
        self, state: ScheduledClipNormState, private_mean: optax.Updates, noise_stddev: PyTree
    ) -> ScheduledClipNormState:
        del private_mean, noise_stddev
        return ScheduledClipNormState(trees.next_count(state.count))


scheduled_clip_norm = ScheduledClipNorm
"""Alias of `ScheduledClipNorm`: the name to use."""


def precondition(preconditioner: Preconditioner) -> optax.GradientTransformationExtraArgs:
    """Applies a preconditioner's diagonal to per-example gradients; stands before `clip_and_sum`.

    Args:
        preconditioner: `side_information`, `public_moments`, `delayed_moments`, `last_moments`, `scheduled_clip_norm`,
            or another object with the `Preconditioner` methods.

    Returns:
        A transformation from a promise, or ``(B, ...)`` gradients, to a promise.

    Raises:
        TypeError: if ``preconditioner`` lacks a method; ValueError: in ``update`` under plain ``optax.chain``, if the
            preconditioner needs the private mean, which only `dpopt.chain` passes back to it.

    *Privacy*: see `side_information`; the sensitivity is still the clip norm, since the clip comes after.

    >>> import jax.numpy as jnp
    >>> part = precondition(side_information(2.0))
    >>> promise, _ = part.update(jnp.ones((3, 2)), part.init(jnp.zeros(2)), jnp.zeros(2))
    >>> promise.materialize().tolist()[0]
    [2.0, 2.0]
    """
    check_methods(preconditioner)

    def update_fn(updates: PyTree, state: PyTree, params: optax.Params | None = None, **extra_args: Any):
        if getattr(preconditioner, "needs_feedback", True):
            raise ValueError(
                f"{type(preconditioner).__name__} needs the private gradient of each step, and optax.chain cannot pass "
                "it back. Build the optimizer with dpopt.chain(...)."
            )
        diagonal, state = preconditioner.diagonal(state, params, **extra_args)
        return apply_diagonal(as_promise(updates, params), diagonal), state

    stage = _stages.Precondition(preconditioner=preconditioner)
    return _stages.StagedTransformation(preconditioner.init, update_fn, stage)


def check_methods(preconditioner: Preconditioner) -> None:
    """Raises a TypeError unless an object has the methods of `Preconditioner`."""
    for method in ("init", "diagonal", "observe"):
        if not callable(getattr(preconditioner, method, None)):
            raise TypeError(
                f"{preconditioner!r} is not a preconditioner: it has no method {method!r}. Use "
                "dpopt.side_information(scale) for a fixed diagonal."
            )


def apply_diagonal(promise: PerExampleGrads, diagonal: Diagonal) -> PerExampleGrads:
    """The promise of ``S * g_i + o``, for the diagonal of a preconditioner."""
    if diagonal.scale is not None:
        promise = promise._scaled(diagonal.scale, by_hand=False)  # pyright: ignore[reportPrivateUsage] not for users
    if diagonal.offset is not None:
        promise = promise._shifted(diagonal.offset, by_hand=False)  # pyright: ignore[reportPrivateUsage] not for users
    return promise


def precondition_by_side_information(scale: PyTree) -> optax.GradientTransformationExtraArgs:
    """Multiplies every per-example gradient by a fixed, public diagonal: ``precondition(side_information(scale))``.

    Args:
        scale: see `side_information`.

    Raises:
        ValueError, TypeError: see `side_information`.

    *Privacy*: see `side_information`.

    >>> import jax.numpy as jnp
    >>> part = precondition_by_side_information({"w": 0.5})
    >>> promise, _ = part.update({"w": jnp.ones((1, 2))}, part.init({"w": jnp.zeros(2)}), {"w": jnp.zeros(2)})
    >>> promise.materialize()["w"].tolist()
    [[0.5, 0.5]]
    """
    return precondition(side_information(scale))
