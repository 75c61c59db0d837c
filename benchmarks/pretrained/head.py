"""The first stage: a head on the frozen encoder, trained privately on outputs that are computed once.

It takes seconds and a part of the budget. The second stage needs it: behind a head at zero, the gradients of the
encoder are zero.
"""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from rich import progress as bar

import dpopt
import dpopt.flax
from benchmarks.pretrained import bert, tokens

TOGETHER = 16  # texts per forward pass; on CPUs, a few that fit the caches are faster than many
SHARE = 5  # a batch is a fifth of the examples; features are cheap, and large batches need less noise
STEPS, RATE = 60, 0.1
BUDGET_SHARE = 3 / 8  # of epsilon, if a second stage follows
# Factor on the head's learning rate in the second stage: it has farther to go than the pretrained parameters.
FASTER = {"bias": 1.5, "lora": 6.0, "all": 50.0}


def features(body: bert.Bert, texts: tokens.Texts, reads: str, *, progress: bool = False) -> np.ndarray:
    """The head's input for each text (`bert.features`): ``(n, features)`` float32."""
    of = nnx.jit(lambda body, ids, mask: bert.features(body, ids, mask, reads))
    starts = range(0, len(texts.ids), TOGETHER)
    groups = (slice(start, start + TOGETHER) for start in bar.track(starts, "frozen encoder", disable=not progress))
    return np.concatenate([np.asarray(of(body, texts.ids[group], texts.mask[group])) for group in groups])


def plan(num_examples: int, *, epsilon: float, delta: float, key: jax.Array, pad_to: int | None = None) -> dpopt.Plan:
    """DP-Adam with a fifth of the examples per step."""
    builder = dpopt.Builder(
        num_examples=num_examples, expected_batch_size=num_examples / SHARE, steps=STEPS, key=key, pad_to=pad_to
    )
    rule = optax.adam(optax.linear_schedule(RATE, 0.0, STEPS))
    return builder.clip(1.0).budget(epsilon=epsilon, delta=delta).then(rule).build()


def mean_loss(model: nnx.Module, batch: Any) -> jax.Array:
    """The mean cross entropy of a batch ``(inputs, labels)``."""
    inputs, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(*inputs), labels).mean()


def loss_and_params(head: nnx.Linear) -> tuple[Any, Any]:
    """The loss of the head alone, on ``((features,), label)``, and its parameters."""
    return dpopt.flax.nnx_loss(head, mean_loss, wrt=nnx.Param)
