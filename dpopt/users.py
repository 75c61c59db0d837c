"""User-level privacy without local training: all that a user contributes is one row, which is clipped as one.

`group` says which examples are whose and bounds how many of a user's are taken; `per_user_grads` makes one gradient of
them, by the engines that examples have; a sampler draws users. Users that train for themselves: `dpopt.federated`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp

from dpopt import verification
from dpopt._units import stated_for
from dpopt.chain import PrivateOptimizer
from dpopt.common import trees, validate
from dpopt.engines import batches, promises
from dpopt.gradients import Engine, PerExampleGrads, per_example_grads
from dpopt.grouping import Groups as Groups
from dpopt.grouping import UserBatches as UserBatches
from dpopt.grouping import Users as Users
from dpopt.grouping import group as group


class _UserLoss(promises.Loss):
    """Gradients to be, of rows that are users: ``(examples, which of them count)``."""

    unit = "user"

    def examples(self, row: Any) -> tuple[Any, jax.Array]:
        examples, counts = row
        return (examples[0] if getattr(self.loss_fn, "takes_key", False) else examples), counts


def per_user_grads(
    loss_fn: Callable[..., Any],
    *,
    reduce: Literal["sum", "mean"] = "mean",
    engine: Engine = "auto",
    microbatch_size: int | None = None,
    memory: float | int = 1.25,
) -> Callable[..., PerExampleGrads]:
    r"""Makes ``f(params, user_batches, *, mask, example_mask=None)``, which promises one gradient a user.

    Row u is the gradient of the sum or the mean of the losses of the examples of u, and is clipped as one.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``, the loss of one example.
        reduce: ``"mean"`` gives users the same weight; ``"sum"`` lets those with many examples say more, up to the
            clip. Privacy is the same.
        engine, memory: see `dpopt.per_example_grads`: the engines see one more axis.
        microbatch_size: how many users to process at a time; see `dpopt.per_example_grads`.

    Returns:
        A function of ``params``; ``user_batches``, leaves ``(users, examples, ...)``, or `Users`; ``mask``,
        ``(users,)`` bool, False for users that only fill up the batch, None if there are none; and ``example_mask``,
        ``(users, examples)`` bool, False for padding of users with fewer examples, None (the default) if there is none.
        Content under a False is irrelevant. A user without examples contributes zero, and so does one of whose examples
        any has a loss or a gradient that is not finite. ``SensitiveAux.losses`` holds the users' sums or means. Train
        steps, `dpopt.train` and ``Plan.run`` take it in a loss's place (``Builder(..., unit="user")``).

    Raises:
        ValueError, TypeError: for a bad argument; in the returned function, for parameters, batches, masks or losses
            that do not fit.

    *Privacy*: the unit is the user: the clip bounds all that one user's examples add together, however many. Say so
    with `user_level`, and sample users: ``expected_batch_size`` and the sampler count them. All of a user's examples
    must be in one row.

    >>> grads = per_user_grads(lambda w, x: 0.5 * (w - x) ** 2)
    >>> grads(jnp.array(0.0), jnp.array([[4.0, 2.0], [8.0, 8.0]]), mask=None).materialize().tolist()
    [-3.0, -8.0]
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (params, example); got {loss_fn!r}.")
    validate.one_of(("sum", "mean"), reduce=reduce)

    def loss_of_user(params: Any, row: tuple[Any, jax.Array]) -> jax.Array:
        examples, counts = row
        losses = jax.vmap(loss_fn, in_axes=(None, 0))(params, examples)
        total = jnp.sum(jnp.where(counts, losses, 0))
        return total if reduce == "sum" else total / jnp.maximum(jnp.sum(counts), 1).astype(total.dtype)

    takes_key = getattr(loss_fn, "takes_key", False)
    cast(Any, loss_of_user).takes_key = takes_key
    of_rows = per_example_grads(loss_of_user, engine=engine, microbatch_size=microbatch_size, memory=memory)

    def prepared(params: Any, user_batches: Any, example_mask: Any) -> tuple[Any, jax.Array]:
        """A batch of which each row is a user."""
        user_batches, keys = _without_keys(user_batches)
        if isinstance(user_batches, Users):
            if example_mask is not None:
                raise ValueError("Users hold an example_mask, and another was given.")
            user_batches, example_mask = user_batches
        data = jax.tree.map(jnp.asarray, user_batches)
        shape = users, examples = batches.grouped_shape(data, "user")
        example_mask = jnp.ones(shape, bool) if example_mask is None else example_mask
        example_mask = batches.checked_example_mask(example_mask, shape, "user")
        data = _without_padding(data, example_mask)
        if keys is not None:
            data = data, jax.vmap(lambda key: jax.random.split(key, examples))(keys)
        each = jax.tree.map(lambda x: x.reshape((users * examples,) + x.shape[2:]), data)
        batches.check_loss(loss_fn, params, each, has_aux=False)
        return data, example_mask

    @validate.requires_mask
    def promise(params: Any, user_batches: Any, *, mask: Any, example_mask: Any = None) -> PerExampleGrads:
        validate.floating_params(params)
        batch = prepared(params, user_batches, example_mask)
        mask = batches.checked_mask(mask, len(batch[1])) & jnp.any(batch[1], axis=1)
        rows = of_rows(params, batch, mask=mask)
        fields = {f.name: getattr(rows._source, f.name) for f in dataclasses.fields(promises.Loss)}
        rows._source = _UserLoss(**fields)
        return rows

    def verify(params: Any, user_batches: Any, *, scale: Any) -> None:
        options = {"engine": engine, "microbatch_size": microbatch_size, "scale": scale}
        verification.verify_once(loss_of_user, params, prepared(params, user_batches, None), **options)

    asked = cast(Any, promise)  # by train steps and by the loop
    asked.makes_promise, asked.takes_key, asked.verify = True, takes_key, verify
    return promise


def user_level(optimizer: PrivateOptimizer) -> PrivateOptimizer:
    """The same optimizer, whose privacy is stated for users, and which refuses gradients of single examples.

    Args:
        optimizer: what a named optimizer, `dpopt.privatize` or `dpopt.chain` returns.

    Raises:
        TypeError: if it is another kind of transformation; in ``update``, for anything but rows that are users.

    *Privacy*: ``privacy.unit`` is ``"user"``: the event holds for adding or removing one user with all their examples.

    >>> import dpopt
    >>> user_level(dpopt.dp_sgd(
    ...     1.0, l2_clip_norm=0.5, noise_multiplier=1.0, expected_batch_size=20, key=jax.random.key(0))).privacy.unit
    'user'
    """
    return stated_for("user", optimizer)


def _without_keys(batch: Any) -> tuple[Any, Any]:
    """Users and their keys, where the training loop has put keys beside them."""
    beside = isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], Users)
    return batch if beside else (batch, None)


def _without_padding(data: Any, example_mask: jax.Array) -> Any:
    """The same with a user's first example in the place of padding: what is NaN there would be NaN times 0 in the sum.

    A user of padding alone keeps it; the row's own mask leaves that user out.
    """
    first = jnp.argmax(example_mask, axis=1)

    def filled(x: jax.Array) -> jax.Array:
        own = jax.vmap(lambda row, i: row[i])(x, first)
        return jnp.where(trees.per_example(example_mask, x), x, own[:, None])

    return jax.tree.map(filled, data)
