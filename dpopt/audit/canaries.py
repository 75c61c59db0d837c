"""Canaries: rows that are made to be found, and the data, the loss and the sampler of a run with them.

A canary has a row number of its own, after those of the data. A coin decides whether it is in the data; where it is
not, the sampler never draws it, so that the run is that of data without it. Everything else, expected batch size and
sampling probability included, is the same however the coins fall. (Samples of a fixed size stay that of data with a row
without gradient in its place: they count it and leave it out, and what a replaced example costs besides is not seen.)
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpopt.audit.directions import Directions, OneHot, RandomDirections
from dpopt.audit.planted_loss import Row, loss_change, with_gradients, without_number
from dpopt.common import validate
from dpopt.common.types import LossFn
from dpopt.federated import Clients
from dpopt.grouping import Users
from dpopt.run.data import like_rows, rows_of
from dpopt.samplers.truncated import TruncatedPoisson


class Planted(NamedTuple):
    """A run with canaries in it; made by `plant`.

    Attributes:
        loss_fn: in place of the user's loss.
        data: in place of the user's data: from row numbers to a batch.
        num_examples: rows of the data and of all canaries, in or out: what the sampler (or ``Builder``) is to count.
        included: ``(m,)`` bool, what the coins decided. Keep it from whoever trains and scores until scores are fixed.
        scores: ``scores(before, after)``: from parameters before and after the run to ``(m,)`` scores, for
            `one_run_bound`. Of gradient canaries, the inner product of each with the sum of all updates, turned so that
            more means "in"; of examples, by how much their loss fell.
        coins: a checksum of the coins under their seed, which a run keeps so as not to be resumed under others.

    *Privacy*: `included` is the secret that the audit tries to guess; `data` holds private rows.

    >>> canaries = gradient_canaries(jnp.zeros(8), 4, length=9.0, seed=0)
    >>> planted = plant(canaries, lambda w, x: w @ x, np.ones((10, 8)), 10, seed=0)
    >>> planted.num_examples, planted.included.shape
    (14, (4,))
    """

    loss_fn: LossFn
    data: Callable[[np.ndarray], Any]
    num_examples: int
    included: np.ndarray
    scores: Callable[[Any, Any], jax.Array]
    coins: str

    def sampler(self, sampler: Any) -> Any:
        """A sampler of `num_examples` rows, made to draw no canary that the coins left out."""
        if sampler.num_examples != self.num_examples:
            raise ValueError(
                f"the sampler draws from {sampler.num_examples} rows; with the canaries there are {self.num_examples}: "
                "build it with num_examples=planted.num_examples."
            )
        first = self.num_examples - len(self.included)
        remaining = _without(sampler, np.append(np.ones(first, bool), self.included))
        remaining.coins = self.coins
        return remaining

    def plan(self, plan: Any) -> Any:
        """The same `dpopt.Plan`, of the data in which canaries are as the coins decided."""
        return dataclasses.replace(plan, sampler=self.sampler(plan.sampler))


def _without(sampler: Any, is_present: np.ndarray) -> Any:
    present = np.flatnonzero(is_present)

    class Remaining(type(sampler)):  # pyright: ignore[reportUntypedBaseClass]  known at run time only
        def _draw(self, rng: np.random.Generator, step: int) -> np.ndarray:
            if isinstance(self.scheme, TruncatedPoisson):  # who is not there takes nobody's place in a cut
                drawn = present[rng.random(len(present)) < self.scheme.sampling_prob]
                return rng.permutation(drawn)[: self.scheme.max_batch_size]
            drawn = super()._draw(rng, step)
            return drawn[is_present[drawn]]

    remaining = copy.copy(sampler)
    remaining.__class__ = Remaining
    return remaining


def gradient_canaries(
    params: Any,
    count: int,
    *,
    length: float,
    seed: int,
    kind: str = "one_hot",
    usage: Any = None,
) -> Directions:
    """Canaries whose gradient is what an attacker would send: fixed directions, so long that only the clip bounds them.

    Args:
        params: the parameters; only shapes are read.
        count: m, how many.
        length: L2 norm of the gradient: some ten times the clip norm (after a diagonal before the clip, where there is
            one). Much more shows nothing more, and where a clip is forgotten the run diverges instead of telling.
        seed: of the directions, which are public.
        kind: ``"one_hot"``: each along a coordinate of its own, so that no two have anything in common, and cheap under
            either engine. ``"random"``: along a random direction over all parameters, nearly orthogonal to the others;
            takes memory as per-example gradients do. Take it for a clip in groups or layers, of which a one-hot
            gradient would fill one only.
        usage: for one-hot canaries, how much the data move each coordinate, like ``params`` (`coordinate_usage`): the
            least used ones are taken. None for coordinates at random.

    Raises:
        ValueError, TypeError: for a bad argument, or more one-hot canaries than coordinates.

    *Privacy*: reads public shapes; ``usage`` of private data makes the choice of coordinates private.

    >>> canaries = gradient_canaries({"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}, 5, length=9.0, seed=0)
    >>> len(canaries), float(canaries.along({"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, 0))
    (5, 9.0)
    """
    validate.floating_params(params)
    validate.positive_int(count=count)
    validate.non_negative_int(seed=seed)
    validate.positive(length=length)
    validate.one_of(("one_hot", "random"), kind=kind)
    if kind == "random":
        if usage is not None:
            raise ValueError("usage chooses coordinates, and random directions have none: pass kind='one_hot'.")
        return RandomDirections(count, float(length), seed)
    return OneHot.of(params, count, float(length), seed, usage)


def plant(canaries: Any, loss_fn: LossFn, data: Any, num_examples: int, *, seed: int | None = None) -> Planted:
    """Puts canaries into a run, each with a probability of one half.

    Args:
        canaries: what `gradient_canaries` returns; or examples, a pytree like a batch of ``data``, such as
            `random_examples` and `relabelled` make, whose losses give them away.
        loss_fn: ``loss_fn(params, example) -> scalar``, as for `dpopt.make_train_step` and `dpopt.train`. For clients,
            what `dpopt.federated.client_deltas` is to be given: give it ``planted.loss_fn``.
        data: as for `dpopt.train`: a pytree of arrays, a source of examples, or a function from row numbers to a batch.
        num_examples: how many rows the data have.
        seed: of the coins. None for the operating system's, as an audit needs: whoever trains or scores must not know.

    Raises:
        ValueError, TypeError: for data that do not fit.

    *Privacy*: changes which data a run reads. With canaries that are no copies of private rows, the run costs the
    people in the data what it costs without them.

    >>> import optax, dpopt
    >>> loss_fn = lambda w, x: jnp.sum((w - x) ** 2)
    >>> params, data = jnp.zeros(300), np.ones((100, 300), np.float32)
    >>> planted = plant(gradient_canaries(params, 200, length=9.0, seed=1), loss_fn, data, 100, seed=2)
    >>> builder = dpopt.Builder(
    ...     num_examples=planted.num_examples, expected_batch_size=30, steps=10, key=dpopt.secure_key())
    >>> plan = planted.plan(builder.clip(1.0).noise(1.0).then(optax.sgd(0.1)).build())
    >>> result = plan.run(planted.loss_fn, params, planted.data)
    >>> planted.scores(params, result.params).shape
    (200,)
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (params, example); got {loss_fn!r}.")
    validate.positive_int(num_examples=num_examples)
    if getattr(data, "at_step", None) is not None:
        raise TypeError(
            "these data draw a whole batch anew at each step, which has no rows to plant canaries in. Use group(..., "
            "how='sample'), which draws once."
        )
    rows = rows_of(data, num_examples)
    if isinstance(canaries, Directions):
        loss, examples, count = with_gradients(loss_fn, canaries), None, len(canaries)
    else:
        examples = jax.tree.map(np.asarray, canaries)
        count = jax.tree.leaves(examples)[0].shape[0]
        rows_of(examples, count)  # the same conditions
        loss = without_number(loss_fn)
    seed = secrets.randbits(128) if seed is None else seed
    included = np.random.default_rng(seed).random(count) < 0.5
    checksum = hashlib.blake2b(np.packbits(included).tobytes(), key=str(seed).encode()[:64], digest_size=8)

    def fetch(indices: np.ndarray) -> Any:
        indices = np.asarray(indices)
        number = np.where(indices < num_examples, -1, indices - num_examples).astype(np.int32)
        # A gradient canary stands in a row of the data, another one for each: were it one for all, and its gradient not
        # finite, no canary would have one.
        batch = rows(np.where(number < 0, indices, number % num_examples))
        if examples is not None:
            batch = jax.tree.map(lambda x, c: _chosen(number, np.asarray(x), c), batch, examples)
        if isinstance(batch, Clients | Users):  # whose rows hold many examples: each knows whose it is
            size = jax.tree.leaves(batch.data)[0].shape[:2]
            return type(batch)(Row(batch.data, np.broadcast_to(number[:, None], size)), batch.example_mask)
        return Row(batch, number)

    def scores(before: Any, after: Any) -> jax.Array:
        if isinstance(canaries, Directions):
            return -canaries.along_all(jax.tree.map(lambda b, a: jnp.subtract(a, b), before, after))
        return loss_change(loss_fn, before, after, examples)

    total = num_examples + count
    return Planted(loss, like_rows(fetch, rows, total), total, included, scores, checksum.hexdigest())


def _chosen(number: np.ndarray, x: np.ndarray, canaries: np.ndarray) -> np.ndarray:
    if x.shape[1:] != canaries.shape[1:]:
        raise ValueError(f"canaries have shape {canaries.shape[1:]} where examples have {x.shape[1:]}.")
    is_canary = (number >= 0).reshape((-1,) + (1,) * (x.ndim - 1))
    return np.where(is_canary, canaries[np.maximum(number, 0)].astype(x.dtype), x)


def coordinate_usage(loss_fn: LossFn, params: Any, batch: Any) -> Any:
    """How much each coordinate of the parameters is moved by a batch: the sum of squared per-example gradients.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``.
        params: floating pytree.
        batch: leaves ``(B, ...)``: public data, or data that the audit may read.

    Returns:
        Like ``params``, float32: for ``usage`` of `gradient_canaries`.

    *Privacy*: as private as the batch.

    >>> usage = coordinate_usage(lambda w, x: w @ x, jnp.zeros(3), jnp.array([[1.0, 2.0, 0.0], [0.0, 1.0, 0.0]]))
    >>> usage.tolist()
    [1.0, 5.0, 0.0]
    """

    def add(total: Any, example: Any) -> tuple[Any, None]:
        grads = jax.grad(loss_fn)(params, example)
        return jax.tree.map(lambda t, g: t + jnp.square(g.astype(jnp.float32)), total, grads), None

    zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
    return jax.jit(lambda batch: jax.lax.scan(add, zeros, batch)[0])(jax.tree.map(jnp.asarray, batch))
