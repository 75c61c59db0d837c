"""Examples that a model can only learn by heart: labels that are wrong, and inputs that are noise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpopt.common import validate


def relabelled(examples: Any, label: Any, *, num_classes: int, seed: int) -> Any:
    """The same examples, each under another class than its own, drawn at random.

    Args:
        examples: a pytree, leaves ``(m, ...)``: rows that are not in the training data, which only the canaries hold.
        label: which leaf holds the labels, integers ``(m,)``: its name or number in the innermost container, such as
            ``"y"`` in ``{"x": x, "y": y}`` and ``1`` in ``(x, y)``.
        num_classes: labels are 0 to this, exclusive.
        seed: of the draws.

    Returns:
        Like ``examples``, for `plant`.

    Raises:
        ValueError, TypeError: if there is not one such leaf, or it does not hold labels.

    *Privacy*: as private as the examples.

    >>> wrong = relabelled({"x": np.ones((5, 2)), "y": np.arange(5)}, "y", num_classes=5, seed=0)
    >>> bool(np.any(wrong["y"] == np.arange(5)))
    False
    """
    validate.positive_int(num_classes=num_classes)
    if num_classes < 2:
        raise ValueError("with one class no label is wrong: num_classes must be at least 2.")
    rng = np.random.default_rng(seed)
    found = []

    def changed(path: tuple[Any, ...], leaf: Any) -> Any:
        if not path or _name(path[-1]) != label:
            return leaf
        own = np.asarray(leaf)
        if own.ndim != 1 or not np.issubdtype(own.dtype, np.integer) or np.any((own < 0) | (own >= num_classes)):
            raise ValueError(
                f"labels must be a row of integers from 0 to {num_classes - 1}; {jax.tree_util.keystr(path)} has dtype "
                f"{own.dtype} and shape {own.shape}. For other labels change the examples yourself."
            )
        found.append(path)
        return ((own + rng.integers(1, num_classes, len(own))) % num_classes).astype(own.dtype)

    result = jax.tree_util.tree_map_with_path(changed, examples)
    if len(found) != 1:
        where = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(examples)]
        raise ValueError(f"{len(found)} leaves are called {label!r}, and there must be one; the examples have {where}.")
    return result


def _name(entry: Any) -> Any:
    return next(getattr(entry, field) for field in ("key", "name", "idx") if hasattr(entry, field))


def random_examples(examples: Any, count: int, *, seed: int) -> Any:
    """Examples of the same shapes and dtypes that are noise.

    Floating leaves are normal with the mean and standard deviation of all of a leaf's entries; integers (labels,
    tokens) and booleans are drawn one by one from the entries that occur.

    Args:
        examples: a pytree, leaves ``(n, ...)``, which the audit may read.
        count: how many to make.
        seed: of the draws.

    Returns:
        Leaves ``(count, ...)``, for `plant`.

    *Privacy*: reads means, deviations and entries of the examples.

    >>> made = random_examples((np.zeros((9, 2), np.float32), np.arange(9)), 4, seed=0)
    >>> made[0].shape, made[1].dtype == np.arange(9).dtype
    ((4, 2), True)
    """
    validate.positive_int(count=count)
    rng = np.random.default_rng(seed)

    def made(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        shape = (count, *leaf.shape[1:])
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            wide = leaf.astype(np.float64)  # in 16 bits a mean of many entries is lost
            return (wide.mean() + wide.std() * rng.normal(size=shape)).astype(leaf.dtype)
        return rng.choice(leaf.reshape(-1), shape)

    return jax.tree.map(made, examples)
