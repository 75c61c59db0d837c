"""Per-example gradients: the promise of them, and the plain engine that keeps it.

``per_example_grads(loss_fn)(params, batch)`` computes nothing. It returns a `PerExampleGrads`, which remembers the
loss, the parameters, the batch, and an affine map ``g_i -> S * g_i + o`` collected on the way. The clip asks it for
`PerExampleGrads.clipped_sum`, and only there an engine runs. (`dpopt.engines.promises`).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from dpopt.common import trees, validate
from dpopt.engines import batches, promises, stacked

Engine = Literal["auto", "ghost", "vmap"]


class SensitiveAux(NamedTuple):
    """Per-example by-products of a clipped sum. Raw private data: nothing here has been noised.

    *Privacy*: every field depends on single examples. Log or store them only where the data themselves may be stored.
    """

    losses: jax.Array | None  # (B,): None where gradients came in already computed
    norms: jax.Array  # (B,): L2 norm of S * g_i + o, the quantity that was clipped
    is_example: jax.Array  # (B,) bool: False marks padding
    is_finite: jax.Array  # (B,) bool: False where the gradient held NaN or Inf, so that it contributed zero
    was_clipped: jax.Array  # (B,) bool: True where the gradient was scaled down
    aux: Any = None  # (B, ...): what the loss returned beside its value


class ClippedSum(NamedTuple):
    """What `PerExampleGrads.clipped_sum` returns: the sum, not yet private, and by-products that never will be."""

    sum: Any  # like params, at least float32
    sensitive: SensitiveAux
    remainder: Any = None  # like sum: what rounding has lost, as secret as the sum: add it to the noise. None: nothing
    leaf_norms: Any = None  # like params, (B,) or (B, layers) each: what the clip looked at. None: an empty batch


_NOT_CLIPPED = (
    "per-example gradients (PerExampleGrads, a promise) reached a transformation that computes with them before they "
    "were clipped, or crossed a jax.jit. Put dpopt.clip_and_sum first, or the private optimizer, in dpopt.chain or "
    "optax.chain; what clips, decays, scales or counts gradients goes after it. Wrappers that look at gradients "
    "themselves (apply_if_finite, MultiSteps) cannot stand around it; instead of nnx.Optimizer take "
    "dpopt.flax.NNXOptimizer. Make the promise in the jax.jit that updates."
)


class PerExampleGrads:
    """B per-example gradients that have not been computed, under an affine map ``g_i -> S * g_i + o``.

    Made by `per_example_grads`; taken wherever a pytree of ``[B, ...]`` gradients is. It refuses to be mapped over, on
    purpose: a transformation that does not know it fails, and is told why, instead of scaling the parameters inside it.
    Build it and use it within one ``jax.jit``.

    *Privacy*: holds private data. `clipped_sum` bounds what one example adds; nothing here adds noise.
    """

    def __init__(
        self, source: "promises.Loss | stacked.Stacked", mask: jax.Array, scale: Any = None, offset: Any = None
    ):
        self._source = source
        self._mask = mask
        self._scale = scale
        self._offset = offset
        self._is_mapped_by_hand = False  # by `scale` or `shift`, not by a declared diagonal
        self._observed: list[ClippedSum] = []

    def _mapped(self, scale: Any, offset: Any, by_hand: bool) -> "PerExampleGrads":
        new = PerExampleGrads(self._source, self._mask, scale, offset)
        new._is_mapped_by_hand = by_hand or self._is_mapped_by_hand
        new._observed = self._observed  # one record for a promise and all that is derived from it
        return new

    @property
    def unit(self) -> str:
        """What one row is: ``"example"``; ``"client"`` from `dpopt.federated`, ``"user"`` from `dpopt.users`."""
        return getattr(self._source, "unit", "example")

    @property
    def like(self) -> Any:
        """Something shaped like one example's gradient."""
        return self._source.like

    def of_examples(self, function: Callable[..., Any], params: Any) -> "PerExampleGrads":
        """The gradients of another function of the same rows, for a second query.

        Args:
            function: of parameters; a row's examples, leaves ``(examples, ...)`` (one, but where rows are users or
                clients); and ``(examples,)`` bool, which of them count. Returns a number.
            params: what to take gradients by.

        Raises:
            TypeError: if these gradients came in already computed, without the examples that they are of.

        *Privacy*: as private as the rows; a promise of its own, with a clip and noise of its own.
        """
        of_examples = getattr(self._source, "of_examples", None)
        if of_examples is None:
            raise TypeError(
                "a second query needs the examples, and these gradients came without. Pass a promise: "
                "dpopt.per_example_grads(loss_fn)(params, batch, mask=mask)."
            )
        return PerExampleGrads(of_examples(function, params), self._mask)

    def scale(self, diagonal: Any) -> "PerExampleGrads":
        """Multiplies every gradient by ``diagonal``, a pytree (prefix allowed) that broadcasts to the parameters.

        Raises:
            ValueError: if the tree or a shape does not fit.

        *Privacy*: the diagonal must come from public or already noised values; the clip that follows does the rest.
        That is your word for it, so optimizers refuse the result: give them the diagonal by `dpopt.precondition`.
        """
        return self._scaled(diagonal, by_hand=True)

    def _scaled(self, diagonal: Any, by_hand: bool) -> "PerExampleGrads":
        diagonal = trees.broadcast_prefix(diagonal, self._source.like, "scale")

        def times(tree):
            return jax.tree.map(jnp.multiply, tree, diagonal)

        scale = diagonal if self._scale is None else times(self._scale)
        return self._mapped(scale, None if self._offset is None else times(self._offset), by_hand)

    def shift(self, offset: Any) -> "PerExampleGrads":
        """Adds ``offset``, a pytree (prefix allowed) that broadcasts to the parameters, to every gradient.

        Raises:
            ValueError: if the tree or a shape does not fit.

        *Privacy*: as for `scale`.
        """
        return self._shifted(offset, by_hand=True)

    def _shifted(self, offset: Any, by_hand: bool) -> "PerExampleGrads":
        offset = trees.broadcast_prefix(offset, self._source.like, "offset")
        offset = offset if self._offset is None else jax.tree.map(jnp.add, self._offset, offset)
        return self._mapped(self._scale, offset, by_hand)

    def clipped_sum(self, clip: stacked.ClipFunction) -> ClippedSum:
        """Runs the engine: ``sum_i clip(S g_i + o)`` over the examples that are real and finite.

        Args:
            clip: a clip function of `dpopt.clipping`.

        Returns:
            The sum, shaped like the parameters (at least float32), and the per-example by-products.

        *Privacy*: the sum's L2 sensitivity to adding or removing one example is ``clip.sensitivity``; it still needs
        noise. The by-products have no such bound.
        """
        if self._source.batch_size == 0:  # an empty Poisson batch: the sum of nothing
            empty = jnp.zeros((0,), jnp.float32)
            result = ClippedSum(trees.zeros(self._source.like), SensitiveAux(empty, empty, *3 * (self._mask,)))
        else:
            ran = self._source.run(self._mask, self._scale, self._offset, clip)
            norms = stacked.global_norms(ran.leaf_norms)
            coefficients = jax.tree.leaves(stacked.row_coefficients(clip, ran.leaf_norms))
            was_clipped = jnp.any(jnp.stack([(c < 1).reshape(len(c), -1).any(1) for c in coefficients]), axis=0)
            aux = SensitiveAux(ran.losses, norms, self._mask, ran.is_finite, was_clipped, ran.aux)
            result = ClippedSum(ran.sum, aux, ran.remainder, ran.leaf_norms)
        self._observed.append(result)
        return result

    def materialize(self) -> Any:
        """The gradients ``S g_i + o`` themselves: leaves ``(B, ...)``, padding rows zero. Costs B copies of the model.

        *Privacy*: raw per-example gradients, neither clipped nor noised.
        """
        grads = stacked.affine(trees.upcast(self._source.gradients()), self._scale, self._offset)
        return jax.tree.map(lambda g: jnp.where(trees.per_example(self._mask, g), g, 0), grads)

    @property
    def sensitive(self) -> SensitiveAux:
        """By-products of the latest `clipped_sum` of this promise or of one derived from it.

        Raises:
            ValueError: if no clipped sum has been asked for yet.

        *Privacy*: see `SensitiveAux`.
        """
        return self.latest.sensitive

    @property
    def latest(self) -> ClippedSum:
        """The latest `clipped_sum` of this promise or of one derived from it.

        Raises:
            ValueError: if there is none yet.

        *Privacy*: nothing in it is noised.
        """
        if not self._observed:
            raise ValueError("these gradients have not been clipped yet: pass them to an optimizer's update first.")
        return self._observed[-1]

    def __contains__(self, key: Any) -> bool:
        # flax's TrainState asks whether the gradients hold a special key; a promise holds none.
        return False

    def _refuse(self, *_, **__):
        raise TypeError(_NOT_CLIPPED)

    def __getattr__(self, name: str) -> Any:
        # No attribute of an array's, which whoever computes with gradients asks for.
        raise AttributeError(f"no {name!r}: {_NOT_CLIPPED}", name=name, obj=self)

    __array__ = _refuse  # what NumPy makes an array by; JAX says what it was given
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __pow__ = __neg__ = __abs__ = _refuse

    def __repr__(self) -> str:
        return (
            f"PerExampleGrads(batch_size={self._source.batch_size}): a promise of per-example gradients, not an array; "
            "make it inside the same jax.jit as the update of a private optimizer, which alone can take it"
        )


