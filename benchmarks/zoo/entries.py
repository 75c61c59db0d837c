"""The registry of models, and what turns a model of each framework into a loss of one example."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from benchmarks.cost.families import Family, normal, tokens
from dpopt.flax import nnx_loss

KEY = jax.random.key(0)


class Entry(NamedTuple):
    """A model of the zoo."""

    source: str  # the public repository, or paper, whose architecture it follows
    framework: str
    build: Callable[[], Family]


ZOO: dict[str, Entry] = {}


def model(name: str, framework: str, source: str) -> Callable[[Callable[[], Family]], Callable[[], Family]]:
    """Registers what builds a model, under ``name (framework)``."""

    def add(build: Callable[[], Family]) -> Callable[[], Family]:
        key = f"{name} ({framework})"
        if key in ZOO:
            raise ValueError(f"two models are named {key}")
        ZOO[key] = Entry(source, framework, build)
        return build

    return add


def images(count: int, size: int, channels: int = 3) -> jax.Array:
    """Pixels of variance 1, channels last."""
    return jnp.asarray(normal(count, size, size, channels))


def words(vocabulary: int, *shape: int) -> jax.Array:
    """Tokens of a text."""
    return jnp.asarray(tokens(vocabulary, *shape))


def labels(classes: int, *shape: int, seed: int = 1) -> jax.Array:
    """Classes, all equally likely."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, classes, shape), jnp.int32)


def uniform(*shape: int, seed: int = 2) -> jax.Array:
    """Numbers between 0 and 1."""
    return jnp.asarray(np.random.default_rng(seed).uniform(size=shape), jnp.float32)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over whatever axes the targets have."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets))


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over all axes."""
    return jnp.mean((outputs - targets) ** 2)


def binary_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over all axes."""
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, targets))


def first(batch: Any) -> Any:
    """The first example of a batch."""
    return jax.tree.map(lambda x: x[0], batch)


def initial(init: Callable[[jax.Array], Any]) -> Any:
    """Parameters by a model's own initialisation, which runs once: it is compiled without optimisation."""
    return jax.jit(init, compiler_options={"xla_backend_optimization_level": 0})(KEY)


def of_linen(module: linen.Module, loss: Callable, inputs: Any, targets: Any, **apply_kwargs: Any) -> Family:
    """``loss(module(inputs), targets)`` of a module that takes a batch: each example is a batch of one.

    Several inputs are a tuple.
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
    """``loss(module(inputs), targets)`` of a module that takes a batch: each example is a batch of one."""
    loss_fn, params = nnx_loss(module, lambda m, batch: loss(m(batch[0]), batch[1]))
    return Family(loss_fn, params, (inputs, targets))


def of_equinox(module: eqx.Module, loss: Callable, batch: Any) -> Family:
    """``loss(module, example)`` of a module that takes one example; all its floating arrays are trained."""
    params, static = eqx.partition(module, eqx.is_inexact_array)
    return Family(lambda params, example: loss(eqx.combine(params, static), example), params, batch)


def of_haiku(loss: Callable, batch: Any) -> Family:
    """``loss(example)``, a function that calls Haiku modules."""
    transformed = hk.without_apply_rng(hk.transform(loss))
    return Family(transformed.apply, initial(lambda key: transformed.init(key, first(batch))), batch)


class Arrays:
    """Parameters of models in plain JAX: random arrays, each from a seed of its own."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __call__(self, *shape: int, scale: float | None = None) -> jax.Array:
        """Normal numbers, by default of variance 1 over the fan-in, which is the last axis but one."""
        fan_in = shape[-2] if len(shape) > 1 else shape[0]
        return jnp.asarray(self._rng.normal(size=shape) * (fan_in**-0.5 if scale is None else scale), jnp.float32)

    def conv(self, *shape: int) -> jax.Array:
        """Filters, spatial axes first, scaled for relu."""
        return self(*shape, scale=(2 / np.prod(shape[:-1])) ** 0.5)
