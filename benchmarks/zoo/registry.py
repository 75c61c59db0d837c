"""Imports all models of the zoo, in the order of its tables."""

import importlib

try:
    from benchmarks.zoo.entries import ZOO as ZOO
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"the zoo needs {error.name}: pip install -e '.[zoo]'", name=error.name) from error

_MODULES = (
    "convnets", "mobile", "image_tokens", "decoders", "encoders", "experts", "recurrent", "long_convolutions",
    "state_space", "generative", "graphs", "recommenders", "science", "audio", "sets_and_control", "penalties",
    "shared_weights", "made_weights", "flows_and_codes", "structured_weights", "chosen_weights",
    "embeddings_and_structures", "token_mixing", "time_and_space", "pooled",
)  # fmt: skip

for _name in _MODULES:
    importlib.import_module(f"benchmarks.zoo.{_name}")
