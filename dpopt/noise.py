"""Gaussian noise: the only file of dpopt in which privacy noise is drawn."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from dpopt import _stages
from dpopt._run_key import of_one_run
from dpopt.common import trees, validate
from dpopt.common.lazy import flow
from dpopt.common.types import PyTree, ScalarOrSchedule
from dpopt.engines import sums
from dpopt.gradients import PerExampleGrads
from dpopt.normals import box_muller, threefry

SMALL = 2**14  # a leaf with at most this many entries is drawn together with others
# The least standard deviation. Devices flush numbers below 2^-126 to zero. This far above it, that affects only a share
# of 2^-26 of the draws, those closest to zero; at 1e-38 it would affect two of three.
LEAST_STDDEV = 2.0**-100


class AddGaussianNoiseState(NamedTuple):
    """State of `add_gaussian_noise`."""

    key: jax.Array  # the key the transformation was made with; every segment of a run replaces it
    count: jax.Array  # (), int32: draws so far  # pyright: ignore[reportIncompatibleMethodOverride]

    def renewed(self, key: jax.Array) -> AddGaussianNoiseState:
        """The same step under another key."""
        return self._replace(key=key)

    def without_segment(self) -> AddGaussianNoiseState:
        """The state without the key, which is secret and differs between segments of a run."""
        return self._replace(key=None)

    def __repr__(self) -> str:
        return f"AddGaussianNoiseState(key=<secret>, count={self.count})"


def standard_normal_like(key: jax.Array, tree: PyTree) -> PyTree:
    """Draws independent N(0, 1) values shaped like ``tree``. All privacy noise in dpopt comes from here.

    Values are float32, or float64 for float64 leaves, by `dpopt.normals.box_muller`: tails are correct up to 8 standard
    deviations. With a threefry key, a value depends only on the key, the shapes of the tree and its position: it is the
    same on any number of devices, and a sharded leaf is drawn shard by shard.

    Args:
        key: a PRNG key, typed or legacy, used for this call only.
        tree: a pytree of arrays; only shapes and dtypes are read.

    Raises:
        TypeError: if an array is complex.
        ValueError: within `jax.shard_map`, where every device would draw the same noise for its own part of an array;
            under `jax.vmap` of the tree but not of the key, where all runs would draw the same noise.

    *Privacy*: reads no data. The generator is threefry (or that of the key), not a cryptographic one.

    >>> draw = standard_normal_like(jax.random.key(0), {"a": jnp.zeros(3), "b": jnp.zeros(3)})
    >>> draw["a"].shape, bool(jnp.all(draw["a"] == draw["b"]))
    ((3,), False)
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            "noise cannot be drawn within shard_map (or pmap): devices that hold different parts of an array would all "
            "draw the same numbers, and the difference of two parts would hold no noise. Return the clipped sum from "
            "shard_map, and add noise outside: there it is drawn by position in the whole array, shard by shard."
        )
    leaves, structure = jax.tree.flatten(tree)
    key = of_one_run(key, leaves)
    shapes = tuple(map(jnp.shape, leaves))
    dtypes = tuple(trees.accumulator_dtype(jnp.result_type(leaf)) for leaf in leaves)
    for dtype in dtypes:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"noise is drawn for real arrays only; got dtype {dtype}: pass real and imaginary parts.")
    return jax.tree.unflatten(structure, _draws(key, shapes, dtypes))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draws(key: jax.Array, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[np.dtype, ...]) -> list[jax.Array]:
    """One array of each shape and dtype. Large ones are drawn separately, small ones of the same dtype together.

    Each draw takes a tenth of a second to compile, and models have hundreds of small leaves.
    """
    groups: dict[tuple[np.dtype, int | None], list[int]] = {}
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        groups.setdefault((dtype, None if math.prod(shape) <= SMALL else i), []).append(i)
    draws: dict[int, jax.Array] = {}
    for group_key, ((dtype, _), places) in zip(_keys(key, len(groups)), groups.items(), strict=True):
        if len(places) == 1:
            draws[places[0]] = _draw(group_key, shapes[places[0]], dtype)
            continue
        ends = np.cumsum([math.prod(shapes[i]) for i in places])
        drawn = _draw_in_rows(group_key, int(ends[-1]), dtype)
        for i, start in zip(places, [0, *ends[:-1]], strict=True):
            # Indexed, not sliced: for a slice that is sharded, XLA would shard the whole vector and send parts around.
            _, index = threefry.counters(shapes[i])
            draws[i] = drawn.at[index + np.uint32(start)].get(mode="promise_in_bounds")
    return [draws[i] for i in range(len(shapes))]


