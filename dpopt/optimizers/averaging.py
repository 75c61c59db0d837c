"""The average of the parameters over the steps of a run: steadier than the last ones, and free of charge.

Noise moves private parameters to and fro, and a moving average takes most of that out. Every step is released anyway,
so averaging them costs no privacy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpopt.common import trees, validate


class AverageState(NamedTuple):
    """State of `average_params`."""

    count: jax.Array  # (), int32: updates so far
    average: Any  # like params, at least float32


def average_params(decay: float = 0.999) -> optax.GradientTransformation:
    r"""Keeps a moving average of the parameters; updates pass unchanged. Put it last in a chain.

    .. math::
        \bar\theta_t = d_t \bar\theta_{t-1} + (1 - d_t) \theta_t, \qquad d_t = \min\big(d, \tfrac{1 + t}{10 + t}\big),
        \qquad \bar\theta_0 = \theta_0.

    At first the average is over the last tenth of the steps or so, so that where training started is soon forgotten.
    `averaged_params` finds it in the state of any optimizer, and ``result.averaged_params`` in that of a run.

    Args:
        decay: d, in [0, 1): the average reaches about 1 / (1 - d) steps back. 0 keeps the parameters themselves.

    Raises:
        ValueError, TypeError: if ``decay`` is no number in [0, 1); in ``update``, if ``params`` are not given.

    *Privacy*: post-processing; reads parameters that are released.

    Reference: De et al. (2022), Unlocking High-Accuracy Differentially Private Image Classification through Scale,
    which evaluates such averages throughout.

    >>> rule = optax.chain(optax.sgd(1.0), average_params(0.5))
    >>> w = jnp.zeros(1)
    >>> updates, state = rule.update(-jnp.ones(1), rule.init(w), w)
    >>> print(averaged_params(state).round(3))  # d = 2/11
    [0.818]
    """
    validate.fraction(decay=decay)

    def init(params):
        # Copies: a step that may reuse the buffers of parameters and state must not be given one buffer as both.
        average = jax.tree.map(lambda p: jnp.array(p, trees.accumulator_dtype(jnp.result_type(p)), copy=True), params)
        return AverageState(jnp.zeros((), jnp.int32), average)

    def update(updates, state, params=None):
        if params is None:
            raise ValueError(
                "average_params averages the parameters and was not given them: call update(grads, state, params)."
            )
        count = trees.next_count(state.count)
        t = count.astype(jnp.float32)
        d = jnp.minimum(decay, (1 + t) / (10 + t))
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: a + (1 - d).astype(a.dtype) * (p.astype(a.dtype) - a), state.average, new)
        return updates, AverageState(count, average)

    update.__qualname__ = "average_params"  # what messages and printed plans call it
    return optax.GradientTransformation(init, update)


def averaged_params(opt_state: Any, like: Any = None) -> Any:
    """The average that `average_params` keeps somewhere in an optimizer's state.

    Args:
        opt_state: state of an optimizer with one `average_params` in it.
        like: parameters whose dtypes the average is cast to; None for at least float32.

    Returns:
        A pytree like the parameters.

    Raises:
        ValueError: if the state holds no average, or several.

    *Privacy*: post-processing.

    >>> averaged_params(average_params(0.9).init({"w": jnp.ones(2)}))
    {'w': Array([1., 1.], dtype=float32)}
    """
    found = averages(opt_state)
    if len(found) != 1:
        raise ValueError(
            f"this state holds {len(found) or 'no'} averages of parameters, and one is needed: put "
            "dpopt.average_params(decay) last in the optimizer's chain, or Builder.average(decay)."
        )
    average = found[0].average
    return average if like is None else jax.tree.map(lambda a, p: a.astype(jnp.result_type(p)), average, like)


def averages(opt_state: Any) -> list[AverageState]:
    """All states of `average_params` in an optimizer's state.

    *Privacy*: post-processing.

    >>> averages(optax.sgd(0.1).init(jnp.zeros(2)))
    []
    """
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, AverageState))
    return [leaf for leaf in leaves if isinstance(leaf, AverageState)]
