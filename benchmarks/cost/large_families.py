"""The families of the speed table with batches that fill an accelerator, and a Transformer of BERT's kind.

In bfloat16 the model computes in it, with parameters in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import dpopt.flax
from benchmarks import cifar10_recipe
from benchmarks.cost import models
from benchmarks.cost.families import Family, classifier, normal, ratings, tokens
from benchmarks.pretrained import bert
from benchmarks.pretrained.head import mean_loss

DTYPES = {"float32": None, "bfloat16": jnp.bfloat16}
# The sizes of all-MiniLM-L6-v2, 22.7 million parameters. Speed does not depend on the weights.
MINILM = bert.Config(30_522, 384, 6, 12, 1_536, 512, 2, 1e-12)
LENGTH = 128


def _encoder(what: str, batch_size: int, dtype: Any) -> Family:
    """MiniLM with a classifier, of which ``what`` is trained (`bert.trained`), on texts without padding."""
    rngs = nnx.Rngs(0)
    model = bert.Classifier(bert.Bert(MINILM, dtype=dtype, rngs=rngs), MINILM.hidden_size, 2, rngs=rngs)
    model.head.linear.kernel[...] = 0.05 * jax.random.normal(jax.random.key(0), model.head.linear.kernel.shape)
    if what == "lora":
        bert.adapt(model.body, 8, rngs=rngs)
    which = bert.trained(what, bert.first_trained(MINILM.num_hidden_layers))
    loss_fn, params = dpopt.flax.nnx_loss(model, mean_loss, wrt=which)
    ids = jnp.asarray(tokens(MINILM.vocab_size, batch_size, LENGTH))
    labels = jnp.asarray(np.random.default_rng(1).integers(0, 2, batch_size), jnp.int32)
    return Family(loss_fn, params, ((ids, jnp.ones(ids.shape, bool)), labels))


def _recipe(batch_size: int, dtype: Any) -> Family:
    """CIFAR-10 as it is trained privately: every image counts as the mean over its augmentations."""
    loss_fn, params = cifar10_recipe.loss_and_params(dtype=dtype)
    examples, keys = cifar10_recipe.noise_batch(batch_size)

    def of_key_data(params: Any, example: Any) -> jax.Array:  # keys themselves cannot be written to a file
        return loss_fn(params, (example[0], jax.random.wrap_key_data(example[1])))

    return Family(of_key_data, params, (examples, jax.random.key_data(keys)))


# From a dtype of `DTYPES` to the family.
LARGE: dict[str, Callable[[Any], Family]] = {
    "MiniLM T 128, all parameters, B 256": lambda t: _encoder("all", 256, t),
    "MiniLM T 128, LoRA, B 256": lambda t: _encoder("lora", 256, t),
    "logistic regression 10,000 x 500, B 4096": lambda t: classifier(models.MLP((), 500, t), normal(4096, 10_000), 500),
    "MLP 784-1024-1024-10, B 8192": lambda t: classifier(models.MLP((1024, 1024), 10, t), normal(8192, 784), 10),
    "Transformer T 64, B 1024": lambda t: classifier(models.Transformer(dtype=t), tokens(5_000, 1024, 64), 2),
    "Transformer T 512, B 128": lambda t: classifier(models.Transformer(dtype=t), tokens(5_000, 128, 512), 2),
    "LSTM T 128, B 1024": lambda t: classifier(models.LSTMClassifier(dtype=t), tokens(10_000, 1024, 128), 2),
    "matrix factorisation 943 x 1682, B 16384": lambda t: ratings(16_384, t),
    "CNN 4 conv, B 4096": lambda t: classifier(models.CNN(dtype=t), normal(4096, 32, 32, 3), 10),
    "Wide-ResNet-16-4, B 512": lambda t: classifier(models.WideResNet(dtype=t), normal(512, 32, 32, 3), 10),
    "Wide-ResNet-16-4, 16 augmentations, B 256": lambda t: _recipe(256, t),
}
