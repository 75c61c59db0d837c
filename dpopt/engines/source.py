"""What `dpopt.gradients.PerExampleGrads` needs of the place that its gradients come from.

Implemented by the subclasses of `dpopt.engines.promises.Rows`, by `dpopt.engines.stacked.Stacked` and by
`dpopt.engines.stand_in.StandIn`.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax

from dpopt.common.types import PyTree
from dpopt.engines.clips import ClipFunction
from dpopt.engines.stacked import EngineResult


class Source(Protocol):
    """B per-example gradients, computed or not."""

    @property
    def batch_size(self) -> int: ...

    @property
    def unit(self) -> str:
        """What one row is: ``"example"``, ``"user"`` or ``"client"``."""
        ...

    @property
    def like(self) -> PyTree:
        """Arrays, or shapes and dtypes, like one row's gradient."""
        ...

    def gradients(self) -> PyTree:
        """The gradients, leaves ``(B, ...)``."""
        ...

    def run(self, mask: jax.Array, scale: PyTree, offset: PyTree, clip: ClipFunction) -> EngineResult:
        """The sum of ``clip(S g_i + o)`` over the rows in ``mask`` whose gradient is finite. Needs B > 0."""
        ...


@runtime_checkable
class HasExamples(Protocol):
    """A source that still has the examples, and so can differentiate another function of them."""

    def of_examples(self, function: Callable[..., PyTree], params: PyTree) -> Source:
        """The gradients of ``function(params, examples of a row, mask of the examples)``."""
        ...
