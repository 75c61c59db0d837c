"""A clip in groups at norms that are known at run time only, but for their own norm, which is 1 (`dpopt.adaptive`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dpopt.engines import stacked
from dpopt.engines.norms import safe_norm, shrink_to


@stacked.takes_rows
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class UnitClip:
    """As `dpopt.GroupClip`, or for layers of a scan `dpopt.LayerwiseClip`."""

    l2_clip_norms: Any  # arrays: (), or (layers,) for a parameter with a layer in each entry of its first axis

    sensitivity = 1.0

    def coefficients(self, leaf_norms: Any) -> Any:
        def of_group(c: jax.Array, group: Any) -> Any:
            shrink = shrink_to(per_row(c), group_norms(c, group))
            return jax.tree.map(lambda _: shrink, group)

        of_groups = [of_group(c, group) for c, group in groups(self.l2_clip_norms, leaf_norms)]
        return jax.tree.unflatten(jax.tree.structure(self.l2_clip_norms), of_groups)

    def layer_axes(self, params: Any) -> list[int]:
        """How many leading axes of each parameter number layers: 1 or 0."""
        axes = []
        for c, group in groups(self.l2_clip_norms, params):
            shapes = [jnp.shape(x) for x in jax.tree.leaves(group)]
            if c.ndim and (len(shapes) > 1 or shapes[0][:1] != c.shape):
                raise ValueError(
                    f"an initial clip norm of shape {c.shape} is for one parameter whose first axis numbers {len(c)} "
                    f"layers; got parameters of shapes {shapes}."
                )
            axes += [c.ndim] * len(shapes)
        return axes

    def own_clip_norms(self, params: Any) -> list:
        """C_k of the parameters that are groups of their own, None for others: these can be clipped as they come."""
        norms = []
        for c, group in groups(self.l2_clip_norms, params):
            size = len(jax.tree.leaves(group))
            norms += [c if size == 1 else None] * size
        return norms


def factors(clip_norms: Any) -> tuple[jax.Array, UnitClip]:
    """The norm of all clip norms, no smaller than it is, and the clip at what they are in units of it."""
    flat = jnp.concatenate([c.ravel() for c in jax.tree.leaves(clip_norms)])
    # A sum of m squares has m roundings; a single number is its own norm.
    total = flat[0] if flat.size == 1 else safe_norm(flat, axis=0) * (1 + 2.0**-22 * flat.size)
    return total, UnitClip(jax.tree.map(lambda c: c / total, clip_norms))


def groups(clip_norms: Any, tree: Any) -> list[tuple[jax.Array, Any]]:
    """Each clip norm with what it is for."""
    entries, structure = jax.tree.flatten(clip_norms)
    try:
        return list(zip(entries, structure.flatten_up_to(tree), strict=True))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            "the initial clip norms must be a number, or a prefix of the parameters' tree; got "
            f"{structure} for parameters {jax.tree.structure(tree)}."
        ) from error


def per_row(c: jax.Array) -> jax.Array:
    """A clip norm, or those of layers, with an axis for the rows."""
    return c[None] if c.ndim else c


def group_norms(c: jax.Array, group: Any) -> jax.Array:
    """Of a group's gradients: ``(B,)``, or ``(B, layers)``."""
    return jax.tree.leaves(group)[0] if c.ndim else stacked.global_norms(group)