def _keys(key: jax.Array, count: int) -> jax.Array:
    """Independent keys; a single one is ``key`` itself. (``split`` depends on ``jax_threefry_partitionable``.)"""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(count)) if count > 1 else key[None]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return box_muller.normal_from_words(*threefry.random_words(key, shape), dtype)


def _draw_in_rows(key: jax.Array, size: int, dtype: np.dtype) -> jax.Array:
    """A vector, drawn in a loop over at least two rows: otherwise XLA fuses the draw into each of its uses."""
    width = min(SMALL, max(1, -(-size // 2)))
    rows, words = -(-size // width), threefry.words_of(key)
    if words is None:
        return _draw(key, (rows * width,), dtype)

    def row(counter: tuple[jax.Array, jax.Array]) -> jax.Array:
        return box_muller.normal_from_words(*threefry.blocks_at(words, counter), dtype)

    return jax.lax.map(row, threefry.counters((rows, width))).ravel()


def add_gaussian_noise(noise_stddev: ScalarOrSchedule, key: jax.Array) -> optax.GradientTransformationExtraArgs:
    r"""Adds :math:`N(0, s^2 I)` to a clipped sum, one draw per step.

    The draw of step ``count`` uses ``fold_in(key, count)``, so it depends only on the key and the step.

    Args:
        noise_stddev: s, the standard deviation in the units of the SUM: noise multiplier times clip norm. A number of
            at least 2^-100 (7.9e-31), or 0, which adds nothing and is accounted for as no privacy at all. Or a schedule
            ``step -> number``: where it is below 2^-100, 0 included, the noise is NaN. The noise of a traced number
            below 2^-100 is NaN too, but a traced 0 adds nothing.
        key: a PRNG key, typed or legacy. Never use it for anything else.

    Returns:
        A transformation from a sum to a noisy sum, at least float32. Its state holds the key and the count.

    Raises:
        ValueError, TypeError: if s is negative, not finite or too small for float32; if ``key`` is not a single key; in
            ``update``, for gradients that were not clipped and summed.

    *Privacy*: on an input of L2 sensitivity C this is the Gaussian mechanism with noise multiplier s / C.

    >>> noise = add_gaussian_noise(2.0, jax.random.key(0))
    >>> total = jnp.zeros(10_000)
    >>> noisy, state = noise.update(total, noise.init(total))
    >>> bool(abs(noisy.std() - 2.0) < 0.05), int(state.count)
    (True, 1)
    """
    return drawn_by(lambda key, total: standard_normal_like(key, total), noise_stddev, key)


def drawn_by(
    draw: Callable[[jax.Array, PyTree], PyTree], noise_stddev: ScalarOrSchedule, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """`add_gaussian_noise` with standard normals ``draw(key, total)``, for noise on some entries of a sum only.

    *Privacy*: entries whose noise is 0 are released without noise: they must be 0 whatever the data (`dpopt.sparse`).

    >>> rows = drawn_by(lambda key, total: jnp.zeros_like(total).at[:2].set(1.0), 3.0, jax.random.key(0))
    >>> rows.update(jnp.zeros(3), rows.init(None))[0].tolist()
    [3.0, 3.0, 0.0]
    """
    check(noise_stddev, key)
    stage = _stages.Noise(noise_stddev=noise_stddev)
    is_off = not callable(noise_stddev) and validate.concrete(noise_stddev) == 0

    def init_fn(params: optax.Params):
        # Copied, so that a training step that donates its state does not delete the caller's key.
        own = jnp.array(of_one_run(key, params), copy=True)
        return AddGaussianNoiseState(key=own, count=jnp.zeros([], jnp.int32))

    def update_fn(updates: PyTree, state: PyTree, params: optax.Params | None = None, **extra_args: Any):
        del params, extra_args
        stddev = flow.public(stage.stddev(state.count), "the noise's standard deviation")

        def noise(total: PyTree) -> PyTree:
            drawn = draw(threefry.fold_in(state.key, state.count), total)
            return scaled(drawn, stddev, zero_is_meant=not callable(noise_stddev))

        count = flow.advanced(state.count, trees.next_count(state.count))
        return released(updates, None if is_off else noise), AddGaussianNoiseState(state.key, count)

    return _stages.StagedTransformation(init_fn, update_fn, stage)


def check(noise_stddev: ScalarOrSchedule, key: jax.Array) -> None:
    """Raises ValueError or TypeError for noise that cannot be drawn; see `add_gaussian_noise`.

    *Privacy*: reads public constants.

    >>> check(1.0, jax.random.key(0))
    """
    if not callable(noise_stddev):
        validate.non_negative(noise_stddev=noise_stddev)
        if 0 < (validate.concrete(noise_stddev) or 0) < LEAST_STDDEV:
            raise ValueError(
                f"noise_stddev must be 0 or at least 2^-100 (7.9e-31); got {noise_stddev}: such small noise vanishes "
                "in float32. Scale up the loss, and with it the clip norm."
            )
    validate.prng_key(key)


def released(updates: PyTree | sums.Sum, noise: Callable[[PyTree], PyTree] | None) -> PyTree:
    """A clipped sum with noise, at least float32.

    Args:
        updates: the sum, or a `dpopt.engines.sums.Sum` with its rounding error.
        noise: maps something shaped like the sum to the noise; None for no noise.

    Raises:
        TypeError: for gradients that were not clipped and summed.

    *Privacy*: as private as the noise. An inspection (`dpopt.inspection`) treats the result as public.

    >>> released(jnp.zeros(2), None).tolist()
    [0.0, 0.0]
    """
    if isinstance(updates, PerExampleGrads):
        raise TypeError(
            "add_gaussian_noise got per-example gradients: noise protects a clipped sum. Put clip_and_sum first."
        )
    remainder = None
    if isinstance(updates, sums.Sum):  # from `dpopt.chain`
        updates, remainder = updates.value, flow.public(updates.remainder, "the rounding error of the sum")

    def add_noise(updates: PyTree) -> PyTree:
        if noise is None:
            return updates
        drawn = noise(updates)
        if remainder is not None:  # to the noise first: in the sum it would be rounded away
            drawn = jax.tree.map(jnp.add, remainder, drawn)
        return jax.tree.map(jnp.add, updates, drawn)

    return flow.released(trees.upcast(updates), add_noise)


def scaled(draw: PyTree, stddev: ArrayLike, *, zero_is_meant: bool) -> PyTree:
    """Standard normals times a standard deviation, or NaN where that is too small.

    Schedules and traced numbers cannot be checked earlier. A 0 from a schedule may be a decayed value that underflowed
    in float32, whereas accounting uses the exact number. A traced number is not accounted for at all (its privacy
    cannot be stated), and 0 means that its noise is off.

    *Privacy*: reads no data.

    >>> scaled(jnp.ones(1), 2.0, zero_is_meant=True).tolist()
    [2.0]
    """

    def one(z: jax.Array) -> jax.Array:
        scale = jnp.asarray(stddev, z.dtype)
        is_sound = scale >= LEAST_STDDEV
        return jnp.where(is_sound | (scale == 0) if zero_is_meant else is_sound, scale, jnp.nan) * z

    return jax.tree.map(one, draw)


def normalize_by(expected_batch_size: float | jax.Array) -> optax.GradientTransformationExtraArgs:
    """Divides a noisy sum by the EXPECTED batch size, for a noisy mean.

    The actual size of a Poisson batch depends on the data; dividing by it would leak it, unaccounted for.

    Args:
        expected_batch_size: sampling probability times number of examples, positive.

    Raises:
        ValueError, TypeError: if it is not a positive number.

    *Privacy*: post-processing by a public constant.

    >>> mean, _ = normalize_by(4).update(jnp.array([8.0]), optax.EmptyState())
    >>> mean.tolist()
    [2.0]
    """
    validate.positive(expected_batch_size=expected_batch_size)

    def init_fn(params: optax.Params):
        del params
        return optax.EmptyState()

    def update_fn(updates: PyTree, state: PyTree, params: optax.Params | None = None, **extra_args: Any):
        del params, extra_args
        return jax.tree.map(lambda u: u / jnp.asarray(expected_batch_size, u.dtype), updates), state

    return _stages.StagedTransformation(init_fn, update_fn, _stages.Normalize(divisor=expected_batch_size))
