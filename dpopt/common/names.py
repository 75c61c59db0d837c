"""Names for what has none: Optax transformations, and the first line of an error for a message about another."""

from collections.abc import Callable
from typing import Any


def name_of(update: Callable[..., Any]) -> str:
    """A name such as ``scale_by_adam > scale_by_learning_rate``, from the ``update`` of a transformation."""
    held = _closure(update)
    name = getattr(update, "__qualname__", "transformation").split(".")[0]
    if name == "chain" and isinstance(held.get("update_fns"), tuple):
        return " > ".join(map(name_of, held["update_fns"]))
    if name == "with_extra_args_support" and hasattr(held.get("tx"), "update"):
        return name_of(held["tx"].update)
    if name == "inject_hyperparams" and callable(held.get("inner_factory")):
        return f"inject_hyperparams({getattr(held['inner_factory'], '__name__', '...')})"
    if hasattr(held.get("inner"), "update"):  # a wrapper, such as masked
        return f"{name}({name_of(held['inner'].update)})"
    return name


def first_line(error: Exception) -> str:
    """The first line of an error's text, or the name of its type if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a function closes over, by name."""
    cells = getattr(function, "__closure__", None) or ()
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    found = {}
    for name, cell in zip(names, cells, strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # an empty cell
            continue
    return found
