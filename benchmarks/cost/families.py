"""The models whose clipped gradients are timed, each as a per-example loss, parameters and a batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks.cost import models
from dpopt.flax import linen_loss


class Family(NamedTuple):
    """One model at one batch size."""

    loss_fn: Callable  # (params, example) -> scalar
    params: Any
    batch: Any  # leaves (B, ...)


def classifier(model: nn.Module, x: np.ndarray, classes: int) -> Family:
    rng = np.random.default_rng(1)
    y = jnp.asarray(rng.integers(0, classes, len(x)), jnp.int32)
    params = model.init(jax.random.key(0), x[:1])["params"]
    return Family(linen_loss(model, optax.softmax_cross_entropy_with_integer_labels), params, (jnp.asarray(x), y))


def normal(*shape: int) -> np.ndarray:
    """Standard normal numbers, the same on every call."""
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def tokens(vocabulary: int, *shape: int) -> np.ndarray:
    """Zipf-distributed token ids, because the words of a text repeat."""
    draws = np.random.default_rng(0).zipf(1.3, size=shape)
    return np.minimum(draws - 1, vocabulary - 1).astype(np.int32)


def ratings(batch_size: int, dtype: Any = None) -> Family:
    model = models.MatrixFactorization(dtype=dtype)
    rng = np.random.default_rng(0)
    pairs = np.stack([rng.integers(0, model.users, batch_size), rng.integers(0, model.items, batch_size)], -1)
    params = model.init(jax.random.key(0), pairs[:1])["params"]
    ratings = jnp.asarray(rng.integers(1, 6, batch_size), jnp.float32)
    return Family(linen_loss(model, optax.l2_loss), params, (jnp.asarray(pairs), ratings))


FAMILIES: dict[str, Callable[[], Family]] = {
    "logistic regression 10,000 x 500, B 64": lambda: classifier(models.MLP((), 500), normal(64, 10_000), 500),
    "MLP 784-1024-1024-10, B 256": lambda: classifier(models.MLP((1024, 1024), 10), normal(256, 784), 10),
    "CNN 4 conv, B 128": lambda: classifier(models.CNN(), normal(128, 32, 32, 3), 10),
    "Wide-ResNet-16-4, B 32": lambda: classifier(models.WideResNet(), normal(32, 32, 32, 3), 10),
    "Transformer T 64, B 32": lambda: classifier(models.Transformer(), tokens(5_000, 32, 64), 2),
    "Transformer T 512, B 32": lambda: classifier(models.Transformer(), tokens(5_000, 32, 512), 2),
    "LSTM T 128, B 64": lambda: classifier(models.LSTMClassifier(), tokens(10_000, 64, 128), 2),
    "matrix factorisation 943 x 1682, B 64": lambda: ratings(64),
}
