"""Many runs at the price of a few: one program, mapped over keys and coins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpopt.common import validate
from dpopt.common.types import LossFn
from dpopt.run.training import make_train_step

Train: TypeAlias = Callable[[jax.Array, jax.Array], Any]  # (is the canary in the data, key) -> what the attacker sees


def repeat(train: Train, runs: int, *, key: jax.Array, at_once: int | None = None) -> tuple[Any, np.ndarray]:
    """Runs a function many times, each time with a fair coin and a key of its own, as one compiled program.

    Args:
        train: ``train(is_in, key) -> pytree``, which JAX can trace: ``is_in`` is a boolean scalar, whether the canary
            is in the data; the key is for all that is random in the run. What comes back is what the attacker sees of
            a run: best a score, since all runs' are kept.
        runs: how many.
        key: of all runs and coins.
        at_once: how many to compute side by side; None for all. Memory goes down, the result is the same.

    Returns:
        What the runs returned, leaves ``(runs, ...)``, and the coins, ``(runs,)`` bool: for `many_runs_bound`.

    Raises:
        ValueError, TypeError: for a bad argument.

    *Privacy*: the coins are what the audit tries to guess.

    >>> scores, included = repeat(lambda is_in, key: is_in + jax.random.normal(key), 100, key=jax.random.key(0))
    >>> scores.shape, included.dtype == bool
    ((100,), True)
    """
    validate.positive_int(runs=runs)
    validate.prng_key(key)
    at_once = runs if at_once is None else at_once
    validate.positive_int(at_once=at_once)
    of_coins, of_runs = jax.random.split(key)
    coins = jax.random.bernoulli(of_coins, 0.5, (runs,))
    keys = jax.random.split(of_runs, runs)
    seen = jax.jit(lambda *run: jax.lax.map(lambda r: train(*r), run, batch_size=at_once))(coins, keys)
    return jax.tree.map(np.asarray, seen), np.asarray(coins)


def small_run(
    loss_fn: LossFn,
    make_optimizer: Callable[[jax.Array], Any],
    params: Any,
    rows: Any,
    *,
    sampling_prob: float,
    steps: int,
) -> Train:
    """A run for `repeat`, on a few rows, the last of which is the canary.

    Every step is `dpopt.make_train_step`'s, on all rows, of which a Poisson sample counts: each row with the same
    probability, the canary's never where it is out. The claim is that of `dpopt.PoissonSampler` with as many steps.

    Args:
        loss_fn: the loss of a row, such as ``planted.loss_fn``.
        make_optimizer: from a key for the noise to a private optimizer.
        params: where each run starts.
        rows: leaves ``(n + 1, ...)``, such as ``planted.data(np.arange(planted.num_examples))`` for one canary.
        sampling_prob: of each row in each step.
        steps: of each run.

    Returns:
        ``train(is_in, key) -> parameters``.

    Raises:
        ValueError, TypeError: for a bad argument.

    *Privacy*: that of the optimizer, if it keeps its promise.

    >>> import dpopt, optax
    >>> make = lambda key: dpopt.dp_sgd(
    ...     1.0, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=1, key=key)
    >>> train = small_run(lambda w, x: w @ x, make, jnp.zeros(2), np.eye(2), sampling_prob=1.0, steps=3)
    >>> scores, included = repeat(lambda is_in, key: -train(is_in, key)[1], 50, key=jax.random.key(0))
    >>> bool(scores[included].mean() > 2 > 1 > scores[~included].mean())
    True
    """
    validate.probability(sampling_prob=sampling_prob)
    validate.positive_int(steps=steps)
    rows = jax.tree.map(jnp.asarray, rows)
    count = jax.tree.leaves(rows)[0].shape[0]

    def train(is_in: jax.Array, key: jax.Array) -> Any:
        of_noise, of_samples = jax.random.split(key)
        optimizer = make_optimizer(of_noise)
        step = make_train_step(loss_fn, optimizer, engine="vmap")
        there = jnp.ones(count, bool).at[-1].set(is_in)

        def one(carry: tuple[Any, Any], step_key: jax.Array) -> tuple[tuple[Any, Any], None]:
            mask = jax.random.bernoulli(step_key, sampling_prob, (count,)) & there
            return step(*carry, rows, mask)[:2], None

        start = params, optimizer.init(params)
        return jax.lax.scan(one, start, jax.random.split(of_samples, steps))[0][0]

    return train
