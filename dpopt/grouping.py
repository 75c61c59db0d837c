"""Grouping examples by user, and bounding how many of each user are taken: NumPy on the host, before any gradient."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np
import numpy.typing as npt

from dpopt.common import validate
from dpopt.common.types import PyTree
from dpopt.run.data import rows_of

_USER_DRAWS = 0x75736572  # keeps these draws apart from those of samplers, which use [seed, step]


class Users(NamedTuple):
    """A batch for `per_user_grads`: the examples of each user, padded to the same number.

    *Privacy*: private data.

    >>> Users(np.ones((10, 3, 2)), np.ones((10, 3), bool)).example_mask.shape
    (10, 3)
    """

    data: PyTree  # leaves (users, examples, ...)
    example_mask: jax.Array | np.ndarray  # (users, examples) bool, False for padding


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """The examples of each user, and the rule by which they are taken; made by `group`.

    Attributes:
        num_users: number of users: the ``num_examples`` of a sampler or a plan.
        max_examples: largest number of examples taken of a user.
        resample: whether they are drawn again for every batch.

    *Privacy*: holds private data: who has how many examples. `num_users` is assumed to be public.
    """

    num_users: int
    max_examples: int
    resample: bool
    _order: npt.NDArray[np.int64] = dataclasses.field(repr=False)  # (examples,): row numbers, user by user
    _first: npt.NDArray[np.int64] = dataclasses.field(repr=False)  # (users + 1,): start of each user in _order
    _ids: np.ndarray = dataclasses.field(repr=False)  # (users,), sorted
    _seed: int | None = dataclasses.field(repr=False)  # None: the first examples are taken

    def rows(
        self, users: npt.NDArray[np.integer], step: int | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Row numbers of the examples of some users, ``(users, max_examples)``, and a mask, False for padding.

        Args:
            users: ``(n,)`` integers below `num_users`.
            step: step of the run, required with `resample`.

        Raises:
            ValueError: if ``step`` is missing.
        """
        if self.resample and step is None:
            raise ValueError(
                "these groups draw the examples of a user again at every step (how='resample'), but no step was given: "
                "pass step=t to rows, read batches by at_step(t, users), or use dpopt.Steps or dpopt.train."
            )
        users = np.asarray(users)
        start, counts = self._first[users], self._first[users + 1] - self._first[users]
        place = np.broadcast_to(np.arange(self.max_examples), (len(users), self.max_examples))
        mask = place < counts[:, None]
        place = np.where(mask, place, 0)  # padding repeats the user's first example
        if self._seed is not None:
            for i in np.flatnonzero(counts > self.max_examples):
                draws = self._draws(users[i], step if self.resample else None)
                place[i] = draws.choice(counts[i], self.max_examples, replace=False)
        return self._order[start[:, None] + place], mask

    def _draws(self, user: int, step: int | None) -> np.random.Generator:
        """The generator of one user, from their id, so that it does not depend on other users."""
        name = int.from_bytes(hashlib.blake2b(str(self._ids[user]).encode(), digest_size=16).digest())
        return np.random.default_rng([cast(int, self._seed), _USER_DRAWS, name] + ([] if step is None else [1, step]))

    def batches(self, data: Any) -> UserBatches:
        """A function from user numbers to `Users`, for `dpopt.train`, ``Plan.run`` and `dpopt.Steps`.

        ``data`` has one row per example, in any form that `dpopt.train` takes.
        """
        return UserBatches(self, rows_of(data, len(self._order)))


@dataclasses.dataclass(frozen=True)
class UserBatches:
    """A function from user numbers ``(n,)`` to a batch of `Users`; made by `Groups.batches`.

    With `Groups.resample`, read batches by ``at_step(step, users)``; a call raises a ValueError.

    *Privacy*: reads and returns private data.
    """

    are_ranks = True  # user numbers depend on who else is there

    groups: Groups
    fetch: Callable[[npt.NDArray[np.int64]], PyTree]  # row numbers to rows

    def __len__(self) -> int:
        return self.groups.num_users

    def __call__(self, users: npt.NDArray[np.integer]) -> Users:
        return self._read(None, users)

    @property
    def at_step(self) -> Callable[[int, npt.NDArray[np.integer]], Users] | None:
        """A function of step and user numbers if examples are drawn again for every batch; None otherwise."""
        return self._read if self.groups.resample else None

    def _read(self, step: int | None, users: npt.NDArray[np.integer]) -> Users:
        rows, mask = self.groups.rows(users, step)
        flat = self.fetch(rows.reshape(-1))
        return Users(jax.tree.map(lambda x: x.reshape(rows.shape + x.shape[1:]), flat), mask)


def group(
    user_ids: Sequence[int | str] | np.ndarray,
    *,
    max_examples: int,
    how: Literal["first", "sample", "resample"] = "first",
    seed: int | None = None,
) -> Groups:
    """Groups examples by user, and bounds how many of each user are taken.

    Args:
        user_ids: ``(examples,)`` integers or strings: the user of each example. For an example that several users
            share, leave it out, or assign it to one of them without looking at the data.
        max_examples: largest number of examples of a user in a batch, for time and memory. (The clip bounds privacy.)
        how: ``"first"``: the first examples in the order of the data (greedy). ``"sample"``: a uniform subset, drawn
            once. ``"resample"``: a uniform subset, drawn again for every batch, so that in time all examples are used.
        seed: a non-negative integer for the draws, as secret as the data. It may be the seed of the sampler.

    Returns:
        `Groups`. User i has the i-th of the sorted ids; samplers that take parts of the data by number are refused.

    Raises:
        ValueError, TypeError: if there is not one id per example, or for another bad argument.

    *Privacy*: which examples of a user are taken depends only on the examples of this user, their order, and the user's
    own draws (from seed, id and step). So another user changes no other row, and the clip bounds what all examples of a
    user add. dpopt cannot check that an example belongs to one user alone.

    >>> groups = group(["ann", "bob", "ann", "ann"], max_examples=2)
    >>> groups.num_users, groups.rows(np.array([0, 1]))[0].tolist()
    (2, [[0, 2], [1, 1]])
    """
    ids = np.asarray(user_ids)
    if ids.ndim != 1:
        raise ValueError(
            f"user_ids must have one user per example, (examples,); got shape {ids.shape}. Leave out an example of "
            "several users, or assign it to one of them."
        )
    if not (np.issubdtype(ids.dtype, np.integer) or ids.dtype.kind in "US"):
        if ids.dtype != object or not all(isinstance(i, str) for i in ids):
            raise TypeError(f"user_ids must be integers or strings; got dtype {ids.dtype}.")
        ids = ids.astype(str)
    if not len(ids):
        raise ValueError("user_ids is empty: there are no users to train on.")
    validate.positive_int(max_examples=max_examples)
    validate.one_of(("first", "sample", "resample"), how=how)
    if (seed is None) != (how == "first"):
        raise ValueError(
            f"how={how!r} {'draws at random: pass a seed' if seed is None else 'is not random: leave out seed'}."
        )
    if seed is not None:
        validate.non_negative_int(seed=seed)
    names, user = np.unique(ids, return_inverse=True)
    first = np.concatenate([[0], np.cumsum(np.bincount(user))])
    by_user = np.argsort(user, kind="stable")
    return Groups(len(names), int(max_examples), how == "resample", by_user, first, names, seed)
