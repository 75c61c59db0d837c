"""What epsilon and delta mean for an attacker who guesses whether one record was in the data.

His guess is a test between two neighbouring data sets, and every (epsilon, delta) that a run satisfies bounds how often
it can be right. All of them together are the trade-off function (Dong, Roth and Su 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from dpopt import accounting, events
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.composition import bounds, step_events
from dpopt.privacy import Relation

_POINTS = 400


def true_positive_rates(
    event: dp_accounting.DpEvent,
    false_positive_rates: Sequence[float] | np.ndarray,
    *,
    accountant: accounting.Accountant = "pld",
) -> np.ndarray:
    r"""The most that any test can detect, which is wrong about absent records no more often than a given rate.

    With :math:`\delta(\epsilon)` of the run, at every epsilon
    :math:`\mathrm{TPR} \le \min(e^\epsilon \mathrm{FPR} + \delta, 1 - e^{-\epsilon} (1 - \delta - \mathrm{FPR}))`.

    Args:
        event: what the run cost: a ledger's ``event``, a plan's, or what `dpopt.privacy_event` returns.
        false_positive_rates: ``(n,)``, between 0 and 1.
        accountant: see `dpopt.epsilon`.

    Returns:
        ``(n,)`` float64: upper bounds, for whatever the attacker knows of the other records, the model and the method.

    Raises:
        ValueError: if a rate is no probability, or for an event that no accountant takes.

    *Privacy*: arithmetic on public constants.

    >>> rates = true_positive_rates(dp_accounting.GaussianDpEvent(2.0), [0.01, 0.5])
    >>> [round(rate, 2) for rate in rates.tolist()]
    [0.03, 0.69]
    """
    rates = np.asarray(false_positive_rates, np.float64)
    if rates.ndim != 1 or not np.all((rates >= 0) & (rates <= 1)):
        raise ValueError(f"false_positive_rates must be a list of numbers between 0 and 1; got {false_positive_rates}.")
    validate.one_of(("pld", "rdp"), accountant=accountant)
    events.check(event)
    highest = accounting.epsilon_of_event(event, delta=1e-9, accountant=accountant)
    if not 0 < highest < 700:
        return rates.copy() if highest == 0 else np.ones_like(rates)
    epsilons = np.linspace(0, highest, _POINTS)
    ways = [steps for steps in events.flattened_both_ways(event) if steps]
    deltas = np.max([_deltas(steps, epsilons, accountant) for steps in ways], axis=0)
    gains = np.exp(epsilons)
    highest = np.minimum(
        rates[:, None] * gains + deltas,
        1 - (1 - deltas - rates[:, None]) / gains,
    )
    return np.clip(highest.min(axis=1), rates, 1.0)


def _deltas(steps: Any, epsilons: np.ndarray, accountant: str) -> np.ndarray:
    alone = events.renyi_alone(steps)
    if alone is not None and accountant == "pld":
        raise ValueError(f"{alone} has an RDP bound only: pass accountant='rdp'.")
    relation = Relation.REPLACE_ONE if events.is_replace_one(steps) else Relation.ADD_OR_REMOVE_ONE
    steps = step_events.rounded(steps)
    bound = bounds.renyi(steps, relation)(1e-5)
    if accountant == "rdp" or bound == np.inf:
        return bounds.renyi_deltas(steps, epsilons, relation)
    return cast(np.ndarray, bounds.privacy_loss_deltas(steps, epsilons, bound))
