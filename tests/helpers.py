"""Oracles in plain float64 NumPy loops, small models, and the settings that tests share."""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpopt import ghost
from dpopt.ghost import keeping, methods
from dpopt.ghost.methods import shared
from dpopt.ghost.methods.base import Cost

try:
    from jax import enable_x64
except ImportError:  # before JAX 0.8
    from jax.experimental import enable_x64 as enable_x64

RTOL32 = 1e-6  # what float32 sums of a few dozen terms keep (eps is 1.2e-7)
RTOL64 = 1e-12


def paid(noise_multiplier):
    """The multiplier that a step's event states: what rounding may add to the sensitivity is paid for."""
    return noise_multiplier / (1 + 2.4375 * 2.0**-12)


def privacy_four(**changes):
    """The four arguments that every private optimizer asks for."""
    four = dict(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=jax.random.key(0))
    return {**four, **changes}


class Point(NamedTuple):
    a: object
    b: object


def dot_loss(params, example):
    """A loss whose gradient at an example IS the example: any gradient can be put in by hand."""
    return sum(jnp.sum(p * x) for p, x in zip(jax.tree.leaves(params), jax.tree.leaves(example), strict=True))


def mlp_params(seed=0, dtype=jnp.float32):
    """Weights of a two-layer network from 3 to 2 features."""
    rng = np.random.default_rng(seed)
    shapes = {"hidden": {"w": (3, 4), "b": (4,)}, "out": {"w": (4, 2), "b": (2,)}}
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jnp.asarray(0.5 * rng.normal(size=s), dtype), shapes, is_leaf=is_shape)


def mlp_loss(params, example):
    """Squared error of the two-layer network on one example."""
    hidden = jnp.tanh(example["x"] @ params["hidden"]["w"] + params["hidden"]["b"])
    return jnp.sum((hidden @ params["out"]["w"] + params["out"]["b"] - example["y"]) ** 2)


def mlp_batch(size=4, seed=1):
    """Examples for the two-layer network."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(size, 3)), rng.normal(size=(size, 2))
    return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)}


def random_tree(seed, batch=None):
    """A pytree of all kinds of nodes, float32; with a batch axis where ``batch`` is given."""
    rng = np.random.default_rng(seed)
    lead = () if batch is None else (batch,)

    def leaf(*shape):
        return (rng.normal(size=lead + shape) * 10.0 ** rng.uniform(-1, 1)).astype(np.float32)

    return {"w": leaf(3, 2), "deep": [Point(leaf(4), leaf()), None], "t": (leaf(1, 1, 2),)}


def rows(tree):
    """A list of examples from a pytree with a batch axis, in float64."""
    leaves, structure = jax.tree.flatten(tree)
    leaves = [np.asarray(leaf).astype(np.float64) for leaf in leaves]
    return [jax.tree.unflatten(structure, [leaf[i] for leaf in leaves]) for i in range(len(leaves[0]))]


def norm(tree):
    """L2 norm over all leaves, in float64, safe from overflow and underflow."""
    flat = np.concatenate([np.asarray(leaf).astype(np.float64).ravel() for leaf in jax.tree.leaves(tree)])
    largest = np.max(np.abs(flat), initial=0.0)
    return largest * np.linalg.norm(flat / largest) if 0 < largest < np.inf else largest


def loop_clipped_sum(grads, l2_clip_norm, *, mask=None, scale=None, offset=None):
    """``sum_i clip(S g_i + o)`` example by example: the oracle."""
    total = jax.tree.map(lambda g: np.zeros(np.shape(g)[1:]), grads)
    for i, g in enumerate(rows(grads)):
        if mask is not None and not mask[i]:
            continue
        if scale is not None:
            g = jax.tree.map(lambda x, s: x * s, g, scale)
        if offset is not None:
            g = jax.tree.map(lambda x, o: x + o, g, offset)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(g)):
            continue
        shrink = min(1.0, l2_clip_norm / max(norm(g), 1e-300))
        total = jax.tree.map(lambda t, x, c=shrink: t + c * x, total, g)
    return total


def distance(a, b):
    """L2 distance of two pytrees, in float64."""
    return norm(jax.tree.map(lambda x, y: np.asarray(x).astype(np.float64) - np.asarray(y).astype(np.float64), a, b))


def assert_near(actual, desired, rtol=RTOL32):
    """Asserts equal structures, shapes, and a relative L2 distance of at most ``rtol``."""
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    jax.tree.map(lambda x, y: np.testing.assert_equal(np.shape(x), np.shape(y)), actual, desired)
    assert distance(actual, desired) <= rtol * norm(desired), (actual, desired)


def assert_identical(actual, desired):
    """Asserts equality bit for bit (NaN equals NaN), dtypes included."""
    assert jax.tree.structure(actual) == jax.tree.structure(desired)

    def check(x, y):
        assert jnp.result_type(x) == jnp.result_type(y)
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

    jax.tree.map(check, actual, desired)


def unit_gradients(batch, **leaves):
    """Gradients ``(batch, ...)`` filled with constants: ``unit_gradients(3, w=2.0)``."""
    return {name: jnp.full((batch, 2), value, jnp.float32) for name, value in leaves.items()}


def slow_unless(quick, values):
    """For ``parametrize``: ``values``, of which those in ``quick`` run in every run, the others with ``-m slow``."""
    return [v if v in quick else pytest.param(v, marks=pytest.mark.slow) for v in values]


@contextlib.contextmanager
def preferring(method):
    """Norms come from a ``method``, "pairs" or "segments", wherever they can; "" is for the cheapest.

    With "joined", gradients of parameters with several uses, or that are pulled back, are kept."""
    with pytest.MonkeyPatch.context() as patch:
        if method == "joined":
            for share in ("_KEPT_RATIO", "_KEPT_SHARE"):
                patch.setattr(keeping, share, np.inf)
            patch.setattr(keeping, "_of_sum", lambda *of: 1e30)
        elif method:
            preferred = getattr(methods, method.upper())
            patch.setattr(type(preferred), "cost", lambda *of: Cost(0.0, 0.0))
            patch.setattr(shared, f"cost_of_{method}", lambda *sizes: Cost(0.0, 0.0))
        yield


@functools.partial(jax.jit, static_argnames=("loss", "way"))
def contributions(loss, params, batch, way, l2_clip_norm, scale):
    """The contribution of each example to the clipped sum of ``params["w"]``: alone, and among all the others.

    ``way``: ``"recorded"``, ``"two passes"`` or ``"one pass"``.
    """
    everyone = jnp.ones(len(jax.tree.leaves(batch)[0]), bool)

    def total(mask):
        plan = ghost.plan_clipped_sum(loss, params, batch, scale=scale)
        limits = [l2_clip_norm] if way == "one pass" else []
        if way != "recorded":
            plan = plan.streaming(ghost.single_parameters(plan, limits, []))

        def coefficients(norms):
            return jax.tree.map(lambda n: jnp.where(n > l2_clip_norm, l2_clip_norm / n, 1.0), norms)

        return ghost.clipped_sum(
            loss, params, batch, coefficients=coefficients, mask=mask, scale=scale, plan=plan, limits=limits
        ).sum["w"]

    alone = jnp.diag(everyone)
    totals = jax.lax.map(total, jnp.concatenate([alone, ~alone, everyone[None]]))
    return totals[: len(alone)], totals[-1] - totals[len(alone) : -1]


def scratch(function, *args):
    """Bytes that XLA plans to take for arrays between a function's arguments and its results."""
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes
