"""What was spent earlier, and the number of steps that a budget covers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from dpopt import accounting, events
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.ledger import Ledger

if TYPE_CHECKING:
    from dpopt.run.plan import Budget, Plan
    from dpopt.run.results import TrainResult
    from dpopt.tuning.selection import Selection


def steps_within(
    plan: Plan,
    budget: Budget | None,
    *,
    ledger: Ledger | None = None,
    start: int = 0,
    origin: int | None = None,
    most: int = 2**20,
) -> int:
    """The number of further steps of a plan that a budget covers, beyond what a ledger holds.

    Args:
        plan: a `dpopt.run.plan.Plan`.
        budget: None for the plan's own number of steps.
        ledger: what is already spent; None for nothing.
        start: number of the first step, for plans whose cost depends on the step.
        origin: first step of the run's segment, for batches from parts of the data and correlated noise; by default
            ``start``.
        most: the largest number returned.

    Raises:
        ValueError, TypeError: for a number out of range.

    *Privacy*: arithmetic on public constants.

    >>> import jax, optax, dpopt
    >>> plan = dpopt.Builder(num_examples=100, expected_batch_size=10, steps=20, key=jax.random.key(0)).clip(1.0).noise(
    ...     1.0).then(optax.sgd(0.1)).build()
    >>> n = steps_within(plan, dpopt.Budget(3.0, 1e-5))
    >>> plan.epsilon(n, delta=1e-5) <= 3.0 < plan.epsilon(n + 1, delta=1e-5)
    True
    """
    validate.non_negative_int(start=start, most=most)
    ledger = Ledger() if ledger is None else ledger
    if budget is None:
        return max(0, min(most, plan.steps - ledger.steps))

    budget = budget.replacing(plan.budget)
    if budget != plan.budget:  # the plan's own was checked when it was set
        validate.small_delta(budget.delta, plan.sampler.num_examples)
    spent = events.following(budget.earlier, ledger.event)
    more = events.composer(plan.optimizer.privacy, plan.sampler.scheme, start, start if origin is None else origin)
    return accounting.steps_affordable(
        lambda steps: dp_accounting.ComposedDpEvent([spent, more(steps)]),
        epsilon=budget.epsilon,
        delta=budget.delta,
        accountant=budget.accountant,
        most=most,
    )


def spent_by(earlier: dp_accounting.DpEvent | TrainResult | Selection | None, unit: str) -> Any:
    """What was spent earlier on records of this unit: an event, or that of the result of a run or a search.

    Raises:
        ValueError: if the result is about other records.

    *Privacy*: arithmetic on public constants.

    >>> spent_by(None, "example") is None
    True
    """
    if not hasattr(earlier, "ledger"):
        return earlier  # an event, which the caller checks
    spent = cast("TrainResult | Selection", earlier)
    if spent.unit != unit:
        raise ValueError(
            f"earlier is a run whose records are {spent.unit}s, and these are {unit}s: what one of the former costs is "
            "not what one of the latter costs."
        )
    return events.following(spent.earlier, spent.ledger.event)
