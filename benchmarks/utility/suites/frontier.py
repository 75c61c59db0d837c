"""Accuracy against epsilon: every optimizer, and combinations that no paper tried, on the same features and budget.

Epsilon covers everything that is read from private data. For IMDB, 1% of the training reviews are declared public and
leave the private set: the vocabulary, document frequencies and diagonals all come from those. For MovieLens, nothing is
read from the ratings before training: 3 is the middle of the scale. Digits need nothing.

Every contender gets the same number of candidates (`BUDGET`), which differ in what users of that optimizer tune. The
choice among them is not covered by epsilon, except for the contenders called "tuning paid"
(`benchmarks.utility.paid_tuning`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.utility.runs import Setting

BUDGET = 4  # candidates a contender may try, one seed each, on held-out training data
EPSILONS = (0.5, 1.0, 2.0, 3.04, 8.0)


@dataclasses.dataclass(frozen=True)
class Contest:
    """One contender on one task."""

    task: str
    label: str
    epsilons: Sequence[float]
    rates: Sequence[float]
    make: Callable[[float, float], dict[str, Any]]  # epsilon and learning rate -> fields of a `Setting`
    is_paid: bool = False  # whether epsilon covers the choice among the candidates (`benchmarks.utility.paid_tuning`)

    @property
    def table(self) -> str:
        """The title of its table."""
        return self.task

    @property
    def contender(self) -> str:
        """Its line in the table."""
        return self.label

    def candidates(self, epsilon: float, *, validate: bool) -> list[Setting]:
        """The settings to try (``validate``), or the same ones on the whole training data."""
        out = []
        for rate in self.rates:
            fields = self.make(epsilon, rate)
            options = fields.pop("task_options") | ({"validate": True} if validate else {})
            out.append(Setting(label=self.label, epsilon=epsilon, task_options=options, **fields))
        return out


def best(records: Sequence[dict[str, Any]]) -> int:
    """The index of the best candidate; the first of equal ones."""
    sign = 1 if records[0]["higher_is_better"] else -1
    scores = [sign * r["score"] for r in records]
    return scores.index(max(scores))


# Words and pairs of words that occur in two public reviews or more: about 8,000 features.
REVIEWS = {"kind": "log-idf", "public_share": 0.01, "vocabulary": "public", "least": 2, "pairs": True}
REVIEWS |= {"pair_weight": 0.5, "one": 0.1}
STEPS = 60
FREE = {"kind": "schedule_free", "b1": 0.9}

# Starts at the paper's 0.1 and follows the median on every task; it is not tuned.
ADAPTIVE = {"adaptive": 0.1, "quantile": 0.5}


def _imdb(
    label: str, after: dict[str, Any], rates: Sequence[float], *, clip: Any = 0.5, before: Any = None, **more: Any
):
    def make(epsilon: float, rate: float) -> dict[str, Any]:
        # The best rate grows with epsilon: less noise permits longer steps.
        options = {"before": before or {}, "after": after, "learning_rate": rate * min(1.0, epsilon / 3) ** 0.5}
        fields = {"decay_to": 0.0}
        return {
            "task": "imdb",
            "task_options": REVIEWS | ({"frequency": "public"} if _is_side(before) else {}),
            "method": "combination",
            "options": options | fields,
            "l2_clip_norm": clip,
            "delta": 1e-5,
            "steps": STEPS,
        } | more

    return Contest("IMDB", label, EPSILONS, rates, make)


def _is_side(before: Any) -> bool:
    return bool(before) and before["kind"] == "side information"


def by_factor(start: float, factor: float = 2.0, count: int = BUDGET) -> list[float]:
    """Candidates for a learning rate."""
    return [start * factor**i for i in range(count)]


def _imdb_contests() -> list[Contest]:
    momentum = {"kind": "sgd", "momentum": 0.9}
    bc = {"kind": "adam_bc", "gamma": 1e-6}
    delayed = {"kind": "delayed", "delay": 10, "eps": 1e-3}
    side = {"kind": "side information"}
    return [
        _imdb("DP-SGD, momentum", momentum, by_factor(15.0)),
        # The best rates of these two lie beyond the others' candidates.
        _imdb("DP-SGD, momentum, normalised clip", momentum, by_factor(40.0), clip={"normalized": 0.5}),
        _imdb("DP-SGD, momentum, adaptive clip", momentum, by_factor(40.0), clip=ADAPTIVE),
        _imdb("DP-SGD, momentum, averaged", momentum, by_factor(10.0), average_from=0.5),
        _imdb("DP-Adam", {"kind": "adam"}, by_factor(0.1)),
        _imdb("DP-Adam, adaptive clip", {"kind": "adam"}, by_factor(0.1), clip=ADAPTIVE),
        _imdb("DP-AdamBC", bc, by_factor(0.05)),
        _imdb("DP-MicroAdam", {"kind": "micro_adam"}, by_factor(0.05)),
        _imdb("DP2, momentum", momentum, by_factor(0.02), before=delayed),
        _imdb("scale-then-privatise, Adam", {"kind": "adam"}, by_factor(0.1), before={"kind": "last"}),
        _imdb("AdaDPS, frequency", momentum, by_factor(0.1, 3.0), clip=5.0, before=side),
        _imdb("Lion", {"kind": "lion"}, by_factor(0.064)),
        _imdb("schedule-free SGD", FREE, by_factor(128.0)),
        _imdb("delayed diagonal x AdamBC", bc, by_factor(0.05), before=delayed),
        _imdb("frequency x MicroAdam", {"kind": "micro_adam"}, by_factor(0.05), clip=5.0, before=side),
        _imdb("scale-then-privatise x AdamBC", bc, by_factor(0.05), before={"kind": "last"}),
    ]


def _movielens(
    label: str, after: dict[str, Any], rates: Sequence[float], *, clip: Any = 1.0, before: Any = None, **more: Any
) -> Contest:
    def make(epsilon: float, rate: float) -> dict[str, Any]:
        options = {"before": before or {}, "after": after, "learning_rate": rate * min(1.0, epsilon / 8) ** 0.5}
        return {
            "task": "movielens",
            "task_options": {"biases": True, "dimension": 8, "mean_input": 0.1},
            "method": "combination",
            "options": options | {"decay_to": 0.0},
            "l2_clip_norm": clip,
            "delta": 1e-6,
            "steps": 100,
        } | more

    return Contest("MovieLens", label, (0.5, 1.0, 2.0, 3.04, 8.0, 9.7), rates, make)


def _movielens_contests() -> list[Contest]:
    momentum = {"kind": "sgd", "momentum": 0.9}
    bc = {"kind": "adam_bc", "gamma": 1e-10}
    delayed = {"kind": "delayed", "delay": 10, "eps": 1e-3}
    return [
        _movielens("DP-SGD, momentum", momentum, by_factor(5.0)),
        _movielens("DP-SGD, momentum, normalised clip", momentum, by_factor(5.0), clip={"normalized": 1.0}),
        _movielens("DP-SGD, momentum, adaptive clip", momentum, by_factor(10.0), clip=ADAPTIVE),
        _movielens("DP-Adam", {"kind": "adam"}, by_factor(0.01)),
        _movielens("DP-Adam, adaptive clip", {"kind": "adam"}, by_factor(0.01), clip=ADAPTIVE),
        _movielens("DP-AdamBC", bc, by_factor(0.005)),
        _movielens("DP-MicroAdam", {"kind": "micro_adam"}, by_factor(0.01)),
        _movielens("Lion", {"kind": "lion"}, by_factor(0.008)),
        _movielens("schedule-free SGD", FREE, by_factor(32.0)),
        _movielens("DP-Muon", {"kind": "muon"}, by_factor(0.02)),
        _movielens("DP-Muon, bias taken out", {"kind": "muon_bc", "gamma": 1e-10}, by_factor(0.01)),
        _movielens("DP2, momentum", momentum, by_factor(0.01), before=delayed),
    ]


def _digits(
    label: str, after: dict[str, Any], rates: Sequence[float], *, clip: Any = 1.0, before: Any = None, **more: Any
) -> Contest:
    def make(epsilon: float, rate: float) -> dict[str, Any]:
        options = {"before": before or {}, "after": after, "learning_rate": rate * min(1.0, epsilon / 3) ** 0.5}
        return {
            "task": "digits",
            "task_options": {},
            "method": "combination",
            "options": options | {"decay_to": 0.0},
            "l2_clip_norm": clip,
            "delta": 1e-4,
            "steps": STEPS,
        } | more

    return Contest("Digits", label, EPSILONS, rates, make)


def _digits_contests() -> list[Contest]:
    """IMDB's contenders, except those with word frequencies: nothing is known of the pixels beforehand."""
    momentum = {"kind": "sgd", "momentum": 0.9}
    bc = {"kind": "adam_bc", "gamma": 1e-6}
    delayed = {"kind": "delayed", "delay": 10, "eps": 1e-2}
    last = {"kind": "last", "eps_scale": 0.1}
    return [
        _digits("DP-SGD, momentum", momentum, by_factor(0.25)),
        _digits("DP-SGD, momentum, normalised clip", momentum, by_factor(0.25), clip={"normalized": 1.0}),
        _digits("DP-SGD, momentum, adaptive clip", momentum, by_factor(0.5), clip=ADAPTIVE),
        _digits("DP-SGD, momentum, averaged", momentum, by_factor(0.25), average_from=0.5),
        _digits("DP-Adam", {"kind": "adam"}, by_factor(0.03)),
        _digits("DP-Adam, adaptive clip", {"kind": "adam"}, by_factor(0.03), clip=ADAPTIVE),
        _digits("DP-AdamBC", bc, by_factor(0.005)),
        _digits("DP-MicroAdam", {"kind": "micro_adam", "density": 0.1}, by_factor(0.03)),
        _digits("Lion", {"kind": "lion"}, by_factor(0.016)),
        _digits("schedule-free SGD", FREE, by_factor(4.0)),
        _digits("DP-Muon", {"kind": "muon"}, by_factor(0.08)),
        _digits("DP-Muon, bias taken out", {"kind": "muon_bc", "gamma": 1e-6}, by_factor(0.08)),
        _digits("DP2, momentum", momentum, by_factor(0.15), before=delayed),
        _digits("scale-then-privatise, Adam", {"kind": "adam"}, by_factor(0.03), before=last),
        _digits("delayed diagonal x AdamBC", bc, by_factor(0.005), before=delayed),
        _digits("scale-then-privatise x AdamBC", bc, by_factor(0.005), before=last),
    ]


def contests() -> list[Contest]:
    """Every contender on every task, and some that pay for their tuning."""
    found = _imdb_contests() + _movielens_contests() + _digits_contests()
    paid = [c for c in found if c.label in ("DP-SGD, momentum", "DP-Adam")]
    return found + [dataclasses.replace(c, label=f"{c.label}, tuning paid", is_paid=True) for c in paid]
