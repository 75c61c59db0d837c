"""Flax: per-example losses of linen and NNX models, and an NNX optimizer that accepts promises of gradients.

Requires ``dpopt[flax]``; nothing else in dpopt imports Flax.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import errors, linen, nnx

from dpopt.common import validate
from dpopt.common.types import Batch, Example, LossFn, PyTree
from dpopt.constants import with_constants
from dpopt.engines import batches
from dpopt.flax_layers import check as check
from dpopt.flax_layers import draws, refuse, statistics, updated, watch
from dpopt.flax_layers import replace_batch_norm as replace_batch_norm
from dpopt.gradients import Engine, PerExampleGrads, per_example_grads
from dpopt.inspection import inspect_optimizer


def example_loss(batch_loss: Callable[..., jax.Array]) -> LossFn:
    """The loss of one example, ``loss_fn(params, example)``: a loss of a batch, run on a batch of one.

    Args:
        batch_loss: ``batch_loss(params, batch) -> scalar``, the mean or the sum over a batch, without interaction
            between its examples (no batch normalisation, whose statistics mix them).

    Raises:
        TypeError: if ``batch_loss`` is not a function.

    *Privacy*: the loss of an example depends on that example alone.

    >>> mean_error = lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
    >>> float(example_loss(mean_error)(jnp.ones(2), {"x": jnp.array([1.0, 2.0]), "y": jnp.array(1.0)}))
    4.0
    """
    if not callable(batch_loss):
        raise TypeError(f"batch_loss must be a function of (params, batch); got {batch_loss!r}.")

    def loss_fn(params: PyTree, example: Example) -> jax.Array:
        return batch_loss(params, jax.tree.map(lambda x: jnp.asarray(x)[None], example))

    return loss_fn


def _random_example_loss(batch_loss: Callable[..., jax.Array]) -> LossFn:
    """`example_loss` of ``batch_loss(params, batch, key)``, for examples with or without a key."""

    def loss_fn(params: PyTree, example: Example) -> jax.Array:
        example, key = batches.example_and_key(example)
        return example_loss(lambda params, batch: batch_loss(params, batch, key))(params, example)

    cast(Any, loss_fn).takes_key = True  # read by `dpopt.train`
    return loss_fn


_NO_KEY = (
    "draws random numbers (dropout), but the example has no key, so all examples would share one draw. dpopt.train and "
    "Plan.run give every example a key; in your own loop, pass (examples, dpopt.example_keys(key, step, indices)) as "
    "the batch. To evaluate, turn dropout off: model.eval(), or deterministic=True."
)


def linen_loss(
    model: linen.Module,
    loss: Callable[..., jax.Array],
    *,
    variables: Mapping[str, PyTree] | None = None,
    rngs: Sequence[str] = (),
    **apply_kwargs: Any,
) -> LossFn:
    """``loss_fn(params, (x, y))`` from a linen model written for batches.

    Args:
        model: the module. It is applied to ``x[None]``.
        loss: ``loss(outputs, labels) -> scalar or (1,)``, such as
            ``optax.softmax_cross_entropy_with_integer_labels``; its arguments have a batch axis of one.
        variables: collections that are not trained (``{"batch_stats": ...}``, from public data), or None.
        rngs: the random streams that the model draws from, such as ``["dropout"]``.
        **apply_kwargs: passed to ``model.apply`` (``train=True``).

    Returns:
        A loss of ``params`` (``model.init(...)["params"]``) and one example ``(x, y)``. With ``rngs`` the example is
        ``((x, y), key)``: `dpopt.train` and ``Plan.run`` add keys, and `dpopt.example_keys` makes them.

    Raises:
        TypeError: if ``model`` is not a linen module.
        ValueError: if ``mutable`` is given, or parameters among the ``variables``; in the loss, if the model mixes
            examples (`check`), or draws without a key.

    *Privacy*: reads no data. Collections (running statistics) are not updated from private batches.

    >>> model = linen.Dense(3)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2)))["params"]
    >>> loss_fn = linen_loss(model, optax.softmax_cross_entropy_with_integer_labels)
    >>> loss_fn(params, (jnp.ones(2), jnp.array(1))).shape
    ()
    """
    if not isinstance(model, linen.Module):  # pyright: ignore[reportUnnecessaryIsInstance] for untyped callers
        raise TypeError(f"model must be a flax.linen module; got {type(model).__name__}. For NNX see nnx_loss.")
    if apply_kwargs.get("mutable"):
        raise ValueError(
            f"mutable={apply_kwargs['mutable']!r} would keep running statistics of private examples, without noise. "
            "Leave it out; collections in variables= are not updated."
        )
    if "params" in (variables or {}):
        raise ValueError(
            "variables has 'params', which are trained and come as the first argument of the loss. Pass the other "
            "collections alone: {'batch_stats': variables['batch_stats']}, or leave it out."
        )
    rngs = [rngs] if isinstance(rngs, str) else list(rngs)

    def batch_loss(params: PyTree, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        x, y = batch
        streams = {} if key is None else {name: jax.random.fold_in(key, i) for i, name in enumerate(rngs)}
        found: list[str] = []
        try:
            with linen.intercept_methods(watch(found)):
                outputs = model.apply({"params": params, **(variables or {})}, x, rngs=streams, **apply_kwargs)
        except errors.InvalidRngError as error:
            advice = "" if rngs else f" Name its random streams: linen_loss(..., rngs=['dropout']). ({error})"
            raise ValueError(f"{type(model).__name__} {_NO_KEY}{advice}") from error
        finally:
            refuse(model, found)  # also if Flax has raised an error for an immutable collection
        return jnp.mean(loss(outputs, y))

    return _random_example_loss(batch_loss) if rngs else example_loss(batch_loss)


def nnx_loss(model: nnx.Module, loss: Callable[..., jax.Array], *, wrt: Any = nnx.Param) -> tuple[LossFn, PyTree]:
    """``(loss_fn, params)`` from an NNX model written for batches.

    Args:
        model: the module; it is not changed. ``nnx.update(model, params)`` writes trained parameters to it.
        loss: ``loss(model, batch) -> scalar``, called with a merged model and a batch of one.
        wrt: NNX filter of the trained parameters. Other floating arrays are constants of the loss (`dpopt.constants`),
            which `dpopt.run.sharding.place_constants` places on a mesh; the rest is closed over.

    Returns:
        ``loss_fn(params, example)``, and the parameters as plain arrays in an NNX state. If the model draws random
        numbers (dropout, unless turned off), examples need keys: see `linen_loss`.

    Raises:
        TypeError: if ``model`` is not an NNX module.
        ValueError: if the filter selects nothing, or layers mix examples (`check`); in the loss, if it has no key.

    *Privacy*: reads no data. What the model updates in place while it runs (running statistics, counters) is discarded.

    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    >>> loss_fn, params = nnx_loss(model, lambda m, batch: cross_entropy(m(batch[0]), batch[1]).mean())
    >>> loss_fn(params, (jnp.ones(2), jnp.array(1))).shape
    ()
    """
    if not isinstance(model, nnx.Module):  # pyright: ignore[reportUnnecessaryIsInstance] for untyped callers
        raise TypeError(f"model must be an flax.nnx module; got {type(model).__name__}. For linen see linen_loss.")
    check(model)
    graphdef, params, keys, counts, frozen, rest = nnx.split(model, wrt, nnx.RngKey, nnx.RngCount, _is_floating, ...)
    if not jax.tree.leaves(params):
        raise ValueError(f"the filter {wrt!r} selects no parameters of {type(model).__name__}.")

    def batch_loss(frozen: PyTree, params: PyTree, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        own = keys if key is None else _streams(keys, key)
        merged = nnx.merge(graphdef, params, own, counts, frozen, rest, copy=True)
        before = statistics(merged)
        value = loss(merged, batch)
        refuse(model, updated(merged, before))
        if key is None and _has_drawn(merged, counts):
            raise ValueError(f"{type(model).__name__} {_NO_KEY}")
        return value

    takes_key = draws(model)
    of_example = _random_example_loss if takes_key else example_loss

    def loss_of(params: PyTree, example: Example, frozen: PyTree) -> jax.Array:
        return of_example(functools.partial(batch_loss, frozen))(params, example)

    cast(Any, loss_of).takes_key = takes_key
    return with_constants(loss_of, nnx.as_pure(frozen)), nnx.as_pure(params)


def nnx_grads(
    loss: Callable[..., jax.Array], *, wrt: Any = nnx.Param, microbatch_size: int | None = None, engine: Engine = "auto"
) -> Callable[..., PerExampleGrads]:
    """Replaces ``nnx.grad(loss)`` by a promise of per-example gradients: ``grads(model, batch, mask)``.

    Args:
        loss, wrt: see `nnx_loss`.
        microbatch_size, engine: see `dpopt.per_example_grads`.

    Returns:
        A function of the model, a batch with leaves ``(B, ...)`` (with dropout, ``(batch, keys)``, as from
        `dpopt.Steps` and `dpopt.example_keys`) and a mask. It returns the ``grads`` for `NNXOptimizer.update`.

    Raises:
        TypeError, ValueError: see `nnx_loss`, when the function is called.

    *Privacy*: see `dpopt.per_example_grads`.

    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> grads = nnx_grads(lambda m, x: jnp.mean(m(x) ** 2))(model, jnp.ones((4, 2)), mask=None)
    >>> grads.materialize()["kernel"].shape
    (4, 2, 3)
    """

    @validate.requires_mask
    def grads(model: nnx.Module, batch: Batch, mask: jax.Array | np.ndarray | None) -> PerExampleGrads:
        loss_fn, params = nnx_loss(model, loss, wrt=wrt)
        return per_example_grads(loss_fn, engine=engine, microbatch_size=microbatch_size)(params, batch, mask=mask)

    return grads


def _is_floating(path: object, value: Any) -> bool:
    del path
    return jnp.issubdtype(jnp.result_type(getattr(value, "dtype", value)), jnp.inexact)


def _streams(keys: PyTree, key: jax.Array) -> PyTree:
    """The state of all random streams, made from one key."""
    leaves, structure = jax.tree.flatten(keys)
    own = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    shaped = [k if x.ndim == 0 else jax.random.split(k, x.shape) for k, x in zip(own, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def _has_drawn(model: nnx.Module, counts: PyTree) -> bool:
    """Whether the counter of any stream has been replaced."""
    after = nnx.state(model, nnx.RngCount)
    return any(a is not b for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(counts), strict=True))


class NNXOptimizer(nnx.Optimizer[nnx.Module]):
    """An ``nnx.Optimizer`` whose ``update`` also accepts a promise of per-example gradients.

    ``nnx.Optimizer`` filters gradients as an NNX state, which a promise is not. Everything else is inherited.

    *Privacy*: that of the Optax transformation.

    >>> import dpopt
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> tx = dpopt.dp_sgd(0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=jax.random.key(0))
    >>> optimizer = NNXOptimizer(model, tx, wrt=nnx.Param)
    >>> loss_fn, params = nnx_loss(model, lambda m, x: jnp.mean(m(x) ** 2))
    >>> _ = optimizer.update(model, dpopt.per_example_grads(loss_fn)(params, jnp.ones((4, 2)), mask=None))
    >>> int(optimizer.step[...])
    1
    """

    def update(self, model: nnx.Module, grads: PerExampleGrads | PyTree, /, **kwargs: Any) -> optax.Updates:
        """Updates the state of the optimizer and the parameters of the model in place, and returns the updates.

        Args:
            model: the module that the optimizer was made for.
            grads: a promise made at the parameters of this model, or ordinary gradients.
            **kwargs: passed to the ``update`` of the Optax transformation.
        """
        if not isinstance(grads, PerExampleGrads):
            return super().update(model, grads, **kwargs)
        promise = cast(Any, grads)  # Optax annotates arrays only
        params = nnx.as_pure(nnx.state(model, self.wrt))
        if jax.tree.structure(promise.like) != jax.tree.structure(params):
            raise ValueError(
                f"the gradients are of other parameters than those that this optimizer trains (wrt={self.wrt!r}): give "
                "nnx_grads, or nnx_loss, and NNXOptimizer the same wrt."
            )
        opt_state = nnx.as_pure(self.opt_state)
        inspect_optimizer(self.tx, grads, opt_state, params, nnx.as_pure(kwargs))
        updates, new_state = self.tx.update(promise, opt_state, params, **nnx.as_pure(kwargs))
        nnx.update(model, optax.apply_updates(params, updates))
        nnx.update(self.opt_state, nnx.state(new_state))
        self.step[...] += 1
        return updates
