"""The engines that turn a loss and a batch into a clipped sum, one microbatch or many.

The ``vmap`` engine forms every gradient, takes norms, and adds up what is left after the clip
(`dpopt.engines.stacked`). The ``ghost`` engine (`dpopt.ghost`) gets the same sum without forming them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from dpopt.common import trees
from dpopt.common.lazy import ghost
from dpopt.constants import constants_of, given
from dpopt.engines import explicit_axes, fallback, sums
from dpopt.engines.blocks import Blocks
from dpopt.engines.once import if_any
from dpopt.engines.programs import equations
from dpopt.engines.rows import batched_by_hand, check_rows_are_independent
from dpopt.engines.stacked import EngineResult, clip_stacked, finite_rows, layer_axes, own_clip_norms, row_coefficients


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
    memory: float | int = 1.25

    @property
    def like(self) -> Any:
        return self.params

    def examples(self, row: Any) -> tuple[Any, jax.Array]:
        """The examples of a row of the batch, leaves ``(examples, ...)``, and which of them count."""
        row = row[0] if getattr(self.loss_fn, "takes_key", False) else row
        return jax.tree.map(lambda x: jnp.asarray(x)[None], row), jnp.ones(1, bool)

    def of_examples(self, function: Callable, params: Any) -> Loss:
        """Of another function of parameters and a row's examples, at the same rows."""

        def of_row(p: Any, row: Any) -> Any:
            return function(p, *self.examples(row))

        return Loss(of_row, params, self.batch, self.batch_size, "auto", self.microbatch_size, has_aux=False)

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
        """Of all rows; the values of those that ``mask`` leaves out are unspecified."""
        by_hand = batched_by_hand(self._row_program)
        if by_hand is not None:
            fallback.warn_once(
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
            fallback.warn_once(
                type(error).__name__,
                f"vmap cannot take the gradients of this loss ({type(error).__name__}: {fallback.first_line(error)}). "
                "They are taken one example after the other, which is slow.",
            )
            return jax.lax.map(self._value_and_grad, batch)
        if not any(eqn.primitive.name == "conv_general_dilated" for eqn in equations(self._row_program.jaxpr)):
            return together
        # Examples' filters have gradients that are one grouped convolution, which XLA may compute as one dense one over
        # all examples with zeros between them: 0 * nan then spreads to every example. So bad examples are found one by
        # one and replaced by a good one: the others come out as they would without them.
        bad = ~finite_rows(together[1]) & jnp.asarray(mask)

        def without_bad_ones(_):
            alone = jax.lax.map(self._value_and_grad, batch)
            fine = finite_rows(alone[1])
            rows = jnp.where(fine, jnp.arange(len(fine)), jnp.argmax(fine))
            others = jax.vmap(self._value_and_grad)(jax.tree.map(lambda x: x[rows], batch))
            return jax.tree.map(lambda a, b: jnp.where(trees.per_example(fine, a), a, b), others, alone)

        return if_any(bad, without_bad_ones, together)

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
            fallback.to_vmap(reason.primitive, str(reason))
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
            fallback.to_vmap(
                type(error).__name__,
                f"ghost clipping cannot run this loss ({type(error).__name__}: {fallback.first_line(error)})",
            )
            return result
        return EngineResult(ran.sum, ran.leaf_norms, ran.losses, ran.aux, ran.ok | ~mask, ran.remainder)

    def run(self, mask, scale, offset, clip) -> EngineResult:
        """One pass over the batch, or a scan over microbatches that adds up clipped sums."""
        args = self.params, self.batch, mask, scale, offset, constants_of(self.loss_fn)
        mesh = explicit_axes.explicit_mesh(args)
        if mesh is not None:

            def run(
                params: Any, batch: Any, mask: Any, scale: Any, offset: Any, constants: Any, held: Any
            ) -> EngineResult:
                loss_fn = given(self.loss_fn, constants)
                loss = dataclasses.replace(self, loss_fn=loss_fn, params=params, batch=batch)
                return loss.run(mask, scale, offset, clip if held is None else held)

            def places(result: EngineResult) -> EngineResult:
                like, rows = explicit_axes.like_parameters(self.params, mesh), explicit_axes.by_row(self.batch, mesh)
                each = jax.tree.map(lambda _: rows, result)
                return each._replace(sum=like, remainder=None if result.remainder is None else like)

            # A clip that is a pytree holds arrays, whose axes are explicit too.
            held = None if jax.tree_util.all_leaves([clip]) else clip
            return explicit_axes.with_automatic_axes(run, (*args, held), places)
        check_rows_are_independent(self._row_program)
        size, plan = self._choose(scale, offset, clip)
        if size == self.batch_size:
            return self._microbatch(self.batch, mask, scale, offset, clip, plan)

        blocks = Blocks(self.batch_size, size, apart=jax.device_count() > 1)

        def step(total, microbatch):
            batch, mask = microbatch
            ran = self._microbatch(batch, mask, scale, offset, clip, plan)
            total = sums.add(total, sums.Sum(ran.sum, ran.remainder))
            return total, ran._replace(sum=None, remainder=None)

        zero = sums.zero(trees.zeros(self.params), size, blocks.count)
        total, ran = jax.lax.scan(step, zero, blocks.split(self.batch, mask))
        return blocks.join(ran)._replace(sum=total.value, remainder=total.remainder)
