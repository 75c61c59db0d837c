"""`add_correlated_noise`: Gaussian noise that later steps cancel in part."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpopt import _stages
from dpopt import noise as independent_noise
from dpopt._run_key import of_one_run
from dpopt.common import trees, validate
from dpopt.common.lazy import flow
from dpopt.common.types import PyTree, ScalarOrSchedule
from dpopt.correlated.strategy import Strategy
from dpopt.normals import threefry


class AddCorrelatedNoiseState(NamedTuple):
    """State of `add_correlated_noise`."""

    key: jax.Array  # the key of the transformation; each segment of a run replaces it
    count: jax.Array  # (), int32: draws so far  # pyright: ignore[reportIncompatibleMethodOverride]
    start: jax.Array  # (), int32: the count at which the strategy began
    buffers: tuple[PyTree, ...]  # `Stream.num_buffers` trees like params, at least float32; as secret as the key

    def renewed(self, key: jax.Array) -> AddCorrelatedNoiseState:
        """The same step with another key. The strategy starts again, since this key has drawn no noise to cancel."""
        return self._replace(key=key, start=self.count, buffers=jax.tree.map(jnp.zeros_like, self.buffers))

    def without_segment(self) -> AddCorrelatedNoiseState:
        """The state without its secrets and without what differs between the segments of a run."""
        return self._replace(key=None, start=None, buffers=())

    def __repr__(self) -> str:
        return f"AddCorrelatedNoiseState(key=<secret>, count={self.count}, start={self.start}, buffers=<secret>)"


def add_correlated_noise(
    strategy: Strategy, noise_stddev: ScalarOrSchedule, key: jax.Array
) -> _stages.StagedTransformation:
    r"""Adds :math:`s\, (C^{-1} z)_t` to the clipped sum of step t: noise that cancels in the sum over steps.

    It replaces `dpopt.add_gaussian_noise`. The batches must come from a sampler of `dpopt.samplers.parts`.

    Args:
        strategy: C, from `dpopt.correlated`. After the steps that it covers the noise is NaN.
        noise_stddev: s, in the units of the SUM: noise multiplier times clip norm. A number as in
            `dpopt.add_gaussian_noise`, not a schedule. The columns of C have norm at most 1, so an example in only one
            step has the privacy of independent noise with standard deviation s.
        key: a PRNG key, typed or legacy. Never use it for anything else.

    Returns:
        A transformation from a sum to a noisy sum, at least float32. Its state holds the key, two counts, and the
        buffers of ``strategy.stream``, sharded like the parameters.

    Raises:
        ValueError, TypeError: if s is negative, not finite, too small for float32 or a schedule; if ``strategy`` is not
            a strategy or ``key`` not a single key; in ``update``, for gradients that were not clipped and summed.

    *Privacy*: the matrix mechanism; `dpopt.samplers.parts.InParts.event` is the cost of the first t steps. The state
    must stay secret: with the buffers, as with the key, the noise of later steps could be removed.

    Reference: Denisov et al. (2022), Improved Differential Privacy for SGD via Optimal Private Linear Operators on
    Adaptive Streams.

    >>> from dpopt.correlated import lambda_cgd
    >>> noise = add_correlated_noise(lambda_cgd(0.9, steps=100), 1.0, jax.random.key(0))
    >>> total = jnp.zeros(10_000)
    >>> first, state = noise.update(total, noise.init(total))
    >>> second, state = noise.update(total, state)
    >>> bool((first + second).std() < 1.1 * first.std())  # independent noise: 1.41
    True
    """
    if not isinstance(strategy, Strategy):  # pyright: ignore[reportUnnecessaryIsInstance] for untyped callers
        raise TypeError(f"strategy must be made by dpopt.correlated, such as banded(8, steps=...); got {strategy!r}.")
    if callable(noise_stddev):
        raise ValueError(
            "noise_stddev must be one number for all steps if noise is correlated; got a schedule, for which the "
            "privacy cost of a run is not known."
        )
    independent_noise.check(noise_stddev, key)
    stage = _stages.Noise(noise_stddev=noise_stddev, strategy=strategy)
    is_off = validate.concrete(noise_stddev) == 0
    stream = strategy.stream

    def init_fn(params: optax.Params):
        count = 0 if is_off else stream.num_buffers
        buffers = tuple(jax.tree.map(_zeros_like, params) for _ in range(count))
        zero = jnp.zeros([], jnp.int32)
        own = jnp.array(of_one_run(key, params), copy=True)
        return AddCorrelatedNoiseState(own, zero, jnp.copy(zero), buffers)

    def update_fn(updates: PyTree, state: PyTree, params: optax.Params | None = None, **extra_args: Any):
        del params, extra_args
        step = state.count - state.start
        stddev = flow.public(jnp.where(step < strategy.steps, noise_stddev, jnp.nan), "the noise's standard deviation")
        buffers = state.buffers

        def noise(total: PyTree) -> PyTree:
            nonlocal buffers

            def draw(lag: int | jax.Array) -> PyTree:
                return independent_noise.standard_normal_like(threefry.fold_in(state.key, state.count - lag), total)

            drawn, buffers = stream.next(draw, step, buffers, total)
            return independent_noise.scaled(drawn, stddev, zero_is_meant=True)

        noisy = independent_noise.released(updates, None if is_off else noise)
        count = flow.advanced(state.count, trees.next_count(state.count))
        return noisy, AddCorrelatedNoiseState(state.key, count, state.start, buffers)

    return _stages.StagedTransformation(init_fn, update_fn, stage)


def _zeros_like(p: jax.Array) -> jax.Array:
    return jnp.zeros_like(p, trees.accumulator_dtype(jnp.result_type(p)))
