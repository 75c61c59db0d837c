"""Records of `examples/fine_tune_transformer.py`, and their table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.report import markdown as tables

NAME = "fine-tuning"
PLACES = ("data", "directory", "out", "processes")  # options that change nothing in the result
TRAINED = {
    "head": "the head alone",
    "bias": "biases and normalisations",
    "lora": "adapters (LoRA)",
    "all": "all parameters",
}


def add(
    folder: Path, options: Mapping[str, Any], scores: Sequence[float], epsilon: float, delta: float, seconds: float
) -> None:
    """Adds a run to the record in ``folder``: its test accuracies in the order in which they were taken."""
    content = records.load(folder, NAME) or {"runs": []}
    run = {
        "settings": {name: value for name, value in options.items() if name not in PLACES},
        "scores": list(scores),
        "epsilon": epsilon,
        "delta": delta,
        "seconds": seconds,
        "environment": records.environment(),
    }
    records.write_json(folder / f"{NAME}.json", {"runs": [*content["runs"], run]})


def markdown(content: dict[str, Any]) -> str:
    """A table with a line for each run."""
    lines = []
    for run in content["runs"]:
        own = run["settings"]
        *before, last = (f"{score:.3f}" for score in run["scores"])
        work = f"{own['steps']} of {own['batch_size']:,}" if own["train"] != "head" else ""
        between = f"{before[0]}, {before[-1]}" if before else ""
        spent, minutes = f"{run['epsilon']:.2f}", f"{run['seconds'] / 60:.1f}"
        lines.append([TRAINED[own["train"]], own["optimizer"], work, between, f"**{last}**", spent, minutes])
    head = ["trained", "rule", "steps", "after the first head and the encoder", "test accuracy", "epsilon", "minutes"]
    first = content["runs"][0]
    said = f"{first['settings']['test_reviews']:,} test reviews, {first['settings']['length']} tokens of each; delta "
    device = f"{first['environment']['device']}, {first['environment']['cores']} cores"
    return f"{said}{first['delta']:g}; on {device}.\n\n{tables.rows(head, lines)}"
