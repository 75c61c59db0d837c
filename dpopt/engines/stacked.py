"""Gradients that exist: how each row is scaled down to its norm, and what the rows add up to.

This is the definition of correct, which every other way to a clipped sum is compared with.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp

from dpopt.common import trees
from dpopt.engines import sums
from dpopt.engines.norms import safe_norm
from dpopt.engines.once import if_any


class ClipFunction(Protocol):
    """How hard each example is scaled down, given its gradient's norms (see `dpopt.clipping`)."""

    @property
    def sensitivity(self) -> Any:
        """L2 distance by which adding or removing one example can move the clipped sum."""
        ...

    def coefficients(self, leaf_norms: Any) -> Any:
        """Maps the norms of one example's gradient (a pytree of ``()``, one a parameter) to coefficients alike.

        `row_coefficients` maps it over examples: it never sees two of them."""
        ...


_takes_rows: set[type] = set()
_ClipClass = TypeVar("_ClipClass", bound=type)


def takes_rows(clip_class: _ClipClass) -> _ClipClass:
    """Declares that a clip given norms ``(B,)`` treats each row as if it were alone. Subclasses inherit nothing."""
    _takes_rows.add(clip_class)
    return clip_class


def row_coefficients(clip: ClipFunction, leaf_norms: Any) -> Any:
    """The clip's coefficients for norms ``(B,)``, each from its own row alone.

    A clip that looked at the whole batch (at a median, say) would let one example move the weights of all others.
    """
    # A gradient that is not finite counts as infinite: it contributes zero, and so does what is clipped with it.
    leaf_norms = trees.at_once(lambda n: jnp.where(jnp.isfinite(n), n, jnp.inf), leaf_norms)
    if type(clip) in _takes_rows:
        return clip.coefficients(leaf_norms)

    def of_one(norms):
        coefficients = jax.tree.map(jnp.asarray, clip.coefficients(norms))
        if any(c.shape for c in jax.tree.leaves(coefficients)):
            shapes = [c.shape for c in jax.tree.leaves(coefficients)]
            raise ValueError(
                f"{type(clip).__name__}.coefficients is given the norms of one example, a scalar for each parameter, "
                f"and must return as many scalars; got shapes {shapes}."
            )
        return coefficients

    return jax.tree.map(lambda c, n: jnp.where(jnp.isfinite(n), c, 0), jax.vmap(of_one)(leaf_norms), leaf_norms)


def layer_axes(clip: ClipFunction, params: Any) -> list[int]:
    """How many leading axes of each parameter number layers, whose norms the clip takes one by one."""
    axes = getattr(clip, "layer_axes", None)
    return axes(params) if axes else [0] * len(jax.tree.leaves(params))


def own_clip_norms(clip: ClipFunction, params: Any) -> list:
    """What each parameter is scaled down to if its coefficient depends on its own norm alone, else None.

    Only the class that says so itself is believed: a subclass may have coefficients of its own.
    """
    if "own_clip_norms" in vars(type(clip)):
        return cast(Any, clip).own_clip_norms(params)
    return [None] * len(jax.tree.leaves(params))


class EngineResult(NamedTuple):
    """What an engine returns for one microbatch of B examples."""

    sum: Any  # like params, at least float32
    leaf_norms: Any  # like params, each (B,)
    losses: jax.Array | None  # (B,)
    aux: Any  # (B, ...)
    is_finite: jax.Array  # (B,) bool
    remainder: Any = None  # what rounding the sum has lost, like params; None: little enough


def finite_rows(grads: Any) -> jax.Array:
    """``(B,)``: which examples' gradients, leaves ``(B, ...)``, are finite."""
    finite = [_finite(g) for g in jax.tree.leaves(grads)]
    return jnp.all(jnp.stack(finite), axis=0)


def _finite(grad: jax.Array, axes: int = 1) -> jax.Array:
    """Of one parameter, along its first ``axes`` axes."""
    return jnp.isfinite(grad.reshape(*grad.shape[:axes], -1)).all(-1)


def global_norms(leaf_norms: Any) -> jax.Array:
    """Combines the norms of the leaves, ``(B,)`` or ``(B, layers)`` each, into those of whole gradients, ``(B,)``."""
    norms = [safe_norm(n, axis=1) if n.ndim > 1 else n for n in jax.tree.leaves(leaf_norms)]
    return safe_norm(jnp.stack(norms), axis=0)


def clip_stacked(grads: Any, mask: jax.Array, scale: Any, offset: Any, clip: ClipFunction) -> EngineResult:
    """Clips and adds gradients that exist: ``sum_i c_i (S g_i + o)`` over real, finite examples.

    ``grads`` has leaves ``(B, ...)``. What is not finite is dropped by selection, since ``0 * nan`` is not 0.
    """
    axes = [1 + k for k in layer_axes(clip, jax.tree.map(lambda g: g[0], grads))]
    grads, tree = jax.tree.flatten(affine(trees.upcast(grads), scale, offset))
    grads, fine = _settled(grads, axes)
    norms = [safe_norm(g.reshape(*g.shape[:k], -1), axis=k) for g, k in zip(grads, axes, strict=True)]
    norms = [jnp.where(f, n, jnp.nan) for f, n in zip(fine, norms, strict=True)]
    leaf_norms = tree.unflatten(norms)
    coefficients = tree.flatten_up_to(row_coefficients(clip, leaf_norms))
    coefficients = [jnp.where(trees.per_example(mask, c), c, 0) for c in coefficients]

    def weighted_sum(rows):
        return [jnp.sum(trees.per_example(c, g) * g, axis=0) for g, c in zip(*rows, strict=True)]

    total = sums.over_examples(lambda group: sums.in_blocks(weighted_sum, group), (grads, coefficients))
    rest = None if total.remainder is None else tree.unflatten(total.remainder)
    return EngineResult(
        tree.unflatten(total.value), leaf_norms, None, None, jnp.isfinite(global_norms(leaf_norms)), rest
    )


def _settled(grads: list[jax.Array], axes: list[int]) -> tuple[list[jax.Array], list[jax.Array]]:
    """The gradients with zeros where they are not finite, and where they are, along each one's first ``axes`` axes.

    Computed here and nowhere else, which `if_any` sees to: what is added up has to be what was clipped.
    """
    fine = [_finite(g, k) for g, k in zip(grads, axes, strict=True)]
    bad = ~jnp.stack([jnp.all(f) for f in fine])

    def without_bad_ones(grads: list[jax.Array]) -> list[jax.Array]:
        return [jnp.where(trees.per_example(f, g), g, 0) for f, g in zip(fine, grads, strict=True)]

    return if_any(bad, without_bad_ones, grads), fine


def affine(grads: Any, scale: Any, offset: Any) -> Any:
    """``S g_i + o`` in the gradients' own dtype; ``S`` and ``o`` have no batch axis."""

    def like(g, entry):
        entry = jnp.asarray(entry, g.dtype)
        return entry[None] if entry.ndim else entry

    if scale is not None:
        grads = jax.tree.map(lambda g, s: g * like(g, s), grads, scale)
    if offset is not None:
        grads = jax.tree.map(lambda g, o: g + like(g, o), grads, offset)
    return grads


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Gradients that exist: a pytree with a leading batch axis, as ``jax.vmap(jax.grad(loss))`` gives."""

    grads: Any
    batch_size: int
    unit: str = "example"

    @property
    def like(self) -> Any:
        return jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), self.grads)

    def gradients(self) -> Any:
        return self.grads

    def run(self, mask, scale, offset, clip) -> EngineResult:
        return clip_stacked(self.grads, mask, scale, offset, clip)
