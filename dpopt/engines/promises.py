"""Choosing and running the engine that turns a loss and a batch into a clipped sum, in one microbatch or many.

The ``vmap`` engine forms every gradient, takes norms, clips and adds up (`dpopt.engines.stacked`). The ``ghost`` engine
(`dpopt.ghost`) computes the same sum without forming the gradients.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.core import Tracer

from dpopt.common import trees
from dpopt.common.lazy import ghost
from dpopt.common.names import first_line
from dpopt.common.types import Batch, Example, LossFn, PyTree
from dpopt.constants import constants_of, given
from dpopt.engines import clips, explicit_axes, fallback, stacked, sums
from dpopt.engines.blocks import Blocks
from dpopt.engines.clips import ClipFunction
from dpopt.engines.programs import equations
from dpopt.engines.rare_branch import if_any
from dpopt.engines.rows import check_rows_are_independent, custom_batching
from dpopt.engines.stacked import EngineResult

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr


@dataclasses.dataclass(frozen=True)
class Rows(abc.ABC):
    """Gradients that are not computed yet, one for each row of a batch. Subclasses say what a row is."""

    loss_fn: LossFn
    params: PyTree
    batch: Batch
    batch_size: int
    engine: str
    microbatch_size: int | None
    has_aux: bool
    memory: float = 1.25

    unit = ""  # what a row is: "example", "user" or "client"

    @property
    def like(self) -> PyTree:
        return self.params

    @functools.cached_property
    def loss(self) -> LossFn:
        """``loss_fn``, within ``jit`` traced and linearized once however often this promise needs it.

        The function that `jax.jit` is given is this promise's own: with ``loss_fn`` itself, it would remember what
        ``loss_fn`` read from Python when an earlier promise traced it. (So outside ``jit`` every promise would compile
        it.)"""
        return jax.jit(lambda params, example: self.loss_fn(params, example)) if self._is_traced else self.loss_fn

    @property
    def _is_traced(self) -> bool:
        return any(isinstance(x, Tracer) for x in jax.tree.leaves((self.params, self.batch)))

    @abc.abstractmethod
    def examples(self, row: PyTree) -> tuple[Batch, jax.Array]:
        """The examples in a row of the batch, leaves ``(examples, ...)``, and their mask."""

    @abc.abstractmethod
    def _value_and_grad(self, row: PyTree) -> tuple[PyTree, PyTree]:
        """Value and gradient of one row of the batch."""

    def of_examples(self, function: Callable[..., PyTree], params: PyTree) -> OtherRows:
        """The same for another function, of parameters and the examples of a row."""

        def of_row(p: PyTree, row: Example) -> PyTree:
            return function(p, *self.examples(row))

        size, engine = self.microbatch_size, self.engine
        return OtherRows(of_row, params, self.batch, self.batch_size, engine, size, False, self.memory, self.unit)

    def aux_of_no_rows(self) -> PyTree:
        """The auxiliary outputs for an empty batch, leaves ``(0, ...)``."""
        if not self.has_aux:
            return None
        (_, aux), _ = jax.eval_shape(self._value_and_grad, trees.structs(self.batch, 1))
        return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), aux)

    def gradients(self) -> PyTree:
        check_rows_are_independent(self._row_program)
        return self._value_and_grads(self.batch, True)[1]

    @functools.cached_property
    def _row_program(self) -> Jaxpr:
        """The program of one row, derivative rules included; tracing it raises the loss's own errors."""
        if jax.sharding.get_abstract_mesh().manual_axes:
            # In shard_map the type of a value, unlike its shape, includes the devices over which it varies.
            return jax.make_jaxpr(lambda batch: self._value_and_grad(jax.tree.map(lambda x: x[0], batch)))(self.batch)
        return jax.make_jaxpr(self._value_and_grad)(trees.structs(self.batch, 1))

    def _value_and_grads(self, batch: Batch, mask: jax.typing.ArrayLike) -> tuple[PyTree, PyTree]:
        """Values and gradients of all rows; those of rows that ``mask`` excludes are unspecified."""
        custom = custom_batching(self._row_program)
        if custom is not None:
            fallback.warn_once(
                self.loss_fn,
                custom,
                f"the gradients of this loss are taken one example after the other, which is slow: under vmap "
                f"{custom} passes all examples to a function that might mix them.",
            )
            return jax.lax.map(self._value_and_grad, batch)
        has_filters = any(eqn.primitive.name == "conv_general_dilated" for eqn in equations(self._row_program.jaxpr))
        if has_filters and jax.device_count() > 1:
            fallback.warn_once(
                self.loss_fn,
                "conv_general_dilated",
                "engine='vmap' takes the gradients of a loss with convolutions one example after the other where there "
                "are several devices, which is slow: XLA leaves out rows of a batch that is divided among devices.",
            )
            return jax.lax.map(self._value_and_grad, batch)
        try:
            together = jax.vmap(self._value_and_grad)(batch)
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:  # not an error of the loss: `_row_program` has traced one row
            fallback.warn_once(
                self.loss_fn,
                type(error).__name__,
                f"vmap cannot take the gradients of this loss ({type(error).__name__}: {first_line(error)}). "
                "They are taken one example after the other, which is slow.",
            )
            return jax.lax.map(self._value_and_grad, batch)
        if not has_filters:
            return together
        # The examples' filter gradients are one grouped convolution, which XLA may compute as a dense convolution over
        # all examples with zeros between them: 0 * nan then spreads to every example. So bad examples are found one by
        # one and replaced by a good one, and the others get the gradients that they would get without bad ones.
        bad = ~stacked.finite_rows(together[1]) & jnp.asarray(mask)

        def without_bad_ones(_: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            alone = jax.lax.map(self._value_and_grad, batch)
            fine = stacked.finite_rows(alone[1])
            rows = jnp.where(fine, jnp.arange(len(fine)), jnp.argmax(fine))
            others = jax.vmap(self._value_and_grad)(jax.tree.map(lambda x: x[rows], batch))
            return jax.tree.map(lambda a, b: jnp.where(trees.per_example(fine, a), a, b), others, alone)

        return if_any(bad, without_bad_ones, together)

    def _choose(self, scale: PyTree, offset: PyTree, clip: ClipFunction) -> tuple[int, ghost.Plan | None]:
        """The microbatch size, and the ghost engine's plan for it.

        No plan means ``vmap``: because it was requested, or nothing else works, or it is faster.
        """
        size = min(self.microbatch_size or self.batch_size, self.batch_size)
        if self.engine == "vmap" or custom_batching(self._row_program):
            return size, None
        try:
            axes = clips.layer_axes(clip, self.params)
            plan = ghost.plan_clipped_sum(
                self.loss,
                self.params,
                self.batch,
                scale=scale,
                offset=offset,
                has_aux=self.has_aux,
                layer_axes=axes,
            )
            way = ghost.choose(
                plan.of(size),
                self.memory,
                # Outside `jit` a loop over microbatches would be compiled at every call.
                may_split=self.microbatch_size is None and self._is_traced,
                may_vmap=self.engine == "auto",
                limits=clips.own_clip_norms(clip, self.params),
                layer_axes=axes,
            )
        except ghost.CannotFollow as reason:
            fallback.to_vmap(self.loss_fn, reason.primitive, str(reason))
            return size, None
        return size // way.parts, way.plan

    def _microbatch(
        self,
        batch: Batch,
        mask: jax.Array,
        scale: PyTree,
        offset: PyTree,
        clip: ClipFunction,
        plan: ghost.Plan | None,
    ) -> EngineResult:
        """The clipped sum of one microbatch, computed by the chosen engine."""

        def by_vmap() -> EngineResult:
            values, grads = self._value_and_grads(batch, mask)
            losses, aux = values if self.has_aux else (values, None)
            return stacked.clip_stacked(grads, mask, scale, offset, clip)._replace(losses=losses, aux=aux)

        if plan is None:
            return by_vmap()
        try:
            return ghost.clipped_sum(
                self.loss_fn,
                self.params,
                batch,
                coefficients=functools.partial(clips.row_coefficients, clip),
                mask=mask,
                scale=scale,
                offset=offset,
                has_aux=self.has_aux,
                plan=plan,
                limits=clips.own_clip_norms(clip, self.params),
                layer_axes=clips.layer_axes(clip, self.params),
            )
        except jax.errors.JaxRuntimeError:  # such as out of memory: vmap would need even more
            raise
        except Exception as error:
            result = by_vmap()  # raises again if it is the user's error
            fallback.to_vmap(
                self.loss_fn,
                type(error).__name__,
                f"ghost clipping cannot run this loss ({type(error).__name__}: {first_line(error)})",
            )
            return result

    def run(self, mask: jax.Array, scale: PyTree, offset: PyTree, clip: ClipFunction) -> EngineResult:
        """The clipped sum of the batch: in one pass, or added up in a scan over microbatches."""
        args = self.params, self.batch, mask, scale, offset, constants_of(self.loss_fn)
        mesh = explicit_axes.explicit_mesh(args)
        if mesh is not None:

            def run(*args: PyTree) -> EngineResult:
                params, batch, mask, scale, offset, constants, clip = args
                loss_fn = given(self.loss_fn, constants)
                return dataclasses.replace(self, loss_fn=loss_fn, params=params, batch=batch).run(
                    mask, scale, offset, clip
                )

            specs = jax.tree.map(lambda p: jax.typeof(p).sharding.spec, self.params)
            shardings = stacked.shardings_on(mesh, specs, jax.tree.leaves(self.batch)[0])
            args = *args, clips.arrays_of(clip)
            return explicit_axes.with_automatic_axes(stacked.with_given_clip(run, clip), args, shardings)
        check_rows_are_independent(self._row_program)
        size, plan = self._choose(scale, offset, clip)
        if size == self.batch_size:
            return self._microbatch(self.batch, mask, scale, offset, clip, plan)

        blocks = Blocks(self.batch_size, size, interleaved=jax.device_count() > 1)

        def step(total: sums.Sum, microbatch: tuple[Batch, jax.Array]) -> tuple[sums.Sum, EngineResult]:
            batch, mask = microbatch
            ran = self._microbatch(batch, mask, scale, offset, clip, plan)
            total = sums.add(total, sums.Sum(ran.sum, ran.remainder))
            return total, ran._replace(sum=None, remainder=None)

        # Two passes add up their rows in blocks of their own: for them a part counts as a block.
        two_passes = plan is not None and plan.streamed and not plan.is_one_pass
        zero_for = sums.zero if two_passes else sums.zero_for_parts
        zero = zero_for(trees.zeros(self.params), size, blocks.count)
        total, ran = jax.lax.scan(step, zero, blocks.split(self.batch, mask))
        return blocks.join(ran)._replace(sum=total.value, remainder=total.remainder)


class ExampleRows(Rows):
    """Rows that are single examples."""

    unit = "example"

    def examples(self, row: Example) -> tuple[Batch, jax.Array]:
        row = row[0] if getattr(self.loss_fn, "takes_key", False) else row
        return jax.tree.map(lambda x: jnp.asarray(x)[None], row), jnp.ones(1, bool)

    def _value_and_grad(self, row: Example) -> tuple[PyTree, PyTree]:
        return jax.value_and_grad(self.loss, has_aux=self.has_aux)(self.params, row)


@dataclasses.dataclass(frozen=True)
class OtherRows(ExampleRows):
    """Another function of the same rows, which are what they were."""

    unit: str = "example"
