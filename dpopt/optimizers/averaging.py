"""A moving average of the parameters over the steps of a run.

It removes most of the noise that moves private parameters back and forth. The parameters of every step are released, so
averaging them costs no privacy.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpopt.common import trees, validate
from dpopt.common.types import PyTree


class AverageState(NamedTuple):
    """State of `average_params`."""

    count: jax.Array  # (), int32: updates so far  # pyright: ignore[reportIncompatibleMethodOverride]
    average: PyTree  # like params, at least float32


def average_params(decay: float = 0.999) -> optax.GradientTransformation:
    r"""Keeps a moving average of the parameters; updates pass unchanged. Put it last in a chain.

    .. math::
        \bar\theta_t = d_t \bar\theta_{t-1} + (1 - d_t) \theta_t, \qquad d_t = \min\big(d, \tfrac{1 + t}{10 + t}\big),
        \qquad \bar\theta_0 = \theta_0.

    At first the average is over about the last tenth of the steps, so that the initial parameters soon have no weight.
    `averaged_params` returns it from the state of any optimizer, ``result.averaged_params`` from the result of a run.

    Args:
        decay: d, in [0, 1): the average is over about 1 / (1 - d) steps. With 0 it equals the parameters, in a
            `dpopt.chain` those of 16 bits before they were rounded.

    Raises:
        ValueError, TypeError: if ``decay`` is not a number in [0, 1); in ``update``, if ``params`` are not given.

    *Privacy*: post-processing of released parameters.

    Reference: De et al. (2022), Unlocking High-Accuracy Differentially Private Image Classification through Scale,
    which evaluates such averages throughout.

    >>> rule = optax.chain(optax.sgd(1.0), average_params(0.5))
    >>> w = jnp.zeros(1)
    >>> updates, state = rule.update(-jnp.ones(1), rule.init(w), w)
    >>> print(averaged_params(state).round(3))  # d = 2/11
    [0.818]
    """
    validate.fraction(decay=decay)

    def init(params: optax.Params):
        # Copies: a step with donated arguments must not get one buffer as both parameter and state.
        average = jax.tree.map(lambda p: jnp.array(p, trees.accumulator_dtype(jnp.result_type(p)), copy=True), params)
        return AverageState(jnp.zeros((), jnp.int32), average)

    def update(updates: optax.Updates, state: PyTree, params: optax.Params | None = None):
        if params is None:
            raise ValueError("average_params needs the parameters, and got none: call update(grads, state, params).")
        count = trees.next_count(state.count)
        t = count.astype(jnp.float32)
        d = jnp.minimum(decay, (1 + t) / (10 + t))
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: a + (1 - d).astype(a.dtype) * (p.astype(a.dtype) - a), state.average, new)
        return updates, AverageState(count, average)

    return optax.GradientTransformation(init, update)


def averaged_params(opt_state: optax.OptState, like: optax.Params | None = None) -> PyTree:
    """The average of `average_params`, from anywhere in the state of an optimizer.

    Args:
        opt_state: state of an optimizer with one `average_params` in it.
        like: parameters whose dtypes the average is cast to; None for at least float32.

    Raises:
        ValueError: if the state holds no average, or more than one.

    *Privacy*: post-processing.

    >>> averaged_params(average_params(0.9).init({"w": jnp.ones(2)}))
    {'w': Array([1., 1.], dtype=float32)}
    """
    found = averages(opt_state)
    if len(found) != 1:
        raise ValueError(
            f"this state holds {len(found) or 'no'} averages of parameters; expected one. Put "
            "dpopt.average_params(decay) last in the optimizer's chain, or use Builder.average(decay)."
        )
    average = found[0].average
    return average if like is None else jax.tree.map(lambda a, p: a.astype(jnp.result_type(p)), average, like)


def averages(opt_state: optax.OptState) -> list[AverageState]:
    """All states of `average_params` in an optimizer's state.

    *Privacy*: post-processing.

    >>> averages(optax.sgd(0.1).init(jnp.zeros(2)))
    []
    """
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, AverageState))
    return [leaf for leaf in leaves if isinstance(leaf, AverageState)]
