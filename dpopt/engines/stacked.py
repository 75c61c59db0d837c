"""Clipped sums of gradients that have been formed: each row is scaled down to its clip norm, and the rows are added up.

This is the reference that every other way to a clipped sum is compared with.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from dpopt.common import trees
from dpopt.common.types import PyTree
from dpopt.engines import explicit_axes, sums
from dpopt.engines.clips import ClipFunction, arrays_of, layer_axes, row_coefficients
from dpopt.engines.norms import safe_norm, without_denormals
from dpopt.engines.rare_branch import if_any


class EngineResult(NamedTuple):
    """What an engine returns for one microbatch of B examples."""

    sum: PyTree  # like params, at least float32
    leaf_norms: PyTree  # like params, leaves (B,) or (B, layers)
    losses: Float[Array, " batch"] | None
    aux: PyTree  # leaves (B, ...)
    is_finite: Bool[Array, " batch"]
    remainder: PyTree = None  # the rounding error of the sum, like params; None where it is within `rounding.ROUNDING`


def finite_rows(grads: PyTree) -> Bool[Array, " batch"]:
    """Which examples' gradients, leaves ``(B, ...)``, are finite."""
    return jnp.all(jnp.stack([_finite(g) for g in jax.tree.leaves(grads)]), axis=0)


def _finite(grad: Float[Array, "batch ..."], axes: int = 1) -> Bool[Array, " batch *layers"]:
    """Where one parameter's gradients are finite, along their first ``axes`` axes."""
    return jnp.isfinite(_flat(grad, axes)).all(-1)


def _flat(grad: Float[Array, "batch ..."], axes: int) -> Float[Array, "batch *layers entries"]:
    """All but the first ``axes`` axes as one. (Reshape's -1 cannot be found where there are no layers.)"""
    return grad.reshape(*grad.shape[:axes], math.prod(grad.shape[axes:]))


def global_norms(leaf_norms: PyTree) -> Float[Array, "*batch"]:
    """The norms of whole gradients from the norms of their leaves, ``(B,)`` or ``(B, layers)`` each."""
    norms = [safe_norm(n, axis=1) if n.ndim > 1 else n for n in jax.tree.leaves(leaf_norms)]
    return safe_norm(jnp.stack(norms), axis=0) if norms else jnp.zeros(())


def clip_stacked(
    grads: PyTree, mask: Bool[Array, " batch"], scale: PyTree, offset: PyTree, clip: ClipFunction
) -> EngineResult:
    """Clips and adds up formed gradients: ``sum_i c_i (S g_i + o)`` over real, finite examples.

    ``grads`` has leaves ``(B, ...)``. Gradients that are not finite are replaced by zeros, since ``0 * nan`` is not 0.
    """
    axes = [1 + k for k in layer_axes(clip, jax.tree.map(lambda g: g[0], grads))]
    grads, tree = jax.tree.flatten(affine(trees.upcast(grads), scale, offset))
    fine = [_finite(g, k) for g, k in zip(grads, axes, strict=True)]
    bad = ~jnp.stack([jnp.all(f) for f in fine])

    def without_bad_ones(grads: list[jax.Array]) -> list[jax.Array]:
        return [jnp.where(trees.per_example(f, g), g, 0) for f, g in zip(fine, grads, strict=True)]

    # `if_any` keeps XLA from computing them a second time: what is added up has to be exactly what was clipped.
    grads = if_any(bad, without_bad_ones, grads)
    norms = [safe_norm(_flat(g, k), axis=k) for g, k in zip(grads, axes, strict=True)]
    norms = [jnp.where(f, n, jnp.nan) for f, n in zip(fine, norms, strict=True)]
    leaf_norms = tree.unflatten(norms)
    coefficients = tree.flatten_up_to(row_coefficients(clip, leaf_norms))
    # In the gradients' own dtypes: where these differ, a flat clip computes all coefficients in the widest.
    coefficients = [without_denormals(c, g.dtype) for c, g in zip(coefficients, grads, strict=True)]
    coefficients = [jnp.where(trees.per_example(mask, c), c, 0) for c in coefficients]

    def weighted_sum(grads: list[jax.Array], coefficients: list[jax.Array]) -> list[jax.Array]:
        return [sums.weighted(c, g) for g, c in zip(grads, coefficients, strict=True)]

    total = sums.over_examples(functools.partial(sums.in_blocks, weighted_sum), grads, coefficients)
    rest = None if total.remainder is None else tree.unflatten(total.remainder)
    is_finite = jnp.isfinite(global_norms(leaf_norms))
    return EngineResult(tree.unflatten(total.value), leaf_norms, None, None, is_finite, rest)


def affine(grads: PyTree, scale: PyTree, offset: PyTree) -> PyTree:
    """``S g_i + o`` in the gradients' own dtype; ``S`` and ``o`` have no batch axis."""

    def like(g: jax.Array, entry: Any) -> jax.Array:
        entry = jnp.asarray(entry, g.dtype)
        return entry[None] if entry.ndim else entry

    if scale is not None:
        grads = jax.tree.map(lambda g, s: g * like(g, s), grads, scale)
    if offset is not None:
        grads = jax.tree.map(lambda g, o: g + like(g, o), grads, offset)
    return grads


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Formed gradients: a pytree with a leading batch axis, as ``jax.vmap(jax.grad(loss))`` returns it."""

    grads: PyTree
    batch_size: int
    unit: str = "example"

    @property
    def like(self) -> PyTree:
        return jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), self.grads)

    def gradients(self) -> PyTree:
        return self.grads

    def run(self, mask: Bool[Array, " batch"], scale: PyTree, offset: PyTree, clip: ClipFunction) -> EngineResult:
        args = self.grads, mask, scale, offset
        mesh = explicit_axes.explicit_mesh(args)
        if mesh is None:
            return clip_stacked(*args, clip)
        specs = jax.tree.map(lambda g: PartitionSpec(*jax.typeof(g).sharding.spec[1:]), self.grads)
        shardings = shardings_on(mesh, specs, jax.tree.leaves(self.grads)[0])
        run = with_given_clip(clip_stacked, clip)
        return explicit_axes.with_automatic_axes(run, (*args, arrays_of(clip)), shardings)


def shardings_on(mesh: Any, specs: PyTree, row: jax.Array) -> Callable[[EngineResult], EngineResult]:
    """How an engine's result lies on a mesh with explicit axes: the sum by ``specs``, the rest as the ``row`` axis."""

    def shardings(result: EngineResult) -> EngineResult:
        like = jax.tree.map(lambda _, spec: NamedSharding(mesh, spec), result.sum, specs)
        rows = NamedSharding(mesh, PartitionSpec(*jax.typeof(row).sharding.spec[:1]))
        each = jax.tree.map(lambda _: rows, result)
        return each._replace(sum=like, remainder=None if result.remainder is None else like)

    return shardings


def with_given_clip(run: Callable[..., EngineResult], clip: ClipFunction) -> Callable[..., EngineResult]:
    """``run(*args, clip)`` as a function of ``(*args, arrays_of(clip))``."""
    return lambda *args: run(*args[:-1], clip if args[-1] is None else args[-1])
