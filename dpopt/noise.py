"""Gaussian noise: the only file of dpopt in which privacy noise is drawn."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpopt import _stages, _trees, _validate
from dpopt.gradients import PerExampleGrads


class AddGaussianNoiseState(NamedTuple):
    """State of `add_gaussian_noise`."""

    key: jax.Array  # the key the transformation was made with; never changes
    count: jax.Array  # (), int32: draws so far


def standard_normal_like(key: jax.Array, tree: Any) -> Any:
    """Draws independent N(0, 1) values shaped like ``tree``: every privacy noise of dpopt comes from here.

    Each leaf gets a key of its own. Values are float32, or float64 for float64 leaves. Under
    ``jax_threefry_partitionable`` (the default) a sharded leaf gets the same values on any number of devices.

    Args:
        key: a PRNG key, used for this call only.
        tree: a pytree of arrays; only shapes and dtypes are read.

    *Privacy*: reads no data. The generator is JAX's (threefry by default), not a cryptographic one.

    >>> draw = standard_normal_like(jax.random.key(0), {"a": jnp.zeros(3), "b": jnp.zeros(3)})
    >>> draw["a"].shape, bool(jnp.all(draw["a"] == draw["b"]))
    ((3,), False)
    """
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    draws = [
        jax.random.normal(k, jnp.shape(leaf), _trees.accumulator_dtype(jnp.result_type(leaf)))
        for k, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, draws)


def add_gaussian_noise(noise_stddev: Any, key: jax.Array) -> optax.GradientTransformationExtraArgs:
    r"""Adds :math:`N(0, s^2 I)` to a clipped sum, one draw a step.

    The draw of step ``count`` uses ``fold_in(key, count)``, so it depends on nothing but the key and the step.

    Args:
        noise_stddev: s, the standard deviation in the units of the SUM: noise multiplier times clip norm. A number, or
            a schedule ``step -> number``. 0 adds nothing (and is accounted for as no privacy at all).
        key: a PRNG key, typed or legacy. Never use it for anything else.

    Returns:
        A transformation from a sum to a noisy sum, at least float32. Its state holds the key and the count.

    Raises:
        ValueError, TypeError: if s is negative or not finite, if ``key`` is no single key; in ``update``, if it is
            given gradients that were not clipped and summed.

    *Privacy*: on an input of L2 sensitivity C this is the Gaussian mechanism with noise multiplier s / C.

    >>> noise = add_gaussian_noise(2.0, jax.random.key(0))
    >>> total = jnp.zeros(10_000)
    >>> noisy, state = noise.update(total, noise.init(total))
    >>> bool(abs(noisy.std() - 2.0) < 0.05), int(state.count)
    (True, 1)
    """
    if not callable(noise_stddev):
        _validate.non_negative(noise_stddev=noise_stddev)
    _validate.prng_key(key)
    stage = _stages.Noise(noise_stddev=noise_stddev)
    is_off = not callable(noise_stddev) and _validate.concrete(noise_stddev) == 0

    def init_fn(params):
        del params
        # A copy: a training step that donates its state must not delete the caller's key.
        return AddGaussianNoiseState(key=jnp.array(key, copy=True), count=jnp.zeros([], jnp.int32))

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        if isinstance(updates, PerExampleGrads):
            raise TypeError(
                "add_gaussian_noise got per-example gradients: noise protects a clipped sum. Put clip_and_sum first."
            )
        noisy = updates = _trees.upcast(updates)
        if not is_off:
            draw = standard_normal_like(jax.random.fold_in(state.key, state.count), updates)
            stddev = stage.stddev(state.count)
            noisy = jax.tree.map(lambda u, z: u + jnp.asarray(stddev, z.dtype) * z, updates, draw)
        return noisy, AddGaussianNoiseState(state.key, _trees.next_count(state.count))

    return _stages.StagedTransformation(init_fn, update_fn, stage)


def normalize_by(expected_batch_size: Any) -> optax.GradientTransformationExtraArgs:
    """Divides a noisy sum by the EXPECTED batch size, which turns it into a noisy mean.

    The realised size of a Poisson batch depends on the data; dividing by it would leak and undo the accounting.

    Args:
        expected_batch_size: positive number: sampling probability times number of examples.

    Raises:
        ValueError, TypeError: if it is not a positive number.

    *Privacy*: post-processing by a public constant.

    >>> mean, _ = normalize_by(4).update(jnp.array([8.0]), optax.EmptyState())
    >>> mean.tolist()
    [2.0]
    """
    _validate.positive(expected_batch_size=expected_batch_size)

    def init_fn(params):
        del params
        return optax.EmptyState()

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        return jax.tree.map(lambda u: u / jnp.asarray(expected_batch_size, u.dtype), updates), state

    return _stages.StagedTransformation(init_fn, update_fn, _stages.Normalize(divisor=expected_batch_size))
