"""Which examples are whose, and how many of each user's are taken: host-side NumPy, before any gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np

from dpopt import _validate
from dpopt._data import rows_of


class Users(NamedTuple):
    """Examples of users that hold different numbers of them, padded to the same: a batch for `per_user_grads`.

    *Privacy*: private data.

    >>> Users(np.ones((10, 3, 2)), np.ones((10, 3), bool)).example_mask.shape
    (10, 3)
    """

    data: Any  # leaves (users, examples, ...)
    example_mask: Any  # (users, examples) bool, False for padding


@dataclasses.dataclass(frozen=True)
class Groups:
    """Which examples are whose, and which of them are taken; made by `group`.

    Attributes:
        num_users: how many users there are: what a sampler or a plan takes for ``num_examples``.
        max_examples: how many examples of a user are taken at most.
        resample: whether they are drawn anew for every batch.

    *Privacy*: holds private data: who has how many examples. `num_users` is taken to be public.
    """

    num_users: int
    max_examples: int
    resample: bool
    _order: np.ndarray = dataclasses.field(repr=False)  # (examples,): row numbers, user by user
    _first: np.ndarray = dataclasses.field(repr=False)  # (users + 1,): where each user's begin
    _seed: int | None = dataclasses.field(repr=False)

    def rows(self, users: np.ndarray, step: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers of some users' examples, ``(users, max_examples)`` int64, and the mask of those that count.

        Args:
            users: ``(n,)`` integers below `num_users`.
            step: which draw, where examples are drawn anew for every batch.
        """
        users = np.asarray(users)
        start, counts = self._first[users], self._first[users + 1] - self._first[users]
        place = np.broadcast_to(np.arange(self.max_examples), (len(users), self.max_examples))
        mask = place < counts[:, None]
        place = np.where(mask, place, 0)  # padding repeats an example of the user's own
        if self.resample and (many := np.flatnonzero(counts > self.max_examples)).size:
            place[many] = self._drawn(counts[many], step)
        return self._order[start[:, None] + place], mask

    def _drawn(self, counts: np.ndarray, step: int) -> np.ndarray:
        """Without replacement, for each user by itself: the examples with the smallest of independent numbers."""
        numbers = np.random.default_rng([cast(int, self._seed), step]).random((len(counts), counts.max()))
        numbers[np.arange(counts.max()) >= counts[:, None]] = np.inf
        return np.argpartition(numbers, self.max_examples - 1, axis=1)[:, : self.max_examples]

    def batches(self, data: Any) -> UserBatches:
        """The data as `dpopt.train`, ``Plan.run`` and `dpopt.Steps` take them: users' numbers in, `Users` out.

        Args:
            data: with a row for every example, in any form that `dpopt.train` takes.
        """
        return UserBatches(self, rows_of(data, len(self._order)))


@dataclasses.dataclass(frozen=True)
class UserBatches:
    """A function from users' numbers ``(n,)`` to a batch of `Users`; made by `Groups.batches`.

    *Privacy*: reads private data, and returns it.
    """

    groups: Groups
    fetch: Callable[[np.ndarray], Any]

    def __len__(self) -> int:
        return self.groups.num_users

    def __call__(self, users: np.ndarray) -> Users:
        return self._read(0, users)

    @property
    def at_step(self) -> Callable[[int, np.ndarray], Users] | None:
        """The same with the number of the step before the users', where examples are drawn anew; else None."""
        return self._read if self.groups.resample else None

    def _read(self, step: int, users: np.ndarray) -> Users:
        rows, mask = self.groups.rows(users, step)
        flat = self.fetch(rows.reshape(-1))
        return Users(jax.tree.map(lambda x: x.reshape(rows.shape + x.shape[1:]), flat), mask)


def group(
    user_ids: Any, *, max_examples: int, how: Literal["first", "sample", "resample"] = "first", seed: int | None = None
) -> Groups:
    """Groups examples by user, and bounds how many of each user's are taken.

    Args:
        user_ids: ``(examples,)`` integers or strings: whose each example is. An example that several users share has no
            place here: leave it out, or give it to one of them before the data are looked at.
        max_examples: how many examples of a user a batch has room for. It bounds the time and memory that a user takes;
            privacy is bounded by the clip, whatever it is.
        how: ``"first"``: the first ones in the data's order (greedy). ``"sample"``: a uniform subset, drawn once.
            ``"resample"``: a uniform subset, drawn anew for every batch, so that in time all examples are used.
        seed: of the draws: non-negative, and as secret as the data, like a sampler's.

    Returns:
        `Groups`. User i has the i-th of the sorted ids.

    Raises:
        ValueError, TypeError: for ids that are not one an example, or another bad argument.

    *Privacy*: which of a user's examples are taken depends on nothing but these examples, their order, and draws of the
    user's own. So one user more changes no other's row, and the clip bounds what all of the user's examples add. That
    an example is its user's alone is your word for it.

    >>> groups = group(["ann", "bob", "ann", "ann"], max_examples=2)
    >>> groups.num_users, groups.rows(np.array([0, 1]))[0].tolist()
    (2, [[0, 2], [1, 1]])
    """
    ids = np.asarray(user_ids)
    if ids.ndim != 1:
        raise ValueError(
            f"user_ids must name one user an example, (examples,); got shape {ids.shape}. An example of several users "
            "cannot be bounded user by user: leave it out, or give it to one of them."
        )
    if not (np.issubdtype(ids.dtype, np.integer) or ids.dtype.kind in "US"):
        if ids.dtype != object or not all(isinstance(i, str) for i in ids):
            raise TypeError(f"user_ids must be integers or strings, one an example; got dtype {ids.dtype}.")
        ids = ids.astype(str)
    if not len(ids):
        raise ValueError("user_ids is empty: there is nobody to train on.")
    _validate.positive_int(max_examples=max_examples)
    _validate.one_of(("first", "sample", "resample"), how=how)
    if (seed is None) != (how == "first"):
        raise ValueError(
            f"how={how!r} {'draws, and needs a seed' if seed is None else 'draws nothing: leave seed out'}."
        )
    if seed is not None:
        _validate.non_negative_int(seed=seed)
    names, user = np.unique(ids, return_inverse=True)
    rank = np.random.default_rng(cast(int, seed)).random(len(user)) if how == "sample" else np.arange(len(user))
    first = np.concatenate([[0], np.cumsum(np.bincount(user))])
    return Groups(len(names), int(max_examples), how == "resample", np.lexsort((rank, user)), first, seed)
