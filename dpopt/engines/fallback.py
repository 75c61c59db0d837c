"""Warnings, each issued once for every loss, that it is not computed the way that was requested."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

_warned: set[Any] = set()


def warn_once(loss_fn: Callable[..., Any], key: str, message: str) -> None:
    """Losses are told apart by where they are defined: a lambda written in a loop is one loss."""
    reason = _defined(loss_fn), key
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(message, stacklevel=3)


def _defined(function: Any) -> Any:
    if isinstance(function, functools.partial):
        return (_defined(function.func), *map(_defined, function.args))
    return getattr(function, "__code__", None) or type(function)


def to_vmap(loss_fn: Callable[..., Any], key: str, reason: str) -> None:
    warn_once(
        loss_fn,
        key,
        f"{reason}. Falling back to engine='vmap', which gives the same result but forms every gradient; pass "
        "engine='vmap' to silence this warning.",
    )
