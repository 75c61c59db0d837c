"""The source of gradients that an inspection traces an optimizer with: no model, no data (`dpopt.inspection`)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpopt.common import trees
from dpopt.common.lazy import flow
from dpopt.common.types import PyTree
from dpopt.engines.clips import ClipFunction, layer_axes
from dpopt.engines.stacked import EngineResult

ROWS = 2  # nothing may depend on it


class StandIn:
    """Takes the place of the caller's source, and marks all that it returns as private."""

    batch_size = ROWS

    def __init__(self, like: PyTree, unit: str, mask: jax.Array):
        self.like = like
        self.unit = unit
        self.mask = mask

    def of_examples(self, function: Callable[..., PyTree], params: PyTree) -> StandIn:
        del function  # of private examples: its gradients are as private
        flow.public(params, "the parameters of a second query")
        return StandIn(params, self.unit, self.mask)

    def gradients(self) -> PyTree:
        rows = jax.tree.map(lambda x: jnp.zeros((ROWS, *x.shape), x.dtype), trees.zeros(self.like))
        return flow.private(rows, "per-example gradients")

    def run(self, mask: jax.Array, scale: PyTree, offset: PyTree, clip: ClipFunction) -> EngineResult:
        if mask is not self.mask:
            raise ValueError("another mask than the caller's reached the clip.")
        flow.public((scale, offset), "a diagonal before the clip")
        flow.public(clip.sensitivity, "the clip norm")
        total = flow.private(trees.zeros(self.like), "a sum of per-example gradients")
        per_row = jnp.zeros((ROWS,), jnp.float32)
        axes = jax.tree.unflatten(jax.tree.structure(self.like), layer_axes(clip, self.like))
        norms = jax.tree.map(lambda x, n: jnp.zeros((ROWS, *jnp.shape(x)[:n])), self.like, axes)
        norms, losses, is_finite = flow.private((norms, per_row, per_row == 0), "per-example norms and losses")
        return EngineResult(total, norms, losses, None, is_finite)
