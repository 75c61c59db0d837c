"""Clipping: what bounds the influence of one example.

`clip_and_sum` is the Optax transformation that applies a clip function (`dpopt.clip_functions`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpopt import _stages
from dpopt.clip_functions import FlatClip as FlatClip
from dpopt.clip_functions import GroupClip as GroupClip
from dpopt.clip_functions import LayerwiseClip as LayerwiseClip
from dpopt.clip_functions import NormalizedClip as NormalizedClip
from dpopt.common.lazy import flow
from dpopt.engines import stacked
from dpopt.gradients import PerExampleGrads, stacked_grads


def is_adaptive(l2_clip_norm: Any) -> bool:
    """Whether a clip norm moves from step to step by what a query of its own tells (`dpopt.adaptive`)."""
    return hasattr(l2_clip_norm, "private_mean")


def as_clip_function(l2_clip_norm: Any) -> stacked.ClipFunction:
    """A clip function as it is; a number C as ``FlatClip(C)``.

    Raises:
        TypeError: for a clip norm that is adaptive (`dpopt.adaptive`).
    """
    if is_adaptive(l2_clip_norm):
        raise TypeError(
            "an adaptive clip norm asks a query of its own at every step, which this cannot ask. Give it to "
            "dpopt.privatize, Builder.clip or an optimizer by name that has one clip norm for all steps."
        )
    return l2_clip_norm if hasattr(l2_clip_norm, "coefficients") else FlatClip(l2_clip_norm)


def clip_and_sum(l2_clip_norm: Any) -> optax.GradientTransformationExtraArgs:
    """Clips every example's gradient and adds them up.

    Args:
        l2_clip_norm: the clip norm C, or a clip function (`FlatClip`, `GroupClip`, `NormalizedClip`).

    Returns:
        A transformation whose input is a promise made by `per_example_grads`, or a pytree with leaves ``(B, ...)``, and
        whose output is the sum over the batch, shaped like the parameters, at least float32. Its state is empty.
        Rows are told from an ordinary gradient by the parameters: ``update`` needs them, unless it gets a promise.
        Examples that are padding, or whose gradient holds NaN or Inf, contribute zero.

    Raises:
        ValueError, TypeError: if C is not positive; in ``update``, if the input has no batch axis, or parameters
            are missing.

    *Privacy*: the sum's L2 sensitivity to adding or removing one example is the clip function's ``sensitivity`` (C), to
    replacing one twice that, and 6.0e-4 of it more by rounding, which events pay for. In `dpopt.chain` the noise also
    gets what float32 cannot hold of a sum of B > 258 rows; in ``optax.chain`` it does not, and rounding may add
    2^-23 B C. Not private until noise is added.

    >>> clip = clip_and_sum(1.0)
    >>> params = jnp.zeros(2)
    >>> total, _ = clip.update(jnp.array([[3.0, 4.0], [0.0, 0.5]]), clip.init(params), params)
    >>> [round(x, 3) for x in total.tolist()]
    [0.6, 1.3]
    """
    clip = as_clip_function(l2_clip_norm)

    def init_fn(params):
        _refuse_masked(params)
        return optax.EmptyState()

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        grads = as_promise(updates, params)
        _refuse_changed(grads)
        return flow.bounded(grads.clipped_sum(clip).sum), state

    return _stages.StagedTransformation(init_fn, update_fn, _stages.Clip(sensitivity=clip.sensitivity))


def as_promise(updates: Any, params: Any) -> PerExampleGrads:
    """A promise as it is; a pytree of ``(B, ...)`` leaves wrapped as one, after checking it against ``params``.

    Raises:
        ValueError: if a leaf is not shaped ``(B, *parameter.shape)``, as when gradients were summed already; if there
            are no parameters to tell by.
    """
    if isinstance(updates, PerExampleGrads):
        return updates
    _refuse_masked(updates)
    if params is None:
        raise ValueError(
            "parameters are missing: call update(gradients, state, params). Without them the rows of an ordinary mean "
            "gradient would pass for examples. (A promise of dpopt.per_example_grads brings its own.)"
        )
    if jax.tree.structure(updates) != jax.tree.structure(params):
        raise ValueError(
            "per-example gradients must have the parameters' tree structure; got "
            f"{jax.tree.structure(updates)} for parameters {jax.tree.structure(params)}."
        )

    def check(path, g, p):
        name = jax.tree_util.keystr(path) or "(the only one)"
        if jnp.ndim(g) != jnp.ndim(p) + 1 or jnp.shape(g)[1:] != jnp.shape(p):
            raise ValueError(
                f"clip_and_sum needs per-example gradients, shaped (batch, *parameter); leaf "
                f"{name} has shape {jnp.shape(g)} for a parameter of shape {jnp.shape(p)}. "
                "Gradients that were averaged or clipped before cannot be clipped per example any more: pass "
                "dpopt.per_example_grads(loss_fn)(params, batch, mask=mask), and clip once."
            )

    jax.tree_util.tree_map_with_path(check, updates, params)
    return stacked_grads(updates, mask=None)


def _refuse_masked(tree: Any) -> None:
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    if any(map(is_masked, jax.tree.leaves(tree, is_leaf=is_masked))):
        raise ValueError(
            "a part of the parameters is masked out (optax.masked, partition, multi_transform), so its gradients would "
            "go past the clip and the noise. To train a part of a model, leave the rest out of params and close over "
            "it in the loss; to treat parts differently, do so after the noise or by dpopt.GroupClip."
        )


def _refuse_changed(grads: PerExampleGrads) -> None:
    """The clip bounds what an example adds only if a row, diagonal included, depends on no other example."""
    if grads._is_mapped_by_hand:
        raise ValueError(
            "these per-example gradients were scaled or shifted on their way to the clip by something that dpopt does "
            "not know. If it looks at the batch (a median norm, a mean), one example moves all others, and no clip "
            "bounds that. Declare a diagonal of public values, dpopt.precondition(dpopt.side_information(scale)), or "
            "of values that were noised, such as dpopt.last_moments."
        )
    if flow.is_inspecting() and not getattr(grads._source, "is_shown", False):
        raise ValueError(
            "clip_and_sum got other gradients than the caller's: something before it made rows of its own, and one "
            "example may be in many of them. Nothing but dpopt.precondition may stand before the clip."
        )
