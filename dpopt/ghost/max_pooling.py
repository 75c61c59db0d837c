"""Max pooling whose gradient is fast on CPUs: XLA's (select and scatter) takes 2 to 25 times as long."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from dpopt.ghost.primitives import MAX_POOL
from dpopt.ghost.rows import wide
from dpopt.ghost.values import aval

_MOST_ENTRIES = 36  # of a window: each takes time to compile


def max_pooling(eqn: core.JaxprEqn) -> Callable[[jax.Array], list[jax.Array]] | None:
    """A max pooling as a function with a derivative of its own, or None if XLA's is as good."""
    params = eqn.params
    is_small = math.prod(params["window_dimensions"]) <= _MOST_ENTRIES
    dilations = *params["base_dilation"], *params["window_dilation"]
    if not is_small or max(dilations, default=1) > 1 or jax.default_backend() != "cpu":
        return None
    if any(n < 0 for pair in params["padding"] for n in pair):
        return None
    dtype = aval(eqn.invars[0]).dtype
    if not jnp.issubdtype(dtype, jnp.floating) or not np.isinf(np.array(np.inf, dtype)):  # some of 8 bits have none
        return None
    if 0 in aval(eqn.outvars[0]).shape:
        return None
    windows = _Windows(eqn)

    @jax.custom_vjp
    def run(x: jax.Array) -> list[jax.Array]:
        return [MAX_POOL.bind(x, **params)]

    def pull(x: jax.Array, cotangents: list[jax.Array]) -> tuple[jax.Array]:
        return (windows.spread(windows.largest(x), *cotangents),)

    run.defvjp(lambda x: (run(x), x), pull)
    return run


class _Windows:
    """The windows of a max pooling: views of the padded array, one for each entry of a window."""

    def __init__(self, eqn: core.JaxprEqn):
        p = eqn.params
        self.shape, self.positions = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
        self.strides, self.padding = tuple(p["window_strides"]), [(low, high, 0) for low, high in p["padding"]]
        self.starts = [*itertools.product(*map(range, p["window_dimensions"]))]

    def _ends(self, start: Sequence[int]) -> list[int]:
        steps = zip(start, self.positions, self.strides, strict=True)
        return [first + (n - 1) * step + 1 for first, n, step in steps]

    def largest(self, x: jax.Array) -> jax.Array:
        """Which entry of each window is the largest: the first one if there are several, as XLA chooses it.

        That may be one that padding added, where all others are minus infinity. A NaN gives way to what follows."""
        padded = lax.pad(x, jnp.array(-jnp.inf, x.dtype), self.padding)
        entries = (lax.slice(padded, start, self._ends(start), self.strides) for start in self.starts)
        index, most = jnp.zeros(self.positions, jnp.int8), next(entries)
        for i, entry in enumerate(entries, 1):
            stays = most >= entry
            index, most = jnp.where(stays, index, jnp.int8(i)), jnp.where(stays, most, entry)
        # In memory: XLA would search anew for each of a window's entries.
        return lax.optimization_barrier(index)

    def spread(self, index: jax.Array, y: jax.Array) -> jax.Array:
        """The cotangents of windows, ``y``, added up where their largest entries are."""
        wider = wide(y)
        zero, total = jnp.zeros((), wider.dtype), jnp.zeros(self.shape, wider.dtype)
        for i, start in enumerate(self.starts):
            ends = self._ends(start)
            config = [
                (first - low, n + low - last, step - 1)
                for first, last, n, step, (low, _, _) in zip(
                    start, ends, self.shape, self.strides, self.padding, strict=True
                )
            ]
            total += lax.pad(jnp.where(index == i, wider, zero), zero, config)
        return total.astype(y.dtype)
