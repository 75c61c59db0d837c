"""A private training step: per-example gradients, optimizer update, and metrics."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from dpopt.common import validate
from dpopt.common.types import Batch, LossFn, PyTree
from dpopt.gradients import Engine, PerExampleGrads, per_example_grads
from dpopt.inspection import inspect_optimizer, privacy_of
from dpopt.privacy import Privacy


class SensitiveMetrics(NamedTuple):
    """Metrics of a step, computed from raw private data.

    *Privacy*: not covered by epsilon. Use them during development, on data that you may look at; do not publish them,
    and base no decision about a private run on them.
    """

    loss: jax.Array  # (): mean over real, finite examples
    mean_norm: jax.Array  # (): mean gradient norm before the clip
    clip_fraction: jax.Array  # (): fraction of examples that the clip scaled down
    num_examples: jax.Array  # (), int32: real examples in the batch
    num_nonfinite: jax.Array  # (), int32: of these, dropped because their gradient had NaN or Inf


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A private training step; made by `make_train_step`.

    *Privacy*: the new parameters are covered by `privacy`; the metrics are not.

    >>> import dpopt
    >>> opt = dpopt.dp_sgd(0.1, l2_clip_norm=1.0, noise_multiplier=2.0, expected_batch_size=8, key=jax.random.key(0))
    >>> make_train_step(lambda w, x: jnp.sum((w - x) ** 2), opt).privacy == opt.privacy
    True
    """

    optimizer: optax.GradientTransformation
    grads_fn: Callable[..., PerExampleGrads]
    has_aux: bool = False

    @property
    def privacy(self) -> Privacy:
        """The cost of a step, before sampling. For a chain bound to the parameters' tree use `dpopt.privacy_of`."""
        return privacy_of(self.optimizer)

    @validate.requires_mask
    def __call__(
        self, params: PyTree, opt_state: PyTree, batch: Batch, mask: ArrayLike | None, **extra: Any
    ) -> tuple[Any, ...]:
        """Takes one step.

        Args:
            params: floating pytree.
            opt_state: state of the optimizer.
            batch: leaves ``(B, ...)``.
            mask: ``(B,)`` bool, False for padding rows; None if no row is padding.
            **extra: passed to the optimizer's ``update`` (``public_grads=...``); names must start with ``public_``.

        Returns:
            New parameters, new state, `SensitiveMetrics`; with ``has_aux`` also the loss's auxiliary output, leaves
            ``(B, ...)``, as private as the batch.
        """
        grads = self.grads_fn(params, batch, mask=mask)
        try:
            inspect_optimizer(self.optimizer, grads, opt_state, params, extra)
        except ValueError as error:
            raise ValueError(f"the optimizer of this train step is not private: {error}") from error
        update = optax.with_extra_args_support(self.optimizer).update
        updates, opt_state = update(cast(Any, grads), opt_state, params, **extra)  # Optax's types have no promise
        new = optax.apply_updates(params, updates), opt_state, _metrics(grads)
        return (*new, grads.sensitive.aux) if self.has_aux else new


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    microbatch_size: int | None = None,
    engine: Engine = "auto",
    has_aux: bool = False,
) -> TrainStep:
    """Makes ``step(params, opt_state, batch, mask, **extra) -> (params, opt_state, metrics)``.

    The step is a pure function of arrays: it works under ``jax.jit``, in ``jax.lax.scan``, and under ``jax.vmap`` over
    the keys of several runs, each of which costs what one does. For any microbatch size, noise is drawn once and the
    parameters are updated once.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``; see `dpopt.per_example_grads`, and `dpopt.flax` for making one
            from a Flax model. Or the result of `dpopt.federated.client_deltas` or `dpopt.users.per_user_grads`.
        optimizer: a private optimizer: a named one, a `dpopt.chain`, or an ``optax.chain`` of dpopt's stages.
        microbatch_size, engine: see `dpopt.per_example_grads`.
        has_aux: whether the loss returns (value, auxiliary output); the step returns the latter, per example, after the
            metrics.

    Raises:
        ValueError, TypeError: for a bad argument; on the first step, if the optimizer does not clip and then add noise,
            lets anything bypass these two (see `dpopt.inspection`), or is passed values that are not public.

    *Privacy*: that of the optimizer, for one step on the given batch; sampling the batch is up to the caller.

    >>> import dpopt
    >>> opt = dpopt.dp_sgd(0.5, l2_clip_norm=10.0, noise_multiplier=0.0, expected_batch_size=2, key=jax.random.key(0))
    >>> step = jax.jit(make_train_step(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), opt))
    >>> w = jnp.zeros(2)
    >>> w, state, metrics = step(w, opt.init(w), jnp.array([[1.0, 2.0], [3.0, 2.0]]), mask=None)
    >>> w.tolist(), int(metrics.num_examples)
    ([1.0, 1.0], 2)
    """
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise TypeError(f"optimizer must be an Optax gradient transformation; got {optimizer!r}.")
    if microbatch_size is not None:
        validate.positive_int(microbatch_size=microbatch_size)
    if getattr(loss_fn, "makes_promise", False):
        if microbatch_size is not None or has_aux or engine != "auto":
            raise ValueError(
                "this loss_fn computes its own gradients (dpopt.federated.client_deltas, dpopt.users.per_user_grads): "
                "pass microbatch_size to it, and the engine to per_user_grads; it does not support has_aux."
            )
        return TrainStep(optimizer, loss_fn)
    grads_fn = per_example_grads(loss_fn, engine=engine, microbatch_size=microbatch_size, has_aux=has_aux)
    return TrainStep(optimizer, grads_fn, has_aux)


def _metrics(grads: PerExampleGrads) -> SensitiveMetrics:
    seen = grads.sensitive
    counted = seen.is_example & seen.is_finite
    total = jnp.maximum(jnp.sum(counted), 1)

    def mean(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(counted, values, 0)) / total

    return SensitiveMetrics(
        loss=mean(cast(jax.Array, seen.losses)),  # None only for gradients that no loss was given for
        mean_norm=mean(seen.norms),
        clip_fraction=mean(seen.was_clipped),
        num_examples=jnp.sum(seen.is_example, dtype=jnp.int32),
        num_nonfinite=jnp.sum(seen.is_example & ~seen.is_finite, dtype=jnp.int32),
    )
