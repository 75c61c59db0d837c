"""The engines that turn a loss and a batch into a clipped sum, one microbatch or many.

The ``vmap`` engine is the definition of correct: form every gradient, take norms, add up what is left after the clip.
The ``ghost`` engine (`dpopt.ghost`) gets the same sum without forming them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpopt import _fallback, _meshes, _sums, _trees, ghost
from dpopt._norms import safe_norm
from dpopt._programs import equations
from dpopt._rows import batched_by_hand, check_rows_are_independent


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
    leaf_norms = jax.tree.map(lambda n: jnp.where(jnp.isfinite(n), n, jnp.inf), leaf_norms)
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
    if hasattr(clip, "layer_axes"):
        return clip.layer_axes(params)
    return [0] * len(jax.tree.leaves(params))


def own_clip_norms(clip: ClipFunction, params: Any) -> list:
    """What each parameter is scaled down to if its coefficient depends on its own norm alone, else None."""
    if hasattr(clip, "own_clip_norms"):
        return clip.own_clip_norms(params)
    return [None] * len(jax.tree.leaves(params))


class EngineResult(NamedTuple):
    """What an engine returns for one microbatch of B examples."""

    sum: Any  # like params, at least float32
    leaf_norms: Any  # like params, each (B,)
    losses: jax.Array | None  # (B,)
    aux: Any  # (B, ...)
    is_finite: jax.Array  # (B,) bool
    remainder: Any = None  # what rounding the sum has lost, like params; None: little enough


def _finite_rows(grads: Any) -> jax.Array:
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
    grads, tree = jax.tree.flatten(affine(_trees.upcast(grads), scale, offset))
    grads, fine = _settled(grads, axes)
    norms = [safe_norm(g.reshape(*g.shape[:k], -1), axis=k) for g, k in zip(grads, axes, strict=True)]
    norms = [jnp.where(f, n, jnp.nan) for f, n in zip(fine, norms, strict=True)]
    leaf_norms = tree.unflatten(norms)
    coefficients = tree.flatten_up_to(row_coefficients(clip, leaf_norms))
    coefficients = [jnp.where(_trees.per_example(mask, c), c, 0) for c in coefficients]

    def weighted_sum(rows):
        return [jnp.sum(_trees.per_example(c, g) * g, axis=0) for g, c in zip(*rows, strict=True)]

    total = _sums.over_examples(lambda group: _sums.in_blocks(weighted_sum, group), (grads, coefficients))
    rest = None if total.remainder is None else tree.unflatten(total.remainder)
    return EngineResult(
        tree.unflatten(total.value), leaf_norms, None, None, jnp.isfinite(global_norms(leaf_norms)), rest
    )


def _settled(grads: list[jax.Array], axes: list[int]) -> tuple[list[jax.Array], list[jax.Array]]:
    """The gradients with zeros where they are not finite, and where they are, along each one's first ``axes`` axes.

    Computed here and nowhere else. XLA may compute what has several uses once for each of them, rounded another way:
    where a gradient is what rounding has left of larger terms, the sum's would not be the one that was clipped. What a
    loop takes along it has to settle, also if the loop ordinarily takes no step.
    """
    fine = [_finite(g, k) for g, k in zip(grads, axes, strict=True)]

    def without_bad_ones(state: tuple) -> tuple:
        return jnp.array(True), [jnp.where(_trees.per_example(f, g), g, 0) for f, g in zip(fine, state[1], strict=True)]

    state = jnp.all(jnp.stack([jnp.all(f) for f in fine])), grads
    if isinstance(state[0], Tracer):
        return jax.lax.while_loop(lambda state: ~state[0], without_bad_ones, state)[1], fine
    return (grads if bool(state[0]) else without_bad_ones(state)[1]), fine


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
    memory: float | int = ghost.DEFAULT_MEMORY

    @property
    def like(self) -> Any:
        return self.params

    def gradients(self) -> Any:
        check_rows_are_independent(self._row_program)
        return self._value_and_grads(self.batch, True)[1]

    @functools.cached_property
    def _row_program(self) -> Any:
        """What is computed for one row, derivative rules included; whatever is wrong with the loss fails here."""
        if jax.sharding.get_abstract_mesh().manual_axes:
            # In shard_map the type of a value says over which devices it varies, which a shape does not.
            return jax.make_jaxpr(lambda batch: self._value_and_grad(jax.tree.map(lambda x: x[0], batch)))(self.batch)
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.batch)
        return jax.make_jaxpr(self._value_and_grad)(row)

    def _value_and_grad(self, row: Any) -> tuple[Any, Any]:
        """Of one row of the batch."""
        return jax.value_and_grad(self.loss_fn, has_aux=self.has_aux)(self.params, row)

    def _value_and_grads(self, batch: Any, mask: Any) -> tuple[Any, Any]:
        """Of all rows; those that ``mask`` leaves out may come out as anything."""
        by_hand = batched_by_hand(self._row_program)
        if by_hand is not None:
            _fallback.warn_once(
                by_hand,
                f"the gradients of this loss are taken one example after the other, which is slow: under vmap "
                f"{by_hand} hands all examples to a function that might mix them.",
            )
            return jax.lax.map(self._value_and_grad, batch)
        try:
            together = jax.vmap(self._value_and_grad)(batch)
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:  # not the loss's own: one row can be traced, as `_row_program` was
            _fallback.warn_once(
                type(error).__name__,
                f"vmap cannot take the gradients of this loss ({type(error).__name__}: {_fallback.first_line(error)}). "
                "They are taken one example after the other, which is slow.",
            )
            return jax.lax.map(self._value_and_grad, batch)
        if not any(eqn.primitive.name == "conv_general_dilated" for eqn in equations(self._row_program.jaxpr)):
            return together
        # Examples' filters have gradients that are one grouped convolution, which XLA may turn into one of all with all
        # and zeros between: 0 * nan then takes every example along. So bad examples are found one by one and replaced
        # by a good one: the others come out as they would without them. A loop, since under vmap `cond` would always do
        # both.
        is_fine = jnp.all(_finite_rows(together[1]) | ~jnp.asarray(mask))

        def without_bad_ones(_):
            alone = jax.lax.map(self._value_and_grad, batch)
            fine = _finite_rows(alone[1])
            rows = jnp.where(fine, jnp.arange(len(fine)), jnp.argmax(fine))
            others = jax.vmap(self._value_and_grad)(jax.tree.map(lambda x: x[rows], batch))
            return jnp.array(True), jax.tree.map(
                lambda a, b: jnp.where(_trees.per_example(fine, a), a, b), others, alone
            )

        if not isinstance(is_fine, Tracer):  # outside `jit` the loop would be compiled at every call
            return together if bool(is_fine) else without_bad_ones(None)[1]
        return jax.lax.while_loop(lambda state: ~state[0], without_bad_ones, (is_fine, together))[1]

    def _vmap_engine(self, batch, mask, scale, offset, clip) -> EngineResult:
        values, grads = self._value_and_grads(batch, mask)
        losses, aux = values if self.has_aux else (values, None)
        return clip_stacked(grads, mask, scale, offset, clip)._replace(losses=losses, aux=aux)

    def _choose(self, scale, offset, clip) -> tuple[int, ghost.Plan | None]:
        """How many examples to take at a time, and the ghost engine's plan for that many.

        No plan means ``vmap``: because it is asked for, or all that is left, or faster.
        """
        size = min(self.microbatch_size or self.batch_size, self.batch_size)
        if self.engine == "vmap" or batched_by_hand(self._row_program):
            return size, None
        # Outside `jit` a loop over parts would be compiled at every call.
        is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((self.params, self.batch)))
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.batch)
        try:
            plan = ghost.plan_clipped_sum(
                self.loss_fn, self.params, self.batch, scale=scale, offset=offset, has_aux=self.has_aux
            ).of(size)
            way = ghost.choose(
                plan,
                self.loss_fn,
                self.params,
                row,
                self.has_aux,
                self.memory,
                may_split=self.microbatch_size is None and is_traced,
                may_vmap=self.engine == "auto",
                limits=own_clip_norms(clip, self.params),
                layer_axes=layer_axes(clip, self.params),
            )
        except ghost.CannotFollow as reason:
            _fallback.to_vmap(reason.primitive, str(reason))
            return size, None
        return size // way.parts, way.plan

    def _microbatch(self, batch, mask, scale, offset, clip, plan: ghost.Plan | None) -> EngineResult:
        """One microbatch, by the engine that was chosen."""
        if plan is None:
            return self._vmap_engine(batch, mask, scale, offset, clip)
        try:
            ran = ghost.clipped_sum(
                self.loss_fn,
                self.params,
                batch,
                coefficients=functools.partial(row_coefficients, clip),
                mask=mask,
                scale=scale,
                offset=offset,
                has_aux=self.has_aux,
                plan=plan,
                limits=own_clip_norms(clip, self.params),
                layer_axes=layer_axes(clip, self.params),
            )
        except jax.errors.JaxRuntimeError:  # out of memory, say: the other engine would need more
            raise
        except Exception as error:
            result = self._vmap_engine(batch, mask, scale, offset, clip)  # an error of the user's own comes again
            _fallback.to_vmap(
                type(error).__name__,
                f"ghost clipping cannot run this loss ({type(error).__name__}: {_fallback.first_line(error)})",
            )
            return result
        return EngineResult(ran.sum, ran.leaf_norms, ran.losses, ran.aux, ran.ok | ~mask, ran.remainder)

    def run(self, mask, scale, offset, clip) -> EngineResult:
        """One pass over the batch, or a scan over microbatches that adds up clipped sums."""
        args = self.params, self.batch, mask, scale, offset
        mesh = _meshes.explicit_mesh(args)
        if mesh is not None:

            def run(params: Any, batch: Any, *more: Any) -> EngineResult:
                return dataclasses.replace(self, params=params, batch=batch).run(*more, clip)

            def places(result: EngineResult) -> EngineResult:
                like, rows = _meshes.like_parameters(self.params, mesh), _meshes.by_row(self.batch, mesh)
                remainder = None if result.remainder is None else like
                return EngineResult(like, *jax.tree.map(lambda _: rows, result[1:5]), remainder)

            return _meshes.with_automatic_axes(run, args, places)
        check_rows_are_independent(self._row_program)
        size, plan = self._choose(scale, offset, clip)
        if size == self.batch_size:
            return self._microbatch(self.batch, mask, scale, offset, clip, plan)

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
            ran = self._microbatch(batch, mask, scale, offset, clip, plan)
            total = _sums.add(total, _sums.Sum(ran.sum, ran.remainder))
            return total, ran._replace(sum=None, remainder=None)

        zero = _sums.zero(_trees.zeros(self.params), size, steps)
        total, ran = jax.lax.scan(step, zero, jax.tree.map(fold, (batch, mask)))
        return jax.tree.map(unfold, ran)._replace(sum=total.value, remainder=total.remainder)
