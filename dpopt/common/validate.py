"""Checks of arguments. The keyword that a check is called with is the name in its error message.

Checks run once, in the factory, on Python numbers. The value of a traced argument (inside ``jit``, or a hyperparameter
that ``optax.inject_hyperparams`` made part of the state) cannot be checked; its type is.
"""

import functools
import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, SupportsFloat, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpopt.common.types import PyTree

_P = ParamSpec("_P")
_R = TypeVar("_R")


def requires_mask(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a function so that a call without ``mask`` raises an error which explains what to pass."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if "mask" not in signature.bind_partial(*args, **kwargs).arguments:
            raise TypeError(
                "mask is missing: pass the batch's mask, (B,) bool, False for padding, as the sampler returns it "
                "(indices, mask = sampler.batch(step)), or mask=None if no row is padding. There is no default: "
                "the privacy guarantee does not hold if padding is counted as examples."
            )
        return function(*args, **kwargs)

    return checked


def concrete(value: SupportsFloat) -> float | None:
    """``value`` as a Python float, or None if it is traced."""
    return None if isinstance(value, Tracer) else float(value)


def plain(number: Any) -> Any:
    """A scalar of NumPy or JAX as Python's own, which wraps around nowhere and is JSON's; anything else unchanged."""
    is_scalar = isinstance(number, np.generic) or (isinstance(number, np.ndarray | jax.Array) and number.ndim == 0)
    return number.item() if is_scalar and not isinstance(number, Tracer) else number


def _number(name: str, value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, np.ndarray, jax.Array)):
        raise TypeError(f"{name} must be a real number; got {value!r} of type {type(value).__name__}.")
    if isinstance(value, (np.ndarray, jax.Array)):
        if value.ndim != 0:
            raise TypeError(f"{name} must be a scalar; got an array of shape {value.shape}.")
        if not jnp.issubdtype(value.dtype, jnp.number):
            raise TypeError(f"{name} must be a real number; got dtype {value.dtype}.")
    return concrete(value)


def _check(named: Mapping[str, object], fits: Callable[[float], bool], wanted: str) -> None:
    for name, value in named.items():
        number = _number(name, value)
        if number is not None and not fits(number):
            raise ValueError(f"{name} must {wanted}; got {value}.")


def positive(*, allow_inf: bool = False, **named: object) -> None:
    """Raises unless every argument is a number above 0 (and finite, unless ``allow_inf``)."""
    finite = "" if allow_inf else " and finite"
    _check(named, lambda x: x > 0 and (allow_inf or math.isfinite(x)), f"be positive{finite}")


def at_least(least: float, reason: str, **named: object) -> None:
    """Raises if an argument is below ``least``; ``reason`` ends the message."""
    for name, value in named.items():
        number = _number(name, value)
        if number is not None and number < least:
            raise ValueError(f"{name} must be at least {least:.3g}; got {value}. {reason}")


def non_negative(*, allow_inf: bool = False, **named: object) -> None:
    """Raises unless every argument is a number of at least 0 (and finite, unless ``allow_inf``)."""
    finite = "" if allow_inf else " and finite"
    _check(named, lambda x: x >= 0 and (allow_inf or math.isfinite(x)), f"be non-negative{finite}")


def probability(**named: object) -> None:
    """Raises unless every argument lies in (0, 1]."""
    _check(named, lambda x: 0 < x <= 1, "lie in (0, 1]")


def delta(value: float) -> None:
    """Raises unless a delta lies in (0, 1)."""
    positive(delta=value)
    if value >= 1:
        raise ValueError(f"delta must be below 1; got {value}.")


def small_delta(delta: float, num_examples: int, *, stacklevel: int = 3) -> None:
    """Warns if ``delta >= 1 / num_examples``: such a delta protects nobody."""
    if delta * num_examples >= 1:
        warnings.warn(
            f"delta {delta:g} is not below 1/n = {1 / num_examples:g} for n = {num_examples} examples. Publishing one "
            "whole example drawn at random satisfies such a delta at any epsilon: choose a delta well below 1/n.",
            UserWarning,
            stacklevel=stacklevel,
        )


def chosen_delta(given: float | None, default: float | None, num_examples: int | None) -> float:
    """The given delta, with a warning (at the caller of a method) if it is too large, or the default."""
    if given is None:
        if default is None:
            raise ValueError(
                "no delta is set, since the noise was given instead of a budget: pass delta=..., below 1 / (number of "
                "examples)."
            )
        return default
    if num_examples is not None:
        small_delta(given, num_examples, stacklevel=5)
    return given


