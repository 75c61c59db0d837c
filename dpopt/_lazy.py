"""``dp_accounting``, imported when it is first used: with SciPy it takes longer than JAX and Optax together."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import dp_accounting as dp_accounting
else:

    class _Library:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("dp_accounting"), name)

    dp_accounting = _Library()
