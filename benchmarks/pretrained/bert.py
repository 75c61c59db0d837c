"""BERT (Devlin et al. 2019) in Flax NNX: an encoder, and a classifier on the mean of its outputs over a text."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# Gain of the adapters' random matrices: large, so that their gradients are not clipped to nothing beside the head's.
GAIN_OF_ADAPTERS = 5.7


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes in a Hugging Face ``config.json``, under their names there."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def read(cls, path: Path) -> "Config":
        """Reads ``config.json``.

        Raises:
            ValueError: if it describes another kind of model than `Bert`, or lacks a size.
        """
        found = json.loads(path.read_text())
        built = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
        for name, value in built.items():
            if found.get(name, value) != value:
                raise ValueError(f"{path}: {name} is {found[name]!r}; only {value!r} is supported.")
        missing = [field.name for field in dataclasses.fields(cls) if field.name not in found]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}.")
        return cls(**{field.name: found[field.name] for field in dataclasses.fields(cls)})


class Layer(nnx.Module):
    """Attention and two dense layers, each followed by the residual and a normalisation."""

    def __init__(self, config: Config, *, dtype: Any = None, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, dtype=dtype, rngs=rngs)

        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.query, self.key, self.value, self.out = (linear(width, width) for _ in range(4))
        self.attention_norm = _norm(config, dtype, rngs)
        self.up, self.down = linear(width, config.intermediate_size), linear(config.intermediate_size, width)
        self.norm = _norm(config, dtype, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        def split(x):
            return x.reshape(*x.shape[:-1], self.heads, -1)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        attended = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None, :])
        x = self.attention_norm(x + self.out(attended.reshape(x.shape)))
        return self.norm(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))


class Bert(nnx.Module):
    """The encoder: from ``(B, T)`` token numbers and a mask to ``(B, T, hidden_size)``.

    Args:
        config: its sizes.
        dtype: of the computation; None: that of the parameters.
        rngs: of the initial parameters.
    """

    def __init__(self, config: Config, *, dtype: Any = None, rngs: nnx.Rngs):
        def embed(rows: int) -> nnx.Embed:
            return nnx.Embed(rows, config.hidden_size, dtype=dtype, rngs=rngs)

        self.words, self.positions = embed(config.vocab_size), embed(config.max_position_embeddings)
        self.types = embed(config.type_vocab_size)
        self.norm = _norm(config, dtype, rngs)
        self.layers = nnx.List([Layer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)])

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Encodes single-segment texts: token numbers ``(B, T)`` and a boolean mask ``(B, T)``, False for padding."""
        return self.every(ids, mask)[-1]

    def every(self, ids: jax.Array, mask: jax.Array) -> list[jax.Array]:
        """The embeddings and the outputs of every block: ``(B, T, hidden_size)`` each."""
        places = jnp.arange(ids.shape[1])
        x = self.norm(self.words(ids) + (self.positions(places) + self.types(jnp.zeros_like(places)))[None])
        return [x, *_outputs(self.layers, x, mask)]


class Head(nnx.Module):
    """A dense layer on centred features: it starts at zero, so that at first all classes are equally likely.

    Attributes:
        mean: what is subtracted from the features; not a parameter.
    """

    def __init__(self, width: int, classes: int, *, rngs: nnx.Rngs):
        self.mean = nnx.Variable(jnp.zeros(width))
        self.linear = nnx.Linear(width, classes, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, features: jax.Array) -> jax.Array:
        return self.linear(features - self.mean[...][None])