def fraction(**named: object) -> None:
    """Raises unless every argument lies in [0, 1), as decay rates do."""
    _check(named, lambda x: 0 <= x < 1, "lie in [0, 1)")


def rate(**named: object) -> None:
    """Raises unless every argument is a finite number of at least 0, or a schedule."""
    constant = {name: value for name, value in named.items() if not callable(value)}
    _check(constant, lambda x: x >= 0 and math.isfinite(x), "be non-negative and finite, or a schedule")


def flag(**named: object) -> None:
    """Raises unless every argument is True or False."""
    for name, value in named.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} must be True or False; got {value!r} of type {type(value).__name__}.")


def positive_int(**named: object) -> None:
    """Raises unless every argument is an integer of at least 1."""
    _check_integers(named, least=1)


def non_negative_int(**named: object) -> None:
    """Raises unless every argument is an integer of at least 0."""
    _check_integers(named, least=0)


def _check_integers(named: Mapping[str, object], least: int) -> None:
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} must be an integer; got {value!r} of type {type(value).__name__}.")
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}.")


def one_of(choices: tuple[object, ...], **named: object) -> None:
    """Raises unless every argument is among ``choices``."""
    for name, value in named.items():
        if isinstance(value, np.ndarray | jax.Array) or value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")


def prng_key(key: object, name: str = "key") -> None:
    """Raises unless the argument is one PRNG key: ``jax.random.key(seed)``, or the older uint32 array of shape (2,)."""
    advice = "pass one key made by jax.random.key(seed)"
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be a JAX PRNG key; got {key!r} of type {type(key).__name__}: {advice}.")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.ndim != 0:
            raise ValueError(f"{name} must be a single PRNG key; got an array of keys of shape {key.shape}: {advice}.")
    elif key.dtype != np.uint32:
        raise TypeError(f"{name} must be a JAX PRNG key; got an array of dtype {key.dtype}: {advice}.")
    elif key.ndim != 1:
        raise ValueError(f"{name} must be a single PRNG key; got shape {key.shape}: {advice}.")
    else:
        try:
            jax.random.wrap_key_data(jnp.asarray(key))  # its length depends on JAX's default generator
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name} must be a JAX PRNG key; got a uint32 array of shape {key.shape}: {advice}."
            ) from error


def _shown(value: object) -> str:
    module = type(value).__module__.split(".")[0]
    name = getattr(value, "__name__", None)
    return f"{name} ({type(value).__name__})" if name else f"a {type(value).__name__} of {module}"


def floating_params(params: PyTree) -> None:
    """Raises unless ``params`` has leaves and all of them are real floating-point arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError("params has no leaves: there is nothing to train.")
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path) or "params"
        if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")) and not isinstance(leaf, complex | float | int):
            raise TypeError(
                f"parameter {name} is not an array but {_shown(leaf)}. Pass the parameters, not the module. Flax "
                "linen: model.init(...)['params']; NNX: dpopt.flax.nnx_loss(model, loss); Equinox: "
                "equinox.partition(model, equinox.is_inexact_array); Haiku: transformed.init(...)."
            )
        dtype = jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(
                f"parameter {name} has dtype {dtype}, but dpopt trains real parameters: store the real and imaginary "
                "parts, and combine them in the loss (jax.lax.complex)."
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"parameter {name} has dtype {dtype}, which has no gradient: "
                "close over it in the loss instead, or cast it to a floating type."
            )


ONLY_PUBLIC_ARGUMENTS = (
    "Extra arguments of an optimizer must be public. The loss of a private batch is not: it has no noise, and rules "
    "that read it (optax.polyak_sgd, reduce_on_plateau, line searches) would release it. If the argument comes from "
    "public data alone, wrap the rule, dpopt.optimizers.public.with_public_arguments(rule), and prefix the name of "
    "the argument with 'public_'."
)


def is_public_argument(name: str) -> bool:
    return name.startswith("public_") or name == "noise_stddev"


def public_arguments(extra: Mapping[str, object]) -> None:
    """Raises unless every extra argument of an update is named ``public_...`` or ``noise_stddev``."""
    for name in extra:
        if not is_public_argument(name):
            raise ValueError(f"update got the extra argument {name!r}. {ONLY_PUBLIC_ARGUMENTS}")
