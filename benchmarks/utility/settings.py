"""The setting of a run, which identifies its record."""

import dataclasses
import functools
import hashlib
import json
from typing import Any, NamedTuple

import dpopt
from benchmarks.utility import tasks
from dpopt import accounting, correlated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything that a run depends on, except the seed."""

    task: str
    task_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    method: str
    options: dict[str, Any]
    l2_clip_norm: Any = 1.0
    noise_multiplier: float | None = None  # either this or a target epsilon
    epsilon: float | None = None
    delta: float
    expected_batch_size: float | None = None  # None: all examples
    steps: int
    noise: dict[str, Any] | None = None  # correlated over steps: {"bands", "momentum"}; see `strategy`
    average_from: float | None = None  # average the parameters from this share of the run on (post-processing)
    accountant: accounting.Accountant | None = None  # that meets ``epsilon``; None is "pld"
    label: str = dataclasses.field(default="", compare=False)
    source: str | None = dataclasses.field(default=None, compare=False)  # of a contender (`contenders.load`)

    def content(self) -> dict[str, Any]:
        """What identifies the run: all fields but the label and the source (whose hash is among the options)."""
        fields = dataclasses.asdict(self)
        fields.pop("label")
        fields.pop("source")
        for later in ("noise", "accountant"):  # as in records that are older than these fields
            if fields[later] is None:
                fields.pop(later)
        return fields

    def name(self, seed: int) -> str:
        """The file name of a record."""
        code = hashlib.sha256(json.dumps(self.content(), sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.task}-{code}-{seed}.json"

    def program(self) -> str:
        """What the compiled program depends on: everything but the seed and the learning rate."""
        fields = self.content()
        fields["options"] = {k: v for k, v in fields["options"].items() if k != "learning_rate"}
        return json.dumps(fields, sort_keys=True)

    def strategy(self) -> correlated.Strategy | None:
        """How noise is correlated: by bands optimised for momentum under a learning rate that decays to 0."""
        if self.noise is None:
            return None
        return _optimized(self.noise["bands"], self.noise["momentum"], self.steps)

    def sampler(self, task: tasks.Task, seed: int) -> Any:
        """The sampler of its batches."""
        batch = self.batch_size(task)
        if self.noise is None:
            return dpopt.PoissonSampler(task.num_examples, batch, seed=seed)
        return dpopt.samplers.parts.CyclicPoissonSampler(task.num_examples, batch, parts=self.noise["bands"], seed=seed)

    def batch_size(self, task: tasks.Task) -> float:
        return task.num_examples if self.expected_batch_size is None else self.expected_batch_size


class Row(NamedTuple):
    """A run in a table, and the figure that the paper reports for it."""

    table: str
    setting: Setting
    published: float | None
    tried: int | None = None  # number of candidates it was chosen from; None: unknown


@functools.lru_cache(maxsize=64)
def _optimized(bands: int, momentum: float, steps: int) -> correlated.Strategy:
    falling = correlated.workload(steps, momentum=momentum, learning_rate=lambda t: 1 - t / steps)
    return correlated.optimized_banded(bands, steps=steps, workload=falling)
