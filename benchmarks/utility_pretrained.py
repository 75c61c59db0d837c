"""A pretrained Transformer fine-tuned privately on IMDB: what is trained, by which rule, under which clip and noise.

Every row reads the first 64 tokens of each review. Adapters and all parameters get 20 steps of 500 reviews, less than
half an epoch; the head, whose features are computed once, as much as helps it. A row of adapters or of all parameters
takes minutes to an hour on two cores, so that one learning rate is tried for each, which is not tuned.
"""

import functools
from collections.abc import Sequence
from typing import Any

from benchmarks.utility_frontier import Contest, by_factor

EPSILONS = (1.0, 3.0, 8.0)
DELTA = 1e-5
LENGTH = 64
TESTED = 2_000  # of the 25,000 test reviews: scoring all of them would take longer than training
MOMENTUM, BANDS = 0.9, 4
COMPUTE = {"expected_batch_size": 500, "steps": 20}
COMPUTE_OF_HEAD = {"expected_batch_size": 5_000, "steps": 60}
# The head starts at zero and has far to go; what was pretrained has not.
HEAD_FASTER = {"lora": 10.0, "all": 50.0}
TRAINED = {"head": "a new head", "lora": "adapters (LoRA)", "all": "all parameters"}

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
    faster = {"faster": {"head": HEAD_FASTER[trained]}} if trained in HEAD_FASTER else {}

    def make(epsilon: float, rate: float) -> dict[str, Any]:
        del epsilon  # the same rate at every one
        return {
            "task": "imdb-pretrained",
            "task_options": {"trained": trained, "length": LENGTH, "test": TESTED} | task_options,
            "method": "combination",
            "options": {"before": before or {}, "after": after | faster, "learning_rate": rate, "decay_to": 0.0},
            "l2_clip_norm": clip,
            "delta": DELTA,
            "noise": noise,
        } | (COMPUTE_OF_HEAD if trained == "head" else COMPUTE)

    return Contest(f"MiniLM on IMDB, {TRAINED[trained]}", label, EPSILONS, rates, make)


def contests() -> list[Contest]:
    """Every row, in three tables: by what is trained."""
    adapters = functools.partial(_contest, "lora")
    return [
        _contest("head", "DP-SGD, momentum", by_factor(1.0), _SGD),
        _contest("head", "DP-Adam", by_factor(0.01), _ADAM),
        _contest("head", "DP-AdamBC", by_factor(0.01), _BC),
        adapters("DP-SGD, momentum", [0.2], _SGD),
        adapters("DP-SGD, momentum, correlated noise", [0.2], _SGD, noise=_CORRELATED),
        adapters("DP-Adam", [2e-3], _ADAM),
        adapters("DP-Adam, layerwise clip", [2e-3], _ADAM, clip={"layerwise": 1.0}),
        adapters("DP-Adam, bfloat16", [2e-3], _ADAM, dtype="bfloat16"),
        adapters("DP-AdamBC", [1e-3], _BC),
        adapters("DP2, momentum", [0.01], _SGD, before=_DELAYED),
        adapters("diagonal from 64 public reviews", [0.01], _SGD, before={"kind": "public"}, **_PUBLIC),
        _contest("all", "DP-SGD, momentum", [0.1], _SGD),
        _contest("all", "DP-Adam", [2e-4], _ADAM),
        _contest("all", "DP-Adam, layerwise clip", [2e-4], _ADAM, clip={"layerwise": 1.0}),
    ]
