"""What a chain of transformations costs in privacy, before sampling and composition.

`Privacy` lists the Gaussian queries of a step. `dpopt.chain` reads it off the stages it is given; `privacy_of` finds it
for a chain put together by ``optax.chain``, by watching it run once on shapes alone.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import dp_accounting
import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from dpopt import _stages, _validate
from dpopt.gradients import per_example_grads

Relation = dp_accounting.NeighboringRelation

PRIVATE_STAGES = ("precondition", "clip_and_sum", "add_gaussian_noise", "normalize_by")


@dataclasses.dataclass(frozen=True)
class Query:
    """One Gaussian query of a step.

    *Privacy*: the description that accounting reads; it holds no data.

    >>> Query(1.5).multiplier(step=0)
    1.5
    """

    noise_multiplier: float | Callable[[int], float]  # standard deviation over L2 sensitivity (add/remove-one)
    active: Callable[[int], bool] | None = None  # the steps on which it is asked; None: all

    def multiplier(self, step: int) -> float:
        value = self.noise_multiplier(step) if callable(self.noise_multiplier) else self.noise_multiplier
        if isinstance(value, Tracer):
            raise ValueError(
                "the noise multiplier is a traced value, so its privacy cannot be stated. Under "
                "optax.inject_hyperparams name it in static_args=('l2_clip_norm', 'noise_multiplier', "
                "'expected_batch_size', 'key')."
            )
        return float(value)


@dataclasses.dataclass(frozen=True)
class Privacy:
    """What an optimizer does to privacy at each step, before sampling is taken into account.

    Args:
        queries: the Gaussian queries of a step. All read the same batch.
        unit: what one record is: ``"example"``, or ``"client"`` for user-level privacy.

    *Privacy*: `step_event` is exact for the queries listed; `dpopt.accounting` composes it over steps and sampling.

    >>> Privacy((Query(1.0),)).step_event()
    GaussianDpEvent(noise_multiplier=1.0)
    """

    queries: tuple[Query, ...]
    unit: str = "example"

    def step_event(self, step: int = 0, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> dp_accounting.DpEvent:
        """The event of step ``step``. Replacing a record moves a sum twice as far as removing one."""
        distance = 2.0 if relation is Relation.REPLACE_ONE else 1.0
        asked = [q.multiplier(step) / distance for q in self.queries if q.active is None or q.active(step)]
        events: list[dp_accounting.DpEvent] = [
            dp_accounting.GaussianDpEvent(sigma) if sigma > 0 else dp_accounting.NonPrivateDpEvent() for sigma in asked
        ]
        return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)

    @property
    def varies(self) -> bool:
        """Whether the event depends on the step."""
        return any(callable(q.noise_multiplier) or q.active is not None for q in self.queries)


def check_order(names: Sequence[str]) -> None:
    """Raises ValueError, naming the position, unless stages of these names make a private optimizer."""
    order = "The order is precondition, clip_and_sum, add_gaussian_noise, normalize_by, then post-processing."

    def refuse(position: int, why: str):
        raise ValueError(f"stage {position} ({names[position]}) {why} {order}")

    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        if name not in PRIVATE_STAGES:
            if name == "private optimizer":
                refuse(i, "adds a second clip and noise: it must come first, and alone.")
            if "add_gaussian_noise" not in seen:
                refuse(i, "comes before the noise: there it would change a sensitivity that nobody accounts for.")
            seen["post-processing"] = i
            continue
        if name in seen and name != "precondition":
            refuse(i, f"repeats stage {seen[name]}: a chain clips once, draws noise once and divides once.")
        if name == "add_gaussian_noise" and "clip_and_sum" not in seen:
            refuse(i, "comes before any clip_and_sum: noise protects a clipped sum.")
        if name == "precondition" and "clip_and_sum" in seen:
            refuse(i, f"comes after clip_and_sum (stage {seen['clip_and_sum']}): it would undo the bound.")
        if name == "normalize_by" and "add_gaussian_noise" not in seen:
            refuse(i, "comes before the noise, which is calibrated to the sum: divide after it.")
        if name == "normalize_by" and "post-processing" in seen:
            refuse(i, f"comes after post-processing (stage {seen['post-processing']}): divide right after the noise.")
        seen[name] = i
    if "clip_and_sum" not in seen:
        raise ValueError(f"the chain has no clip_and_sum, so nothing bounds what one example adds. {order}")
    if "add_gaussian_noise" not in seen:
        raise ValueError(
            "the chain has no add_gaussian_noise, so nothing is private. For a run without privacy, say so with "
            f"add_gaussian_noise(0.0, key). {order}"
        )


def privacy_of_stages(stages: Sequence[_stages.Stage]) -> Privacy:
    clip = next(s for s in stages if isinstance(s, _stages.Clip))
    noise = next(s for s in stages if isinstance(s, _stages.Noise))

    def multiplier(step: int) -> float:
        stddev = noise.stddev(step)
        if _validate.concrete(stddev) == 0:
            return 0.0  # also under an infinite clip norm, where 0 / inf would be no better
        if _validate.concrete(clip.sensitivity) == math.inf:
            raise ValueError("noise on a sum with an infinite clip norm protects nothing: pass a finite l2_clip_norm.")
        return stddev / clip.sensitivity

    query = Query(multiplier) if callable(noise.noise_stddev) else Query(multiplier(0))
    return Privacy((query,), unit=clip.unit)


def privacy_of(optimizer: Any, params: Any = None) -> Privacy:
    """What an optimizer costs at each step, however it was put together.

    Args:
        optimizer: a `PrivateOptimizer`, something that holds one in ``.optimizer`` (a train step), or any Optax
            transformation around dpopt's stages, as ``optax.chain`` makes it.
        params: the parameters (or shapes), for an ``optax.chain`` whose stages are bound to their tree. Such a chain is
            traced once to see what it does; no data and no computation are involved.

    Raises:
        ValueError: if it does not clip once and then put noise on that very sum, with the position of what is wrong.

    *Privacy*: reads no data.

    >>> import optax
    >>> from dpopt import add_gaussian_noise, clip_and_sum, privatize
    >>> by_hand = optax.chain(clip_and_sum(2.0), add_gaussian_noise(3.0, jax.random.key(0)), optax.sgd(0.1))
    >>> privacy_of(by_hand) == privatize(
    ...     l2_clip_norm=2.0, noise_multiplier=1.5, expected_batch_size=8, key=jax.random.key(0)).privacy
    True
    """
    if isinstance(getattr(optimizer, "privacy", None), Privacy):
        return optimizer.privacy
    if hasattr(optimizer, "optimizer"):
        return privacy_of(optimizer.optimizer, params)
    if params is None:
        params = jax.ShapeDtypeStruct((), jnp.float32)

    def probe(params):
        def loss(p, example):
            return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(p)) * example

        grads = per_example_grads(loss)(params, jnp.ones((1,)), mask=None)
        update = optax.with_extra_args_support(optimizer).update
        # Optax's types know no promise. `params` are shapes here, for those that ask for public gradients.
        return update(cast(Any, grads), optimizer.init(params), params, public_grads=params)

    with _stages.listening([]) as tape:
        jax.eval_shape(probe, params)
    return privacy_of_reports(tape)


def privacy_of_reports(tape: Sequence[_stages.Report]) -> Privacy:
    """The privacy of an update from what its stages reported while they ran.

    Raises:
        ValueError: see `privacy_of`.
    """
    whole = [r.what for r in tape if isinstance(r.what, Privacy)]
    staged = [r for r in tape if not isinstance(r.what, Privacy)]
    if whole:
        if len(whole) > 1 or staged:
            raise ValueError("the optimizer clips and draws noise more than once a step; use one private optimizer.")
        return whole[0]
    check_order([r.what.name for r in staged])
    clip = next(r for r in staged if isinstance(r.what, _stages.Clip))
    noise = next(r for r in staged if isinstance(r.what, _stages.Noise))
    if not _stages.same_arrays(clip.outputs, noise.inputs):
        raise ValueError(
            "something stands between clip_and_sum and add_gaussian_noise and changes the clipped sum, so its "
            "sensitivity is unknown. Move it before the clip as a diagonal, or after the noise."
        )
    return privacy_of_stages([r.what for r in staged])
