"""The registry of models, and adapters that turn a model of each framework into a per-example loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
from flax import linen, nnx

from benchmarks.cost.families import Family
from dpopt.flax import nnx_loss

KEY = jax.random.key(0)


class Entry(NamedTuple):
    """A model of the zoo."""

    source: str  # the public repository or paper whose architecture it follows
    framework: str
    build: Callable[[], Family]


ZOO: dict[str, Entry] = {}


def model(name: str, framework: str, source: str) -> Callable[[Callable[[], Family]], Callable[[], Family]]:
    """Registers the function that builds a model under the key ``name (framework)``."""

    def add(build: Callable[[], Family]) -> Callable[[], Family]:
        key = f"{name} ({framework})"
        if key in ZOO:
            raise ValueError(f"two models are named {key}")
        ZOO[key] = Entry(source, framework, build)
        return build

    return add


def first(batch: Any) -> Any:
    """The first example of a batch."""
    return jax.tree.map(lambda x: x[0], batch)


def initial(init: Callable[[jax.Array], Any]) -> Any:
    """Parameters from a model's own initialisation, compiled without optimisation because it runs only once."""
    return jax.jit(init, compiler_options={"xla_backend_optimization_level": 0})(KEY)


def of_linen(module: linen.Module, loss: Callable, inputs: Any, targets: Any, **apply_kwargs: Any) -> Family:
    """The family of ``loss(module(inputs), targets)``. The module takes batches, so each example is a batch of one.

    Several inputs are passed as a tuple.
    """

    def arguments(x):
        return x if isinstance(x, tuple) else (x,)

    one = jax.tree.map(lambda x: x[:1], inputs)
    params = initial(lambda key: module.init(key, *arguments(one), **apply_kwargs)["params"])

    def loss_fn(params, example):
        x, y = jax.tree.map(lambda a: a[None], example)
        return loss(module.apply({"params": params}, *arguments(x), **apply_kwargs), y)

    return Family(loss_fn, params, (inputs, targets))


def of_nnx(module: nnx.Module, loss: Callable, inputs: Any, targets: Any) -> Family:
    """The family of ``loss(module(inputs), targets)``. The module takes batches, so each example is a batch of one."""
    loss_fn, params = nnx_loss(module, lambda m, batch: loss(m(batch[0]), batch[1]))
    return Family(loss_fn, params, (inputs, targets))


def of_equinox(module: eqx.Module, loss: Callable, batch: Any) -> Family:
    """The family of ``loss(module, example)``. The module takes one example; its floating-point arrays are trained."""
    params, static = eqx.partition(module, eqx.is_inexact_array)
    return Family(lambda params, example: loss(eqx.combine(params, static), example), params, batch)


def of_haiku(loss: Callable, batch: Any) -> Family:
    """The family of ``loss(example)``, a function that calls Haiku modules."""
    transformed = hk.without_apply_rng(hk.transform(loss))
    return Family(transformed.apply, initial(lambda key: transformed.init(key, first(batch))), batch)
