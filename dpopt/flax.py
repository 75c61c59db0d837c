"""Flax models: a loss of one example from a linen or NNX model, and an NNX optimizer that takes promises.

Needs the extra ``dpopt[flax]``; nothing else in dpopt imports Flax.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import errors, linen, nnx

from dpopt.gradients import PerExampleGrads
from dpopt.inspection import inspect_optimizer


def example_loss(batch_loss: Callable) -> Callable:
    """A loss of one example from a loss of a batch.

    Args:
        batch_loss: ``batch_loss(params, batch) -> scalar``, the mean or the sum over a batch, without interaction
            between its examples (no batch normalisation: its statistics mix them).

    Returns:
        ``loss_fn(params, example)``, which runs ``batch_loss`` on a batch of one.

    Raises:
        TypeError: if ``batch_loss`` is no function.

    *Privacy*: changes nothing; an example's loss then depends on that example alone.

    >>> mean_error = lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
    >>> float(example_loss(mean_error)(jnp.ones(2), {"x": jnp.array([1.0, 2.0]), "y": jnp.array(1.0)}))
    4.0
    """
    if not callable(batch_loss):
        raise TypeError(f"batch_loss must be a function of (params, batch); got {batch_loss!r}.")

    def loss_fn(params, example):
        return batch_loss(params, jax.tree.map(lambda x: jnp.asarray(x)[None], example))

    return loss_fn


def linen_loss(model: linen.Module, loss: Callable, *, variables: Any = None, **apply_kwargs: Any) -> Callable:
    """``loss_fn(params, (x, y))`` from a linen model written for batches.

    Args:
        model: the module. It is applied to ``x[None]``.
        loss: ``loss(outputs, labels) -> scalar or (1,)``, such as
            ``optax.softmax_cross_entropy_with_integer_labels``; gets outputs and labels with a batch axis of one.
        variables: further collections that are not trained (``{"batch_stats": ...}``), or None.
        **apply_kwargs: passed to ``model.apply`` (``train=False``).

    Returns:
        A loss of ``params`` (what ``model.init(...)["params"]`` holds) and one example ``(x, y)``.

    Raises:
        TypeError: if ``model`` is no linen module.

    *Privacy*: changes nothing. Collections that are updated from raw batches (running statistics) are not private; here
    they stay as they are.

    >>> model = linen.Dense(3)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2)))["params"]
    >>> loss_fn = linen_loss(model, optax.softmax_cross_entropy_with_integer_labels)
    >>> loss_fn(params, (jnp.ones(2), jnp.array(1))).shape
    ()
    """
    if not isinstance(model, linen.Module):
        raise TypeError(f"model must be a flax.linen module; got {type(model).__name__}. For NNX see nnx_loss.")

    def batch_loss(params, batch):
        x, y = batch
        return jnp.mean(loss(model.apply({"params": params, **(variables or {})}, x, **apply_kwargs), y))

    return example_loss(batch_loss)


def nnx_loss(model: nnx.Module, loss: Callable, *, wrt: Any = nnx.Param) -> tuple[Callable, Any]:
    """``(loss_fn, params)`` from an NNX model written for batches.

    Args:
        model: the module; it is read, not changed. ``nnx.update(model, params)`` puts trained parameters back.
        loss: ``loss(model, batch) -> scalar``, given a merged model and a batch of one.
        wrt: NNX filter of what is trained; everything else (frozen parameters, constants) is closed over.

    Returns:
        ``loss_fn(params, example)``, and the parameters as plain arrays in an NNX state.

    Raises:
        TypeError: if ``model`` is no NNX module; ValueError: if the filter selects nothing; in the loss, if the model
            changes a variable of its own while it runs (its random streams, batch statistics, a counter).

    *Privacy*: changes nothing. What the model updates in place while it runs (running statistics) is dropped.

    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    >>> loss_fn, params = nnx_loss(model, lambda m, batch: cross_entropy(m(batch[0]), batch[1]).mean())
    >>> loss_fn(params, (jnp.ones(2), jnp.array(1))).shape
    ()
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model must be an flax.nnx module; got {type(model).__name__}. For linen see linen_loss.")
    graphdef, params, rest = nnx.split(model, wrt, ...)
    if not jax.tree.leaves(params):
        raise ValueError(f"the filter {wrt!r} selects no parameters of {type(model).__name__}.")

    def batch_loss(params, batch):
        try:
            return loss(nnx.merge(graphdef, params, rest), batch)
        except errors.TraceContextError as error:
            raise ValueError(
                f"{type(model).__name__} changes a variable of its own while it runs ({error}): a loss of one example "
                "has nowhere to keep it. Dropout: make the model without rngs, and pass those of the example at the "
                "call, model(x, rngs=nnx.Rngs(dropout=key)) with a key in the batch. Batch normalisation mixes "
                "examples: use LayerNorm or GroupNorm, or freeze its statistics by model.eval(). Counters: keep them "
                "out of the loss."
            ) from error

    return example_loss(batch_loss), nnx.as_pure(params)


class NNXOptimizer(nnx.Optimizer):
    """``nnx.Optimizer`` whose ``update`` also takes a promise of per-example gradients.

    ``nnx.Optimizer`` filters its gradients as an NNX state, which a promise is not. All else is inherited.

    *Privacy*: that of the Optax transformation it holds.

    >>> import dpopt
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> tx = dpopt.dp_sgd(0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=jax.random.key(0))
    >>> optimizer = NNXOptimizer(model, tx, wrt=nnx.Param)
    >>> loss_fn, params = nnx_loss(model, lambda m, x: jnp.mean(m(x) ** 2))
    >>> _ = optimizer.update(model, dpopt.per_example_grads(loss_fn)(params, jnp.ones((4, 2)), mask=None))
    >>> int(optimizer.step[...])
    1
    """

    def update(self, model: nnx.Module, grads: Any, /, **kwargs: Any) -> optax.Updates:
        """Updates the optimizer's state and the model's parameters in place.

        Args:
            model: the module the optimizer was made for.
            grads: a promise, made at this model's parameters.
            **kwargs: passed to the Optax transformation's ``update``.

        Returns:
            The updates that were added to the parameters.
        """
        if not isinstance(grads, PerExampleGrads):
            return super().update(model, grads, **kwargs)
        promise = cast(Any, grads)  # Optax's types know arrays only
        params = nnx.as_pure(nnx.state(model, self.wrt))
        opt_state = nnx.as_pure(self.opt_state)
        inspect_optimizer(self.tx, grads, opt_state, params, nnx.as_pure(kwargs))
        updates, new_state = self.tx.update(promise, opt_state, params, **nnx.as_pure(kwargs))
        nnx.update(model, optax.apply_updates(params, updates))
        nnx.update(self.opt_state, nnx.state(new_state))
        self.step[...] += 1
        return updates
