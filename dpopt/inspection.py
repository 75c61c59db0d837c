"""What an optimizer does with private data, found out by tracing one update on values that stand for them.

A promise whose engine is a mark in the program (`dpopt.engines.flow`) takes the place of the real one: no model is
traced, no noise is drawn, no data are read. The stages report what they are, and the program shows where their values
go: the clip must get the caller's own promise under public diagonals, the noise must fall on the clip's own sum, and
nothing else that depends on an example may reach the update or the state.
"""

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpopt import _stages
from dpopt.common import trees, validate
from dpopt.common.lazy import flow
from dpopt.engines import stacked
from dpopt.gradients import PerExampleGrads
from dpopt.privacy import Privacy, check_order, check_unit, privacy_of_stages

_ROWS = 2  # of the promise that is shown to the optimizer; nothing may depend on it


def privacy_of(optimizer: Any, params: Any = None) -> Privacy:
    """What an optimizer costs at each step, however it was put together.

    Args:
        optimizer: a `PrivateOptimizer`, something that holds one in ``.optimizer`` (a train step) or ``.tx``
            (``TrainState``, ``nnx.Optimizer``), or any Optax transformation around dpopt's stages, as ``optax.chain``
            makes it.
        params: the parameters (or shapes), for an ``optax.chain`` whose stages are bound to their tree, as
            ``adamw(mask=tree)`` is; not needed once it has taken a step. Such a chain is traced once to see what it
            does; no data and no computation are involved.

    Raises:
        ValueError: if it does not clip once and then put noise on that very sum, or lets anything get past the two.

    *Privacy*: reads no data.

    >>> from dpopt import add_gaussian_noise, clip_and_sum, privatize
    >>> by_hand = optax.chain(clip_and_sum(2.0), add_gaussian_noise(3.0, jax.random.key(0)), optax.sgd(0.1))
    >>> privacy_of(by_hand) == privatize(
    ...     l2_clip_norm=2.0, noise_multiplier=1.5, expected_batch_size=8, key=jax.random.key(0)).privacy
    True
    """
    if isinstance(getattr(optimizer, "privacy", None), Privacy):
        return optimizer.privacy
    for held in ("optimizer", "tx"):
        if hasattr(optimizer, held):
            return privacy_of(getattr(optimizer, held), params)
    if not callable(getattr(optimizer, "init", None)):
        raise TypeError(
            f"optimizer must be an Optax transformation, or hold one in .optimizer or .tx; got {optimizer!r}."
        )
    is_stand_in = params is None and optimizer.update not in _trained
    if params is None:
        params = _trained.get(optimizer.update, jax.ShapeDtypeStruct((), jnp.float32))
    update = optax.with_extra_args_support(optimizer).update

    def with_public_gradients(grads, state, params):  # for those that ask for them
        return update(grads, state, params, public_grads=params)

    try:
        return inspect_update(with_public_gradients, jax.eval_shape(optimizer.init, params), params)
    except Exception as error:
        if not is_stand_in or _is_own(error):
            raise
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"this optimizer does not take a single number for parameters ({reason}): a part of it, such as a mask, "
            "may be bound to the tree of yours. Pass them, or their shapes, as params=..., or ask after its first step."
        ) from error


def inspect_optimizer(optimizer: Any, grads: PerExampleGrads, state: Any, params: Any, extra: dict[str, Any]) -> None:
    """Inspects what ``optimizer.update`` would do with these arguments, at its first update of their structure.

    Raises:
        ValueError, TypeError: if it is not private, with the reason.
    """
    validate.public_arguments(extra)
    if not getattr(optimizer, "is_chained", False):
        update = optax.with_extra_args_support(optimizer).update
        inspect_once(update, optimizer.update, grads, state, params, extra)


# What has been inspected: update functions, and the structures that they were inspected for.
_inspected: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_trained: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # the shapes of their parameters


def inspect_once(
    update: Callable, identity: Callable, grads: PerExampleGrads, state: Any, params: Any, extra: dict[str, Any]
) -> None:
    """`inspect_update` for arguments like these, unless ``identity`` has been through it. Within one: does nothing."""
    if flow.is_inspecting():
        return
    leaves, structure = jax.tree.flatten((state, params, extra))
    signature = structure, tuple((jnp.shape(x), getattr(x, "dtype", type(x))) for x in leaves if not callable(x))
    seen = _inspected.setdefault(identity, set())
    if signature not in seen:
        like = grads._source.like
        inspect_update(lambda g, s, p: update(g, s, p, **extra), state, params, like=like, unit=grads.unit)
        seen.add(signature)
        _trained[identity] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)


