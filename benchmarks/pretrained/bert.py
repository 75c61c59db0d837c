"""BERT (Devlin et al. 2019) in Flax NNX: an encoder, and a classifier of its mean over a text."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# Of the adapters' random matrices: large, so that beside the head's gradient an adapter's is not clipped to nothing.
GAIN_OF_ADAPTERS = 5.7


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes in a ``config.json`` of Hugging Face, by their names there."""

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
        """From ``config.json``.

        Raises:
            ValueError: if it describes another kind of model than `Bert` is.
        """
        found = json.loads(path.read_text())
        built = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
        for name, value in built.items():
            if found.get(name, value) != value:
                raise ValueError(f"{path}: {name} is {found[name]!r}, and this is a model with {name} {value!r} only.")
        missing = [field.name for field in dataclasses.fields(cls) if field.name not in found]
        if missing:
            raise ValueError(f"{path} does not say {', '.join(missing)}.")
        return cls(**{field.name: found[field.name] for field in dataclasses.fields(cls)})


class Layer(nnx.Module):
    """Attention, then two dense layers; after each the residual and a normalisation."""

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
    """The encoder: ``(B, T)`` token numbers and a mask to ``(B, T, hidden_size)``.

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
        """Token numbers ``(B, T)`` and a boolean mask ``(B, T)``, False where a text has ended; texts of one part."""
        return self.every(ids, mask)[-1]

    def every(self, ids: jax.Array, mask: jax.Array) -> list[jax.Array]:
        """The embedded texts, and the outputs of every block: ``(B, T, hidden_size)`` each."""
        places = jnp.arange(ids.shape[1])
        x = self.norm(self.words(ids) + (self.positions(places) + self.types(jnp.zeros_like(places)))[None])
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(outputs[-1], mask))
        return outputs


class Classifier(nnx.Module):
    """A dense head on the means of outputs over a text.

    Args:
        body: the encoder.
        width: of its outputs.
        classes: how many.
        reads: ``"last"``, the last block's outputs; ``"every"``, the embeddings and every block's, side by side. What
            a block was trained for is not all that those below it know.
        rngs: of the head.
    """

    def __init__(self, body: Bert, width: int, classes: int, *, reads: str = "last", rngs: nnx.Rngs):
        self.body, self.reads = body, reads
        self.head = head(width * outputs_read(body, reads), classes, rngs=rngs)

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return self.head(features(self.body, ids, mask, self.reads))


def features(body: Bert, ids: jax.Array, mask: jax.Array, reads: str) -> jax.Array:
    """What the head of a `Classifier` sees: ``(B, features)`` in float32."""
    outputs = body.every(ids, mask)[-outputs_read(body, reads) :]
    return jnp.concatenate([mean(x, mask) for x in outputs], axis=1)


def outputs_read(body: Bert, reads: str) -> int:
    """How many of the last outputs (`Bert.every`) a head reads.

    Raises:
        ValueError: for another word than ``"last"`` and ``"every"``.
    """
    if reads not in ("last", "every"):
        raise ValueError(f"reads must be 'last' or 'every'; got {reads!r}.")
    return 1 if reads == "last" else len(body.layers) + 1


def head(width: int, classes: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """The last layer. It starts at zero, from where no text is nearer to one class than to another."""
    return nnx.Linear(width, classes, kernel_init=nnx.initializers.zeros, rngs=rngs)


def mean(hidden: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over a text's own tokens: ``(B, T, width)`` to ``(B, width)`` in float32."""
    weights = mask.astype(jnp.float32)
    total = jnp.einsum("btd,bt->bd", hidden.astype(jnp.float32), weights)
    return total / jnp.maximum(1.0, weights.sum(1, keepdims=True))


def adapt(body: Bert, rank: int, *, rngs: nnx.Rngs, layers: Sequence[str] = ("value", "up")) -> None:
    """Adds LoRA adapters (Hu et al. 2021) to these dense layers of the blocks from `first_trained` on, in place.

    At first they change nothing. The matrix on the input's side stays random (Sun et al. 2024, FFA-LoRA): if both were
    trained, the noise of one would multiply the noise of the other.
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


def of_head(params: Any) -> Any:
    """Which parameters of a `Classifier` are the head's: a pytree of booleans, for ``optax.masked``."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "head" in jax.tree_util.keystr(path[:1]), params)


def first_trained(blocks: int) -> int:
    """The first of so many blocks that is trained where not all parameters are.

    Those below know words. They stay as they were, and a backward pass that ends above them costs less.
    """
    return blocks // 3


def trained(what: str, blocks: int) -> Any:
    """The NNX filter of what is trained of an encoder of so many blocks; in all cases the head, and besides

    - ``"head"``: nothing;
    - ``"bias"``: biases and normalisations of the blocks from `first_trained` on (Bu et al. 2022, DP-BiTFiT);
    - ``"lora"``: adapters;
    - ``"all"``: everything.

    Raises:
        ValueError: for another word.
    """
    own_head = nnx.All(nnx.Param, lambda path, value: path[0] in ("head", "kernel", "bias"))
    adapters = nnx.All(nnx.LoRAParam, lambda path, value: path[-1] == "lora_b")

    def is_late_vector(path: tuple, value: Any) -> bool:
        in_block = path[:2] == ("body", "layers") and path[2] >= first_trained(blocks)
        return in_block and path[-1] in ("bias", "scale")

    filters = {
        "head": own_head,
        "bias": nnx.Any(own_head, nnx.All(nnx.Param, is_late_vector)),
        "lora": nnx.Any(own_head, adapters),
        "all": nnx.Param,
    }
    if what not in filters:
        raise ValueError(f"what is trained must be one of {', '.join(filters)}; got {what!r}.")
    return filters[what]


def _norm(config: Config, dtype: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # Not the fast variance, whose differences lose digits where a mean is far from 0.
    return nnx.LayerNorm(
        config.hidden_size, epsilon=config.layer_norm_eps, use_fast_variance=False, dtype=dtype, rngs=rngs
    )
