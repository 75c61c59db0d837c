"""The engines that turn a loss and a batch into a clipped sum, one microbatch or many.

The ``vmap`` engine is the definition of correct: form every gradient, take norms, add up what is left after the clip.
The ``ghost`` engine (`dpopt.ghost`) gets the same sum without forming them.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dpopt import _trees, ghost
from dpopt._norms import safe_norm


class ClipFunction(Protocol):
    """How hard each example is scaled down, given its gradient's norms (see `dpopt.clipping`)."""

    @property
    def sensitivity(self) -> Any:
        """L2 distance by which adding or removing one example can move the clipped sum."""
        ...

    def coefficients(self, leaf_norms: Any) -> Any:
        """Maps norms (a pytree of ``(B,)``, one a parameter) to coefficients of the same shape."""
        ...


class EngineResult(NamedTuple):
    """What an engine returns for one microbatch of B examples."""

    sum: Any  # like params, at least float32
    leaf_norms: Any  # like params, each (B,)
    losses: jax.Array | None  # (B,)
    aux: Any  # (B, ...)
    is_finite: jax.Array  # (B,) bool


def global_norms(leaf_norms: Any) -> jax.Array:
    """Combines the norms of the leaves, each ``(B,)``, into the norms of the whole gradients, ``(B,)``."""
    return safe_norm(jnp.stack(jax.tree.leaves(leaf_norms)), axis=0)


def clip_stacked(grads: Any, mask: jax.Array, scale: Any, offset: Any, clip: ClipFunction) -> EngineResult:
    """Clips and adds gradients that exist: ``sum_i c_i (S g_i + o)`` over real, finite examples.

    ``grads`` has leaves ``(B, ...)``. A masked or non-finite row is dropped by selection, since ``0 * nan`` is not 0.
    """
    grads = affine(_trees.upcast(grads), scale, offset)
    leaf_norms = jax.tree.map(lambda g: safe_norm(g.reshape(g.shape[0], -1), axis=1), grads)
    is_finite = jnp.isfinite(global_norms(leaf_norms))
    contributes = is_finite & mask

    def weighted_sum(g, c):
        return jnp.sum(jnp.where(_trees.per_example(contributes, g), _trees.per_example(c, g) * g, 0), axis=0)

    total = jax.tree.map(weighted_sum, grads, clip.coefficients(leaf_norms))
    return EngineResult(total, leaf_norms, None, None, is_finite)


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

    @property
    def like(self) -> Any:
        return jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), self.grads)

    def gradients(self) -> Any:
        return self.grads

    def run(self, mask, scale, offset, clip) -> EngineResult:
        return clip_stacked(self.grads, mask, scale, offset, clip)


@dataclasses.dataclass(frozen=True)
class Loss:
    """Gradients to be: a loss of one example, and the batch."""

    loss_fn: Callable
    params: Any
    batch: Any
    batch_size: int
    engine: str
    microbatch_size: int | None
    has_aux: bool

    @property
    def like(self) -> Any:
        return self.params

    def gradients(self) -> Any:
        return self._value_and_grads(self.batch)[1]

    def _value_and_grads(self, batch):
        return jax.vmap(jax.value_and_grad(self.loss_fn, has_aux=self.has_aux), in_axes=(None, 0))(self.params, batch)

    def _vmap_engine(self, batch, mask, scale, offset, clip) -> EngineResult:
        values, grads = self._value_and_grads(batch)
        losses, aux = values if self.has_aux else (values, None)
        return clip_stacked(grads, mask, scale, offset, clip)._replace(losses=losses, aux=aux)

    def _microbatch(self, batch, mask, scale, offset, clip) -> EngineResult:
        """One microbatch, by the engine asked for, or by ``vmap`` where that is the only or the faster one."""
        if self.engine == "vmap":
            return self._vmap_engine(batch, mask, scale, offset, clip)
        try:
            plan = ghost.plan_clipped_sum(
                self.loss_fn, self.params, batch, scale=scale, offset=offset, has_aux=self.has_aux
            )
        except ghost.CannotFollow as reason:
            _warn_once(reason)
            return self._vmap_engine(batch, mask, scale, offset, clip)
        if self.engine == "auto" and plan.prefers_vmap:
            return self._vmap_engine(batch, mask, scale, offset, clip)
        ran = ghost.clipped_sum(
            self.loss_fn,
            self.params,
            batch,
            coefficients=clip.coefficients,
            mask=mask,
            scale=scale,
            offset=offset,
            has_aux=self.has_aux,
            plan=plan,
        )
        return EngineResult(ran.sum, ran.leaf_norms, ran.losses, ran.aux, is_finite=ran.ok | ~mask)

    def run(self, mask, scale, offset, clip) -> EngineResult:
        """One pass over the batch, or a scan over microbatches that adds up clipped sums."""
        size = self.microbatch_size
        if size is None or size >= self.batch_size:
            return self._microbatch(self.batch, mask, scale, offset, clip)

        steps = -(-self.batch_size // size)
        # The last microbatch is filled up with copies of the last example, masked out.
        rows = np.minimum(np.arange(steps * size), self.batch_size - 1)
        batch = self.batch if steps * size == self.batch_size else jax.tree.map(lambda x: x[rows], self.batch)
        mask = jnp.where(jnp.arange(steps * size) < self.batch_size, mask[rows], False)

        def fold(x):
            return x.reshape((steps, size) + x.shape[1:])

        def unfold(x):
            return x.reshape((steps * size,) + x.shape[2:])[: self.batch_size]

        def step(total, microbatch):
            batch, mask = microbatch
            ran = self._microbatch(batch, mask, scale, offset, clip)
            return jax.tree.map(jnp.add, total, ran.sum), ran._replace(sum=None)

        total, ran = jax.lax.scan(step, _trees.zeros(self.params), jax.tree.map(fold, (batch, mask)))
        return jax.tree.map(unfold, ran)._replace(sum=total)


_warned: set[str] = set()


def _warn_once(reason: ghost.CannotFollow) -> None:
    if reason.primitive not in _warned:
        _warned.add(reason.primitive)
        warnings.warn(
            f"{reason}. Falling back to engine='vmap', which gives the same result and forms every gradient; pass "
            "engine='vmap' to silence this.",
            stacklevel=2,
        )
