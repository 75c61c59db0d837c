"""From the contacts' weights back to the parameters that they are computed from.

This map is linear in the cotangent and the same for all examples, so a weighted sum is pulled back only once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpopt.ghost.program import Trace
from dpopt.ghost.values import Contact

_PROBES = 3
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
        """The factor from each entry of the weights' gradients to ``S g``, estimated: column norms of the map between.

        They are the largest of the transpose of that map, applied to random signs a few times.
        """
        weights, x = self._weights(contacts, [leaf]), self.wide[leaf]
        _, push = jax.linearize(lambda x: weights([x]), x)

        def probe(number: jax.Array) -> list[jax.Array]:
            signs = _signs(x.shape, number).astype(x.dtype)
            return [jnp.abs(w) for w in push(signs if scale is None else signs * scale)]

        # Behind a barrier the numbers are not constant, so XLA compiles the same kernels for each, and folds none.
        numbers = lax.optimization_barrier(jnp.arange(_PROBES, dtype=jnp.uint32))
        return [functools.reduce(jnp.maximum, own) for own in zip(*map(probe, numbers), strict=True)]


def _signs(shape: Sequence[int], number: jax.Array) -> jax.Array:
    """Pseudorandom signs: one bit of a hash of the index. (Random bits take XLA longer to compile.)"""
    index = jnp.zeros(shape, jnp.uint32)
    for axis, length in enumerate(shape):
        index = index * np.uint32(length) + lax.broadcasted_iota(jnp.uint32, shape, axis)
    for multiplier in (0x7FEB352D, 0x846CA68B):
        index = (index ^ (index >> 16)) * np.uint32(multiplier)
    return 1 - 2 * ((index >> (16 + number)) & 1).astype(jnp.int32)
