"""What an optimizer does with private data, found by tracing one update with values that stand for them.

A stand-in (`dpopt.engines.stand_in`) takes the place of the real gradients: no model is traced, no noise is drawn, no
data are read. The stages record what they are, and the traced program shows where private values go
(`dpopt.engines.flow`): the clip must get the caller's own promise under public diagonals, the noise must be added to
the sum of that clip, and nothing else that depends on an example may reach the update or the state.
"""

from __future__ import annotations

import inspect
import traceback
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpopt import _one_run, _stages
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting, flow
from dpopt.common.names import first_line
from dpopt.common.types import PyTree
from dpopt.constants import shapes_of
from dpopt.engines import stand_in
from dpopt.events import Sampling, compose
from dpopt.gradients import PerExampleGrads
from dpopt.privacy import Privacy, check_order, check_unit, privacy_of_stages


def privacy_of(optimizer: Any, params: optax.Params | None = None) -> Privacy:
    """The privacy cost of each step of an optimizer, however it was made.

    Args:
        optimizer: a `PrivateOptimizer`, something that holds one in ``.optimizer`` (a train step) or ``.tx``
            (``TrainState``, ``nnx.Optimizer``), or any Optax transformation around dpopt's stages (``optax.chain``).
        params: the parameters (or shapes), for an ``optax.chain`` whose stages depend on their tree, such as
            ``adamw(mask=tree)``; not needed after its first step. The update of such a chain is traced, not computed.

    Raises:
        ValueError: if it does not clip once and then add noise to that sum, or if anything bypasses the two.

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

    def with_public_gradients(grads: PyTree, state: PyTree, params: PyTree):  # for optimizers that need them
        return update(grads, state, params, public_grads=params)

    try:
        return inspect_update(with_public_gradients, jax.eval_shape(optimizer.init, params), params)
    except Exception as error:
        if not is_stand_in or _is_own(error):
            raise
        reason = first_line(error)
        raise ValueError(
            f"this optimizer does not accept a single number for parameters ({reason}): a part of it, such as a mask, "
            "may depend on the tree of yours. Pass them, or their shapes, as params=..., or call this after the first "
            "step."
        ) from error


def privacy_event(optimizer: Any, *, sampling: Sampling, steps: int, params: PyTree = None) -> dp_accounting.DpEvent:
    """The event of training with a named optimizer, a `dpopt.chain`, an ``optax.chain`` or a train step.

    A sampler stands for the run that it feeds. There is a UserWarning if it expects batches of another size than the
    optimizer does; if it has drawn more or fewer batches than ``steps``; if it has fed another optimizer; or if it has
    drawn none although the optimizer has been used: the batches then came from elsewhere (an epoch over shuffled data
    is not a Poisson sample). For the cost of another run, pass a scheme (``sampler.scheme``).

    Args:
        optimizer, params: see `privacy_of`.
        sampling, steps: see `dpopt.events.compose`.

    Raises:
        ValueError: if the optimizer does not privatise its gradients in an order that can be accounted for.

    *Privacy*: a description; reads no data.

    >>> import jax, dpopt
    >>> opt = dpopt.dp_sgd(
    ...     0.1, l2_clip_norm=1.0, noise_multiplier=2.0, expected_batch_size=50, key=jax.random.key(0))
    >>> sampler = dpopt.PoissonSampler(1_000, 50, seed=0)
    >>> event = privacy_event(opt, sampling=sampler, steps=100)
    >>> round(dpopt.epsilon_of_event(event, delta=1e-5), 2)
    1.1
    """
    event = compose(privacy_of(optimizer, params), sampling, steps)
    _one_run.warn_of_another(optimizer, sampling, steps)
    return event


# For each update function that was inspected: the structures of its arguments, and the shapes of its parameters.
_inspected: weakref.WeakKeyDictionary[Callable[..., Any], set[Any]] = weakref.WeakKeyDictionary()
_trained: weakref.WeakKeyDictionary[Callable[..., Any], PyTree] = weakref.WeakKeyDictionary()


def inspect_optimizer(
    optimizer: optax.GradientTransformation,
    grads: PerExampleGrads,
    state: optax.OptState,
    params: optax.Params | None,
    extra: dict[str, Any],
) -> None:
    """Inspects ``optimizer.update`` for arguments like these, once for each structure; raises if it is not private."""
    validate.public_arguments(extra)
    if getattr(optimizer, "is_chained", False) or flow.is_inspecting():
        return
    update = optax.with_extra_args_support(optimizer).update
    given, structure = jax.tree.flatten(extra)
    # An update may branch on what is not an array, such as a flag: it is inspected for each value.
    arrays = {i: x for i, x in enumerate(given) if isinstance(x, jax.Array | np.ndarray)}
    others = tuple((i, type(x), x) for i, x in enumerate(given) if i not in arrays)
    described = [(jnp.shape(x), getattr(x, "dtype", type(x))) for x in jax.tree.leaves((state, params, arrays))]
    signature = jax.tree.structure((state, params)), structure, tuple(described), others
    seen = _inspected.setdefault(optimizer.update, set())
    is_hashable = all(isinstance(x, Hashable) for _, _, x in others)  # else it is inspected at every call
    if not is_hashable or signature not in seen:

        def update_of(grads: PyTree, state: PyTree, params_and_arrays: PyTree) -> tuple[PyTree, PyTree]:
            params, arrays = params_and_arrays
            leaves = [arrays.get(i, x) for i, x in enumerate(given)]
            return update(grads, state, params, **structure.unflatten(leaves))

        like = params if grads.like is None else grads.like
        inspect_update(update_of, state, (params, arrays), like=like, unit=grads.unit)
        if is_hashable:
            seen.add(signature)
        _trained[optimizer.update] = shapes_of(params)


def inspect_update(
    update: Callable[..., Any], state: PyTree, params: PyTree, *, like: PyTree = None, unit: str = "example"
) -> Privacy:
    """The privacy of ``update(grads, state, params) -> (updates, state)``; raises a ValueError if it is not private.

    ``state`` and ``params`` are arrays or shapes, ``like`` (None for ``params``) is a tree like one row's gradient.
    """
    found: list[Privacy] = []

    def run(state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        mask = flow.private(jnp.ones((stand_in.ROWS,), bool), "the batch")
        grads = PerExampleGrads(stand_in.StandIn(params if like is None else like, unit, mask), mask)
        reports: list[_stages.Stage | Privacy] = []
        with _stages.listening(reports):
            updates, new_state = update(grads, state, params)
        if jax.tree.structure(new_state) != jax.tree.structure(state):
            raise ValueError(
                "update changes the structure of the optimizer's state, so the count of noise draws is lost."
            )
        if any(isinstance(x, PerExampleGrads) for x in jax.tree.leaves((updates, new_state))):
            raise ValueError("the optimizer returns per-example gradients, neither clipped nor noised.")
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
                "add_gaussian_noise. After the noise, read only its result."
            )
    if releases != len(privacy.queries):
        raise ValueError(f"a step releases {releases} noised sums, but is accounted for with {len(privacy.queries)}.")
    return privacy


def check_arguments(update: Callable[..., Any], name: str) -> None:
    """Raises ValueError if an update requires an argument that is not public."""
    if private := _required_private_arguments(update):
        raise ValueError(f"{name} requires the argument {', '.join(sorted(private))}. {validate.ONLY_PUBLIC_ARGUMENTS}")


def _required_private_arguments(update: Callable[..., Any]) -> set[str]:
    """Required arguments of an update, or of a part of Optax's combinators, whose names are not public."""
    function = inspect.unwrap(update)
    try:
        arguments = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return set()
    names = {p.name for p in arguments if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    found = {name for name in names if not validate.is_public_argument(name)}
    # A combinator hides the signatures of its parts, but closes over them. (The module is None in functions by exec.)
    if str(function.__module__).split(".")[0] == "optax":
        closed_over = [value for cell in function.__closure__ or () for value in _content(cell)]
        parts = [x for value in closed_over for x in (value if isinstance(value, tuple | list) else [value])]
        found.update(*(_required_private_arguments(x) for x in parts if inspect.isfunction(x)))
    return found


def _content(cell: types.CellType) -> list[Any]:
    """What a closure's cell holds: nothing if its variable was never set, as in some schedules of Optax."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _privacy_of_reports(reports: Sequence[_stages.Stage | Privacy]) -> Privacy:
    whole = [r for r in reports if isinstance(r, Privacy)]
    stages = [r for r in reports if not isinstance(r, Privacy)]
    if whole:
        if len(whole) > 1 or stages:
            raise ValueError("the optimizer clips and draws noise more than once per step; use one private optimizer.")
        return whole[0]
    check_order([stage.name for stage in stages])
    return privacy_of_stages(stages)


def _is_own(error: Exception) -> bool:
    """Whether dpopt raised it, so that its message needs no explanation."""
    if isinstance(error, AttributeError):  # other code read an attribute of arrays from a promise
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    here = bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("dpopt")
    return here and "keyword" not in str(error)  # a call with wrong arguments raises in the caller: dpopt


def _explained(error: Exception) -> ValueError:
    """An error from other code with its most likely cause."""
    if "required keyword-only argument" in str(error):
        return ValueError(f"{error}. {validate.ONLY_PUBLIC_ARGUMENTS}")
    return ValueError(
        "the update cannot be followed with per-example gradients in place of the gradient "
        f"({type(error).__name__}: {first_line(error)}). Transformations that compute with the gradient "
        "(optax.MultiSteps, apply_if_finite, flatten, sam), skip steps (conditionally_transform) or split the "
        "parameters (masked, partition) cannot wrap a private optimizer or come before its clip. After the noise they "
        "can: dpopt.chain(dpopt.privatize(...), your_rule)."
    )
