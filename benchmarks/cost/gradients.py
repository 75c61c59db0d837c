"""The ways to compute a gradient that are compared, each a compiled function of parameters, batch and diagonal.

All take the diagonal, although only the *scaled* ones use it. It is an argument because in training it is optimizer
state, and XLA would fold a constant into the program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpopt
from benchmarks.cost.families import Family

SEED = 0


def batch_size(family: Family) -> int:
    return len(jax.tree.leaves(family.batch)[0])


def diagonal(family: Family) -> Any:
    """One factor per parameter, as a preconditioner applies before the clip."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda p: jnp.asarray(rng.uniform(0.5, 2.0, p.shape), jnp.float32), family.params)


def mean_loss(family: Family) -> Callable:
    """The loss of training without privacy."""
    return lambda params, batch: jnp.mean(jax.vmap(family.loss_fn, (None, 0))(params, batch))


def ordinary(family: Family) -> Callable:
    """The mean gradient that training without privacy computes."""
    gradient = jax.grad(mean_loss(family))
    return jax.jit(lambda params, batch, diagonal: gradient(params, batch))


def ordinary_in_parts(family: Family) -> Callable:
    """The mean gradient, accumulated over as many parts as dpopt splits the batch into."""
    gradient, parts = jax.grad(mean_loss(family)), dpopt.ghost.plan_clipped_sum(*family).parts

    def run(params, batch, diagonal):
        def step(total, part):
            return jax.tree.map(lambda t, g: t + g / parts, total, gradient(params, part)), None

        split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
        return jax.lax.scan(step, jax.tree.map(jnp.zeros_like, params), split)[0]

    return jax.jit(run)


def clip_function(l2_clip_norm: float, by_layer: bool) -> dpopt.FlatClip | dpopt.LayerwiseClip:
    return dpopt.LayerwiseClip(l2_clip_norm) if by_layer else dpopt.FlatClip(l2_clip_norm)


def clipped(
    family: Family, engine: str, l2_clip_norm: float, *, scaled: bool = False, by_layer: bool = False,
    microbatch_size: int | None = None,
) -> Callable:  # fmt: skip
    """The clipped sum by one of dpopt's engines."""

    def run(params, batch, diagonal):
        options = {"engine": engine, "microbatch_size": microbatch_size}
        grads = dpopt.per_example_grads(family.loss_fn, **options)(params, batch, mask=None)
        if scaled:
            grads = grads.scale(diagonal)
        return grads.clipped_sum(clip_function(l2_clip_norm, by_layer)).sum

    return jax.jit(run)


def _times(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.multiply, a, b)


def jax_privacy_clipped(family: Family, scaled: bool, l2_clip_norm: float, microbatch_size: int) -> Callable:
    """jax_privacy's clipped gradient."""
    from jax_privacy import clipping

    def run(params, batch, diagonal):
        fn = clipping.clipped_grad(
            family.loss_fn,
            l2_clip_norm=l2_clip_norm,
            keep_batch_dim=False,
            microbatch_size=None if microbatch_size == batch_size(family) else microbatch_size,
            pre_clipping_transform=(lambda grad: _times(grad, diagonal)) if scaled else (lambda grad: grad),
        )
        return fn(params, batch)

    return jax.jit(run)


def optax_contrib(family: Family, scaled: bool, l2_clip_norm: float) -> Callable:
    """Optax's differentially private aggregate of ``vmap(grad)``, without noise; its mean is scaled to a sum."""
    aggregate = optax.contrib.differentially_private_aggregate(l2_clip_norm, 0.0, jax.random.key(SEED))

    def run(params, batch, diagonal):
        grads = jax.vmap(jax.grad(family.loss_fn), (None, 0))(params, batch)
        if scaled:
            grads = jax.tree.map(lambda g, d: g * d[None], grads, diagonal)
        mean, _ = aggregate.update(grads, aggregate.init(params), params)
        return jax.tree.map(lambda x: x * batch_size(family), mean)

    return jax.jit(run)


WHOLE = "ghost whole"  # the batch is not split, whatever the planner decides
IN_PARTS = "ordinary in parts"
# The ways that avoid holding per-example gradients where possible.
LIGHT = ("ordinary", "ghost", "ghost, diagonal", WHOLE, "auto")


def by_name(family: Family, name: str, l2_clip_norm: float) -> Callable:
    """The way that has this name in the tables.

    Names are ``ordinary`` (``in parts``), an engine, ``ghost whole``, ``optax contrib``, or ``jax_privacy m=8``, where
    ``m=B`` is the whole batch; ``, diagonal`` may follow, after dpopt's engines also ``, by layer``.
    """
    way, *options = name.split(", ")
    scaled, by_layer = "diagonal" in options, "by layer" in options
    if way in ("ordinary", IN_PARTS):
        return (ordinary if way == "ordinary" else ordinary_in_parts)(family)
    if way == WHOLE:
        return clipped(family, "ghost", l2_clip_norm, scaled=scaled, microbatch_size=batch_size(family))
    if way == "optax contrib":
        return optax_contrib(family, scaled, l2_clip_norm)
    if way.startswith("jax_privacy m="):
        size = way.removeprefix("jax_privacy m=")
        return jax_privacy_clipped(family, scaled, l2_clip_norm, batch_size(family) if size == "B" else int(size))
    return clipped(family, way, l2_clip_norm, scaled=scaled, by_layer=by_layer)


def microbatch_sizes(family: Family, sizes: tuple[int, ...] = (1, 8, 32)) -> list[int]:
    """The microbatch sizes to try for jax_privacy: those that divide the batch size, and the batch size itself."""
    whole = batch_size(family)
    return [m for m in sizes if m < whole and whole % m == 0] + [whole]
