"""Layers of Flax models that matter for privacy: those that mix examples, their replacements, and dropout."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import linen, nnx
from flax.linen.module import InterceptorContext

_INSTEAD = (
    "Batch normalisation mixes the examples of a batch, so that there are no per-example gradients; on one example its "
    "output is constant. Use GroupNorm or LayerNorm (for NNX, dpopt.flax.replace_batch_norm(model)), or freeze its "
    "statistics (model.eval(), use_running_average=True) if they come from public data"
)


def check(model: nnx.Module | linen.Module, *args: Any, **kwargs: Any) -> None:
    """Raises an error that names the layers of a Flax model which mix examples or update running statistics.

    `dpopt.flax.nnx_loss` and `dpopt.flax.linen_loss` call it. Batch normalisation with frozen statistics passes, since
    it is then the same function for every example; dpopt cannot check that those statistics are public.

    Args:
        model: an NNX module, or a linen module.
        *args, **kwargs: for linen, the arguments of the model (arrays, or their shapes), which create its layers.

    Raises:
        ValueError: with the path of every such layer.
        TypeError: if ``model`` is not a Flax module.

    *Privacy*: reads no data. Only layers of Flax itself are checked; for others, `dpopt.verify` compares gradients.

    >>> check(nnx.LayerNorm(3, rngs=nnx.Rngs(0)))
    >>> check(nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0))))
    Traceback (most recent call last):
    ...
    ValueError: Sequential has layers that mix examples: layers.0 (BatchNorm). Batch normalisation mixes the ...
    """
    if isinstance(model, nnx.Module):
        refuse(model, [f"{path} (BatchNorm)" for path, layer in _batch_norms(model) if not layer.use_running_average])
    elif isinstance(model, linen.Module):  # pyright: ignore[reportUnnecessaryIsInstance] for untyped callers
        found: list[str] = []
        with linen.intercept_methods(watch(found)):
            jax.eval_shape(functools.partial(model.init, **kwargs), jax.random.key(0), *args)
        refuse(model, found)
    else:
        raise TypeError(f"model must be a Flax module, linen or NNX; got {type(model).__name__}.")


def refuse(model: nnx.Module | linen.Module, layers: list[str]) -> None:
    """Raises a ValueError if there are any ``layers``.

    >>> refuse(nnx.LayerNorm(3, rngs=nnx.Rngs(0)), [])
    """
    if layers:
        raise ValueError(f"{type(model).__name__} has layers that mix examples: {', '.join(layers)}. {_INSTEAD}.")


def watch(found: list[str]) -> Callable[..., Any]:
    """An interceptor for ``flax.linen.intercept_methods``: appends layers that update batch statistics to ``found``.

    >>> import jax.numpy as jnp
    >>> found = []
    >>> with linen.intercept_methods(watch(found)):
    ...     _ = linen.BatchNorm(use_running_average=False).init(jax.random.key(0), jnp.ones((2, 3)))
    >>> found
    ['BatchNorm (BatchNorm)']
    """

    def interceptor(
        call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: InterceptorContext
    ) -> Any:
        layer = context.module
        if isinstance(layer, linen.BatchNorm) and context.method_name == "__call__":
            given = kwargs.get("use_running_average", args[1] if len(args) > 1 else None)
            if not (layer.use_running_average if given is None else given):
                name = f"{'.'.join(layer.path) or type(layer).__name__} (BatchNorm)"
                found.extend([name] if name not in found else [])
        return call(*args, **kwargs)

    return interceptor


def replace_batch_norm(model: nnx.Module, *, groups: int = 32) -> nnx.Module:
    """A copy of an NNX model with ``GroupNorm`` in place of every ``BatchNorm``, frozen or not.

    Scale and bias are kept, running statistics are not. The model must be trained again, or fine-tuned.

    Args:
        model: the module; it is not changed.
        groups: upper bound on the groups of a layer, which get the largest divisor of the number of features.

    Raises:
        TypeError: if ``model`` is not an NNX module. ValueError: for a layer within an object that it cannot replace.

    *Privacy*: group normalisation treats each example separately.

    >>> model = nnx.Sequential(nnx.Linear(4, 6, rngs=nnx.Rngs(0)), nnx.BatchNorm(6, rngs=nnx.Rngs(1)))
    >>> type(replace_batch_norm(model).layers[1]).__name__, replace_batch_norm(model, groups=4).layers[1].num_groups
    ('GroupNorm', 3)
    """
    if not isinstance(model, nnx.Module):  # pyright: ignore[reportUnnecessaryIsInstance] for untyped callers
        raise TypeError(f"model must be a flax.nnx module; got {type(model).__name__}.")
    if isinstance(model, nnx.BatchNorm):
        return _as_group_norm(model, groups)
    model = nnx.clone(model)
    made: dict[int, nnx.GroupNorm] = {}  # a shared layer stays shared

    def replaced(held: Any) -> Any:
        """What a module holds, with other layers: a layer, or a tuple, list or dictionary of some."""
        if isinstance(held, nnx.BatchNorm):
            if id(held) not in made:
                made[id(held)] = _as_group_norm(held, groups)
            return made[id(held)]
        if isinstance(held, dict):
            return {name: replaced(x) for name, x in held.items()}
        return type(held)(map(replaced, held)) if type(held) in (tuple, list) else held

    def holds(held: Any) -> bool:
        parts = held.values() if isinstance(held, dict) else held if type(held) in (tuple, list) else ()
        return isinstance(held, nnx.BatchNorm) or any(map(holds, parts))

    for _, module in list(nnx.iter_modules(model)):
        items: list[tuple[Any, Any]] = list(enumerate(module) if isinstance(module, nnx.List) else vars(module).items())
        put = module.__setitem__ if isinstance(module, nnx.List) else functools.partial(setattr, module)
        for name, held in items:
            if holds(held):
                put(name, replaced(held) if isinstance(held, nnx.BatchNorm) else nnx.data(replaced(held)))
    if left := [path for path, _ in _batch_norms(model)]:
        raise ValueError(f"could not replace {', '.join(left)}: hold batch normalisation in attributes or nnx.List.")
    return model


def _as_group_norm(layer: nnx.BatchNorm, groups: int) -> nnx.GroupNorm:
    count = max(n for n in range(1, max(1, groups) + 1) if layer.num_features % n == 0)
    same = {name: getattr(layer, name) for name in ("epsilon", "dtype", "param_dtype", "use_bias", "use_scale")}
    new = nnx.GroupNorm(layer.num_features, num_groups=count, rngs=nnx.Rngs(0), **same)
    for old, own in ((layer.scale, new.scale), (layer.bias, new.bias)):
        if old is not None and own is not None:
            own[...] = old[...]
    return new


def _batch_norms(model: nnx.Module) -> Iterator[tuple[str, nnx.BatchNorm]]:
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            yield ".".join(map(str, path)) or type(module).__name__, module


def statistics(model: nnx.Module) -> dict[str, list[Any]]:
    """The running statistics of every batch normalisation, for `updated`.

    >>> list(statistics(nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))))
    ['layers.0']
    """
    return {path: jax.tree.leaves(nnx.state(layer, nnx.BatchStat)) for path, layer in _batch_norms(model)}


def updated(model: nnx.Module, before: dict[str, list[Any]]) -> list[str]:
    """The layers whose statistics have been replaced: also those that a call, or ``train()``, made mix examples.

    >>> model = nnx.Sequential(nnx.BatchNorm(3, use_running_average=True, rngs=nnx.Rngs(0)))
    >>> before = statistics(model)
    >>> _ = model.layers[0](jax.numpy.ones((2, 3)), use_running_average=False)
    >>> updated(model, before)
    ['layers.0 (BatchNorm)']
    """
    after = statistics(model)
    changed = [p for p in after if p not in before or any(a is not b for a, b in zip(after[p], before[p], strict=True))]
    return [f"{path} (BatchNorm)" for path in changed]


def draws(model: nnx.Module) -> bool:
    """Whether an NNX model has random streams in use; those of dropout that is turned off do not count.

    >>> draws(nnx.Dropout(0.5, rngs=nnx.Rngs(0))), draws(nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(0)))
    (True, False)
    """
    modules = [module for _, module in nnx.iter_modules(model)]
    in_use = [m for m in modules if not (isinstance(m, nnx.Dropout) and (m.deterministic or m.rate == 0))]
    return any(isinstance(held, nnx.RngStream | nnx.Rngs) for m in in_use for held in vars(m).values())
