"""Accuracy at a fixed amount of computation: 1, 3 and 10 epochs, with independent and with correlated noise.

This is how large models are fine-tuned. Both kinds of noise get the same contenders, candidates and epsilon. The
strategy that correlates the noise is chosen beforehand from public numbers (`dpopt.correlated.choices`), without a run.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.report import summaries
from benchmarks.utility.runs import Setting
from benchmarks.utility.suites import frontier
from dpopt import correlated

EPSILONS = (1.0, 3.0, 8.0)
MOMENTUM = 0.9
MOST_BANDS = 32
BUDGET = 8  # candidates a contender may try, one seed each, on held-out training data


@dataclasses.dataclass(frozen=True)
class Compute:
    """The computation on a task: ``epochs`` over about ``num_examples``, in batches small enough for many steps."""

    epochs: int
    num_examples: int
    batch: int

    @property
    def steps(self) -> int:
        return self.epochs * self.num_examples // self.batch


@dataclasses.dataclass(frozen=True)
class Contest:
    """A contender on a task, with its number of epochs and kind of noise."""

    task: str
    label: str
    compute: Compute
    is_correlated: bool
    delta: float
    epsilons: Sequence[float]
    rates: Sequence[float]
    make: Callable[[float], dict[str, Any]]  # learning rate -> fields of a `Setting`

    @property
    def table(self) -> str:
        """The title of its table."""
        epochs = self.compute.epochs
        return f"{self.task}, {epochs} epoch{'s' if epochs > 1 else ''}"

    @property
    def contender(self) -> str:
        """Its line in the table."""
        return self.label + (summaries.CORRELATED if self.is_correlated else "")

    def candidates(self, epsilon: float, *, validate: bool) -> list[Setting]:
        """The settings to try (``validate``), or the same ones on the whole training data."""
        found = bands(self.compute, epsilon, self.delta) if self.is_correlated else 1
        noise = {"bands": found, "momentum": MOMENTUM} if found > 1 else None
        out = []
        for rate in self.rates:
            fields = self.make(rate)
            options = fields.pop("task_options") | ({"validate": True} if validate else {})
            out.append(
                Setting(
                    label=self.contender,
                    epsilon=epsilon,
                    delta=self.delta,
                    steps=self.compute.steps,
                    expected_batch_size=self.compute.batch,
                    noise=noise,
                    task_options=options,
                    **fields,
                )
            )
        return out


@functools.cache
def bands(compute: Compute, epsilon: float, delta: float) -> int:
    """The number of bands with the least noise under momentum and a rate that decays to 0; 1: independent noise."""
    falling = correlated.workload(compute.steps, momentum=MOMENTUM, learning_rate=lambda t: 1 - t / compute.steps)
    found = correlated.choices(
        epsilon=epsilon,
        delta=delta,
        num_examples=compute.num_examples,
        expected_batch_size=compute.batch,
        steps=compute.steps,
        workload=falling,
        most_bands=MOST_BANDS,
    )
    return next(c.strategy.bands for c in found if c.sampling in ("poisson", "cyclic_poisson"))


_MOMENTUM = {"kind": "sgd", "momentum": MOMENTUM}
_AFTER = {
    "DP-SGD, momentum": _MOMENTUM,
    "DP-Adam": {"kind": "adam"},
    "DP-AdamBC": {"kind": "adam_bc", "gamma_share": 0.1},
    "DOPPLER (low-pass filter)": {"kind": "low_pass", "feedback": (-0.9,), "feedforward": (0.1,)},
    "DiSK (Kalman filter), momentum": {"kind": "kalman", "kappa": 0.7, "momentum": MOMENTUM},
    "AdaDPS, frequency": _MOMENTUM,
    "delayed diagonal, momentum": _MOMENTUM,
}


def _contests(
    title: str,
    computes: Sequence[Compute],
    delta: float,
    clip: float,
    rates: dict[str, Sequence[float]],
    *,
    before: dict[str, dict[str, Any]] | None = None,
    **fields: Any,
) -> list[Contest]:
    def make(label: str) -> Callable[[float], dict[str, Any]]:
        def setting(rate: float) -> dict[str, Any]:
            own = {"before": {}, **(before or {}).get(label, {})}
            options = {"before": own["before"], "after": _AFTER[label], "learning_rate": rate, "decay_to": 0.0}
            found = {"method": "combination", "options": options, "l2_clip_norm": own.get("clip", clip)} | fields
            return found | {"task_options": found["task_options"] | own.get("task_options", {})}

        return setting

    return [
        Contest(title, label, compute, is_correlated, delta, EPSILONS, rates[label], make(label))
        for compute in computes
        for label in rates
        for is_correlated in (False, True)
    ]


by_factor = functools.partial(frontier.by_factor, count=BUDGET)
_DELAYED = {"delayed diagonal, momentum": {"before": {"kind": "delayed", "delay": 10, "eps": 1e-3}}}


def contests() -> list[Contest]:
    """Every contender on every task, for every number of epochs, under both noises."""
    reviews, ratings, digits = 24_750, 80_000, 10_000
    imdb = _contests(
        "IMDB",
        [Compute(1, reviews, 250), Compute(3, reviews, 500), Compute(10, reviews, 1_000)],
        1e-5,
        0.5,
        {
            "DP-SGD, momentum": by_factor(1.0),
            "DP-Adam": by_factor(0.01),
            "DP-AdamBC": by_factor(0.01),
            "DOPPLER (low-pass filter)": by_factor(10.0),
            "DiSK (Kalman filter), momentum": by_factor(1.0),
            "AdaDPS, frequency": by_factor(0.16),
            "delayed diagonal, momentum": by_factor(0.05),
        },
        before={
            "AdaDPS, frequency": {
                "before": {"kind": "side information"},
                "clip": 5.0,
                "task_options": {"frequency": "public"},
            },
        }
        | _DELAYED,
        task="imdb",
        task_options=frontier.REVIEWS,
    )
    movielens = _contests(
        "MovieLens",
        [Compute(1, ratings, 800), Compute(3, ratings, 1_600), Compute(10, ratings, 3_200)],
        1e-6,
        1.0,
        {
            "DP-SGD, momentum": by_factor(0.25),
            "DP-Adam": by_factor(0.002),
            "DP-AdamBC": by_factor(0.002),
            "DOPPLER (low-pass filter)": by_factor(2.5),
            "DiSK (Kalman filter), momentum": by_factor(0.25),
            "delayed diagonal, momentum": by_factor(0.03),
        },
        before=_DELAYED,
        task="movielens",
        task_options={"biases": True, "dimension": 8, "mean_input": 0.1},
    )
    mnist = _contests(
        "MNIST, 10,000 digits",
        [Compute(1, digits, 100), Compute(3, digits, 200), Compute(10, digits, 400)],
        1e-5,
        1.0,
        {"DP-SGD, momentum": by_factor(0.08, count=5), "DP-AdamBC": by_factor(0.004, count=5)},
        task="mnist",
        task_options={},
    )
    sequences = _contests(
        "Transformer on 64 words of IMDB",
        [Compute(1, 25_000, 250), Compute(3, 25_000, 500), Compute(10, 25_000, 1_000)],
        1e-5,
        1.0,
        {"DP-SGD, momentum": by_factor(0.5, count=3), "DP-AdamBC": by_factor(0.005, count=3)},
        task="imdb-transformer",
        task_options={"length": 64},
    )
    return imdb + movielens + mnist + sequences