class Classifier(nnx.Module):
    """A head on the means of outputs over a text.

    Args:
        body: the encoder.
        width: of its outputs.
        classes: their number.
        reads: ``"last"``, the last block's outputs; ``"every"``, the embeddings and the outputs of every block,
            concatenated: lower blocks hold information that the last one has dropped.
        rngs: of the head.
    """

    def __init__(self, body: Bert, width: int, classes: int, *, reads: str = "last", rngs: nnx.Rngs):
        self.body, self.reads = body, reads
        self.head = Head(width * outputs_read(body, reads), classes, rngs=rngs)

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return self.head(self.features(ids, mask))

    def features(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """The input of the head: ``(B, features)`` in float32."""
        outputs = self.body.every(ids, mask)[-outputs_read(self.body, self.reads) :]
        return jnp.concatenate([mean(x, mask) for x in outputs], axis=1)


class Upper(nnx.Module):
    """The blocks of a `Classifier` from `first_trained` on, and its head; they share their parameters with it.

    Training them costs only their own computation, on outputs of the blocks below that were computed once (`below`).
    """

    def __init__(self, model: Classifier):
        self.layers = nnx.List(list(model.body.layers)[first_trained(len(model.body.layers)) :])
        self.head, self.reads = model.head, model.reads

    def __call__(self, hidden: jax.Array, read: jax.Array, mask: jax.Array) -> jax.Array:
        return self.head(self.features(hidden, read, mask))

    def features(self, hidden: jax.Array, read: jax.Array, mask: jax.Array) -> jax.Array:
        """As those of the `Classifier`, from what `below` returns."""
        outputs = _outputs(self.layers, hidden, mask)
        if self.reads == "last":
            return mean(outputs[-1], mask)
        return jnp.concatenate([read, *(mean(x, mask) for x in outputs)], axis=1)


def below(body: Bert, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The outputs ``(B, T, width)`` of the last block below `first_trained`, and the means of all up to it."""
    outputs = body.every(ids, mask)[: first_trained(len(body.layers)) + 1]
    return outputs[-1], jnp.concatenate([mean(x, mask) for x in outputs], axis=1)


def outputs_read(body: Bert, reads: str) -> int:
    """How many outputs of `Bert.every` a head reads, counted from the last.

    Raises:
        ValueError: if ``reads`` is neither ``"last"`` nor ``"every"``.
    """
    if reads not in ("last", "every"):
        raise ValueError(f"reads must be 'last' or 'every'; got {reads!r}.")
    return 1 if reads == "last" else len(body.layers) + 1


def mean(hidden: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over the tokens of a text, without padding: ``(B, T, width)`` to ``(B, width)`` in float32."""
    weights = mask.astype(jnp.float32)
    total = jnp.einsum("btd,bt->bd", hidden.astype(jnp.float32), weights)
    return total / jnp.maximum(1.0, weights.sum(1, keepdims=True))


def adapt(body: Bert, rank: int, *, rngs: nnx.Rngs, layers: Sequence[str] = ("value", "up")) -> None:
    """Adds LoRA adapters (Hu et al. 2021) to these dense layers of the blocks from `first_trained` on, in place.

    They start at zero. The input-side matrix stays random (Sun et al. 2024, FFA-LoRA): if both were trained, the noise
    of one would multiply the noise of the other.
    """
    for block in list(body.layers)[first_trained(len(body.layers)) :]:
        for name in layers:
            base = getattr(block, name)
            adapter = nnx.LoRA(
                base.in_features,
                rank,
                base.out_features,
                base_module=base,
                dtype=base.dtype,
                a_initializer=nnx.initializers.variance_scaling(GAIN_OF_ADAPTERS**2, "fan_in", "uniform"),
                rngs=rngs,
            )
            setattr(block, name, adapter)


def first_trained(blocks: int) -> int:
    """The index of the first block that is trained, out of ``blocks``, unless all parameters are: two thirds of them.

    The blocks below are frozen: they encode words, and their outputs have to be computed only once.
    """
    return min(blocks - 1, -(-2 * blocks // 3))


def trained(what: str, first: int) -> Any:
    """The NNX filter of the trained parameters of a `Classifier`, or of an `Upper`.

    - ``"head"``: the head alone;
    - ``"bias"``: also biases and normalisations of the blocks from the index ``first`` on (Bu et al. 2022, DP-BiTFiT);
    - ``"lora"``: the head and the adapters;
    - ``"all"``: everything.

    Raises:
        ValueError: if ``what`` is none of these.
    """
    own_head = nnx.All(nnx.Param, lambda path, value: path[0] in ("head", "linear"))
    adapters = nnx.All(nnx.LoRAParam, lambda path, value: path[-1] == "lora_b")

    def is_late_vector(path: tuple, value: Any) -> bool:
        path = path[1:] if path[0] == "body" else path
        return path[0] == "layers" and path[1] >= first and path[-1] in ("bias", "scale")

    filters = {
        "head": own_head,
        "bias": nnx.Any(own_head, nnx.All(nnx.Param, is_late_vector)),
        "lora": nnx.Any(own_head, adapters),
        "all": nnx.Param,
    }
    if what not in filters:
        raise ValueError(f"what is trained must be one of {', '.join(filters)}; got {what!r}.")
    return filters[what]


def _outputs(layers: nnx.List, x: jax.Array, mask: jax.Array) -> list[jax.Array]:
    """The outputs of blocks, one after another."""
    found = []
    for layer in layers:
        x = layer(x, mask)
        found.append(x)
    return found


def _norm(config: Config, dtype: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # Not the fast variance, which loses precision where the mean is far from 0.
    return nnx.LayerNorm(
        config.hidden_size, epsilon=config.layer_norm_eps, use_fast_variance=False, dtype=dtype, rngs=rngs
    )