def inspect_update(update: Callable, state: Any, params: Any, *, like: Any = None, unit: str = "example") -> Privacy:
    """The privacy of ``update(grads, state, params) -> (updates, state)``.

    Args:
        update: what a transformation does.
        state, params: arrays or shapes.
        like: what gradients are shaped like; None for ``params``.
        unit: what a row of the batch is.

    Raises:
        ValueError: if it is not private, with the reason.
    """
    found: list[Privacy] = []

    def run(state, params):
        mask = flow.private(jnp.ones((_ROWS,), bool), "the batch")
        source: Any = _Shown(params if like is None else like, unit, mask)
        shown = PerExampleGrads(source, mask)
        reports: list[_stages.Stage | Privacy] = []
        with _stages.listening(reports):
            updates, new_state = update(shown, state, params)
        if jax.tree.structure(new_state) != jax.tree.structure(state):
            raise ValueError("the optimizer's state changes its structure, so its count of noise draws is lost.")
        if any(isinstance(x, PerExampleGrads) for x in jax.tree.leaves((updates, new_state))):
            raise ValueError("the optimizer hands on per-example gradients, neither clipped nor noised.")
        found.append(_privacy_of_reports(reports))
        return updates, new_state

    with flow.inspecting():
        try:
            program, outputs = jax.make_jaxpr(run, return_shape=True)(state, params)
        except Exception as error:
            if _is_own(error):
                raise
            raise _explained(error) from error
    (privacy,) = found
    check_unit(unit, privacy.unit)
    labels, releases = flow.follow(program, range(len(jax.tree.leaves(state))))
    for (path, _), label in zip(jax.tree_util.tree_leaves_with_path(outputs), labels, strict=True):
        if label is not None:
            what = ("the update", "the optimizer's state")[path[0].idx]
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path[1:])} depends on {label}, and not only through clip_and_sum and "
                "add_gaussian_noise. After the noise, read nothing but what comes out of it."
            )
    if releases != len(privacy.queries):
        raise ValueError(f"{releases} noised sums come out of a step that is accounted for as {len(privacy.queries)}.")
    return privacy


def check_arguments(update: Callable, name: str) -> None:
    """Raises ValueError if an update cannot do without an argument that is not public."""
    if told := _required_private_arguments(update):
        raise ValueError(f"{name} must be told {', '.join(sorted(told))}. {validate.ONLY_PUBLIC_ARGUMENTS}")


def _required_private_arguments(update: Callable) -> set[str]:
    """Arguments that an update cannot do without and that are not public by name, as far as signatures tell.

    Optax's combinators (``chain``, ``with_extra_args_support``) hide the signatures of their parts; the parts are found
    in their closures.
    """
    function = inspect.unwrap(update)
    try:
        arguments = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return set()
    names = {p.name for p in arguments if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    found = {name for name in names if not validate.is_public_argument(name)}
    if str(function.__module__).split(".")[0] == "optax":  # None in a function that was made from text
        closed_over = inspect.getclosurevars(function).nonlocals.values()
        parts = [x for value in closed_over for x in (value if isinstance(value, tuple | list) else [value])]
        found.update(*(_required_private_arguments(x) for x in parts if inspect.isfunction(x)))
    return found


class _Shown:
    """Stands where `dpopt.engines.promises.Loss` stands in a real promise; what it returns is marked as private."""

    is_shown = True

    def __init__(self, like: Any, unit: str, mask: jax.Array):
        self.like = like
        self.unit = unit
        self.mask = mask
        self.batch_size = _ROWS

    def of_examples(self, function: Callable, params: Any) -> "_Shown":
        del function  # of private examples: its gradients are as private
        flow.public(params, "the parameters of a second query")
        return _Shown(params, self.unit, self.mask)

    def gradients(self) -> Any:
        rows = jax.tree.map(lambda x: jnp.zeros((_ROWS, *x.shape), x.dtype), trees.zeros(self.like))
        return flow.private(rows, "per-example gradients")

    def run(self, mask: Any, scale: Any, offset: Any, clip: Any) -> stacked.EngineResult:
        if mask is not self.mask:
            raise ValueError("another mask than the caller's reached the clip.")
        flow.public((scale, offset), "a diagonal before the clip")
        flow.public(clip.sensitivity, "the clip norm")
        total = flow.private(trees.zeros(self.like), "a sum of per-example gradients")
        per_row = jnp.zeros((_ROWS,), jnp.float32)
        axes = jax.tree.unflatten(jax.tree.structure(self.like), stacked.layer_axes(clip, self.like))
        norms = jax.tree.map(lambda x, n: jnp.zeros((_ROWS, *jnp.shape(x)[:n])), self.like, axes)
        norms, losses, is_finite = flow.private((norms, per_row, per_row == 0), "per-example norms and losses")
        return stacked.EngineResult(total, norms, losses, None, is_finite)


def _privacy_of_reports(reports: Sequence[_stages.Stage | Privacy]) -> Privacy:
    whole = [r for r in reports if isinstance(r, Privacy)]
    stages = [r for r in reports if not isinstance(r, Privacy)]
    if whole:
        if len(whole) > 1 or stages:
            raise ValueError("the optimizer clips and draws noise more than once a step; use one private optimizer.")
        return whole[0]
    check_order([stage.name for stage in stages])
    return privacy_of_stages(stages)


def _is_own(error: Exception) -> bool:
    """Whether dpopt raised it, and so says already what is wrong."""
    if isinstance(error, AttributeError):  # others have asked a promise for what arrays have
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    here = trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("dpopt")
    return here and "keyword" not in str(error)  # a call that does not fit fails where it is made: here


def _explained(error: Exception) -> ValueError:
    """What another's error most likely means."""
    if "required keyword-only argument" in str(error):
        return ValueError(f"{error}. {validate.ONLY_PUBLIC_ARGUMENTS}")
    first_line = str(error).strip().split("\n")[0]
    return ValueError(
        "the update cannot be followed with per-example gradients in the place of the gradient "
        f"({type(error).__name__}: {first_line}). What computes with the gradient (optax.MultiSteps, apply_if_finite, "
        "flatten, sam), skips steps (conditionally_transform) or splits the parameters (masked, partition) cannot "
        "stand around a private optimizer or before its clip. After the noise it can: "
        "dpopt.chain(dpopt.privatize(...), your_rule)."
    )
