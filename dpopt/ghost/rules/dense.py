"""The rule of matrix products."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dpopt.ghost.primitives import DOT
from dpopt.ghost.rules.base import Factors, Use, arranger, axes_size, rule


@rule(DOT)
def dot_general(use: Use) -> Factors | None:
    """Dense layers of any rank: contracted axes are ``a``, free axes ``p``, batch axes ``N``."""
    contracting, batching = use.params["dimension_numbers"]
    ours, theirs = use.position, use.input_position
    w_contract, x_contract = tuple(contracting[ours]), tuple(contracting[theirs])
    w_batch, x_batch = tuple(batching[ours]), tuple(batching[theirs])
    w_free = tuple(i for i in range(len(use.weight)) if i not in w_contract + w_batch)
    x_free = tuple(i for i in range(len(use.input)) if i not in x_contract + x_batch)
    groups, positions = axes_size(use.weight, w_batch), axes_size(use.input, x_free)
    a, p = axes_size(use.weight, w_contract), axes_size(use.weight, w_free)

    def split(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        left = jnp.transpose(x, x_batch + x_free + x_contract).reshape(groups, positions, a)
        # The output has the batch axes, then the free axes of the left operand, then those of the right one.
        weight_last = ours == 1
        right = y.reshape(groups, positions, p) if weight_last else y.reshape(groups, p, positions).swapaxes(1, 2)
        return left, right

    fold, unfold = arranger(use.weight, w_batch, w_contract, w_free)
    axes = None if w_batch else (w_contract, w_free)
    return Factors((1, groups, a, p), positions, split, fold, unfold, axes=axes, filters=(*w_batch, *w_free))
