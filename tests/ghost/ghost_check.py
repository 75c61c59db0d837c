"""The comparison with the plain definition, ``vmap(grad)``, that most ghost tests use."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dpopt import ghost

# Compiling takes longer than running these small models, so slow optimisations are skipped.
_FAST_COMPILE = {"xla_backend_optimization_level": 0}


def flat_clip(bound):
    """One coefficient for all parameters, from the global norm."""

    def coefficients(norms):
        leaves = jnp.stack(jax.tree.leaves(norms))
        largest = jnp.maximum(jnp.max(leaves, axis=0), 1e-30)  # squares of norms such as 1e30 overflow
        total = largest * jnp.sqrt(jnp.sum((leaves / largest[None]) ** 2, axis=0))
        c = jnp.minimum(1, bound / jnp.maximum(total, 1e-30))
        return jax.tree.map(lambda _: c, norms)

    return coefficients


def leaf_clip(bound):
    """A coefficient per parameter, from its own norm."""
    return lambda norms: jax.tree.map(lambda n: jnp.minimum(1, bound / jnp.maximum(n, 1e-30)), norms)


@functools.partial(jax.jit, static_argnames=("loss_fn", "coefficients"), inline=True)
def plain(loss_fn, params, batch, coefficients, mask, scale=None, offset=None):
    """Sum and norms by ``vmap(grad)``."""
    return added_up(gradients(loss_fn, params, batch, scale, offset), coefficients, mask)


def gradients(loss_fn, params, batch, scale=None, offset=None):
    """Of every example, scaled and shifted."""
    grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
    grads = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
    if scale is not None:
        grads = jax.tree.map(lambda g, s: jax.vmap(lambda g: g * s)(g), grads, scale)
    if offset is not None:
        grads = jax.tree.map(lambda g, o: jax.vmap(lambda g: g + o)(g), grads, offset)
    return grads


def added_up(grads, coefficients, mask):
    """The weighted sum and norms of gradients."""
    norms = jax.tree.map(lambda g: jnp.sqrt(jnp.sum(g.reshape(len(g), -1) ** 2, axis=1)), grads)

    def weigh(g, c):
        return jnp.tensordot(jnp.where(mask, c, 0).astype(g.dtype), g, 1)

    return jax.tree.map(weigh, grads, coefficients(norms)), norms


def assert_trees_close(got, want, rtol, atol=0.0):
    """Compares leaf by leaf, relative to each leaf's largest entry."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    flat = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, x), y in flat:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape, jax.tree_util.keystr(path)
        error = np.max(np.abs(x - y), initial=0)
        bound = atol + rtol * np.max(np.abs(y), initial=0)
        assert error <= bound, f"{jax.tree_util.keystr(path)}: error {error:.2e}, allowed {bound:.2e}"


def random_like(params, seed, low=0.5):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jax.device_put((low + rng.uniform(size=p.shape)).astype(p.dtype)), params)


def check(
    loss_fn,
    params,
    batch,
    *,
    scale=None,
    offset=None,
    rtol=1e-9,
    atol=1e-12,
    clips=(flat_clip, leaf_clip),
    two_passes=False,
    one_pass=False,
):
    """Asserts that ghost equals the plain definition, with and without a mask, flat and per parameter.

    ``atol`` is for parameters whose true gradient is zero, such as a key bias under softmax. ``one_pass`` clips all
    parameters that can be in the first pass, which requires `leaf_clip`.
    """
    size = jax.tree.leaves(batch)[0].shape[0]
    masks = [np.ones(size, bool), np.arange(size) % 3 != 1]

    def both(params, batch, mask, scale, offset):
        out, grads = [], gradients(loss_fn, params, batch, scale, offset)
        losses = jax.vmap(loss_fn, (None, 0))(params, batch)
        plan = ghost.plan_clipped_sum(loss_fn, params, batch, scale=scale, offset=offset)
        limits = [0.7] * len(plan.leaves) if one_pass else []
        if two_passes or one_pass:
            plan = plan.streaming(ghost.single_parameters(plan, limits, []))
        for clip in clips:
            coefficients = clip(0.7)
            got = ghost.clipped_sum(
                loss_fn, params, batch, coefficients=coefficients, mask=mask, scale=scale, offset=offset, plan=plan,
                limits=limits,
            )  # fmt: skip
            out.append((got, added_up(grads, coefficients, mask)))
        return out, losses

    compiled = jax.jit(both).lower(params, batch, masks[0], scale, offset).compile(compiler_options=_FAST_COMPILE)
    for mask in masks:
        found, losses = compiled(params, batch, mask, scale, offset)
        for got, (total, norms) in found:
            assert_trees_close(got.leaf_norms, norms, rtol, atol)
            assert_trees_close(got.sum, total, rtol, atol)
            assert_trees_close(got.losses, losses, rtol, atol)
            assert got.is_finite.all()
