"""Figures that others published for methods that are not ours, and what our contenders reach at the same epsilon.

**DP-KFC on IMDB** (a Kronecker-factored diagonal from synthetic probes). From its authors' published script: logistic
regression on TF-IDF values of 10,000 words, 32 epochs in batches of 256, delta 1 / 25,000, noise by Renyi divergences.
Its words and document frequencies are counted on the private reviews. DP-KFC itself is not run. There are two kinds of
contenders: some use the same words and batches ("as DP-KFC": words counted on the private reviews, which epsilon does
not cover, document frequencies on 1% that is public), others the features of `frontier` in 60 full batches.

**Tramer and Boneh on MNIST** (a linear model on scattering features). They train on 60,000 digits; here there are only
10,000, so the same epsilon takes six times the noise in the mean.

Every contender gets the same number of candidates (`BUDGET`), chosen on held-out training data, which epsilon does not
cover.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.utility.suites import frontier
from benchmarks.utility.suites.frontier import Contest, by_factor

BUDGET = frontier.BUDGET
DELTA_IMDB = 1 / 25_000
DELTA_MNIST = 1e-5
DIGIT_STEPS = 30
MOMENTUM = {"kind": "sgd", "momentum": 0.9}


@dataclasses.dataclass(frozen=True)
class Reference:
    """Published scores, by epsilon, of a method or setting that is not run here."""

    name: str
    scores: dict[float, float]


DP_KFC = Reference("DP-KFC, as published", {0.5: 0.835, 1.0: 0.851, 2.8: 0.859, 8.0: 0.860})
SCATTERING = Reference("Tramer and Boneh, 60,000 digits, as published", {1.2: 0.981, 3.0: 0.987})


@dataclasses.dataclass(frozen=True)
class Entry(Contest):
    """A contest in a table of its own, beside a published figure."""

    title: str = ""
    reference: Reference | None = None

    @property
    def table(self) -> str:
        return self.title


WORDS = {"kind": "tf-idf", "vocabulary": "train", "words": 10_000, "public_share": 0.01}
BATCH, EPOCHS = 256, 32


def _as_dp_kfc(label: str, after: dict[str, Any], rates: Sequence[float], clip: float = 0.5) -> Entry:
    def make(epsilon: float, rate: float) -> dict[str, Any]:
        return {
            "task": "imdb",
            "task_options": WORDS,
            "method": "combination",
            "options": {"before": {}, "after": after, "learning_rate": rate * min(1.0, epsilon / 2.8) ** 0.5}
            | {"decay_to": 0.0},
            "l2_clip_norm": clip,
            "delta": DELTA_IMDB,
            "accountant": "rdp",
            "expected_batch_size": BATCH,
            "steps": EPOCHS * (25_000 // BATCH),
        }

    title = "DP-KFC, IMDB"
    return Entry("IMDB", f"{label}, as DP-KFC", tuple(DP_KFC.scores), rates, make, title=title, reference=DP_KFC)


FRONTIER = ("DP-SGD, momentum", "DP-SGD, momentum, normalised clip", "schedule-free SGD", "DP-Adam", "DP-AdamBC")
DELAYED = "DP2, momentum"


def _of_frontier(contest: Contest) -> Entry:
    """A contender of the frontier on IMDB, with the epsilons, delta and accountant of this table."""

    def make(epsilon: float, rate: float) -> dict[str, Any]:
        return contest.make(epsilon, rate) | {"delta": DELTA_IMDB, "accountant": "rdp"}

    label = f"{'delayed diagonal, momentum' if contest.label == DELAYED else contest.label}, the frontier's features"
    return Entry("IMDB", label, tuple(DP_KFC.scores), contest.rates, make, title="DP-KFC, IMDB", reference=DP_KFC)


def imdb() -> list[Entry]:
    """The contenders beside DP-KFC's figures."""
    own = [
        _as_dp_kfc("DP-SGD", {"kind": "sgd"}, by_factor(4.0)),
        _as_dp_kfc("DP-SGD, momentum", MOMENTUM, by_factor(0.5)),
        _as_dp_kfc("DP-Adam", {"kind": "adam"}, by_factor(0.003)),
    ]
    found = {c.label: c for c in frontier.contests() if c.table == "IMDB"}
    return own + [_of_frontier(found[label]) for label in (*FRONTIER, DELAYED)]


def _digits(label: str, after: dict[str, Any], rates: Sequence[float], before: Any = None) -> Entry:
    def make(epsilon: float, rate: float) -> dict[str, Any]:
        return {
            "task": "mnist-scattering",
            "task_options": {},
            "method": "combination",
            "options": {"before": before or {}, "after": after, "learning_rate": rate * min(1.0, epsilon / 3) ** 0.5}
            | {"decay_to": 0.0},
            "l2_clip_norm": 0.5,
            "delta": DELTA_MNIST,
            "steps": DIGIT_STEPS,
        }

    title = "Scattering features, MNIST (10,000 of 60,000 digits)"
    epsilons = tuple(SCATTERING.scores)
    return Entry("MNIST", label, epsilons, rates, make, title=title, reference=SCATTERING)


def digits() -> list[Entry]:
    """The contenders beside Tramer and Boneh's figures."""
    return [
        _digits("DP-SGD, momentum", MOMENTUM, by_factor(64.0)),
        _digits("DP-Adam", {"kind": "adam"}, by_factor(0.1)),
        _digits("DP-AdamBC", {"kind": "adam_bc", "gamma_share": 0.1}, by_factor(0.05)),
        _digits("delayed diagonal, momentum", MOMENTUM, by_factor(64.0), {"kind": "delayed", "delay": 10, "eps": 1e-3}),
    ]


def contests() -> list[Entry]:
    """Every contender of both tables."""
    return digits() + imdb()
