"""What a clip function is, and how engines call it: one example at a time, and layer by layer where it says so."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpopt.common import trees
from dpopt.common.types import PyTree


@runtime_checkable
class ClipFunction(Protocol):
    """By what factor each example is scaled down, given the norms of its gradient (see `dpopt.clipping`)."""

    @property
    def sensitivity(self) -> Any:
        """The L2 distance by which adding or removing one example can move the clipped sum."""
        ...

    def coefficients(self, leaf_norms: Any) -> Any:
        """Maps the norms of one example's gradient, a pytree with one scalar per parameter, to coefficients like them.

        `row_coefficients` maps it over examples: it is never given two of them."""
        ...


_takes_rows: set[type] = set()
_ClipClass = TypeVar("_ClipClass", bound=type)


def takes_rows(clip_class: _ClipClass) -> _ClipClass:
    """Declares that a clip given norms ``(B,)`` treats each row independently. Subclasses do not inherit this."""
    _takes_rows.add(clip_class)
    return clip_class


def row_coefficients(clip: ClipFunction, leaf_norms: PyTree) -> PyTree:
    """The clip's coefficients for norms ``(B,)``, each computed from its own row alone.

    With a clip that reads the whole batch (a median, say), one example could move the weights of all others.
    """
    # The norm of a gradient that is not finite counts as infinite: it and whatever is clipped with it contribute zero.
    leaf_norms = trees.at_once(lambda n: jnp.where(jnp.isfinite(n), n, jnp.inf), leaf_norms)
    if type(clip) in _takes_rows:
        return clip.coefficients(leaf_norms)

    def of_one(norms: PyTree) -> PyTree:
        coefficients = jax.tree.map(jnp.asarray, clip.coefficients(norms))
        if any(c.shape for c in jax.tree.leaves(coefficients)):
            shapes = [c.shape for c in jax.tree.leaves(coefficients)]
            raise ValueError(
                f"{type(clip).__name__}.coefficients is given the norms of one example, one scalar per parameter, and "
                f"must return one scalar per parameter; got shapes {shapes}."
            )
        return coefficients

    return jax.tree.map(lambda c, n: jnp.where(jnp.isfinite(n), c, 0), jax.vmap(of_one)(leaf_norms), leaf_norms)


def layer_axes(clip: ClipFunction, params: PyTree) -> list[int]:
    """How many leading axes of each parameter index layers that the clip treats separately."""
    axes = getattr(clip, "layer_axes", None)
    return axes(params) if axes else [0] * len(jax.tree.leaves(params))


def own_clip_norms(clip: ClipFunction, params: PyTree) -> list[ArrayLike | None]:
    """The clip norm of each parameter whose coefficient depends on its own norm alone, else None.

    Only a class that defines ``own_clip_norms`` itself counts: a subclass may have other coefficients.
    """
    if "own_clip_norms" in vars(type(clip)):
        return cast(Any, clip).own_clip_norms(params)
    return [None] * len(jax.tree.leaves(params))


def arrays_of(clip: ClipFunction) -> ClipFunction | None:
    """A clip that is a pytree, whose arrays may have explicit axes, too; None for any other."""
    return None if jax.tree_util.all_leaves([clip]) else clip
