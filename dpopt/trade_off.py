"""Bounds on how well an attacker can guess whether one record was in the data.

The guess is a test between two neighbouring data sets. Every (epsilon, delta) of a run bounds its error rates, and all
of them together give the trade-off function (Dong, Roth and Su 2022).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dpopt import accounting, events
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.composition import bounds, step_events

_POINTS = 400


def true_positive_rates(
    event: dp_accounting.DpEvent,
    false_positive_rates: Sequence[float] | npt.NDArray[np.floating],
    *,
    accountant: accounting.Accountant = "pld",
) -> npt.NDArray[np.float64]:
    r"""Upper bounds on the true positive rate of any test with a given false positive rate.

    With :math:`\delta(\epsilon)` of the run, for every epsilon
    :math:`\mathrm{TPR} \le \min(e^\epsilon \mathrm{FPR} + \delta, 1 - e^{-\epsilon} (1 - \delta - \mathrm{FPR}))`.

    Args:
        event: the event of the run: of a ledger or a plan, or from `dpopt.privacy_event`.
        false_positive_rates: ``(n,)``, between 0 and 1.
        accountant: see `dpopt.epsilon`.

    Returns:
        ``(n,)``: bounds that hold whatever the attacker knows about the other records, the model and the method.

    Raises:
        ValueError: if a rate is not a probability, or there is no bound for this kind of event.

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
    bounds_of_each = np.minimum(rates[:, None] * gains + deltas, 1 - (1 - deltas - rates[:, None]) / gains)
    return np.clip(bounds_of_each.min(axis=1), rates, 1.0)


def _deltas(
    steps: step_events.Steps, epsilons: npt.NDArray[np.float64], accountant: accounting.Accountant
) -> npt.NDArray[np.float64]:
    alone = events.renyi_alone(steps)
    if alone is not None and accountant == "pld":
        raise ValueError(f"{alone} has only an RDP bound: pass accountant='rdp'.")
    relation = events.relation_of(steps)
    steps = step_events.rounded(steps)
    bound = bounds.renyi(steps, relation)(1e-5)
    if accountant == "rdp" or bound == np.inf:
        return bounds.renyi_deltas(steps, epsilons, relation)
    return bounds.privacy_loss_deltas(steps, epsilons, bound)
