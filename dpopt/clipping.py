"""The clip, which bounds the influence of one example: `clip_and_sum` applies a function of `dpopt.clip_functions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from dpopt import _stages
from dpopt.clip_functions import FlatClip as FlatClip
from dpopt.clip_functions import GroupClip as GroupClip
from dpopt.clip_functions import LayerwiseClip as LayerwiseClip
from dpopt.clip_functions import NormalizedClip as NormalizedClip
from dpopt.common.lazy import flow
from dpopt.common.types import PyTree, ScalarOrSchedule
from dpopt.engines import clips
from dpopt.engines.stand_in import StandIn
from dpopt.gradients import PerExampleGrads, stacked_grads

if TYPE_CHECKING:
    from dpopt.chain import PrivateOptimizer
    from dpopt.correlated.strategy import Strategy
    from dpopt.preconditioners.base import Preconditioner


@runtime_checkable
class AdaptiveClip(Protocol):
    """A clip that spends a query of its own at every step, such as `dpopt.adaptive.QuantileClip`."""

    @property
    def sensitivity(self) -> Any:
        """The L2 distance by which adding or removing one example can move the clipped sum at the first step."""
        ...

    def private_mean(
        self,
        *,
        noise_multiplier: ScalarOrSchedule,
        expected_batch_size: float | jax.Array,
        key: jax.Array,
        preconditioner: tuple[Preconditioner, ...] = (),
        noise: Strategy | None = None,
    ) -> PrivateOptimizer:
        """The private mean gradient under this clip, both queries included."""
        ...


FixedClip: TypeAlias = float | jax.Array | clips.ClipFunction  # C, or a clip function


def as_clip_function(l2_clip_norm: FixedClip | AdaptiveClip) -> clips.ClipFunction:
    """A clip function unchanged; a number C as ``FlatClip(C)``. Raises a TypeError for an adaptive clip norm."""
    if isinstance(l2_clip_norm, AdaptiveClip):
        raise TypeError(
            "an adaptive clip norm spends a query of its own at every step, which is not supported here. Pass it to "
            "dpopt.privatize, Builder.clip or a named optimizer that has one clip norm for all steps."
        )
    return l2_clip_norm if isinstance(l2_clip_norm, clips.ClipFunction) else FlatClip(l2_clip_norm)


def clip_and_sum(l2_clip_norm: FixedClip) -> optax.GradientTransformationExtraArgs:
    """Clips the gradient of every example and adds them up.

    Args:
        l2_clip_norm: the clip norm C, or a clip function (`FlatClip`, `GroupClip`, `LayerwiseClip`, `NormalizedClip`).

    Returns:
        A transformation from a promise made by `per_example_grads`, or a pytree with leaves ``(B, ...)``, to the sum
        over the batch, shaped like the parameters, at least float32. Its state is empty. ``update`` needs the
        parameters, unless it gets a promise: their shapes tell stacked gradients from an ordinary gradient.
        Padding contributes zero, and so do examples whose gradient has NaN or Inf.

    Raises:
        ValueError, TypeError: if C is not positive; in ``update``, if the batch axis or the parameters are missing.

    *Privacy*: the sum's L2 sensitivity to adding or removing one example is the clip function's ``sensitivity`` (C), to
    replacing one twice that, plus 6.0e-4 of it for rounding, which events include. `dpopt.chain` also adds the rounding
    error of a float32 sum of B > 258 rows to the noise; ``optax.chain`` does not, and rounding may add 2^-23 B C. Not
    private until noise is added.

    >>> clip = clip_and_sum(1.0)
    >>> params = jnp.zeros(2)
    >>> total, _ = clip.update(jnp.array([[3.0, 4.0], [0.0, 0.5]]), clip.init(params), params)
    >>> [round(x, 3) for x in total.tolist()]
    [0.6, 1.3]
    """
    clip = as_clip_function(l2_clip_norm)

    def init_fn(params: optax.Params):
        _refuse_masked(params)
        return optax.EmptyState()

    def update_fn(updates: PyTree, state: PyTree, params: optax.Params | None = None, **extra_args: Any):
        del extra_args
        grads = as_promise(updates, params)
        _refuse_changed(grads)
        return flow.bounded(grads.clipped_sum(clip).sum), state

    return _stages.StagedTransformation(init_fn, update_fn, _stages.Clip(sensitivity=clip.sensitivity))


def as_promise(updates: PerExampleGrads | optax.Updates, params: optax.Params | None) -> PerExampleGrads:
    """A promise unchanged; a pytree of ``(B, *parameter.shape)`` leaves wrapped as one. Otherwise a ValueError."""
    if isinstance(updates, PerExampleGrads):
        return updates
    _refuse_masked(updates)
    if params is None:
        raise ValueError(
            "parameters are missing: call update(gradients, state, params). Without them the rows of an ordinary mean "
            "gradient would be taken for examples. (A promise of dpopt.per_example_grads has its own.)"
        )
    if jax.tree.structure(updates) != jax.tree.structure(params):
        raise ValueError(
            "per-example gradients must have the parameters' tree structure; got "
            f"{jax.tree.structure(updates)} for parameters {jax.tree.structure(params)}."
        )

    def check(path: tuple[Any, ...], g: jax.Array, p: jax.Array) -> None:
        name = jax.tree_util.keystr(path) or "(the only one)"
        if jnp.ndim(g) != jnp.ndim(p) + 1 or jnp.shape(g)[1:] != jnp.shape(p):
            raise ValueError(
                f"clip_and_sum needs per-example gradients, shaped (batch, *parameter); leaf "
                f"{name} has shape {jnp.shape(g)} for a parameter of shape {jnp.shape(p)}. "
                "Gradients that were already averaged or clipped cannot be clipped per example: pass "
                "dpopt.per_example_grads(loss_fn)(params, batch, mask=mask), and clip once."
            )

    jax.tree_util.tree_map_with_path(check, updates, params)
    return stacked_grads(updates, mask=None)


def _refuse_masked(tree: PyTree) -> None:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    if any(isinstance(x, optax.MaskedNode) for x in leaves):
        raise ValueError(
            "a part of the parameters is masked out (optax.masked, partition, multi_transform), so its gradients would "
            "bypass the clip and the noise. To train a part of a model, leave the rest out of params and close over "
            "it in the loss; to treat parts differently, do so after the noise (optax.multi_transform with "
            "set_to_zero(); optax.masked leaves the rest as noisy gradients) or by dpopt.GroupClip."
        )


def _refuse_changed(grads: PerExampleGrads) -> None:
    """Raises unless each row, diagonal included, depends on one example: only then does the clip bound what it adds."""
    if grads._is_mapped_by_hand:  # pyright: ignore[reportPrivateUsage] not for users
        raise ValueError(
            "these per-example gradients were scaled or shifted before the clip, by values of unknown origin. If they "
            "depend on the batch (a median norm, a mean), one example moves all others, and no clip bounds that. "
            "Declare a diagonal of public values, dpopt.precondition(dpopt.side_information(scale)), or of values that "
            "were noised, such as dpopt.last_moments."
        )
    if flow.is_inspecting() and not isinstance(grads._source, StandIn):  # pyright: ignore[reportPrivateUsage]
        raise ValueError(
            "clip_and_sum got gradients that are not the caller's: something before it made its own rows, and one "
            "example may be in many of them. Only dpopt.precondition may come before the clip."
        )
