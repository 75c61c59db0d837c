"""The head on the frozen encoder, trained privately on features that are computed once.

It takes seconds. It is trained before the encoder, because behind a head at zero the encoder's gradients are zero, and
anew afterwards, on what the encoder has learned. Before it is trained, the mean of the features is released and
subtracted: features of a text are nearly constant, and the clip norm would be spent on the constant.
"""

from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich import progress as bar

import dpopt
import dpopt.flax
from benchmarks.pretrained import bert

TOGETHER = 16  # texts per forward pass; on CPUs, a few that fit the caches are faster than many
SHARE = 5  # a batch is a fifth of the examples; features are cheap, and large batches need less noise
STEPS, RATE, CLIP = 60, 0.1, 3.0
MEAN_SHARE = 1 / 20  # of epsilon, for the mean: where it is off by a little, little of the constant is left
# Of epsilon, for the two heads before and after the encoder is trained, each with its mean and taken by itself. Little
# is needed of the first one: that it knows in which direction the encoder's outputs should move.
FIRST_SHARE, LAST_SHARE = 1 / 5, 2 / 5
# Factor on the logits of the head before the encoder is trained. Behind a head that is sure of itself, most reviews
# have hardly any gradient, and those that it gets wrong have long ones, which are clipped.
SOFTER = 0.4
# Of epsilon, what may be spent by the end of the encoder's training, where the last head gets the rest. At epsilon 1 to
# 8 that is 0.45 to 0.48 of epsilon taken by itself, a little more than `LAST_SHARE`: costs add up like the squares.
ENCODER_SHARE = 7 / 8


def in_groups(
    of: Callable[..., Any], module: nnx.Module, arrays: Sequence[np.ndarray], *, progress: str | None = None
) -> Any:
    """``of(module, *rows)`` for all rows of arrays, `TOGETHER` at a time, as NumPy arrays.

    ``progress`` names a progress bar.
    """
    compiled, found = nnx.jit(of), []
    for start in bar.track(range(0, len(arrays[0]), TOGETHER), progress or "", disable=progress is None):
        group = compiled(module, *(x[start : start + TOGETHER] for x in arrays))
        found.append(jax.tree.map(np.asarray, group))
    return jax.tree.map(lambda *parts: np.concatenate(parts), *found)


def longest(width: int) -> float:
    """The clip norm of features in their mean: a little above their usual norm."""
    return 0.25 * width**0.5


def mean_plan(num_examples: int, width: int, *, epsilon: float, delta: float, key: jax.Array) -> dpopt.Plan:
    """The mean of all features, each clipped to `longest`, as one step of SGD from zero on `distance`."""
    builder = dpopt.Builder(num_examples=num_examples, expected_batch_size=num_examples, steps=1, key=key)
    return builder.clip(longest(width)).budget(epsilon=MEAN_SHARE * epsilon, delta=delta).then(optax.sgd(1.0)).build()


def distance(mean: jax.Array, features: jax.Array) -> jax.Array:
    """Half the squared distance of features from their mean; at zero, the gradient is minus the features."""
    return 0.5 * jnp.sum((mean - features) ** 2)


def plan(
    num_examples: int,
    *,
    epsilon: float,
    delta: float,
    key: jax.Array,
    earlier: dp_accounting.DpEvent,
    pad_to: int | None = None,
) -> dpopt.Plan:
    """DP-Adam with a fifth of the examples per step.

    ``epsilon`` is for all until its end: ``earlier`` is the event of the mean and of all else before.
    """
    builder = dpopt.Builder(
        num_examples=num_examples, expected_batch_size=num_examples / SHARE, steps=STEPS, key=key, pad_to=pad_to
    )
    rule = optax.adam(optax.linear_schedule(RATE, 0.0, STEPS))
    return builder.clip(CLIP).budget(epsilon=epsilon, delta=delta, earlier=earlier).then(rule).build()


def soften(own: bert.Head) -> None:
    """Makes a trained head less sure of itself, in place: multiplies its logits by `SOFTER`."""
    for leaf in (own.linear.kernel, own.linear.bias):
        leaf[...] = SOFTER * leaf[...]


def mean_loss(model: nnx.Module, batch: Any) -> jax.Array:
    """The mean cross entropy of a batch ``(inputs, labels)``."""
    inputs, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(*inputs), labels).mean()


def loss_and_params(head: bert.Head) -> tuple[Any, Any]:
    """The loss of the head alone, on ``((features,), label)``, and its parameters."""
    return dpopt.flax.nnx_loss(head, mean_loss, wrt=nnx.Param)