def _not_a_tree(*_: Any) -> Any:
    raise TypeError(_NOT_CLIPPED)


# What maps over a tree of gradients would else take a promise for a leaf, and fail at something that has no name.
jax.tree_util.register_pytree_node(PerExampleGrads, _not_a_tree, _not_a_tree)


def per_example_grads(
    loss_fn: Callable[..., Any],
    *,
    engine: Engine = "auto",
    microbatch_size: int | None = None,
    has_aux: bool = False,
    memory: float | int = 1.25,
) -> Callable[..., PerExampleGrads]:
    """Makes ``f(params, batch, *, mask)``, which promises the gradient of ``loss_fn`` at every example.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``, the loss of ONE example (no batch axis); with ``has_aux``,
            ``(scalar, aux)``.
        engine: how the clipped sum is computed: ``"vmap"`` forms all gradients, ``"ghost"`` forms none (or only what it
            must; see `dpopt.explain`), ``"auto"`` picks the one that should be faster. The result is the same. A loss
            that ``ghost`` cannot follow falls back to ``vmap``, with one warning that names the operation.
        microbatch_size: how many examples to process at a time. The result is the same; memory goes down. The unit that
            is clipped stays the example. None: all of them, or, with the ghost engine on a CPU and inside ``jit``, as
            many equal parts as are faster than the whole (`dpopt.explain` tells).
        has_aux: whether the loss returns a second value; it comes back per example, in `SensitiveAux`.
        memory: what the gradient may take at its peak, if it can: a float is a multiple of what the ordinary gradient
            of the same batch takes (an estimate that knows the loss's own rematerialisation), an integer is bytes.
            Where what the ghost engine records would take more, it goes over the batch in parts, or twice: for the
            norms and then for the sum. Records of up to 64 MB are always taken.

    Returns:
        A function of ``params`` (floating leaves), ``batch`` (leaves ``(B, ...)``) and ``mask`` (``(B,)`` bool, False
        for padding rows, whose content is then irrelevant; None if no row is padding).

    Raises:
        ValueError, TypeError: for a bad argument here; in the returned function, for parameters that have no gradient,
            batch leaves that disagree on B, a mask that is missing or of another shape or dtype, a loss that is no real
            scalar.

    *Privacy*: promises raw gradients; see `PerExampleGrads`.

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
    def promise(params: Any, batch: Any, *, mask: Any) -> PerExampleGrads:
        validate.floating_params(params)
        batch_size = batches.batch_size(batch)
        mask = batches.checked_mask(mask, batch_size)
        params, batch = jax.tree.map(jnp.asarray, (params, batch))
        batches.check_loss(loss_fn, params, batch, has_aux)
        return PerExampleGrads(
            promises.Loss(loss_fn, params, batch, batch_size, engine, microbatch_size, has_aux, memory), mask
        )

    return promise


@validate.requires_mask
def stacked_grads(grads: Any, *, mask: Any) -> PerExampleGrads:
    """Wraps gradients that exist already, a pytree with a leading batch axis, in the interface of a promise.

    Args:
        grads: leaves ``(B, ...)``.
        mask: ``(B,)`` bool, False for padding rows; None if no row is padding.

    Raises:
        ValueError, TypeError: if leaves disagree on B, are not floating, or the mask is missing or does not fit.

    *Privacy*: holds raw per-example gradients.

    >>> import jax.numpy as jnp
    >>> stacked_grads({"w": jnp.ones((3, 2))}, mask=None).materialize()["w"].shape
    (3, 2)
    """
    validate.floating_params(grads)
    grads = jax.tree.map(jnp.asarray, grads)
    batch_size = batches.batch_size(grads, "per-example gradients")
    return PerExampleGrads(stacked.Stacked(grads, batch_size), batches.checked_mask(mask, batch_size))
