"""A group clip whose clip norms are known only at run time and have joint norm 1 (for `dpopt.adaptive`)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dpopt.common.types import PyTree
from dpopt.engines import clips, stacked
from dpopt.engines.norms import safe_norm, shrink_to


@clips.takes_rows
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class UnitClip:
    """Like `dpopt.GroupClip`, or `dpopt.LayerwiseClip` for the layers of a scan."""

    l2_clip_norms: PyTree  # arrays: (), or (layers,) for a parameter whose first axis indexes layers

    sensitivity = 1.0

    def coefficients(self, leaf_norms: PyTree) -> PyTree:
        def of_group(c: jax.Array, group: PyTree) -> PyTree:
            shrink = shrink_to(per_row(c), group_norms(c, group))
            return jax.tree.map(lambda _: shrink, group)

        of_groups = [of_group(c, group) for c, group in groups(self.l2_clip_norms, leaf_norms)]
        return jax.tree.unflatten(jax.tree.structure(self.l2_clip_norms), of_groups)

    def layer_axes(self, params: PyTree) -> list[int]:
        """How many leading axes of each parameter index layers: 1 or 0."""
        axes = []
        for c, group in groups(self.l2_clip_norms, params):
            shapes = [jnp.shape(x) for x in jax.tree.leaves(group)]
            if c.ndim and (len(shapes) > 1 or shapes[0][:1] != c.shape):
                raise ValueError(
                    f"an initial clip norm of shape {c.shape} is for one parameter whose first axis indexes {len(c)} "
                    f"layers; got parameters of shapes {shapes}."
                )
            axes += [c.ndim] * len(shapes)
        return axes

    def own_clip_norms(self, params: PyTree) -> list[jax.Array | None]:
        """C_k of each parameter that is a group by itself and so can be clipped within the backward pass, else None."""
        norms: list[jax.Array | None] = []
        for c, group in groups(self.l2_clip_norms, params):
            size = len(jax.tree.leaves(group))
            norms += [c if size == 1 else None] * size
        return norms


def factors(clip_norms: PyTree) -> tuple[jax.Array, UnitClip]:
    """The joint norm of all clip norms, rounded up, and the clip at the clip norms divided by it."""
    flat = jnp.concatenate([c.ravel() for c in jax.tree.leaves(clip_norms)])
    # A sum of m squares is rounded m times; a single number is its own norm.
    total = flat[0] if flat.size == 1 else safe_norm(flat, axis=0) * (1 + 2.0**-22 * flat.size)
    return total, UnitClip(jax.tree.map(lambda c: c / total, clip_norms))


def groups(clip_norms: PyTree, tree: PyTree) -> list[tuple[jax.Array, PyTree]]:
    """Each clip norm with the part of ``tree`` that it is for."""
    entries, structure = jax.tree.flatten(clip_norms)
    try:
        return list(zip(entries, structure.flatten_up_to(tree), strict=True))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            "the initial clip norms must be a number, or a prefix of the parameters' tree; got "
            f"{structure} for parameters {jax.tree.structure(tree)}."
        ) from error


def per_row(c: jax.Array) -> jax.Array:
    """A clip norm, or the clip norms of layers, broadcastable against rows."""
    return c[None] if c.ndim else c


def group_norms(c: jax.Array, group: PyTree) -> jax.Array:
    """Norms of a group's gradients: ``(B,)``, or ``(B, layers)``."""
    return jax.tree.leaves(group)[0] if c.ndim else stacked.global_norms(group)
