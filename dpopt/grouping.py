"""Which examples are whose, and how many of each user's are taken: host-side NumPy, before any gradient."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np

from dpopt.common import validate
from dpopt.run.data import rows_of

_DRAWS = 0x75736572  # so that a sampler of the same seed, which draws from [seed, step], is independent of these


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
    _ids: np.ndarray = dataclasses.field(repr=False)  # (users,), sorted
    _seed: int | None = dataclasses.field(repr=False)  # None: the first ones are taken

    def rows(self, users: np.ndarray, step: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers of some users' examples, ``(users, max_examples)`` int64, and the mask of those that count.

        Args:
            users: ``(n,)`` integers below `num_users`.
            step: of the run, where examples are drawn anew for every batch (`resample`).

        Raises:
            ValueError: if examples are drawn anew, and no step says which draw.
        """
        if self.resample and step is None:
            raise ValueError(
                "these groups draw each user's examples anew at every step (how='resample'), and no step was given: "
                "the same few would be taken every time. Pass step=t to rows; read batches by at_step(t, users), or "
                "let dpopt.Steps or dpopt.train do it."
            )
        users = np.asarray(users)
        start, counts = self._first[users], self._first[users + 1] - self._first[users]
        place = np.broadcast_to(np.arange(self.max_examples), (len(users), self.max_examples))
        mask = place < counts[:, None]
        place = np.where(mask, place, 0)  # padding repeats an example of the user's own
        if self._seed is not None:
            for i in np.flatnonzero(counts > self.max_examples):
                draws = self._draws(users[i], step if self.resample else None)
                place[i] = draws.choice(counts[i], self.max_examples, replace=False)
        return self._order[start[:, None] + place], mask

    def _draws(self, user: int, step: int | None) -> np.random.Generator:
        """The user's own, by their id: whoever else takes part, they are the same."""
        name = int.from_bytes(hashlib.blake2b(str(self._ids[user]).encode(), digest_size=16).digest())
        return np.random.default_rng([cast(int, self._seed), _DRAWS, name] + ([] if step is None else [1, step]))

    def batches(self, data: Any) -> UserBatches:
        """The data as `dpopt.train`, ``Plan.run`` and `dpopt.Steps` take them: users' numbers in, `Users` out.

        Args:
            data: with a row for every example, in any form that `dpopt.train` takes.
        """
        return UserBatches(self, rows_of(data, len(self._order)))


@dataclasses.dataclass(frozen=True)
class UserBatches:
    """A function from users' numbers ``(n,)`` to a batch of `Users`; made by `Groups.batches`.

    Where examples are drawn anew for every batch, ``at_step(step, users)`` reads one, and a call raises a ValueError.

    *Privacy*: reads private data, and returns it.
    """

    groups: Groups
    fetch: Callable[[np.ndarray], Any]

    def __len__(self) -> int:
        return self.groups.num_users

    def __call__(self, users: np.ndarray) -> Users:
        return self._read(None, users)

    @property
    def at_step(self) -> Callable[[int, np.ndarray], Users] | None:
        """The same with the number of the step before the users', where examples are drawn anew; else None."""
        return self._read if self.groups.resample else None

    def _read(self, step: int | None, users: np.ndarray) -> Users:
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
        seed: of the draws: non-negative, and as secret as the data, like a sampler's, which may be the same.

    Returns:
        `Groups`. User i has the i-th of the sorted ids.

    Raises:
        ValueError, TypeError: for ids that are not one an example, or another bad argument.

    *Privacy*: which of a user's examples are taken depends on nothing but these examples, their order, and draws of
    the user's own (by seed, id and step). So one user more changes no other's row, and the clip bounds what all of the
    user's examples add. That an example is its user's alone is your word for it.

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
    validate.positive_int(max_examples=max_examples)
    validate.one_of(("first", "sample", "resample"), how=how)
    if (seed is None) != (how == "first"):
        raise ValueError(
            f"how={how!r} {'draws, and needs a seed' if seed is None else 'draws nothing: leave seed out'}."
        )
    if seed is not None:
        validate.non_negative_int(seed=seed)
    names, user = np.unique(ids, return_inverse=True)
    first = np.concatenate([[0], np.cumsum(np.bincount(user))])
    by_user = np.argsort(user, kind="stable")
    return Groups(len(names), int(max_examples), how == "resample", by_user, first, names, seed)
