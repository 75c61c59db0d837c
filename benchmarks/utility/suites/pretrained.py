"""A pretrained Transformer fine-tuned privately on IMDB: what is trained, by which rule, with which clip and noise.

Every row reads 64 tokens of each review. The head alone, whose features are computed once, gets as much computation as
it can use. Parameters in the encoder get 20 steps of 1,250 reviews, between two heads: one trained before, and a new
one afterwards. A run on the encoder takes about ten minutes on two cores, so each has a single, untuned learning rate.
"""

import functools
from collections.abc import Sequence
from typing import Any

from benchmarks.pretrained import head
from benchmarks.pretrained.record import TRAINED
from benchmarks.utility.suites.frontier import Contest, by_factor

EPSILONS = (1.0, 3.0, 8.0)
DELTA = 1e-5
LENGTH = 64
TESTED = 2_000  # of the 25,000 test reviews: scoring them all would take longer than training
MOMENTUM, BANDS = 0.9, 4
CLIP, CLIP_OF_HEAD = 2.0, head.CLIP
COMPUTE = {"expected_batch_size": 1_250, "steps": 20}
COMPUTE_OF_HEAD = {"expected_batch_size": 5_000, "steps": 60}

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
    clip: Any = None,
    noise: dict[str, Any] | None = None,
    **task_options: Any,
) -> Contest:
    def make(epsilon: float, rate: float) -> dict[str, Any]:
        own = {"trained": trained, "length": LENGTH, "test": TESTED, "epsilon": epsilon, "delta": DELTA}
        return {
            "task": "imdb-pretrained",
            "task_options": own | task_options,
            "method": "combination",
            "options": {"before": before or {}, "after": after, "learning_rate": rate, "decay_to": 0.0},
            "l2_clip_norm": clip or (CLIP_OF_HEAD if trained == "head" else CLIP),
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
        biases("DP-Adam", [3e-3], _ADAM),
        biases("DP-AdamBC", [3e-3], _BC),
        biases("DP-Adam, layerwise clip", [3e-3], _ADAM, clip={"layerwise": CLIP}),
        adapters("DP-SGD, momentum", [0.3], _SGD),
        adapters("DP-SGD, momentum, correlated noise", [0.3], _SGD, noise=_CORRELATED),
        adapters("DP-Adam", [5e-3], _ADAM),
        adapters("DP-Adam, layerwise clip", [5e-3], _ADAM, clip={"layerwise": CLIP}),
        adapters("DP-Adam, bfloat16", [5e-3], _ADAM, dtype="bfloat16"),
        adapters("DP-AdamBC", [5e-3], _BC),
        adapters("DP2, momentum", [0.01], _SGD, before=_DELAYED),
        adapters("diagonal from 64 public reviews", [0.01], _SGD, before={"kind": "public"}, **_PUBLIC),
        _contest("all", "DP-SGD, momentum", [0.02], _SGD),
        _contest("all", "DP-Adam", [2e-4], _ADAM),
        _contest("all", "DP-Adam, layerwise clip", [2e-4], _ADAM, clip={"layerwise": CLIP}),
    ]
