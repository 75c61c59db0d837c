"""`add_correlated_noise`: Gaussian noise that later steps take back in part."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpopt import _stages
from dpopt import noise as independent_noise
from dpopt.common import trees, validate
from dpopt.common.lazy import flow
from dpopt.correlated.strategies import Strategy
from dpopt.normals import threefry


class AddCorrelatedNoiseState(NamedTuple):
    """State of `add_correlated_noise`."""

    key: jax.Array  # the key the transformation was made with; a run's segments replace it
    count: jax.Array  # (), int32: draws so far
    start: jax.Array  # (), int32: the count at which the strategy began
    buffers: Any  # as many trees like params, at least float32, as the strategy keeps: secret, as the key is

    def renewed(self, key: jax.Array) -> AddCorrelatedNoiseState:
        """The same step under another key, where the strategy begins anew: its noise has nothing to take back."""
        return self._replace(key=key, start=self.count, buffers=jax.tree.map(jnp.zeros_like, self.buffers))

    def without_segment(self) -> Any:
        """The state but for what every segment of a run has of its own, and for its secrets."""
        return self._replace(key=None, start=None, buffers=())

    def __repr__(self) -> str:
        return f"AddCorrelatedNoiseState(key=<secret>, count={self.count}, start={self.start}, buffers=<secret>)"


def add_correlated_noise(strategy: Strategy, noise_stddev: Any, key: jax.Array) -> _stages.StagedTransformation:
    r"""Adds :math:`s\, (C^{-1} z)_t` to the clipped sum of step t: noise that cancels in the sum over steps.

    In the place of `dpopt.add_gaussian_noise`. Its batches must come from a sampler of `dpopt.samplers.parts`.

    Args:
        strategy: C, from `dpopt.correlated`. After the steps that it covers the noise is NaN.
        noise_stddev: s, in the units of the SUM: noise multiplier times clip norm, a number as in
            `dpopt.add_gaussian_noise`, no schedule. C has columns of norm 1 at most, so s is what an example pays for
            that is in one step only.
        key: a PRNG key, typed or legacy. Never use it for anything else.

    Returns:
        A transformation from a sum to a noisy sum, at least float32. Its state holds the key, two counts, and the
        arrays that ``strategy.stream`` keeps, sharded like the parameters.

    Raises:
        ValueError, TypeError: if s is negative, not finite, too small for float32 or a schedule; for what is no
            strategy or no single key; in ``update``, for gradients that were not clipped and summed.

    *Privacy*: the matrix mechanism; `dpopt.samplers.parts.InParts.event` says what the first t steps cost. The state
    must stay secret: noises that are kept, as the key, would undo the noise of steps to come.

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
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy must be made by dpopt.correlated, such as banded(8, steps=...); got {strategy!r}.")
    if callable(noise_stddev):
        raise ValueError(
            "noise_stddev must be one number for all steps where noise is correlated; got a schedule, under which no "
            "theorem says what a run costs."
        )
    independent_noise.check(noise_stddev, key)
    stage = _stages.Noise(noise_stddev=noise_stddev, strategy=strategy)
    is_off = validate.concrete(noise_stddev) == 0
    stream = strategy.stream

    def init_fn(params):
        count = 0 if is_off else stream.num_buffers
        buffers = tuple(jax.tree.map(_zeros_like, params) for _ in range(count))
        zero = jnp.zeros([], jnp.int32)
        return AddCorrelatedNoiseState(jnp.array(key, copy=True), zero, jnp.copy(zero), buffers)

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        step = state.count - state.start
        stddev = flow.public(jnp.where(step < strategy.steps, noise_stddev, jnp.nan), "the noise's standard deviation")
        buffers = state.buffers

        def noise(total):
            nonlocal buffers

            def draw(lag):
                return independent_noise.standard_normal_like(threefry.fold_in(state.key, state.count - lag), total)

            drawn, buffers = stream.next(draw, step, buffers, total)
            return independent_noise.scaled(drawn, stddev, zero_is_meant=True)

        noisy = independent_noise.released(updates, None if is_off else noise)
        count = flow.advanced(state.count, trees.next_count(state.count))
        return noisy, AddCorrelatedNoiseState(state.key, count, state.start, buffers)

    return _stages.StagedTransformation(init_fn, update_fn, stage)


def _zeros_like(p: Any) -> jax.Array:
    return jnp.zeros_like(p, trees.accumulator_dtype(jnp.result_type(p)))
