"""What keeps DP-SGD from learning IMDB with AdaDPS's LSTM: attempts on held-out reviews, with and without noise.

The paper reports 0.70 at epsilon 2.8 (noise multiplier 1, batches of 64, means of four reviews clipped), but neither
how many words it reads nor how long it trains. Every attempt here is one run with one seed, scored on a held-out fifth
of the training reviews, and recorded as soon as it ends; recorded attempts are not run again.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments, records
from benchmarks.report import markdown as tables

EPSILON, DELTA = 2.8, 4e-5
NUM_TRAIN = 20_000  # four fifths of the training reviews


@dataclasses.dataclass(frozen=True, kw_only=True)
class Try:
    """One run; ``is_private`` False removes the noise but not the clip, which is part of the method."""

    length: int  # words of a review
    epochs: float
    batch: int
    clip: float
    rate: float
    momentum: float = 0.0
    rule: str = "sgd"
    is_private: bool = True

    def setting(self) -> Any:
        """The `benchmarks.utility.runs.Setting` of the run."""
        from benchmarks.utility import runs  # here, since a report does not need it

        after = {"kind": "sgd", "momentum": self.momentum} if self.rule == "sgd" else {"kind": self.rule}
        noise = {"epsilon": EPSILON} if self.is_private else {"noise_multiplier": 0.0}
        return runs.Setting(
            label="DP-SGD" if self.rule == "sgd" else f"DP-{self.rule}",
            task="imdb-lstm",
            task_options={"length": self.length, "validate": True},
            method="combination",
            options={"after": after, "learning_rate": self.rate, "decay_to": 0.0},
            l2_clip_norm=self.clip,
            delta=DELTA,
            expected_batch_size=self.batch,
            steps=round(self.epochs * NUM_TRAIN / self.batch),
            **noise,
        )


SHORT = {"length": 64, "epochs": 5}
LONG = {"length": 64, "epochs": 60, "batch": 512, "clip": 0.1, "rate": 15.0}  # the paper's clip norm
TRIES = (
    # Is it the noise or the number of steps that limits the recorded table?
    Try(**SHORT, batch=256, clip=1.0, rate=4.0),
    Try(**SHORT, batch=256, clip=1.0, rate=4.0, is_private=False),
    # Larger batches have less noise at the same epsilon and epochs; momentum makes up for the fewer steps.
    Try(**SHORT, batch=1_024, clip=1.0, rate=2.0, momentum=0.9),
    # The steps: six times as many.
    Try(**LONG),
    Try(**LONG, is_private=False),
    Try(length=64, epochs=120, batch=1_024, clip=0.1, rate=30.0),
    # Half of the reviews have no more words than this.
    Try(**LONG | {"length": 200}),
    Try(**LONG | {"length": 200}, is_private=False),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.data(parser)
    arguments.out(parser, "folder for the JSON; what it has is kept")


def run(options: argparse.Namespace) -> None:
    main(options.out, options.data)


def main(out: Path, where: Path | None = None, tries: Sequence[Try] = TRIES) -> dict[str, Any]:
    """Runs the attempts that ``lstm.json`` in ``out`` does not have yet."""
    from benchmarks.utility import runs

    path = out / "lstm.json"
    done = json.loads(path.read_text())["runs"] if path.exists() else []
    for one in tries:
        if any(run["try"] == dataclasses.asdict(one) for run in done):
            continue
        (record,) = runs.Program(one.setting(), where=where).train([0])
        done.append(_kept(one, record))
        records.write_json(path, {"environment": records.environment(), "epsilon": EPSILON, "runs": done})
        print(f"{one}: {record['score']:.3f} in {record['seconds']:.0f} s", flush=True)
    print(f"Wrote {path}.")
    return json.loads(path.read_text())


def _kept(one: Try, record: dict[str, Any]) -> dict[str, Any]:
    keys = "score", "curve", "seconds", "noise_multiplier", "parameters", "not_covered_by_epsilon", "step_bytes"
    kept = {key: record.get(key) for key in keys}
    epsilon = {kind: value if math.isfinite(value) else None for kind, value in record["epsilon"].items()}
    return {"try": dataclasses.asdict(one), "steps": one.setting().steps, "epsilon": epsilon, **kept}


def markdown(content: dict[str, Any]) -> str:
    """The attempts in the order in which they were made."""
    lines = []
    for run in content["runs"]:
        one = Try(**run["try"])
        rule = {"sgd": "SGD"}.get(one.rule, one.rule) + (f", momentum {one.momentum:g}" if one.momentum else "")
        lines.append(
            [
                f"{one.length}",
                f"{one.epochs:g}",
                f"{run['steps']:,} of {one.batch:,}",
                rule,
                f"{one.clip:g}",
                f"{one.rate:g}",
                f"{content['epsilon']:g} ({run['noise_multiplier']:.2f})" if one.is_private else "no noise",
                f"{run['score']:.3f}",
                f"{run['seconds']:.0f}",
            ]
        )
    head = [
        "words",
        "epochs",
        "steps",
        "rule",
        "clip norm",
        "rate",
        "epsilon (noise multiplier)",
        "accuracy",
        "seconds",
    ]
    return tables.rows(head, lines, ["---:"] * 3 + ["---"] + ["---:"] * 5)
