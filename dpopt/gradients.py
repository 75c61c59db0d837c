"""Per-example gradients that are not computed yet: `PerExampleGrads`, also called a promise.

``per_example_grads(loss_fn)(params, batch)`` computes nothing. It returns a `PerExampleGrads`, which holds the loss,
the parameters, the batch, and an affine map ``g_i -> S * g_i + o`` collected on the way. Only the clip, which calls
`PerExampleGrads.clipped_sum`, runs an engine (`dpopt.engines.promises`).
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpopt.common import trees, validate
from dpopt.common.types import Batch, LossFn, PyTree
from dpopt.constants import constants_of
from dpopt.engines import batches, clips, promises, stacked
from dpopt.engines.not_an_array import NotAnArray, refuse
from dpopt.engines.source import HasExamples, Source

Engine = Literal["auto", "ghost", "vmap"]


class SensitiveAux(NamedTuple):
    """Per-example by-products of a clipped sum. Raw private data: nothing here has been noised.

    *Privacy*: every field depends on single examples. Log or store them only where the data themselves may be stored.
    """

    losses: jax.Array | None  # (B,): None where gradients were passed in already computed
    norms: jax.Array  # (B,): L2 norm of S * g_i + o, the quantity that was clipped
    is_example: jax.Array  # (B,) bool: False for padding
    is_finite: jax.Array  # (B,) bool: False for NaN or Inf, which contribute zero, with all that is clipped with them
    was_clipped: jax.Array  # (B,) bool: True where the gradient was scaled down
    aux: PyTree = None  # (B, ...): the auxiliary output of the loss


class ClippedSum(NamedTuple):
    """The result of `PerExampleGrads.clipped_sum`: a sum that has no noise yet, and by-products that never get any."""

    sum: PyTree  # like params, at least float32
    sensitive: SensitiveAux
    remainder: PyTree = None  # like sum: its rounding error, as secret as the sum: add it to the noise. None: no error
    leaf_norms: PyTree = None  # like params, (B,) or (B, layers) each: the norms that were clipped. None: empty batch


@dataclasses.dataclass
class _Record:
    """The latest clipped sum. A promise makes one and shares it with every promise derived from it by `_derived`.

    Written by `PerExampleGrads.clipped_sum` alone, and read by `PerExampleGrads.latest`.
    """

    latest: ClippedSum | None = None


class PerExampleGrads(NotAnArray):
    """B per-example gradients that have not been computed, under an affine map ``g_i -> S * g_i + o``.

    Made by `per_example_grads`, and accepted in place of a pytree of ``[B, ...]`` gradients. Mapping over it raises, on
    purpose: a transformation that does not support it fails with an explanation instead of scaling the parameters
    inside. Make and use it within one ``jax.jit``.

    *Privacy*: holds private data. `clipped_sum` bounds what one example adds; nothing here adds noise.
    """

    def __init__(self, source: Source, mask: jax.Array, scale: PyTree = None, offset: PyTree = None):
        self._source = source
        self._mask = mask
        self._scale = scale
        self._offset = offset
        self._is_mapped_by_hand = False  # by `scale` or `shift`, not by a declared diagonal
        self._record = _Record()

    def _derived(self, scale: PyTree, offset: PyTree, by_hand: bool) -> "PerExampleGrads":
        new = PerExampleGrads(self._source, self._mask, scale, offset)
        new._is_mapped_by_hand = by_hand or self._is_mapped_by_hand
        new._record = self._record
        return new

    @property
    def unit(self) -> str:
        """What one row is: ``"example"``; ``"client"`` from `dpopt.federated`, ``"user"`` from `dpopt.users`."""
        return self._source.unit

    @property
    def like(self) -> PyTree:
        """Arrays, or shapes and dtypes, like one example's gradient."""
        return self._source.like

    def of_examples(self, function: Callable[..., PyTree], params: PyTree) -> "PerExampleGrads":
        """The gradients of another function of the same rows, for a second query.

        Args:
            function: ``function(params, examples, mask) -> scalar``, of one row: its examples, leaves
                ``(examples, ...)`` (a single one unless rows are users or clients), and ``(examples,)`` bool, False
                for padding.
            params: the argument to differentiate.

        Raises:
            TypeError: if the gradients were passed in already computed, without their examples.

        *Privacy*: as private as the rows. A separate promise, which needs its own clip and noise.
        """
        if not isinstance(self._source, HasExamples):
            raise TypeError(
                "a second query needs the examples, but these gradients were passed in already computed. Pass a "
                "promise: dpopt.per_example_grads(loss_fn)(params, batch, mask=mask)."
            )
        return PerExampleGrads(self._source.of_examples(function, params), self._mask)

    def scale(self, diagonal: PyTree) -> "PerExampleGrads":
        """Multiplies every gradient by ``diagonal``, a pytree (prefix allowed) that broadcasts to the parameters.

        Raises:
            ValueError: if the tree or a shape does not fit.

        *Privacy*: the diagonal must come from public or already noised values; the clip that follows does the rest.
        This cannot be checked here, so optimizers refuse the result: pass them the diagonal by `dpopt.precondition`.
        """
        return self._scaled(diagonal, by_hand=True)

    def _scaled(self, diagonal: PyTree, by_hand: bool) -> "PerExampleGrads":
        diagonal = trees.broadcast_prefix(diagonal, self.like, "scale")
        mapped = (self._scale, self._offset)
        scale, offset = (None if x is None else jax.tree.map(jnp.multiply, x, diagonal) for x in mapped)
        return self._derived(diagonal if scale is None else scale, offset, by_hand)

    def shift(self, offset: PyTree) -> "PerExampleGrads":
        """Adds ``offset``, a pytree (prefix allowed) that broadcasts to the parameters, to every gradient.

        Raises:
            ValueError: if the tree or a shape does not fit.

        *Privacy*: as for `scale`.
        """
        return self._shifted(offset, by_hand=True)

    def _shifted(self, offset: PyTree, by_hand: bool) -> "PerExampleGrads":
        offset = trees.broadcast_prefix(offset, self.like, "offset")
        offset = offset if self._offset is None else jax.tree.map(jnp.add, self._offset, offset)
        return self._derived(self._scale, offset, by_hand)

    def clipped_sum(self, clip: clips.ClipFunction) -> ClippedSum:
        """Runs the engine: ``sum_i clip(S g_i + o)`` over the examples that are not padding and have finite gradients.

        Args:
            clip: a clip function of `dpopt.clipping`.

        Returns:
            The sum, shaped like the parameters (at least float32), and the per-example by-products.

        *Privacy*: the sum's L2 sensitivity to adding or removing one example is ``clip.sensitivity``; it still needs
        noise. The by-products have no such bound.
        """
        if self._source.batch_size == 0:  # an empty Poisson batch: the sum of nothing
            empty = jnp.zeros((0,), jnp.float32)
            aux = self._source.aux_of_no_rows() if isinstance(self._source, promises.Rows) else None
            result = ClippedSum(trees.zeros(self.like), SensitiveAux(empty, empty, *3 * (self._mask,), aux=aux))
        else:
            ran = self._source.run(self._mask, self._scale, self._offset, clip)
            norms = stacked.global_norms(ran.leaf_norms)
            coefficients = {id(c): c for c in jax.tree.leaves(clips.row_coefficients(clip, ran.leaf_norms))}
            below_one = [(c < 1).reshape(len(c), -1).any(1) for c in coefficients.values()]
            was_clipped = jnp.any(jnp.stack(below_one), axis=0)
            aux = SensitiveAux(ran.losses, norms, self._mask, ran.is_finite, was_clipped, ran.aux)
            result = ClippedSum(ran.sum, aux, ran.remainder, ran.leaf_norms)
        self._record.latest = result
        return result

    def materialize(self) -> PyTree:
        """The gradients ``S g_i + o`` themselves: leaves ``(B, ...)``, padding rows zero. Costs B copies of the model.

        *Privacy*: raw per-example gradients, neither clipped nor noised.
        """
        grads = stacked.affine(trees.upcast(self._source.gradients()), self._scale, self._offset)
        return jax.tree.map(lambda g: jnp.where(trees.per_example(self._mask, g), g, 0), grads)

    @property
    def sensitive(self) -> SensitiveAux:
        """The by-products of `latest`, which raises if there is none. *Privacy*: see `SensitiveAux`."""
        return self.latest.sensitive

    @property
    def latest(self) -> ClippedSum:
        """The latest `clipped_sum` of this promise or of one derived from it by a diagonal.

        Raises:
            ValueError: if there is none yet.

        *Privacy*: not noised.
        """
        if self._record.latest is None:
            raise ValueError("these gradients have not been clipped yet: pass them to an optimizer's update first.")
        return self._record.latest

    def __repr__(self) -> str:
        return (
            f"PerExampleGrads(batch_size={self._source.batch_size}): a promise of per-example gradients, not an array; "
            "make it inside the same jax.jit as the update of a private optimizer, which alone can take it"
        )


