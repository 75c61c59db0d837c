"""Warnings, each once, that a loss is computed another way than was asked for."""

import warnings

_warned: set[str] = set()


def warn_once(what: str, message: str) -> None:
    if what not in _warned:
        _warned.add(what)
        warnings.warn(message, stacklevel=3)


def to_vmap(what: str, reason: str) -> None:
    warn_once(
        what,
        f"{reason}. Falling back to engine='vmap', which gives the same result and forms every gradient; pass "
        "engine='vmap' to silence this.",
    )


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
