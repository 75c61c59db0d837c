"""Modules imported on first use, so that ``import dpopt`` takes little longer than importing Optax alone.

``dp_accounting`` imports SciPy, which takes longer than JAX and Optax together. The modules that read jaxprs import
``jax.extend``, which takes as long as the rest of dpopt.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import dp_accounting as dp_accounting

    from dpopt import ghost as ghost
    from dpopt.engines import flow as flow
else:

    class _Module:
        def __init__(self, name: str):
            self._name = name
            self._module = None

        def __getattr__(self, name: str) -> Any:
            if self._module is None:  # accountants read some names a million times
                self._module = importlib.import_module(self._name)
            return getattr(self._module, name)

    dp_accounting, flow, ghost = map(_Module, ("dp_accounting", "dpopt.engines.flow", "dpopt.ghost"))
