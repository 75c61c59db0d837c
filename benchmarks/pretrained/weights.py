"""Loads pretrained weights in Hugging Face's layout into the Flax model. Needs dpopt[pretrained] (safetensors)."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import data
from benchmarks.pretrained.bert import Bert, Config

NAME = "all-MiniLM-L6-v2"
ADDRESS = f"https://huggingface.co/sentence-transformers/{NAME} (config.json, model.safetensors, tokenizer.json)"

_TOP = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
_IN_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
_KIND = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
# What a file may hold in addition: a layer on the first token, which the mean does not need; position numbers 0, 1, 2,
# ...; heads of the pretraining task.
_UNUSED = re.compile(r"pooler\.|embeddings\.position_ids$|cls\.")


def folder(where: str | Path | None = None) -> Path:
    """The folder of the pretrained model, within the data folder.

    Raises:
        data.MissingData: if it is not there; the message says where to get it.
    """
    found = data.find(where, (NAME,), what="the pretrained Transformer", address=ADDRESS)
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        data.find(found, (file,), what=f"{NAME}'s {file}", address=ADDRESS)
    return found


def load(where: Path, *, dtype: Any = None, param_dtype: Any = None) -> tuple[Bert, Config]:
    """The encoder with the weights of ``where/model.safetensors``, and its sizes.

    Args:
        where: holds ``config.json`` and ``model.safetensors``.
        dtype: of the computation, such as ``jnp.bfloat16``; None: that of the weights.
        param_dtype: of the weights; None: that of the computation, or else the file's. Trained weights should stay in
            float32: private updates are small, and a coarser type rounds them away.

    Raises:
        data.DamagedData: if weights are missing or left over, or their shapes contradict the sizes.
    """
    from safetensors.numpy import load_file

    config = Config.read(where / "config.json")
    try:
        stored = load_file(where / "model.safetensors")
    except Exception as error:  # the library has errors of its own
        raise data.DamagedData(
            f"{where / 'model.safetensors'} cannot be read ({error}). Get it from {ADDRESS}."
        ) from error
    stored = {name.removeprefix("bert."): value for name, value in stored.items()}

    abstract = nnx.eval_shape(lambda: Bert(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(abstract, nnx.Param, ...)
    used = set()

    def value(path: tuple, like: Any) -> jax.Array:
        name = _stored_name(path)
        if name not in stored:
            raise data.DamagedData(f"{where / 'model.safetensors'} lacks {name}; get it from {ADDRESS}.")
        used.add(name)
        found = stored[name].T if path[-1] == "kernel" else stored[name]  # stored as (outputs, inputs)
        if found.shape != like.shape:
            raise data.DamagedData(f"{name} has shape {found.shape}; by config.json it should be {like.shape}.")
        return jnp.asarray(found, param_dtype or dtype)

    pure = nnx.to_pure_dict(params)
    filled = jax.tree_util.tree_map_with_path(lambda path, like: value(tuple(p.key for p in path), like), pure)
    left = [name for name in stored if name not in used and not _UNUSED.match(name)]
    if left:
        raise data.DamagedData(f"{where / 'model.safetensors'} holds weights that the model does not have: {left}.")
    nnx.replace_by_pure_dict(params, filled)
    return nnx.merge(graphdef, params, rest), config


def _stored_name(path: tuple) -> str:
    """The name in the file of the parameter at ``path`` in the model."""
    *parts, kind = path
    if parts[0] == "layers":
        return f"encoder.layer.{parts[1]}.{_IN_LAYER[parts[2]]}.{_KIND[kind]}"
    return f"{_TOP[parts[0]]}.{_KIND[kind]}"
