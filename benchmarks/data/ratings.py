"""MovieLens-100k: 100,000 ratings of films, from the official ``u.data``."""

from pathlib import Path

import numpy as np

from benchmarks import data

ADDRESS = "https://grouplens.org/datasets/movielens/100k/ (ml-100k.zip; research use, no redistribution)"
USERS, ITEMS = 943, 1_682


def load(where: str | Path | None = None, *, test_share: float = 0.2, seed: int = 0) -> data.Split:
    """Pairs ``(n, 2)`` int32 of user and film (from 0) and ratings 1 to 5 as float32; a random fifth is for testing.

    Raises:
        data.MissingData, data.DamagedData
    """
    path = data.find(where, ("ml-100k/u.data", "u.data"), what="MovieLens-100k", address=ADDRESS)
    try:
        table = np.loadtxt(path, dtype=np.int64, delimiter="\t", ndmin=2)
    except ValueError as error:
        raise data.DamagedData(f"{path} is damaged: {error}. Get it again from {ADDRESS}.") from error
    if table.size == 0 or table.shape[1] != 4:
        raise data.DamagedData(f"{path}: expected user, film, rating and time on every line; got shape {table.shape}.")
    user, item, rating = table[:, 0], table[:, 1], table[:, 2]
    for name, column, most in (("user", user, USERS), ("film", item, ITEMS), ("rating", rating, 5)):
        if column.min() < 1 or column.max() > most:
            raise data.DamagedData(f"{path}: a {name} lies outside 1 to {most}.")
    pairs = np.stack([user - 1, item - 1], axis=-1).astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(pairs))
    test, train = np.split(order, [round(test_share * len(order))])
    rating = rating.astype(np.float32)
    return data.Split(pairs[train], rating[train], pairs[test], rating[test])
