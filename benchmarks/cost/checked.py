"""Compiles, calls and compares different ways to compute a gradient, before they are timed."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cost import gradients, timing


def relative_error(a: Any, b: Any) -> float:
    """The largest difference between two pytrees, over the largest entry of the second."""
    scale = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(b))
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.max(jnp.abs(x - y))), a, b))) / scale


def call(fn: Callable, args: tuple) -> timing.Call:
    return lambda: jax.block_until_ready(fn(*args))


def compiled(fn: Callable, args: tuple) -> tuple[float, Any]:
    """The seconds to trace and compile, and the memory that the compiled program plans."""
    t = time.perf_counter()
    program = fn.lower(*args).compile()
    return time.perf_counter() - t, program.memory_analysis()


class Checked:
    """The ways for one family, each compiled, called and compared before it may be timed.

    Args:
        family: the family's name.
        args: the parameters, batch and diagonal.
        vmap: the vmap engine, plain and optionally with a diagonal; the other ways are compared with it.
        again: the plain result, computed in a different way; their difference is the rounding error.
        rounding: the smallest rounding error to assume.
        programs: results of `compiled`, for ways that have already been called.
    """

    def __init__(
        self, family: str, args: tuple, vmap: dict[str, Callable], again: Any, rounding: float = 0.0,
        programs: Mapping[str, tuple[float, Any]] | None = None,
    ):  # fmt: skip
        self._family, self._args = family, args
        self.compile_s: dict[str, float] = {n: seconds for n, (seconds, _) in (programs or {}).items()}
        self.memory: dict[str, Any] = {n: memory for n, (_, memory) in (programs or {}).items()}  # planned by XLA
        self.errors: dict[str, float] = {}
        self.once: dict[str, float] = {}  # seconds of one call
        for name, fn in vmap.items():
            self.compile_s[name], self.memory[name] = compiled(fn, args)
        results = [fn(*args) for fn in vmap.values()]
        self._plain, self._scaled = results[0], results[-1]
        self._mean: Any = None  # the ordinary gradient, once added
        # The package's tests check exactness in float64. In float32, a deep network's gradient differs even between
        # equivalent programs, such as the vmap engine with and without microbatches. Other ways may differ by twice as
        # much.
        self.rounding = max(rounding, relative_error(again, self._plain))

    def add(self, name: str, fn: Callable, expected: Any = None) -> Callable:
        """Compiles, calls and checks a way, and returns it.

        ``expected`` is what it is compared with where its clip is not that of the vmap engine's results.

        Raises:
            AssertionError: if its result differs from the vmap engine's by more than rounding explains.
        """
        if name not in self.compile_s:
            self.compile_s[name], self.memory[name] = compiled(fn, self._args)
        result = self._plain if name == "vmap" else jax.block_until_ready(fn(*self._args))
        if name == "ordinary":
            self._mean = result
        elif name != "vmap":
            if expected is None:
                expected = self._scaled if name.endswith(", diagonal") else self._plain
            error = relative_error(result, self._mean if name == gradients.IN_PARTS else expected)
            if not error < max(1e-4, 2 * self.rounding):
                than = "ordinary gradient" if name == gradients.IN_PARTS else "vmap engine"
                raise AssertionError(f"{self._family}: results differ from the {than}: {name} by {error:.2g}")
            self.errors[name] = error
        self.once[name] = timing.seconds_of(call(fn, self._args))
        return fn
