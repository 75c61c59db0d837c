"""One training step, for the usual case."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from dpopt.common import validate
from dpopt.gradients import Engine, PerExampleGrads, per_example_grads
from dpopt.inspection import inspect_optimizer, privacy_of
from dpopt.privacy import Privacy


class SensitiveMetrics(NamedTuple):
    """What happened in a step, computed from raw private data.

    *Privacy*: nothing here is covered by epsilon. Look at it while developing on data that you may look at; do not
    publish it, and do not steer a private run by it.
    """

    loss: jax.Array  # (): mean over real, finite examples
    mean_norm: jax.Array  # (): mean gradient norm before the clip
    clip_fraction: jax.Array  # (): share of examples that the clip scaled down
    num_examples: jax.Array  # (), int32: real examples in the batch
    num_nonfinite: jax.Array  # (), int32: of these, dropped because their gradient held NaN or Inf


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
        """What a step costs, before sampling. For a chain bound to the parameters' tree use `dpopt.privacy_of`."""
        return privacy_of(self.optimizer)

    @validate.requires_mask
    def __call__(self, params: Any, opt_state: Any, batch: Any, mask: Any, **extra: Any) -> tuple[Any, ...]:
        """Takes one step.

        Args:
            params: floating pytree.
            opt_state: state of the optimizer.
            batch: leaves ``(B, ...)``.
            mask: ``(B,)`` bool, False for padding rows; None if no row is padding.
            **extra: passed to the optimizer's ``update`` (``public_grads=...``); names must start with ``public_``.

        Returns:
            New parameters, new state, `SensitiveMetrics`; and with ``has_aux`` what the loss returned beside its value,
            leaves ``(B, ...)``, as private as the batch.
        """
        grads = self.grads_fn(params, batch, mask=mask)
        try:
            inspect_optimizer(self.optimizer, grads, opt_state, params, extra)
        except ValueError as error:
            raise ValueError(f"the optimizer of this train step is not private: {error}") from error
        update = optax.with_extra_args_support(self.optimizer).update
        updates, opt_state = update(cast(Any, grads), opt_state, params, **extra)  # Optax's types know no promise
        new = optax.apply_updates(params, updates), opt_state, _metrics(grads)
        return (*new, grads.sensitive.aux) if self.has_aux else new


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    microbatch_size: int | None = None,
    engine: Engine = "auto",
    has_aux: bool = False,
) -> TrainStep:
    """Makes ``step(params, opt_state, batch, mask, **extra) -> (params, opt_state, metrics)``.

    The step is a plain function of arrays: wrap it in ``jax.jit``, call it in ``jax.lax.scan``, ``jax.vmap`` it over
    seeds. Whatever the microbatch size, noise is drawn once and the parameters move once.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``; see `dpopt.per_example_grads`, and `dpopt.flax` for making one
            from a Flax model. Or what `dpopt.federated.client_deltas` or `dpopt.users.per_user_grads` returns.
        optimizer: a private optimizer: by name, by `dpopt.chain`, or by ``optax.chain`` around dpopt's stages.
        microbatch_size: see `dpopt.per_example_grads`.
        engine: see `dpopt.per_example_grads`.
        has_aux: whether the loss returns a second value; the step returns it after the metrics, example by example.

    Raises:
        ValueError, TypeError: for a bad argument; on the first step, if the optimizer does not clip and then add noise,
            lets anything get past the two (see `dpopt.inspection`), or is told what is not public.

    *Privacy*: that of the optimizer, for one step on the batch given; sampling the batch is up to the caller.

    >>> import dpopt
    >>> opt = dpopt.dp_sgd(0.5, l2_clip_norm=10.0, noise_multiplier=0.0, expected_batch_size=2, key=jax.random.key(0))
    >>> step = jax.jit(make_train_step(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), opt))
    >>> w = jnp.zeros(2)
    >>> w, state, metrics = step(w, opt.init(w), jnp.array([[1.0, 2.0], [3.0, 2.0]]), mask=None)
    >>> w.tolist(), int(metrics.num_examples)
    ([1.0, 1.0], 2)
    """
    if not callable(getattr(optimizer, "update", None)):
        raise TypeError(f"optimizer must be an Optax gradient transformation; got {optimizer!r}.")
    if microbatch_size is not None:
        validate.positive_int(microbatch_size=microbatch_size)
    if getattr(loss_fn, "makes_promise", False):
        if microbatch_size is not None or has_aux or engine != "auto":
            raise ValueError(
                "this loss_fn makes promises of its own (dpopt.federated.client_deltas, dpopt.users.per_user_grads): "
                "give it the microbatch_size, and per_user_grads the engine; it takes no has_aux."
            )
        return TrainStep(optimizer, loss_fn)
    grads_fn = per_example_grads(loss_fn, engine=engine, microbatch_size=microbatch_size, has_aux=has_aux)
    return TrainStep(optimizer, grads_fn, has_aux)


def _metrics(grads: PerExampleGrads) -> SensitiveMetrics:
    seen = grads.sensitive
    counted = seen.is_example & seen.is_finite
    total = jnp.maximum(jnp.sum(counted), 1)

    def mean(values):
        return jnp.sum(jnp.where(counted, values, 0)) / total

    return SensitiveMetrics(
        loss=mean(seen.losses),
        mean_norm=mean(seen.norms),
        clip_fraction=mean(seen.was_clipped),
        num_examples=jnp.sum(seen.is_example, dtype=jnp.int32),
        num_nonfinite=jnp.sum(seen.is_example & ~seen.is_finite, dtype=jnp.int32),
    )
