"""A description of what a run computes, so that an error can name what changed since the last time.

Functions are described by their name and a hash of their code, and post-processing also by its hyperparameters. Arrays
are described by their shape. No values are read from a loss or a data source: they may be private, and the journal
holds nothing private.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from types import CellType, CodeType
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpopt.chain import PrivateOptimizer

_DEPTH = 8


def describe(optimizer: PrivateOptimizer, **rest: Any) -> dict[str, str]:
    """The hyperparameters of the stages after the noise, and of ``rest`` the code of functions and plain values.

    The private part of the optimizer is described by `dpopt.run.identity.run_identity`.
    """
    found: dict[str, str] = {}
    for stage in optimizer.stages[1:]:
        _hyperparameters(stage, type(stage).__name__, found, _DEPTH)
    return found | {name: _code(value) if callable(value) else repr(value) for name, value in rest.items()}


def _hyperparameters(value: Any, name: str, found: dict[str, str], depth: int) -> None:
    """Adds the numbers that functions close over, each under the function's name and that of the variable."""
    if depth == 0:
        return
    update = getattr(value, "update", None)
    if isinstance(value, tuple) and callable(update):
        _hyperparameters(update, name, found, depth)  # an Optax transformation: (init, update)
    elif isinstance(value, functools.partial):
        _hyperparameters(value.func, name, found, depth - 1)
        _hyperparameters(value.keywords, name, found, depth - 1)
    elif callable(value) and hasattr(value, "__closure__"):
        made_by = value.__qualname__.split(".<locals>")[0]
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            _hyperparameters(_content(cell), f"{made_by}.{variable}", found, depth - 1)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _hyperparameters(getattr(value, field.name), f"{type(value).__name__}.{field.name}", found, depth - 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _hyperparameters(item, f"{name}.{key}", found, depth - 1)
    elif isinstance(value, tuple | list):
        for item in value:
            _hyperparameters(item, name, found, depth - 1)
    elif value is None or isinstance(value, int | float | str) or hasattr(value, "dtype"):
        number, unique = 2, name
        while unique in found:
            unique, number = f"{name} ({number})", number + 1
        found[unique] = _shown(value)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that was never set
        return None


def _shown(value: Any) -> str:
    if not hasattr(value, "dtype"):
        return repr(value)[:100]
    is_number = np.ndim(value) == 0 and jnp.issubdtype(value.dtype, jnp.number)
    return repr(np.asarray(value).item()) if is_number else f"{value.dtype}{list(np.shape(value))}"


def _code(function: Callable[..., Any]) -> str:
    """The name of a function, and a hash of its code and of the functions that it closes over."""
    digest = hashlib.sha256()
    while isinstance(function, functools.partial):
        for given in function.args:
            _hash(given, digest, _DEPTH)
        function = function.func
    _hash(function, digest, _DEPTH)
    return f"{getattr(function, '__qualname__', type(function).__name__)} {digest.hexdigest()[:8]}"


def _hash(function: Any, digest: Any, depth: int) -> None:
    function = getattr(function, "__wrapped__", function)
    code = getattr(function, "__code__", None)
    if code is None or depth == 0:
        return
    _hash_code(code, digest)
    for cell in getattr(function, "__closure__", None) or ():
        _hash(_content(cell), digest, depth - 1)


def _hash_code(code: CodeType, digest: Any) -> None:
    digest.update(code.co_code)
    digest.update(" ".join(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _hash_code(constant, digest)
        elif not isinstance(constant, frozenset):  # the order of a set differs between processes
            digest.update(repr(constant).encode())
