"""From the contacts' weights back to the parameters that they are computed from.

This map is linear in the cotangent and the same for all examples, so a weighted sum is pulled back only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from dpopt.ghost.column_norms import row_norms
from dpopt.ghost.program import Trace
from dpopt.ghost.values import Contact

# From gradients with respect to weights to those with respect to parameters.
Pull: TypeAlias = Callable[[Sequence[jax.Array]], list[jax.Array]]


class PullBack:
    """The map from the parameters ``wide``, in at least float32, to the contacts' weights, and its transpose."""

    def __init__(self, trace: Trace, wide: Sequence[jax.Array]):
        self.trace, self.wide = trace, wide

    def _weights(self, contacts: Sequence[Contact], leaves: Sequence[int]) -> Callable[..., list[jax.Array]]:
        """The contacts' weights as a function of some of the parameters."""
        ops = self.trace.behind(c.weight for c in contacts)

        def function(chosen: Sequence[jax.Array]) -> list[jax.Array]:
            wide = list(self.wide)
            for leaf, x in zip(leaves, chosen, strict=True):
                wide[leaf] = x
            env = self.trace.run_prologue(wide, ops, wide=True)
            return [env[c.weight] for c in contacts]

        return function

    def __call__(
        self, contacts: Sequence[Contact], cotangents: Sequence[jax.Array], leaves: Sequence[int]
    ) -> list[jax.Array]:
        """Gradients with respect to the contacts' weights, pulled back to the parameters."""
        return self.of(contacts, leaves)(cotangents)

    def of(self, contacts: Sequence[Contact], leaves: Sequence[int]) -> Pull:
        """The same as a function of the gradients, for loops: what does not depend on these is computed here."""
        values, pull = jax.vjp(self._weights(contacts, leaves), [self.wide[i] for i in leaves])
        return lambda cotangents: pull([g.astype(v.dtype) for g, v in zip(cotangents, values, strict=True)])[0]

    def inside(self, contacts: Sequence[Contact], cotangents: Sequence[jax.Array], leaf: int) -> list[jax.Array]:
        """The same for one parameter in a loop that hardly ever runs: what it needs is computed there, not stored."""
        wide = [*self.wide]
        wide[leaf], cotangents = lax.optimization_barrier((wide[leaf], [*cotangents]))
        return PullBack(self.trace, wide)(contacts, cotangents, [leaf])

    def push(self, leaf: int, tangent: jax.Array, contacts: Sequence[Contact]) -> list[jax.Array]:
        """The other direction: the change of the weights for a change of one parameter."""
        return jax.jvp(self._weights(contacts, [leaf]), ([self.wide[leaf]],), ([tangent],))[1]

    def gains(self, leaf: int, scale: jax.Array | None, contacts: Sequence[Contact]) -> list[jax.Array]:
        """The factor from each entry of the weights' gradients to ``S g``, estimated (`row_norms`)."""
        weights, x = self._weights(contacts, [leaf]), self.wide[leaf]
        _, push = jax.linearize(lambda x: weights([x]), x)
        return row_norms(push, x, None if scale is None else jnp.broadcast_to(scale, x.shape))
