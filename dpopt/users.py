"""User-level privacy without local training: one gradient per user, clipped as a whole.

`group` assigns examples to users and bounds how many of each user are taken, `per_user_grads` makes one gradient of
them by the same engines as for examples, and a sampler draws users. For local training see `dpopt.federated`.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpopt import verification
from dpopt._units import arrays_of, stated_for
from dpopt.chain import PrivateOptimizer
from dpopt.common import trees, validate
from dpopt.common.types import Batch, LossFn, PyTree
from dpopt.constants import wrapped
from dpopt.engines import batches, promises
from dpopt.gradients import Engine, PerExampleGrads, per_example_grads
from dpopt.grouping import Groups as Groups
from dpopt.grouping import UserBatches as UserBatches
from dpopt.grouping import Users as Users
from dpopt.grouping import group as group


class _UserLoss(promises.Rows):
    """Deferred gradients of rows that are users: ``(examples, example mask)``."""

    unit = "user"

    def examples(self, row: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
        examples, counts = row
        return (examples[0] if getattr(self.loss_fn, "takes_key", False) else examples), counts

    def _value_and_grad(self, row: tuple[PyTree, jax.Array]) -> tuple[jax.Array, PyTree]:
        return jax.value_and_grad(self.loss)(self.params, row)


def per_user_grads(
    loss_fn: LossFn,
    *,
    reduce: Literal["sum", "mean"] = "mean",
    engine: Engine = "auto",
    microbatch_size: int | None = None,
    memory: float | int = 1.25,
) -> Callable[..., PerExampleGrads]:
    r"""Makes ``f(params, user_batches, *, mask, example_mask=None)``, a promise of one gradient per user.

    Row u is the gradient of the mean (or sum) of the losses of all examples of user u, and is clipped as a whole.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``, the loss of one example.
        reduce: ``"mean"`` weights all users equally; ``"sum"`` those with many examples more, up to the clip.
        engine, memory: see `dpopt.per_example_grads`; losses have one more axis.
        microbatch_size: number of users to process at a time; see `dpopt.per_example_grads`.

    Returns:
        A function of ``params``; ``user_batches``, leaves ``(users, examples, ...)``, or `Users`; ``mask``,
        ``(users,)`` bool, and ``example_mask``, ``(users, examples)`` bool: False for padding, which may hold any
        values, None if there is none. A user contributes zero if there are no examples, or any loss or gradient of
        theirs is not finite. ``SensitiveAux.losses`` holds the sum or mean of each user. Train steps, `dpopt.train` and
        ``Plan.run`` accept the function in place of a loss (``Builder(..., unit="user")``).

    Raises:
        ValueError, TypeError: for a bad argument; in the returned function, for anything that does not fit.

    *Privacy*: the unit is the user: the clip bounds what all examples of one user add together, which must be in one
    row. Mark the optimizer by `user_level`, and sample users: ``expected_batch_size`` and the sampler count them.

    >>> grads = per_user_grads(lambda w, x: 0.5 * (w - x) ** 2)
    >>> grads(jnp.array(0.0), jnp.array([[4.0, 2.0], [8.0, 8.0]]), mask=None).materialize().tolist()
    [-3.0, -8.0]
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (params, example); got {loss_fn!r}.")
    validate.one_of(("sum", "mean"), reduce=reduce)

    make = functools.partial(_user_grads, reduce=reduce, engine=engine, microbatch_size=microbatch_size, memory=memory)
    return wrapped(make, loss_fn)


def _user_grads(
    loss_fn: LossFn, *, reduce: str, engine: Engine, microbatch_size: int | None, memory: float
) -> Callable[..., PerExampleGrads]:
    def of_user(loss_fn: LossFn, params: PyTree, row: tuple[PyTree, jax.Array]) -> jax.Array:
        examples, counts = row
        losses = jax.vmap(loss_fn, in_axes=(None, 0))(params, examples)
        total = jnp.sum(jnp.where(counts, losses, 0))
        return total if reduce == "sum" else total / jnp.maximum(jnp.sum(counts), 1).astype(total.dtype)

    loss_of_user = wrapped(lambda loss_fn: functools.partial(of_user, loss_fn), loss_fn)
    of_rows = per_example_grads(loss_of_user, engine=engine, microbatch_size=microbatch_size, memory=memory)

    @validate.requires_mask
    def promise(
        params: PyTree, user_batches: Batch, *, mask: ArrayLike | None, example_mask: ArrayLike | None = None
    ) -> PerExampleGrads:
        validate.floating_params(params)
        batch = _prepared(loss_fn, params, user_batches, example_mask)
        mask = batches.checked_mask(mask, len(batch[1])) & jnp.any(batch[1], axis=1)
        of_rows(params, batch, mask=mask)  # checks them
        params, batch = jax.tree.map(jnp.asarray, (params, batch))
        rows = _UserLoss(loss_of_user, params, batch, len(mask), engine, microbatch_size, False, memory)
        return PerExampleGrads(rows, mask)

    def verify(params: PyTree, user_batches: Batch, *, scale: PyTree) -> None:
        options = {"engine": engine, "microbatch_size": microbatch_size, "scale": scale}
        verification.verify_once(loss_of_user, params, _prepared(loss_fn, params, user_batches, None), **options)

    marked = cast(Any, promise)  # attributes read by train steps and by the training loop
    marked.makes_promise, marked.verify = True, verify
    return promise


def _prepared(
    loss_fn: LossFn, params: PyTree, user_batches: Batch, example_mask: ArrayLike | None
) -> tuple[PyTree, jax.Array]:
    """A checked batch with users as rows: ``(examples, example mask)``."""
    has_keys = type(user_batches) is tuple and len(user_batches) == 2 and isinstance(user_batches[0], Users)
    user_batches, keys = user_batches if has_keys else (user_batches, None)  # paired by the training loop
    data, (users, examples), example_mask = arrays_of(user_batches, example_mask, Users, "user")
    if example_mask is None:
        example_mask = jnp.ones((users, examples), bool)
    else:
        data = _without_padding(data, example_mask)
    if keys is not None:
        data = data, jax.vmap(lambda key: jax.random.split(key, examples))(keys)
    each = jax.tree.map(lambda x: x.reshape((users * examples,) + x.shape[2:]), data)
    batches.check_loss(loss_fn, params, each, has_aux=False)
    return data, example_mask


def user_level(optimizer: PrivateOptimizer) -> PrivateOptimizer:
    """The same optimizer with its privacy stated for users; it refuses gradients of single examples.

    Args:
        optimizer: what a named optimizer, `dpopt.privatize` or `dpopt.chain` returns.

    Raises:
        TypeError: if it is another kind of transformation; in ``update``, if rows are not users.

    *Privacy*: ``privacy.unit`` is ``"user"``: the event holds for adding or removing one user with all their examples.

    >>> import dpopt
    >>> user_level(dpopt.dp_sgd(
    ...     1.0, l2_clip_norm=0.5, noise_multiplier=1.0, expected_batch_size=20, key=jax.random.key(0))).privacy.unit
    'user'
    """
    return stated_for("user", optimizer)


def _without_padding(data: PyTree, example_mask: jax.Array) -> PyTree:
    """Replaces padding by the first example of the user, since a NaN in padding would remain in the sum as NaN * 0.

    A user with no examples keeps the padding; the mask of the rows excludes that user.
    """
    first = jnp.argmax(example_mask, axis=1)

    def filled(x: jax.Array) -> jax.Array:
        own = jax.vmap(lambda row, i: row[i])(x, first)
        return jnp.where(trees.per_example(example_mask, x), x, own[:, None])

    return jax.tree.map(filled, data)
