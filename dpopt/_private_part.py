"""The private part of a chain: from per-example gradients to a noisy mean, in one step."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax

from dpopt import _stages
from dpopt.clipping import as_promise
from dpopt.common import trees
from dpopt.common.types import PyTree
from dpopt.engines import sums
from dpopt.gradients import PerExampleGrads
from dpopt.preconditioners.base import Diagonal, Preconditioner, apply_diagonal

# (gradients, a state per stage, params, extra arguments) -> (updates, states, standard deviation of the noise in them).
RunCore: TypeAlias = Callable[
    [PerExampleGrads | optax.Updates, Sequence[optax.OptState], optax.Params | None, dict[str, Any]],
    tuple[optax.Updates, tuple[optax.OptState, ...], PyTree],
]


def run_private_part(stages: Sequence[_stages.StagedTransformation]) -> RunCore:
    """Runs stages in the order that `dpopt.privacy.check_order` requires: diagonals, clip, noise, maybe a division."""
    preconditioners = [t.stage.preconditioner for t in stages if isinstance(t.stage, _stages.Precondition)]
    n = len(preconditioners)
    clip, noise = stages[n : n + 2]
    (noise_stage,) = [t.stage for t in stages if isinstance(t.stage, _stages.Noise)]
    normalize = next((t for t in stages if isinstance(t.stage, _stages.Normalize)), None)

    def run(updates: PyTree, state: Sequence[PyTree], params: optax.Params | None, extra_args: dict[str, Any]):
        grads = as_promise(updates, params)
        diagonals, states = _diagonals(preconditioners, state[:n], params, extra_args)
        scaled = reduce(apply_diagonal, diagonals, grads)
        total, clip_state = clip.update(scaled, state[n], params, **extra_args)
        remainder = scaled.latest.remainder
        stddev = noise_stage.stddev_in(state[n + 1])
        total = total if remainder is None else sums.Sum(total, remainder)
        mean, *post_state = noise.update(total, state[n + 1], params, **extra_args)
        if normalize is not None:
            mean, mean_state = normalize.update(mean, state[n + 2], params, **extra_args)
            post_state.append(mean_state)
            stddev = stddev / cast(_stages.Normalize, normalize.stage).divisor
        mean, stddev = _released(diagonals, mean, stddev)
        states = [p.observe(s, mean, stddev) for p, s in zip(preconditioners, states, strict=True)]
        return mean, (*states, clip_state, *post_state), stddev

    return run


def _diagonals(
    preconditioners: Sequence[Preconditioner], states: Sequence[PyTree], params: PyTree, extra_args: dict[str, Any]
) -> tuple[list[Diagonal], list[PyTree]]:
    """The diagonals of this step, and the states of the preconditioners."""
    diagonals, states = [], list(states)
    for i, preconditioner in enumerate(preconditioners):
        diagonal, states[i] = preconditioner.diagonal(states[i], params, **extra_args)
        diagonals.append(diagonal)
        if diagonal.offset is not None and any(d.release is not None for d in diagonals):
            raise ValueError(
                f"stage {i} (precondition) adds an offset in units that an earlier diagonal undoes after the noise; "
                "put the one that is undone last."
            )
    return diagonals, states


def _released(diagonals: Sequence[Diagonal], mean: PyTree, stddev: PyTree) -> tuple[PyTree, PyTree]:
    """The noisy mean and the standard deviation of its noise, both multiplied by what undoes the diagonals."""
    for diagonal in diagonals:
        if diagonal.release is not None:
            release = trees.broadcast_prefix(diagonal.release, mean, "release")
            mean = jax.tree.map(lambda u, r: u * jnp.asarray(r, u.dtype), mean, release)
            if jax.tree.structure(stddev) == jax.tree.structure(release):
                stddev = jax.tree.map(lambda s, r: s * jnp.abs(r), stddev, release)
            else:  # one number for all leaves
                stddev = jax.tree.map(lambda r, s=stddev: s * jnp.abs(r), release)
    return mean, stddev