# Otherwise code that maps over a tree of gradients would take a promise for a leaf, and fail with an unrelated error.
jax.tree_util.register_pytree_node(PerExampleGrads, refuse, refuse)


def per_example_grads(
    loss_fn: LossFn,
    *,
    engine: Engine = "auto",
    microbatch_size: int | None = None,
    has_aux: bool = False,
    memory: float | int = 1.25,
) -> Callable[..., PerExampleGrads]:
    """Makes ``f(params, batch, *, mask)``, a promise of the gradient of ``loss_fn`` at every example.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``, the loss of ONE example (no batch axis); with ``has_aux``,
            ``(scalar, aux)``.
        engine: how to compute the clipped sum: ``"vmap"`` forms all gradients; ``"ghost"`` forms none, or only those
            that it must (see `dpopt.explain`); ``"auto"`` picks the one that should be faster. The result is the same.
            If ``ghost`` cannot follow a loss, it falls back to ``vmap`` with one warning that names the operation.
        microbatch_size: how many examples to process at a time, to save memory. The result is the same, and gradients
            are still clipped per example. None: all of them, or, with the ghost engine on a CPU and inside ``jit``, as
            many equal parts as are faster than the whole on its processors (`dpopt.explain` shows how many).
        has_aux: whether the loss returns a second value; it is returned per example, in `SensitiveAux`.
        memory: a target for the peak memory of the gradient. A float is a multiple of the memory of the ordinary
            gradient of the same batch (an estimate that includes the loss's own rematerialisation), an integer is
            bytes. If the ghost engine's records would take more, it processes the batch in parts, or twice: for the
            norms and then for the sum. Records of up to 1 MB a device are always allowed.

    Returns:
        A function of ``params`` (floating leaves), ``batch`` (leaves ``(B, ...)``) and ``mask`` (``(B,)`` bool, False
        for padding, which may hold any values; None if no row is padding).

    Raises:
        ValueError, TypeError: for a bad argument; in the returned function, for parameters that have no gradient, batch
            leaves that disagree on B, a mask that is missing or has the wrong shape or dtype, a loss that is not a real
            scalar.

    *Privacy*: raw gradients; see `PerExampleGrads`.

    >>> import jax.numpy as jnp
    >>> loss = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
    >>> grads = per_example_grads(loss)(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.5]]), mask=None)
    >>> grads.materialize().tolist()
    [[-3.0, -4.0], [0.0, -0.5]]
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (params, example); got {loss_fn!r}.")
    validate.one_of(("auto", "ghost", "vmap"), engine=engine)
    if microbatch_size is not None:
        validate.positive_int(microbatch_size=microbatch_size)
    validate.positive(memory=memory)

    @validate.requires_mask
    def promise(params: PyTree, batch: Batch, *, mask: ArrayLike | None) -> PerExampleGrads:
        validate.floating_params(params)
        batch_size = batches.batch_size(batch)
        mask = batches.checked_mask(mask, batch_size)
        params, batch = jax.tree.map(jnp.asarray, (params, batch))
        rows = promises.ExampleRows(loss_fn, params, batch, batch_size, engine, microbatch_size, has_aux, memory)
        batches.check_loss(rows.loss if constants_of(loss_fn) is None else loss_fn, params, batch, has_aux)
        return PerExampleGrads(rows, mask)

    return promise


@validate.requires_mask
def stacked_grads(grads: PyTree, *, mask: ArrayLike | None) -> PerExampleGrads:
    """Wraps gradients that are already computed, leaves ``(B, ...)``, in the interface of a promise.

    Args:
        grads: leaves ``(B, ...)``.
        mask: ``(B,)`` bool, False for padding; None if no row is padding.

    Raises:
        ValueError, TypeError: if leaves disagree on B or are not floating, or the mask is missing or does not fit.

    *Privacy*: holds raw per-example gradients.

    >>> import jax.numpy as jnp
    >>> stacked_grads({"w": jnp.ones((3, 2))}, mask=None).materialize()["w"].shape
    (3, 2)
    """
    return rows_of("example", grads, mask)


def rows_of(unit: str, grads: PyTree, mask: ArrayLike | None) -> PerExampleGrads:
    """`stacked_grads` of rows that are a ``unit`` each. *Privacy*: the caller has to know that they are."""
    validate.floating_params(grads)
    grads = jax.tree.map(jnp.asarray, grads)
    batch_size = batches.batch_size(grads, "per-example gradients")
    return PerExampleGrads(stacked.Stacked(grads, batch_size, unit), batches.checked_mask(mask, batch_size))
