"""What keeps DP-SGD from learning IMDB with AdaDPS's LSTM: tries on held-out reviews, with noise and without.

The paper reports 0.70 at epsilon 2.8 (noise multiplier 1, batches of 64, means of four reviews clipped), and says
neither how many words it reads nor for how long it trains. Every try here is one run with one seed, scored on a fifth
of the training reviews that are held out, and is written down as soon as it has ended; what is there is not run again.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.report import markdown as tables

EPSILON, DELTA = 2.8, 4e-5
NUM_TRAIN = 20_000  # four fifths of the training reviews


@dataclasses.dataclass(frozen=True, kw_only=True)
class Try:
    """One run; ``is_private`` False takes the noise away and leaves the clip, which is part of the method."""

    length: int  # words of a review
    epochs: float
    batch: int
    clip: float
    rate: float
    momentum: float = 0.0
    rule: str = "sgd"
    is_private: bool = True

    def setting(self) -> Any:
        """What is run, as a `benchmarks.utility.runs.Setting`."""
        from benchmarks.utility import runs  # here, since a report needs none of it

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
TRIES = (
    # What limits the recorded table: noise, or steps?
    Try(**SHORT, batch=256, clip=1.0, rate=4.0),
    Try(**SHORT, batch=256, clip=1.0, rate=4.0, is_private=False),
    # Larger batches have less noise at the same epsilon and number of reviews read; momentum makes up for the steps.
    Try(**SHORT, batch=1_024, clip=1.0, rate=2.0, momentum=0.9),
    Try(**SHORT, batch=1_024, clip=1.0, rate=2.0, momentum=0.9, is_private=False),
    # The paper's clip norm, at a rate under which as much noise reaches the parameters: more reviews are cut to it.
    Try(length=64, epochs=3, batch=256, clip=0.1, rate=40.0),
    Try(length=64, epochs=3, batch=256, clip=0.1, rate=40.0, is_private=False),
    # So many words that half of the reviews are read to their end.
    Try(length=200, epochs=3, batch=256, clip=0.1, rate=40.0),
    Try(length=200, epochs=3, batch=256, clip=0.1, rate=40.0, is_private=False),
)


def main(out: Path, where: Path | None = None, tries: Sequence[Try] = TRIES) -> dict[str, Any]:
    """Runs the tries that ``lstm.json`` in ``out`` does not have."""
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
    """The tries in the order in which they were made."""
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
