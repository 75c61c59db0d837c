"""A pretrained Transformer fine-tuned privately on IMDB: what is trained, by which rule, with which clip and noise.

Every row reads 64 tokens of each review. The head alone, whose features are computed once, gets as much computation as
it can use. Parameters in the encoder get 10 steps of 1,600 reviews, after a head that was trained with three eighths of
epsilon. A run on the encoder takes two to ten minutes on two cores, so each has a single, untuned learning rate.
"""

import functools
from collections.abc import Sequence
from typing import Any

from benchmarks.pretrained import head
from benchmarks.utility.suites.frontier import Contest, by_factor

EPSILONS = (1.0, 3.0, 8.0)
DELTA = 1e-5
LENGTH = 64
TESTED = 2_000  # of the 25,000 test reviews: scoring them all would take longer than training
MOMENTUM, BANDS = 0.9, 4
COMPUTE = {"expected_batch_size": 1_600, "steps": 10}
COMPUTE_OF_HEAD = {"expected_batch_size": 5_000, "steps": 60}
TRAINED = {
    "head": "the head alone",
    "bias": "biases and normalisations",
    "lora": "adapters (LoRA)",
    "all": "all parameters",
}

_SGD = {"kind": "sgd", "momentum": MOMENTUM}
_ADAM = {"kind": "adam"}
_BC = {"kind": "adam_bc", "gamma_share": 0.1}
_DELAYED = {"kind": "delayed", "delay": 3, "eps": 1e-3}
_CORRELATED = {"bands": BANDS, "momentum": MOMENTUM}
_PUBLIC = {"public_share": 64 / 25_000}  # these reviews leave the private set


def _contest(
    trained: str,
    label: str,
    rates: Sequence[float],
    after: dict[str, Any],
    *,
    before: dict[str, Any] | None = None,
    clip: Any = 1.0,
    noise: dict[str, Any] | None = None,
    **task_options: Any,
) -> Contest:
    faster = {"faster": {"head": head.FASTER[trained]}} if trained in head.FASTER else {}

    def make(epsilon: float, rate: float) -> dict[str, Any]:
        first = {} if trained == "head" else {"head_epsilon": head.BUDGET_SHARE * epsilon, "delta": DELTA}
        return {
            "task": "imdb-pretrained",
            "task_options": {"trained": trained, "length": LENGTH, "test": TESTED} | first | task_options,
            "method": "combination",
            "options": {"before": before or {}, "after": after | faster, "learning_rate": rate, "decay_to": 0.0},
            "l2_clip_norm": clip,
            "delta": DELTA,
            "noise": noise,
        } | (COMPUTE_OF_HEAD if trained == "head" else COMPUTE)

    return Contest(f"MiniLM on IMDB, {TRAINED[trained]}", label, EPSILONS, rates, make)


def contests() -> list[Contest]:
    """Every row, in four tables: by what is trained."""
    biases, adapters = (functools.partial(_contest, trained) for trained in ("bias", "lora"))
    return [
        _contest("head", "DP-SGD, momentum, on the last block", by_factor(8.0), _SGD, reads="last"),
        _contest("head", "DP-Adam, on the last block", by_factor(0.1), _ADAM, reads="last"),
        _contest("head", "DP-SGD, momentum", by_factor(8.0), _SGD),
        _contest("head", "DP-Adam", by_factor(0.1), _ADAM),
        _contest("head", "DP-AdamBC", by_factor(0.1), _BC),
        biases("DP-Adam", [2e-3], _ADAM),
        biases("DP-AdamBC", [2e-3], _BC),
        biases("DP-Adam, layerwise clip", [2e-3], _ADAM, clip={"layerwise": 1.0}),
        adapters("DP-SGD, momentum", [0.2], _SGD),
        adapters("DP-SGD, momentum, correlated noise", [0.2], _SGD, noise=_CORRELATED),
        adapters("DP-Adam", [5e-4], _ADAM),
        adapters("DP-Adam, layerwise clip", [5e-4], _ADAM, clip={"layerwise": 1.0}),
        adapters("DP-Adam, bfloat16", [5e-4], _ADAM, dtype="bfloat16"),
        adapters("DP-AdamBC", [5e-4], _BC),
        adapters("DP2, momentum", [0.01], _SGD, before=_DELAYED),
        adapters("diagonal from 64 public reviews", [0.01], _SGD, before={"kind": "public"}, **_PUBLIC),
        _contest("all", "DP-SGD, momentum", [0.1], _SGD),
        _contest("all", "DP-Adam", [2e-4], _ADAM),
        _contest("all", "DP-Adam, layerwise clip", [2e-4], _ADAM, clip={"layerwise": 1.0}),
    ]
