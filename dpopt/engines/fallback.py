"""Warnings, each issued once, that a loss is not computed the way that was requested."""

import warnings

_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, stacklevel=3)


def to_vmap(key: str, reason: str) -> None:
    warn_once(
        key,
        f"{reason}. Falling back to engine='vmap', which gives the same result but forms every gradient; pass "
        "engine='vmap' to silence this warning.",
    )


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
